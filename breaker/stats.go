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
	Err  error // the failure or the operator's reason that opened the breaker, or the [*OpenError] of a refusal

	From, To State         // of EventChanged
	OpenFor  time.Duration // if To is Open
}

// Observe calls f with each event until stop is called, on the goroutine that uses the breaker and without
// holding a lock. Changes of state are delivered one at a time and in order.
func (b *Breaker) Observe(f func(context.Context, Event)) (stop func()) {
	b.observing.CompareAndSwap(nil, new(observerSet))
	return b.observing.Load().Observe(f)
}

type observerSet struct {
	notify.Observers[Event]
	transitions notify.Queue // Events not yet delivered
}

// notify delivers the queued transitions in order. If another goroutine, or an observer further up
// the stack, is already delivering, it delivers these as well.
func (b *Breaker) notify(ctx context.Context) {
	if o := b.observing.Load(); o != nil {
		o.transitions.Deliver(ctx, func(ctx context.Context, e any) { o.Tell(context.WithoutCancel(ctx), e.(Event)) })
	}
}

// Stats are the metrics of a [Breaker].
type Stats struct {
	State State `gauge:"state{state=closed|half_open|open|forced_open|disabled}"`

	// Calls since New. One that succeeds and then breaks off is counted twice.
	Succeeded int64 `counter:"calls{outcome=success}"`
	Failed    int64 `counter:"calls{outcome=failure}"`
	Ignored   int64 `counter:"calls{outcome=ignored}"`
	Refused   int64 `counter:"calls{outcome=refused}"`

	// Transitions counts changes of state since New, by the new state. It has every state.
	Transitions map[State]int64 `counter:"transitions{state=*}"`

	// Window has the counts when a call was last admitted. Its ConsecutiveFailures includes failed probes.
	Window           Counts
	FailureRate      float64       `gauge:"failure_ratio"` // fraction of failed calls in Window; 0 if it is empty
	ConsecutiveOpens int           // openings since the breaker was last closed for a whole Config.Window
	OpenLeft         time.Duration // the rest of the open time; 0 unless State is Open
	LastErr          error         // the last failure, or the reason that an operator gave
}

// Stats returns the current metrics.
func (b *Breaker) Stats() Stats {
	defer b.notify(context.Background())
	return b.stats()
}

// stats is Stats without notifying the observers of transitions that are due; the next use does.
func (b *Breaker) stats() Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.now()
	b.advance(now)
	s := Stats{
		State:            b.state,
		Succeeded:        b.results[Success],
		Failed:           b.results[Failure],
		Ignored:          b.results[Ignore],
		Refused:          b.results[refused],
		Transitions:      make(map[State]int64, 5),
		Window:           b.counts(now),
		ConsecutiveOpens: b.consecOpens,
		LastErr:          b.lastErr,
	}
	for _, to := range [...]State{Closed, HalfOpen, Open, ForcedOpen, Disabled} {
		s.Transitions[to] = b.transitions[to]
	}
	s.FailureRate = failureRate(s.Window.Failed, s.Window.Succeeded)
	if b.state == Open {
		s.OpenLeft = b.openLeft(now)
	}
	return s
}
