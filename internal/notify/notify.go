// Package notify tells observers of the events of a policy. It never holds a lock while it
// calls one.
package notify

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
)

// Observers are the functions that Observe added. The zero value is ready to use. Observers are
// safe for concurrent use and are not copied.
type Observers[E any] struct {
	mu   sync.Mutex
	list atomic.Pointer[[]observer[E]] // nil if there are none
}

type observer[E any] = *func(context.Context, E)

// Observe adds f. stop removes it; a call of f that is under way goes on. A second call of stop
// does nothing.
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

// Any reports whether there is an observer. It spares a policy without one the making of an
// event.
func (o *Observers[E]) Any() bool { return o.list.Load() != nil }

// Tell calls the observers with e, in the order in which they were added.
func (o *Observers[E]) Tell(ctx context.Context, e E) {
	if list := o.list.Load(); list != nil {
		for _, f := range *list {
			(*f)(ctx, e)
		}
	}
}

// A Queue hands events over in the order of Add, one at a time, although they are added under
// the lock of a policy and handed over without it. The zero value is ready to use.
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

// Add appends e, which is told with the ctx of the next caller of Deliver.
func (q *Queue) Add(e any) { q.add(queued{nil, e}) }

// AddUnder appends e, which is told with ctx.
func (q *Queue) AddUnder(ctx context.Context, e any) { q.add(queued{ctx, e}) }

func (q *Queue) add(e queued) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.events = append(q.events, e)
	q.waiting.Store(true)
}

// Deliver calls tell for each event that waits. The caller holds no lock. If another goroutine
// is delivering, or a function further up the stack, that one goes on with these. If tell
// panics, the events behind it wait for the next Deliver.
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
	defer func() { // also when tell panics
		q.delivering = false
		q.waiting.Store(len(q.events) > 0)
	}()
	for len(q.events) > 0 {
		e := q.events[0]
		q.events = q.events[1:]
		if e.ctx == nil { // it was added meanwhile, and whoever added it has not come to Deliver yet
			e.ctx = ctx
		}
		func() { // without the lock
			q.mu.Unlock()
			defer q.mu.Lock()
			tell(e.ctx, e.event)
		}()
	}
	q.events = nil
}
