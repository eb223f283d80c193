package breaker_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
)

func TestBreakerTripsAtTheExactRate(t *testing.T) {
	const F, S = true, false
	for name, test := range map[string]struct {
		cfg   breaker.Config
		calls []bool // failed?  The last one opens it, and none before.
	}{
		"half of four":                {breaker.Config{FailureRate: 0.5, MinCalls: 4}, []bool{S, S, F, F}},
		"not before MinCalls":         {breaker.Config{FailureRate: 0.5, MinCalls: 4}, []bool{F, F, F, F}},
		"MinCalls is 20":              {breaker.Config{FailureRate: 0.1}, []bool{S, S, S, S, S, S, S, S, S, S, S, S, S, S, S, S, S, S, F, F}},
		"a third is not 0.34":         {breaker.Config{FailureRate: 0.34, MinCalls: 3}, []bool{S, S, F, F}},
		"all":                         {breaker.Config{FailureRate: 1, MinCalls: 2, WindowCalls: 2}, []bool{F, S, F, F}},
		"never by a success":          {breaker.Config{FailureRate: 0.5, MinCalls: 4}, []bool{F, F, F, S, F}},
		"last three":                  {breaker.Config{FailureRate: 0.6, WindowCalls: 3}, []bool{F, S, S, F, S, S, F, F}},
		"MinCalls is WindowCalls":     {breaker.Config{FailureRate: 0.01, WindowCalls: 5}, []bool{F, F, F, F, F}},
		"either: failures in a row":   {breaker.Config{FailureRate: 0.9, MinCalls: 4, Failures: 2}, []bool{S, F, S, S, F, F}},
		"either: the rate":            {breaker.Config{FailureRate: 0.5, MinCalls: 4, Failures: 3}, []bool{F, S, F, F}},
		"five in a row by default":    {breaker.Config{}, []bool{F, F, F, F, S, F, F, F, F, F}},
		"one in a row":                {breaker.Config{Failures: 1}, []bool{S, S, F}},
		"an old call leaves the ring": {breaker.Config{FailureRate: 1, WindowCalls: 4, MinCalls: 4}, []bool{S, F, F, F, F}},
	} {
		t.Run(name, func(t *testing.T) {
			b := breaker.New(test.cfg)
			for i, failed := range test.calls {
				require.Equal(t, breaker.Closed, b.State(), "before call %d", i)
				if failed {
					require.Equal(t, errDown, do(b, down))
				} else {
					require.NoError(t, do(b, ok))
				}
			}
			require.Equal(t, breaker.Open, b.State())
		})
	}
}

func TestBreakerTripsAtTheExactSlowRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const slow, fast = time.Second, time.Second - 1
		cfg := steady(breaker.Config{SlowRate: 0.5, SlowAfter: time.Second, MinCalls: 4})
		b := breaker.New(cfg)
		for _, d := range []time.Duration{fast, fast, slow} {
			require.NoError(t, do(b, taking(d, nil)))
		}
		require.Equal(t, breaker.Stats{
			Since:    b.Stats().Since,
			Counts:   breaker.Counts{Calls: 3, Succeeded: 3, Slow: 1},
			SlowRate: 1.0 / 3,
		}, b.Stats())
		require.NoError(t, do(b, taking(slow, nil)), "a slow success is a success for its caller")
		require.Equal(t, breaker.Open, b.State())
		require.ErrorContains(t, b.Stats().LastErr, "slow")

		// A slow probe has failed.
		time.Sleep(30 * time.Second)
		require.NoError(t, do(b, taking(slow, nil)))
		require.Equal(t, breaker.Open, b.State())
		time.Sleep(30 * time.Second)
		require.NoError(t, do(b, taking(fast, nil)))
		require.Equal(t, breaker.Closed, b.State())

		// A slow failure counts as both.
		b = breaker.New(cfg)
		for range 4 {
			require.Equal(t, errDown, do(b, taking(slow, errDown)))
		}
		require.Equal(t, breaker.Counts{Calls: 4, Failed: 4, Slow: 4}, b.Stats().Counts)
		require.Equal(t, breaker.Open, b.State())
	})
}

func TestBreakerSlowSuccessEndsARowOfFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Failures: 2, SlowRate: 1, SlowAfter: time.Second})
		do(b, down)
		require.NoError(t, do(b, taking(time.Second, nil)))
		do(b, down)
		require.Equal(t, breaker.Closed, b.State())
		require.EqualValues(t, 1, b.Stats().FailedInARow)
		do(b, down)
		require.Equal(t, breaker.Open, b.State())
	})
}

func TestBreakerWindowSlides(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{FailureRate: 0.5, MinCalls: 4, Window: 10 * time.Second})
		do(b, down) // at 0 s, in the first bucket of a second
		do(b, down)
		time.Sleep(9500 * time.Millisecond)
		do(b, ok)
		require.Equal(t, breaker.Counts{Calls: 3, Succeeded: 1, Failed: 2}, b.Stats().Counts)
		time.Sleep(500*time.Millisecond - 1)
		require.EqualValues(t, 3, b.Stats().Calls)
		time.Sleep(time.Nanosecond)
		require.Equal(t, breaker.Counts{Calls: 1, Succeeded: 1}, b.Stats().Counts)
		do(b, down)
		do(b, down)
		require.Equal(t, breaker.Closed, b.State(), "three calls: those of 10 s ago have gone")
		require.InDelta(t, 2.0/3, b.Stats().FailureRate, 1e-12)
		time.Sleep(time.Hour)
		require.Zero(t, b.Stats().Counts)
		require.Zero(t, b.Stats().FailureRate)
		for range 4 {
			require.Equal(t, breaker.Closed, b.State())
			do(b, down)
		}
		require.Equal(t, breaker.Open, b.State())
	})
}

// An outage in which every call takes longer than the window.
func TestBreakerSeesAnOutageThatIsSlowerThanItsWindow(t *testing.T) {
	for name, cfg := range map[string]breaker.Config{
		"in a row": {Failures: 5, Window: 10 * time.Second},
		"rate":     {FailureRate: 0.5, MinCalls: 5, Window: 10 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := breaker.New(cfg)
				for i := range 5 {
					time.Sleep(100 * time.Millisecond)
					go func() {
						if err := do(b, taking(12*time.Second, errDown)); err != errDown {
							t.Errorf("call %d: %v", i, err)
						}
					}()
				}
				time.Sleep(12*time.Second - 1)
				require.Equal(t, breaker.Closed, b.State())
				time.Sleep(time.Nanosecond)
				synctest.Wait()
				require.Equal(t, breaker.Open, b.State())
			})
		})
	}
}

// throttled is an error that says when to come back.
type throttled time.Duration

func (e throttled) Error() string             { return "throttled" }
func (e throttled) RetryAfter() time.Duration { return time.Duration(e) }

type refused bool

func (e refused) Error() string { return "refused" }
func (e refused) Refused() bool { return bool(e) }

func TestDefaultClassify(t *testing.T) {
	for _, test := range []struct {
		err  error
		want breaker.Outcome
	}{
		{nil, breaker.Success},
		{errDown, breaker.Failure},
		{context.Canceled, breaker.Failure},
		{context.DeadlineExceeded, breaker.Failure},
		{throttled(time.Second), breaker.Trip(time.Second)},
		{fmt.Errorf("get: %w", throttled(time.Second)), breaker.Trip(time.Second)},
		{errors.Join(errDown, throttled(time.Second)), breaker.Trip(time.Second)},
		{throttled(0), breaker.Failure},
		{throttled(-time.Second), breaker.Failure},
		{refused(true), breaker.Ignore},
		{refused(false), breaker.Failure},
		{fmt.Errorf("get: %w", &breaker.OpenError{Until: time.Now().Add(time.Hour)}), breaker.Ignore},
		{errors.Join(throttled(time.Second), refused(true)), breaker.Ignore},
	} {
		require.Equal(t, test.want, breaker.DefaultClassify(test.err), "%v", test.err)
	}
	require.Equal(t, breaker.Failure, breaker.Outcome{})
}

func TestBreakerTripsAtOnceOnRetryAfter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(steady(breaker.Config{OpenFor: 10 * time.Second, MaxOpenFor: 40 * time.Second}))
		overloaded := func(d time.Duration) func(context.Context) error {
			return func(context.Context) error { return throttled(d) }
		}
		do(b, overloaded(time.Minute))
		require.Equal(t, breaker.Open, b.State())
		require.Equal(t, time.Minute, b.Stats().OpenLeft)
		require.Equal(t, time.Minute, requireRefused(t, do(b, ok), breaker.Open).RetryAfter())
		time.Sleep(time.Minute - 1)
		require.Equal(t, breaker.Open, b.State())
		time.Sleep(time.Nanosecond)
		do(b, overloaded(time.Second))
		require.Equal(t, 20*time.Second, b.Stats().OpenLeft, "it asks for less than the second open time")
		time.Sleep(20 * time.Second)
		do(b, overloaded(1<<63-1))
		require.Greater(t, b.Stats().OpenLeft, 50*365*24*time.Hour)
		require.Equal(t, breaker.Open, b.State())
	})
}

func TestBreakerClassify(t *testing.T) {
	errMissing := errors.New("missing")
	b := breaker.New(breaker.Config{Failures: 2, Classify: func(err error) breaker.Outcome {
		switch err {
		case errMissing:
			return breaker.Success
		case errDown:
			return breaker.Failure
		}
		return breaker.Ignore
	}})
	returning := func(err error) func(context.Context) error { return func(context.Context) error { return err } }
	do(b, down)
	require.Equal(t, errMissing, do(b, returning(errMissing)), "the error comes back all the same")
	do(b, down)
	do(b, returning(context.Canceled))
	require.Equal(t, breaker.Closed, b.State())
	require.Equal(t, breaker.Counts{Calls: 3, Succeeded: 1, Failed: 2}, b.Stats().Counts)
	do(b, down)
	require.Equal(t, breaker.Open, b.State())
}

// A result counts for the period in which its call began.
func TestBreakerIgnoresResultsFromBefore(t *testing.T) {
	late := map[string]error{"success": nil, "failure": errDown, "retry after": throttled(time.Hour)}
	for name, between := range map[string]func(b *breaker.Breaker){
		"reset":  func(b *breaker.Breaker) { b.Reset() },
		"trip":   func(b *breaker.Breaker) { b.Trip(errDown, time.Second) },
		"force":  func(b *breaker.Breaker) { b.ForceOpen(nil) },
		"forced": func(b *breaker.Breaker) { b.ForceOpen(nil); b.Enable() },
		"enable": func(b *breaker.Breaker) { b.Disable(); b.Enable() },
		"open":   func(b *breaker.Breaker) { do(b, down) },
		"half-open": func(b *breaker.Breaker) {
			do(b, down)
			time.Sleep(time.Second)
			b.State()
		},
		"tripped, half-open": func(b *breaker.Breaker) {
			b.Trip(errDown, time.Second)
			time.Sleep(time.Second)
			b.State()
		},
		"close": func(b *breaker.Breaker) {
			do(b, down)
			time.Sleep(time.Second)
			do(b, ok)
		},
		"reopened": func(b *breaker.Breaker) {
			do(b, down)
			time.Sleep(time.Second)
			do(b, down)
			time.Sleep(time.Second)
			b.State()
		},
	} {
		for result, err := range late {
			t.Run(name+", then "+result, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := breaker.New(steady(breaker.Config{Failures: 1, Probes: 2, Successes: 1, OpenFor: time.Second}))
					hanging := make(chan struct{})
					go do(b, func(context.Context) error { <-hanging; return err })
					done, refused := b.Allow(t.Context())
					require.NoError(t, refused)
					synctest.Wait()
					between(b)
					before := b.Stats()
					close(hanging)
					synctest.Wait()
					require.Equal(t, before, b.Stats())
					done(err)
					require.Equal(t, before, b.Stats())
				})
			})
		}
	}
}

// A probe from before a trip or a reset changes nothing, though it gives its
// permit back.
func TestBreakerIgnoresProbesFromBefore(t *testing.T) {
	for name, between := range map[string]func(b *breaker.Breaker){
		"trip":  func(b *breaker.Breaker) { b.Trip(errDown, time.Second) },
		"reset": func(b *breaker.Breaker) { b.Reset() },
		"failed probe": func(b *breaker.Breaker) {
			require.Equal(t, errDown, do(b, down))
		},
	} {
		for _, late := range []error{nil, errDown} {
			t.Run(fmt.Sprint(name, late), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := breaker.New(steady(breaker.Config{Failures: 1, Probes: 2, OpenFor: time.Second}))
					open(t, b)
					time.Sleep(time.Second)
					hanging := make(chan struct{})
					go do(b, func(context.Context) error { <-hanging; return late })
					synctest.Wait()
					require.Equal(t, breaker.HalfOpen, b.State())
					between(b)
					before := b.Stats()
					close(hanging)
					synctest.Wait()
					require.Equal(t, before, b.Stats())

					b.Trip(nil, time.Second)
					time.Sleep(time.Second)
					for range 2 {
						require.NoError(t, do(b, ok))
					}
					require.Equal(t, breaker.Closed, b.State())
				})
			})
		}
	}
}
