package throttle_test

import (
	"context"
	"errors"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
)

func day(n int) []throttle.Quota {
	return []throttle.Quota{{N: n, Window: throttle.Window{Per: throttle.Day}}}
}

func TestNoneAdmitsNothing(t *testing.T) {
	for name, c := range map[string]struct {
		cfg    throttle.Config
		reason throttle.Reason
		text   string
	}{
		"rate":              {throttle.Config{Rate: throttle.None}, throttle.OverLimit, "over_limit"},
		"rate a minute":     {throttle.Config{Rate: throttle.PerMinute(throttle.None)}, throttle.OverLimit, "over_limit"},
		"rate with a burst": {throttle.Config{Rate: throttle.None, Burst: 20}, throttle.OverLimit, "over_limit"},
		"burst":             {throttle.Config{Rate: 5, Burst: throttle.None}, throttle.OverLimit, "over_limit"},
		"both": {throttle.Config{Rate: throttle.None, Burst: throttle.None}, throttle.OverLimit,
			"over_limit"},
		"rate, quotas": {throttle.Config{Rate: throttle.None, Quotas: day(5)}, throttle.OverLimit, "over_limit"},
		"quota": {throttle.Config{Quotas: day(throttle.None)}, throttle.OverQuota,
			"over_quota of none per day"},
		"quota of a rate": {throttle.Config{Rate: 5, Quotas: day(throttle.None)}, throttle.OverQuota,
			"over_quota of none per day"},
		"quota, no rate limit": {throttle.Config{Rate: throttle.Unlimited, Quotas: day(throttle.None)},
			throttle.OverQuota, "over_quota of none per day"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c.cfg.MaxWait, c.cfg.Cost = time.Minute, cost
				l := throttle.New(c.cfg)
				g := throttle.NewGroup(throttle.GroupConfig[string]{Config: c.cfg})
				for range 2 {
					start := time.Now()
					d, err := l.Admit(of(1))
					require.Zero(t, time.Since(start), "it does not wait")
					limited, _ := errors.AsType[*throttle.LimitedError](err)
					require.EqualError(t, err, "throttle: limited ("+c.text+")")
					require.Equal(t, c.reason, limited.Reason)
					require.Zero(t, limited.Limit)
					require.Zero(t, limited.RetryAfter())
					require.False(t, limited.Retryable())
					require.True(t, limited.Refused())
					require.Equal(t, []any{false, 0, 0}, []any{d.Admitted, d.Limit, d.Remaining})
					require.Equal(t, time.Duration(math.MaxInt64), d.RetryAfter)
					require.False(t, l.Allow())
					require.ErrorIs(t, g.Wait(of(1), "a"), throttle.ErrLimited)
					require.NoError(t, l.Wait(of(0)), "it takes nothing")
					time.Sleep(40 * 24 * time.Hour)
				}
				r, err := l.Reserve(t.Context(), 0)
				require.NoError(t, err)
				r.Settle(7)
				require.False(t, l.Allow())
			})
		})
	}
}

func TestUnlimitedAdmitsEverything(t *testing.T) {
	for _, cfg := range []throttle.Config{
		{Rate: throttle.Unlimited}, {Rate: throttle.PerMinute(throttle.Unlimited)}, {Quotas: day(throttle.Unlimited)},
		{Rate: throttle.Unlimited, Quotas: day(throttle.Unlimited)},
	} {
		cfg.Cost = cost
		l := throttle.New(cfg)
		for _, n := range []int{1, 1 << 40, math.MaxInt / 4, 3} {
			r, err := l.Reserve(t.Context(), n)
			require.NoError(t, err)
			r.Settle(math.MaxInt / 4)
		}
		d, err := l.Admit(of(1))
		require.NoError(t, err)
		require.Equal(t, []any{true, throttle.Unlimited, math.MaxInt}, []any{d.Admitted, d.Limit, d.Remaining})
	}
	l := throttle.New(throttle.Config{Rate: throttle.Unlimited, Quotas: day(2)})
	require.True(t, l.Allow())
	require.True(t, l.Allow())
	require.False(t, l.Allow(), "a quota still limits")
}

// TestUpdateToAndFromNone has a call wait while its limit admits nothing.
func TestUpdateToAndFromNone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 1, MaxWait: throttle.Unlimited})
		require.NoError(t, l.Wait(t.Context()))
		start, waited := time.Now(), make(chan time.Duration, 1)
		go func() {
			if l.Wait(t.Context()) == nil {
				waited <- time.Since(start)
			}
		}()
		synctest.Wait()
		require.NoError(t, l.Update(func(c *throttle.Config) { c.Rate = throttle.None }))
		time.Sleep(time.Hour)
		require.ErrorIs(t, l.Wait(t.Context()), throttle.ErrLimited)
		require.NoError(t, l.Update(func(c *throttle.Config) { c.Rate = 1 }))
		require.Equal(t, time.Hour, <-waited)
		require.NoError(t, l.Update(func(c *throttle.Config) {
			require.Equal(t, 1, c.Burst, "the effective value")
			c.Rate = throttle.Unlimited
		}))
		for range 100 {
			require.True(t, l.Allow())
		}
	})
}

// A call that waits starts when its limit becomes unlimited.
func TestUpdateToUnlimitedAdmitsWaitingCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: throttle.PerMinute(1), MaxWait: throttle.Unlimited})
		require.NoError(t, l.Wait(t.Context()))
		start, waited := time.Now(), make(chan time.Duration, 1)
		go func() {
			if l.Wait(t.Context()) == nil {
				waited <- time.Since(start)
			}
		}()
		time.Sleep(time.Second)
		require.NoError(t, l.Update(func(c *throttle.Config) { c.Rate = throttle.Unlimited }))
		require.Equal(t, time.Second, <-waited)
	})
}

// The tokens that are spent while a quota is unlimited do not count after it is limited again.
func TestUnlimitedQuotaCountsNothing(t *testing.T) {
	l := throttle.New(throttle.Config{Quotas: day(2), Cost: cost})
	set := func(n int) {
		require.NoError(t, l.Update(func(c *throttle.Config) { c.Quotas = day(n) }))
	}
	set(throttle.Unlimited)
	r, err := l.Reserve(t.Context(), 0)
	require.NoError(t, err)
	r.Settle(5)
	require.NoError(t, l.Wait(of(3)))
	set(2)
	require.Equal(t, 2, take(l, 0).Remaining)
}

func TestNegativeReservationIsAnError(t *testing.T) {
	l := throttle.New(throttle.Config{Name: "api", Rate: 1, Burst: 500, Cost: cost})
	g := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Rate: 1}})
	_, err := l.Reserve(t.Context(), -500)
	require.EqualError(t, err, "throttle: api: Reserve of -500 tokens: must be 0 or more")
	_, err = g.Reserve(t.Context(), "a", -1)
	require.EqualError(t, err, "throttle: Reserve of -1 tokens: must be 0 or more")
	require.NoError(t, l.Wait(of(-500)), "a Cost below 0 counts as 0")
	require.Zero(t, l.Stats().Spent)
}

func TestAllKeepsItsParts(t *testing.T) {
	first, second := throttle.New(throttle.Config{Rate: 1}), throttle.New(throttle.Config{Rate: 1})
	parts := []throttle.Part{first}
	limits := throttle.All(parts...)
	parts[0] = second
	require.NoError(t, limits.Do(t.Context(), func(context.Context) error { return nil }))
	require.EqualValues(t, 1, first.Stats().Admitted)
	require.Zero(t, second.Stats().Admitted)
}

// TestReasonsMatchErrors compares what a LimitedError matches with its Reason alone.
func TestAllOfNothingRespectsTheContext(t *testing.T) {
	all := throttle.All()
	require.NoError(t, all.Do(t.Context(), ok))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := all.Do(ctx, func(context.Context) error { t.Error("called"); return nil })
	require.ErrorIs(t, err, context.Canceled)
	_, err = all.Reserve(ctx)
	require.ErrorIs(t, err, context.Canceled)
}

func TestReasonsMatchErrors(t *testing.T) {
	all := []error{throttle.ErrLimited, context.DeadlineExceeded, throttle.ErrOutage, context.Canceled}
	for reason, want := range map[throttle.Reason][]bool{
		throttle.OverLimit: {true, false, false, false}, throttle.DeadlineTooClose: {true, true, false, false},
		throttle.Outage: {true, false, true, false},
	} {
		var got []bool
		for _, target := range all {
			got = append(got, errors.Is(&throttle.LimitedError{Reason: reason}, target))
		}
		require.Equal(t, want, got, reason)
	}
}
