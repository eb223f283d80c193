package retry

import (
	"context"

	"github.com/go-resilience/resilience/internal/describe"
)

// What package registry reads: see its documentation.

// Kind returns "retry".
func (r *Retrier) Kind() string { return "retry" }

// Figures returns the figures of r.
func (r *Retrier) Figures() []describe.Figure {
	s := r.Stats()
	var all []describe.Figure
	count := func(name string, n int64) {
		all = append(all, describe.Figure{Name: name, Counter: true, Value: float64(n)})
	}
	count("retry.calls{outcome=first_try}", s.FirstTry)
	count("retry.calls{outcome=recovered}", s.Recovered)
	count("retry.calls{outcome=exhausted}", s.Exhausted)
	count("retry.calls{outcome=permanent}", s.Permanent)
	count("retry.calls{outcome=over_budget}", s.OverBudget)
	count("retry.calls{outcome=deadline}", s.Deadline)
	count("retry.calls{outcome=canceled}", s.Canceled)
	count("retry.calls{outcome=nested}", s.Nested)
	count("retry.attempts", s.Attempts)
	count("retry.retries", s.Retried)
	return all
}

// Health returns an error while the Budget of r is spent.
func (r *Retrier) Health() error { return r.setting.Load().Budget.Health() }

// Needed reports whether the Budget of r has fewer retries left than a new one. A
// resilience.Group keeps r while that is so: a new Retrier in its place would allow them again.
func (r *Retrier) Needed() bool { return r.setting.Load().Budget.Needed() }

// Settings returns a [Config], without its functions and its Budget.
func (r *Retrier) Settings() any {
	c := r.Config()
	c.Backoff, c.Delay, c.If, c.OnRetry, c.Budget = nil, nil, nil, nil, nil
	return c
}

// Change is Update for a program that does not know the type of the Config.
func (r *Retrier) Change(dry bool, f func(cfg any) error) error {
	return r.setting.Change(dry, f, (*Config).fixed, nil)
}

// ObserveAny is Observe for a program that does not know the type of the Event.
func (r *Retrier) ObserveAny(f func(context.Context, any)) (stop func()) {
	return r.Observe(func(ctx context.Context, e Event) { f(ctx, e) })
}
