package registry

import (
	"log/slog"

	"github.com/go-resilience/resilience/retry"
)

func retryFigures(s retry.Stats, to emit) {
	calls := func(outcome string, n int64) {
		to.counter("retry.call.count", "{call}", "Calls that have ended, by outcome.", n, "outcome", outcome)
	}
	calls("first_try", s.FirstTry)
	calls("recovered", s.Recovered)
	calls("exhausted", s.Exhausted)
	calls("permanent", s.Permanent)
	calls("budget", s.OverBudget)
	calls("deadline", s.Deadline)
	calls("canceled", s.Canceled)
	calls("nested", s.Nested)
	to.counter("retry.attempt.count", "{attempt}", "Attempts, first ones included.", s.Attempts)
	to.counter("retry.retry.count", "{attempt}", "Attempts that followed another.", s.Retried)
}

func budgetFigures(s retry.BudgetStats, to emit) {
	to.counter("budget.retry.count", "{attempt}", "Retries that were asked for, by outcome.", s.Allowed, "outcome", "allowed")
	to.counter("budget.retry.count", "{attempt}", "Retries that were asked for, by outcome.", s.OverBudget, "outcome", "over_budget")
	to.gauge("budget.left", "{attempt}", "Retries that would be allowed now.", float64(s.Left))
	to.gauge("budget.calls", "{call}", "Calls in the last 10 seconds.", float64(s.Called))
	to.gauge("budget.charged", "{attempt}", "Retries in the last 10 seconds.", float64(s.Charged))
}

func hedgeFigures(s retry.HedgeStats, to emit) {
	calls := func(winner string, n int64) {
		to.counter("hedge.call.count", "{call}", "Calls that have ended, by the attempt that won.", n, "winner", winner)
	}
	calls("first", s.First)
	calls("hedge", s.Hedge)
	calls("none", s.Failed)
	to.counter("hedge.attempt.count", "{attempt}", "Attempts made beside another.", s.Hedged)
	to.counter("hedge.over_budget.count", "{attempt}", "Attempts that the budget did not allow.", s.OverBudget)
	to.seconds(Gauge, "hedge.delay", "Time after which another attempt is made now.", s.Delay)
}

func retryEvent(e retry.Event) Event {
	var attrs []slog.Attr
	if e.Attempt > 0 {
		attrs = append(attrs, slog.Int("attempt", e.Attempt))
	}
	if e.Delay > 0 {
		attrs = append(attrs, slog.Duration("in", e.Delay))
	}
	if e.Outcome != "" {
		attrs = append(attrs, slog.String("outcome", string(e.Outcome)))
	}
	if e.Retrying > 0 {
		attrs = append(attrs, slog.Duration("retrying", e.Retrying))
	}
	lost := e.Kind == retry.EventEnd && e.Err != nil
	return happened(e.Kind, "", e.Err, attrs...).warn(lost || e.Kind == retry.EventOverBudget)
}
