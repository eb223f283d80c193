package retry_test

import (
	"context"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/retry"
)

const longest = time.Duration(math.MaxInt64)

func TestBackoffDelays(t *testing.T) {
	double := func(first, most time.Duration) func(int) time.Duration {
		return func(n int) time.Duration {
			bound := first
			for range n {
				if bound > most/2 {
					return most
				}
				bound *= 2
			}
			return bound
		}
	}
	always := func(d time.Duration) func(int) time.Duration { return func(int) time.Duration { return d } }
	for _, c := range []struct {
		name        string
		factory     func() retry.Backoff
		least, most func(n int) time.Duration
		random      bool
	}{
		{"Constant", retry.Constant(time.Second), always(time.Second), always(time.Second), false},
		{"Constant(0)", retry.Constant(0), always(0), always(0), false},
		{"Constant(longest)", retry.Constant(longest), always(longest), always(longest), false},
		{"Exponential", retry.Exponential(100*time.Millisecond, 10*time.Second),
			always(0), double(100*time.Millisecond, 10*time.Second), true},
		{"Exponential from 1ns", retry.Exponential(1, time.Second), always(0), double(1, time.Second), true},
		{"Exponential to the longest", retry.Exponential(time.Second, longest),
			always(0), double(time.Second, longest), true},
		{"Exponential at the longest", retry.Exponential(longest, longest), always(0), always(longest), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			const attempts, times = 1000, 200
			var lowest, highest [attempts]time.Duration
			for n := range attempts {
				lowest[n] = longest
			}
			for range times {
				b := c.factory()
				b.Reset()
				for n := range attempts {
					d := b.NextBackOff()
					lowest[n], highest[n] = min(lowest[n], d), max(highest[n], d)
				}
			}
			for n := range attempts {
				require.GreaterOrEqual(t, lowest[n], c.least(n), "attempt %d", n)
				require.LessOrEqual(t, highest[n], c.most(n), "attempt %d", n)
				if !c.random {
					continue
				}
				// Of 200 random delays, some are close to each end: all of them miss a fifth of the
				// range once in 10^19 times.
				if width := c.most(n) - c.least(n); width > 100 {
					require.LessOrEqual(t, lowest[n]-c.least(n), width/5, "attempt %d", n)
					require.LessOrEqual(t, c.most(n)-highest[n], width/5, "attempt %d", n)
				}
			}
		})
	}
}

func TestConfigValidate(t *testing.T) {
	for _, c := range []struct {
		name string
		cfg  retry.Config
		want string
	}{
		{"Attempts", retry.Config{Attempts: -2}, "retry.Config.Attempts is -2: must be 0 (for 3), more, or Unlimited"},
		{"Attempts None", retry.Config{Attempts: retry.None},
			"retry.Config.Attempts is -2147483648: must be 0 (for 3), more, or Unlimited"},
		{"MinDelay", retry.Config{MinDelay: -1}, "retry.Config.MinDelay is -1ns: must be 0 (for none) or more"},
		{"first above longest", retry.Config{Backoff: retry.Exponential(time.Minute, 30*time.Second)},
			"retry.Config.Backoff is Exponential(1m0s, 30s): must be Exponential(first, longest) with 0 < first <= longest"},
		{"first zero", retry.Config{Backoff: retry.Exponential(0, time.Second)},
			"retry.Config.Backoff is Exponential(0s, 1s): must be Exponential(first, longest) with 0 < first <= longest"},
		{"negative Constant", retry.Config{Backoff: retry.Constant(-1)},
			"retry.Config.Backoff is Constant(-1ns): must be Constant(d) with d 0 or more"},
		{"within a function", retry.Config{Backoff: func() retry.Backoff { return retry.Exponential(2, 1)() }},
			"retry.Config.Backoff is Exponential(2ns, 1ns): must be Exponential(first, longest) with 0 < first <= longest"},
		{"HealthyAfter", retry.Config{HealthyAfter: -1}, "retry.Config.HealthyAfter is -1ns: must be 0 (for never) or more"},
		{"AttemptTimeout", retry.Config{AttemptTimeout: -time.Second},
			"retry.Config.AttemptTimeout is -1s: must be 0 (for none) or more"},
		{"MaxRetryAfter", retry.Config{MaxRetryAfter: -time.Second},
			"retry.Config.MaxRetryAfter is -1s: must be 0 (for 1m) or more"},
		{"nil BackOff", retry.Config{Backoff: func() retry.Backoff { return nil }},
			"retry.Config.Backoff is a function that returns nil: " +
				"must be a function that returns a new BackOff, or nil (for Exponential(100ms, 10s))"},
		{"several", retry.Config{HealthyAfter: -1, MaxRetryAfter: -2},
			"retry.Config.HealthyAfter is -1ns: must be 0 (for never) or more\n" +
				"retry.Config.MaxRetryAfter is -2ns: must be 0 (for 1m) or more"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := c.cfg.Validate()
			require.EqualError(t, err, c.want)
			require.PanicsWithError(t, c.want, func() { retry.New(c.cfg) })
		})
	}
	require.NoError(t, retry.Config{}.Validate())
	r := retry.New(retry.Config{})
	err := r.Update(func(c *retry.Config) { c.Backoff = retry.Exponential(0, 1) })
	require.ErrorContains(t, err, "retry.Config.Backoff is Exponential(0s, 1ns)")
}

// Reset starts again with the first delay, as in cenkalti/backoff.
func TestBackoffReset(t *testing.T) {
	b := retry.Exponential(1, 1000)()
	for range 60 {
		b.NextBackOff()
	}
	b.Reset()
	for range 2 {
		require.LessOrEqual(t, b.NextBackOff(), 9*time.Nanosecond)
	}
	require.Positive(t, retry.Exponential(longest, longest)().NextBackOff(), "even without Reset")
}

// brokenBackOff returns the result of the function.
type brokenBackOff func() time.Duration

func (b brokenBackOff) Reset()                     {}
func (b brokenBackOff) NextBackOff() time.Duration { return b() }

func TestMisbehavingBackOff(t *testing.T) {
	t.Run("a negative delay ends the retrying", func(t *testing.T) {
		for _, d := range []time.Duration{backoff.Stop, -2, -time.Hour, math.MinInt64} {
			fn, calls := failing(forever, errDown)
			err := retry.New(retry.Config{Attempts: retry.Unlimited, Backoff: func() retry.Backoff {
				return brokenBackOff(func() time.Duration { return d })
			}}).Do(t.Context(), fn)
			require.ErrorIs(t, err, errDown)
			require.ErrorIs(t, err, retry.ErrExhausted)
			require.Equal(t, 1, *calls)
		}
	})
	t.Run("a panic passes through", func(t *testing.T) {
		r := retry.New(retry.Config{Backoff: func() retry.Backoff {
			return brokenBackOff(func() time.Duration { panic("broken") })
		}})
		fn, calls := failing(forever, errDown)
		require.PanicsWithValue(t, "broken", func() { _ = r.Do(t.Context(), fn) })
		require.Equal(t, 1, *calls)
	})
	t.Run("the longest delay there is", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(time.Hour, cancel)
			fn, calls := failing(forever, errDown)
			err := retry.New(retry.Config{Backoff: retry.Constant(longest)}).Do(ctx, fn)
			require.ErrorIs(t, err, context.Canceled)
			require.Equal(t, 1, *calls)
		})
	})
}

// waits returns the delays before the retries of n calls that fail.
func waits(t *testing.T, cfg retry.Config, n int, err error) (all []time.Duration) {
	r := onRetry(retry.New(cfg), func(_ context.Context, e retry.Event) { all = append(all, e.Delay) })
	for range n {
		fn, _ := failing(forever, err)
		require.Error(t, r.Do(t.Context(), fn))
	}
	return all
}

func TestMinDelayIsTheShortestWait(t *testing.T) {
	const least = 100 * time.Millisecond
	tiny := func(context.Context, retry.FailedAttempt) time.Duration { return 1 }
	for name, c := range map[string]struct {
		cfg  retry.Config
		err  error
		most time.Duration
	}{
		"Exponential":     {retry.Config{Backoff: retry.Exponential(least, 4*least)}, errDown, 200 * time.Millisecond},
		"default Backoff": {retry.Config{}, errDown, 200 * time.Millisecond},
		"Constant(0)":     {retry.Config{Backoff: retry.Constant(0)}, errDown, 110 * time.Millisecond},
		"Delay":           {retry.Config{Delay: tiny}, errDown, 110 * time.Millisecond},
		"RetryAfter":      {retry.Config{Delay: tiny}, answeringError{true, time.Millisecond}, 110 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c.cfg.MinDelay = least
				seen := make(map[time.Duration]bool)
				for _, d := range waits(t, c.cfg, 500, c.err) {
					require.GreaterOrEqual(t, d, least)
					require.LessOrEqual(t, d, c.most)
					seen[d] = true
				}
				require.Greater(t, len(seen), 500, "clients do not retry at the same moment")
			})
		})
	}
}

func TestLongerDelaysIgnoreMinDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := retry.Config{Attempts: 2, Backoff: retry.Constant(time.Second), MinDelay: 500 * time.Millisecond}
		require.Equal(t, []time.Duration{time.Second}, waits(t, cfg, 1, errDown))
		got := waits(t, cfg, 1, answeringError{true, 10 * time.Second})
		require.GreaterOrEqual(t, got[0], 10*time.Second)
		cfg.Backoff = retry.Constant(0)
		cfg.MinDelay = longest
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		require.ErrorIs(t, retry.New(cfg).Do(ctx, fail), context.DeadlineExceeded)
	})
	ends := func(context.Context, retry.FailedAttempt) time.Duration { return -1 }
	err := retry.New(retry.Config{MinDelay: time.Hour, Delay: ends}).Do(t.Context(), fail)
	require.ErrorIs(t, err, retry.ErrExhausted, "a negative delay ends the retrying")
}
