package retry_test

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/retry"
)

type hostKey struct{}

func withHost(ctx context.Context, host string) context.Context {
	return context.WithValue(ctx, hostKey{}, host)
}

func hostOf(ctx context.Context) string {
	host, _ := ctx.Value(hostKey{}).(string)
	return host
}

// newHosts returns a BudgetGroup, and a Retrier that retries once and uses it.
func newHosts(cfg retry.BudgetGroupConfig[string]) (*retry.BudgetGroup[string], *retry.Retrier) {
	g := retry.NewBudgetGroup(cfg)
	return g, retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(0), BudgetFor: g.By(hostOf)})
}

// retried returns how many of n failing calls of a host were retried.
func retried(t *testing.T, r *retry.Retrier, host string, n int) int {
	before := r.Stats().Retried
	for range n {
		require.ErrorIs(t, r.Do(withHost(t.Context(), host), fail), errDown)
	}
	return int(r.Stats().Retried - before)
}

var tenRetries = retry.BudgetConfig{Name: "hosts", Ratio: -1, PerSecond: 1} // in ten seconds

func TestBudgetOfAKeyThatFailsIsNotThatOfTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, r := newHosts(retry.BudgetGroupConfig[string]{Config: retry.BudgetConfig{PerSecond: 1}})
		require.Equal(t, 30, retried(t, r, "bad", 100), "ten, and a fifth of the calls")
		require.Equal(t, 11, retried(t, r, "good", 11))
		require.Equal(t, retry.BudgetGroupStats{
			BudgetTotals: retry.BudgetTotals{Allowed: 41, OverBudget: 70}, Keys: 2, Empty: 1, Called: 111, Charged: 41,
		}, g.Stats())
		for host, b := range g.All() {
			require.Equal(t, map[string]int64{"bad": 70}[host], b.Stats().OverBudget, host)
		}

		fn, _ := failing(1, errDown)
		require.NoError(t, r.Do(withHost(t.Context(), "good"), fn))
		require.Equal(t, int64(41), g.Stats().Charged, "a retry that succeeds is refunded")
		require.NoError(t, r.Do(withHost(t.Context(), "new"), succeed))
		require.Equal(t, 3, g.Stats().Keys)
		require.Equal(t, int64(113), g.Stats().Called)
	})
}

func TestBudgetOfACallMayBeNone(t *testing.T) {
	b := retry.NewBudget(retry.BudgetConfig{Ratio: -1, PerSecond: -1})
	var unlimited atomic.Bool
	r := retry.New(retry.Config{Attempts: 4, Backoff: retry.Constant(0), BudgetFor: func(context.Context) *retry.Budget {
		if unlimited.Load() {
			return nil
		}
		return b
	}})
	require.ErrorIs(t, r.Do(t.Context(), fail), retry.ErrOverBudget)
	unlimited.Store(true)
	require.ErrorIs(t, r.Do(t.Context(), fail), retry.ErrExhausted)
	require.NoError(t, r.Do(t.Context(), succeed))
	require.Equal(t, int64(1), b.Stats().Called)
}

func TestRetryIsRefundedToTheBudgetItWasChargedTo(t *testing.T) {
	first, second := retry.NewBudget(retry.BudgetConfig{}), retry.NewBudget(retry.BudgetConfig{})
	budget := first
	r := retry.New(retry.Config{Backoff: retry.Constant(0), BudgetFor: func(context.Context) *retry.Budget { return budget }})
	require.NoError(t, r.Do(t.Context(), func(ctx context.Context) error {
		if n, _ := retry.AttemptFrom(ctx); n == 1 {
			return errDown
		}
		budget = second
		return nil
	}))
	require.Zero(t, first.Stats().Charged)
	require.Equal(t, retry.BudgetTotals{Allowed: 1}, first.Stats().BudgetTotals)
	require.Equal(t, int64(1), first.Stats().Called, "as the call is")
	require.Zero(t, second.Stats().Called)
}

func TestBudgetGroupIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, r := newHosts(retry.BudgetGroupConfig[string]{Config: tenRetries, MaxKeys: 2})
		var log eventLog
		g.Observe(log.note)
		require.Equal(t, 1, retried(t, r, "a", 1))
		require.Equal(t, 1, retried(t, r, "b", 1))
		more := 0
		for i := range 20 {
			more += retried(t, r, fmt.Sprint("new ", i), 1)
		}
		require.Equal(t, 10, more, "the retries of all other keys")
		require.Equal(t, retry.Event{Kind: retry.EventOverBudget, Name: "hosts", Key: "(other keys)"}, log.take()[0])
		s := g.Stats()
		require.Equal(t, 2, s.Keys)
		require.Equal(t, retry.BudgetTotals{Allowed: 12, OverBudget: 10}, s.BudgetTotals)
		require.Equal(t, 9, retried(t, r, "a", 20), "a key that has a Budget keeps it")

		time.Sleep(11 * time.Second)
		require.Equal(t, 10, retried(t, r, "new", 11), "room by then")
		require.Equal(t, 2, g.Stats().Keys)
		require.Equal(t, int64(12+9+10), g.Stats().Allowed, "of evicted keys too")
	})
}

func TestBudgetIsEvictedWhenItIsIdleAndNothingIsChargedToIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, r := newHosts(retry.BudgetGroupConfig[string]{Config: tenRetries, IdleAfter: time.Second})
		require.Equal(t, 10, retried(t, r, "bad", 11))
		churn := func(from int) {
			for i := range 2000 { // each looks at a few others in its shard
				require.NoError(t, r.Do(withHost(t.Context(), fmt.Sprint("host ", from+i)), succeed))
			}
		}
		for i := range 4 {
			time.Sleep(2 * time.Second)
			churn(i * 2000)
		}
		require.Less(t, g.Stats().Keys, 8000)
		require.Zero(t, retried(t, r, "bad", 1), "it is not given another Budget")
		time.Sleep(11 * time.Second)
		for i := range 10 { // which members an insert looks at is left to chance
			churn(10_000 * (i + 1))
			time.Sleep(2 * time.Second)
		}
		for host := range g.All() {
			require.NotEqual(t, "bad", host)
		}
		require.Equal(t, retry.BudgetTotals{Allowed: 10, OverBudget: 2}, g.Stats().BudgetTotals)
	})
}

func TestBudgetOfAKeyMayDiffer(t *testing.T) {
	g, r := newHosts(retry.BudgetGroupConfig[string]{Config: tenRetries, ConfigFor: func(host string) retry.BudgetConfig {
		cfg := retry.BudgetConfig{Name: "ignored", Ratio: -1, PerSecond: 2}
		if host == "wrong" {
			cfg.Ratio = math.NaN()
		}
		return cfg
	}})
	require.Equal(t, 20, retried(t, r, "a", 30))
	for _, b := range g.All() {
		require.Equal(t, "hosts", b.Name())
	}
	require.Panics(t, func() { _ = r.Do(withHost(t.Context(), "wrong"), fail) })
	require.NoError(t, g.Update(func(c *retry.BudgetGroupConfig[string]) { c.Config.PerSecond = 5 }))
	require.Zero(t, retried(t, r, "a", 1), "its BudgetConfig came from ConfigFor")
	require.NoError(t, g.Update(func(c *retry.BudgetGroupConfig[string]) { c.ConfigFor = nil }))
	require.Equal(t, 50, retried(t, r, "b", 60))
}

func TestUpdateOfABudgetGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, r := newHosts(retry.BudgetGroupConfig[string]{Config: tenRetries})
		require.Equal(t, "hosts", g.Name())
		c := g.Config()
		require.Equal(t, retry.BudgetGroupConfig[string]{
			Config: tenRetries, MaxKeys: 10_000, IdleAfter: 10 * time.Minute,
		}, c)
		require.Equal(t, 10, retried(t, r, "a", 20))
		require.NoError(t, g.Update(func(c *retry.BudgetGroupConfig[string]) { c.Config.PerSecond, c.MaxKeys = 3, 2 }))
		require.Equal(t, 20, retried(t, r, "a", 30), "the present Budgets follow, and keep what is charged")
		require.Equal(t, 30, retried(t, r, "b", 40), "and so do new ones")
		require.Equal(t, 30, retried(t, r, "c", 40), "and the shared one")

		for _, b := range g.All() {
			require.NoError(t, b.Update(func(c *retry.BudgetConfig) { c.PerSecond = 1 }))
		}
		require.NoError(t, g.Update(func(c *retry.BudgetGroupConfig[string]) { c.Config.PerSecond = 4 }))
		require.Equal(t, 10, retried(t, r, "a", 20), "the group's Update comes last")

		for want, change := range map[string]func(*retry.BudgetGroupConfig[string]){
			"retry.BudgetConfig.Name is":       func(c *retry.BudgetGroupConfig[string]) { c.Config.Name = "other" },
			"retry.BudgetConfig.PerSecond is":  func(c *retry.BudgetGroupConfig[string]) { c.Config.PerSecond = 1e9 },
			"retry.BudgetGroupConfig.MaxKeys ": func(c *retry.BudgetGroupConfig[string]) { c.MaxKeys = 1 },
		} {
			before := g.Config()
			require.ErrorContains(t, g.Update(change), want)
			require.Equal(t, before, g.Config())
		}
	})
}

// A toldKey is a key that knows when its text is asked for, while its Budget is being made.
type toldKey struct{ told *func() }

func (k toldKey) String() string { (*k.told)(); return "told" }

func TestUpdateWhileABudgetIsMade(t *testing.T) {
	g := retry.NewBudgetGroup(retry.BudgetGroupConfig[toldKey]{Config: tenRetries})
	told := func() {
		require.NoError(t, g.Update(func(c *retry.BudgetGroupConfig[toldKey]) { c.Config.PerSecond = 3 }))
	}
	b := g.By(func(context.Context) toldKey { return toldKey{&told} })(t.Context())
	require.Equal(t, 3, b.Config().PerSecond)
}

func TestObserversOfABudgetGroupSeeTheKey(t *testing.T) {
	var all, one eventLog
	g, r := newHosts(retry.BudgetGroupConfig[string]{Config: retry.BudgetConfig{Name: "hosts", Ratio: -1, PerSecond: -1}})
	stop := g.Observe(func(ctx context.Context, e retry.Event) {
		require.Equal(t, "a", hostOf(ctx))
		_ = g.Stats() // no lock is held
		all.note(ctx, e)
	})
	require.Zero(t, retried(t, r, "a", 1))
	for _, b := range g.All() {
		b.Observe(one.note)
	}
	require.Zero(t, retried(t, r, "a", 1))
	stop()
	require.Zero(t, retried(t, r, "a", 1))
	event := retry.Event{Kind: retry.EventOverBudget, Name: "hosts", Key: "a"}
	require.Equal(t, []retry.Event{event, event}, all.take())
	require.Equal(t, []retry.Event{event, event}, one.take())
}

func TestHedgerTakesTheBudgetOfTheKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := retry.NewBudgetGroup(retry.BudgetGroupConfig[string]{Config: tenRetries})
		h := retry.NewHedger[int](retry.HedgeConfig{Delay: ms, BudgetFor: g.By(hostOf)})
		for range 12 {
			_, _ = h.Do(withHost(t.Context(), "slow"), func(context.Context) (int, error) { time.Sleep(2 * ms); return 0, nil })
		}
		require.Equal(t, int64(10), h.Stats().Hedged)
		require.Equal(t, int64(2), h.Stats().OverBudget)
		require.Equal(t, retry.BudgetGroupStats{
			BudgetTotals: retry.BudgetTotals{Allowed: 10, OverBudget: 2}, Keys: 1, Empty: 1, Called: 12, Charged: 10,
		}, g.Stats())
	})
}

func TestBudgetAndBudgetForExcludeEachOther(t *testing.T) {
	b := retry.NewBudget(retry.BudgetConfig{})
	by := func(context.Context) *retry.Budget { return b }
	require.EqualError(t, retry.Config{Budget: b, BudgetFor: by}.Validate(),
		"retry.Config.BudgetFor is a function: must be nil where Budget is set: one or the other")
	require.EqualError(t, retry.HedgeConfig{Delay: ms, Budget: b, BudgetFor: by}.Validate(),
		"retry.HedgeConfig.BudgetFor is a function: must be nil where Budget is set: one or the other")
	require.ErrorContains(t, retry.BudgetGroupConfig[int]{MaxKeys: -1}.Validate(), "MaxKeys is -1")
	require.Panics(t, func() { retry.NewBudgetGroup(retry.BudgetGroupConfig[int]{MaxKeys: -1}) })
}

// TestBudgetGroupLosesNoRetry has many keys come, go and change their settings at once.
func TestBudgetGroupLosesNoRetry(t *testing.T) {
	const workers, each = 8, 2000
	g, r := newHosts(retry.BudgetGroupConfig[string]{Config: tenRetries, MaxKeys: 16})
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := range each {
				_ = r.Do(withHost(context.Background(), fmt.Sprint((w*each+i)%61)), fail)
				if i%100 == 0 {
					_ = g.Update(func(c *retry.BudgetGroupConfig[string]) { c.Config.PerSecond = 1 + i%3 })
				}
				if i%50 == 0 {
					_ = g.Stats()
				}
			}
		})
	}
	wg.Wait()
	s, of := g.Stats(), r.Stats()
	require.Equal(t, int64(workers*each), s.Allowed+s.OverBudget)
	require.Equal(t, of.Retried, s.Allowed)
	require.Equal(t, of.OverBudget, s.OverBudget)
	require.LessOrEqual(t, s.Keys, 16)
}

// A full group evicts the Budget that By has returned before the retry is charged to it.
func TestBudgetThatIsEvictedBeforeItIsChargedDoesNotCount(t *testing.T) {
	g := retry.NewBudgetGroup(retry.BudgetGroupConfig[string]{Config: tenRetries, MaxKeys: 1})
	of := g.By(hostOf)
	evicted := func(ctx context.Context) *retry.Budget {
		b := of(ctx)
		of(withHost(ctx, "other"))
		return b
	}
	r := retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(0), BudgetFor: evicted})
	require.Equal(t, 10, retried(t, r, "a", 30))
	require.Equal(t, retry.BudgetTotals{Allowed: 10, OverBudget: 20}, g.Stats().BudgetTotals)
}

func TestBudgetGroupNeverShowsMoreThanMaxKeys(t *testing.T) {
	g, _ := newHosts(retry.BudgetGroupConfig[string]{Config: tenRetries, MaxKeys: 8})
	of := g.By(hostOf)
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 3000 {
				of(withHost(t.Context(), fmt.Sprint(w, i)))
			}
		})
	}
	for range 3000 {
		if keys := g.Stats().Keys; keys > 8 {
			require.LessOrEqual(t, keys, 8)
		}
	}
	wg.Wait()
}

func TestBudgetGroupHasItsDefaultsAndCountsTheSharedBudget(t *testing.T) {
	g, r := newHosts(retry.BudgetGroupConfig[string]{MaxKeys: 1})
	require.Equal(t, retry.BudgetConfig{Ratio: 0.2, PerSecond: 10}, g.Config().Config)
	require.Equal(t, 1, retried(t, r, "a", 1), "it is charged, and stays")
	require.Equal(t, 2, retried(t, r, "b", 2))
	s := g.Stats()
	require.Equal(t, 1, s.Keys)
	require.EqualValues(t, 3, s.Called)
	require.EqualValues(t, 3, s.Charged)
}

// A retry that no Budget was charged for gives nothing back to that of the retry before.
func TestRetryWithoutABudgetRefundsNothing(t *testing.T) {
	b := retry.NewBudget(retry.BudgetConfig{})
	attempts := 0
	r := retry.New(retry.Config{Attempts: 3, Backoff: retry.Constant(0), BudgetFor: func(context.Context) *retry.Budget {
		if attempts == 2 {
			return nil
		}
		return b
	}})
	require.NoError(t, r.Do(t.Context(), func(context.Context) error {
		if attempts++; attempts < 3 {
			return errDown
		}
		return nil
	}))
	require.EqualValues(t, 1, b.Stats().Charged, "the first retry has failed")
}
