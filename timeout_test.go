package resilience_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/internal/linger"
)

// sleep waits for d or for the end of ctx, whose cause it then returns.
func sleep(d time.Duration) resilience.Func {
	return func(ctx context.Context) error {
		select {
		case <-time.After(d):
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// What heeds no ctx runs on, on the goroutine of its caller, and its slot is taken until it returns.
func TestTimeoutLeavesNothingBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		goroutine := func() string {
			stack := make([]byte, 64)
			return strings.Fields(string(stack[:runtime.Stack(stack, false)]))[1]
		}
		slots := bulkhead.New(bulkhead.Config{Limit: 1})
		caller := goroutine()
		_ = resilience.Chain(slots.Wrap, resilience.Timeout(time.Second))(func(ctx context.Context) error {
			require.Equal(t, caller, goroutine())
			time.Sleep(time.Minute)
			require.Error(t, ctx.Err())
			require.Equal(t, 1, slots.Stats().InFlight)
			return ctx.Err()
		})(t.Context())
		require.Zero(t, slots.Stats().InFlight)
	})
}

func TestTimeoutKeepsTheCallsError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		err := resilience.Timeout(time.Second)(func(ctx context.Context) error {
			<-ctx.Done()
			require.ErrorIs(t, context.Cause(ctx), context.DeadlineExceeded)
			return errDown
		})(t.Context())
		require.Equal(t, time.Second, time.Since(start))

		var timeout *resilience.TimeoutError
		require.ErrorAs(t, err, &timeout)
		require.Equal(t, time.Second, timeout.After)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, err, errDown)
		require.EqualError(t, err, "resilience: timed out after 1s: down")
		var netErr interface{ Timeout() bool }
		require.ErrorAs(t, err, &netErr)
		require.True(t, netErr.Timeout())
	})
}

func TestTimeoutIsTheCauseOfItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		err := resilience.Timeout(time.Second)(sleep(time.Minute))(t.Context())
		require.EqualError(t, err, "resilience: timed out after 1s", "said once")
		require.Equal(t, &resilience.TimeoutError{After: time.Second}, err)
	})
}

func TestTimeoutSaysOfWhat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limit := resilience.NamedTimeout("users", time.Second)
		err := limit(sleep(time.Minute))(t.Context())
		require.EqualError(t, err, "resilience: users: timed out after 1s")
		require.Equal(t, &resilience.TimeoutError{Name: "users", After: time.Second}, err)

		err = limit(func(ctx context.Context) error { <-ctx.Done(); return errDown })(t.Context())
		require.EqualError(t, err, "resilience: users: timed out after 1s: down")
		require.Equal(t, &resilience.TimeoutError{Name: "users", After: time.Second, Err: errDown}, err)
	})
}

func TestTimeoutKeepsLateSuccess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		err := resilience.Timeout(time.Second)(func(context.Context) error {
			time.Sleep(time.Minute) // heeds no context
			return nil
		})(t.Context())
		require.NoError(t, err)
	})
}

func TestTimeoutKeepsEarlierErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		err := resilience.Timeout(time.Second)(func(context.Context) error { return context.DeadlineExceeded })(t.Context())
		require.Equal(t, context.DeadlineExceeded, err)
	})
}

func TestTimeoutReturnsTheCallersOwnEnd(t *testing.T) {
	cause := errors.New("the user went away")
	ends := map[string]func(context.Context) (context.Context, context.CancelFunc){
		"canceled": func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancelCause(ctx)
			stop := time.AfterFunc(time.Millisecond, func() { cancel(cause) })
			return ctx, func() { stop.Stop(); cancel(nil) }
		},
		"earlier deadline": func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeoutCause(ctx, time.Millisecond, cause)
		},
	}
	for name, end := range ends {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := end(t.Context())
				defer cancel()
				require.Equal(t, cause, resilience.Timeout(time.Second)(sleep(time.Minute))(ctx))
			})
		})
	}
}

func TestNestedTimeoutsReportThePassedOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// The same middleware twice: the inner limit starts later and does not pass.
		limit := resilience.Timeout(time.Second)
		var inner error
		err := limit(func(ctx context.Context) error {
			time.Sleep(time.Second / 2)
			inner = limit(sleep(time.Minute))(ctx)
			return inner
		})(t.Context())
		require.EqualError(t, inner, "resilience: timed out after 1s")
		require.Same(t, inner, err)
	})
}

func TestTimeoutOfZeroIsNoLimit(t *testing.T) {
	err := resilience.Timeout(0)(func(ctx context.Context) error {
		_, limited := ctx.Deadline()
		require.False(t, limited)
		return nil
	})(t.Context())
	require.NoError(t, err)
}

func TestTimeoutRefusesANegativeLimit(t *testing.T) {
	require.PanicsWithError(t, "resilience: Timeout is -1s: must be 0 (no limit) or more", func() {
		resilience.Timeout(-time.Second)
	})
}

func TestTimeoutCoversWorkThatGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var timed context.Context
		run := func(ctx context.Context, fn resilience.Func) {
			require.NoError(t, resilience.Timeout(time.Second)(func(ctx context.Context) error {
				timed = ctx
				return fn(ctx)
			})(ctx))
		}
		ctx, work := linger.Begin(t.Context())
		start := time.Now()
		run(ctx, func(context.Context) error { work.Continue(); return nil })
		require.NoError(t, timed.Err())
		<-timed.Done()
		require.Equal(t, time.Second, time.Since(start))
		require.Equal(t, &resilience.TimeoutError{After: time.Second}, context.Cause(timed))

		ctx, work = linger.Begin(t.Context())
		run(ctx, func(context.Context) error { work.Continue(); return nil })
		require.NoError(t, timed.Err())
		work.End(nil)
		require.ErrorIs(t, timed.Err(), context.Canceled)

		ctx, _ = linger.Begin(t.Context())
		run(ctx, sleep(0))
		require.ErrorIs(t, timed.Err(), context.Canceled, "the work did not go on")
	})
}

// A connection with the deadline of its ctx often returns before ctx is canceled. Of the
// two, either may be first.
func TestTimeoutPassesAtItsTime(t *testing.T) {
	for i := range 200 {
		synctest.Test(t, func(t *testing.T) {
			ctx := t.Context()
			if i%2 == 1 {
				ctx, _ = linger.Begin(ctx) // within a Transport
			}
			err := resilience.Timeout(time.Second)(func(context.Context) error {
				time.Sleep(time.Second)
				return errDown
			})(ctx)
			require.Equal(t, &resilience.TimeoutError{After: time.Second, Err: errDown}, err)
		})
	}
}
