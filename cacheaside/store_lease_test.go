package cacheaside_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// Other processes repeat a load that outlasts its lease, but all processes cache the first result.
func TestLoadLongerThanLeaseIsCached(t *testing.T) {
	for _, capacity := range []int{0, -1} {
		bubble(t, fmt.Sprint(capacity), func(t *testing.T) {
			shared := newFakeStore()
			var loads atomic.Int64
			var log eventLog
			var caches []*cacheaside.Cache[int, int64]
			for range 6 {
				c := newCache(t, cacheaside.Config[int, int64]{
					Load: func(context.Context, int) (int64, error) {
						defer time.Sleep(10 * time.Second) // the lease is 3 s
						return loads.Add(1), nil
					},
					Store: watchedIf(capacity == 0, shared.connect()),
				})
				c.Observe(log.add)
				caches = append(caches, c)
			}
			synctest.Wait()
			var wg sync.WaitGroup
			for _, c := range caches {
				wg.Go(func() {
					if v, err := c.Get(t.Context(), 1); err != nil || v > 4 {
						t.Errorf("%d, %v", v, err)
					}
				})
			}
			wg.Wait()
			require.Equal(t, int64(4), loads.Load(), "one each 3 s, until the first has filled")
			for _, c := range caches {
				require.LessOrEqual(t, mustGet(t, c, 1), int64(4))
			}
			require.Equal(t, int64(4), loads.Load())
			for _, c := range caches {
				require.Zero(t, c.Stats().Overtaken)
			}
		})
	}
}

// Of two loads in one generation, the Store has the result of the first to end. The other process caches its own
// result, because nothing was invalidated.
func TestFirstFillWins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		next := shared.connect()
		c := newCache(t, cacheaside.Config[int, string]{
			Load: func(context.Context, int) (string, error) {
				time.Sleep(5 * time.Second)
				return "slow", nil
			},
			Store: shared.connect(),
		})
		synctest.Wait()
		go func() {
			time.Sleep(4 * time.Second)
			look, _ := next.Acquire(t.Context(), cacheaside.Request{Key: "1", Token: "next"})
			_, _ = next.Fill(t.Context(),
				cacheaside.Entry{Key: "1", Grant: look[0].Grant, Value: []byte("first"), Fresh: time.Minute, Keep: time.Minute})
		}()
		require.Equal(t, "slow", mustGet(t, c, 1))
		v, ok := c.Peek(1)
		require.True(t, ok)
		require.Equal(t, "slow", v)
		require.Equal(t, "first", string(shared.items["1"].of(0).value))
	})
}

// Memory does not cache a value that was invalidated in the Store, even if the message is lost.
func TestInvalidatedFillIsNotCached(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		var version atomic.Int64
		var log eventLog
		c := newCache(t, cacheaside.Config[int, int64]{
			Load: func(context.Context, int) (int64, error) {
				defer time.Sleep(time.Second)
				return version.Load(), nil
			},
			Store: &telling{Store: shared.connect(), heard: make(chan func(string), 1)}, // receives no messages
		})
		c.Observe(log.add)
		synctest.Wait()
		go func() {
			time.Sleep(500 * time.Millisecond)
			version.Store(1)
			_ = shared.connect().Invalidate(t.Context(), "1")
		}()
		require.Equal(t, int64(0), mustGet(t, c, 1))
		require.Equal(t, int64(1), mustGet(t, c, 1))
		require.EqualValues(t, 1, c.Stats().Overtaken)
	})
}

// slowly is a Store whose answers are delayed or lost.
type slowly struct {
	cacheaside.Store
	takes time.Duration
	loses func(call string) bool
}

func (s slowly) answer(ctx context.Context, call string, err error) error {
	timer := time.NewTimer(s.takes)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	if s.loses != nil && s.loses(call) {
		return errStore
	}
	return err
}

func (s slowly) Acquire(ctx context.Context, asks ...cacheaside.Request) ([]cacheaside.Response, error) {
	looks, err := s.Store.Acquire(ctx, asks...)
	return looks, s.answer(ctx, "Acquire", err)
}

func (s slowly) Fence(ctx context.Context, key, token string) (time.Duration, error) {
	window, err := s.Store.Fence(ctx, key, token)
	return window, s.answer(ctx, "Fence", err)
}

func (s slowly) Unfence(ctx context.Context, key, token string) error {
	if s.loses != nil && s.loses("Unfence before") {
		return errStore
	}
	return s.answer(ctx, "Unfence", s.Store.Unfence(ctx, key, token))
}

func TestCanceledCallerLeavesNoLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared, src := newFakeStore(), newSource()
		impatient := newCache(t, cacheaside.Config[int, int]{
			Load: src.load, Store: slowly{Store: shared.connect(), takes: 200 * time.Millisecond}})
		other := newCache(t, cacheaside.Config[int, int]{Load: src.load, Store: shared.connect()})
		synctest.Wait()
		for _, many := range []bool{false, true} {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			var err error
			if many {
				_, err = impatient.GetMany(ctx, []int{2, 66, 130}) // in one shard
			} else {
				_, err = impatient.Get(ctx, 1)
			}
			require.ErrorIs(t, err, context.DeadlineExceeded)
			time.Sleep(150 * time.Millisecond) // the answer has arrived
			start := time.Now()
			_, err = other.GetMany(t.Context(), []int{1, 2, 66, 130})
			require.NoError(t, err)
			require.Zero(t, time.Since(start))
		}
	})
}

// Whichever response about a fence was lost, the key is cached again long before the fence expires after 20 seconds.
func TestFenceWithLostResponseIsRemoved(t *testing.T) {
	for _, call := range []string{"Fence", "Unfence before", "Unfence"} {
		bubble(t, call, func(t *testing.T) {
			shared, src := newFakeStore(), newSource()
			var lost atomic.Bool
			lost.Store(true)
			c := newCache(t, cacheaside.Config[int, int]{Load: src.load,
				Store: slowly{Store: shared.connect(), loses: func(what string) bool { return what == call && lost.Load() }}})
			other := newCache(t, cacheaside.Config[int, int]{Load: src.load, Store: shared.connect()})
			synctest.Wait()
			err := c.Write(t.Context(), 1, src.write(1))
			require.NoError(t, cacheaside.WriteError(err))
			lost.Store(false)
			time.Sleep(3 * time.Second)
			for _, c := range []*cacheaside.Cache[int, int]{c, other} {
				require.Equal(t, 1, mustGet(t, c, 1))
				_, ok := c.Peek(1)
				require.True(t, ok)
			}
			require.Zero(t, c.Stats().PendingInvalidations)
		})
	}
}

// A caller that cancels during Fence leaves no fence in place.
func TestCanceledCallerLeavesNoFence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared, src := newFakeStore(), newSource()
		c := newCache(t, cacheaside.Config[int, int]{
			Load: src.load, Store: slowly{Store: shared.connect(), takes: 200 * time.Millisecond}})
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		err := c.Write(ctx, 1, func(context.Context) error { panic("called") })
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Zero(t, c.Stats().PendingInvalidations)
		looks, err := shared.connect().Acquire(t.Context(), cacheaside.Request{Key: "1", Token: "t"})
		require.NoError(t, err)
		require.Equal(t, cacheaside.Leased, looks[0].State)
	})
}
