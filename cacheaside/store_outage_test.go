package cacheaside_test

import (
	"context"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// Only the first call waits for a Store that hangs, whichever call it is.
func TestStoreThatHangsIsWaitedForOnce(t *testing.T) {
	for name, first := range map[string]func(t *testing.T, c *cacheaside.Cache[int, int]){
		"Get":           func(t *testing.T, c *cacheaside.Cache[int, int]) { mustGet(t, c, 1) },
		"Write":         func(t *testing.T, c *cacheaside.Cache[int, int]) { write(t, c, 1) },
		"Invalidate":    func(t *testing.T, c *cacheaside.Cache[int, int]) { _ = c.Invalidate(t.Context(), 1) },
		"Expire":        func(t *testing.T, c *cacheaside.Cache[int, int]) { _ = c.Expire(t.Context(), 1) },
		"InvalidateAll": func(t *testing.T, c *cacheaside.Cache[int, int]) { _ = c.InvalidateAll(t.Context()) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				conn := newFakeStore().connect()
				src := newSource()
				c := cacheaside.New(cacheaside.Config[int, int]{Load: src.load, Store: conn, Capacity: -1, ErrorPause: time.Minute})
				defer c.Close()
				conn.hangs = 250 * time.Millisecond
				conn.fail()
				start := time.Now()
				first(t, c)
				require.Equal(t, conn.hangs, time.Since(start))

				// The same shard is not asked again. One of the others is.
				start = time.Now()
				write(t, c, 1)
				_ = c.Invalidate(t.Context(), 1)
				_ = c.Expire(t.Context(), 1)
				mustGet(t, c, 1)
				require.Zero(t, time.Since(start))
				for key := range 100 {
					write(t, c, key)
					_ = c.Invalidate(t.Context(), key)
					mustGet(t, c, key)
				}
				_ = c.InvalidateAll(t.Context())
				require.LessOrEqual(t, time.Since(start), conn.hangs)
			})
		})
	}
}

func write(t *testing.T, c *cacheaside.Cache[int, int], key int) {
	t.Helper()
	err := c.Write(t.Context(), key, func(context.Context) error { return nil })
	require.NoError(t, cacheaside.WriteError(err))
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
		require.LessOrEqual(t, time.Since(start), 2*conn.hangs, "eight calls are under way at a time")
		var untold *cacheaside.InvalidateError
		require.ErrorAs(t, err, &untold)
		require.Len(t, untold.Keys, 500)
		require.Error(t, c.Close())
	})
}

// A shard that is down does not affect the keys of others, and they do not end its
// pause.
func TestShardThatIsDownLeavesTheOthersAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		conn := shared.connect()
		var log eventLog
		src := newSource()
		c := cacheaside.New(cacheaside.Config[int, int]{Load: src.load, Store: conn, Capacity: -1, ErrorPause: time.Second, OnEvent: log.add})
		defer c.Close()
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

		// After its pause the shard is asked once: by a Get, or to release a lease.
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
		loads := src.loaded(3)
		mustGet(t, c, 3)
		require.Equal(t, loads, src.loaded(3))
	})
}

// A shard that stays down is one outage: what the others were told is told again once, and
// they are used.
func TestShardThatStaysDownIsOneOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log eventLog
		shared, src := newFakeStore(), newSource()
		conn := shared.connect()
		c := cacheaside.New(cacheaside.Config[int, int]{Load: src.load, Store: conn, Capacity: -1, TTL: time.Hour, OnEvent: log.add})
		defer c.Close()
		require.NoError(t, c.Invalidate(t.Context(), 1))
		conn.breakShard("3", true)
		for range 600 {
			mustGet(t, c, 3)
			mustGet(t, c, 1)
			time.Sleep(100 * time.Millisecond)
		}
		require.Equal(t, 1, log.count(cacheaside.EventStoreLost))
		require.Zero(t, log.count(cacheaside.EventStoreRestored))
		require.Equal(t, 2, shared.called("Invalidate"))
		require.Less(t, src.loaded(1), 15, "until it was told")
	})
}

// What such a shard is still to be told does not keep what the others are told again waiting.
func TestShardThatStaysDownDoesNotDelayWhatTheOthersAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src, conn := newSource(), newFakeStore().connect()
		c := cacheaside.New(cacheaside.Config[int, int]{Load: src.load, Store: conn, Capacity: -1, TTL: time.Hour})
		defer c.Close()
		require.NoError(t, c.Invalidate(t.Context(), 1))
		conn.breakShard("3", true)
		require.ErrorIs(t, c.Invalidate(t.Context(), 3), cacheaside.ErrUntold)
		for range 600 {
			mustGet(t, c, 1)
			time.Sleep(100 * time.Millisecond)
		}
		require.Less(t, src.loaded(1), 15, "until it was told")
		conn.breakShard("3", false)
	})
}

// When a Store is back, all its shards are used as soon as one has answered.
func TestStoreThatIsBackIsUsedForAllShards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := newFakeStore().connect()
		src := newSource()
		c := cacheaside.New(cacheaside.Config[int, int]{Load: src.load, Store: conn, Capacity: -1, ErrorPause: time.Second})
		defer c.Close()
		conn.fail()
		for key := range 60 {
			mustGet(t, c, key)
		}
		conn.recover()
		time.Sleep(time.Second)
		for key := range 60 {
			mustGet(t, c, key)
			mustGet(t, c, key)
			require.Equal(t, 2, src.loaded(key))
		}
	})
}

// While memory is unused because the subscription is lost, an old value in the Store is
// served as one in memory would be.
func TestOldValueOfTheStoreIsServedWhileTheWatchIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		lost := make(chan struct{})
		var mode atomic.Value
		mode.Store("ok")
		var loads atomic.Int64
		c := cacheaside.New(cacheaside.Config[int, int]{
			TTL: time.Minute, Jitter: -1, StaleOnError: time.Hour, SoftTimeout: 100 * time.Millisecond, ErrorPause: 10 * time.Second,
			Load: func(context.Context, int) (int, error) {
				loads.Add(1)
				switch mode.Load() {
				case "fails":
					return 0, errLoad
				case "slow":
					time.Sleep(time.Second)
				}
				return 1, nil
			},
			Store: deaf{shared.connect(), lost},
		})
		defer c.Close()
		synctest.Wait()
		mustGet(t, c, 1)
		mustGet(t, c, 2)
		close(lost)
		time.Sleep(2 * time.Minute)
		_, ok := c.Peek(1)
		require.False(t, ok)
		mode.Store("slow")
		start := time.Now()
		require.Equal(t, 1, mustGet(t, c, 1))
		require.Equal(t, 100*time.Millisecond, time.Since(start))
		time.Sleep(2 * time.Second)
		mode.Store("fails")
		loads.Store(0)
		for range 10 {
			require.Equal(t, 1, mustGet(t, c, 2))
		}
		require.Equal(t, int64(1), loads.Load(), "and the pause holds")
		require.NoError(t, c.Invalidate(t.Context(), 2))
		_, err := c.Get(t.Context(), 2)
		require.ErrorIs(t, err, errLoad)
	})
}

// deaf is a Store that answers, but whose subscription is lost for good.
type deaf struct {
	cacheaside.Store
	lost chan struct{}
}

func (d deaf) Watch(ctx context.Context, up func(), heard func(string)) error {
	select {
	case <-d.lost:
		return errStore
	default:
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-d.lost:
			cancel()
		case <-ctx.Done():
		}
	}()
	return d.Store.Watch(ctx, up, heard)
}

// A Store that lost recent invalidations, by a failover to a lagging replica, is told
// again and not trusted until then.
func TestRecentInvalidationsAreToldAgainAfterAnOutage(t *testing.T) {
	for name, capacity := range map[string]int{"memory": 0, "no memory": -1} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				shared, src := newFakeStore(), newSource()
				conn := shared.connect()
				c := cacheaside.New(cacheaside.Config[int, int]{Load: src.load, Store: conn, Capacity: capacity})
				defer c.Close()
				synctest.Wait()
				mustGet(t, c, 1)
				mustGet(t, c, 2)
				before := map[string]fakeItem{"1": *shared.items["1"], "2": *shared.items["2"]}
				require.NoError(t, c.Write(t.Context(), 1, src.write(1)))
				require.NoError(t, c.Invalidate(t.Context(), 2))

				conn.fail()
				mustGet(t, c, 1)
				for key, item := range before { // the replica
					shared.items[key] = &item
				}
				conn.recover()
				for range 100 {
					require.Equal(t, 1, mustGet(t, c, 1))
					time.Sleep(50 * time.Millisecond)
				}
				other := cacheaside.New(cacheaside.Config[int, int]{Load: src.load, Store: shared.connect(), Capacity: -1})
				defer other.Close()
				require.Equal(t, 1, mustGet(t, other, 1))
				require.Zero(t, c.Stats().Untold, "it was told once")
				loads := src.loaded(1)
				mustGet(t, c, 1)
				require.Equal(t, loads, src.loaded(1), "and is trusted again")
			})
		})
	}
}

// So is one whose shard failed over while another shard was down all the time.
func TestRecentInvalidationsAreToldAgainBesideAShardThatIsDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared, src := newFakeStore(), newSource()
		conn := shared.connect()
		c := cacheaside.New(cacheaside.Config[int, int]{Load: src.load, Store: conn, Capacity: -1})
		defer c.Close()
		conn.breakShard("3", true)
		mustGet(t, c, 3)
		mustGet(t, c, 1)
		time.Sleep(time.Minute)
		before := *shared.items["1"]
		require.NoError(t, c.Write(t.Context(), 1, src.write(1)))
		conn.breakShard("1", true)
		require.Equal(t, 1, mustGet(t, c, 1))
		shared.items["1"] = &before // the replica
		conn.breakShard("1", false)
		for range 100 {
			require.Equal(t, 1, mustGet(t, c, 1))
			time.Sleep(50 * time.Millisecond)
		}
	})
}

// A lost subscription suffices to tell the Store again. Once it has been told, it is
// used.
func TestRecentInvalidationsAreToldAgainWhenTheWatchIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared, src := newFakeStore(), newSource()
		lost := make(chan struct{})
		c := cacheaside.New(cacheaside.Config[int, int]{Load: src.load, Store: deaf{shared.connect(), lost}})
		defer c.Close()
		synctest.Wait()
		write(t, c, 1)
		mustGet(t, c, 1)
		close(lost)
		synctest.Wait()
		told := shared.called("Invalidate")
		mustGet(t, c, 1)
		require.Equal(t, 2, src.loaded(1), "the Store is not trusted")
		time.Sleep(3 * time.Second)
		require.Equal(t, told+1, shared.called("Invalidate"))
		mustGet(t, c, 1)
		mustGet(t, c, 1)
		require.Equal(t, 3, src.loaded(1), "and now it is")
	})
}

// Some shards that are down, like those of one server of a cluster, do not affect the
// others.
func TestShardsThatAreDownLeaveTheOthersAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := newFakeStore().connect()
		src := newSource()
		c := cacheaside.New(cacheaside.Config[int, int]{Load: src.load, Store: conn, Capacity: -1, TTL: 24 * time.Hour, ErrorPause: time.Minute})
		defer c.Close()
		for key := range 10 {
			mustGet(t, c, key)
		}
		conn.hangs = 250 * time.Millisecond
		for _, shard := range []string{"0", "1", "2"} {
			conn.breakShard(shard, true)
		}

		// Shards that answer meanwhile show that not everything is down.
		go mustGet(t, c, 0)
		go mustGet(t, c, 1)
		for range 100 {
			time.Sleep(10 * time.Millisecond)
			for key := 3; key < 10; key++ {
				mustGet(t, c, key)
				require.Equal(t, 1, src.loaded(key))
			}
		}

		// If none was asked meanwhile, the next one to be asked is probed.
		time.Sleep(time.Hour)
		mustGet(t, c, 0)
		mustGet(t, c, 1)
		start := time.Now()
		mustGet(t, c, 5)
		require.Equal(t, 2, src.loaded(5))
		synctest.Wait()
		for key := 3; key < 10; key++ {
			mustGet(t, c, key)
		}
		require.Equal(t, 2, src.loaded(5))
		require.Equal(t, 1, src.loaded(6))
		loads := src.loaded(0)
		mustGet(t, c, 0)
		require.Equal(t, loads+1, src.loaded(0))
		require.Zero(t, time.Since(start), "nobody waited, and the pause of what is down goes on")
	})
}

// A shard that fails immediately makes no caller wait, and says nothing about the
// others.
func TestShardsThatFailAtOnceLeaveTheOthersAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := newFakeStore().connect()
		src := newSource()
		c := cacheaside.New(cacheaside.Config[int, int]{Load: src.load, Store: conn, Capacity: -1, ErrorPause: time.Minute})
		defer c.Close()
		for key := range 10 {
			mustGet(t, c, key)
		}
		for _, shard := range []string{"0", "1", "2"} {
			conn.breakShard(shard, true)
		}
		for key := range 10 {
			mustGet(t, c, key)
			require.Equal(t, key < 3, src.loaded(key) > 1)
		}
	})
}

// The empty key is a key like any other.
func TestRecentInvalidationOfTheEmptyKeyIsToldAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared, lost := newFakeStore(), make(chan struct{})
		c := cacheaside.New(cacheaside.Config[string, int]{
			Load:  func(context.Context, string) (int, error) { return 1, nil },
			Store: deaf{shared.connect(), lost},
		})
		defer c.Close()
		synctest.Wait()
		require.NoError(t, c.Invalidate(t.Context(), ""))
		close(lost)
		time.Sleep(3 * time.Second)
		require.Equal(t, 2, shared.called("Invalidate"))
	})
}

// A Store that panics is one that does not answer: memory is told, and the Store later.
func TestStoreThatPanicsIsToldLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var panics atomic.Bool
		c := cacheaside.New(cacheaside.Config[int, int]{
			Load: func(context.Context, int) (int, error) { return 1, nil }, Store: fragile{newFakeStore().connect(), &panics},
		})
		defer c.Close()
		synctest.Wait()
		for _, invalidate := range []func() error{
			func() error { return c.Invalidate(t.Context(), 1) },
			func() error { return c.InvalidateAll(t.Context()) },
		} {
			mustGet(t, c, 1)
			panics.Store(true)
			err := invalidate()
			require.ErrorIs(t, err, cacheaside.ErrUntold)
			require.ErrorContains(t, err, "the Store panicked: fragile")
			_, ok := c.Peek(1)
			require.False(t, ok)
			time.Sleep(time.Minute)
			require.EqualValues(t, 1, c.Stats().Untold)
			panics.Store(false)
			time.Sleep(time.Minute)
			require.Zero(t, c.Stats().Untold)
		}
	})
}

// A Store that panics does not hold up reads and writes either.
func TestStoreThatPanicsIsDoneWithout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log eventLog
		src := newSource()
		c := cacheaside.New(cacheaside.Config[int, int]{Load: src.load, Store: crazy{}, OnEvent: log.add, ErrorPause: -1})
		for range 2 {
			require.Equal(t, 0, mustGet(t, c, 1))
			got, err := c.GetMany(t.Context(), []int{1, 2})
			require.NoError(t, err)
			require.Equal(t, map[int]int{1: 0, 2: 0}, got)
		}
		err := c.Write(t.Context(), 1, src.write(1))
		require.ErrorIs(t, err, cacheaside.ErrUntold)
		require.NoError(t, cacheaside.WriteError(err))
		require.Equal(t, 1, mustGet(t, c, 1))
		require.Equal(t, 1, log.count(cacheaside.EventFenceFailed))
		require.Equal(t, 1, log.count(cacheaside.EventStoreLost))
		require.ErrorIs(t, c.Close(), cacheaside.ErrUntold)
	})
}

// Nor does one that answers too little.
func TestStoreThatAnswersTooLittleIsDoneWithout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asks atomic.Bool
		c := cacheaside.New(cacheaside.Config[int, int]{Load: newSource().load, Store: mumbling{newFakeStore().connect(), &asks}, ErrorPause: -1})
		defer c.Close()
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

// A mumbling Store leaves out the answers of Fill, or of Acquire.
type mumbling struct {
	cacheaside.Store
	asks *atomic.Bool
}

func (m mumbling) Acquire(ctx context.Context, asks ...cacheaside.Ask) ([]cacheaside.Lookup, error) {
	if m.asks.Load() {
		return nil, nil
	}
	return m.Store.Acquire(ctx, asks...)
}

func (mumbling) Fill(context.Context, ...cacheaside.Filling) ([]bool, error) { return nil, nil }

// A crazy Store panics in every call.
type crazy struct{ cacheaside.Store }

func (crazy) Shard(string) uint8 { return 0 }

// A hook that ends its goroutine, one of an Invalidate of several shards, ends neither the
// promise nor the telling.
func TestInvalidateHoldsIfAHookEndsItsGoroutine(t *testing.T) {
	for name, invalidate := range map[string]func(context.Context, *cacheaside.Cache[int, int]) error{
		"Invalidate":    func(ctx context.Context, c *cacheaside.Cache[int, int]) error { return c.Invalidate(ctx, 1, 2) },
		"InvalidateAll": func(ctx context.Context, c *cacheaside.Cache[int, int]) error { return c.InvalidateAll(ctx) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var failing atomic.Bool
				src := newSource()
				c := cacheaside.New(cacheaside.Config[int, int]{
					Load: src.load, Store: flaky{unheard{newFakeStore().connect()}, func(call string) bool {
						return failing.Load() && strings.HasPrefix(call, "Invalidate")
					}},
					OnEvent: func(_ context.Context, e cacheaside.Event) {
						if e.Kind == cacheaside.EventStoreLost {
							runtime.Goexit()
						}
					},
				})
				defer c.Close()
				synctest.Wait()
				for key := range 3 {
					mustGet(t, c, key)
					require.NoError(t, src.write(key)(t.Context()))
				}
				failing.Store(true)
				var err error
				var done sync.WaitGroup
				done.Go(func() { err = invalidate(t.Context(), c) })
				done.Wait()
				if name == "Invalidate" {
					require.ErrorIs(t, err, cacheaside.ErrUntold)
				}
				require.NotZero(t, c.Stats().Untold)
				require.Equal(t, 1, mustGet(t, c, 1))
				require.Equal(t, 1, mustGet(t, c, 2))
				failing.Store(false)
				time.Sleep(time.Minute)
				require.Zero(t, c.Stats().Untold)
			})
		})
	}
}

// A fragile Store panics when it is told of a change, and ceases to listen.
type fragile struct {
	cacheaside.Store
	panics *atomic.Bool
}

func (f fragile) mayPanic() {
	if f.panics.Load() {
		panic("fragile")
	}
}

func (f fragile) Invalidate(ctx context.Context, keys ...string) error {
	f.mayPanic()
	return f.Store.Invalidate(ctx, keys...)
}

func (f fragile) InvalidateAll(ctx context.Context) error {
	f.mayPanic()
	return f.Store.InvalidateAll(ctx)
}

func (f fragile) Watch(ctx context.Context, up func(), heard func(string)) error {
	f.mayPanic()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return f.Store.Watch(ctx, up, heard)
}

// An InvalidateAll that the Store has not heard is told of, and told to the Store later: once,
// and again when messages of other processes may have been lost.
func TestInvalidateAllThatTheStoreMissesIsToldLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log eventLog
		shared, src := newFakeStore(), newSource()
		conn := shared.connect()
		c := cacheaside.New(cacheaside.Config[int, int]{Load: src.load, Store: conn, OnEvent: log.add})
		defer c.Close()
		synctest.Wait()
		mustGet(t, c, 1)
		conn.fail()
		require.ErrorIs(t, c.InvalidateAll(t.Context()), cacheaside.ErrUntold)
		require.Equal(t, 1, log.count(cacheaside.EventNotInvalidated))
		require.EqualValues(t, 1, c.Stats().Untold)
		mustGet(t, c, 1)
		require.Equal(t, 2, src.loaded(1))
		conn.recover()
		time.Sleep(5 * time.Second)
		synctest.Wait()
		require.Zero(t, c.Stats().Untold)
		require.Equal(t, 1, log.count(cacheaside.EventReinvalidated))
		mustGet(t, c, 1)

		time.Sleep(time.Minute)
		told := shared.called("InvalidateAll")
		require.NoError(t, c.InvalidateAll(t.Context()))
		conn.fail()
		conn.recover()
		time.Sleep(5 * time.Second)
		synctest.Wait()
		require.Greater(t, shared.called("InvalidateAll"), told+1, "by the call, and as the Store may have forgotten it")
		require.Equal(t, 1, log.count(cacheaside.EventReinvalidated), "it was heard")
	})
}

// A call that Close ends does not mean that the Store is lost.
func TestCloseThatEndsACallOfTheStoreIsNoOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log eventLog
		lost := make(chan struct{})
		c := cacheaside.New(cacheaside.Config[int, int]{
			Load: newSource().load, Store: deaf{patient{newFakeStore().connect()}, lost}, ErrorPause: time.Second, OnEvent: log.add,
		})
		synctest.Wait()
		require.NoError(t, c.Invalidate(t.Context(), 1))
		close(lost)
		time.Sleep(time.Second + 50*time.Millisecond) // it is being told again
		require.NoError(t, c.Close())
		require.Zero(t, log.count(cacheaside.EventStoreLost))
		require.Zero(t, log.count(cacheaside.EventStoreRestored))
	})
}

// A patient Store takes 100 ms to be told of a change, if ctx lasts so long.
type patient struct{ cacheaside.Store }

func (p patient) Invalidate(ctx context.Context, keys ...string) error {
	select {
	case <-time.After(100 * time.Millisecond):
		return p.Store.Invalidate(ctx, keys...)
	case <-ctx.Done():
		return ctx.Err()
	}
}
