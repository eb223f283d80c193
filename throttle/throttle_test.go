package throttle_test

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/throttle"
)

func ok(context.Context) error { return nil }

type costKey struct{}

// cost is a Cost that reads what of has put into a ctx, or 1.
func cost(ctx context.Context) int {
	if n, set := ctx.Value(costKey{}).(int); set {
		return n
	}
	return 1
}

func of(n int) context.Context { return context.WithValue(context.Background(), costKey{}, n) }

// take takes n tokens of a Limiter whose Cost is cost, or whose n is 1.
func take(l *throttle.Limiter, n int) throttle.Decision {
	d, _ := l.Admit(of(n))
	return d
}

// takeOf takes n tokens of a key of a Group whose Cost is cost.
func takeOf[K comparable](g *throttle.Group[K], key K, n int) throttle.Decision {
	d, _ := g.Admit(of(n), key)
	return d
}

// counts returns s without the reasons.
func counts(s throttle.Stats) throttle.Stats {
	s.Refusals = nil
	return s
}

func reason(err error) throttle.Reason {
	limited, _ := errors.AsType[*throttle.LimitedError](err)
	if limited == nil {
		return ""
	}
	return limited.Reason
}

func onRefuse(p interface {
	Observe(func(context.Context, throttle.Event)) func()
}, f func(context.Context, *throttle.LimitedError)) (stop func()) {
	return p.Observe(func(ctx context.Context, e throttle.Event) {
		if limited, ok := errors.AsType[*throttle.LimitedError](e.Err); ok {
			f(ctx, limited)
		}
	})
}

func TestExactSequence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 10, Burst: 3, Cost: cost})
		for left := 2; left >= 0; left-- {
			require.Equal(t, throttle.Decision{
				Admitted: true, Limit: 3, Window: 300 * time.Millisecond, Remaining: left,
				ResetAfter: time.Duration(3-left) * 100 * time.Millisecond,
			}, take(l, 1))
		}
		refused := throttle.Decision{Limit: 3, Window: 300 * time.Millisecond, RetryAfter: 100 * time.Millisecond,
			ResetAfter: 300 * time.Millisecond}
		require.Equal(t, refused, take(l, 1))

		time.Sleep(100*time.Millisecond - 1)
		require.Equal(t, time.Nanosecond, take(l, 1).RetryAfter, "a nanosecond too early")
		time.Sleep(time.Nanosecond)
		require.True(t, l.Allow())
		require.False(t, l.Allow())

		require.Equal(t, 200*time.Millisecond, take(l, 2).RetryAfter)
		time.Sleep(200 * time.Millisecond)
		require.True(t, take(l, 2).Admitted)

		time.Sleep(time.Hour) // no more than the burst adds up
		require.True(t, take(l, 3).Admitted)
		require.False(t, l.Allow())
		require.Equal(t, throttle.Stats{Admitted: 6, Refused: 5, Spent: 9}, counts(l.Stats()))
	})
}

// The time of a token is exact, although the float64 of the rate is rounded.
func TestTimeOfATokenIsExact(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, d := range []time.Duration{1, 3, 7, time.Microsecond / 3, time.Second / 7, time.Minute / 7, time.Hour,
			86400 * time.Second, 30 * 86400 * time.Second} {
			require.Equal(t, d, take(throttle.New(throttle.Config{Rate: every(d), Burst: 1}), 1).ResetAfter, d)
		}
	})
}

// every returns the Rate of one token each d.
func every(d time.Duration) float64 { return float64(time.Second) / float64(d) }

func TestDoRefusesWithoutCalling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var events []*throttle.LimitedError
		l := throttle.New(throttle.Config{
			Name: "search", Rate: throttle.PerMinute(60), Burst: 1,
		})
		onRefuse(l, func(_ context.Context, e *throttle.LimitedError) { events = append(events, e) })
		boom := errors.New("boom")
		require.Equal(t, boom, l.Do(t.Context(), func(context.Context) error { return boom }))
		err := l.Do(t.Context(), func(context.Context) error { panic("called") })
		require.ErrorIs(t, err, throttle.ErrLimited)
		require.EqualError(t, err, "throttle: search: limited (over_limit), retry after 1s")
		limited, isLimited := errors.AsType[*throttle.LimitedError](err)
		require.True(t, isLimited)
		require.Equal(t, time.Second, limited.RetryAfter())
		require.True(t, limited.Retryable())
		require.True(t, limited.Refused())
		require.Equal(t, []*throttle.LimitedError{limited}, events)
	})
}

// notSent is the error of a policy that did not make a call.
type notSent struct{ error }

func (notSent) Refused() bool { return true }

// What a policy further in refused was not sent: 85 200 tokens were spent so, of 71 calls.
func TestDoRefundsRefusedCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := throttle.Config{
			Rate: throttle.PerMinute(90_000), Burst: 90_000, Cost: cost, Quotas: []throttle.Quota{{N: 100_000,
				Window: throttle.Window{Every: time.Hour}}},
		}
		l, other := throttle.New(cfg), throttle.New(cfg)
		g := throttle.NewGroup(throttle.GroupConfig[string]{Config: cfg})
		all := throttle.All(other, g.For(func(context.Context) string { return "all" }))
		refused := func(context.Context) error { return notSent{errors.New("full")} }
		for range 71 {
			require.Error(t, l.Do(of(1200), refused))
			require.Error(t, l.Wrap(refused)(of(1200)))
			require.Error(t, g.Do(of(1200), "a", refused))
			require.Error(t, g.By(func(context.Context) string { return "a" })(refused)(of(1200)))
			require.Error(t, all.Do(of(1200), refused))
		}
		require.Error(t, l.Do(of(1200), func(context.Context) error { return errors.New("sent") }))
		require.Panics(t, func() { _ = l.Do(of(1200), func(context.Context) error { panic("sent") }) })
		require.Equal(t, 90_000-2400, take(l, 0).Remaining)
		require.Equal(t, 90_000, take(other, 0).Remaining)
		require.Equal(t, 90_000, takeOf(g, "a", 0).Remaining)
		require.Equal(t, 90_000, takeOf(g, "all", 0).Remaining)
		s := l.Stats()
		require.EqualValues(t, 2400, s.Spent-s.Refunded)
	})
}

func TestWaitingIsInOrderAndOnTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 10, Burst: 1, MaxWait: 500 * time.Millisecond})
		start := time.Now()
		var mu sync.Mutex
		var order []int
		var calls sync.WaitGroup
		for i := range 8 {
			calls.Go(func() {
				err := l.Do(t.Context(), func(context.Context) error {
					mu.Lock()
					order = append(order, i)
					mu.Unlock()
					require.Equal(t, time.Duration(i)*100*time.Millisecond, time.Since(start))
					return nil
				})
				if i > 5 {
					limited, _ := errors.AsType[*throttle.LimitedError](err)
					require.Equal(t, throttle.WaitTooLong, limited.Reason)
					require.Equal(t, 600*time.Millisecond, limited.RetryAfter())
				}
			})
			synctest.Wait()
		}
		require.Equal(t, 5, l.Stats().Queued)
		calls.Wait()
		require.Equal(t, []int{0, 1, 2, 3, 4, 5}, order)
		require.Equal(t, throttle.Stats{Admitted: 6, Refused: 2, Spent: 6}, counts(l.Stats()))
	})
}

func TestCanceledWaiterMovesOthersUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 1, Burst: 1, MaxWait: -1})
		start := time.Now()
		require.True(t, l.Allow())
		cause := errors.New("user left")
		ctx, cancel := context.WithCancelCause(t.Context())
		at := make([]time.Duration, 3)
		var canceled error
		var calls sync.WaitGroup
		for i := range at {
			calls.Go(func() {
				c := t.Context()
				if i == 0 {
					c = ctx
				}
				err := l.Wait(c)
				at[i] = time.Since(start)
				if i == 0 {
					canceled = err
				}
			})
			synctest.Wait()
		}
		time.Sleep(500 * time.Millisecond)
		cancel(cause)
		calls.Wait()
		require.Equal(t, []time.Duration{500 * time.Millisecond, time.Second, 2 * time.Second}, at)
		require.ErrorIs(t, canceled, cause)
		require.ErrorIs(t, canceled, context.Canceled)
		require.ErrorIs(t, canceled, throttle.ErrLimited)
	})
}

func TestHopelessWaitIsRefusedImmediately(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 1, Burst: 1, MaxWait: -1})
		require.NoError(t, l.Do(t.Context(), ok))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second-1)
		defer cancel()
		start := time.Now()
		err := l.Do(ctx, ok)
		require.Zero(t, time.Since(start))
		require.ErrorIs(t, err, throttle.ErrLimited)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		limited, _ := errors.AsType[*throttle.LimitedError](err)
		require.Equal(t, context.DeadlineExceeded, limited.Err)

		enough, cancel := context.WithTimeout(t.Context(), time.Second+1)
		defer cancel()
		require.NoError(t, l.Do(enough, ok))
	})
}

func TestEndedContextIsHonoredFirst(t *testing.T) {
	l := throttle.New(throttle.Config{Rate: 1, Burst: 1})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, l.Do(ctx, ok), context.Canceled)
	require.NotErrorIs(t, l.Do(ctx, ok), throttle.ErrLimited)
	_, err := l.Reserve(ctx, 1)
	require.ErrorIs(t, err, context.Canceled)
	require.True(t, l.Allow(), "no token was spent")
}

func TestMayWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		in := func(d time.Duration) context.Context {
			ctx, cancel := context.WithTimeout(t.Context(), d)
			t.Cleanup(cancel)
			return ctx
		}
		for _, c := range []struct {
			maxWait, after time.Duration
			ctx            context.Context
			want           throttle.Reason
		}{
			{0, 1, t.Context(), throttle.OverLimit},
			{0, 1, in(time.Hour), throttle.OverLimit},
			{time.Second, time.Second, t.Context(), ""},
			{time.Second, time.Second + 1, t.Context(), throttle.WaitTooLong},
			{time.Second, time.Second + 1, in(time.Millisecond), throttle.WaitTooLong},
			{time.Second, time.Second, in(time.Second), ""},
			{time.Second, time.Second, in(time.Second - 1), throttle.DeadlineTooClose},
			{-1, 36 * 365 * 24 * time.Hour, t.Context(), ""},
			{-1, 36*365*24*time.Hour + 1, t.Context(), throttle.WaitTooLong},
			{-1, time.Hour, in(time.Minute), throttle.DeadlineTooClose},
		} {
			require.Equal(t, c.want, throttle.MayWait(c.ctx, c.maxWait, c.after), "%+v", c)
		}
	})
}

// rates says which rates are valid.
const rates = ": must be above 0 and at most 1e9 tokens a second, throttle.None to admit nothing, " +
	"or throttle.Unlimited"

func TestValidate(t *testing.T) {
	for want, cfg := range map[string]throttle.Config{
		"":                                      {Rate: 1},
		"throttle.Config.Rate is 0" + rates:     {},
		"throttle.Config.Rate is -2" + rates:    {Rate: -2},
		"throttle.Config.Rate is NaN" + rates:   {Rate: math.NaN()},
		"throttle.Config.Rate is +Inf" + rates:  {Rate: every(0)},
		"throttle.Config.Rate is 2e+09" + rates: {Rate: 2e9},
		"throttle.Config.MaxWait is -2ns: must be 0 or more, or throttle.Unlimited": {
			Rate: 1, MaxWait: -2,
		},
		"throttle.Config.Burst is 1: must be 0 where there is no Rate": {
			Rate: throttle.Unlimited, Burst: 1,
		},
		"throttle.Config.Rate is 5e-324: must be enough to refill a Burst of 1 within 36 years": {
			Rate: math.SmallestNonzeroFloat64,
		},
		"throttle.Config.Rate is 1: must be enough to refill a Burst of 4611686018427387904 within 36 years": {
			Rate: 1, Burst: 1 << 62,
		},
		"throttle.Config.Burst is -1: must be 0 (for a second's worth) or more, or throttle.None to admit nothing": {
			Rate: 1, Burst: -1,
		},
		"throttle.Config.Burst is 2: must be 0 where there is no Rate": {
			Burst: 2, Quotas: []throttle.Quota{{N: 1, Window: throttle.Window{Per: throttle.Day}}},
		},
	} {
		if want == "" {
			require.NoError(t, cfg.Validate())
			continue
		}
		require.EqualError(t, cfg.Validate(), want)
		require.PanicsWithError(t, want, func() { throttle.New(cfg) })
	}
	for _, rate := range []float64{every(30 * 24 * time.Hour), 1e9, 1000.0 / 3600, throttle.PerMinute(0.5)} {
		require.NoError(t, throttle.Config{Rate: rate}.Validate())
	}
	longest := 36 * 365 * 24 * time.Hour
	require.NoError(t, throttle.Config{Rate: 1, Burst: int(longest / time.Second)}.Validate())
	require.Error(t, throttle.Config{Rate: 1, Burst: int(longest/time.Second) + 1}.Validate())
	require.InDelta(t, 1, throttle.PerMinute(60), 1e-12)
	for rate, burst := range map[float64]int{0.1: 1, 1: 1, 1.5: 2, 99.2: 100, 1e9: 1e9} {
		require.Equal(t, burst, throttle.New(throttle.Config{Rate: rate}).Config().Burst, "a second's worth")
	}
}

func TestCost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{
			Name: "reports", Rate: 1, Burst: 5, MaxWait: time.Minute, Cost: cost,
		})
		require.NoError(t, l.Do(of(5), ok))
		require.NoError(t, l.Do(of(0), ok), "it takes nothing")
		require.NoError(t, l.Do(of(-3), ok), "it gives nothing either")
		require.Zero(t, take(l, 0).Remaining)

		start := time.Now()
		err := l.Do(of(6), ok)
		require.EqualError(t, err, "throttle: reports: limited (too_costly): 6 tokens are more than a burst of 5 can give")
		limited, _ := errors.AsType[*throttle.LimitedError](err)
		require.False(t, limited.Retryable())
		require.Zero(t, limited.RetryAfter())
		require.Equal(t, time.Duration(math.MaxInt64), take(l, 6).RetryAfter)
		require.Zero(t, time.Since(start))

		require.NoError(t, l.Do(of(3), ok))
		require.Equal(t, 3*time.Second, time.Since(start))
		require.Equal(t, throttle.Stats{Admitted: 5, Refused: 2, Spent: 8}, counts(l.Stats()))
	})
}

func TestPanicPassesThrough(t *testing.T) {
	l := throttle.New(throttle.Config{Rate: 1e-3, Burst: 2})
	require.PanicsWithValue(t, "boom", func() { _ = l.Do(t.Context(), func(context.Context) error { panic("boom") }) })
	wrapped := l.Wrap(ok)
	require.NoError(t, wrapped(t.Context()))
	require.ErrorIs(t, wrapped(t.Context()), throttle.ErrLimited)
}

// No lock is held while a hook runs.
func TestCallbacksMayUseTheLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		called := 0
		l := throttle.New(throttle.Config{Rate: 1, Burst: 1, MaxWait: time.Second, Cost: cost})
		onRefuse(l, func(context.Context, *throttle.LimitedError) {
			called++
			require.NoError(t, l.Update(func(c *throttle.Config) { c.Rate = 2 }))
			require.Zero(t, l.Stats().Queued)
		})
		l.Allow()
		require.Error(t, l.Wait(of(2)))
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Millisecond, cancel)
		require.Error(t, l.Wait(ctx))
		require.Equal(t, 2, called)
	})
}

// A limiter may be made outside of a bubble and wait in several.
func TestTimersOfBubbles(t *testing.T) {
	l := throttle.New(throttle.Config{Rate: 1000, Burst: 1, MaxWait: -1})
	waits := func(t *testing.T) {
		for range 3 {
			require.NoError(t, l.Wait(t.Context()))
		}
	}
	for range 3 {
		synctest.Test(t, waits)
	}
	waits(t)
}

func TestObserversSeeRefusalsAndWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := throttle.Config{Name: "api", Rate: 1, Burst: 1, MaxWait: time.Second, Cost: cost}
		l := throttle.New(cfg)
		g := throttle.NewGroup(throttle.GroupConfig[string]{Config: cfg})
		var seen []throttle.Event
		add := func(_ context.Context, e throttle.Event) { seen = append(seen, e) }
		stop := l.Observe(add)
		g.Observe(add)
		for key, wait := range map[string]func(context.Context) error{
			"": l.Wait, "a": func(ctx context.Context) error { return g.Wait(ctx, "a") },
		} {
			require.NoError(t, wait(of(1)))
			require.NoError(t, wait(of(1)))
			err := wait(of(2))
			require.Equal(t, []throttle.Event{
				{Kind: throttle.EventWaited, Name: "api", Key: key, Cost: 1, Waited: time.Second},
				{Kind: throttle.EventRefused, Name: "api", Key: key, Cost: 2, Reason: throttle.TooCostly, Err: err},
			}, seen)
			seen = nil
		}
		stop()
		require.Error(t, l.Wait(of(2)))
		require.Empty(t, seen)
	})
}

func TestEveryErrorIsARefusal(t *testing.T) {
	for _, e := range []*throttle.LimitedError{
		{Reason: throttle.OverLimit}, {Reason: throttle.ContextEnded,
			Err: context.Canceled}, {Reason: throttle.TooCostly, Cost: 5},
	} {
		require.True(t, e.Refused())
		require.ErrorIs(t, e, throttle.ErrLimited)
		require.Equal(t, e.Reason != throttle.TooCostly, e.Retryable())
	}
	require.EqualError(t, &throttle.LimitedError{Name: "a", Key: "b", Reason: throttle.TooCostly, Cost: 5, Limit: 3,
		Quota: throttle.Quota{N: 3, Window: throttle.Window{Per: throttle.Day}}},
		"throttle: a[b]: limited (too_costly): 5 tokens are more than the quota of 3 per day can give")
	require.EqualError(t, &throttle.LimitedError{Reason: throttle.ContextEnded, Err: context.Canceled},
		"throttle: limited (context_ended): context canceled")
}

// TestPoliciesDescribeThemselves compares a description with the methods that its user calls.
func TestPoliciesDescribeThemselves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := throttle.Config{Name: "api", Rate: 10, MaxWait: time.Second, Cost: cost}
		l := throttle.New(cfg)
		g := throttle.NewGroup(throttle.GroupConfig[string]{Config: cfg})
		for key, wait := range map[string]func(context.Context) error{
			"": l.Wait, "a": func(ctx context.Context) error { return g.Wait(ctx, "a") },
		} {
			describer := policy.Describer(l)
			if key != "" {
				describer = g
			}
			d := describer.Describe()
			require.Equal(t, []string{"throttle", "api"}, []string{d.Kind, d.Name})
			var events []policy.Event
			defer d.Observe(func(_ context.Context, e policy.Event) { events = append(events, e) })()
			require.NoError(t, wait(of(10)))
			require.NoError(t, wait(of(1)))
			err := wait(of(20))
			require.Equal(t, []policy.Event{
				{
					Kind: "throttle", Name: "api", Key: key, What: "waited", Level: slog.LevelDebug,
					Attrs: []slog.Attr{slog.Duration("waited", 100*time.Millisecond)},
				},
				{
					Kind: "throttle", Name: "api", Key: key, What: "refused", Level: slog.LevelWarn, Err: err,
					Attrs: []slog.Attr{slog.String("reason", "too_costly")},
				},
			}, events)

			metrics := map[string]float64{}
			for _, m := range d.Metrics() {
				metrics[m.Name] = m.Value
			}
			require.Equal(t, map[string]float64{
				"throttle.calls{outcome=admitted,reason=}":                  2,
				"throttle.calls{outcome=refused,reason=over_limit}":         0,
				"throttle.calls{outcome=refused,reason=over_quota}":         0,
				"throttle.calls{outcome=refused,reason=wait_too_long}":      0,
				"throttle.calls{outcome=refused,reason=deadline_too_close}": 0,
				"throttle.calls{outcome=refused,reason=context_ended}":      0,
				"throttle.calls{outcome=refused,reason=too_costly}":         1,
				"throttle.tokens{outcome=spent}":                            11,
				"throttle.tokens{outcome=refunded}":                         0,
				"throttle.tokens{outcome=forgiven}":                         0,
				"throttle.evictions":                                        0,
				"throttle.overflows":                                        0,
				"throttle.queued":                                           0,
				"throttle.keys":                                             float64(len(key)),
			}, metrics)

			rate := func(to float64, err error) func(any) error {
				return func(cfg any) error {
					c, ok := cfg.(*throttle.Config)
					if !ok {
						c = &cfg.(*throttle.GroupConfig[string]).Config
					}
					require.Zero(t, c.Burst, "the configuration as it was given")
					c.Rate = to
					return err
				}
			}
			burst := func() int {
				if c, ok := d.Config().(throttle.Config); ok {
					return c.Burst
				}
				return d.Config().(throttle.GroupConfig[string]).Config.Burst
			}
			no := errors.New("no")
			require.ErrorIs(t, d.Update(false, rate(5, no)), no)
			require.Error(t, d.Update(false, rate(-5, nil)))
			require.NoError(t, d.Update(true, rate(5, nil)))
			require.Equal(t, 10, burst())
			require.NoError(t, d.Update(false, rate(5, nil)))
			require.Equal(t, 5, burst(), "of the new rate")
		}
		s := l.Stats()
		s.Refusals[throttle.OverLimit]++
		require.Zero(t, l.Stats().Refusals[throttle.OverLimit], "Stats are a copy")
	})
}
