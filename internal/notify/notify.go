// Package notify tells hooks and observers of the events of a policy. It never
// holds a lock while it calls one.
package notify

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
)

// Observers are the functions that Observe added. The zero value is ready to use.
// Observers are safe for concurrent use and are not copied.
type Observers[E any] struct {
	mu    sync.Mutex
	list  atomic.Pointer[[]*func(context.Context, E)]
	group *Observers[E]
}

// In has the observers of a group told of the same events. It is called before the
// first Tell.
func (o *Observers[E]) In(group *Observers[E]) { o.group = group }

// Observe adds f. stop removes it; a call of f that is under way goes on. A second
// call of stop does nothing.
func (o *Observers[E]) Observe(f func(context.Context, E)) (stop func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	added := &f
	list := append(o.observers(), added)
	o.list.Store(&list)
	return func() { o.remove(added) }
}

func (o *Observers[E]) remove(f *func(context.Context, E)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	list := slices.DeleteFunc(o.observers(), func(g *func(context.Context, E)) bool { return g == f })
	if len(list) == 0 {
		o.list.Store(nil)
		return
	}
	o.list.Store(&list)
}

// observers returns a copy of the list.
func (o *Observers[E]) observers() []*func(context.Context, E) {
	if list := o.list.Load(); list != nil {
		return slices.Clone(*list)
	}
	return nil
}

// Any reports whether there is an observer. It spares a policy without one the
// making of an event.
func (o *Observers[E]) Any() bool {
	return o.list.Load() != nil || o.group != nil && o.group.list.Load() != nil
}

// Tell calls the observers with e, in the order in which they were added; those of
// the group come last.
func (o *Observers[E]) Tell(ctx context.Context, e E) {
	if list := o.list.Load(); list != nil {
		for _, f := range *list {
			(*f)(ctx, e)
		}
	}
	if o.group != nil {
		o.group.Tell(ctx, e)
	}
}

// A Queue hands events over in the order of Add, one at a time, although they are
// added under the lock of a policy and handed over without it. The zero value is
// ready to use.
type Queue[E any] struct {
	waiting    atomic.Bool
	mu         sync.Mutex
	events     []queued[E]
	delivering bool
}

type queued[E any] struct {
	ctx   context.Context
	event E
}

// Add appends e, which is told with the ctx of the next caller of Deliver.
func (q *Queue[E]) Add(e E) { q.add(queued[E]{event: e}) }

// AddUnder appends e, which is told with ctx.
func (q *Queue[E]) AddUnder(ctx context.Context, e E) { q.add(queued[E]{ctx, e}) }

func (q *Queue[E]) add(e queued[E]) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.events = append(q.events, e)
	q.waiting.Store(true)
}

// Deliver calls tell for each event that waits. The caller holds no lock. If another
// goroutine is delivering, or a function further up the stack, that one goes on with
// these. If tell panics, the events behind it wait for the next Deliver.
func (q *Queue[E]) Deliver(ctx context.Context, tell func(context.Context, E)) {
	if q.waiting.Load() {
		q.deliver(ctx, tell)
	}
}

func (q *Queue[E]) deliver(ctx context.Context, tell func(context.Context, E)) {
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
		q.unlocked(e, tell)
	}
	q.events = nil
}

// unlocked calls tell without the lock that its caller holds.
func (q *Queue[E]) unlocked(e queued[E], tell func(context.Context, E)) {
	q.mu.Unlock()
	defer q.mu.Lock()
	tell(e.ctx, e.event)
}
