package hedge

import (
	"context"
	"time"

	"github.com/go-resilience/resilience/internal/describe"
)

// Observe calls f with each event until stop is called, on the goroutine of the second call and without
// holding a lock. A panic in f is treated as a panic in that call.
func (h *Hedger[T]) Observe(f func(context.Context, Event)) (stop func()) {
	return h.observers.Observe(f)
}

// ObserveAny is Observe for a caller that does not know the type Event.
func (h *Hedger[T]) ObserveAny(f func(context.Context, any)) (stop func()) {
	return h.Observe(func(ctx context.Context, e Event) { f(ctx, e) })
}

// An Event is something that happened to a [Hedger].
type Event struct {
	Kind EventKind
	Name string // of the Hedger
}

// An EventKind says what an [Event] is.
type EventKind string

const (
	EventHedged     EventKind = "hedged"      // a second call starts
	EventOverBudget EventKind = "over_budget" // Ratio did not allow a second call
)

// Level returns the severity, as slog has it.
func (e Event) Level() int {
	if e.Kind == EventOverBudget {
		return 4
	}
	return -4
}

// Fields calls yield with each detail.
func (e Event) Fields(yield func(name string, value any)) { yield("event", string(e.Kind)) }

// Stats are the metrics of a [Hedger].
type Stats struct {
	FirstWon int64 // Do returned the value of the first call
	HedgeWon int64 // Do returned the value of the second call
	Failed   int64 // Do returned an error

	Hedged     int64         // second calls
	OverBudget int64         // second calls that Ratio did not allow
	Delay      time.Duration // before a second call, now
}

// Stats returns the metrics of h.
func (h *Hedger[T]) Stats() Stats {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.stats
	s.Delay = h.delay()
	return s
}

// Name returns the name of h.
func (h *Hedger[T]) Name() string { return h.cfg.Name }

// Config returns the configuration with defaults filled in.
func (h *Hedger[T]) Config() Config { return h.cfg }

// Settings returns the configuration with defaults filled in, without functions.
func (h *Hedger[T]) Settings() any {
	c := h.cfg
	c.Discard = nil
	return c
}

// Kind returns "hedge".
func (h *Hedger[T]) Kind() string { return "hedge" }

// Figures returns the metrics.
func (h *Hedger[T]) Figures() []describe.Figure {
	s := h.Stats()
	return []describe.Figure{
		describe.Count("hedge.calls{outcome=first_won}", s.FirstWon),
		describe.Count("hedge.calls{outcome=hedge_won}", s.HedgeWon),
		describe.Count("hedge.calls{outcome=failed}", s.Failed),
	}
}
