// Package notify delivers the events of a policy to its observers. It holds no lock while it calls an
// observer.
package notify

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
)

// Observers are the functions that observe a policy. The zero value has no functions. Observers are safe for
// concurrent use and must not be copied.
type Observers[E any] struct {
	mu   sync.Mutex
	list atomic.Pointer[[]observer[E]] // nil if there are no observers
}

type observer[E any] = *func(context.Context, E)

// Observe adds f to the observers. stop removes f, but does not end a call to f that is in progress. Only the first
// call to stop has an effect.
func (o *Observers[E]) Observe(f func(context.Context, E)) (stop func()) {
	o.change(func(list []observer[E]) []observer[E] { return append(list, &f) })
	return func() {
		o.change(func(list []observer[E]) []observer[E] {
			return slices.DeleteFunc(list, func(other observer[E]) bool { return other == &f })
		})
	}
}

func (o *Observers[E]) change(f func([]observer[E]) []observer[E]) {
	o.mu.Lock()
	defer o.mu.Unlock()
	var list []observer[E]
	if now := o.list.Load(); now != nil {
		list = slices.Clone(*now)
	}
	if list = f(list); len(list) == 0 {
		o.list.Store(nil)
	} else {
		o.list.Store(&list)
	}
}

// Any reports whether there is an observer. Without an observer, a policy need not create events.
func (o *Observers[E]) Any() bool { return o.list.Load() != nil }

// Tell calls each observer with e, in the order in which the observers were added.
func (o *Observers[E]) Tell(ctx context.Context, e E) {
	if list := o.list.Load(); list != nil {
		for _, f := range *list {
			(*f)(ctx, e)
		}
	}
}

// A Queue delivers events one at a time, in the order in which they were added. A policy adds events while it holds
// its lock, and delivers them without the lock. The zero value is ready to use.
type Queue struct {
	waiting    atomic.Bool
	mu         sync.Mutex
	events     []queued
	delivering bool
}

type queued struct {
	ctx   context.Context
	event any
}

// Add appends e, which is delivered with the ctx of the next call to Deliver.
func (q *Queue) Add(e any) { q.add(queued{nil, e}) }

// AddUnder appends e, which is delivered with ctx.
func (q *Queue) AddUnder(ctx context.Context, e any) { q.add(queued{ctx, e}) }

func (q *Queue) add(e queued) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.events = append(q.events, e)
	q.waiting.Store(true)
}

// Deliver calls tell for each queued event. The caller must hold no lock. If a call to Deliver is already in
// progress, on another goroutine or further up the stack, that call also delivers these events. If tell panics, the
// remaining events stay queued until the next call to Deliver.
func (q *Queue) Deliver(ctx context.Context, tell func(context.Context, any)) {
	if q.waiting.Load() {
		q.deliver(ctx, tell)
	}
}

func (q *Queue) deliver(ctx context.Context, tell func(context.Context, any)) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := range q.events {
		if q.events[i].ctx == nil {
			q.events[i].ctx = ctx
		}
	}
	if q.delivering {
		return
	}
	q.delivering = true
	defer func() { // deferred because tell may panic
		q.delivering = false
		q.waiting.Store(len(q.events) > 0)
	}()
	for len(q.events) > 0 {
		e := q.events[0]
		q.events = q.events[1:]
		if e.ctx == nil { // added during this loop, by a goroutine that has not called Deliver yet
			e.ctx = ctx
		}
		func() { // calls tell without the lock
			q.mu.Unlock()
			defer q.mu.Lock()
			tell(e.ctx, e.event)
		}()
	}
	q.events = nil
}
