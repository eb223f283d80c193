package cacheaside_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/policy"
)

func write(t *testing.T, c *cacheaside.Cache[int, int], key int) {
	t.Helper()
	err := c.Write(t.Context(), key, func(context.Context) error { return nil })
	require.NoError(t, cacheaside.WriteError(err))
}

// A Store that is too slow does not make a write late.
func TestInvalidateErrorIsNoTimeout(t *testing.T) {
	late := fmt.Errorf("redis: %w", context.DeadlineExceeded)
	boom := errors.New("constraint violated")
	conn := newFakeStore().connect()
	conn.fail()
	c := newCache(t, cacheaside.Config[int, int]{Load: newSource().load, Store: writesFail{conn, late}})
	for _, wrote := range []error{nil, boom, context.Canceled} {
		err := c.Write(t.Context(), 1, func(context.Context) error { return wrote })
		var pending *cacheaside.InvalidateError
		require.ErrorAs(t, err, &pending)
		require.ErrorIs(t, pending.Err, context.DeadlineExceeded)
		require.ErrorContains(t, err, late.Error())
		require.NotErrorIs(t, err, context.DeadlineExceeded)
		require.False(t, resilience.IsTimeout(err))
		if wrote != nil {
			require.ErrorIs(t, err, wrote)
		}
	}
}

type writesFail struct {
	cacheaside.Store
	err error
}

func (s writesFail) Fence(context.Context, string, string) (time.Duration, error) { return 0, s.err }
func (s writesFail) Unfence(context.Context, string, string) error                { return s.err }

func TestWriteErrorOfNestedWrites(t *testing.T) {
	boom := errors.New("constraint violated")
	conn := newFakeStore().connect()
	conn.fail()
	c := newCache(t, cacheaside.Config[int, int]{Load: newSource().load, Store: conn})
	for _, wrote := range []error{nil, boom} {
		err := c.Write(t.Context(), 1, func(ctx context.Context) error {
			return c.Write(ctx, 2, func(context.Context) error { return wrote })
		})
		require.ErrorIs(t, err, cacheaside.ErrNotPropagated)
		require.Equal(t, wrote, cacheaside.WriteError(err))
	}
	err := c.Write(t.Context(), 1, func(ctx context.Context) error { return c.Invalidate(ctx, 2) })
	require.ErrorIs(t, cacheaside.WriteError(err), cacheaside.ErrNotPropagated, "not the error of a Write")
}

func TestInvalidateOfManyKeysDoesNotWaitForEach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := newFakeStore().connect()
		c := cacheaside.New(cacheaside.Config[int, int]{Load: newSource().load, Store: conn, ErrorPause: time.Minute})
		conn.hangs = 250 * time.Millisecond
		conn.fail()
		keys := make([]int, 500)
		for i := range keys {
			keys[i] = i
		}
		start := time.Now()
		err := c.Invalidate(t.Context(), keys...)
		require.LessOrEqual(t, time.Since(start), 2*conn.hangs, "eight calls run concurrently")
		var untold *cacheaside.InvalidateError
		require.ErrorAs(t, err, &untold)
		require.Len(t, untold.Keys, 500)
		require.ErrorAs(t, c.Close(), &untold)
		require.Len(t, untold.Keys, 500)
	})
}

// A shard that is down does not affect the keys of others, and they do not end its
// pause.
func TestDownShardDoesNotAffectOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		conn := shared.connect()
		var log eventLog
		src := newSource()
		c := newCache(t, cacheaside.Config[int, int]{Load: src.load, Store: unwatched{conn}, ErrorPause: time.Second})
		c.Observe(log.add)
		levels := map[string]slog.Level{}
		c.Describe().Observe(func(_ context.Context, e policy.Event) { levels[e.What] = e.Level })
		for key := range 10 {
			mustGet(t, c, key)
		}
		conn.hangs = 250 * time.Millisecond
		conn.breakShard("3", true)
		start := time.Now()
		for range 100 {
			for key := range 10 {
				mustGet(t, c, key)
			}
		}
		require.Equal(t, conn.hangs, time.Since(start), "waited for once")
		for key := range 10 {
			want := 1
			if key == 3 {
				want = 101
			}
			require.Equal(t, want, src.loaded(key), key)
		}
		require.Equal(t, 1, log.count(cacheaside.EventStoreLost))
		write(t, c, 4)
		mustGet(t, c, 4)
		mustGet(t, c, 4)
		require.Equal(t, 2, src.loaded(4))

		// After its pause, the shard is called once: by a Get, or to release a lease.
		time.Sleep(time.Second)
		start = time.Now()
		for range 10 {
			mustGet(t, c, 3)
		}
		require.LessOrEqual(t, time.Since(start), conn.hangs)
		conn.breakShard("3", false)
		time.Sleep(3 * time.Second)
		mustGet(t, c, 3)
		require.Equal(t, 1, log.count(cacheaside.EventStoreRestored))
		require.Equal(t, slog.LevelWarn, levels["store_lost"])
		require.Equal(t, slog.LevelInfo, levels["store_restored"])
		loads := src.loaded(3)
		mustGet(t, c, 3)
		require.Equal(t, loads, src.loaded(3))
	})
}

// Calls may look for pending invalidations while an InvalidateAll fails. The race detector checks this test.
func TestInvalidateAllFailsDuringGets(t *testing.T) {
	store := flaky{newFakeStore().connect(), func(call string) bool { return call == "InvalidateAll" }}
	c := newCache(t, config{Load: identity, Store: unwatched{store}})
	var all sync.WaitGroup
	for key := range 4 {
		all.Go(func() {
			for range 100 {
				if key == 0 {
					_ = c.InvalidateAll(t.Context())
				}
				if v, err := c.Get(t.Context(), key); err != nil || v != key {
					t.Errorf("%d, %v", v, err)
				}
			}
		})
	}
	all.Wait()
}

// A shard that stays down is one outage. The invalidations of the other shards are retried once, and the other shards
// are used.
func TestDownShardIsOneOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log eventLog
		shared, src := newFakeStore(), newSource()
		conn := shared.connect()
		c := newCache(t, cacheaside.Config[int, int]{Load: src.load, Store: unwatched{conn}, TTL: time.Hour})
		c.Observe(log.add)
		require.NoError(t, c.Invalidate(t.Context(), 1))
		conn.breakShard("3", true)
		for range 600 {
			mustGet(t, c, 3)
			mustGet(t, c, 1)
			time.Sleep(100 * time.Millisecond)
		}
		require.Equal(t, 1, log.count(cacheaside.EventStoreLost))
		require.Zero(t, log.count(cacheaside.EventStoreRestored))
		require.Equal(t, 1, shared.called("Invalidate"))
		require.Equal(t, 1, src.loaded(1))
		require.Equal(t, 600+60, shared.called("Acquire"), "the shard that is down is called once a second, for all callers")
	})
}

// If the Store fails while a call waits for the load of another process, the call loads the key itself.
func TestWaitingCallLoadsIfStoreFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		shared.lease = time.Hour
		conn := shared.connect()
		c := newCache(t, config{Load: identity, Store: unwatched{conn}})
		_, err := conn.Acquire(t.Context(), cacheaside.Request{Key: "1", Token: "another process"})
		require.NoError(t, err)
		time.AfterFunc(time.Second, func() { conn.breakShard("1", true) })
		begun := time.Now()
		require.Equal(t, 1, mustGet(t, c, 1))
		require.InDelta(t, time.Second, time.Since(begun), float64(200*time.Millisecond))
	})
}

// A Store that returns too few responses fails no call.
func TestIncompleteStoreResponseIsIgnored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asks atomic.Bool
		c := newCache(t, cacheaside.Config[int, int]{Load: newSource().load,
			Store: mumbling{newFakeStore().connect(), &asks}, ErrorPause: cacheaside.None})
		synctest.Wait()
		for range 2 {
			got, err := c.GetMany(t.Context(), []int{1, 2})
			require.NoError(t, err)
			require.Equal(t, map[int]int{1: 0, 2: 0}, got)
			require.Equal(t, 0, mustGet(t, c, 3))
			require.NoError(t, c.Invalidate(t.Context(), 1, 2, 3))
			asks.Store(true)
		}
	})
}

// A mumbling Store omits the results of Fill or of Acquire.
type mumbling struct {
	cacheaside.Store
	asks *atomic.Bool
}

func (m mumbling) Acquire(ctx context.Context, asks ...cacheaside.Request) ([]cacheaside.Response, error) {
	if m.asks.Load() {
		return nil, nil
	}
	return m.Store.Acquire(ctx, asks...)
}

func (mumbling) Fill(context.Context, ...cacheaside.Entry) ([]bool, error) { return nil, nil }

// Shards that stay down, and an InvalidateAll that keeps failing, do not delay the invalidations of a shard that works
// again.
func TestPendingInvalidationsRetriedInAnyOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := newFakeStore().connect()
		conn.hangs = 250 * time.Millisecond
		all := flaky{conn, func(call string) bool { return call == "InvalidateAll" }}
		c := cacheaside.New(cacheaside.Config[int, int]{Load: newSource().load, Store: all})
		synctest.Wait()
		for _, shard := range []string{"1", "3", "4"} {
			conn.breakShard(shard, true)
		}
		require.ErrorIs(t, c.Invalidate(t.Context(), 3, 4, 1, 11, 21), cacheaside.ErrNotPropagated)
		require.ErrorIs(t, c.InvalidateAll(t.Context()), cacheaside.ErrNotPropagated)
		conn.breakShard("1", false)
		for range 20 {
			require.Error(t, c.Invalidate(t.Context(), 3, 4))
			time.Sleep(100 * time.Millisecond)
		}
		require.EqualValues(t, 3, c.Stats().PendingInvalidations, "3, 4 and all")
		require.NoError(t, c.Invalidate(t.Context(), 2))
		require.EqualError(t, c.Close(), "cacheaside: all keys not invalidated in the store: the store is down")
	})
}

// A call that Close ends does not mean that the Store is lost.
func TestCloseDuringStoreCallIsNoOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log eventLog
		var failed atomic.Bool
		store := flaky{patient{newFakeStore().connect()},
			func(call string) bool { return call == "Invalidate" && !failed.Swap(true) }}
		c := cacheaside.New(cacheaside.Config[int, int]{
			Load: newSource().load, Store: store, ErrorPause: time.Second,
		})
		c.Observe(log.add)
		synctest.Wait()
		require.Error(t, c.Invalidate(t.Context(), 1))
		require.Equal(t, 1, log.count(cacheaside.EventStoreLost))
		require.NoError(t, c.Invalidate(t.Context(), 1))
		require.Equal(t, 1, log.count(cacheaside.EventStoreRestored))
		time.Sleep(950 * time.Millisecond) // the retry is in progress
		require.NoError(t, c.Close())
		require.Equal(t, 1, log.count(cacheaside.EventStoreLost))
	})
}

// A patient Store takes 100ms for each Invalidate, unless ctx is done before.
type patient struct{ cacheaside.Store }

func (p patient) Invalidate(ctx context.Context, keys ...string) error {
	select {
	case <-time.After(100 * time.Millisecond):
		return p.Store.Invalidate(ctx, keys...)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// A panic of a Store reaches the caller, also if several shards are called in parallel.
func TestStorePanicReachesCaller(t *testing.T) {
	keys := []int{1, 2, 3, 4}
	c := newCache(t, cacheaside.Config[int, int]{
		Load: newSource().load, Store: panicStore{newFakeStore().connect()},
	})
	_, err := c.Get(t.Context(), 1)
	require.ErrorContains(t, err, "panicked: no script")
	_, err = c.GetMany(t.Context(), keys)
	require.ErrorContains(t, err, "panicked: no script")
	require.Panics(t, func() { _ = c.Invalidate(t.Context(), 1) })
	require.Panics(t, func() { _ = c.Invalidate(t.Context(), keys...) })
}

type panicStore struct{ cacheaside.Store }

func (panicStore) Acquire(context.Context, ...cacheaside.Request) ([]cacheaside.Response, error) {
	panic("no script")
}
func (panicStore) Invalidate(context.Context, ...string) error { panic("no script") }

func TestKeyMayCallCache(t *testing.T) {
	var c *cacheaside.Cache[int, int]
	c = newCache(t, cacheaside.Config[int, int]{
		Load: newSource().load, Store: newFakeStore().connect(), ReplicaLag: time.Second,
		Key: func(key int) string {
			_ = c.Stats() // would wait forever for a lock that its caller holds
			return strconv.Itoa(key)
		},
	})
	mustGet(t, c, 1)
	require.NoError(t, c.Invalidate(t.Context(), 1))
	require.NoError(t, c.Expire(t.Context(), 1))
	write(t, c, 1)
}
