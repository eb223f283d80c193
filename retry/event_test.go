package retry_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/retry"
)

// An eventLog keeps the events that it is told of.
type eventLog struct {
	mu     sync.Mutex
	events []retry.Event
}

func (l *eventLog) note(_ context.Context, e retry.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, e)
}

func (l *eventLog) take() []retry.Event {
	l.mu.Lock()
	defer l.mu.Unlock()
	events := l.events
	l.events = nil
	return events
}

func TestEventsOfARetrier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log eventLog
		r := retry.New(retry.Config{Name: "users", Backoff: retry.Constant(time.Second)})
		stop := r.Observe(log.note)
		do := func(failures int, err error) error {
			fn, _ := failing(failures, err)
			return r.Do(t.Context(), fn)
		}
		_ = do(0, nil)
		require.Empty(t, log.take(), "success at once")
		_ = do(1, retry.Permanent(errDown))
		require.Empty(t, log.take(), "an error that is returned at once")

		_ = do(2, errDown)
		require.Equal(t, []retry.Event{
			{Kind: retry.EventRetried, Name: "users", Attempts: 1, Err: errDown, Delay: time.Second},
			{Kind: retry.EventRetried, Name: "users", Attempts: 2, Err: errDown, Delay: time.Second, RetryingFor: time.Second},
			{Kind: retry.EventEnded, Name: "users", Attempts: 3, RetryingFor: 2 * time.Second, Outcome: retry.OutcomeRecovered},
		}, log.take())

		err := do(forever, errDown)
		events := log.take()
		require.Len(t, events, 3)
		require.Equal(t, retry.Event{
			Kind: retry.EventEnded, Name: "users", Attempts: 3, Err: err, RetryingFor: 2 * time.Second, Outcome: retry.OutcomeExhausted,
		}, events[2])

		n := 0
		_ = r.Do(t.Context(), func(context.Context) error {
			if n++; n == 2 {
				return retry.Permanent(errDown)
			}
			return errDown
		})
		require.Equal(t, retry.Event{
			Kind: retry.EventEnded, Name: "users", Attempts: 2, Err: errDown, RetryingFor: time.Second, Outcome: retry.OutcomePermanent,
		}, log.take()[1])

		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		err = r.Do(ctx, fail)
		require.Equal(t, []retry.Event{
			{Kind: retry.EventEnded, Name: "users", Attempts: 1, Err: err, Outcome: retry.OutcomeDeadline},
		}, log.take(), "no attempt followed, and yet it gave up")

		stop()
		_ = do(2, errDown)
		require.Empty(t, log.take())
	})
}

func TestObserversMayUseTheRetrier(t *testing.T) {
	type key struct{}
	ctx := context.WithValue(t.Context(), key{}, "caller")
	var told []string
	note := func(who string) func(context.Context) {
		return func(ctx context.Context) { told = append(told, fmt.Sprint(who, " ", ctx.Value(key{}))) }
	}
	r := retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(0)})
	r.Observe(func(ctx context.Context, e retry.Event) {
		note(string(e.Kind))(ctx)
		require.NoError(t, r.Update(func(c *retry.Config) { c.MaxRetryAfter++ }))
		_, _, _ = r.Name(), r.Config(), r.Stats()
	})
	r.Observe(func(ctx context.Context, e retry.Event) { note("second " + string(e.Kind))(ctx) })
	_ = r.Do(ctx, fail)
	require.Equal(t, []string{
		"retried caller", "second retried caller",
		"ended caller", "second ended caller",
	}, told)
}

// A call that has lost a hedge is no failure: nobody is told of its end, and it is in no figure.
func TestCallThatLostAHedgeCountsNowhere(t *testing.T) {
	var log eventLog
	r := retry.New(retry.Config{Backoff: retry.Constant(0)})
	r.Observe(log.note)
	for lose := 1; lose <= 2; lose++ {
		ctx, cancel := context.WithCancelCause(t.Context())
		err := r.Do(ctx, func(ctx context.Context) error {
			if n, _ := retry.AttemptFrom(ctx); n == lose {
				cancel(fmt.Errorf("request: %w", ended.LostError("the other was faster")))
				return ctx.Err()
			}
			return errDown
		})
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, r.Do(ctx, fail), context.Canceled, "too late to begin")
	}
	require.Equal(t, retry.Stats{Attempts: 3, Retried: 1}, r.Stats())
	events := log.take()
	require.Len(t, events, 1)
	require.Equal(t, retry.EventRetried, events[0].Kind)
}

func TestEventsSayTheirLevelAndFields(t *testing.T) {
	fields := func(e retry.Event) (all []any) {
		e.Fields(func(name string, value any) { all = append(all, name, value) })
		return all
	}
	for _, c := range []struct {
		event  retry.Event
		level  int
		fields []any
	}{
		{retry.Event{Kind: retry.EventRetried, Attempts: 1, Delay: 2, RetryingFor: 3, Err: errDown}, -4,
			[]any{"event", "retried", "attempts", 1, "in", time.Duration(2), "retrying_for", time.Duration(3), "err", errDown}},
		{retry.Event{Kind: retry.EventEnded, Attempts: 2, Outcome: retry.OutcomeRecovered}, -4,
			[]any{"event", "ended", "attempts", 2, "outcome", "recovered"}},
		{retry.Event{Kind: retry.EventEnded, Attempts: 2, Outcome: retry.OutcomeExhausted, Err: errDown}, 4,
			[]any{"event", "ended", "attempts", 2, "outcome", "exhausted", "err", errDown}},
	} {
		require.Equal(t, c.level, c.event.Level())
		require.Equal(t, c.fields, fields(c.event))
	}
}

func TestRetrierAndBudgetDescribeThemselves(t *testing.T) {
	budget := retry.NewBudget(retry.BudgetConfig{Name: "users", Ratio: retry.None, PerSecond: retry.None})
	r := retry.New(retry.Config{
		Name: "list", Budget: budget, AttemptTimeout: time.Second, RetryIf: func(error) bool { return true },
		Delay: func(context.Context, retry.FailedAttempt) time.Duration { return 0 },
	})
	require.Equal(t, []string{"retry", "budget"}, []string{r.Kind(), budget.Kind()})
	require.Equal(t, retry.Config{Name: "list", Attempts: 3, AttemptTimeout: time.Second, MaxRetryAfter: time.Minute}, r.Settings())
	require.Equal(t, retry.BudgetConfig{Name: "users", Ratio: retry.None, PerSecond: retry.None}, budget.Settings())

	var told []any
	note := func(_ context.Context, e any) { told = append(told, e) }
	stop := r.ObserveAny(note)
	err := r.Do(t.Context(), fail)
	require.Len(t, told, 1)
	require.Equal(t, err, told[0].(retry.Event).Err)
	stop()
	require.NoError(t, r.Change(false, func(cfg any) error {
		cfg.(*retry.Config).Budget = nil
		cfg.(*retry.Config).Attempts = 2
		return nil
	}))
	_ = r.Do(t.Context(), fail)
	_ = r.Do(t.Context(), succeed)
	require.Len(t, told, 1)

	figures := map[string]float64{}
	for _, f := range append(r.Figures(), budget.Figures()...) {
		figures[f.Name] = f.Value
		require.Equal(t, f.Name != "budget.left", f.Counter, f.Name)
	}
	require.Equal(t, map[string]float64{
		"retry.calls{outcome=first_try}": 1, "retry.calls{outcome=recovered}": 0, "retry.calls{outcome=exhausted}": 1,
		"retry.calls{outcome=permanent}": 0, "retry.calls{outcome=over_budget}": 1, "retry.calls{outcome=deadline}": 0,
		"retry.calls{outcome=canceled}": 0, "retry.calls{outcome=nested}": 0, "retry.attempts": 4,
		"budget.retries{outcome=allowed}": 0, "budget.retries{outcome=over_budget}": 1, "budget.left": 0,
	}, figures)
}

func TestChangeIsUpdateOfAnyType(t *testing.T) {
	r := retry.New(retry.Config{Name: "list"})
	b := retry.NewBudget(retry.BudgetConfig{Name: "users"})
	attempts := func(n int) func(any) error {
		return func(cfg any) error { cfg.(*retry.Config).Attempts = n; return nil }
	}
	ratio := func(cfg any) error { cfg.(*retry.BudgetConfig).Ratio = 0.5; return nil }
	require.NoError(t, r.Change(true, attempts(5)))
	require.NoError(t, b.Change(true, ratio))
	require.Equal(t, []any{3, 0.2}, []any{r.Config().Attempts, b.Config().Ratio}, "a dry run changes nothing")
	require.ErrorIs(t, r.Change(false, func(cfg any) error { _ = attempts(7)(cfg); return errDown }), errDown)
	require.EqualError(t, r.Change(true, func(cfg any) error { cfg.(*retry.Config).HealthyAfter = -1; return nil }),
		"retry.Config.HealthyAfter is -1ns: must be 0 (for never) or more")
	require.Error(t, b.Change(false, func(cfg any) error { cfg.(*retry.BudgetConfig).Name = "x"; return nil }))
	require.NoError(t, r.Change(false, attempts(5)))
	require.NoError(t, b.Change(false, ratio))
	require.Equal(t, []any{5, 0.5}, []any{r.Config().Attempts, b.Config().Ratio})
}
