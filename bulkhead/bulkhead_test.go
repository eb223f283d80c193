package bulkhead_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
)

func nothing(context.Context) error { return nil }

// hold takes a slot and returns the function that gives it back.
func hold(t *testing.T, b *bulkhead.Bulkhead) (release func()) {
	t.Helper()
	done, err := b.Begin(t.Context())
	require.NoError(t, err)
	return func() { done(nil) }
}

// setLimit changes the limit of b.
func setLimit(b *bulkhead.Bulkhead, n int) error {
	return b.Update(func(c *bulkhead.Config) { c.Limit = n })
}

type costKey struct{}

// costing returns ctx for a call whose cost, by costOf, is n.
func costing(ctx context.Context, n int) context.Context {
	return context.WithValue(ctx, costKey{}, n)
}

func costOf(ctx context.Context) int {
	if n, ok := ctx.Value(costKey{}).(int); ok {
		return n
	}
	return 1
}

// tryBegin is Begin for a call that waits for a moment at most.
func tryBegin(b *bulkhead.Bulkhead, ctx context.Context) (done func(error), err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	return b.Begin(ctx)
}

// requireIdle checks that every slot is free.
func requireIdle(t *testing.T, b *bulkhead.Bulkhead) {
	t.Helper()
	s := b.Stats()
	require.Zero(t, s.InFlight)
	for level, n := range s.Queued {
		require.Zero(t, n, "waiting at level %d", level)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute) // no moment: a machine may be slow
	defer cancel()
	for n := range s.Limit {
		done, err := b.Begin(ctx)
		require.NoError(t, err, "slot %d of %d", n, s.Limit)
		defer done(nil)
	}
}

// A call that costs nothing runs although the slots are taken and a call waits for them.
func TestZeroCostTakesNoSlot(t *testing.T) {
	for _, share := range []func(context.Context) string{nil, shareOf} {
		synctest.Test(t, func(t *testing.T) {
			b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Cost: costOf, Share: share})
			done := hold(t, b)
			go func() { _ = b.Do(t.Context(), nothing) }()
			synctest.Wait()
			for _, cost := range []int{0, -7} {
				free := costing(t.Context(), cost)
				require.NoError(t, b.Do(free, nothing))
				require.Panics(t, func() { _ = b.Do(free, func(context.Context) error { panic("oops") }) })
				end, err := b.Begin(free)
				require.NoError(t, err)
				require.Equal(t, 1, b.Stats().InFlight)
				end(nil)
				end(nil)
			}
			s := b.Stats()
			require.EqualValues(t, 7, s.Admitted)
			require.Zero(t, s.Refused+s.Waited)
			require.Equal(t, 1, s.InFlight)
			require.Equal(t, []int{1}, s.Queued)
			done()
			synctest.Wait()
			requireIdle(t, b)
			ended, cancel := context.WithCancel(costing(t.Context(), 0))
			cancel()
			require.ErrorIs(t, b.Do(ended, nothing), context.Canceled)
		})
	}
}

func TestDoRefusesCallsAboveLimit(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Name: "users", Limit: 2})
	first, second := hold(t, b), hold(t, b)

	err := b.Do(t.Context(), func(context.Context) error {
		t.Error("called without a slot")
		return nil
	})
	require.ErrorIs(t, err, bulkhead.ErrFull)
	var full *bulkhead.FullError
	require.ErrorAs(t, err, &full)
	require.Equal(t, bulkhead.FullError{Name: "users", Reason: bulkhead.NoSlot, Cost: 1, Limit: 2, InFlight: 2}, *full)
	require.EqualError(t, err, "bulkhead: users: full (no_slot): 2 of 2 in flight, 0 waiting")
	require.True(t, full.Retryable())
	require.True(t, full.Refused())

	first()
	require.NoError(t, b.Do(t.Context(), nothing))
	second()
	requireIdle(t, b)
}

func TestDoReturnsErrorOfCall(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Limit: 1})
	broken := errors.New("broken")
	require.Same(t, broken, b.Do(t.Context(), func(context.Context) error { return broken }))
	require.Same(t, broken, b.Wrap(func(context.Context) error { return broken })(t.Context()))
	requireIdle(t, b)
}

func TestEndedContextNeverGetsSlot(t *testing.T) {
	gone := errors.New("client gone")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(gone)
	b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Queue: 1})
	for range 1000 {
		err := b.Do(ctx, func(context.Context) error {
			t.Fatal("called")
			return nil
		})
		require.ErrorIs(t, err, gone)
		require.ErrorIs(t, err, context.Canceled)
		require.NotErrorIs(t, err, bulkhead.ErrFull)
	}
	require.Zero(t, b.Stats().Admitted)
}

func TestPanicAndGoexitReleaseSlot(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Limit: 1})
	require.PanicsWithValue(t, "boom", func() {
		_ = b.Do(t.Context(), func(context.Context) error { panic("boom") })
	})
	requireIdle(t, b)

	var wg sync.WaitGroup
	wg.Go(func() {
		_ = b.Do(t.Context(), func(context.Context) error {
			runtime.Goexit()
			return nil
		})
	})
	wg.Wait()
	requireIdle(t, b)
}

func TestMaxWaitDecidesWhetherCallsWait(t *testing.T) {
	for maxWait, want := range map[time.Duration]time.Duration{0: 0, time.Second: time.Second, -1: time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: maxWait})
			release := hold(t, b)
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			start := time.Now()
			require.ErrorIs(t, b.Do(ctx, nothing), bulkhead.ErrFull)
			require.Equal(t, want, time.Since(start))
			release()
			requireIdle(t, b)
		})
	}
}

func TestWaitEndsWithMaxWaitOrContext(t *testing.T) {
	gone := errors.New("client gone")
	for name, tc := range map[string]struct {
		ctx    func(context.Context) (context.Context, context.CancelFunc)
		reason bulkhead.Reason
		waited time.Duration
		is     []error
	}{
		"max wait": {
			func(ctx context.Context) (context.Context, context.CancelFunc) { return ctx, func() {} },
			bulkhead.WaitTooLong, time.Second, nil,
		},
		"later deadline": {
			func(ctx context.Context) (context.Context, context.CancelFunc) {
				return context.WithTimeout(ctx, 2*time.Second)
			},
			bulkhead.WaitTooLong, time.Second, nil,
		},
		"deadline": {
			func(ctx context.Context) (context.Context, context.CancelFunc) {
				return context.WithTimeoutCause(ctx, time.Millisecond, gone)
			},
			bulkhead.ContextEnded, time.Millisecond, []error{context.DeadlineExceeded, gone},
		},
		"cancel": {
			func(ctx context.Context) (context.Context, context.CancelFunc) {
				ctx, cancel := context.WithCancelCause(ctx)
				time.AfterFunc(600*time.Millisecond, func() { cancel(gone) })
				return ctx, func() { cancel(nil) }
			},
			bulkhead.ContextEnded, time.Minute / 100, []error{context.Canceled, gone},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var told []*bulkhead.FullError
				b := bulkhead.New(bulkhead.Config{
					Limit: 1, Queue: 1, MaxWait: time.Second,
				})
				onRefuse(b, func(_ context.Context, e *bulkhead.FullError) { told = append(told, e) })
				release := hold(t, b)
				ctx, cancel := tc.ctx(t.Context())
				defer cancel()
				err := b.Do(ctx, nothing)
				require.ErrorIs(t, err, bulkhead.ErrFull)
				var full *bulkhead.FullError
				require.ErrorAs(t, err, &full)
				require.Equal(t, tc.reason, full.Reason)
				require.Equal(t, tc.waited, full.Waited)
				require.Equal(t, []*bulkhead.FullError{full}, told)
				for _, cause := range tc.is {
					require.ErrorIs(t, err, cause)
				}
				release()
				requireIdle(t, b)
			})
		})
	}
}

// A call that gets a slot at the moment at which its ctx ends passes it on.
func TestLateSlotIsPassedOn(t *testing.T) {
	for range 200 {
		synctest.Test(t, func(t *testing.T) {
			b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Queue: 2})
			release := hold(t, b)
			ctx, cancel := context.WithCancel(t.Context())
			next := make(chan struct{})
			go func() {
				err := b.Do(ctx, func(context.Context) error {
					t.Error("called after its ctx had ended")
					return nil
				})
				if !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
			}()
			synctest.Wait()
			go func() { _ = b.Do(t.Context(), func(context.Context) error { close(next); return nil }) }()
			synctest.Wait()
			cancel()
			release()
			<-next
			synctest.Wait()
			require.EqualValues(t, 2, b.Stats().Admitted)
			requireIdle(t, b)
		})
	}
}

// A late ctx is over before its Done channel is closed.
type late struct {
	context.Context
	over atomic.Bool
}

func (l *late) Err() error {
	if l.over.Load() {
		return context.Canceled
	}
	return nil
}

// The ctx of a call ends after the call has got its slot, and before its function runs.
func TestCallCanceledWithItsSlotIsNotMade(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: bulkhead.Unlimited})
		release, ctx := hold(t, b), &late{Context: t.Context()}
		go func() {
			err := b.Do(ctx, func(context.Context) error { t.Error("called"); return nil })
			require.ErrorIs(t, err, context.Canceled)
			full, _ := errors.AsType[*bulkhead.FullError](err)
			require.Equal(t, bulkhead.ContextEnded, full.Reason)
		}()
		synctest.Wait()
		ctx.over.Store(true)
		release()
		synctest.Wait()
		s := b.Stats()
		require.Equal(t, []int64{1, 1, 0}, []int64{s.Admitted, s.Refused, s.Waited})
		require.Equal(t, int64(1), s.Refusals[bulkhead.ContextEnded])
		requireIdle(t, b)
	})
}

// The counters never go back, also where a slot came too late for its caller.
func TestAdmittedNeverDecreases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Queue: 1})
		release := hold(t, b)
		ctx, cancel := context.WithCancel(t.Context())
		go func() { _ = b.Do(ctx, nothing) }()
		synctest.Wait()
		cancel()
		release()
		before := b.Stats()
		synctest.Wait()
		after := b.Stats()
		require.GreaterOrEqual(t, after.Admitted, before.Admitted)
		require.GreaterOrEqual(t, after.Waited, before.Waited)
		require.EqualValues(t, 1, after.Admitted)
		requireIdle(t, b)
	})
}

func TestRefusalCountsWaitingCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1})
		end, err := b.Begin(t.Context())
		require.NoError(t, err)
		for queued := range 3 {
			_, err := tryBegin(b, t.Context())
			var full *bulkhead.FullError
			require.ErrorAs(t, err, &full)
			require.Equal(t, queued, full.Queued)
			go func() { _ = b.Do(t.Context(), nothing) }()
			synctest.Wait()
		}
		end(nil)
	})
}
