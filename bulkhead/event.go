package bulkhead

import (
	"context"
	"time"

	"github.com/go-resilience/resilience/internal/keyed"
)

// An EventKind says what an [Event] is.
type EventKind string

const (
	EventLimitChanged EventKind = "limit changed" // the limit has changed
	EventWaited       EventKind = "waited"        // a call got its slots after a wait
	EventRefused      EventKind = "refused"       // a call was refused
)

// An Event is a change of the limit, or a call that waited or was refused.
type Event struct {
	Kind EventKind
	Name string // of the bulkhead or its Group
	Key  string // of a Group's bulkhead, as in FullError

	// Of EventWaited and EventRefused.
	Level  int
	Cost   int
	Share  string        // of the call, as in FullError
	Waited time.Duration // how long the call waited
	Reason Reason        // of EventRefused
	Err    error         // of EventRefused: the [*FullError]

	// Of EventLimitChanged.
	From, To int
	// Of EventLimitChanged by an adaptive limit; zero for a change from outside.
	Latency time.Duration // geometric mean of the last calls that were looked at
	Base    time.Duration // the same on an idle server; 0 means not known yet
	Probe   bool          // lowered for a few latencies, to learn Base
}

// Observe calls f with each event from now on, until stop is called: synchronously, and
// while no lock is held. The kinds are EventLimitChanged, one at a time and in order;
// EventWaited, on the goroutine of the call and before its function runs; and EventRefused, on
// the goroutine of the call. A panic in f passes on to the caller whose goroutine it is; no
// slot is lost. A second call of stop does nothing.
//
// ctx is that of the call. For a limit it is that of the call whose start or end changed it, or
// [context.Background] for an Update. If changes of the limit coincide, one may get the ctx of
// another.
func (b *Bulkhead) Observe(f func(context.Context, Event)) (stop func()) {
	return b.observers.Observe(f)
}

// Observe calls f with each event of each bulkhead of the group from now on, until stop
// is called, as [Bulkhead.Observe] does.
func (g *Group[K]) Observe(f func(context.Context, Event)) (stop func()) {
	return g.observers.Observe(f)
}

// announce tells of the changes of the limit that wait to be told, in order. No lock is
// held.
func (b *Bulkhead) announce(ctx context.Context) { b.changes.Deliver(ctx, b.observers.Tell) }

// tellWaited tells of a call that has its slots. If an observer panics, it gives them
// back.
func (b *Bulkhead) tellWaited(ctx context.Context, w *waiter, waited time.Duration) {
	if !b.observers.Any() {
		return
	}
	told := false
	defer func() {
		if !told {
			b.leave(w.slots())
		}
	}()
	b.observers.Tell(ctx, Event{
		Kind: EventWaited, Name: b.rules.Load().Name, Key: b.key,
		Level: w.level, Cost: w.cost, Share: keyed.Text(w.line.share.text()), Waited: waited,
	})
	told = true
}

func (e *FullError) event() Event {
	return Event{
		Kind: EventRefused, Name: e.Name, Key: e.Key,
		Level: e.Level, Cost: e.Cost, Share: e.Share, Waited: e.Waited, Reason: e.Reason, Err: e,
	}
}
