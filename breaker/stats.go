package breaker

import (
	"context"
	"time"

	"github.com/go-resilience/resilience/internal/notify"
)

// An EventKind is the kind of an [Event].
type EventKind string

const (
	EventChanged EventKind = "changed" // the state has changed
	EventRefused EventKind = "refused" // a call was refused
)

// An Event is a change of state or a refused call.
type Event struct {
	Kind EventKind
	Name string    // the breaker's name
	At   time.Time // the time of the event
	// Err is the [*OpenError] of a refused call. If the event is an opening, Err is the error of the last failure, or
	// the reason that an operator gave.
	Err error

	From, To State         // the old and the new state; empty unless Kind is EventChanged
	OpenFor  time.Duration // the open time; 0 unless To is Open
}

// Observe calls f with each event until stop is called. f runs on the goroutine of a caller that uses the breaker.
// The breaker holds no lock while f runs. Changes of state are delivered one at a time and in order.
func (b *Breaker) Observe(f func(context.Context, Event)) (stop func()) {
	b.observing.CompareAndSwap(nil, new(observerSet))
	return b.observing.Load().Observe(f)
}

type observerSet struct {
	notify.Observers[Event]
	transitions notify.Queue // the changes of state that the observers have not received
}

// notify delivers the queued changes of state in order. If another call to notify is already delivering changes, that
// call also delivers the new ones. The other call may be on another goroutine, or it may be the caller of an observer
// that called notify.
func (b *Breaker) notify(ctx context.Context) {
	if o := b.observing.Load(); o != nil {
		o.transitions.Deliver(ctx, func(ctx context.Context, e any) { o.Tell(context.WithoutCancel(ctx), e.(Event)) })
	}
}

// Stats are the metrics of a [Breaker].
type Stats struct {
	State State `gauge:"state{state=closed|half_open|open|forced_open|disabled}"`

	// Succeeded, Failed, Ignored and Refused are the numbers of calls since New, by result. If a call succeeds and its
	// stream then breaks, the call is counted twice, as succeeded and as failed.
	Succeeded int64 `counter:"calls{outcome=success}"`
	Failed    int64 `counter:"calls{outcome=failure}"`
	Ignored   int64 `counter:"calls{outcome=ignored}"`
	Refused   int64 `counter:"calls{outcome=refused}"`

	// Transitions is the number of changes to each state since New. The map contains every state.
	Transitions map[State]int64 `counter:"transitions{state=*}"`

	// Window holds the counts of the window. No result expires while the breaker is open, half-open or forced open.
	// Window.ConsecutiveFailures also counts failed probes.
	Window           Counts
	FailureRate      float64       `gauge:"failure_ratio"` // fraction of failed calls in Window; 0 if Window has no calls
	ConsecutiveOpens int           // number of openings since the breaker was last closed for a whole Window, or reset
	OpenLeft         time.Duration // the remaining open time; 0 unless State is Open
	LastErr          error         // the error of the last failure, or the reason that an operator gave
}

// Stats returns the current metrics.
func (b *Breaker) Stats() Stats {
	defer b.notify(context.Background())
	return b.stats()
}

// stats is like Stats, but does not notify the observers of changes of state. The next use of the breaker notifies
// them.
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
