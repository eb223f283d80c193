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
	EventRefused     EventKind = "refused"      // Do or Wait has refused a call
	EventWaited      EventKind = "waited"       // a call was admitted after a wait for its tokens
	EventOutageBegan EventKind = "outage began" // Redis no longer answers a Shared, for the hash slot of a key
	EventRecovered   EventKind = "recovered"    // Redis answers again, for the hash slot of a key
)

// An Event is what an observer is told.
type Event struct {
	Kind EventKind
	Name string // of the Limiter, Group, Shared or Adaptive
	Key  string // of the member of a Group or the limit of a Shared, as in LimitedError

	// Of EventRefused and EventWaited.
	Level  int           // of the call; 0 is the most important
	Cost   int           // of the call, in tokens
	Waited time.Duration // how long the call waited

	Reason Reason // of EventRefused
	Err    error  // of EventRefused: the [*LimitedError]; of EventOutageBegan: the cause
}

// Observe calls f with each event of each key from now on, until stop is called, as
// [Limiter.Observe] does.
func (g *Group[K]) Observe(f func(context.Context, Event)) (stop func()) {
	return g.observers.Observe(f)
}

type observers = notify.Observers[Event]

// report tells the observers of a refused call.
func report(ctx context.Context, o *observers, e *LimitedError) {
	if o.Any() {
		o.Tell(ctx, Event{
			Kind: EventRefused, Name: e.Name, Key: e.Key,
			Level: e.Level, Cost: e.Cost, Waited: e.Waited, Reason: e.Reason, Err: e,
		})
	}
}
