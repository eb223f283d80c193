package retry

import (
	"context"
	"log/slog"
	"math"

	"github.com/go-resilience/resilience/policy"
)

var (
	_ policy.Describer = (*Retrier)(nil)
	_ policy.Describer = (*Budget)(nil)
)

// Describe implements [policy.Describer]. The Health of a Retrier is the Health of its Budget.
func (r *Retrier) Describe() policy.Description {
	return policy.Description{
		Kind:    "retry",
		Name:    r.setting.Load().Name,
		Metrics: func() []policy.Metric { return policy.Metrics("retry", r.Stats()) },
		Health:  func(context.Context) policy.Health { return r.setting.Load().Budget.health() },
		Config:  func() any { return r.settings() },
		Update:  r.configure,
		Observe: policy.Events(r.Observe, Event.describe),
		InUse:   func() bool { return r.setting.Load().Budget.inUseBy(1) },
	}
}

// settings returns the configuration without its functions and its Budget, because a settings file cannot contain
// them.
func (r *Retrier) settings() Config {
	c := r.Config()
	c.Backoff, c.Delay, c.RetryIf, c.Budget = nil, nil, nil, nil
	return c
}

func (r *Retrier) configure(dryRun bool, change func(cfg any) error) error {
	return r.setting.Change(dryRun, change, sameName, r.useBudget)
}

// describe converts e to the form in which all policies report events. The end of a failed call has the level Warn.
func (e Event) describe() policy.Event {
	d := policy.Event{Kind: "retry", Name: e.Name, What: string(e.Kind), Level: slog.LevelDebug, Err: e.Err}
	if e.Kind == EventEnded && e.Err != nil {
		d.Level = slog.LevelWarn
	}
	d.Attrs = append(d.Attrs, slog.Int("attempts", e.Attempts))
	if e.Delay > 0 {
		d.Attrs = append(d.Attrs, slog.Duration("in", e.Delay))
	}
	if e.Outcome != "" {
		d.Attrs = append(d.Attrs, slog.String("outcome", string(e.Outcome)))
	}
	if e.RetryingFor > 0 {
		d.Attrs = append(d.Attrs, slog.Duration("retrying_for", e.RetryingFor))
	}
	return d
}

// Describe implements [policy.Describer]. The Health of a Budget has the status Warn and the state "spent" if the
// last requested retry was not allowed and the Budget still holds less than one retry.
func (b *Budget) Describe() policy.Description {
	return policy.Description{
		Kind:    "budget",
		Name:    b.setting.Load().Name,
		Metrics: func() []policy.Metric { return policy.Metrics("budget", b.Stats()) },
		Health:  func(context.Context) policy.Health { return b.health() },
		Config:  func() any { return b.Config() },
		Update:  b.configure,
		InUse:   func() bool { return b.inUseBy(math.MaxInt64) },
	}
}

func (b *Budget) configure(dryRun bool, change func(cfg any) error) error {
	return b.setting.Change(dryRun, change, b.allow, nil)
}

func (b *Budget) health() (h policy.Health) {
	b.refill(func(*BudgetConfig) {
		if b.spent && b.held < whole {
			h = policy.Health{Status: policy.Warn, State: "spent"}
		}
	})
	return h
}

// inUseBy reports whether b holds fewer retries than a new Budget, and at most most Retriers use b. If a Group evicted
// the only Retrier of such a Budget, the new Budget that replaces it would allow more retries. A Budget that Retriers
// share stays the same.
func (b *Budget) inUseBy(most int64) (inUse bool) {
	b.refill(func(c *BudgetConfig) { inUse = b.users.Load() <= most && c.initial() > b.held })
	return inUse
}
