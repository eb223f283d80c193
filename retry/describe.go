package retry

import (
	"context"

	"github.com/go-resilience/resilience/internal/describe"
)

// What package registry reads: see its documentation.

func (r *Retrier) Kind() string { return "retry" }

func (r *Retrier) Figures() []describe.Figure {
	s := r.Stats()
	return []describe.Figure{
		{Name: "retry.calls{outcome=first_try}", Counter: true, Value: float64(s.FirstTry)},
		{Name: "retry.calls{outcome=recovered}", Counter: true, Value: float64(s.Recovered)},
		{Name: "retry.calls{outcome=exhausted}", Counter: true, Value: float64(s.Exhausted)},
		{Name: "retry.calls{outcome=permanent}", Counter: true, Value: float64(s.Permanent)},
		{Name: "retry.calls{outcome=over_budget}", Counter: true, Value: float64(s.OverBudget)},
		{Name: "retry.calls{outcome=deadline}", Counter: true, Value: float64(s.Deadline)},
		{Name: "retry.calls{outcome=canceled}", Counter: true, Value: float64(s.Canceled)},
		{Name: "retry.calls{outcome=nested}", Counter: true, Value: float64(s.Nested)},
		{Name: "retry.attempts", Counter: true, Value: float64(s.Attempts)},
		{Name: "retry.retries", Counter: true, Value: float64(s.Retried)},
	}
}

// Health returns an error while the Budget of r is spent.
func (r *Retrier) Health() error { return r.setting.Load().Budget.Health() }

// Needed reports whether the Budget of r holds less than a new one: then a resilience.Group
// keeps r, because a new Retrier in its place would allow more retries.
func (r *Retrier) Needed() bool { return r.setting.Load().Budget.Needed() }

// Settings returns Config without functions and Budget.
func (r *Retrier) Settings() any {
	c := r.Config()
	c.Backoff, c.Delay, c.If, c.OnRetry, c.Budget = nil, nil, nil, nil, nil
	return c
}

// Change is Update for whoever does not know Config.
func (r *Retrier) Change(dry bool, f func(cfg any) error) error {
	return r.setting.Change(dry, f, (*Config).fixed, nil)
}

// ObserveAny is Observe for whoever does not know Event.
func (r *Retrier) ObserveAny(f func(context.Context, any)) (stop func()) {
	return r.Observe(func(ctx context.Context, e Event) { f(ctx, e) })
}
