package cacheaside_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/internal/behavior"
)

// eventLog collects events.
type eventLog struct {
	mu     sync.Mutex
	events []cacheaside.Event
}

func (l *eventLog) add(_ context.Context, e cacheaside.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, e)
}

func (l *eventLog) count(kind cacheaside.EventKind) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.events {
		if e.Kind == kind {
			n++
		}
	}
	return n
}

// bubble runs a subtest in a bubble of fake time.
func bubble(t *testing.T, name string, test func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { synctest.Test(t, test) })
}

// newCache returns a Cache that is closed at the end of the test.
func newCache[K comparable, V any](t *testing.T, cfg cacheaside.Config[K, V]) *cacheaside.Cache[K, V] {
	c := cacheaside.New(cfg)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func mustGet[V any](t *testing.T, c *cacheaside.Cache[int, V], key int) V {
	t.Helper()
	v, err := c.Get(t.Context(), key)
	require.NoError(t, err)
	return v
}

func TestProcessesShareValuesAndInvalidations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared, src := newFakeStore(), newSource()
		a := cacheaside.New(cacheaside.Config[int, int]{Load: src.load, Store: shared.connect()})
		b := newCache(t, cacheaside.Config[int, int]{Load: src.load, Store: shared.connect()})
		defer a.Close()
		synctest.Wait()
		mustGet(t, a, 1)
		mustGet(t, b, 1)
		require.Equal(t, 1, src.loaded(1))

		require.NoError(t, a.Write(t.Context(), 1, src.write(1)))
		require.Equal(t, 1, mustGet(t, b, 1))
		require.Equal(t, 1, mustGet(t, a, 1))
		require.Equal(t, 2, src.loaded(1))

		for _, change := range []func(context.Context) error{
			func(ctx context.Context) error { return b.Invalidate(ctx, 1) },
			func(ctx context.Context) error { return b.Expire(ctx, 1) },
			b.InvalidateAll,
		} {
			before := src.loaded(1)
			require.NoError(t, src.write(1)(t.Context()))
			require.NoError(t, change(t.Context()))
			require.Equal(t, mustGet(t, b, 1), mustGet(t, a, 1))
			require.Equal(t, before+1, src.loaded(1))
		}
	})
}

// The result of a load in flight is not cached if another process invalidates its key, neither in the Store nor in
// memory. Neither is a value that was read before the subscription started.
func TestMessagesInvalidateFlights(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		conn, other := shared.connect(), shared.connect()
		var version atomic.Int64
		c := newCache(t, cacheaside.Config[int, int64]{
			Load: func(context.Context, int) (int64, error) {
				v := version.Load()
				time.Sleep(time.Second)
				return v, nil
			},
			Store: conn, ErrorPause: 100 * time.Millisecond,
		})
		synctest.Wait()
		for i, meanwhile := range []func(){
			func() { require.NoError(t, other.Invalidate(t.Context(), "1")) },
			func() { require.NoError(t, other.InvalidateAll(t.Context())) },
			func() { // the message is missed
				conn.fail()
				synctest.Wait()
				require.NoError(t, other.Invalidate(t.Context(), "1"))
				conn.recover()
				time.Sleep(200 * time.Millisecond)
			},
		} {
			var wg sync.WaitGroup
			wg.Go(func() { _, _ = c.Get(t.Context(), 1) })
			synctest.Wait()
			version.Add(1)
			meanwhile()
			require.Equal(t, int64(i+1), mustGet(t, c, 1), "a new flight")
			wg.Wait()
			require.Equal(t, int64(i+1), mustGet(t, c, 1))
			require.NoError(t, other.Invalidate(t.Context(), "1"))
		}

		// A load that starts while the subscription is lost, and ends when it is back.
		conn.fail()
		synctest.Wait()
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = c.Get(t.Context(), 1) })
		synctest.Wait()
		version.Add(1)
		require.NoError(t, other.Invalidate(t.Context(), "1"))
		conn.recover()
		wg.Wait()
		require.Equal(t, version.Load(), mustGet(t, c, 1))
	})
}

func TestOneProcessLoadsWhileTheOthersWait(t *testing.T) {
	for tier, processes := range map[string]int{"memory": 1, "both": 10, "store": 10} {
		bubble(t, tier, func(t *testing.T) {
			shared := newFakeStore()
			var loads atomic.Int64
			var wg sync.WaitGroup
			for range processes {
				c := newCache(t, cacheaside.Config[int, int]{
					Load: func(context.Context, int) (int, error) {
						loads.Add(1)
						time.Sleep(2 * time.Second)
						return 7, nil
					},
					Store: shared.tier(tier),
				})
				for range 100 {
					wg.Go(func() {
						if v, err := c.Get(t.Context(), 1); err != nil || v != 7 {
							t.Errorf("got %d, %v", v, err)
						}
					})
				}
			}
			wg.Wait()
			require.Equal(t, int64(1), loads.Load())
		})
	}
}

// A process that dies during a load delays the others only until its lease ends.
func TestLeaseOfADeadProcessIsTakenOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared, src := newFakeStore(), newSource()
		_, err := shared.connect().Acquire(t.Context(), cacheaside.Request{Key: "1", Token: "the dead"})
		require.NoError(t, err)
		c := newCache(t, cacheaside.Config[int, int]{Load: src.load, Store: shared.connect()})
		c.SetChance(func(below time.Duration) time.Duration { return below / 2 })
		start := time.Now()
		mustGet(t, c, 1)
		require.GreaterOrEqual(t, time.Since(start), shared.lease)
		require.LessOrEqual(t, time.Since(start), shared.lease+time.Millisecond, "it knows when the lease ends")
	})
}

func TestFencedKeyIsNotCached(t *testing.T) {
	for _, capacity := range []int{0, -1} {
		bubble(t, fmt.Sprint(capacity), func(t *testing.T) {
			shared, src := newFakeStore(), newSource()
			writer := shared.connect()
			c := newCache(t, cacheaside.Config[int, int]{Load: src.load, Store: watchedIf(capacity == 0, shared.connect())})
			synctest.Wait()
			mustGet(t, c, 1)

			_, err := writer.Fence(t.Context(), "1", "first")
			require.NoError(t, err)
			_, err = writer.Fence(t.Context(), "1", "second")
			require.NoError(t, err)
			for want := range 3 {
				require.Equal(t, want, mustGet(t, c, 1), "as committed, although no process was notified")
				require.NoError(t, src.write(1)(t.Context()))
			}
			require.NoError(t, writer.Unfence(t.Context(), "1", "first"))
			require.Equal(t, 3, mustGet(t, c, 1), "the second fence is still in place")
			require.NoError(t, src.write(1)(t.Context()))
			require.Equal(t, 4, mustGet(t, c, 1))
			time.Sleep(2 * shared.write) // the fence of the dead writer expires
			mustGet(t, c, 1)
			loads := src.loaded(1)
			mustGet(t, c, 1)
			require.Equal(t, loads, src.loaded(1))
		})
	}
}

// While a fence is in place, callers share loads, and one load runs at a time.
func TestLoadsBehindAFenceAreShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		var loads, most, now atomic.Int64
		c := newCache(t, cacheaside.Config[int, int64]{
			Load: func(context.Context, int) (int64, error) {
				if n := now.Add(1); n > most.Load() {
					most.Store(n)
				}
				defer now.Add(-1)
				v := loads.Add(1)
				time.Sleep(time.Second)
				return v, nil
			},
			Store: shared.connect(),
		})
		synctest.Wait()
		_, err := shared.connect().Fence(t.Context(), "1", "w")
		require.NoError(t, err)
		var wg sync.WaitGroup
		for range 30 {
			wg.Go(func() {
				if _, err := c.Get(t.Context(), 1); err != nil {
					t.Error(err)
				}
			})
			time.Sleep(100 * time.Millisecond)
		}
		wg.Wait()
		require.Equal(t, int64(1), most.Load())
		require.LessOrEqual(t, loads.Load(), int64(5))
	})
}

func TestWriteIsBoundedByItsFence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		c := newCache(t, cacheaside.Config[int, int]{
			Name: "users", Load: newSource().load, Store: shared.connect()})
		start := time.Now()
		err := c.Write(t.Context(), 1, func(ctx context.Context) error {
			<-ctx.Done()
			return context.Cause(ctx)
		})
		require.Equal(t, shared.write, time.Since(start))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.EqualError(t, err, "cacheaside: users: write timed out after 10s")
		require.Equal(t, 1, shared.called("Unfence"))

		// write is not called if its ctx is done when Fence returns.
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, c.Write(ctx, 1, func(context.Context) error { panic("called") }), context.Canceled)
	})
}

// Nothing covers a write that outlasts its fence and whose invalidation fails.
func TestUnfencedWriteReportsLostInvalidation(t *testing.T) {
	boom := errors.New("constraint violated")
	for name, test := range map[string]struct {
		takes    time.Duration
		fails    string
		write    error
		untold   bool
		wantText string
	}{
		"told":                 {0, "", nil, false, ""},
		"covered by its fence": {time.Second, "Unfence", nil, false, ""},
		"as long as its fence": {10 * time.Second, "Unfence", nil, true,
			`cacheaside: write succeeded, but ["1"] not invalidated in the store: the store is down`},
		"longer than its fence": {11 * time.Second, "Unfence", nil, true,
			`cacheaside: write succeeded, but ["1"] not invalidated in the store: the store is down`},
		"no fence, but invalidated": {0, "Fence", nil, false, ""},
		"neither": {0, "Fence Unfence", nil, true,
			`cacheaside: write succeeded, but ["1"] not invalidated in the store: the store is down`},
		"neither, and it failed": {0, "Fence Unfence", boom, true,
			"constraint violated\n" + `cacheaside: ["1"] not invalidated in the store: the store is down`},
		"covered, and it failed":          {0, "Unfence", boom, false, "constraint violated"},
		"longer, invalidated, and failed": {11 * time.Second, "", boom, false, "constraint violated"},
		"longer, invalidated":             {11 * time.Second, "", nil, false, ""},
		"longer, no fence, invalidated":   {11 * time.Second, "Fence", nil, false, ""},
		"longer, no fence, not invalidated": {11 * time.Second, "Fence Unfence", nil, true,
			`cacheaside: write succeeded, but ["1"] not invalidated in the store: the store is down`},
		"fence answered, not stood": {0, "Fence", boom, false, "constraint violated"},
		"neither, and the answer": {0, "Fence Unfence", forbidden{}, true,
			"forbidden\n" + `cacheaside: ["1"] not invalidated in the store: the store is down`},
		"neither, and a refusal": {0, "Fence Unfence", refusal{}, true,
			"open\n" + `cacheaside: ["1"] not invalidated in the store: the store is down`},
	} {
		bubble(t, name, func(t *testing.T) {
			var log eventLog
			c := newCache(t, cacheaside.Config[int, int]{
				Load: newSource().load, ErrorPause: cacheaside.None,
				Store: unwatched{flaky{newFakeStore().connect(), func(call string) bool {
					for _, one := range strings.Fields(test.fails) {
						if one == call {
							return true
						}
					}
					return false
				}}},
			})
			c.Observe(log.add)
			err := c.Write(t.Context(), 1, func(context.Context) error {
				time.Sleep(test.takes) // ignores its ctx
				return test.write
			})
			require.Equal(t, test.write, cacheaside.WriteError(err))
			require.Equal(t, test.untold, errors.Is(err, cacheaside.ErrNotPropagated))
			if test.wantText == "" {
				require.NoError(t, err)
			} else {
				require.EqualError(t, err, test.wantText)
			}
			if test.write != nil {
				require.ErrorIs(t, err, test.write)
			}
			if test.untold && test.write == nil {
				// The source worked, and another attempt would write again.
				end := behavior.Read(err)
				require.Equal(t, behavior.Answered, end.Kind)
				require.False(t, end.Retryable)
			} else if test.write != nil {
				require.Equal(t, behavior.Read(test.write), behavior.Read(err))
			}
			require.Equal(t, test.fails != "", log.count(cacheaside.EventStoreLost) == 1)
			require.Equal(t, strings.HasPrefix(test.fails, "Fence"), log.count(cacheaside.EventFenceFailed) == 1)
			failed := strings.Contains(test.fails, "Unfence")
			require.Equal(t, failed, log.count(cacheaside.EventNotPropagated) == 1)
		})
	}
}

func TestStoreDownAndBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared, src := newFakeStore(), newSource()
		conn := shared.connect()
		var log eventLog
		c := newCache(t, cacheaside.Config[int, int]{
			Name: "users", Load: src.load, Store: conn, ErrorPause: time.Second,
		})
		c.Observe(log.add)
		synctest.Wait()
		mustGet(t, c, 1)
		mustGet(t, c, 1)
		require.Equal(t, 1, src.loaded(1))

		conn.fail()
		synctest.Wait()
		require.Equal(t, 1, log.count(cacheaside.EventWatchLost))
		asked := shared.called("Acquire")
		for i := range 10 {
			mustGet(t, c, 1)
			require.Equal(t, 2+i, src.loaded(1), "memory is not used without a subscription")
		}
		require.Equal(t, asked+1, shared.called("Acquire"), "not queried again and again")
		require.Equal(t, 1, log.count(cacheaside.EventStoreLost))
		require.Contains(t, log.events, cacheaside.Event{Kind: cacheaside.EventStoreLost, Name: "users", Err: errStore})

		// A Write succeeds, but returns an error because the invalidation did not reach the Store.
		err := c.Write(t.Context(), 1, src.write(1))
		var untold *cacheaside.InvalidateError
		require.ErrorAs(t, err, &untold)
		require.ErrorIs(t, err, cacheaside.ErrNotPropagated)
		require.ErrorIs(t, untold.Err, errStore)
		require.False(t, untold.Retryable())
		require.Equal(t, []string{"1"}, untold.Keys)
		require.EqualError(t, err,
			`cacheaside: users: write succeeded, but ["1"] not invalidated in the store: the store is down`)
		require.Equal(t, 1, log.count(cacheaside.EventFenceFailed))
		require.Equal(t, int64(1), c.Stats().PendingInvalidations)
		require.Equal(t, 1, mustGet(t, c, 1))

		// The write's own error is not lost.
		boom := errors.New("constraint violated")
		err = c.Write(t.Context(), 1, func(context.Context) error { return boom })
		require.ErrorIs(t, err, boom)
		require.ErrorIs(t, err, cacheaside.ErrNotPropagated)

		// The Store is back, but the invalidation is still pending, so its value of the key is not used.
		conn.recover()
		require.Equal(t, 1, mustGet(t, c, 1))
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.Zero(t, c.Stats().PendingInvalidations)
		require.Equal(t, 1, log.count(cacheaside.EventStoreRestored))
		require.Equal(t, 2, log.count(cacheaside.EventWatchBegan), "at first, and again")
		loads := src.loaded(1)
		mustGet(t, c, 1)
		mustGet(t, c, 1)
		require.Equal(t, loads+1, src.loaded(1), "memory is used again")
	})
}

func TestPendingKeysAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared, src := newFakeStore(), newSource()
		conn := shared.connect()
		c := cacheaside.New(cacheaside.Config[int, int]{Load: src.load, Store: conn})
		conn.fail()
		var keys []int
		for i := range 10_001 {
			keys = append(keys, i)
		}
		err := c.Invalidate(t.Context(), keys...)
		var untold *cacheaside.InvalidateError
		require.ErrorAs(t, err, &untold)
		require.Len(t, untold.Keys, 10_001)
		require.Equal(t, int64(1), c.Stats().PendingInvalidations, "all of them, as one")
		require.Error(t, c.InvalidateAll(t.Context()))

		err = c.Close()
		require.ErrorAs(t, err, &untold)
		require.Empty(t, untold.Keys)
		require.EqualError(t, err, "cacheaside: all keys not invalidated in the store: the store is down")

		conn = newFakeStore().connect()
		c = cacheaside.New(cacheaside.Config[int, int]{Load: src.load, Store: conn})
		var log eventLog
		c.Observe(log.add)
		conn.fail()
		require.Error(t, c.InvalidateAll(t.Context()))
		require.Error(t, c.Invalidate(t.Context(), 5))
		require.Equal(t, int64(2), c.Stats().PendingInvalidations)
		conn.recover()
		require.NoError(t, c.Close(), "invalidated in the end")
		require.Equal(t, 1, log.count(cacheaside.EventStoreRestored))
		require.Equal(t, 2, conn.called("InvalidateAll"))
		require.Equal(t, 2, conn.called("Invalidate"))
	})
}

// flaky is a Store that answers some calls with an error.
type flaky struct {
	cacheaside.Store
	fails func(call string) bool
}

func (f flaky) Fill(ctx context.Context, values ...cacheaside.Entry) ([]bool, error) {
	if f.fails("Fill") {
		return nil, errStore
	}
	return f.Store.Fill(ctx, values...)
}

func (f flaky) Invalidate(ctx context.Context, keys ...string) error {
	if f.fails("Invalidate") {
		return errStore
	}
	return f.Store.Invalidate(ctx, keys...)
}

func (f flaky) Expire(ctx context.Context, keys ...string) error {
	if f.fails("Expire") {
		return errStore
	}
	return f.Store.Expire(ctx, keys...)
}

func (f flaky) InvalidateAll(ctx context.Context) error {
	if f.fails("InvalidateAll") {
		return errStore
	}
	return f.Store.InvalidateAll(ctx)
}

func (f flaky) Release(ctx context.Context, ask cacheaside.Request, failed bool) error {
	if f.fails("Release") {
		return errStore
	}
	return f.Store.Release(ctx, ask, failed)
}

func (f flaky) Fence(ctx context.Context, key, token string) (time.Duration, error) {
	if f.fails("Fence") {
		return time.Hour, errStore // which means nothing
	}
	return f.Store.Fence(ctx, key, token)
}

func (f flaky) Unfence(ctx context.Context, key, token string) error {
	if f.fails("Unfence") {
		return errStore
	}
	return f.Store.Unfence(ctx, key, token)
}

// If only the invalidation fails, the Store still has the stale value. The process does not read it from there until
// the invalidation has reached the Store.
func TestPendingKeySkipsStore(t *testing.T) {
	for name, invalidate := range map[string]func(context.Context, *cacheaside.Cache[int, int]) error{
		"Invalidate":    func(ctx context.Context, c *cacheaside.Cache[int, int]) error { return c.Invalidate(ctx, 1) },
		"Expire":        func(ctx context.Context, c *cacheaside.Cache[int, int]) error { return c.Expire(ctx, 1) },
		"InvalidateAll": func(ctx context.Context, c *cacheaside.Cache[int, int]) error { return c.InvalidateAll(ctx) },
	} {
		bubble(t, name, func(t *testing.T) {
			shared, src := newFakeStore(), newSource()
			var failing atomic.Bool
			var log eventLog
			c := newCache(t, cacheaside.Config[int, int]{
				Load: src.load, ErrorPause: cacheaside.None,
				Store: flaky{shared.connect(), func(call string) bool {
					return failing.Load() && (call == "Invalidate" || call == "Expire" || call == "InvalidateAll")
				}},
			})
			c.Observe(log.add)
			synctest.Wait()
			mustGet(t, c, 1)
			failing.Store(true)
			for want := 1; want <= 3; want++ {
				require.NoError(t, src.write(1)(t.Context()))
				require.ErrorIs(t, invalidate(t.Context(), c), cacheaside.ErrNotPropagated)
				require.Equal(t, want, log.count(cacheaside.EventNotPropagated))
				require.Equal(t, want, mustGet(t, c, 1))
				time.Sleep(time.Second) // it is retried, without success
				require.EqualValues(t, 1, c.Stats().PendingInvalidations)
			}
			failing.Store(false)
			time.Sleep(time.Second)
			require.Zero(t, c.Stats().PendingInvalidations)
			require.NoError(t, c.Expire(t.Context(), 1))
			asked := shared.called("Acquire")
			require.Equal(t, 3, mustGet(t, c, 1))
			require.Equal(t, asked+1, shared.called("Acquire"), "invalidated, and queried again")
		})
	}
}

// A flight may land between the first look of a Get into memory and its lock. Its result
// is served, without another question or load.
func TestFinishedFlightIsSeenUnderLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared, src := newFakeStore(), newSource()
		var hold atomic.Bool
		release := make(chan struct{})
		c := newCache(t, cacheaside.Config[int, int]{
			Load: src.load, Store: shared.connect(),
			Key: func(int) string { // called after the first look and before the lock
				if hold.Swap(false) {
					<-release
				}
				return "1"
			},
		})
		synctest.Wait()
		hold.Store(true)
		var wg sync.WaitGroup
		wg.Go(func() {
			if v, err := c.Get(t.Context(), 1); err != nil || v != 0 {
				t.Errorf("%v, %v", v, err)
			}
		})
		synctest.Wait()
		mustGet(t, c, 1)
		close(release)
		wg.Wait()
		synctest.Wait()
		require.Equal(t, 1, shared.called("Acquire"))
		require.Equal(t, 1, src.loaded(1))
		require.Equal(t, int64(1), c.Stats().Misses)
		require.Equal(t, int64(1), c.Stats().Hits)
	})
}

func TestUnencodableValueStaysInMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log eventLog
		shared := newFakeStore()
		c := newCache(t, cacheaside.Config[int, float64]{
			Load:  func(context.Context, int) (float64, error) { var zero float64; return 1 / zero, nil },
			Store: shared.connect(),
		})
		c.Observe(log.add)
		synctest.Wait()
		mustGet(t, c, 1)
		mustGet(t, c, 1)
		require.Equal(t, 1, log.count(cacheaside.EventCodecFailed))
		require.Equal(t, int64(1), c.Stats().Loaded)
		require.Equal(t, 1, shared.called("Release"))
	})
}

func TestNotFoundIsSharedAndReplacesValue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, ttl := range []time.Duration{0, time.Minute} {
			shared := newFakeStore()
			var gone atomic.Bool
			var loads atomic.Int64
			cfg := cacheaside.Config[int, int]{
				TTL: time.Minute, StaleIfError: time.Hour, NotFoundTTL: ttl,
				Load: func(context.Context, int) (int, error) {
					loads.Add(1)
					if gone.Load() {
						return 0, cacheaside.ErrNotFound
					}
					return 1, nil
				},
			}
			cfg.Store = unwatched{shared.connect()}
			a := cacheaside.New(cfg)
			cfg.Store = unwatched{shared.connect()}
			b := cacheaside.New(cfg)
			mustGet(t, a, 1)
			time.Sleep(2 * time.Minute)
			gone.Store(true)
			for range 2 {
				_, err := a.Get(t.Context(), 1)
				require.ErrorIs(t, err, cacheaside.ErrNotFound)
				_, err = b.Get(t.Context(), 1)
				require.ErrorIs(t, err, cacheaside.ErrNotFound)
			}
			if ttl == 0 {
				require.Equal(t, int64(5), loads.Load())
			} else {
				require.Equal(t, int64(2), loads.Load())
			}
			require.NoError(t, a.Close())
			require.NoError(t, b.Close())
		}
	})
}

// While another process loads, the stale value is served, and the Store is not queried each time.
func TestStaleValuePausesStoreLookups(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		cfg := cacheaside.Config[int, int]{TTL: time.Minute, Jitter: cacheaside.None, StaleWhileRevalidate: time.Hour,
			Load: func(context.Context, int) (int, error) {
				time.Sleep(time.Second)
				return 1, nil
			}}
		cfg.Store = shared.connect()
		a := newCache(t, cfg)
		cfg.Store = shared.connect()
		b := newCache(t, cfg)
		synctest.Wait()
		mustGet(t, a, 1)
		mustGet(t, b, 1)
		time.Sleep(2 * time.Minute)
		mustGet(t, a, 1)
		synctest.Wait()
		before := shared.called("Acquire")
		for range 900 {
			mustGet(t, b, 1)
			time.Sleep(time.Millisecond)
		}
		require.Equal(t, 9, shared.called("Acquire")-before, "each 100 ms")
	})
}

// A value that is not cached also removes the stale value from the Store, which would otherwise be served again and
// again.
func TestUncachedValueRemovesStoredValue(t *testing.T) {
	for _, watched := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			loads := 0
			c := newCache(t, cacheaside.Config[int, int]{
				TTL: time.Minute, Jitter: cacheaside.None, StaleWhileRevalidate: time.Hour,
				Store: watchedIf(watched, newFakeStore().connect()),
				Load: func(ctx context.Context, _ int) (int, error) {
					time.Sleep(time.Second)
					loads++
					if loads > 1 {
						cacheaside.SetTTL(ctx, 0)
					}
					return loads, nil
				},
			})
			synctest.Wait()
			mustGet(t, c, 1)
			time.Sleep(2 * time.Minute)
			require.Equal(t, 1, mustGet(t, c, 1), "while it is refreshed")
			time.Sleep(2 * time.Second)
			require.Equal(t, 3, mustGet(t, c, 1))
			require.Equal(t, 4, mustGet(t, c, 1))
		})
	}
}
