package hedge

import (
	"context"
	"log/slog"
	"time"

	"github.com/go-resilience/resilience/policy"
)

var _ policy.Describer = (*Hedger[any])(nil)

// Observe calls f with each event until stop is called. f runs on the goroutine of the second call, without a
// lock. A panic in f is treated like a panic in the second call.
func (h *Hedger[T]) Observe(f func(context.Context, Event)) (stop func()) {
	return h.observers.Observe(f)
}

// An Event reports that a [Hedger] started a second call, or that [Config].Ratio did not allow a second call.
type Event struct {
	Kind EventKind // the kind of the event
	Name string    // the Hedger's name
}

// An EventKind is the kind of an [Event].
type EventKind string

const (
	EventHedged     EventKind = "hedged"      // a second call starts
	EventOverBudget EventKind = "over_budget" // Ratio did not allow a second call
)

// Stats are the metrics of a [Hedger]. A call to Do is not counted if its ctx was already done, or if it panicked
// or exited its goroutine.
type Stats struct {
	FirstWon int64 `counter:"calls{outcome=first_won}"` // Do returned the value of the first call
	HedgeWon int64 `counter:"calls{outcome=hedge_won}"` // Do returned the value of the second call
	Failed   int64 `counter:"calls{outcome=failed}"`    // Do returned an error

	Hedged     int64         `counter:"hedges{outcome=made}"`        // second calls that started
	OverBudget int64         `counter:"hedges{outcome=over_budget}"` // second calls that Ratio did not allow
	Delay      time.Duration `gauge:"delay_seconds"`                 // the current delay before a second call
}

// Stats returns the metrics of h.
func (h *Hedger[T]) Stats() Stats {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.stats
	s.Delay = h.delay()
	return s
}

// Config returns the configuration with defaults filled in.
func (h *Hedger[T]) Config() Config { return h.cfg }

// Describe implements [policy.Describer].
func (h *Hedger[T]) Describe() policy.Description {
	return policy.Description{
		Kind:    "hedge",
		Name:    h.cfg.Name,
		Metrics: func() []policy.Metric { return policy.Metrics("hedge", h.Stats()) },
		Config:  func() any { return h.settings() },
		Observe: policy.Events(h.Observe, Event.describe),
	}
}

// settings returns the configuration without Discard, because a settings file cannot hold functions.
func (h *Hedger[T]) settings() Config {
	c := h.cfg
	c.Discard = nil
	return c
}

// describe converts e to a policy.Event, the common event type of all policies.
func (e Event) describe() policy.Event {
	d := policy.Event{Kind: "hedge", Name: e.Name, What: string(e.Kind), Level: slog.LevelDebug}
	if e.Kind == EventOverBudget {
		d.Level = slog.LevelWarn
	}
	return d
}
