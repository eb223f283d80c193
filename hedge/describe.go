package hedge

import (
	"context"
	"time"

	"github.com/go-resilience/resilience/internal/describe"
)

// Observe calls f with each event from now on, until stop is called: on the goroutine of the
// second call, with the ctx of Do and without a lock. A panic in f passes on to the caller of Do,
// as a panic of the call does.
func (h *Hedger[T]) Observe(f func(context.Context, Event)) (stop func()) {
	return h.observers.Observe(f)
}

// ObserveAny is Observe for whoever does not know Event.
func (h *Hedger[T]) ObserveAny(f func(context.Context, any)) (stop func()) {
	return h.Observe(func(ctx context.Context, e Event) { f(ctx, e) })
}

// An Event is something that happened to a [Hedger].
type Event struct {
	Kind EventKind
	Name string // of the Hedger
}

type EventKind string

const (
	EventHedged     EventKind = "hedged"      // before each second call
	EventOverBudget EventKind = "over budget" // for each second call that Ratio did not allow
)

// Level is 4, slog's Warn, for EventOverBudget, and -4, Debug, for EventHedged.
func (e Event) Level() int {
	if e.Kind == EventOverBudget {
		return 4
	}
	return -4
}

// Fields calls yield with each detail.
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

func (h *Hedger[T]) Stats() Stats {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.stats
	s.Delay = h.delay()
	return s
}

func (h *Hedger[T]) Name() string { return h.cfg.Name }

func (h *Hedger[T]) Config() Config { return h.cfg }

// Settings returns Config without its function.
func (h *Hedger[T]) Settings() any {
	c := h.cfg
	c.Discard = nil
	return c
}

func (h *Hedger[T]) Kind() string { return "hedge" }

// Figures returns hedge.calls by outcome.
func (h *Hedger[T]) Figures() []describe.Figure {
	s := h.Stats()
	return []describe.Figure{
		{Name: "hedge.calls{outcome=first_won}", Counter: true, Value: float64(s.FirstWon)},
		{Name: "hedge.calls{outcome=hedge_won}", Counter: true, Value: float64(s.HedgeWon)},
		{Name: "hedge.calls{outcome=failed}", Counter: true, Value: float64(s.Failed)},
	}
}
