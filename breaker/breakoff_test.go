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

// beginStream makes a call whose stream continues after it has returned, like that of a response.
func beginStream(t *testing.T, b *breaker.Breaker, ctx context.Context) *linger.Work {
	t.Helper()
	ctx, work := linger.Begin(ctx)
	require.NoError(t, b.Do(ctx, func(context.Context) error { work.Continue(); return nil }))
	return work
}

// The stream of a probe of an earlier opening holds no permit, whether its call had returned by then or not.
func TestProbesBesideAnEarlierStream(t *testing.T) {
	for _, returned := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			b := breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Hour})
			b.Trip(errDown, time.Second)
			time.Sleep(time.Second)
			ctx, work := linger.Begin(t.Context())
			returns, over := make(chan struct{}), make(chan error, 1)
			go func() { over <- b.Do(ctx, func(context.Context) error { <-returns; work.Continue(); return nil }) }()
			synctest.Wait()
			if returned {
				close(returns)
				require.NoError(t, <-over)
			}
			b.Trip(errDown, time.Second)
			time.Sleep(time.Second)
			if !returned {
				require.ErrorIs(t, do(b, ok), breaker.ErrOpen, "it may still run")
				close(returns)
				require.NoError(t, <-over)
			}
			require.NoError(t, do(b, ok))
			require.Equal(t, breaker.Closed, b.State())
			work.End(errDown)
			require.Equal(t, breaker.Closed, b.State())
		})
	}
}

// 19 of 20 streams break. The breaker opens however long each has run by then, because the rate is that of
// the ends.
func TestBrokenStreamsOpenAtAnyRate(t *testing.T) {
	const window = 10 * time.Second
	for _, after := range []time.Duration{window / 10, window, 3 * window} {
		for _, rate := range []float64{0.5, 0.51, 0.6, 0.9} {
			t.Run(fmt.Sprint(after, rate), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := breaker.New(breaker.Config{FailureRate: rate, Window: window})
					refused := 0
					for i := range 1000 {
						ctx, work := linger.Begin(t.Context())
						err := b.Do(ctx, func(context.Context) error { work.Continue(); return nil })
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
					require.NotZero(t, b.Stats().Transitions[breaker.Open])
					require.Greater(t, refused, 250)
					time.Sleep(time.Hour)
				})
			})
		}
	}
}

// 10,000 streams that last an hour, and one failed call in a hundred, do not open the breaker, not even when
// the streams have ended.
func TestLongStreamsKeepBreakerClosed(t *testing.T) {
	for name, cfg := range map[string]breaker.Config{
		"rate":        {FailureRate: 0.1, Window: 10 * time.Second},
		"in a row":    {ConsecutiveFailures: 5, Window: 10 * time.Second}, // three fail until the first is old
		"rate, calls": {FailureRate: 0.1, WindowCalls: 100},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := breaker.New(cfg)
				for i := range 10_000 {
					if i%100 == 50 {
						require.Equal(t, errDown, do(b, down))
					}
					work := beginStream(t, b, t.Context())
					time.AfterFunc(time.Hour, func() { work.End(nil) })
					time.Sleep(36 * time.Millisecond)
				}
				require.Equal(t, breaker.Closed, b.State())
				time.Sleep(2 * time.Hour)
				require.Zero(t, b.Stats().Transitions[breaker.Open])
			})
		})
	}
}

// If Classify excuses a broken stream, it is not counted as a second success.
func TestClassifyGetsBrokenStreams(t *testing.T) {
	for _, result := range []breaker.Verdict{breaker.Success, breaker.Ignore} {
		b := breaker.New(breaker.Config{ConsecutiveFailures: 1, Classify: func(error) breaker.Verdict { return result }})
		beginStream(t, b, t.Context()).End(errDown)
		require.Equal(t, breaker.Counts{Succeeded: 1}, b.Stats().Window, result)
	}
}

func TestFailedCallHasNoStream(t *testing.T) {
	for name, fn := range map[string]func(work *linger.Work) error{
		"error":             func(*linger.Work) error { return errDown },
		"error of the work": func(w *linger.Work) error { w.Continue(); return errDown },
		"panic":             func(*linger.Work) error { panic("oops") },
		"panic of the work": func(w *linger.Work) error { w.Continue(); panic("oops") },
	} {
		t.Run(name, func(t *testing.T) {
			b := breaker.New(breaker.Config{ConsecutiveFailures: 2})
			ctx, work := linger.Begin(t.Context())
			func() {
				defer func() { _ = recover() }()
				require.Equal(t, errDown, b.Do(ctx, func(context.Context) error { return fn(work) }))
			}()
			work.End(errDown)
			require.Equal(t, breaker.Counts{Failed: 1, ConsecutiveFailures: 1}, b.Stats().Window, "once")
		})
	}
}

// If the work does not continue, the call counts when its function returns. For example, a response has no body.
func TestWorkMayEndWithItsCall(t *testing.T) {
	for name, stream := range map[string]bool{"response": false, "rpc": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := breaker.New(breaker.Config{ConsecutiveFailures: 2})
				ctx := t.Context()
				if stream {
					ctx = &rpc{Context: ctx}
				}
				beginStream(t, b, ctx).End(errDown)
				for _, want := range []breaker.Counts{{Succeeded: 1, Failed: 1}, {}} {
					ctx, _ := linger.Begin(ctx)
					require.NoError(t, b.Do(ctx, ok))
					require.Equal(t, breaker.Closed, b.State())
					require.Equal(t, want, b.Stats().Window)
					b.Trip(errDown, time.Second)
					time.Sleep(time.Second) // the next call is a probe
				}
			})
		})
	}
}

// A stream may end on another goroutine before its call has been counted.
func TestStreamMayEndBeforeItsCall(t *testing.T) {
	for range 200 {
		b := breaker.New(breaker.Config{ConsecutiveFailures: 100})
		ctx, work := linger.Begin(t.Context())
		over := make(chan struct{})
		require.NoError(t, b.Do(ctx, func(context.Context) error {
			work.Continue()
			go func() {
				defer close(over)
				for !work.Held() {
				}
				work.End(errDown)
			}()
			return nil
		}))
		<-over
		require.Equal(t, breaker.Counts{Failed: 1, ConsecutiveFailures: 1}, b.Stats().Window)
		require.Equal(t, []int64{1, 1}, []int64{b.Stats().Succeeded, b.Stats().Failed})
	}
}

// An answer ends the call, even if work was to continue.
func TestAnswerHasNoStream(t *testing.T) {
	b := breaker.New(breaker.Config{ConsecutiveFailures: 1})
	ctx, work := linger.Begin(t.Context())
	require.Equal(t, answered(true), b.Do(ctx, func(context.Context) error { work.Continue(); return answered(true) }))
	work.End(errDown)
	require.Equal(t, breaker.Counts{Succeeded: 1}, b.Stats().Window)
}
