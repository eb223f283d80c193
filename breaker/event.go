package breaker

import (
	"context"
	"time"

	"github.com/go-resilience/resilience/internal/notify"
)

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
	// Err is what opened the breaker, the error of a call or the reason of Trip or ForceOpen,
	// or the [*OpenError] of a refusal, or nil.
	Err error

	From, To State         // of EventChanged
	OpenFor  time.Duration // of EventChanged to Open: how long calls are refused from At on
	Reason   Reason        // of EventRefused
}

// Level is 4, slog's Warn, for a refusal and an opening, and -4, Debug, otherwise.
func (e Event) Level() int {
	if e.Kind == EventRefused || e.To == Open || e.To == ForcedOpen {
		return 4
	}
	return -4
}

// Fields calls yield with each detail.
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

// Observe calls f with each event from now on, until stop is called: on the goroutine that uses
// the breaker, and without a lock. A panic in f passes on to the caller.
//
// Changes of state are told one at a time and in order: From is always the To before. ctx is
// that of the call that caused the change, or of another at the same time, without its end; of a
// change that no call caused it is context.Background.
func (b *Breaker) Observe(f func(context.Context, Event)) (stop func()) {
	b.observing.CompareAndSwap(nil, new(audience))
	return b.observing.Load().observers.Observe(f)
}

type audience struct {
	observers notify.Observers[Event]
	changes   notify.Queue[Event] // that wait to be told
}

// ObserveAny is Observe for whoever does not know Event.
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
