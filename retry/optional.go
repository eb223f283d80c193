package retry

import (
	"context"

	"github.com/go-resilience/resilience/internal/describe"
	"github.com/go-resilience/resilience/policy"
)

// The methods in this file are for readers that do not use Describe yet.

// ObserveAny is Observe for a caller that does not know the type Event.
func (r *Retrier) ObserveAny(f func(context.Context, any)) (stop func()) {
	return r.Observe(func(ctx context.Context, e Event) { f(ctx, e) })
}

// Level returns the severity, as slog has it.
func (e Event) Level() int {
	if e.Kind == EventEnded && e.Err != nil {
		return 4
	}
	return -4
}

// Fields calls yield with each detail.
func (e Event) Fields(yield func(name string, value any)) {
	add := func(name string, value any, is bool) {
		if is {
			yield(name, value)
		}
	}
	add("event", string(e.Kind), true)
	add("attempts", e.Attempts, e.Attempts > 0)
	add("in", e.Delay, e.Delay > 0)
	add("outcome", string(e.Outcome), e.Outcome != "")
	add("retrying_for", e.RetryingFor, e.RetryingFor > 0)
	add("err", e.Err, e.Err != nil)
}

// Kind returns "retry".
func (r *Retrier) Kind() string { return "retry" }

// Figures returns the metrics.
func (r *Retrier) Figures() (all []describe.Figure) {
	for i, o := range outcomes {
		all = append(all, describe.Count("retry.calls{outcome="+string(o)+"}", r.counts.ended[i].Load()))
	}
	return append(all, describe.Count("retry.attempts", r.Stats().Attempts))
}

// Health returns the Health of the Budget.
func (r *Retrier) Health() error { return r.setting.Load().Budget.Health() }

// Needed reports whether the Budget is.
func (r *Retrier) Needed() bool { return r.setting.Load().Budget.Needed() }

// Name returns the name of r.
func (r *Retrier) Name() string { return r.setting.Load().Name }

// Settings returns the configuration with defaults filled in, without functions and the Budget.
func (r *Retrier) Settings() any {
	return r.settings()
}

// Change is Update for a caller that does not know the type Config.
func (r *Retrier) Change(dry bool, f func(cfg any) error) error {
	return r.configure(dry, f)
}

// Name returns the name of b.
func (b *Budget) Name() string { return b.setting.Load().Name }

// Settings returns the configuration with defaults filled in.
func (b *Budget) Settings() any { return b.Config() }

// Change is Update for a caller that does not know the type BudgetConfig.
func (b *Budget) Change(dry bool, f func(cfg any) error) error {
	return b.configure(dry, f)
}

// Kind returns "budget".
func (b *Budget) Kind() string { return "budget" }

// Figures returns the metrics.
func (b *Budget) Figures() []describe.Figure {
	s := b.Stats()
	return []describe.Figure{
		describe.Count("budget.retries{outcome=allowed}", s.Allowed),
		describe.Count("budget.retries{outcome=over_budget}", s.OverBudget),
		{Name: "budget.left", Value: float64(s.Left)},
	}
}

// Health returns an error while b has no retry left and has refused one.
func (b *Budget) Health() error {
	if h := b.health(); h.Status != policy.Pass {
		return &describe.Ailment{State: h.State}
	}
	return nil
}

// Needed reports whether b holds less than a new Budget.
func (b *Budget) Needed() bool {
	return b.inUse()
}
