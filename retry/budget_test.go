package retry_test

import (
	"context"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/retry"
)

// call calls Do n times. Each first attempt fails, and a retry returns the error of then. It returns the number of
// retries that were over budget.
func call(t *testing.T, b *retry.Budget, n int, then func(context.Context) error) (refused int) {
	r := retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(0), Budget: b})
	for range n {
		err := r.Do(t.Context(), func(ctx context.Context) error {
			if n, _ := retry.AttemptFrom(ctx); n == 1 {
				return errDown
			}
			return then(ctx)
		})
		if err != nil {
			require.ErrorIs(t, err, errDown)
		}
	}
	return int(r.Stats().OverBudget)
}

func fail(context.Context) error { return errDown }

func TestBudgetAllowsAFractionOfTheCalls(t *testing.T) {
	for _, c := range []struct {
		name   string
		cfg    retry.BudgetConfig
		calls  int
		allows int
	}{
		{"default", retry.BudgetConfig{}, 1000, 300},
		{"no floor", retry.BudgetConfig{PerSecond: retry.None}, 1000, 200},
		{"no ratio", retry.BudgetConfig{Ratio: retry.None}, 1000, 100},
		{"nothing at all", retry.BudgetConfig{Ratio: retry.None, PerSecond: retry.None}, 1000, 0},
		{"other figures", retry.BudgetConfig{Ratio: 0.05, PerSecond: 2}, 1000, 70},
		{"figures that floats round down", retry.BudgetConfig{Ratio: 0.29, PerSecond: retry.None}, 100, 29},
		{"part of a retry is none", retry.BudgetConfig{PerSecond: retry.None}, 9, 1},
		{"more retries than calls", retry.BudgetConfig{Ratio: 3, PerSecond: 1}, 10, 10},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := retry.NewBudget(c.cfg)
				require.Equal(t, c.calls-c.allows, call(t, b, c.calls, fail))
				s := b.Stats()
				require.Equal(t, int64(c.allows), s.Allowed)
				require.Equal(t, int64(c.calls-c.allows), s.OverBudget)
			})
		})
	}
}

func TestExhaustedBudgetKeepsTheError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{Ratio: retry.None, PerSecond: retry.None})
		hooks := 0
		r := onRetry(retry.New(retry.Config{Name: "users", Budget: b}), func(context.Context, retry.Event) { hooks++ })
		err := r.Do(t.Context(), fail)
		require.ErrorIs(t, err, errDown)
		require.ErrorIs(t, err, retry.ErrOverBudget)
		require.NotErrorIs(t, err, retry.ErrExhausted)
		require.EqualError(t, err, "retry: users: gave up after 1 attempt: over budget; last error: backend: down")
		require.Zero(t, hooks)
	})
}

func TestBudgetIsChargedBeforeTheWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{Ratio: retry.None, PerSecond: 1})
		r := retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(time.Second), Budget: b})
		var refused atomic.Int64
		var wg sync.WaitGroup
		start := time.Now()
		for range 15 {
			wg.Go(func() {
				_ = r.Do(t.Context(), fail)
				if time.Since(start) == 0 {
					refused.Add(1)
				}
			})
		}
		wg.Wait()
		require.Equal(t, int64(5), refused.Load(), "they were over budget without a wait, while the others waited")
	})
}

func TestBudgetRefills(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{Ratio: 0.5, PerSecond: 1})
		require.Zero(t, call(t, b, 20, fail), "10 initially and 10 from the calls")
		require.Equal(t, 1, call(t, b, 1, fail), "half a retry allows none")
		time.Sleep(500*time.Millisecond - 1)
		require.Zero(t, b.Stats().Left)
		time.Sleep(time.Nanosecond)
		require.Equal(t, int64(1), b.Stats().Left)
		time.Sleep(9 * time.Second)
		require.Equal(t, int64(10), b.Stats().Left)
		time.Sleep(1000 * time.Hour)
		require.Equal(t, int64(10+50), b.Stats().Left, "it holds what ten seconds and a hundred calls add")
		require.Equal(t, 200-60-99, call(t, b, 200, succeed), "and no more: the first call adds nothing")
	})
	synctest.Test(t, func(t *testing.T) { // even if time adds nothing
		b := retry.NewBudget(retry.BudgetConfig{Ratio: 0.5, PerSecond: retry.None})
		r := retry.New(retry.Config{Budget: b})
		for range 200 {
			require.NoError(t, r.Do(t.Context(), succeed))
		}
		require.Equal(t, int64(50), b.Stats().Left, "it holds what a hundred calls add")
	})
	synctest.Test(t, func(t *testing.T) { // the time between two attempts adds retries for the next one
		b := retry.NewBudget(retry.BudgetConfig{Ratio: retry.None, PerSecond: 1})
		require.Zero(t, call(t, b, 9, fail))
		r := retry.New(retry.Config{Attempts: 5, Backoff: retry.Constant(time.Second), Budget: b})
		require.ErrorIs(t, r.Do(t.Context(), fail), retry.ErrExhausted)
	})
	synctest.Test(t, func(t *testing.T) { // no nanosecond is lost between calls
		b := retry.NewBudget(retry.BudgetConfig{Ratio: retry.None, PerSecond: 3})
		require.Equal(t, 70, call(t, b, 100, fail))
		for range 1000 {
			time.Sleep(time.Millisecond + 1)
			_ = b.Stats()
		}
		require.Equal(t, int64(3), b.Stats().Left)
	})
	synctest.Test(t, func(t *testing.T) { // no sum overflows
		b := retry.NewBudget(retry.BudgetConfig{Ratio: 100, PerSecond: 1e6})
		time.Sleep(100 * 365 * 24 * time.Hour)
		require.Equal(t, int64(1e7+1e4), b.Stats().Left)
	})
}

func TestBudgetInUseWhileLessThanFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{PerSecond: 1})
		r := retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(0), Budget: b})
		require.False(t, b.Describe().InUse())
		require.False(t, r.Describe().InUse())
		require.False(t, retry.New(retry.Config{}).Describe().InUse())
		for range 2 {
			_ = r.Do(t.Context(), fail)
		}
		require.True(t, b.Describe().InUse())
		require.True(t, r.Describe().InUse(), "a new Retrier would have a new Budget")
		time.Sleep(1600*time.Millisecond - 1)
		require.True(t, b.Describe().InUse())
		time.Sleep(time.Nanosecond)
		require.False(t, b.Describe().InUse())
		require.False(t, r.Describe().InUse())
	})
}

func TestBudgetHealth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{Ratio: retry.None, PerSecond: 1})
		r := retry.New(retry.Config{Budget: b})
		require.Zero(t, call(t, b, 10, fail))
		healthOf := func(d policy.Describer) policy.Health { return d.Describe().Health(t.Context()) }
		spent := policy.Health{Status: policy.Warn, State: "spent"}
		require.Zero(t, healthOf(b), "every retry was allowed")
		require.Equal(t, 1, call(t, b, 1, fail))
		require.Equal(t, spent, healthOf(b))
		require.Equal(t, spent, healthOf(r))
		require.Zero(t, healthOf(retry.New(retry.Config{})))
		time.Sleep(time.Second)
		require.Zero(t, healthOf(b), "another would be allowed")
		require.Zero(t, call(t, b, 1, fail))
		require.Zero(t, healthOf(b))
	})
}

// A full Group does not replace the Retrier of a key during a call, nor while its Budget is not full: the key would
// get a second budget.
func TestBudgetOfAKeyNotReplacedWhileInUse(t *testing.T) {
	for round := range 200 {
		synctest.Test(t, func(t *testing.T) {
			group := resilience.NewGroup(func(int) *retry.Retrier {
				budget := retry.NewBudget(retry.BudgetConfig{Ratio: retry.None, PerSecond: 1})
				return retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(time.Millisecond), Budget: budget})
			}, resilience.GroupConfig{MaxKeys: 2})
			var wg sync.WaitGroup
			var retries atomic.Int64
			for w := range 8 {
				wg.Go(func() {
					for i := range 5 {
						_ = group.Do(t.Context(), 1, func(ctx context.Context) error {
							if n, _ := retry.AttemptFrom(ctx); n == 2 {
								retries.Add(1)
							}
							return errDown
						})
						_ = group.Do(t.Context(), 100+(w*5+i+round)%7, succeed)
					}
				})
			}
			wg.Wait()
			require.LessOrEqual(t, retries.Load(), int64(10), "in round %d", round)
		})
	}
}

// TestBudgetIsExactUnderContention charges from many goroutines in one instant.
func TestBudgetIsExactUnderContention(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{Ratio: 0.1, PerSecond: 100})
		const goroutines, each = 32, 1000
		var wg sync.WaitGroup
		var refused atomic.Int64
		for i := range goroutines {
			wg.Go(func() {
				then := fail
				if i%2 == 0 { // the retries of half of them are refunded
					then = func(context.Context) error { return full }
				}
				refused.Add(int64(call(t, b, each, then)))
			})
		}
		d := b.Describe()
		for _, look := range []func(){func() { b.Stats() }, func() { d.Health(t.Context()) }, func() { d.InUse() }} {
			wg.Go(func() { // each on its own goroutine, so that no lock of another one synchronizes it
				for range each {
					look()
				}
			})
		}
		wg.Wait()
		s := b.Stats()
		require.Equal(t, refused.Load(), s.OverBudget)
		require.Equal(t, int64(goroutines*each), s.Allowed+s.OverBudget)
		require.Less(t, s.Left, int64(1000+10), "it was full at most once")
		time.Sleep(time.Minute)
		require.Equal(t, int64(1000+10), b.Stats().Left, "no charge is lost, and no refund")
	})
}

// TestBudgetOfAThousandClients shows the purpose of a budget: a backend that is down gets hardly more calls than
// without retries.
func TestBudgetOfAThousandClients(t *testing.T) {
	load := func(budgeted bool) (calls, requests int64) {
		synctest.Test(t, func(t *testing.T) {
			cfg := retry.Config{Attempts: 4}
			if budgeted {
				cfg.Budget = retry.NewBudget(retry.BudgetConfig{})
			}
			r := retry.New(cfg)
			var made, reached atomic.Int64
			start := time.Now()
			var wg sync.WaitGroup
			for range 1000 {
				wg.Go(func() {
					for {
						time.Sleep(time.Duration(rand.Int64N(int64(2 * time.Second))))
						if time.Since(start) > 30*time.Second {
							return
						}
						made.Add(1)
						_ = r.Do(t.Context(), func(context.Context) error {
							reached.Add(1)
							return errDown
						})
					}
				})
			}
			wg.Wait()
			calls, requests = made.Load(), reached.Load()
		})
		return calls, requests
	}
	calls, requests := load(false)
	require.Equal(t, 4*calls, requests)

	calls, requests = load(true)
	const floor = 10 * (31 + 10) // 10 a second until the last retry, and the initial retries
	require.LessOrEqual(t, float64(requests), 1.2*float64(calls)+floor)
	require.Greater(t, float64(requests), 1.15*float64(calls))
	t.Logf("%d calls made %d requests: %.3f x", calls, requests, float64(requests)/float64(calls))
}

// The time before an Update adds retries under the old Config.
func TestBudgetUpdateIsNotRetroactive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{Ratio: retry.None, PerSecond: retry.None})
		time.Sleep(time.Hour)
		require.NoError(t, b.Update(func(c *retry.BudgetConfig) { c.PerSecond = 10 }))
		require.Zero(t, b.Stats().Left)
		time.Sleep(time.Second)
		require.NoError(t, b.Update(func(c *retry.BudgetConfig) { c.PerSecond = retry.None }))
		require.EqualValues(t, 0, b.Stats().Left, "it holds no more than ten seconds add")
		require.NoError(t, b.Update(func(c *retry.BudgetConfig) { c.PerSecond = 10 }))
		time.Sleep(2 * time.Second)
		require.NoError(t, b.Update(func(c *retry.BudgetConfig) { c.PerSecond = 1000 }))
		require.EqualValues(t, 20, b.Stats().Left)
	})
}

func TestBudgetConfigValidate(t *testing.T) {
	for want, cfg := range map[string]retry.BudgetConfig{
		"retry.BudgetConfig.Ratio is 101: must be 0 (for 0.2) to 100, or None":                {Ratio: 101},
		"retry.BudgetConfig.Ratio is NaN: must be 0 (for 0.2) to 100, or None":                {Ratio: math.NaN()},
		"retry.BudgetConfig.Ratio is -1: must be 0 (for 0.2) to 100, or None":                 {Ratio: retry.Unlimited},
		"retry.BudgetConfig.Ratio is -Inf: must be 0 (for 0.2) to 100, or None":               {Ratio: math.Inf(-1)},
		"retry.BudgetConfig.PerSecond is 1000001: must be 0 (for 10) to 1000000, or None":     {PerSecond: 1000001},
		"retry.BudgetConfig.PerSecond is -1: must be 0 (for 10) to 1000000, or None":          {PerSecond: retry.Unlimited},
		"retry.BudgetConfig.PerSecond is -2147483647: must be 0 (for 10) to 1000000, or None": {PerSecond: retry.None + 1},
	} {
		require.EqualError(t, cfg.Validate(), want)
		require.PanicsWithError(t, want, func() { retry.NewBudget(cfg) })
	}
	require.NoError(t, retry.BudgetConfig{Ratio: 100, PerSecond: 1e6}.Validate())
	require.NoError(t, retry.BudgetConfig{Ratio: retry.None, PerSecond: retry.None}.Validate())
	require.Zero(t, retry.NewBudget(retry.BudgetConfig{Ratio: retry.None, PerSecond: retry.None}).Stats().Left)
}

// The eviction of one of several Retriers loses no state of a Budget that they share.
func TestSharedBudgetKeepsNoMember(t *testing.T) {
	for _, update := range []bool{false, true} {
		budget := retry.NewBudget(retry.BudgetConfig{PerSecond: 1, Ratio: retry.None})
		group := resilience.NewGroup(func(string) *retry.Retrier {
			cfg := retry.Config{Attempts: 2, Backoff: retry.Constant(0), Budget: budget}
			if update {
				cfg.Budget = nil
			}
			r := retry.New(cfg)
			for range 2 {
				require.NoError(t, r.Update(func(c *retry.Config) { c.Budget = budget }))
			}
			return r
		}, resilience.GroupConfig{MaxKeys: 1})
		require.Error(t, group.Do(t.Context(), "a", fail))
		require.True(t, budget.Describe().InUse())
		require.NoError(t, group.Do(t.Context(), "b", succeed))
		_, ok := group.Get("b")
		require.True(t, ok)
	}
}

// A Budget that several Retriers share outlives each of them, so it keeps none of them in use.
func TestSharedBudgetKeepsNoRetrierInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{})
		first := retry.New(retry.Config{Budget: b, Backoff: retry.Constant(0)})
		fn, _ := failing(1, errDown)
		require.NoError(t, first.Do(t.Context(), fn))
		require.True(t, first.Describe().InUse())
		require.NoError(t, first.Update(func(c *retry.Config) { c.Attempts = 5 }))
		require.True(t, first.Describe().InUse(), "it is still the only Retrier")
		second := retry.New(retry.Config{Budget: b})
		require.False(t, first.Describe().InUse())
		require.False(t, second.Describe().InUse())
	})
}
