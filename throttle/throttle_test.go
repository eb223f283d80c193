package throttle_test

import (
	"context"
	"errors"
	"math"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
)

func ok(context.Context) error { return nil }

func TestExactSequence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 10, Burst: 3})
		for left := 2; left >= 0; left-- {
			d := l.Take(1)
			require.Equal(t, throttle.Decision{OK: true, Limit: 3, Window: 300 * time.Millisecond, Remaining: left, ResetAfter: time.Duration(3-left) * 100 * time.Millisecond}, d)
		}
		refused := throttle.Decision{Limit: 3, Window: 300 * time.Millisecond, RetryAfter: 100 * time.Millisecond, ResetAfter: 300 * time.Millisecond}
		require.Equal(t, refused, l.Take(1))
		require.Equal(t, refused, l.Peek())

		time.Sleep(100*time.Millisecond - 1)
		require.Equal(t, time.Nanosecond, l.Take(1).RetryAfter, "a nanosecond too early")
		time.Sleep(time.Nanosecond)
		require.True(t, l.Allow())
		require.False(t, l.Allow())

		require.Equal(t, 200*time.Millisecond, l.Take(2).RetryAfter)
		time.Sleep(200 * time.Millisecond)
		require.True(t, l.Take(2).OK)

		time.Sleep(time.Hour) // no more than the burst adds up
		require.True(t, l.Take(3).OK)
		require.False(t, l.Allow())
		require.Equal(t, throttle.Stats{Totals: throttle.Totals{Admitted: 6, Refused: 5, Spent: 9}}, counts(l.Stats()))
	})
}

func TestOddRateDoesNotDrift(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 3, Burst: 2})
		start := time.Now()
		admitted := 0
		for time.Since(start) < 24*time.Hour {
			d := l.Take(1)
			if d.OK {
				admitted++
				d.RetryAfter = l.Peek().RetryAfter
			}
			time.Sleep(d.RetryAfter)
		}
		require.Equal(t, 2+3*24*3600-1, admitted)
		require.Equal(t, 24*time.Hour, time.Since(start))
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
		require.EqualError(t, err, "throttle: search: limited (over the limit), retry after 1s")
		limited, isLimited := errors.AsType[*throttle.LimitedError](err)
		require.True(t, isLimited)
		require.Equal(t, time.Second, limited.RetryAfter())
		require.True(t, limited.Retryable())
		require.True(t, limited.Refused())
		require.Equal(t, []*throttle.LimitedError{limited}, events)
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
		require.Equal(t, throttle.Stats{Totals: throttle.Totals{Admitted: 6, Refused: 2, Waited: 5, Spent: 6}}, counts(l.Stats()))
	})
}

func TestWaiterThatGivesUpMovesTheOthersUp(t *testing.T) {
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

func TestWaitThatCannotEndInTimeIsRefusedAtOnce(t *testing.T) {
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
	require.True(t, l.Allow(), "no token was spent")
}

func TestValidate(t *testing.T) {
	level := func(context.Context) int { return 0 }
	for want, cfg := range map[string]throttle.Config{
		"": {Rate: 1},
		"throttle.Config.Rate is 0: must be above 0 and at most 1e12 tokens a second":                        {},
		"throttle.Config.Rate is -1: must be above 0 and at most 1e12 tokens a second":                       {Rate: -1},
		"throttle.Config.Rate is NaN: must be above 0 and at most 1e12 tokens a second":                      {Rate: math.NaN()},
		"throttle.Config.Rate is +Inf: must be above 0 and at most 1e12 tokens a second":                     {Rate: every(0)},
		"throttle.Config.Rate is 2e+12: must be above 0 and at most 1e12 tokens a second":                    {Rate: 2e12},
		"throttle.Config.Rate is 5e-324: must be enough to refill a Burst of 1 within 36 years":              {Rate: math.SmallestNonzeroFloat64},
		"throttle.Config.Rate is 1: must be enough to refill a Burst of 4611686018427387904 within 36 years": {Rate: 1, Burst: 1 << 62},
		"throttle.Config.Burst is -1: must be 0 (for a second's worth) or more":                              {Rate: 1, Burst: -1},
		"throttle.Config.Queue is -1: must be 0 (for 1000) or more":                                          {Rate: 1, Queue: -1},
		"throttle.Config.Levels is -1: must be 0 (for 1) to 1000":                                            {Rate: 1, Levels: -1},
		"throttle.Config.Levels is 2: must be 0 or 1 where Priority is nil":                                  {Rate: 1, Levels: 2},
		"throttle.Config.Levels is 0: must be 2 or more where Priority is set":                               {Rate: 1, Priority: level},
		"throttle.Config.Levels is 1: must be 2 or more where Priority is set":                               {Rate: 1, Levels: 1, Priority: level},
		"throttle.Config.Queue is 5: must be 0 where MaxWait is 0: no call waits":                            {Rate: 1, Queue: 5},
		"throttle.Config.Reserve is [0 0]: must be at most 1 long, one less than Levels":                     {Rate: 1, Levels: 2, Priority: level, Reserve: []float64{0, 0}},
		"throttle.Config.Reserve is [0.1]: must be at most 0 long, one less than Levels":                     {Rate: 1, Reserve: []float64{0.1}},
		"throttle.Config.Reserve[0] is -0.1: must be at least 0 and less than 1":                             {Rate: 1, Levels: 2, Priority: level, Reserve: []float64{-0.1}},
		"throttle.Config.Reserve[0] is NaN: must be at least 0 and less than 1":                              {Rate: 1, Levels: 2, Priority: level, Reserve: []float64{math.NaN()}},
		"throttle.Config.Reserve is [0.5 0.5]: must be shares whose sum is less than 1":                      {Rate: 1, Levels: 3, Priority: level, Reserve: []float64{0.5, 0.5}},
	} {
		if want == "" {
			require.NoError(t, cfg.Validate())
			continue
		}
		require.EqualError(t, cfg.Validate(), want)
		require.PanicsWithError(t, want, func() { throttle.New(cfg) })
	}
	require.NoError(t, throttle.Config{Rate: 1, Levels: 1000, Priority: level}.Validate())
	require.Error(t, throttle.Config{Rate: 1, Levels: 1001, Priority: level}.Validate())
	require.ErrorContains(t, throttle.Config{Rate: 1, Levels: 2, Priority: level, Reserve: []float64{1}}.Validate(),
		"throttle.Config.Reserve[0] is 1: must be at least 0 and less than 1")
	for _, rate := range []float64{every(30 * 24 * time.Hour), 1e12, 1000.0 / 3600, throttle.PerMinute(0.5)} {
		require.NoError(t, throttle.Config{Rate: rate}.Validate())
	}
	require.InDelta(t, 1, throttle.PerMinute(60), 1e-12)
}

func TestBurstIsASecondsWorth(t *testing.T) {
	for rate, burst := range map[float64]int{0.1: 1, 1: 1, 1.5: 2, 99.2: 100, 1e12: 1e12} {
		require.Equal(t, burst, throttle.New(throttle.Config{Rate: rate}).Peek().Limit)
	}
}

func TestDecisionSaysInWhichWindowTheBurstRefills(t *testing.T) {
	for want, cfg := range map[time.Duration]throttle.Config{
		time.Minute:         {Rate: throttle.PerMinute(7), Burst: 7}, // 7/60 is not quite what a float64 can hold
		time.Hour:           {Rate: 1000.0 / 3600, Burst: 1000},
		time.Second:         {Rate: 1e12},
		30 * 24 * time.Hour: {Rate: every(30 * 24 * time.Hour), Burst: 1},
		0:                   {Rate: 1e12, Burst: 1}, // a thousandth of a nanosecond
	} {
		l := throttle.New(cfg)
		require.Equal(t, want, l.Peek().Window)
		require.NoError(t, setLimit(l, throttle.Limit{Rate: 2, Burst: 6}))
		require.Equal(t, 3*time.Second, l.Take(1).Window)
	}
}

func TestCost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type cost struct{}
		l := throttle.New(throttle.Config{
			Name: "reports", Rate: 1, Burst: 5, MaxWait: time.Minute,
			Cost: func(ctx context.Context) int { return ctx.Value(cost{}).(int) },
		})
		of := func(n int) context.Context { return context.WithValue(t.Context(), cost{}, n) }
		require.NoError(t, l.Do(of(5), ok))
		require.NoError(t, l.Do(of(0), ok), "it takes nothing")
		require.NoError(t, l.Do(of(-3), ok), "it gives nothing either")
		require.Zero(t, l.Peek().Remaining)

		start := time.Now()
		err := l.Do(of(6), ok)
		require.EqualError(t, err, "throttle: reports: limited (too costly): 6 tokens at level 0 are more than a burst of 5 can give")
		limited, _ := errors.AsType[*throttle.LimitedError](err)
		require.False(t, limited.Retryable())
		require.Zero(t, limited.RetryAfter())
		require.Equal(t, time.Duration(math.MaxInt64), l.Take(6).RetryAfter)
		require.Zero(t, time.Since(start))

		require.NoError(t, l.Do(of(3), ok))
		require.Equal(t, 3*time.Second, time.Since(start))
		require.Equal(t, throttle.Stats{Totals: throttle.Totals{Admitted: 4, Refused: 2, Spent: 8, Waited: 1}}, counts(l.Stats()))
	})
}

func TestReserveIsKeptForTheLevelsAbove(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type level struct{}
		l := throttle.New(throttle.Config{
			Rate: 1, Burst: 10, Levels: 3, Reserve: []float64{0.3, 0.4},
			Priority: func(ctx context.Context) int { return ctx.Value(level{}).(int) },
		})
		admitted := func(n int) (calls int) {
			for l.Do(context.WithValue(t.Context(), level{}, n), ok) == nil {
				calls++
			}
			return calls
		}
		require.Equal(t, 3, admitted(99), "clamped to 2")
		require.False(t, l.Allow(), "asks for the least important")
		require.Equal(t, 4, admitted(1))
		err := l.Do(context.WithValue(t.Context(), level{}, 1), ok)
		limited, _ := errors.AsType[*throttle.LimitedError](err)
		require.Equal(t, 1, limited.Level)
		require.Equal(t, 3, admitted(-1), "clamped to 0")
		time.Sleep(8 * time.Second)
		require.Equal(t, 1, admitted(2))
	})
}

// The shares of Reserve add up, whole tokens only, and follow the burst. Without them
// each level but the last keeps 1/(2 x Levels).
func TestReserveAddsUp(t *testing.T) {
	for _, c := range []struct {
		reserve []float64
		burst   int
		want    []int // that each level may spend at once
	}{
		{nil, 12, []int{12, 10, 8}},
		{nil, 100, []int{100, 84, 67}},
		{[]float64{}, 10, []int{10, 10, 10}},
		{[]float64{0.5}, 10, []int{10, 5, 5}},
		{[]float64{0, 0.7}, 10, []int{10, 10, 3}},
		{[]float64{0.3, 0.3}, 10, []int{10, 7, 4}},
		{[]float64{0.25, 0.25}, 3, []int{3, 3, 2}},
		{[]float64{0, 1 - 1e-12}, 1, []int{1, 1, 1}},
	} {
		for level, want := range c.want {
			for _, setRate := range []bool{false, true} {
				cfg := throttle.Config{
					Rate: 1e-3, Burst: c.burst, Levels: 3, Reserve: c.reserve,
					Priority: func(context.Context) int { return level },
				}
				if setRate {
					cfg.Burst = 1
				}
				l := throttle.New(cfg)
				if setRate {
					require.NoError(t, setLimit(l, throttle.Limit{Rate: 1e-3, Burst: c.burst}))
				}
				admitted := 0
				for l.Wait(t.Context()) == nil {
					admitted++
				}
				require.Equal(t, want, admitted, "level %d of %v", level, c)
			}
		}
	}
}

// A call of cost 0 is admitted, whatever others have spent and are kept.
func TestCallThatCostsNothingIsAdmitted(t *testing.T) {
	for _, quotas := range [][]throttle.Quota{nil, {{N: 10, Every: time.Hour}}} {
		cfg := throttle.Config{Rate: 1e-6, Burst: 10, Quotas: quotas, Levels: 2, Reserve: []float64{0.5}, Priority: func(context.Context) int { return 0 },
			Cost: func(context.Context) int { return 10 }}
		l, g := throttle.New(cfg), throttle.NewGroup(throttle.GroupConfig[int]{Config: cfg})
		require.NoError(t, l.Wait(t.Context()))
		require.NoError(t, g.Wait(t.Context(), 1))
		require.True(t, l.Take(0).OK)
		require.True(t, g.Take(1, 0).OK)
		require.False(t, l.Allow())
		require.False(t, g.Allow(1))
	}
}

func TestPanicPassesThrough(t *testing.T) {
	l := throttle.New(throttle.Config{Rate: 1e-3, Burst: 2})
	require.PanicsWithValue(t, "boom", func() { _ = l.Do(t.Context(), func(context.Context) error { panic("boom") }) })
	wrapped := l.Wrap(ok)
	require.NoError(t, wrapped(t.Context()))
	require.ErrorIs(t, wrapped(t.Context()), throttle.ErrLimited)
}

// No lock is held while a hook runs.
func TestHooksMayCallBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		called := 0
		l := throttle.New(throttle.Config{Rate: 1, Burst: 1, MaxWait: time.Second})
		onRefuse(l, func(context.Context, *throttle.LimitedError) {
			called++
			l.Refund(1)
			require.NoError(t, setLimit(l, throttle.Limit{Rate: 1, Burst: 1}))
			require.Zero(t, l.Stats().Queued)
		})
		require.True(t, l.Take(1).OK)
		soon, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		require.ErrorIs(t, l.Wait(soon), throttle.ErrLimited)
		require.Equal(t, 1, called)

		g := throttle.NewGroup(throttle.GroupConfig[int]{
			Config:  throttle.Config{Rate: 1, Burst: 1},
			MaxKeys: 1,
		})
		onRefuse(g, func(_ context.Context, e *throttle.LimitedError) {
			called++
			require.NoError(t, setGroupLimit(g, throttle.Limit{Rate: 1, Burst: 1}))
			require.NoError(t, g.Set(1, throttle.Limit{Rate: 5, Burst: 5}))
		})
		require.True(t, g.Allow(1))
		require.ErrorIs(t, g.Wait(t.Context(), 1), throttle.ErrLimited)
		require.Equal(t, 2, called)
		require.True(t, g.Take(1, 4).OK, "as it has been given")

		s := throttle.NewShared(throttle.SharedConfig{
			Name: "api", Rate: 1, Burst: 2, OnOutage: throttle.RefuseAll,
			Eval: func(context.Context, string, []string, ...any) (any, error) { return nil, errDown },
		})
		s.Observe(func(ctx context.Context, _ throttle.Event) { // that the outage began, and that the call is refused
			called++
			require.True(t, s.Stats().Down)
			require.False(t, s.Allow(ctx, ""))
		})
		require.ErrorIs(t, s.Wait(t.Context(), ""), errDown)
		require.Equal(t, 4, called)

		a := throttle.NewAdaptive(throttle.AdaptiveConfig{})
		onRefuse(a, func(context.Context, *throttle.LimitedError) {
			called++
			require.Positive(t, a.Stats().Probability)
		})
		a.SetRand(func() float64 { return 0 })
		_ = a.Do(t.Context(), overloaded)
		require.ErrorIs(t, a.Do(t.Context(), ok), throttle.ErrLimited)
		require.Equal(t, 5, called)
	})
}

// A global limiter is made outside of the synctest bubble that uses it. The clocks of
// the two are not related.
func TestClockFromElsewhere(t *testing.T) {
	l := throttle.New(throttle.Config{Rate: 1e-3, Burst: 2, MaxWait: -1})
	g := throttle.NewGroup(throttle.GroupConfig[int]{Config: throttle.Config{Rate: 1e-3, Burst: 2}})
	require.True(t, l.Allow())
	require.True(t, g.Allow(1))
	synctest.Test(t, func(t *testing.T) {
		require.NoError(t, l.Wait(t.Context()))
		require.NoError(t, l.Wait(t.Context()))
		g.Allow(1)
		g.Allow(1)
		require.False(t, g.Allow(1))
	})
	for range 2 {
		l.Allow()
		g.Allow(1)
	}
	require.False(t, l.Allow())
	require.False(t, g.Allow(1))
}

// A limiter with quotas may wait inside and outside of bubbles, to which timers belong.
func TestTimersOfBubbles(t *testing.T) {
	l := throttle.New(throttle.Config{Rate: 1000, Burst: 1, MaxWait: -1, Quotas: []throttle.Quota{{N: 100, Every: time.Hour}}})
	wait := func(t *testing.T) {
		for range 3 {
			require.NoError(t, l.Wait(t.Context()))
		}
	}
	synctest.Test(t, wait)
	wait(t)
}

// counts returns s without the reasons and the times, which other tests look at.
func counts(s throttle.Stats) throttle.Stats {
	s.Refusals, s.WaitTime = nil, 0
	return s
}

func BenchmarkAllow(b *testing.B) {
	l := throttle.New(throttle.Config{Rate: 1e9, Burst: 1e9})
	b.ReportAllocs()
	for b.Loop() {
		l.Allow()
	}
}
