package hedge

import (
	"context"
	"time"

	"github.com/go-resilience/resilience/internal/describe"
)

// Observe calls f with each event from now on, until stop is called: synchronously, with the
// ctx of Do, and while no lock is held. An [EventHedged] or [EventOverBudget] comes on the
// goroutine of the second call. A panic in f passes on to the caller of Do, as a panic of the
// call does. A second call of stop does nothing.
func (h *Hedger[T]) Observe(f func(context.Context, Event)) (stop func()) {
	return h.observers.Observe(f)
}

// An Event is something that happened to a [Hedger].
type Event struct {
	Kind EventKind
	Name string // of the Hedger
}

// An EventKind says what an [Event] is.
type EventKind string

const (
	// EventHedged is an event before each second call.
	EventHedged EventKind = "hedged"
	// EventOverBudget is an event for each second call that Ratio did not allow.
	EventOverBudget EventKind = "over budget"
)

// Level is 4, slog's Warn, for a second call that Ratio did not allow, and -4, Debug, for one
// that is made.
func (e Event) Level() int {
	if e.Kind == EventOverBudget {
		return 4
	}
	return -4
}

// Fields calls yield with what happened.
func (e Event) Fields(yield func(name string, value any)) { yield("event", string(e.Kind)) }

// Stats is a snapshot of what a [Hedger] has done since it was made.
type Stats struct {
	// Calls of Do that have called fn and returned:
	FirstWon int64 // with the value of the first call of fn
	HedgeWon int64 // with the value of the second call of fn
	Failed   int64 // with an error

	Hedged     int64         // second calls of fn
	OverBudget int64         // second calls of fn that Ratio did not allow
	Delay      time.Duration // how long a call may take now before another is made
}

// Stats returns a snapshot.
func (h *Hedger[T]) Stats() Stats {
	return Stats{
		FirstWon: h.firstWon.Load(), HedgeWon: h.hedgeWon.Load(), Failed: h.failed.Load(),
		Hedged: h.hedged.Load(), OverBudget: h.overBudget.Load(), Delay: h.delay(),
	}
}

// Name returns the Name of h's Config.
func (h *Hedger[T]) Name() string { return h.cfg.Name }

// Config returns the Config of h.
func (h *Hedger[T]) Config() Config { return h.cfg }

// What package registry reads: see its documentation.

// Kind returns "hedge".
func (h *Hedger[T]) Kind() string { return "hedge" }

// Figures returns the figures of h.
func (h *Hedger[T]) Figures() []describe.Figure {
	s := h.Stats()
	return []describe.Figure{
		{Name: "hedge.calls{outcome=first_won}", Counter: true, Value: float64(s.FirstWon)},
		{Name: "hedge.calls{outcome=hedge_won}", Counter: true, Value: float64(s.HedgeWon)},
		{Name: "hedge.calls{outcome=failed}", Counter: true, Value: float64(s.Failed)},
		{Name: "hedge.hedges", Counter: true, Value: float64(s.Hedged)},
		{Name: "hedge.refusals", Counter: true, Value: float64(s.OverBudget)},
		{Name: "hedge.delay_seconds", Value: s.Delay.Seconds()},
	}
}

// Settings returns a [Config], without its function.
func (h *Hedger[T]) Settings() any {
	c := h.cfg
	c.Discard = nil
	return c
}

// ObserveAny is Observe for a program that does not know the type of the Event.
func (h *Hedger[T]) ObserveAny(f func(context.Context, any)) (stop func()) {
	return h.Observe(func(ctx context.Context, e Event) { f(ctx, e) })
}
