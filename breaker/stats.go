package breaker

import (
	"context"
	"time"

	"github.com/go-resilience/resilience/internal/describe"
	"github.com/go-resilience/resilience/internal/notify"
)

// Kinds of events.
const (
	EventChanged = "changed" // the state has changed
	EventRefused = "refused" // a call was refused
)

// An Event is a change of state or a refused call.
type Event struct {
	Kind string
	Name string // of the breaker
	At   time.Time
	// Err is what opened the breaker, or the [*OpenError] of a refusal.
	Err error

	From, To State         // of EventChanged
	OpenFor  time.Duration // if To is Open
}

func (e Event) Level() int {
	if e.Kind == EventRefused || e.To == Open || e.To == ForcedOpen {
		return 4
	}
	return -4
}

func (e Event) Fields(yield func(name string, value any)) {
	yield("event", e.Kind)
	yield("name", e.Name)
	if e.Kind == EventRefused {
		if refusal, ok := e.Err.(*OpenError); ok {
			yield("reason", "circuit "+string(refusal.State))
		}
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

// Observe calls f with each event until stop is called, on the goroutine that uses the breaker and
// without a lock. Changes of state come one at a time and in order.
func (b *Breaker) Observe(f func(context.Context, Event)) (stop func()) {
	b.observing.CompareAndSwap(nil, new(audience))
	return b.observing.Load().Observe(f)
}

func (b *Breaker) ObserveAny(f func(context.Context, any)) (stop func()) {
	return b.Observe(func(ctx context.Context, e Event) { f(ctx, e) })
}

type audience struct {
	notify.Observers[Event]
	changes notify.Queue // of Events that wait to be told
}

// deliver tells of the changes that wait, in order. If another goroutine is telling, or an
// observer further up the stack, that one goes on with these.
func (b *Breaker) deliver(ctx context.Context) {
	if a := b.observing.Load(); a != nil {
		a.changes.Deliver(ctx, func(ctx context.Context, e any) { a.Tell(context.WithoutCancel(ctx), e.(Event)) })
	}
}

// Totals are counters since New.
type Totals struct {
	// Calls by result. One that breaks off is in Succeeded and in Failed.
	Succeeded int64
	Failed    int64
	Ignored   int64
	Refused   int64

	// Changes, by the new state.
	Opened     int64
	HalfOpened int64
	Closed     int64
	ForcedOpen int64
	Disabled   int64
}

// Stats are figures of a [Breaker].
type Stats struct {
	Totals
	State       State
	Window      Counts        // when calls last passed; FailedInARow counts failed probes, too
	FailureRate float64       // of the calls in the window; 0 if there are none
	OpensInARow int64         // without having been closed for a whole Window
	OpenLeft    time.Duration // 0 unless State is Open
	LastErr     error         // of the last failure, or the reason of an operator
}

func (b *Breaker) Stats() Stats {
	defer b.deliver(context.Background())
	return b.stats()
}

// stats tells nobody of the changes that time has brought about: the next use does.
func (b *Breaker) stats() Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.now()
	b.catchUp(now)
	s := Stats{
		Totals: Totals{
			b.calls[Success], b.calls[Failure], b.calls[Ignore], b.calls[refused],
			b.changes[Open], b.changes[HalfOpen], b.changes[Closed], b.changes[ForcedOpen], b.changes[Disabled],
		},
		State:       b.state,
		Window:      b.counts(now),
		OpensInARow: int64(b.opens),
		LastErr:     b.lastErr,
	}
	s.FailureRate = share(s.Window.Failed, s.Window.Succeeded)
	if b.state == Open {
		s.OpenLeft = b.openLeft(now)
	}
	return s
}

func (b *Breaker) Needed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	// Half-open without traffic may last forever.
	return b.forced() || b.state == Open && b.openLeft(b.now()) > 0
}

func (b *Breaker) Kind() string { return "breaker" }

func (b *Breaker) Figures() []describe.Figure {
	s := b.stats() // a Group that evicts b asks under its lock, for which an observer might wait
	all := []describe.Figure{
		describe.Count("breaker.calls{outcome=success}", s.Succeeded),
		describe.Count("breaker.calls{outcome=failure}", s.Failed),
		describe.Count("breaker.calls{outcome=ignored}", s.Ignored),
		describe.Count("breaker.calls{outcome=refused}", s.Refused),
		{Name: "breaker.failure_ratio", Value: s.FailureRate},
	}
	for _, state := range [...]struct {
		is      State
		label   string
		changes int64 // to it
	}{
		{Closed, "{state=closed}", s.Closed},
		{HalfOpen, "{state=half_open}", s.HalfOpened},
		{Open, "{state=open}", s.Opened},
		{ForcedOpen, "{state=forced_open}", s.ForcedOpen},
		{Disabled, "{state=disabled}", s.Disabled},
	} {
		in := describe.Figure{Name: "breaker.state" + state.label}
		if state.is == s.State {
			in.Value = 1
		}
		all = append(all, in, describe.Count("breaker.transitions"+state.label, state.changes))
	}
	return all
}

func (b *Breaker) Health() error {
	s := b.Stats()
	if s.State == Closed {
		return nil
	}
	refuses := s.State == Open || s.State == ForcedOpen
	return &describe.Ailment{State: string(s.State), Fails: refuses, Err: s.LastErr}
}
