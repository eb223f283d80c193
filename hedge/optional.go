package hedge

import (
	"context"

	"github.com/go-resilience/resilience/internal/describe"
)

// The methods in this file are for readers that do not use Describe yet.

// ObserveAny is Observe for a caller that does not know the type Event.
func (h *Hedger[T]) ObserveAny(f func(context.Context, any)) (stop func()) {
	return h.Observe(func(ctx context.Context, e Event) { f(ctx, e) })
}

// Level returns the severity, as slog has it.
func (e Event) Level() int {
	if e.Kind == EventOverBudget {
		return 4
	}
	return -4
}

// Fields calls yield with each detail.
func (e Event) Fields(yield func(name string, value any)) { yield("event", string(e.Kind)) }

// Name returns the name of h.
func (h *Hedger[T]) Name() string { return h.cfg.Name }

// Settings returns the configuration with defaults filled in, without functions.
func (h *Hedger[T]) Settings() any {
	return h.settings()
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
