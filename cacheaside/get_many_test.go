package cacheaside_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"runtime"
	"slices"
	"strconv"
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

// many is a source that LoadMany reads, one second at a time.
type many struct {
	mu    sync.Mutex
	asked [][]int
	err   func(ctx context.Context) error
}

func (m *many) load(ctx context.Context, keys []int) (map[int]int, error) {
	keys = slices.Clone(keys)
	slices.Sort(keys)
	m.mu.Lock()
	m.asked = append(m.asked, keys)
	m.mu.Unlock()
	select {
	case <-time.After(time.Second):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if m.err != nil {
		return nil, m.err(ctx)
	}
	values := make(map[int]int)
	for _, k := range keys {
		if k < 100 {
			values[k] = 10 * k
		}
	}
	values[1000] = 1 // not requested
	return values, nil
}

func (m *many) one(context.Context, int) (int, error) {
	time.Sleep(time.Second)
	return -1, nil
}

func TestGetManyLoadsMissingKeysTogether(t *testing.T) {
	for _, tier := range []string{"memory", "both", "store"} {
		bubble(t, tier, func(t *testing.T) {
			var src many
			cfg := cacheaside.Config[int, int]{Load: src.one, LoadMany: src.load, NotFoundTTL: time.Minute}
			cfg.Store = newFakeStore().tier(tier)
			c := newCache(t, cfg)
			synctest.Wait()
			start := time.Now()
			got, err := c.GetMany(t.Context(), []int{1, 2, 2, 100})
			require.NoError(t, err)
			require.Equal(t, map[int]int{1: 10, 2: 20}, got)
			got, err = c.GetMany(t.Context(), []int{3, 2, 1, 100})
			require.NoError(t, err)
			require.Equal(t, map[int]int{1: 10, 2: 20, 3: 30}, got)
			require.Equal(t, [][]int{{1, 2, 100}, {3}}, src.asked)
			require.Equal(t, 2*time.Second, time.Since(start))
			_, ok := c.Peek(1000)
			require.False(t, ok)
			got, err = c.GetMany(t.Context(), nil)
			require.NoError(t, err)
			require.Empty(t, got)
		})
	}
}

func TestGetManyWithoutLoadMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCache(t, cacheaside.Config[int, int]{
			Load: func(_ context.Context, k int) (int, error) {
				time.Sleep(time.Second)
				switch k {
				case 3, 6:
					return 0, errLoad
				case 4:
					return 0, cacheaside.ErrNotFound
				}
				return k, nil
			},
		})
		start := time.Now()
		got, err := c.GetMany(t.Context(), []int{1, 2, 3, 4, 5, 6, 7, 8})
		require.ErrorIs(t, err, errLoad)
		require.EqualError(t, err, "cacheaside: 3: the database is down\ncacheaside: 6: the database is down")
		require.Equal(t, map[int]int{1: 1, 2: 2, 5: 5, 7: 7, 8: 8}, got)
		require.Equal(t, time.Second, time.Since(start))
	})
}

// When ctx is done, the map has the values found by then, in any order of the keys.
func TestGetManyReturnsPartialResultOnCancel(t *testing.T) {
	for range 20 {
		synctest.Test(t, func(t *testing.T) {
			c := newCache(t, cacheaside.Config[int, int]{
				Load: func(ctx context.Context, k int) (int, error) {
					select {
					case <-time.After(time.Duration(k) * time.Second):
					case <-ctx.Done():
						return 0, ctx.Err()
					}
					if k == 2 {
						return 0, errLoad
					}
					return k, nil
				},
			})
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			got, err := c.GetMany(ctx, []int{9, 1, 8, 2, 3})
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.EqualError(t, err, "context deadline exceeded\ncacheaside: 2: the database is down")
			require.Equal(t, map[int]int{1: 1, 3: 3}, got)
			s := c.Stats()
			require.Equal(t, []int64{5, 2}, []int64{s.Misses, s.Canceled})
			synctest.Wait()
			require.Zero(t, c.Tracked())
		})
	}
}

func TestGetManyAndGetShareTheirFlights(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var src many
		c := newCache(t, cacheaside.Config[int, int]{Load: src.one, LoadMany: src.load})
		var wg sync.WaitGroup
		wg.Go(func() {
			got, err := c.GetMany(t.Context(), []int{1, 2})
			if err != nil || !maps.Equal(got, map[int]int{1: 10, 2: 20}) {
				t.Errorf("%v, %v", got, err)
			}
		})
		synctest.Wait()
		wg.Go(func() {
			if v, err := c.Get(t.Context(), 2); err != nil || v != 20 {
				t.Errorf("%v, %v", v, err)
			}
		})
		wg.Go(func() {
			got, err := c.GetMany(t.Context(), []int{2, 3})
			if err != nil || !maps.Equal(got, map[int]int{2: 20, 3: 30}) {
				t.Errorf("%v, %v", got, err)
			}
		})
		wg.Wait()
		require.Equal(t, [][]int{{1, 2}, {3}}, src.asked)
	})
}

func TestBatchIsInvalidatedKeyByKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var src many
		c := newCache(t, cacheaside.Config[int, int]{Load: src.one, LoadMany: src.load})
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = c.GetMany(t.Context(), []int{1, 2}) })
		synctest.Wait()
		require.NoError(t, c.Invalidate(t.Context(), 1))
		wg.Wait()
		_, ok := c.Peek(1)
		require.False(t, ok)
		_, ok = c.Peek(2)
		require.True(t, ok)
	})
}

// Get returns the error of a LoadMany unchanged, unless ErrNotFound is joined with it.
func TestGetSharesBatchError(t *testing.T) {
	for name, want := range map[string]error{
		"failed":            errLoad,
		"failed twice":      errors.Join(errLoad, errStore),
		"does not exist":    fmt.Errorf("users: %w", cacheaside.ErrNotFound),
		"none of them does": errors.Join(cacheaside.ErrNotFound, cacheaside.ErrNotFound),
	} {
		bubble(t, name, func(t *testing.T) {
			src := many{err: func(context.Context) error { return want }}
			c := newCache(t, cacheaside.Config[int, int]{Load: src.one, LoadMany: src.load})
			go func() { _, _ = c.GetMany(t.Context(), []int{1, 2}) }()
			synctest.Wait()
			_, err := c.Get(t.Context(), 2)
			require.Equal(t, want, err)
		})
	}
}

// If LoadMany joins ErrNotFound with a failure, then the missing keys have failed. They do not count as absent.
func TestErrorJoinedWithErrNotFoundIsFailure(t *testing.T) {
	absent := fmt.Errorf("user 1: %w", cacheaside.ErrNotFound)
	for name, err := range map[string]error{
		"first":   errors.Join(absent, errLoad),
		"last":    errors.Join(errLoad, absent),
		"nested":  errors.Join(errors.Join(absent, errLoad), absent),
		"wrapped": fmt.Errorf("users: %w", errors.Join(absent, errLoad)),
	} {
		bubble(t, name, func(t *testing.T) {
			var judged error
			src := many{err: func(context.Context) error { return err }}
			c := newCache(t, cacheaside.Config[int, int]{
				Load: src.one, LoadMany: src.load, NotFoundTTL: time.Hour,
				Middleware: func(next func(context.Context) error) func(context.Context) error {
					return func(ctx context.Context) error {
						judged = next(ctx)
						return judged
					}
				},
			})
			_, got := c.GetMany(t.Context(), []int{1, 2})
			require.ErrorIs(t, got, errLoad)
			require.NotErrorIs(t, got, cacheaside.ErrNotFound, "it is unknown which of the keys does not exist")
			require.Equal(t, int64(2), c.Stats().Failed)
			require.False(t, behavior.IsAnswered(judged), "to a breaker it is a failure")

			src.err = func(context.Context) error { return errors.Join(absent, absent) }
			values, got := c.GetMany(t.Context(), []int{1, 2})
			require.NoError(t, got)
			require.Empty(t, values)
			require.Equal(t, int64(2), c.Stats().NotFound)
		})
	}
}

// A LoadMany that fails after LoadTimeout does not change the error that the callers have.
func TestBatchFailsAtLoadTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := many{err: func(context.Context) error { return errLoad }} // after a second
		c := newCache(t, cacheaside.Config[int, int]{Load: src.one, LoadMany: src.load, LoadTimeout: time.Second})
		for range 100 {
			_, err := c.GetMany(t.Context(), []int{1, 2, 3, 4})
			require.Error(t, err)
		}
		s := c.Stats()
		require.Equal(t, int64(400), s.TimedOut+s.Failed)
	})
}

func TestBatchWithoutCallersIsCanceled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var canceled atomic.Bool
		c := newCache(t, cacheaside.Config[int, int]{
			Load: func(context.Context, int) (int, error) { return 0, errLoad },
			LoadMany: func(ctx context.Context, _ []int) (map[int]int, error) {
				<-ctx.Done()
				canceled.Store(errors.Is(ctx.Err(), context.Canceled))
				return nil, ctx.Err()
			},
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		got, err := c.GetMany(ctx, []int{1, 2, 3})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Empty(t, got)
		synctest.Wait()
		require.True(t, canceled.Load())
		require.Zero(t, c.Tracked())
	})
}

// The values that LoadMany returns with an error are cached, and the error is reported once.
func TestPartialBatchIsCached(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCache(t, cacheaside.Config[int, int]{
			Name: "users",
			Load: func(context.Context, int) (int, error) { return 0, errLoad },
			LoadMany: func(context.Context, []int) (map[int]int, error) {
				return map[int]int{1: 10, 2: 20}, errLoad
			},
		})
		got, err := c.GetMany(t.Context(), []int{1, 2, 3, 4})
		require.ErrorIs(t, err, errLoad)
		require.EqualError(t, err, "cacheaside: users: [3 4]: the database is down")
		require.Equal(t, map[int]int{1: 10, 2: 20}, got)
		require.Equal(t, 10, mustGet(t, c, 1))
		require.Equal(t, int64(2), c.Stats().Loaded)
		require.Equal(t, int64(2), c.Stats().Failed)

		keys := make([]int, 100)
		for i := range keys {
			keys[i] = 100 + i
		}
		_, err = c.GetMany(t.Context(), keys)
		require.EqualError(t, err,
			"cacheaside: users: [100 101 102 103 104 105 106 107 108 109 ...] (100 keys): the database is down")
	})
}

// If a batch fails, its error is reported once.
func TestGetManyReportsEachFailureOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := many{err: func(context.Context) error { return errLoad }}
		c := newCache(t, cacheaside.Config[int, int]{Load: src.one, LoadMany: src.load})
		go func() { _, _ = c.GetMany(t.Context(), []int{1}) }()
		synctest.Wait()
		_, err := c.GetMany(t.Context(), []int{1, 2, 3})
		require.EqualError(t, err, "cacheaside: [1]: the database is down\ncacheaside: [2 3]: the database is down")
	})
}

// Loads of another process have failed one by one, so GetMany reports the failure of each.
func TestGetManyReportsFailuresElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared, src := newFakeStore(), new(many)
		other := shared.connect()
		c := newCache(t, cacheaside.Config[int, int]{Load: src.one, LoadMany: src.load, Store: shared.connect()})
		for _, key := range []string{"1", "2"} {
			request := cacheaside.Request{Key: key, Token: "other"}
			_, err := other.Acquire(t.Context(), request)
			require.NoError(t, err)
			time.AfterFunc(time.Second, func() { _ = other.Release(t.Context(), request, true) })
		}
		_, err := c.GetMany(t.Context(), []int{1, 2})
		require.EqualError(t, err, "cacheaside: 1: cacheaside: 1: load of another process failed\n"+
			"cacheaside: 2: cacheaside: 2: load of another process failed")
	})
}

// An error that ends a whole batch is reported once, even if LoadMany did not return it.
func TestGetManyReportsEndOfBatchOnce(t *testing.T) {
	for name, test := range map[string]struct {
		loadMany func(context.Context, []int) (map[int]int, error)
		closes   bool
		want     string
	}{
		"timeout": {func(context.Context, []int) (map[int]int, error) {
			time.Sleep(time.Minute)
			return nil, nil
		}, false, "cacheaside: [1 2 3]: cacheaside: load timed out after 30s"},
		"panic": {func(context.Context, []int) (map[int]int, error) {
			panic("no rows")
		}, false, "cacheaside: [1 2 3]: cacheaside: load panicked: no rows"},
		"close": {func(context.Context, []int) (map[int]int, error) {
			time.Sleep(time.Minute)
			return nil, nil
		}, true, "cacheaside: [1 2 3]: cacheaside: closed"},
	} {
		bubble(t, name, func(t *testing.T) {
			c := newCache(t, cacheaside.Config[int, int]{Load: identity, LoadMany: test.loadMany})
			if test.closes {
				time.AfterFunc(time.Second, func() { _ = c.Close() })
			}
			_, err := c.GetMany(t.Context(), []int{1, 2, 3})
			require.EqualError(t, err, test.want)
		})
	}
}

// Stale keys are refreshed by the same batch that loads the missing ones.
func TestStaleKeysAreRefreshedByOneBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var src many
		c := newCache(t, cacheaside.Config[int, int]{Load: src.one, LoadMany: src.load, TTL: time.Minute,
			Jitter: cacheaside.None, StaleWhileRevalidate: time.Hour})
		keys := []int{1, 2, 3, 4}
		_, err := c.GetMany(t.Context(), keys)
		require.NoError(t, err)
		time.Sleep(2 * time.Minute)
		start := time.Now()
		got, err := c.GetMany(t.Context(), keys)
		require.NoError(t, err)
		require.Len(t, got, 4)
		require.Zero(t, time.Since(start))
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		require.Equal(t, [][]int{{1, 2, 3, 4}, {1, 2, 3, 4}}, src.asked)
		got, err = c.GetMany(t.Context(), []int{1, 2, 5})
		require.NoError(t, err)
		require.Equal(t, map[int]int{1: 10, 2: 20, 5: 50}, got)
		synctest.Wait()
		require.Equal(t, []int{1, 2, 5}, src.asked[2])
	})
}

// Acquire, Fill and Invalidate have up to 100 keys of one shard in one call. At most eight calls run in parallel.
func TestManyKeysInOneAcquire(t *testing.T) {
	for _, batched := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			conn := newFakeStore().connect()
			p := pooled{conn, new(atomic.Int64), new(atomic.Int64)}
			cfg := cacheaside.Config[int, int]{Load: identity, Store: unwatched{p}}
			if batched {
				cfg.LoadMany = identities
			}
			c := newCache(t, cfg)
			keys := make([]int, 5000) // 500 to each of ten shards
			for i := range keys {
				keys[i] = i
			}
			got, err := c.GetMany(t.Context(), keys)
			require.NoError(t, err)
			require.Len(t, got, 5000)
			require.Equal(t, 50, conn.called("Acquire"))
			if batched {
				require.Equal(t, 50, conn.called("Fill"))
				require.LessOrEqual(t, p.most.Load(), int64(8))
			}
			got, err = c.GetMany(t.Context(), keys)
			require.NoError(t, err)
			require.Len(t, got, 5000)
			require.Equal(t, 100, conn.called("Acquire"))
			require.Equal(t, int64(5000), c.Stats().Loaded)
			p.most.Store(0)
			require.NoError(t, c.Invalidate(t.Context(), keys...))
			require.Equal(t, 50, conn.called("Invalidate"))
			require.Equal(t, int64(8), p.most.Load())
			require.NoError(t, c.Expire(t.Context(), keys[:10]...))
			require.Equal(t, 10, conn.called("Expire"))
		})
	}
}

// pooled is a Store with a bound on concurrent calls.
type pooled struct {
	cacheaside.Store
	calls, most *atomic.Int64
}

func (p pooled) Acquire(ctx context.Context, asks ...cacheaside.Request) ([]cacheaside.Response, error) {
	defer p.enter()()
	return p.Store.Acquire(ctx, asks...)
}

func (p pooled) enter() (leave func()) {
	if n := p.calls.Add(1); n > p.most.Load() {
		p.most.Store(n)
	}
	time.Sleep(time.Millisecond)
	return func() { p.calls.Add(-1) }
}

func (p pooled) Fill(ctx context.Context, values ...cacheaside.Entry) ([]bool, error) {
	defer p.enter()()
	return p.Store.Fill(ctx, values...)
}

func (p pooled) Invalidate(ctx context.Context, keys ...string) error {
	defer p.enter()()
	return p.Store.Invalidate(ctx, keys...)
}

// After Close has returned, no load of GetMany runs or starts.
func TestNoBatchStartsAfterClose(t *testing.T) {
	for range 300 {
		var closed, late atomic.Bool
		c := cacheaside.New(cacheaside.Config[int, int]{
			Load: func(context.Context, int) (int, error) { return 0, nil },
			LoadMany: func(context.Context, []int) (map[int]int, error) {
				if closed.Load() {
					late.Store(true)
				}
				return nil, nil
			},
		})
		var wg sync.WaitGroup
		for i := range 4 {
			wg.Go(func() {
				keys := make([]int, 20)
				for j := range keys {
					keys[j] = 100*i + j
				}
				_, _ = c.GetMany(context.Background(), keys)
			})
		}
		wg.Go(func() {
			runtime.Gosched()
			_ = c.Close()
			closed.Store(true)
		})
		wg.Wait()
		require.False(t, late.Load())
	}
}

func TestGetManyOfHitsAllocatesItsMapOnly(t *testing.T) {
	c := newCache(t, cacheaside.Config[int, int]{Load: identity})
	keys := make([]int, 100)
	for i := range keys {
		keys[i] = i
		mustGet(t, c, i)
	}
	before := c.Stats().Hits
	want := testing.AllocsPerRun(100, func() {
		values := make(map[int]int, len(keys))
		for _, k := range keys {
			values[k] = k
		}
		sink = values
	})
	got := testing.AllocsPerRun(100, func() { sink, _ = c.GetMany(t.Context(), keys) })
	require.LessOrEqual(t, got, want+2)
	require.Equal(t, int64(101*100), c.Stats().Hits-before)
}

var sink map[int]int

// A key that contains NaN does not equal itself. It is loaded each time, and no flight of it remains.
func TestKeyWithNaNIsLoadedEachTime(t *testing.T) {
	for _, tier := range []string{"memory", "both", "store"} {
		var loads atomic.Int64
		cfg := cacheaside.Config[float64, int64]{
			Load: func(context.Context, float64) (int64, error) { return loads.Add(1), nil },
			Key:  func(k float64) string { return strconv.FormatFloat(k, 'g', -1, 64) },
		}
		if tier != "memory" {
			conn := newFakeStore().connect()
			conn.fail()
			cfg.Store = conn
		}
		if tier == "store" {
			cfg.Store = unwatched{cfg.Store}
		}
		c := cacheaside.New(cfg)
		for i := range 100 {
			v, err := c.Get(t.Context(), math.NaN())
			require.NoError(t, err)
			require.Equal(t, int64(i+1), v)
		}
		require.Zero(t, c.Tracked())
		require.Zero(t, c.Stats().Entries)
		require.Zero(t, c.Stats().Overtaken)
		require.NoError(t, c.Close())
	}
}

// RefreshAhead also refreshes a value that only GetMany reads.
func TestGetManyRefreshesAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log eventLog
		source := new(many)
		c := newCache(t, cacheaside.Config[int, int]{
			TTL: 100 * time.Second, Jitter: cacheaside.None, RefreshAhead: 1, Load: source.one, LoadMany: source.load,
		})
		c.Observe(log.add)
		get := func() {
			t.Helper()
			begun := time.Now()
			found, err := c.GetMany(t.Context(), []int{1, 2})
			require.NoError(t, err)
			require.Equal(t, map[int]int{1: 10, 2: 20}, found)
			if len(source.asked) > 1 {
				require.Zero(t, time.Since(begun), "it waits for no refresh")
			}
		}
		get()
		require.Equal(t, time.Second, log.events[0].Took)
		get()
		synctest.Wait()
		require.Len(t, source.asked, 1, "far from the end")
		time.Sleep(99*time.Second - time.Microsecond) // it is as good as certain
		found, err := c.GetMany(t.Context(), []int{1, 2})
		require.NoError(t, err)
		require.Len(t, found, 2)
		synctest.Wait()
		require.Len(t, source.asked, 2)
		time.Sleep(2 * time.Second)
		get()
		require.Equal(t, [][]int{{1, 2}, {1, 2}}, source.asked)
		require.EqualValues(t, 6, c.Stats().Hits)
		require.EqualValues(t, 2, c.Stats().Misses)
	})
}

// Keys that another process loads are polled in one call, even if GetMany loads other keys, and even after the process
// has died.
func TestGetManyPollsBusyKeysTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared, source := newFakeStore(), new(many)
		c := newCache(t, cacheaside.Config[int, int]{Load: source.one, LoadMany: source.load, Store: shared.connect()})
		synctest.Wait()
		died := shared.connect()
		keys := []int{91}
		for key := 1; key <= 81; key += 10 { // in one shard
			_, err := died.Acquire(t.Context(), cacheaside.Request{Key: strconv.Itoa(key), Token: "died"})
			require.NoError(t, err)
			keys = append(keys, key)
		}
		found, err := c.GetMany(t.Context(), keys)
		require.NoError(t, err)
		require.Len(t, found, 10)
		require.Equal(t, [][]int{{91}, keys[1:]}, source.asked)
		require.Less(t, shared.called("Acquire"), 150, "about sixty times for all, and not for each")
	})
}

// The leases of keys that do not exist or have failed are released concurrently, before GetMany returns.
func TestGetManyReleasesLeasesTogether(t *testing.T) {
	for _, err := range []error{nil, errLoad, errPanic} {
		synctest.Test(t, func(t *testing.T) {
			shared := newFakeStore()
			c := newCache(t, cacheaside.Config[int, int]{
				Load: identity,
				LoadMany: func(context.Context, []int) (map[int]int, error) {
					if err == errPanic {
						panic(err)
					}
					return nil, err
				},
				Store: slowStore{shared.connect()},
			})
			synctest.Wait()
			start := time.Now()
			_, got := c.GetMany(t.Context(), []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}) // of ten shards
			require.ErrorIs(t, got, err)
			require.Equal(t, 2*time.Second, time.Since(start))
			require.Equal(t, 10, shared.called("Release"))
		})
	}
}

var errPanic = errors.New("panic")

// The stored values of keys that no longer exist are removed concurrently as well.
func TestGetManyRemovesStaleValuesTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log eventLog
		source, conn := many{}, newFakeStore().connect()
		inStore := func() bool { return conn.items["3"].of(0).value != nil }
		c := newCache(t, cacheaside.Config[int, int]{
			Load: identity, LoadMany: source.load, Store: slowStore{conn},
			TTL: time.Minute, StaleIfError: time.Hour,
		})
		c.Observe(log.add)
		synctest.Wait()
		keys := []int{0, 1, 2, 3, 4, 5, 6, 7} // in eight shards, which are called concurrently
		_, err := c.GetMany(t.Context(), keys)
		require.NoError(t, err)
		time.Sleep(2 * time.Minute)
		source.err = func(context.Context) error {
			conn.breakShard("3", true)
			return cacheaside.ErrNotFound
		}
		start := time.Now()
		values, err := c.GetMany(t.Context(), keys)
		require.NoError(t, err)
		require.Empty(t, values)
		require.Equal(t, 2*time.Second, time.Since(start), "one of them for the load")
		require.Equal(t, 8, conn.called("Invalidate"))
		require.Equal(t, 1, log.count(cacheaside.EventNotPropagated))
		require.True(t, inStore())
		conn.breakShard("3", false)
		time.Sleep(10 * time.Second)
		require.Zero(t, c.Describe().Health(t.Context()))
		require.False(t, inStore(), "a retry has removed the value")
	})
}

// A slowStore takes a second for each Release and Invalidate.
type slowStore struct{ cacheaside.Store }

func (s slowStore) Release(ctx context.Context, ask cacheaside.Request, failed bool) error {
	time.Sleep(time.Second)
	return s.Store.Release(ctx, ask, failed)
}

func (s slowStore) Invalidate(ctx context.Context, keys ...string) error {
	time.Sleep(time.Second)
	return s.Store.Invalidate(ctx, keys...)
}

// The values of a LoadMany keep their TTL if Middleware calls the function again after LoadTimeout.
func TestSkippedAttemptKeepsTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		c := cacheaside.New(cacheaside.Config[int, int]{
			Load: identity, Store: shared.connect(), LoadTimeout: time.Second,
			LoadMany: func(ctx context.Context, _ []int) (map[int]int, error) {
				cacheaside.SetTTL(ctx, 0)
				return map[int]int{1: 10}, errLoad
			},
			Middleware: func(next func(context.Context) error) func(context.Context) error {
				return func(ctx context.Context) error {
					_ = next(ctx)
					time.Sleep(2 * time.Second)
					return next(ctx)
				}
			},
		})
		synctest.Wait()
		_, err := c.GetMany(t.Context(), []int{1, 2})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NoError(t, c.Close())
		require.Zero(t, shared.called("Fill"), "not cached")
	})
}

// A slowShard is a Store that takes long to answer for keys that end so.
type slowShard struct {
	cacheaside.Store
	end   string
	takes time.Duration
}

func (s slowShard) Acquire(ctx context.Context, asks ...cacheaside.Request) ([]cacheaside.Response, error) {
	if strings.HasSuffix(asks[0].Key, s.end) {
		time.Sleep(s.takes)
	}
	return s.Store.Acquire(ctx, asks...)
}

func TestBatchStartsAfterStoreResponses(t *testing.T) {
	for name, tc := range map[string]struct {
		has   bool          // the Store, of key 1, for which it answers last
		busy  time.Duration // another process loads key 2
		want  map[int]int
		asked []int
	}{
		"the last is there":         {has: true, want: map[int]int{1: -1, 3: 30}, asked: []int{3}},
		"the last is missing":       {want: map[int]int{1: 10, 3: 30}, asked: []int{1, 3}},
		"another process loads one": {busy: 5 * time.Second / 2, want: map[int]int{1: 10, 2: -1, 3: 30}, asked: []int{1, 3}},
	} {
		bubble(t, name, func(t *testing.T) {
			store := newFakeStore()
			other := newCache(t, cacheaside.Config[int, int]{Store: store.connect(),
				Load: func(context.Context, int) (int, error) {
					time.Sleep(tc.busy)
					return -1, nil
				}})
			synctest.Wait()
			keys := []int{1, 3}
			switch {
			case tc.has:
				mustGet(t, other, 1)
			case tc.busy > 0:
				keys = append(keys, 2)
				go mustGet(t, other, 2)
				synctest.Wait()
			}
			var src many
			c := newCache(t, cacheaside.Config[int, int]{
				Load: src.one, LoadMany: src.load, Store: unwatched{slowShard{store.connect(), "1", 2 * time.Second}},
			})
			begun := time.Now()
			got, err := c.GetMany(t.Context(), keys)
			require.NoError(t, err)
			require.Equal(t, tc.want, got)
			require.Equal(t, 3*time.Second, time.Since(begun))
			require.Equal(t, [][]int{tc.asked}, src.asked)
		})
	}
}

// All callers have canceled by the time the Store responds about the last key.
func TestBatchWithoutCallersDoesNotStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var src many
		store := newFakeStore()
		c := newCache(t, cacheaside.Config[int, int]{
			Load: src.one, LoadMany: src.load, Store: unwatched{slowShard{store.connect(), "1", 2 * time.Second}},
		})
		other, err := store.connect().Acquire(t.Context(), cacheaside.Request{Key: "1", Token: "other"})
		require.NoError(t, err)
		require.Equal(t, cacheaside.Leased, other[0].State)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = c.GetMany(ctx, []int{1, 3})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.EqualValues(t, 2, c.Stats().Misses)
		time.Sleep(time.Minute)
		require.Empty(t, src.asked)
		require.Zero(t, c.Tracked())
	})
}

// A pensive Codec calls a function before it decodes.
type pensive struct{ before func(data []byte) }

func (pensive) Encode(v int) ([]byte, error) { return []byte{byte(v)}, nil }

func (p pensive) Decode(data []byte) (int, error) {
	p.before(data)
	return int(data[0]), nil
}

// Callers may cancel while the Store is queried. Here they cancel while the value of key 3 is decoded.
func TestBatchLoadsOnlyKeysWithCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var src many
		store := newFakeStore()
		cfg := cacheaside.Config[int, int]{
			Load: src.one, LoadMany: src.load,
			Codec: &pensive{func([]byte) { time.Sleep(2 * time.Second) }}, Store: unwatched{store.connect()},
		}
		c := newCache(t, cfg)
		mustGet(t, c, 3)
		go func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, _ = c.GetMany(ctx, []int{1, 2, 3})
		}()
		synctest.Wait()
		require.Equal(t, 20, mustGet(t, c, 2))
		require.Equal(t, [][]int{{2}}, src.asked)
		require.Equal(t, 1, store.called("Release"), "of key 1")
	})
}

// If a flight has its result, a later caller of it gets this result and no stale value.
func TestGetManySharesAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCache(t, cacheaside.Config[int, int]{
			TTL: time.Minute, StaleIfError: time.Hour, LoadTimeout: 10 * time.Second,
			Load: func(_ context.Context, key int) (int, error) {
				if key == 1 {
					time.Sleep(8 * time.Second)
				}
				return key, nil
			},
			Codec: &pensive{func([]byte) { time.Sleep(12 * time.Second) }}, Store: unwatched{newFakeStore().connect()},
		})
		mustGet(t, c, 2)
		time.Sleep(2 * time.Minute)
		go func() {
			_, err := c.Get(t.Context(), 2) // times out while its stale value is decoded
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}()
		time.Sleep(5 * time.Second)
		go mustGet(t, c, 1)
		time.Sleep(time.Second)
		got, err := c.GetMany(t.Context(), []int{1, 2})
		require.EqualError(t, err, "cacheaside: 2: cacheaside: load timed out after 10s")
		require.Equal(t, map[int]int{1: 1}, got)
	})
}

// An observer that calls runtime.Goexit ends the load. Its keys then have no stale value.
func TestGoexitInObserverOfBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var failing atomic.Bool
		store := newFakeStore()
		c := newCache(t, cacheaside.Config[int, int]{
			TTL: time.Minute, StaleIfError: time.Hour, ErrorPause: time.Minute, Store: unwatched{store.connect()},
			Load: func(_ context.Context, key int) (int, error) {
				if failing.Load() {
					return 0, errLoad
				}
				return key, nil
			},
		})
		c.Observe(func(_ context.Context, e cacheaside.Event) {
			if e.Kind == cacheaside.EventCodecFailed {
				runtime.Goexit()
			}
		})
		mustGet(t, c, 1)
		mustGet(t, c, 2)
		time.Sleep(2 * time.Minute)
		failing.Store(true)
		require.Equal(t, 1, mustGet(t, c, 1), "its load has failed")
		store.items["2"].of(0).value = []byte("damaged")
		got, err := c.GetMany(t.Context(), []int{1, 2})
		require.ErrorContains(t, err, "load called runtime.Goexit")
		require.Empty(t, got)
		require.Zero(t, c.Tracked())
	})
}

// A batch does not wait for a key that a Get loads, here a fenced key.
func TestBatchDoesNotWaitForOtherLoads(t *testing.T) {
	for _, twice := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			var src many
			conn := newFakeStore().connect()
			_, err := conn.Fence(t.Context(), "1", "token")
			require.NoError(t, err)
			c := newCache(t, cacheaside.Config[int, int]{LoadMany: src.load,
				Store: unwatched{slowShard{conn, "1", time.Millisecond}},
				Load:  func(context.Context, int) (int, error) { time.Sleep(5 * time.Second); return 1, nil }})
			go mustGet(t, c, 1)
			synctest.Wait()
			if twice { // in one flight
				go mustGet(t, c, 1)
			} else {
				time.Sleep(2 * time.Millisecond) // the first loads
			}
			go func() { _, _ = c.GetMany(t.Context(), []int{1, 3}) }()
			time.Sleep(1500 * time.Millisecond)
			begun := time.Now()
			require.Equal(t, 30, mustGet(t, c, 3))
			require.Zero(t, time.Since(begun))
			time.Sleep(time.Minute)
		})
	}
}

func TestBatchContinuesForKeysWithCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var src many
		c := newCache(t, cacheaside.Config[int, int]{Load: src.one, LoadMany: src.load})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second/2)
		defer cancel()
		go func() { _, _ = c.GetMany(ctx, []int{1, 2}) }()
		synctest.Wait()
		require.Equal(t, 20, mustGet(t, c, 2))
	})
}

// The caller of a GetMany cancels while the Store is queried. Another process loads keys 21 and 31, so these keys
// continue apart from key 11: key 21 because it has another caller, and key 31 only until the next query.
func TestPollContinuesForKeysWithCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var src many
		conn := newFakeStore().connect()
		for _, key := range []string{"21", "31"} {
			_, err := conn.Acquire(t.Context(), cacheaside.Request{Key: key, Token: "other"})
			require.NoError(t, err)
		}
		store := &scripted{Store: unwatched{slowly{Store: conn, takes: 200 * time.Millisecond}}}
		c := newCache(t, cacheaside.Config[int, int]{Load: src.one, LoadMany: src.load, Store: store})
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		go func() { _, _ = c.GetMany(ctx, []int{11, 21, 31}) }()
		synctest.Wait()
		require.Equal(t, 210, mustGet(t, c, 21))
		require.Equal(t, [][]int{{21}}, src.asked)
		asked := map[string]int{}
		for _, request := range store.asks {
			asked[request.Key]++
		}
		require.Equal(t, 1, asked["11"])
		require.Equal(t, 2, asked["31"])
		require.Greater(t, asked["21"], 5)
	})
}

func TestGetManyServesStaleIfBatchFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var src many
		c := newCache(t, cacheaside.Config[int, int]{Load: src.one, LoadMany: src.load, TTL: time.Minute,
			StaleIfError: time.Hour})
		want := map[int]int{1: 10, 2: 20}
		for range 2 {
			got, err := c.GetMany(t.Context(), []int{1, 2})
			require.NoError(t, err)
			require.Equal(t, want, got)
			src.err = func(context.Context) error { return errLoad }
			time.Sleep(2 * time.Minute)
		}
	})
}
