package hedge

import (
	"context"
	"time"

	"github.com/go-resilience/resilience/internal/describe"
)

// Observe calls f with each event until stop is called, on the goroutine of the second call and
// without a lock. A panic in f is one of that call.
func (h *Hedger[T]) Observe(f func(context.Context, Event)) (stop func()) {
	return h.observers.Observe(f)
}

func (h *Hedger[T]) ObserveAny(f func(context.Context, any)) (stop func()) {
	return h.Observe(func(ctx context.Context, e Event) { f(ctx, e) })
}

// An Event is what happened to a [Hedger].
type Event struct {
	Kind string
	Name string // of the Hedger
}

// Kinds of events.
const (
	EventHedged     = "hedged"      // before each second call
	EventOverBudget = "over budget" // for each that Ratio did not allow
)

func (e Event) Level() int {
	if e.Kind == EventOverBudget {
		return 4
	}
	return -4
}

func (e Event) Fields(yield func(name string, value any)) { yield("event", e.Kind) }

// Stats counts what a [Hedger] has done.
type Stats struct {
	FirstWon int64 // calls of Do that returned the value of the first call
	HedgeWon int64 // of the second
	Failed   int64 // an error

	Hedged     int64         // second calls
	OverBudget int64         // second calls that Ratio did not allow
	Delay      time.Duration // before a second call, now
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

func (h *Hedger[T]) Settings() any {
	c := h.cfg
	c.Discard = nil
	return c
}

func (h *Hedger[T]) Kind() string { return "hedge" }

func (h *Hedger[T]) Figures() []describe.Figure {
	s := h.Stats()
	return []describe.Figure{
		describe.Count("hedge.calls{outcome=first_won}", s.FirstWon),
		describe.Count("hedge.calls{outcome=hedge_won}", s.HedgeWon),
		describe.Count("hedge.calls{outcome=failed}", s.Failed),
	}
}
