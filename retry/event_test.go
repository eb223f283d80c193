package retry_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/retry"
)

// An eventLog records events.
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
		require.Empty(t, log.take(), "a success at the first attempt")
		_ = do(1, retry.Permanent(errDown))
		require.Empty(t, log.take(), "an error that is not retried")

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
			Kind: retry.EventEnded, Name: "users", Attempts: 3, Err: err, RetryingFor: 2 * time.Second,
			Outcome: retry.OutcomeExhausted,
		}, events[2])

		n := 0
		_ = r.Do(t.Context(), func(context.Context) error {
			if n++; n == 2 {
				return retry.Permanent(errDown)
			}
			return errDown
		})
		require.Equal(t, retry.Event{
			Kind: retry.EventEnded, Name: "users", Attempts: 2, Err: errDown, RetryingFor: time.Second,
			Outcome: retry.OutcomePermanent,
		}, log.take()[1])

		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		err = r.Do(ctx, fail)
		require.Equal(t, []retry.Event{
			{Kind: retry.EventEnded, Name: "users", Attempts: 1, Err: err, Outcome: retry.OutcomeDeadline},
		}, log.take(), "it gave up after one attempt")

		stop()
		_ = do(2, errDown)
		require.Empty(t, log.take())
	})
}

func TestObserversMayUseTheRetrier(t *testing.T) {
	type key struct{}
	ctx := context.WithValue(t.Context(), key{}, "caller")
	var got []string
	note := func(who string) func(context.Context) {
		return func(ctx context.Context) { got = append(got, fmt.Sprint(who, " ", ctx.Value(key{}))) }
	}
	r := retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(0)})
	r.Observe(func(ctx context.Context, e retry.Event) {
		note(string(e.Kind))(ctx)
		require.NoError(t, r.Update(func(c *retry.Config) { c.MaxRetryAfter++ }))
		_, _, _ = r.Describe(), r.Config(), r.Stats()
	})
	r.Observe(func(ctx context.Context, e retry.Event) { note("second " + string(e.Kind))(ctx) })
	_ = r.Do(ctx, fail)
	require.Equal(t, []string{
		"retried caller", "second retried caller",
		"ended caller", "second ended caller",
	}, got)
}

// A call that has lost a hedge is no failure: it causes no event and is in no metric.
func TestLostHedgeIsNotCounted(t *testing.T) {
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
		require.ErrorIs(t, r.Do(ctx, fail), context.Canceled, "ctx is already done")
	}
	require.Equal(t, retry.Stats{Attempts: 3, Retried: 1}, r.Stats())
	events := log.take()
	require.Len(t, events, 1)
	require.Equal(t, retry.EventRetried, events[0].Kind)
}

func TestRetrierDescribe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		budget := retry.NewBudget(retry.BudgetConfig{Name: "users", Ratio: retry.None, PerSecond: retry.None})
		r := retry.New(retry.Config{
			Name: "list", Budget: budget, AttemptTimeout: time.Second, RetryIf: func(error) bool { return true },
			Delay: func(context.Context, retry.FailedAttempt) time.Duration { return 0 },
		})
		d := r.Describe()
		require.Equal(t, []string{"retry", "list"}, []string{d.Kind, d.Name})
		require.Equal(t, retry.Config{
			Name: "list", Attempts: 3, AttemptTimeout: time.Second, MaxRetryAfter: time.Minute,
		}, d.Config())
		require.Nil(t, d.Members)
		require.Equal(t, policy.Health{}, d.Health(t.Context()))

		var events []policy.Event
		stop := d.Observe(func(_ context.Context, e policy.Event) { events = append(events, e) })
		err := r.Do(t.Context(), fail)
		require.Equal(t, []policy.Event{{
			Kind: "retry", Name: "list", What: "ended", Level: slog.LevelWarn, Err: err,
			Attrs: []slog.Attr{slog.Int("attempts", 1), slog.String("outcome", "over_budget")},
		}}, events)
		stop()
		require.Equal(t, policy.Health{Status: policy.Warn, State: "spent"}, d.Health(t.Context()), "the Budget's")

		require.NoError(t, d.Update(false, func(cfg any) error {
			cfg.(*retry.Config).Budget = nil
			cfg.(*retry.Config).Attempts = 2
			return nil
		}))
		require.Equal(t, policy.Health{}, d.Health(t.Context()), "it has no Budget")
		require.False(t, d.InUse())
		_ = r.Do(t.Context(), fail)
		_ = r.Do(t.Context(), succeed)
		require.Len(t, events, 1)
		require.Equal(t, map[string]float64{
			"retry.calls{outcome=first_try}": 1, "retry.calls{outcome=recovered}": 0, "retry.calls{outcome=exhausted}": 1,
			"retry.calls{outcome=permanent}": 0, "retry.calls{outcome=over_budget}": 1, "retry.calls{outcome=deadline}": 0,
			"retry.calls{outcome=canceled}": 0, "retry.calls{outcome=nested}": 0, "retry.attempts": 4, "retry.retries": 1,
		}, counters(t, d.Metrics()))
	})
}

// counters returns the values of metrics that are all counters, except for the gauge budget.left.
func counters(t *testing.T, metrics []policy.Metric) map[string]float64 {
	values := make(map[string]float64)
	for _, m := range metrics {
		values[m.Name] = m.Value
		require.Equal(t, m.Name != "budget.left", m.Counter, m.Name)
	}
	return values
}

func TestRetrierDescribesItsEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := retry.New(retry.Config{Name: "list", Backoff: retry.Constant(time.Second)})
		var events []policy.Event
		r.Describe().Observe(func(_ context.Context, e policy.Event) { events = append(events, e) })
		fn, _ := failing(2, errDown)
		require.NoError(t, r.Do(t.Context(), fn))
		retried := func(attrs ...slog.Attr) policy.Event {
			return policy.Event{Kind: "retry", Name: "list", What: "retried", Level: slog.LevelDebug, Err: errDown, Attrs: attrs}
		}
		require.Equal(t, []policy.Event{
			retried(slog.Int("attempts", 1), slog.Duration("in", time.Second)),
			retried(slog.Int("attempts", 2), slog.Duration("in", time.Second), slog.Duration("retrying_for", time.Second)),
			{Kind: "retry", Name: "list", What: "ended", Level: slog.LevelDebug, Attrs: []slog.Attr{
				slog.Int("attempts", 3), slog.String("outcome", "recovered"), slog.Duration("retrying_for", 2*time.Second),
			}},
		}, events)
	})
}

func TestBudgetDescribe(t *testing.T) {
	budget := retry.NewBudget(retry.BudgetConfig{Name: "users", Ratio: retry.None, PerSecond: 1})
	d := budget.Describe()
	require.Equal(t, []string{"budget", "users"}, []string{d.Kind, d.Name})
	require.Equal(t, retry.BudgetConfig{Name: "users", Ratio: retry.None, PerSecond: 1}, d.Config())
	require.Nil(t, d.Observe)
	synctest.Test(t, func(t *testing.T) {
		budget := retry.NewBudget(retry.BudgetConfig{Ratio: retry.None, PerSecond: 1})
		require.Equal(t, 2, call(t, budget, 12, fail))
		require.Equal(t, map[string]float64{
			"budget.retries{outcome=allowed}": 10, "budget.retries{outcome=over_budget}": 2, "budget.left": 0,
		}, counters(t, budget.Describe().Metrics()))
	})
}

// Settings files are exact: a Description's Update shows the values that were given.
func TestDescriptionUpdate(t *testing.T) {
	r := retry.New(retry.Config{Name: "list"})
	b := retry.NewBudget(retry.BudgetConfig{Name: "users"})
	change, changeBudget := r.Describe().Update, b.Describe().Update
	attempts := func(n int) func(any) error {
		return func(cfg any) error { cfg.(*retry.Config).Attempts = n; return nil }
	}
	ratio := func(cfg any) error { cfg.(*retry.BudgetConfig).Ratio = 0.5; return nil }
	require.NoError(t, change(true, func(cfg any) error { require.Zero(t, cfg.(*retry.Config).Attempts); return nil }))
	require.NoError(t, change(true, attempts(5)))
	require.NoError(t, changeBudget(true, ratio))
	require.Equal(t, []any{3, 0.2}, []any{r.Config().Attempts, b.Config().Ratio}, "a dry run changes nothing")
	require.ErrorIs(t, change(false, func(cfg any) error { _ = attempts(7)(cfg); return errDown }), errDown)
	require.EqualError(t, change(true, func(cfg any) error { cfg.(*retry.Config).HealthyAfter = -1; return nil }),
		"retry.Config.HealthyAfter is -1ns: must be 0 (for never) or more")
	require.Error(t, changeBudget(false, func(cfg any) error { cfg.(*retry.BudgetConfig).Name = "x"; return nil }))
	require.NoError(t, change(false, attempts(5)))
	require.NoError(t, changeBudget(false, ratio))
	require.Equal(t, []any{5, 0.5}, []any{r.Config().Attempts, b.Config().Ratio})
}

// HealthyAfter starts the count of attempts again, but the call was retried.
func TestEndedEventAfterHealthyAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log eventLog
		r := retry.New(retry.Config{HealthyAfter: time.Minute, Backoff: retry.Constant(time.Second)})
		r.Observe(log.note)
		calls := 0
		err := r.Do(t.Context(), func(context.Context) error {
			if calls++; calls == 1 {
				return errDown
			}
			time.Sleep(time.Hour)
			return retry.Permanent(errDown)
		})
		require.Equal(t, errDown, err)
		events := log.take()
		require.Len(t, events, 2)
		require.Equal(t, retry.EventRetried, events[0].Kind)
		require.Equal(t, retry.EventEnded, events[1].Kind)
		require.Equal(t, retry.OutcomePermanent, events[1].Outcome)
		require.Equal(t, 1, events[1].Attempts)
	})
}

func TestLostNestedCallIsNotCounted(t *testing.T) {
	outer := retry.New(retry.Config{Backoff: retry.Constant(0)})
	inner := retry.New(retry.Config{})
	ctx, cancel := context.WithCancelCause(t.Context())
	err := outer.Wrap(inner.Wrap(func(ctx context.Context) error {
		cancel(ended.LostError("the other was faster"))
		return ctx.Err()
	}))(ctx)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, retry.Stats{Attempts: 1}, inner.Stats())
}
