package registry

import (
	"fmt"
	"log/slog"

	"github.com/go-resilience/resilience/retry"
)

func init() {
	oldReaders = append(oldReaders,
		func(p Policy) any { return read(p, "retry", retryFigures, retryEvent, nil) },
		func(p Policy) any { return read(p, "budget", budgetFigures, retryEvent, budgetHealth) },
		func(p Policy) any { return read(p, "budget", budgetGroupFigures, retryEvent, budgetsHealth) },
		func(p Policy) any { return read(p, "hedge", hedgeFigures, retryEvent, nil) })
}

func retryFigures(s retry.Stats, to emit) {
	calls := func(outcome string, n int64) {
		to.counter("retry.calls", "{call}", "Calls that have ended, by outcome.", n, Attr{"outcome", outcome})
	}
	calls("first_try", s.FirstTry)
	calls("recovered", s.Recovered)
	calls("exhausted", s.Exhausted)
	calls("permanent", s.Permanent)
	calls("over_budget", s.OverBudget)
	calls("deadline", s.Deadline)
	calls("canceled", s.Canceled)
	calls("nested", s.Nested)
	to.counter("retry.attempts", "{attempt}", "Attempts, first ones and those included that a policy further in refused.", s.Attempts)
	to.counter("retry.retries", "{attempt}", "Attempts that followed another.", s.Retried)
}

func budgetFigures(s retry.BudgetStats, to emit) {
	budgetTotals(s.BudgetTotals, to)
	to.gauge("budget.left", "{attempt}", "Retries that would be allowed now.", float64(s.Left))
	budgetWindow(s.Called, s.Charged, to)
}

func budgetGroupFigures(s retry.BudgetGroupStats, to emit) {
	budgetTotals(s.BudgetTotals, to)
	to.gauge("budget.keys", "{key}", "Keys that have a budget of their own.", float64(s.Keys))
	to.gauge("budget.empty", "{key}", "Keys whose budget would allow no retry now.", float64(s.Empty))
	budgetWindow(s.Called, s.Charged, to)
}

func budgetTotals(t retry.BudgetTotals, to emit) {
	retries := func(outcome string, n int64) {
		to.counter("budget.retries", "{attempt}", "Retries that were asked for, by outcome.", n, Attr{"outcome", outcome})
	}
	retries("allowed", t.Allowed)
	retries("over_budget", t.OverBudget)
}

func budgetWindow(calls, charged int64, to emit) {
	to.gauge("budget.window.calls", "{call}", "Calls in the last 10 seconds.", float64(calls))
	to.gauge("budget.window.retries", "{attempt}", "Retries in the last 10 seconds.", float64(charged))
}

func hedgeFigures(s retry.HedgeStats, to emit) {
	calls := func(outcome string, n int64) {
		to.counter("hedge.calls", "{call}", "Calls that have ended, by outcome.", n, Attr{"outcome", outcome})
	}
	calls("first_won", s.FirstWon)
	calls("hedge_won", s.HedgeWon)
	calls("failed", s.Failed)
	to.counter("hedge.hedges", "{attempt}", "Attempts made beside another.", s.Hedged)
	to.counter("hedge.refusals", "{attempt}", "Attempts that the budget did not allow.", s.OverBudget)
	to.seconds(false, "hedge.delay", "Time after which another attempt is made now. Not to be added up.", s.Delay)
}

func retryEvent(e retry.Event) oldEvent {
	var attrs []slog.Attr
	if e.Attempt > 0 {
		attrs = append(attrs, slog.Int("attempt", e.Attempt))
	}
	if e.Attempts > 0 {
		attrs = append(attrs, slog.Int("attempts", e.Attempts))
	}
	if e.Delay > 0 {
		attrs = append(attrs, slog.Duration("in", e.Delay))
	}
	if e.Outcome != "" {
		attrs = append(attrs, slog.String("outcome", string(e.Outcome)))
	}
	if e.RetryingFor > 0 {
		attrs = append(attrs, slog.Duration("retrying_for", e.RetryingFor))
	}
	lost := e.Kind == retry.EventEnded && e.Err != nil
	return happened(e.Kind, e.Key, e.Err, attrs...).warn(lost || e.Kind == retry.EventOverBudget)
}

func budgetHealth(s retry.BudgetStats) *ailment {
	if s.Left > 0 || s.Charged == 0 {
		return nil
	}
	return &ailment{state: "spent", detail: fmt.Sprintf("%d retries in 10 s", s.Charged)}
}

func budgetsHealth(s retry.BudgetGroupStats) *ailment {
	if s.Empty == 0 || s.Charged == 0 {
		return nil
	}
	return &ailment{state: "spent", detail: fmt.Sprintf("%d of %d spent", s.Empty, s.Keys)}
}
