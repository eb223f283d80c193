package retry_test

import (
	"context"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/retry"
)

// call makes n calls that fail once each, so that each wants a retry that fails.
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

// balance returns the figures of b, but for how many retries it has allowed so far.
func balance(b *retry.Budget) retry.BudgetStats {
	s := b.Stats()
	s.Allowed = 0
	return s
}

func TestBudgetAllowsAFractionOfTheCalls(t *testing.T) {
	for _, c := range []struct {
		name   string
		cfg    retry.BudgetConfig
		calls  int
		allows int
	}{
		{"default", retry.BudgetConfig{}, 1000, 300},
		{"no floor", retry.BudgetConfig{PerSecond: -1}, 1000, 200},
		{"no ratio", retry.BudgetConfig{Ratio: -1}, 1000, 100},
		{"nothing at all", retry.BudgetConfig{Ratio: -1, PerSecond: -1}, 1000, 0},
		{"other figures", retry.BudgetConfig{Ratio: 0.05, PerSecond: 2}, 1000, 70},
		{"figures that floats round down", retry.BudgetConfig{Ratio: 0.29, PerSecond: -1}, 100, 29},
		{"part of a retry is none", retry.BudgetConfig{PerSecond: -1}, 9, 1},
		{"more retries than calls", retry.BudgetConfig{Ratio: 3, PerSecond: 1}, 10, 10},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := retry.NewBudget(c.cfg)
				require.Equal(t, c.calls-c.allows, call(t, b, c.calls, fail))
				s := b.Stats()
				require.Equal(t, int64(c.calls), s.Called)
				require.Equal(t, int64(c.allows), s.Charged)
				require.Equal(t, int64(c.allows), s.Allowed)
				require.Equal(t, int64(c.calls-c.allows), s.OverBudget)
			})
		})
	}
}

func TestBudgetThatIsExhaustedKeepsTheError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{Ratio: -1, PerSecond: -1})
		hooks := 0
		r := retry.New(retry.Config{Name: "users", Budget: b, OnRetry: func(context.Context, retry.Attempt) { hooks++ }})
		err := r.Do(t.Context(), fail)
		require.ErrorIs(t, err, errDown)
		require.ErrorIs(t, err, retry.ErrOverBudget)
		require.NotErrorIs(t, err, retry.ErrExhausted)
		require.EqualError(t, err, "retry: users: gave up after 1 attempt: over budget: backend: down")
		require.Zero(t, hooks)
	})
}

func TestBudgetIsChargedBeforeTheWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{Ratio: -1, PerSecond: 1})
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
		require.Equal(t, int64(5), refused.Load(), "they were refused without a wait, while the others waited")
	})
}

func TestBudgetTakesNothingForRetriesThatSucceedOrAreNotMade(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{Ratio: -1, PerSecond: 1})
		require.Zero(t, call(t, b, 1000, succeed))
		require.Zero(t, b.Stats().Charged)

		ctx, cancel := context.WithCancel(t.Context())
		r := retry.New(retry.Config{Backoff: retry.Constant(time.Second), Budget: b, OnRetry: func(context.Context, retry.Attempt) {
			require.Equal(t, int64(1), b.Stats().Charged)
			time.AfterFunc(time.Millisecond, cancel)
		}})
		require.ErrorIs(t, r.Do(ctx, fail), context.Canceled)
		require.Zero(t, b.Stats().Charged)

		require.Equal(t, 10, call(t, b, 20, fail))
	})
}

func TestBudgetSlides(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{Ratio: 0.5, PerSecond: 1})
		require.Zero(t, call(t, b, 20, fail))
		require.Equal(t, retry.BudgetStats{Called: 20, Charged: 20}, balance(b))
		// Calls leave the window up to half a second too early, retries as much too
		// late: the bound holds for each ten seconds there are.
		time.Sleep(9500 * time.Millisecond)
		require.Equal(t, retry.BudgetStats{Called: 20, Charged: 20}, balance(b))
		time.Sleep(500 * time.Millisecond)
		require.Equal(t, retry.BudgetStats{Called: 0, Charged: 20}, balance(b))
		time.Sleep(500 * time.Millisecond)
		require.Equal(t, retry.BudgetStats{Left: 10}, balance(b))
		time.Sleep(1000 * time.Hour)
		require.Equal(t, retry.BudgetStats{Left: 10}, balance(b))
		require.Equal(t, 5, call(t, b, 30, fail))
		require.Equal(t, retry.BudgetStats{Called: 30, Charged: 25, BudgetTotals: retry.BudgetTotals{OverBudget: 5}}, balance(b))
	})
}

func TestRefundOfAChargeThatHasLeftTheWindowChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{Ratio: -1, PerSecond: 1})
		var wg sync.WaitGroup
		wg.Go(func() {
			call(t, b, 1, func(context.Context) error {
				time.Sleep(10600 * time.Millisecond)
				return nil
			})
		})
		time.Sleep(10500 * time.Millisecond)
		require.Zero(t, call(t, b, 9, fail))
		wg.Wait()
		require.Equal(t, int64(9), b.Stats().Charged)
	})
}

func TestRetriesOfAnOuterRetrierEarnNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{})
		inner := retry.New(retry.Config{Budget: b})
		outer := retry.New(retry.Config{Attempts: 10, Backoff: retry.Constant(0)})
		calls := 0
		err := outer.Wrap(inner.Wrap(func(context.Context) error { calls++; return errDown }))(t.Context())
		require.ErrorIs(t, err, errDown)
		require.Equal(t, 10, calls)
		require.Equal(t, int64(1), b.Stats().Called)
	})
}

// TestBudgetHoldsForEveryTenSeconds has many clients call at random, with
// failures that come and go, and looks at each ten seconds that end in a retry.
func TestBudgetHoldsForEveryTenSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ratio, perSecond = 0.3, 2
		b := retry.NewBudget(retry.BudgetConfig{Ratio: ratio, PerSecond: perSecond})
		start := time.Now()
		var mu sync.Mutex
		var calls, charges []time.Duration
		r := retry.New(retry.Config{
			Attempts: 6,
			Backoff:  retry.Exponential(10*time.Millisecond, 20*time.Second),
			Budget:   b,
			OnRetry: func(context.Context, retry.Attempt) {
				mu.Lock()
				defer mu.Unlock()
				charges = append(charges, time.Since(start))
			},
		})
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				for time.Since(start) < 3*time.Minute {
					busy := int(time.Since(start)/(20*time.Second))%3 + 1
					time.Sleep(time.Duration(rand.Int64N(int64(time.Second)/int64(busy*busy)) + 1))
					mu.Lock()
					calls = append(calls, time.Since(start))
					mu.Unlock()
					_ = r.Do(t.Context(), fail)
				}
			})
		}
		wg.Wait()
		require.Greater(t, len(calls), 10_000)
		require.Greater(t, len(charges), 2000)
		require.Positive(t, b.Stats().OverBudget)
		within := func(times []time.Duration, end time.Duration) int {
			first, _ := slices.BinarySearch(times, end-10*time.Second+1)
			last, _ := slices.BinarySearch(times, end+1)
			return last - first
		}
		used := 0.0
		for _, end := range charges {
			allowed := ratio*float64(within(calls, end)) + perSecond*10
			got := float64(within(charges, end))
			require.LessOrEqual(t, got, allowed, "in the ten seconds until %v", end)
			used = max(used, got/allowed)
		}
		require.Greater(t, used, 0.85, "and it is not far stricter than it says")
	})
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
				if i%2 == 0 { // half of them give back what they took
					then = succeed
				}
				refused.Add(int64(call(t, b, each, then)))
			})
		}
		wg.Wait()
		s := b.Stats()
		require.Equal(t, int64(goroutines*each), s.Called)
		require.LessOrEqual(t, s.Charged, int64(1000+goroutines*each/10))
		require.Equal(t, refused.Load(), s.OverBudget)
		require.Equal(t, 1000+goroutines*each/10-s.Charged, s.Left)

		time.Sleep(time.Minute)
		require.Equal(t, retry.BudgetStats{Left: 1000, BudgetTotals: retry.BudgetTotals{OverBudget: s.OverBudget}}, balance(b), "no charge is lost and none stays")
	})
}

// TestBudgetIsNeverOverdrawn has many goroutines take the last of a budget and
// give it back, over and over.
func TestBudgetIsNeverOverdrawn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{Ratio: -1, PerSecond: 1})
		var inFlight, most atomic.Int64
		var wg sync.WaitGroup
		for range 32 {
			wg.Go(func() {
				call(t, b, 2000, func(context.Context) error {
					n := inFlight.Add(1)
					for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
					}
					runtime.Gosched()
					inFlight.Add(-1)
					return nil
				})
			})
		}
		wg.Wait()
		require.Equal(t, int64(10), most.Load())
		require.Zero(t, b.Stats().Charged)
	})
}

// TestBudgetOfAThousandClients is what a budget is for: a backend that is down
// gets hardly more calls than it would without retries.
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
	const floor = 10 * (30 + 10) // 10 a second, with the window before the first
	require.LessOrEqual(t, float64(requests), 1.2*float64(calls)+floor)
	require.Greater(t, float64(requests), 1.15*float64(calls))
	t.Logf("%d calls made %d requests: %.3f x", calls, requests, float64(requests)/float64(calls))
}

func TestBudgetConfigSaysWhatIsWrong(t *testing.T) {
	for want, cfg := range map[string]retry.BudgetConfig{
		"retry.BudgetConfig.Ratio is 101: must be at most 100, 0 (for 0.2), or negative (for none)":            {Ratio: 101},
		"retry.BudgetConfig.Ratio is NaN: must be at most 100, 0 (for 0.2), or negative (for none)":            {Ratio: math.NaN()},
		"retry.BudgetConfig.PerSecond is 1000001: must be at most 1000000, 0 (for 10), or negative (for none)": {PerSecond: 1000001},
	} {
		require.EqualError(t, cfg.Validate(), want)
		require.PanicsWithError(t, want, func() { retry.NewBudget(cfg) })
	}
	require.NoError(t, retry.BudgetConfig{Ratio: 100, PerSecond: 1e6}.Validate())
	require.NoError(t, retry.BudgetConfig{Ratio: math.Inf(-1), PerSecond: math.MinInt}.Validate())
	require.NotPanics(t, func() { retry.NewBudget(retry.BudgetConfig{Ratio: math.Inf(-1), PerSecond: math.MinInt}) })
}
