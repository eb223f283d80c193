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
	"github.com/go-resilience/resilience/internal/linger"
)

// goesOn makes a call whose work goes on after it has returned, like that of a response.
func goesOn(t *testing.T, b *breaker.Breaker, ctx context.Context) *linger.Work {
	t.Helper()
	ctx, work := linger.Begin(ctx)
	require.NoError(t, b.Do(ctx, func(context.Context) error { work.GoOn(); return nil }))
	return work
}

func TestBreakerCountsASuccessWhenTheCallReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{SlowAfter: time.Second, FailureRate: 0.5, MinCalls: 1})
		work := goesOn(t, b, t.Context())
		require.Equal(t, breaker.Counts{Calls: 1, Succeeded: 1}, b.Stats().Window)
		time.Sleep(time.Hour) // the reader is slow
		work.End(nil)
		require.Equal(t, breaker.Counts{}, b.Stats().Window, "the hour has passed, and nothing was added")
		require.Equal(t, breaker.Closed, b.State())
	})
}

func TestBreakerCountsABreakingOffInPlaceOfASuccess(t *testing.T) {
	for name, cfg := range map[string]breaker.Config{"time": {Failures: 2}, "calls": {Failures: 2, WindowCalls: 3}} {
		t.Run(name, func(t *testing.T) {
			var seen changes
			b := watched(&seen, cfg)
			goesOn(t, b, t.Context()).End(errDown)
			require.Equal(t, breaker.Counts{Calls: 1, Failed: 1, FailedInARow: 1}, b.Stats().Window)
			require.NoError(t, do(b, ok))

			first, second := goesOn(t, b, t.Context()), goesOn(t, b, t.Context())
			first.End(errDown)
			second.End(errDown)
			require.Equal(t, breaker.Open, b.State())
			require.Equal(t, errDown, b.Stats().LastErr)
			want := breaker.Counts{Calls: 4, Succeeded: 1, Failed: 3, FailedInARow: 2}
			if cfg.WindowCalls == 3 {
				want = breaker.Counts{Calls: 3, Succeeded: 1, Failed: 2, FailedInARow: 2}
			}
			require.Equal(t, want, b.Stats().Window)
			seen.requireChain(t, breaker.Open)
		})
	}
}

// A success whose work goes on ends a row of failures when the work has ended well.
func TestBreakerOpensForCallsThatAllBreakOff(t *testing.T) {
	b := breaker.New(breaker.Config{Failures: 3})
	goesOn(t, b, t.Context()).End(errDown)
	do(b, down)
	require.EqualValues(t, 2, b.Stats().Window.FailedInARow)
	goesOn(t, b, t.Context()).End(errDown)
	require.Equal(t, breaker.Open, b.State())

	b = breaker.New(breaker.Config{Failures: 5})
	do(b, down)
	do(b, down)
	first := goesOn(t, b, t.Context())
	do(b, down)
	second := goesOn(t, b, t.Context())
	first.End(errDown)
	require.EqualValues(t, 4, b.Stats().Window.FailedInARow, "the second has not ended")
	second.End(errDown)
	require.Equal(t, breaker.Open, b.State())

	b = breaker.New(breaker.Config{Failures: 3})
	do(b, down)
	third := goesOn(t, b, t.Context())
	require.NoError(t, do(b, ok))
	third.End(errDown)
	require.EqualValues(t, 1, b.Stats().Window.FailedInARow)

	fourth, fifth := goesOn(t, b, t.Context()), goesOn(t, b, t.Context())
	require.EqualValues(t, 1, b.Stats().Window.FailedInARow)
	fourth.End(nil)
	require.Zero(t, b.Stats().Window.FailedInARow)
	do(b, down)
	b.Reset()
	do(b, down)
	fifth.End(nil)
	require.EqualValues(t, 1, b.Stats().Window.FailedInARow, "it belongs to the period before")
}

// Work that has gone on for a whole Window ends a row of failures, at that moment.
func TestBreakerEndsARowForWorkThatGoesOnForAWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Failures: 3, Window: time.Minute})
		do(b, down)
		work := goesOn(t, b, t.Context())
		do(b, down)
		time.Sleep(time.Minute - 1)
		require.EqualValues(t, 2, b.Stats().Window.FailedInARow)
		time.Sleep(time.Nanosecond)
		require.Zero(t, b.Stats().Window.FailedInARow)
		do(b, down)
		do(b, down)
		require.Equal(t, breaker.Closed, b.State())
		work.End(errDown)
		require.Equal(t, breaker.Open, b.State(), "its break is one more")
	})
}

func TestBreakerWithWorkThatGoesOnWell(t *testing.T) {
	b := breaker.New(breaker.Config{FailureRate: 0.5, MinCalls: 2})
	do(b, down)
	goesOn(t, b, t.Context()).End(nil)
	require.Equal(t, breaker.Closed, b.State(), "half of the calls have failed, and a success never opens it")
}

// A call that breaks off counts for the period in which it began.
func TestBreakerIgnoresABreakingOffFromBefore(t *testing.T) {
	b := breaker.New(breaker.Config{Failures: 1})
	work := goesOn(t, b, t.Context())
	b.Reset()
	later := goesOn(t, b, t.Context())
	work.End(errDown)
	require.Equal(t, breaker.Closed, b.State())
	require.Equal(t, breaker.Counts{Calls: 1, Succeeded: 1}, b.Stats().Window)
	later.End(errDown)
	require.Equal(t, breaker.Open, b.State())
}

// Streams that break off open the breaker, however long each has run by then: 19 of 20, and
// the rate is that of the ends.
func TestBreakerOpensForStreamsThatBreakOff(t *testing.T) {
	const window = 10 * time.Second
	for _, after := range []time.Duration{window / 10, window, 3 * window} {
		for _, rate := range []float64{0.5, 0.51, 0.6, 0.9} {
			t.Run(fmt.Sprint(after, rate), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := breaker.New(breaker.Config{FailureRate: rate, Window: window})
					refused := 0
					for i := range 1000 {
						ctx, work := linger.Begin(t.Context())
						err := b.Do(ctx, func(context.Context) error { work.GoOn(); return nil })
						switch {
						case errors.Is(err, breaker.ErrOpen):
							refused++
						case i%20 == 19:
							time.AfterFunc(after, func() { work.End(nil) })
						default:
							time.AfterFunc(after, func() { work.End(errDown) })
						}
						time.Sleep(100 * time.Millisecond)
					}
					require.NotZero(t, b.Stats().Opened)
					require.Greater(t, refused, 250)
					time.Sleep(time.Hour)
				})
			})
		}
	}
}

// The open time grows although each probe looks well at first.
func TestBreakerGrowsTheOpenTimeForStreamsThatBreakOff(t *testing.T) {
	for name, after := range map[string]time.Duration{"as a probe": 50 * time.Millisecond, "after it": 300 * time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := breaker.New(breaker.Config{
					Failures: 3, OpenFor: 100 * time.Millisecond, MaxOpenFor: 10 * time.Second, Window: 10 * time.Second,
				})
				for range 6000 { // a minute
					ctx, work := linger.Begin(t.Context())
					if b.Do(ctx, func(context.Context) error { work.GoOn(); return nil }) == nil {
						time.AfterFunc(after, func() { work.End(errDown) })
					}
					time.Sleep(10 * time.Millisecond)
				}
				require.LessOrEqual(t, b.Stats().Opened, int64(14))
				require.Greater(t, b.Stats().OpensInARow, int64(7))
				time.Sleep(time.Hour)
			})
		})
	}
}

// Ten thousand streams that go on for an hour do not open the breaker beside one call in a
// hundred that fails, nor do they when they have ended.
func TestBreakerStaysClosedBesideLongStreams(t *testing.T) {
	for name, cfg := range map[string]breaker.Config{
		"rate":        {FailureRate: 0.1, Window: 10 * time.Second},
		"in a row":    {Failures: 5, Window: 10 * time.Second}, // three fail until the first is old
		"rate, calls": {FailureRate: 0.1, WindowCalls: 100},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := breaker.New(cfg)
				for i := range 10_000 {
					if i%100 == 50 {
						require.Equal(t, errDown, do(b, down))
					}
					work := goesOn(t, b, t.Context())
					time.AfterFunc(time.Hour, func() { work.End(nil) })
					time.Sleep(36 * time.Millisecond)
				}
				require.Equal(t, breaker.Closed, b.State())
				time.Sleep(2 * time.Hour)
				require.Zero(t, b.Stats().Opened)
			})
		})
	}
}

func TestBreakerReadsABreakingOff(t *testing.T) {
	for name, test := range map[string]struct {
		err      error
		patience time.Duration
		after    time.Duration // it breaks off; the deadline is at 10 s
		want     breaker.State
	}{
		"before the deadline":          {errDown, 0, time.Second, breaker.Open},
		"at the deadline":              {context.DeadlineExceeded, 0, 10 * time.Second, breaker.Open},
		"at the deadline, impatiently": {context.DeadlineExceeded, time.Minute, 10 * time.Second, breaker.Closed},
		"a timeout within":             {context.DeadlineExceeded, time.Minute, time.Second, breaker.Open},
		"retry after":                  {throttled(time.Second), 0, time.Second, breaker.Open},
		"a cancel":                     {fmt.Errorf("read: %w", context.Canceled), 0, time.Second, breaker.Closed},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := breaker.New(breaker.Config{Failures: 1, Patience: test.patience})
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				within, cancelWithin := context.WithCancel(ctx)
				work := goesOn(t, b, within)
				cancelWithin() // a policy further out has returned
				time.Sleep(test.after)
				work.End(test.err)
				require.Equal(t, test.want, b.State())
			})
		})
	}
}

// Classify may excuse a call that breaks off. It is not counted as a second success.
func TestBreakerAsksClassifyAboutABreakingOff(t *testing.T) {
	for _, outcome := range []breaker.Outcome{breaker.Success, breaker.Ignore} {
		b := breaker.New(breaker.Config{Failures: 1, Classify: func(error) breaker.Outcome { return outcome }})
		goesOn(t, b, t.Context()).End(errDown)
		require.Equal(t, breaker.Counts{Calls: 1, Succeeded: 1}, b.Stats().Window, outcome)
	}
}

func TestBreakerCountsWorkThatFailsAtOnce(t *testing.T) {
	for name, fn := range map[string]func(work *linger.Work) error{
		"error":             func(*linger.Work) error { return errDown },
		"error of the work": func(w *linger.Work) error { w.GoOn(); return errDown },
		"panic":             func(*linger.Work) error { panic("oops") },
		"panic of the work": func(w *linger.Work) error { w.GoOn(); panic("oops") },
	} {
		t.Run(name, func(t *testing.T) {
			b := breaker.New(breaker.Config{Failures: 2})
			ctx, work := linger.Begin(t.Context())
			func() {
				defer func() { _ = recover() }()
				require.Equal(t, errDown, b.Do(ctx, func(context.Context) error { return fn(work) }))
			}()
			work.End(errDown)
			require.Equal(t, breaker.Counts{Calls: 1, Failed: 1, FailedInARow: 1}, b.Stats().Window, "once")
		})
	}
}

// A call that is slow has failed at its return. That its work breaks off is no second failure.
func TestBreakerCountsASlowCallOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Failures: 2, SlowAfter: time.Second})
		ctx, work := linger.Begin(t.Context())
		require.NoError(t, b.Do(ctx, func(context.Context) error { time.Sleep(time.Second); work.GoOn(); return nil }))
		work.End(errDown)
		require.Equal(t, breaker.Counts{Calls: 1, Failed: 1, FailedInARow: 1}, b.Stats().Window)
	})
}

// A probe whose work goes on succeeds when that ends well, or when it has gone on for OpenFor.
// If it breaks off before, the probe has failed.
func TestBreakerProbesSucceedWhenTheirWorkDoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Failures: 1, OpenFor: time.Second, MaxOpenFor: time.Hour})
		open(t, b)
		time.Sleep(time.Second)
		goesOn(t, b, t.Context()).End(errDown)
		require.Equal(t, 2*time.Second, b.Stats().OpenLeft)

		time.Sleep(2 * time.Second)
		work := goesOn(t, b, t.Context())
		requireRefused(t, do(b, ok), breaker.HalfOpen)
		work.End(nil)
		require.Equal(t, breaker.Closed, b.State())

		b.Trip(nil, time.Second)
		time.Sleep(time.Second)
		work = goesOn(t, b, t.Context())
		time.Sleep(time.Second - 1)
		requireRefused(t, do(b, ok), breaker.HalfOpen)
		time.Sleep(time.Nanosecond)
		require.NoError(t, do(b, ok), "a stream of an hour does not hold it half-open")
		require.Equal(t, breaker.Closed, b.State())
		work.End(errDown)
		require.Equal(t, breaker.Closed, b.State(), "it belongs to the period before")
		require.Zero(t, b.Stats().Window.Failed)

		b.Trip(nil, time.Second)
		time.Sleep(time.Second)
		goesOn(t, b, t.Context()).End(context.Canceled)
		require.Equal(t, breaker.HalfOpen, b.State(), "that says nothing")
		require.NoError(t, do(b, ok), "the permit came back")
		require.Equal(t, breaker.Closed, b.State())
	})
}

// A probe that has succeeded by its age, and breaks off while the other probes go on, fails.
func TestBreakerOpensForAProbeThatBreaksOffLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Failures: 1, OpenFor: time.Second, Probes: 2})
		open(t, b)
		time.Sleep(time.Second)
		work := goesOn(t, b, t.Context())
		time.Sleep(time.Second)
		require.Equal(t, breaker.HalfOpen, b.State())
		work.End(errDown)
		require.Equal(t, breaker.Open, b.State())
		require.EqualValues(t, 2, b.Stats().OpensInARow)
	})
}

// The work may end on another goroutine before the call has been counted.
func TestBreakerCountsWorkThatEndsAtOnce(t *testing.T) {
	for range 200 {
		b := breaker.New(breaker.Config{Failures: 100})
		ctx, work := linger.Begin(t.Context())
		over := make(chan struct{})
		require.NoError(t, b.Do(ctx, func(context.Context) error {
			work.GoOn()
			go func() {
				defer close(over)
				for !work.Held() {
				}
				work.End(errDown)
			}()
			return nil
		}))
		<-over
		require.Equal(t, breaker.Counts{Calls: 1, Failed: 1, FailedInARow: 1}, b.Stats().Window)
		require.Equal(t, breaker.Totals{Succeeded: 1, Failed: 1}, b.Stats().Totals)
	}
}

func TestBreakerGoesOnWithARowWhenWorkEndsWithARefusal(t *testing.T) {
	for _, err := range []error{refused(true), context.Canceled} {
		b := breaker.New(breaker.Config{})
		work := goesOn(t, b, t.Context())
		do(b, down)
		work.End(err)
		require.EqualValues(t, 1, b.Stats().Window.FailedInARow)
	}
}

func TestBreakerReadsARefusalAfterTheDeadlineAsOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Patience: time.Millisecond})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		work := goesOn(t, b, ctx)
		time.Sleep(time.Second)
		work.End(refused(true))
		require.EqualValues(t, 0, b.Stats().Window.Failed)
	})
}

// Work counts for no longer than it goes on, and not beyond its period.
func TestBreakerKeepsARowBesideWorkThatHasEnded(t *testing.T) {
	for name, end := range map[string]func(*breaker.Breaker, *linger.Work){
		"broken off": func(_ *breaker.Breaker, w *linger.Work) { w.End(errDown) },
		"canceled":   func(_ *breaker.Breaker, w *linger.Work) { w.End(context.Canceled) },
		"reset":      func(b *breaker.Breaker, _ *linger.Work) { b.Reset() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := breaker.New(breaker.Config{Failures: 10, Window: time.Minute})
				work := goesOn(t, b, t.Context())
				time.Sleep(30 * time.Second)
				end(b, work)
				do(b, down)
				row := b.Stats().Window.FailedInARow
				time.Sleep(30 * time.Second)
				require.Equal(t, row, b.Stats().Window.FailedInARow)
			})
		})
	}
}

// A break takes the newest success out, and what is left leaves the window in its time.
func TestBreakerTakesTheNewestSuccess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Failures: 10, Window: 10 * time.Second})
		do(b, ok)
		work := goesOn(t, b, t.Context())
		time.Sleep(1500 * time.Millisecond)
		do(b, ok)
		time.Sleep(time.Second)
		do(b, down)
		work.End(errDown)
		require.Equal(t, breaker.Counts{Calls: 4, Succeeded: 2, Failed: 2, FailedInARow: 2}, b.Stats().Window)
		time.Sleep(8 * time.Second) // the first two are in the slot that has left
		require.Equal(t, breaker.Counts{Calls: 2, Failed: 2, FailedInARow: 2}, b.Stats().Window, "the success of 1.5 s was taken")
		time.Sleep(time.Minute)
		require.Equal(t, breaker.Counts{FailedInARow: 2}, b.Stats().Window)
	})
}

// An answer has ended the call, also if there was work.
func TestBreakerDoesNotWaitForTheWorkOfAnAnswer(t *testing.T) {
	b := breaker.New(breaker.Config{Failures: 1})
	ctx, work := linger.Begin(t.Context())
	require.Equal(t, answered(true), b.Do(ctx, func(context.Context) error { work.GoOn(); return answered(true) }))
	work.End(errDown)
	require.Equal(t, breaker.Counts{Calls: 1, Succeeded: 1}, b.Stats().Window)
}

func TestBreakerTellsOfAChangeWhenWorkBreaksOff(t *testing.T) {
	var seen changes
	b := watched(&seen, breaker.Config{Failures: 1})
	goesOn(t, b, t.Context()).End(errDown)
	require.Equal(t, "closed -> open", seen.String())
}

// A probe has succeeded when its work has gone on for OpenFor, whoever looks first.
func TestBreakerLooksAtTheTimeWhenTheWorkOfAProbeEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Failures: 1, OpenFor: time.Second})
		open(t, b)
		time.Sleep(time.Second)
		work := goesOn(t, b, t.Context())
		time.Sleep(time.Second)
		work.End(errDown)
		require.Equal(t, breaker.Closed, b.State())
		require.Zero(t, b.Stats().Window.Calls)
	})
}

func TestBreakerCountsAProbeThatGoesOnOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Failures: 1, OpenFor: time.Second, Probes: 2})
		open(t, b)
		time.Sleep(time.Second)
		work := goesOn(t, b, t.Context())
		time.Sleep(time.Second)
		require.Equal(t, breaker.HalfOpen, b.State())
		work.End(nil)
		require.Equal(t, breaker.HalfOpen, b.State(), "two must succeed")
		require.NoError(t, do(b, ok))
		require.Equal(t, breaker.Closed, b.State())
	})
}

// A probe of an earlier opening takes a permit until it returns, and no longer, although its
// work goes on.
func TestBreakerForgetsTheWorkOfAnEarlierProbe(t *testing.T) {
	for name, tripped := range map[string]bool{"returned before": false, "returns after": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := breaker.New(breaker.Config{Failures: 1, OpenFor: time.Minute})
				b.Trip(nil, time.Second)
				time.Sleep(time.Second)
				ctx, work := linger.Begin(t.Context())
				require.NoError(t, b.Do(ctx, func(context.Context) error {
					if tripped {
						b.Trip(nil, time.Second)
						time.Sleep(time.Second)
						require.Equal(t, breaker.HalfOpen, b.State())
					}
					work.GoOn()
					return nil
				}))
				if !tripped {
					b.Trip(nil, time.Second)
					time.Sleep(time.Second)
				}
				require.NoError(t, do(b, ok))
				require.Equal(t, breaker.Closed, b.State())
				work.End(nil)
			})
		})
	}
}
