package throttle_test

import (
	"context"
	"errors"
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
			d := l.AllowN(1)
			require.Equal(t, throttle.Decision{OK: true, Limit: 3, Remaining: left, ResetAfter: time.Duration(3-left) * 100 * time.Millisecond}, d)
		}
		refused := throttle.Decision{Limit: 3, RetryAfter: 100 * time.Millisecond, ResetAfter: 300 * time.Millisecond}
		require.Equal(t, refused, l.AllowN(1))
		require.Equal(t, refused, l.Peek())

		time.Sleep(100*time.Millisecond - 1)
		require.Equal(t, time.Nanosecond, l.AllowN(1).RetryAfter, "a nanosecond too early")
		time.Sleep(1)
		require.True(t, l.Allow())
		require.False(t, l.Allow())

		require.Equal(t, 200*time.Millisecond, l.AllowN(2).RetryAfter)
		time.Sleep(200 * time.Millisecond)
		require.True(t, l.AllowN(2).OK)

		time.Sleep(time.Hour) // no more than the burst adds up
		require.True(t, l.AllowN(3).OK)
		require.False(t, l.Allow())
		require.Equal(t, throttle.Stats{Admitted: 6, Refused: 5, Spent: 9}, l.Stats())
	})
}

func TestOddRateDoesNotDrift(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 3, Burst: 2})
		start := time.Now()
		admitted := 0
		for time.Since(start) < 24*time.Hour {
			d := l.AllowN(1)
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

func TestDoRefusesWithoutCalling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var events []*throttle.LimitedError
		l := throttle.New(throttle.Config{
			Name: "search", Rate: throttle.PerMinute(60), Burst: 1,
			OnReject: func(_ context.Context, e *throttle.LimitedError) { events = append(events, e) },
		})
		boom := errors.New("boom")
		require.Equal(t, boom, l.Do(t.Context(), func(context.Context) error { return boom }))
		err := l.Do(t.Context(), func(context.Context) error { panic("called") })
		require.ErrorIs(t, err, throttle.ErrLimited)
		require.EqualError(t, err, "throttle: search: limited (over the limit), retry after 1s")
		limited, isLimited := errors.AsType[*throttle.LimitedError](err)
		require.True(t, isLimited)
		require.Equal(t, time.Second, limited.RetryAfter())
		require.True(t, limited.Retryable())
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
		require.Equal(t, 5, l.Stats().Waiting)
		calls.Wait()
		require.Equal(t, []int{0, 1, 2, 3, 4, 5}, order)
		require.Equal(t, throttle.Stats{Admitted: 6, Refused: 2, Waited: 5, Spent: 6}, l.Stats())
	})
}

func TestWhoGivesUpMovesTheOthersUp(t *testing.T) {
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

func TestEndedContextIsHonouredFirst(t *testing.T) {
	l := throttle.New(throttle.Config{Rate: 1, Burst: 1})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, l.Do(ctx, ok), context.Canceled)
	require.NotErrorIs(t, l.Do(ctx, ok), throttle.ErrLimited)
	require.True(t, l.Allow(), "no token was spent")
}
