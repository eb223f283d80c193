package bulkhead

import (
	"context"
	"time"
)

// An EventKind says what an [Event] is.
type EventKind string

const (
	LimitChanged EventKind = "limit"   // the limit has changed
	Waited       EventKind = "waited"  // a call got its slots after a wait
	Refused      EventKind = "refused" // a call was refused
)

// An Event is what an observer is told.
type Event struct {
	Kind EventKind
	Name string // of the bulkhead or its Group
	Key  string // of a Group's bulkhead, as in FullError

	// Of Waited and Refused.
	Level  int
	Cost   int
	Waited time.Duration // how long the call waited
	Reason Reason        // of Refused
	Err    error         // of Refused: the [*FullError]

	// Of LimitChanged, as in LimitChange.
	From, To      int
	Latency, Base time.Duration
	Probe         bool
}

// A LimitChange reports that the limit of a bulkhead has changed. Latency, Base and
// Probe are those of an adaptive limit, and zero for a change from outside.
type LimitChange struct {
	Name     string // of the bulkhead or its Group
	Key      string // of a Group's bulkhead, as in FullError
	From, To int

	Latency time.Duration // geometric mean of the last calls that were looked at
	Base    time.Duration // the same on an idle server; 0 means not known yet
	Probe   bool          // lowered for a few latencies, to learn Base
}

// Observe calls f with each event from now on, until stop is called: synchronously, and
// while no lock is held. The kinds are LimitChanged, one at a time and in order, each
// after [Config].OnLimit; Waited, on the goroutine of the call and before its function
// runs; and Refused, on the goroutine of the call and after OnReject. A second call of
// stop does nothing.
func (b *Bulkhead) Observe(f func(context.Context, Event)) (stop func()) {
	return b.observers.Observe(f)
}

// Observe calls f with each event of each bulkhead of the group from now on, until stop
// is called, as [Bulkhead.Observe] does. In addition there are the calls that are refused
// for their key.
func (g *Group[K]) Observe(f func(context.Context, Event)) (stop func()) {
	return g.observers.Observe(f)
}

// announce tells of the changes of the limit that wait to be told, in order. No lock is
// held.
func (b *Bulkhead) announce(ctx context.Context) { b.changes.Deliver(ctx, b.tellChange) }

func (b *Bulkhead) tellChange(ctx context.Context, c LimitChange) {
	if f := b.rules.Load().OnLimit; f != nil {
		f(ctx, c)
	}
	if b.observers.Any() {
		b.observers.Tell(ctx, Event{
			Kind: LimitChanged, Name: c.Name, Key: c.Key,
			From: c.From, To: c.To, Latency: c.Latency, Base: c.Base, Probe: c.Probe,
		})
	}
}

// tellWaited tells of a call that has its slots. If an observer panics, it gives them
// back.
func (b *Bulkhead) tellWaited(ctx context.Context, w *waiter, waited time.Duration) {
	if !b.observers.Any() {
		return
	}
	told := false
	defer func() {
		if !told {
			b.leave(w.cost)
		}
	}()
	b.observers.Tell(ctx, Event{
		Kind: Waited, Name: b.rules.Load().Name, Key: b.key, Level: w.level, Cost: w.cost, Waited: waited,
	})
	told = true
}

func (e *FullError) event() Event {
	return Event{
		Kind: Refused, Name: e.Name, Key: e.Key,
		Level: e.Level, Cost: e.Cost, Waited: e.Waited, Reason: e.Reason, Err: e,
	}
}
