package breaker

import (
	"context"
	"time"
)

// A Change is a change of a breaker's state.
type Change struct {
	Name     string // of the breaker, or of its group
	Key      string // of the breaker in its group
	From, To State
	At       time.Time
	// Err is what opened the breaker: the error of the last call, or the reason given to
	// Trip or ForceOpen. It is nil for the other changes.
	Err error
	// OpenFor is how long calls are refused from At on, if To is Open.
	OpenFor time.Duration
}

// An EventKind says what an [Event] is.
type EventKind string

const (
	Changed EventKind = "changed" // the state has changed
	Refused EventKind = "refused" // a call was refused
)

// An Event is a change of state or a refused call.
type Event struct {
	Kind EventKind
	Name string // of the breaker, or of its group
	Key  string // of the breaker in its group
	// From and To are the states of a change. For a refusal both are its State.
	From, To State
	At       time.Time
	// Err is the Err of a [Change], or the [*OpenError] of a refusal.
	Err error
	// OpenFor is how long calls are refused from At on, if the breaker has opened.
	OpenFor time.Duration
}

// Observe calls f for each event until stop is called. A second call of stop does nothing.
// f is called after the hook for the event, and in the same way: for changes as
// [Config].OnChange is, one call at a time and in order, and for refusals as OnReject is.
func (b *Breaker) Observe(f func(context.Context, Event)) (stop func()) {
	return b.observers.Observe(f)
}

// Observe calls f for each event of each breaker of the group, as [Breaker.Observe] does,
// and for each refusal of a new key.
func (g *Group[K]) Observe(f func(context.Context, Event)) (stop func()) {
	return g.observers.Observe(f)
}

// deliver tells of the changes that wait, in order. If another goroutine is telling, or a
// hook further up the stack, that one goes on with these.
func (b *Breaker) deliver(ctx context.Context) { b.changes.Deliver(ctx, b.tell) }

func (b *Breaker) tell(ctx context.Context, c Change) {
	if f := b.phase.Load().rules.OnChange; f != nil {
		f(ctx, c)
	}
	if b.observers.Any() {
		b.observers.Tell(ctx, Event{
			Kind: Changed, Name: c.Name, Key: c.Key, From: c.From, To: c.To, At: c.At, Err: c.Err, OpenFor: c.OpenFor,
		})
	}
}
