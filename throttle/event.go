package throttle

import (
	"context"
	"time"

	"github.com/go-resilience/resilience/internal/notify"
)

// An EventKind says what an [Event] is.
type EventKind string

// The kinds.
const (
	Refused     EventKind = "refused"   // Do or Wait has refused a call
	Waited      EventKind = "waited"    // a call was admitted after a wait for its tokens
	OutageBegan EventKind = "outage"    // Redis no longer answers a Shared, for the hash slot of a key
	Recovered   EventKind = "recovered" // Redis answers again, for the hash slot of a key
	Evicted     EventKind = "evicted"   // a Group has forgotten a key
)

// An Event is what an observer is told.
type Event struct {
	Kind EventKind
	Name string // of the Limiter, Group, Shared or Adaptive
	Key  string // of the member of a Group or the limit of a Shared, as in LimitedError

	Reason Reason        // of Refused
	Err    error         // of Refused: the [*LimitedError]; of OutageBegan: the cause
	Waited time.Duration // of Waited, and of Refused after a wait: how long

	Spent   int64 // of Evicted: the tokens that the key has spent, less those given back
	Refused int64 // of Evicted: the calls of the key that were refused
}

// Observe calls f with each event from now on, until stop is called: synchronously, with
// the ctx of the call, and while no lock is held. The kinds are Refused, which comes
// after OnReject, and Waited, before the function of the call runs. Allow and Take cause
// no events, as their result tells all. A second call of stop does nothing.
func (l *Limiter) Observe(f func(context.Context, Event)) (stop func()) {
	return l.observers.Observe(f)
}

// Observe calls f with each event of each key from now on, until stop is called, as
// [Limiter.Observe] does. In addition there is Evicted, with the ctx that OnEvict gets.
func (g *Group[K]) Observe(f func(context.Context, Event)) (stop func()) {
	return g.observers.Observe(f)
}

// Observe calls f with each event from now on, until stop is called, as
// [Limiter.Observe] does. The kinds are Refused, OutageBegan and Recovered. An outage is
// that of a hash slot; Key is the key of the call that noticed it.
func (s *Shared) Observe(f func(context.Context, Event)) (stop func()) {
	return s.observers.Observe(f)
}

// Observe calls f with each event from now on, until stop is called, as
// [Limiter.Observe] does. The kind is Refused.
func (a *Adaptive) Observe(f func(context.Context, Event)) (stop func()) {
	return a.observers.Observe(f)
}

type observers = notify.Observers[Event]

// report tells the hook and the observers of a refused call.
func report(ctx context.Context, onReject func(context.Context, *LimitedError), o *observers, e *LimitedError, waited time.Duration) {
	if onReject != nil {
		onReject(ctx, e)
	}
	if o.Any() {
		o.Tell(ctx, Event{Kind: Refused, Name: e.Name, Key: e.Key, Reason: e.Reason, Err: e, Waited: waited})
	}
}
