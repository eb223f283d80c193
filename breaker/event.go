package breaker

import (
	"context"
	"time"

	"github.com/go-resilience/resilience/internal/notify"
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
	Name string // of the breaker
	At   time.Time
	// Err of EventChanged is what opened the breaker: the error of the last call, or the
	// reason given to Trip or ForceOpen. It is nil for the other changes. Err of
	// EventRefused is the [*OpenError].
	Err error

	From, To State         // of EventChanged
	OpenFor  time.Duration // of EventChanged to Open: how long calls are refused from At on
	Reason   Reason        // of EventRefused
}

// Level returns the level of the event as log/slog has it: 4, a warning, for a refusal and an
// opening, and -4 for the other changes.
func (e Event) Level() int {
	if e.Kind == EventRefused || e.To == Open || e.To == ForcedOpen {
		return 4
	}
	return -4
}

// Fields calls yield with each detail of the event.
func (e Event) Fields(yield func(name string, value any)) {
	yield("event", string(e.Kind))
	yield("name", e.Name)
	if e.Kind == EventRefused {
		yield("reason", string(e.Reason))
	} else {
		yield("from", string(e.From))
		yield("to", string(e.To))
	}
	if e.OpenFor > 0 {
		yield("for", e.OpenFor)
	}
	if e.Err != nil {
		yield("err", e.Err)
	}
}

// Observe calls f with each event from now on, until stop is called. f runs on a goroutine that
// uses the breaker, without a lock: it may use all methods of the breaker, it delays that
// goroutine, and its panic passes on to that goroutine's caller.
//
// Changes of state are told one at a time and in order: From is always the To before. ctx is
// that of the call that caused the change, without its end, or that of another call at the same
// time; of a change that no call caused it is context.Background. Refusals are told on the
// goroutine of their call. A second call of stop does nothing.
func (b *Breaker) Observe(f func(context.Context, Event)) (stop func()) {
	b.observing.CompareAndSwap(nil, new(audience))
	return b.observing.Load().observers.Observe(f)
}

type audience struct {
	observers notify.Observers[Event]
	changes   notify.Queue[Event] // that wait to be told
}

// ObserveAny is [Breaker.Observe] for a caller that does not know the type: f gets an [Event].
func (b *Breaker) ObserveAny(f func(context.Context, any)) (stop func()) {
	return b.Observe(func(ctx context.Context, e Event) { f(ctx, e) })
}

// deliver tells of the changes that wait, in order. If another goroutine is telling, or an
// observer further up the stack, that one goes on with these.
func (b *Breaker) deliver(ctx context.Context) {
	if a := b.observing.Load(); a != nil {
		a.changes.Deliver(ctx, func(ctx context.Context, e Event) { a.observers.Tell(context.WithoutCancel(ctx), e) })
	}
}
