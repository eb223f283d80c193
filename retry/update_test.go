package retry_test

import (
	"context"
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/retry"
)

func TestConfigHasItsDefaults(t *testing.T) {
	r := retry.New(retry.Config{Name: "users"})
	require.Equal(t, "users", r.Name())
	c := r.Config()
	require.NotNil(t, c.Backoff)
	c.Backoff = nil
	require.Equal(t, retry.Config{Name: "users", Attempts: 3}, c)
	require.Equal(t, -1, retry.New(retry.Config{Attempts: -1}).Config().Attempts)

	b := retry.NewBudget(retry.BudgetConfig{Name: "users"})
	require.Equal(t, "users", b.Name())
	require.Equal(t, retry.BudgetConfig{Name: "users", Ratio: 0.2, PerSecond: 10}, b.Config())

	h := retry.NewHedger[int](retry.HedgeConfig{Name: "users", Delay: ms})
	require.Equal(t, "users", h.Name())
	require.Equal(t, retry.HedgeConfig{Name: "users", Delay: ms, Max: 2}, h.Config())
}

func TestUpdateTakesEffectOnTheNextCall(t *testing.T) {
	r := retry.New(retry.Config{Backoff: retry.Constant(0)})
	attempts := func() int {
		fn, calls := failing(forever, errDown)
		_ = r.Do(t.Context(), fn)
		return *calls
	}
	require.Equal(t, 3, attempts())
	require.NoError(t, r.Update(func(c *retry.Config) { c.Attempts = 5 }))
	require.Equal(t, 5, attempts())
	require.Equal(t, 5, r.Config().Attempts)
	require.Equal(t, retry.Stats{Exhausted: 2, Attempts: 8, Retried: 6}, r.Stats(), "figures are kept")
}

func TestUpdateComputesDefaultsAnew(t *testing.T) {
	r := retry.New(retry.Config{})
	require.NoError(t, r.Update(func(c *retry.Config) {
		require.Zero(t, c.Attempts, "as it was given")
		c.Attempts = 5
	}))
	require.NoError(t, r.Update(func(c *retry.Config) { c.MaxElapsed = time.Hour }))
	require.Equal(t, 5, r.Config().Attempts)
	require.NoError(t, r.Update(func(c *retry.Config) { c.Attempts = 0 }))
	require.Equal(t, 3, r.Config().Attempts)
}

func TestUpdateLeavesCallsUnderWayAlone(t *testing.T) {
	old := retry.NewBudget(retry.BudgetConfig{})
	next := retry.NewBudget(retry.BudgetConfig{})
	r := retry.New(retry.Config{Backoff: retry.Constant(0), Budget: old})
	calls := 0
	err := r.Do(t.Context(), func(context.Context) error {
		if calls++; calls == 1 {
			require.NoError(t, r.Update(func(c *retry.Config) {
				c.Attempts, c.Budget, c.AttemptTimeout = 1, next, time.Nanosecond
				c.Backoff = func() retry.Backoff { return retry.Constant(time.Hour)() }
			}))
		}
		return errDown
	})
	require.Equal(t, 3, calls)
	require.ErrorIs(t, err, retry.ErrExhausted)
	require.Equal(t, int64(2), old.Stats().Charged, "the retries are charged to the Budget that the call began with")
	require.Zero(t, next.Stats().Allowed)
	require.Same(t, next, r.Config().Budget)
}

func TestUpdateThatIsNotValidChangesNothing(t *testing.T) {
	r := retry.New(retry.Config{Name: "users"})
	b := retry.NewBudget(retry.BudgetConfig{Name: "users"})
	h := retry.NewHedger[int](retry.HedgeConfig{Name: "users", Delay: ms, Quantile: 0.5})
	for want, update := range map[string]func() error{
		"retry.Config.MaxElapsed is -1ns: must be 0 (for no limit) or more": func() error {
			return r.Update(func(c *retry.Config) { c.MaxElapsed, c.Attempts = -1, 7 })
		},
		`retry.Config.Name is "orders": must be "users" as before: it cannot change`: func() error {
			return r.Update(func(c *retry.Config) { c.Name, c.Attempts = "orders", 7 })
		},
		"retry.BudgetConfig.Ratio is NaN: must be at most 100, 0 (for 0.2), or negative (for none)": func() error {
			return b.Update(func(c *retry.BudgetConfig) { c.Ratio, c.PerSecond = math.NaN(), 7 })
		},
		`retry.BudgetConfig.Name is "orders": must be "users" as before: it cannot change`: func() error {
			return b.Update(func(c *retry.BudgetConfig) { c.Name, c.PerSecond = "orders", 7 })
		},
		"retry.HedgeConfig.Delay is 0s: must be more than 0": func() error {
			return h.Update(func(c *retry.HedgeConfig) { c.Delay, c.Max = 0, 7 })
		},
		`retry.HedgeConfig.Name is "orders": must be "users" as before: it cannot change`: func() error {
			return h.Update(func(c *retry.HedgeConfig) { c.Name, c.Max = "orders", 7 })
		},
	} {
		require.EqualError(t, update(), want)
	}
	broken := errors.New("broken")
	require.PanicsWithValue(t, broken, func() {
		_ = r.Update(func(c *retry.Config) { c.Attempts = 7; panic(broken) })
	})
	require.PanicsWithValue(t, broken, func() {
		_ = b.Update(func(c *retry.BudgetConfig) { c.PerSecond = 7; panic(broken) })
	})
	require.PanicsWithValue(t, broken, func() { _ = h.Update(func(c *retry.HedgeConfig) { c.Max = 7; panic(broken) }) })
	require.Equal(t, 3, r.Config().Attempts)
	require.Equal(t, 10, b.Config().PerSecond)
	require.Equal(t, retry.HedgeConfig{Name: "users", Delay: ms, Quantile: 0.5, Max: 2}, h.Config())
	require.NoError(t, r.Update(func(*retry.Config) {}), "no lock is held")
	require.NoError(t, b.Update(func(*retry.BudgetConfig) {}))
	require.NoError(t, h.Update(func(*retry.HedgeConfig) {}))
}

func TestUpdateOfABudgetKeepsItsWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{Ratio: 0.1, PerSecond: -1})
		require.Equal(t, 90, call(t, b, 100, fail))
		require.Equal(t, retry.BudgetStats{Called: 100, Charged: 10, BudgetTotals: retry.BudgetTotals{Allowed: 10, OverBudget: 90}}, b.Stats())
		require.NoError(t, b.Update(func(c *retry.BudgetConfig) { c.Ratio = 0.5 }))
		require.Equal(t, retry.BudgetStats{Called: 100, Charged: 10, Left: 40, BudgetTotals: retry.BudgetTotals{Allowed: 10, OverBudget: 90}}, b.Stats())
		require.NoError(t, b.Update(func(c *retry.BudgetConfig) { c.Ratio = 0.05 }))
		require.Equal(t, retry.BudgetStats{Called: 100, Charged: 10, BudgetTotals: retry.BudgetTotals{Allowed: 10, OverBudget: 90}}, b.Stats(), "overdrawn for now")
		require.NoError(t, b.Update(func(c *retry.BudgetConfig) { c.PerSecond = 1 }))
		require.Equal(t, int64(5), b.Stats().Left)
	})
}

func TestUpdateOfAHedgerKeepsItsLatencies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := retry.NewHedger[string](retry.HedgeConfig{Delay: time.Second, Quantile: 0.5})
		for range 20 {
			fn, _ := replies(reply{takes: 10 * ms})
			_, err := h.Do(t.Context(), fn)
			require.NoError(t, err)
		}
		require.NoError(t, h.Update(func(c *retry.HedgeConfig) { c.Delay, c.Max = time.Minute, 3 }))
		require.Equal(t, retry.HedgeStats{FirstWon: 20, Delay: 10*ms + 1}, h.Stats())
		require.NoError(t, h.Update(func(c *retry.HedgeConfig) { c.Quantile = 0 }))
		require.Equal(t, retry.HedgeStats{FirstWon: 20, Delay: time.Minute}, h.Stats())
		for range 30 {
			fn, _ := replies(reply{takes: 20 * ms})
			_, err := h.Do(t.Context(), fn)
			require.NoError(t, err)
		}
		require.NoError(t, h.Update(func(c *retry.HedgeConfig) { c.Quantile = 0.5 }))
		require.Equal(t, 10*ms+1, h.Stats().Delay, "nothing is measured without a Quantile")
		require.NoError(t, h.Update(func(c *retry.HedgeConfig) { c.Quantile = 0 }))

		slow := func(context.Context) (string, error) {
			require.NoError(t, h.Update(func(c *retry.HedgeConfig) { c.Max = 1 }))
			time.Sleep(time.Hour)
			return "", errDown
		}
		_, err := h.Do(t.Context(), slow)
		require.ErrorIs(t, err, errDown)
		require.Equal(t, int64(2), h.Stats().Hedged, "a call under way ends as it began")
	})
}

// Calls run while their Retrier, its Budget and a Hedger are updated. No call is lost, and
// no call makes more attempts than the larger of the old and the new limit.
func TestUpdateUnderLoad(t *testing.T) {
	const goroutines, each = 8, 400
	b := retry.NewBudget(retry.BudgetConfig{Ratio: 100})
	r := retry.New(retry.Config{Backoff: retry.Constant(0), Budget: b})
	h := retry.NewHedger[int](retry.HedgeConfig{Delay: time.Microsecond})
	var calls, most, hedged atomic.Int64
	stop := make(chan struct{})
	var load, updates sync.WaitGroup
	for range goroutines {
		load.Go(func() {
			for range each {
				fn, n := failing(forever, errDown)
				_ = r.Do(t.Context(), fn)
				calls.Add(int64(*n))
				most.Store(max(most.Load(), int64(*n)))
				_, _ = h.Do(t.Context(), func(context.Context) (int, error) { hedged.Add(1); return 0, nil })
			}
		})
	}
	for i := range 3 {
		updates.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				_ = r.Update(func(c *retry.Config) { c.Attempts = 2 + (n+i)%2 })
				_ = b.Update(func(c *retry.BudgetConfig) { c.PerSecond = 1000 + n%10 })
				_ = h.Update(func(c *retry.HedgeConfig) { c.Max = 1 + n%3 })
			}
		})
	}
	load.Wait()
	close(stop)
	updates.Wait()
	require.Equal(t, int64(goroutines*each), r.Stats().Calls())
	require.Equal(t, calls.Load(), r.Stats().Attempts)
	require.LessOrEqual(t, most.Load(), int64(3))
	require.Equal(t, r.Stats().Retried, b.Stats().Allowed)
	require.Equal(t, int64(goroutines*each), h.Stats().FirstWon+h.Stats().HedgeWon)
	require.Equal(t, hedged.Load(), goroutines*each+h.Stats().Hedged)

	require.NoError(t, r.Update(func(c *retry.Config) { c.Attempts = 1 }))
	fn, n := failing(forever, errDown)
	_ = r.Do(t.Context(), fn)
	require.Equal(t, 1, *n)
}

func TestUpdatesTakeTurns(t *testing.T) {
	r := retry.New(retry.Config{Attempts: 1})
	b := retry.NewBudget(retry.BudgetConfig{PerSecond: 1})
	g := retry.NewBudgetGroup(retry.BudgetGroupConfig[string]{Config: retry.BudgetConfig{PerSecond: 1}})
	h := retry.NewHedger[int](retry.HedgeConfig{Delay: ms, Max: 1})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 100 {
				require.NoError(t, r.Update(func(c *retry.Config) { c.Attempts++ }))
				require.NoError(t, b.Update(func(c *retry.BudgetConfig) { c.PerSecond++ }))
				require.NoError(t, g.Update(func(c *retry.BudgetGroupConfig[string]) { c.Config.PerSecond++ }))
				require.NoError(t, h.Update(func(c *retry.HedgeConfig) { c.Delay++ }))
			}
		})
	}
	wg.Wait()
	require.Equal(t, []any{801, 801, 801, ms + 800}, []any{r.Config().Attempts, b.Config().PerSecond, g.Config().Config.PerSecond, h.Config().Delay})
}
