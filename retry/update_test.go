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

func TestConfigDefaults(t *testing.T) {
	r := retry.New(retry.Config{Name: "users"})
	require.Equal(t, "users", r.Describe().Name)
	c := r.Config()
	require.NotNil(t, c.Backoff)
	require.True(t, c.RetryIf(errDown))
	require.False(t, c.RetryIf(retry.Permanent(errDown)))
	c.Backoff, c.RetryIf = nil, nil
	require.Equal(t, retry.Config{Name: "users", Attempts: 3, MaxRetryAfter: time.Minute}, c)
	require.Equal(t, retry.Unlimited, retry.New(retry.Config{Attempts: retry.Unlimited}).Config().Attempts)

	b := retry.NewBudget(retry.BudgetConfig{Name: "users"})
	require.Equal(t, retry.BudgetConfig{Name: "users", Ratio: 0.2, PerSecond: 10}, b.Config())
}

func TestUpdateToZeroRestoresDefault(t *testing.T) {
	r := retry.New(retry.Config{})
	require.NoError(t, r.Update(func(c *retry.Config) {
		require.Equal(t, 3, c.Attempts, "the default")
		c.Attempts += 2
	}))
	require.NoError(t, r.Update(func(c *retry.Config) { c.AttemptTimeout = time.Hour }))
	require.Equal(t, 5, r.Config().Attempts)
	require.NoError(t, r.Update(func(c *retry.Config) { c.Attempts = 0 }))
	require.Equal(t, 3, r.Config().Attempts)
}

func TestUpdateKeepsConfigOfCallsInProgress(t *testing.T) {
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
	require.Equal(t, int64(2), old.Stats().Allowed, "the retries are charged to the Budget at the start of the call")
	require.Zero(t, next.Stats().Allowed)
	require.Same(t, next, r.Config().Budget)
}

func TestInvalidUpdateChangesNothing(t *testing.T) {
	r := retry.New(retry.Config{Name: "users"})
	b := retry.NewBudget(retry.BudgetConfig{Name: "users"})
	for want, update := range map[string]func() error{
		"retry.Config.HealthyAfter is -1ns: must be 0 (for never) or more": func() error {
			return r.Update(func(c *retry.Config) { c.HealthyAfter, c.Attempts = -1, 7 })
		},
		`retry.Config.Name is "orders": must be "users" as before: it cannot change`: func() error {
			return r.Update(func(c *retry.Config) { c.Name, c.Attempts = "orders", 7 })
		},
		"retry.BudgetConfig.Ratio is NaN: must be 0 (for 0.2) to 100, or None": func() error {
			return b.Update(func(c *retry.BudgetConfig) { c.Ratio, c.PerSecond = math.NaN(), 7 })
		},
		`retry.BudgetConfig.Name is "orders": must be "users" as before: it cannot change`: func() error {
			return b.Update(func(c *retry.BudgetConfig) { c.Name, c.PerSecond = "orders", 7 })
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
	require.Equal(t, 3, r.Config().Attempts)
	require.Equal(t, 10, b.Config().PerSecond)
	require.NoError(t, r.Update(func(*retry.Config) {}), "no lock is held")
	require.NoError(t, b.Update(func(*retry.BudgetConfig) {}))
}

func TestBudgetUpdateKeepsItsRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{Ratio: 0.1, PerSecond: retry.None})
		require.Zero(t, call(t, b, 50, succeed)-45)
		require.NoError(t, b.Update(func(c *retry.BudgetConfig) { c.Ratio = 0.5 }))
		require.Equal(t, retry.BudgetStats{Allowed: 5, OverBudget: 45}, b.Stats())
		require.Equal(t, 5, call(t, b, 10, fail))
		require.NoError(t, b.Update(func(c *retry.BudgetConfig) { c.PerSecond = 1 }))
		require.Equal(t, int64(0), b.Stats().Left)
		time.Sleep(3 * time.Second)
		require.Equal(t, int64(3), b.Stats().Left)
	})
}

// Calls run while their Retrier and its Budget are updated. No call is lost, and
// no call makes more attempts than the larger of the old and the new limit.
func TestUpdateUnderLoad(t *testing.T) {
	const goroutines, each = 8, 400
	b := retry.NewBudget(retry.BudgetConfig{Ratio: 100})
	r := retry.New(retry.Config{Backoff: retry.Constant(0), Budget: b})
	var calls, most atomic.Int64
	stop := make(chan struct{})
	var load, updates sync.WaitGroup
	for range goroutines {
		load.Go(func() {
			for range each {
				fn, n := failing(forever, errDown)
				_ = r.Do(t.Context(), fn)
				calls.Add(int64(*n))
				most.Store(max(most.Load(), int64(*n)))
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
			}
		})
	}
	load.Wait()
	close(stop)
	updates.Wait()
	require.Equal(t, int64(goroutines*each), total(r.Stats()))
	require.Equal(t, calls.Load(), r.Stats().Attempts)
	require.LessOrEqual(t, most.Load(), int64(3))
	require.Equal(t, r.Stats().Retried, b.Stats().Allowed)

	require.NoError(t, r.Update(func(c *retry.Config) { c.Attempts = 1 }))
	fn, n := failing(forever, errDown)
	_ = r.Do(t.Context(), fn)
	require.Equal(t, 1, *n)
}
