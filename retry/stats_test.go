package retry_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/retry"
)

// total is how many calls of Do have ended, but for those that have lost a hedge.
func total(s retry.Stats) int64 {
	return s.FirstTry + s.Recovered + s.Exhausted + s.Permanent + s.OverBudget + s.Deadline + s.Canceled + s.Nested
}

func TestStatsCountEachCallOnce(t *testing.T) {
	ctxOf := func(end func(context.CancelFunc)) func(*testing.T) context.Context {
		return func(t *testing.T) context.Context {
			ctx, cancel := context.WithCancel(t.Context())
			t.Cleanup(cancel)
			end(cancel)
			return ctx
		}
	}
	within := func(d time.Duration) func(*testing.T) context.Context {
		return func(t *testing.T) context.Context {
			ctx, cancel := context.WithTimeout(t.Context(), d)
			t.Cleanup(cancel)
			time.Sleep(max(0, -d))
			return ctx
		}
	}
	none := retry.NewBudget(retry.BudgetConfig{Ratio: -1, PerSecond: -1})
	for name, c := range map[string]struct {
		cfg  retry.Config
		ctx  func(*testing.T) context.Context
		errs []error // of the attempts; then success
		want retry.Stats
	}{
		"FirstTry":        {want: retry.Stats{FirstTry: 1, Attempts: 1}},
		"Recovered":       {errs: []error{errDown, full}, want: retry.Stats{Recovered: 1, Attempts: 3, Retried: 2}},
		"Attempts":        {errs: []error{errDown, errDown, errDown}, want: retry.Stats{Exhausted: 1, Attempts: 3, Retried: 2}},
		"NegativeDelay":   {cfg: retry.Config{Backoff: delays()}, errs: []error{errDown}, want: retry.Stats{Exhausted: 1, Attempts: 1}},
		"MaxRetryAfter":   {cfg: retry.Config{MaxRetryAfter: time.Second}, errs: []error{after{time.Minute}}, want: retry.Stats{Exhausted: 1, Attempts: 1}},
		"Permanent":       {errs: []error{retry.Permanent(errDown)}, want: retry.Stats{Permanent: 1, Attempts: 1}},
		"PermanentLater":  {errs: []error{errDown, retry.Permanent(errDown)}, want: retry.Stats{Permanent: 1, Attempts: 2, Retried: 1}},
		"If":              {cfg: retry.Config{If: func(error) bool { return false }}, errs: []error{errDown}, want: retry.Stats{Permanent: 1, Attempts: 1}},
		"Open":            {errs: []error{open}, want: retry.Stats{Permanent: 1, Attempts: 1}},
		"OpenLater":       {errs: []error{errDown, open}, want: retry.Stats{Permanent: 1, Attempts: 2, Retried: 1}},
		"OverBudget":      {cfg: retry.Config{Budget: none}, errs: []error{errDown}, want: retry.Stats{OverBudget: 1, Attempts: 1}},
		"WaitTooLong":     {ctx: within(time.Second), errs: []error{errDown}, want: retry.Stats{Deadline: 1, Attempts: 1}},
		"DeadlineInFn":    {ctx: within(time.Second), errs: []error{nil}, want: retry.Stats{Deadline: 1, Attempts: 1}},
		"DeadlineBefore":  {ctx: within(-time.Second), want: retry.Stats{Deadline: 1}},
		"CanceledBefore":  {ctx: ctxOf(func(cancel context.CancelFunc) { cancel() }), want: retry.Stats{Canceled: 1}},
		"CanceledInFn":    {ctx: ctxOf(func(cancel context.CancelFunc) { time.AfterFunc(time.Second, cancel) }), errs: []error{nil}, want: retry.Stats{Canceled: 1, Attempts: 1}},
		"CanceledInAWait": {ctx: ctxOf(func(cancel context.CancelFunc) { time.AfterFunc(time.Second, cancel) }), errs: []error{errDown}, want: retry.Stats{Canceled: 1, Attempts: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if c.cfg.Backoff == nil {
					c.cfg.Backoff = retry.Constant(2 * time.Second)
				}
				ctx := t.Context()
				if c.ctx != nil {
					ctx = c.ctx(t)
				}
				n := 0
				r := retry.New(c.cfg)
				_ = r.Do(ctx, func(ctx context.Context) error {
					if n++; n > len(c.errs) {
						return nil
					}
					if c.errs[n-1] == nil { // the end of ctx
						<-ctx.Done()
						return ctx.Err()
					}
					return c.errs[n-1]
				})
				require.Equal(t, c.want, r.Stats())
				require.Equal(t, int64(1), total(r.Stats()))
			})
		})
	}
}

// An after asks for a wait.
type after struct{ d time.Duration }

func (a after) Error() string             { return "later" }
func (a after) RetryAfter() time.Duration { return a.d }

func TestStatsCountNestedCalls(t *testing.T) {
	outer := retry.New(retry.Config{Backoff: retry.Constant(0)})
	inner := retry.New(retry.Config{})
	fn, _ := failing(2, errDown)
	require.NoError(t, outer.Wrap(inner.Wrap(fn))(t.Context()))
	require.Equal(t, retry.Stats{Recovered: 1, Attempts: 3, Retried: 2}, outer.Stats())
	require.Equal(t, retry.Stats{FirstTry: 1, Nested: 2, Attempts: 3}, inner.Stats())
}

func TestStatsAreExactUnderContention(t *testing.T) {
	const goroutines, each = 64, 500
	r := retry.New(retry.Config{Backoff: retry.Constant(0)})
	var wg sync.WaitGroup
	for range goroutines {
		wg.Go(func() {
			for i := range each {
				fn, _ := failing(i%5, errDown) // 0: at once; 1, 2: recovers; 3, 4: exhausted
				_ = r.Do(context.Background(), fn)
				if i%50 == 0 {
					if s := r.Stats(); total(s) > s.Attempts {
						t.Errorf("%+v", s)
					}
				}
			}
		})
	}
	wg.Wait()
	const fifth = goroutines * each / 5
	require.Equal(t, retry.Stats{
		FirstTry: fifth, Recovered: 2 * fifth, Exhausted: 2 * fifth,
		Attempts: (1 + 2 + 3 + 3 + 3) * fifth, Retried: (1 + 2 + 2 + 2) * fifth,
	}, r.Stats())
}

func TestStatsLeaveOutCallsThatPanic(t *testing.T) {
	for name, c := range map[string]struct {
		cfg retry.Config
		fn  func(context.Context) error
	}{
		"fn":      {fn: func(context.Context) error { panic("broken") }},
		"OnRetry": {cfg: retry.Config{OnRetry: func(context.Context, retry.Attempt) { panic("broken") }}, fn: fail},
	} {
		t.Run(name, func(t *testing.T) {
			r := retry.New(c.cfg)
			require.PanicsWithValue(t, "broken", func() { _ = r.Do(t.Context(), c.fn) })
			require.Zero(t, total(r.Stats()))
		})
	}
	r := retry.New(retry.Config{Backoff: retry.Constant(0)})
	r.Observe(func(_ context.Context, e retry.Event) {
		if e.Kind == retry.EventEnded {
			panic("broken")
		}
	})
	require.PanicsWithValue(t, "broken", func() { _ = r.Do(t.Context(), fail) })
	require.Equal(t, retry.Stats{Attempts: 3, Retried: 2}, r.Stats())
}
