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

// A bulkhead without levels, costs and adaptive limit has a fast path through Do. It
// must lead to the same results.

func TestFastPathIsNotForAnEndedContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	b := bulkhead.New(bulkhead.Config{Limit: 1})
	require.ErrorIs(t, b.Do(ctx, func(context.Context) error { return errors.New("called") }), context.Canceled)
	require.Zero(t, b.Stats().Admitted)
}

func TestFastPathIsNotForLevels(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Limit: 2, Levels: 2, Priority: levelOf, Reserve: []float64{0.5}})
	low := atLevel(t.Context(), 1)
	err := b.Do(low, func(context.Context) error { return b.Do(low, nothing) })
	require.ErrorIs(t, err, bulkhead.ErrFull, "the last slot is kept for level 0")
	requireIdle(t, b)
}

func TestFastPathIsNotForCosts(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Limit: 2, Cost: costOf})
	costly := costing(t.Context(), 2)
	err := b.Do(costly, func(context.Context) error { return b.Do(t.Context(), nothing) })
	require.ErrorIs(t, err, bulkhead.ErrFull)
	requireIdle(t, b)
}

func TestFastPathIsNotForAnAdaptiveLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{Initial: 4}})
		var calls sync.WaitGroup
		for range 50 {
			calls.Go(func() {
				for range 1000 {
					_ = b.Do(t.Context(), func(context.Context) error { time.Sleep(10 * time.Millisecond); return nil })
					time.Sleep(time.Millisecond)
				}
			})
		}
		calls.Wait()
		require.Greater(t, b.Stats().Limit, 4, "it has seen the calls")
	})
}

func TestFastPathCountsWithoutEnd(t *testing.T) {
	for _, cfg := range []bulkhead.Config{{Limit: 1}, {Limit: 1, MaxWait: -1, Share: shareOf}} {
		for _, most := range []int{1<<31 - 2, 1<<31 - 1} {
			b := bulkhead.New(cfg)
			for range 2 {
				bulkhead.SkipAdmitted(b, most)
				for range 10 {
					require.NoError(t, b.Do(t.Context(), nothing))
				}
			}
			require.EqualValues(t, 2*most+20, b.Stats().Admitted)
		}
	}
}

func TestFastPathUnderStress(t *testing.T) {
	const most, queue, callers, each = 8, 16, 32, 5000
	b := bulkhead.New(bulkhead.Config{Limit: most, MaxWait: -1, Queue: queue})
	var running, over, done atomic.Int64
	work := func(context.Context) error {
		if running.Add(1) > most {
			over.Add(1)
		}
		runtime.Gosched()
		running.Add(-1)
		done.Add(1)
		return nil
	}
	var calls sync.WaitGroup
	for i := range callers {
		calls.Go(func() {
			for n := range each {
				switch (n + i) % 8 {
				case 0:
					if done, err := b.Begin(t.Context()); err == nil {
						_ = work(t.Context())
						done(nil)
					}
				case 1:
					_ = b.SetLimit(1 + n%most)
				default:
					_ = b.Do(t.Context(), work)
				}
			}
		})
	}
	calls.Wait()
	require.Zero(t, over.Load(), "more than the limit at once")
	require.EqualValues(t, done.Load(), b.Stats().Admitted)
	require.NoError(t, b.SetLimit(most))
	requireIdle(t, b)
}
