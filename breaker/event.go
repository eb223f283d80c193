package breaker

import (
	"context"
	"time"
)

// An EventKind says what an [Event] is.
type EventKind string

const (
	EventChanged EventKind = "changed" // the state has changed
	EventRefused EventKind = "refused" // a call was refused
)

// An Event is a change of state or a refused call.
type Event struct {
	Kind EventKind
	Name string // of the breaker or its Group
	Key  string // of a Group's breaker, as in OpenError
	At   time.Time
	// Err of EventChanged is what opened the breaker: the error of the last call, or the
	// reason given to Trip or ForceOpen. It is nil for the other changes. Err of
	// EventRefused is the [*OpenError].
	Err error

	From, To State         // of EventChanged
	OpenFor  time.Duration // of EventChanged to Open: how long calls are refused from At on
	Reason   Reason        // of EventRefused
}

// Observe calls f with each event from now on, until stop is called: synchronously, and
// while no lock is held. The kinds are EventChanged, one at a time and in order, each after
// [Config].OnChange; and EventRefused, on the goroutine of the call. A panic
// in f passes on to the caller whose goroutine it is; on the goroutine of a Ping it goes
// to [Config].OnPanic. A second call of stop does nothing.
func (b *Breaker) Observe(f func(context.Context, Event)) (stop func()) {
	return b.observers.Observe(f)
}

// Observe calls f with each event of each breaker of the group from now on, until stop is
// called, as [Breaker.Observe] does.
func (g *Group[K]) Observe(f func(context.Context, Event)) (stop func()) {
	return g.observers.Observe(f)
}

// deliver tells of the changes that wait, in order. If another goroutine is telling, or a
// hook further up the stack, that one goes on with these.
func (b *Breaker) deliver(ctx context.Context) { b.changes.Deliver(ctx, b.tell) }

// deliverAlone is deliver for the goroutine that pings.
func (b *Breaker) deliverAlone() {
	b.changes.Deliver(context.Background(), func(ctx context.Context, e Event) {
		defer b.panics.Survive(ctx, "breaker: a hook", b.phase.Load().cfg.OnPanic)
		b.tell(ctx, e)
	})
}

func (b *Breaker) tell(ctx context.Context, e Event) {
	if f := b.phase.Load().cfg.OnChange; f != nil {
		f(ctx, e)
	}
	if b.observers.Any() {
		b.observers.Tell(ctx, e)
	}
}
