package cacheaside_test

import (
	"context"
	"log/slog"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/policy"
)

// A load that fails fails for all callers that wait for it, in every process. No caller waits for several loads.
func TestFailedLoadFailsWaitersEverywhere(t *testing.T) {
	for name, old := range map[string]bool{"nothing to serve": false, "with a stale value": true} {
		bubble(t, name, func(t *testing.T) {
			const takes = 2 * time.Second
			shared := newFakeStore()
			var failing atomic.Bool
			var loads atomic.Int64
			var caches []*cacheaside.Cache[int, int]
			for range 12 {
				c := newCache(t, cacheaside.Config[int, int]{
					TTL: time.Minute, Jitter: cacheaside.None, StaleIfError: time.Hour, ErrorPause: time.Second,
					Store: shared.connect(),
					Load: func(context.Context, int) (int, error) {
						if failing.Load() {
							loads.Add(1)
							time.Sleep(takes)
							return 0, errLoad
						}
						return 1, nil
					},
				})
				caches = append(caches, c)
			}
			synctest.Wait()
			if old {
				mustGet(t, caches[0], 1)
				time.Sleep(2 * time.Minute)
			}
			failing.Store(true)
			begun := time.Now()
			var wg sync.WaitGroup
			for i, c := range caches {
				wg.Go(func() {
					time.Sleep(time.Duration(i) * 10 * time.Millisecond)
					v, err := c.Get(t.Context(), 1)
					if old && (err != nil || v != 1) || !old && err == nil {
						t.Errorf("process %d: %d, %v", i, v, err)
					}
				})
			}
			wg.Wait()
			require.LessOrEqual(t, time.Since(begun), takes*3/2, "the slowest process")
			require.Equal(t, int64(1), loads.Load())
			if old { // during the pause, no process loads again
				for _, c := range caches {
					mustGet(t, c, 1)
				}
				require.Equal(t, int64(1), loads.Load())
			} else { // the failure does not affect later calls
				failing.Store(false)
				require.Equal(t, 1, mustGet(t, caches[5], 1))
			}
		})
	}
}

// While a process deploys a new Version, with another type of key, each Version is loaded once,
// and an invalidation by either reaches both.
func TestVersionsShareAStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type id struct{ n int }
		shared := newFakeStore()
		var loads [3]atomic.Int64
		version := func(v uint32) func(context.Context) (int, error) {
			return func(context.Context) (int, error) { loads[v].Add(1); return int(v), nil }
		}
		var olds []*cacheaside.Cache[int, int]
		var news []*cacheaside.Cache[id, string]
		for range 2 {
			load1, load2 := version(1), version(2)
			olds = append(olds, newCache(t, cacheaside.Config[int, int]{
				Version: 1, Store: unwatched{shared.connect()},
				Load: func(ctx context.Context, _ int) (int, error) { return load1(ctx) },
			}))
			news = append(news, newCache(t, cacheaside.Config[id, string]{
				Version: 2, Store: unwatched{shared.connect()}, Key: func(k id) string { return strconv.Itoa(k.n) },
				Load: func(ctx context.Context, _ id) (string, error) {
					v, err := load2(ctx)
					return strconv.Itoa(v), err
				},
			}))
		}
		gets := func() {
			for range 100 {
				for i := range olds {
					require.Equal(t, 1, mustGet(t, olds[i], 7))
					v, err := news[i].Get(t.Context(), id{7})
					require.NoError(t, err)
					require.Equal(t, "2", v)
				}
			}
		}
		gets()
		require.Equal(t, int64(1), loads[1].Load())
		require.Equal(t, int64(1), loads[2].Load())
		require.NoError(t, news[0].Invalidate(t.Context(), id{7}))
		gets()
		require.NoError(t, olds[0].Write(t.Context(), 7, func(context.Context) error { return nil }))
		gets()
		require.Equal(t, int64(3), loads[1].Load())
		require.Equal(t, int64(3), loads[2].Load())
	})
}

// A Load that reads a replica may return a value from before a change. This value is served only while the replica may
// lag.
func TestLagLimitsReplicaReads(t *testing.T) {
	const lag = 2 * time.Second
	type cache = *cacheaside.Cache[int, int]
	for name, change := range map[string]func(t *testing.T, c, other cache, commit func(context.Context) error){
		"Write": func(t *testing.T, c, _ cache, commit func(context.Context) error) {
			require.NoError(t, c.Write(t.Context(), 1, commit))
		},
		"Invalidate": func(t *testing.T, c, _ cache, commit func(context.Context) error) {
			_ = commit(t.Context())
			require.NoError(t, c.Invalidate(t.Context(), 1))
		},
		"InvalidateAll": func(t *testing.T, c, _ cache, commit func(context.Context) error) {
			_ = commit(t.Context())
			require.NoError(t, c.InvalidateAll(t.Context()))
		},
		"Expire": func(t *testing.T, c, _ cache, commit func(context.Context) error) {
			_ = commit(t.Context())
			require.NoError(t, c.Expire(t.Context(), 1))
		},
		"in another process": func(t *testing.T, _, other cache, commit func(context.Context) error) {
			require.NoError(t, other.Write(t.Context(), 1, commit))
		},
	} {
		for _, store := range []bool{false, true} {
			if name == "in another process" && !store {
				continue
			}
			bubble(t, name, func(t *testing.T) {
				var row, replica, loads atomic.Int64
				cfg := cacheaside.Config[int, int]{
					TTL: time.Hour, Jitter: cacheaside.None, StaleIfError: time.Hour, ReplicaLag: lag,
					Load: func(context.Context, int) (int, error) { loads.Add(1); return int(replica.Load()), nil },
				}
				shared := newFakeStore()
				open := func() cache {
					if store {
						cfg.Store = shared.connect()
					}
					return newCache(t, cfg)
				}
				c, other := open(), open()
				synctest.Wait()
				time.Sleep(time.Minute) // a new Cache does not know about changes just before it was created
				require.Equal(t, 0, mustGet(t, c, 1))
				change(t, c, other, func(context.Context) error {
					row.Add(1)
					go func() {
						time.Sleep(lag - 1)
						replica.Store(row.Load())
					}()
					return nil
				})
				time.Sleep(lag / 2)
				require.Equal(t, 0, mustGet(t, c, 1), "it is served")
				before := loads.Load()
				mustGet(t, c, 1)
				require.Equal(t, before, loads.Load(), "cached again")
				time.Sleep(lag / 2)
				require.Equal(t, 1, mustGet(t, c, 1), "it expired after ReplicaLag")
				before = loads.Load()
				time.Sleep(30 * time.Minute)
				require.Equal(t, 1, mustGet(t, c, 1))
				require.Equal(t, before, loads.Load(), "a later load has the whole TTL")
			})
		}
	}
}

// A value loaded within ReplicaLag of a change also expires in processes that read it from the Store.
func TestLagLimitsSharedValues(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const lag = 2 * time.Second
		var replica, loads atomic.Int64
		shared := newFakeStore()
		open := func() *cacheaside.Cache[int, int] {
			return newCache(t, cacheaside.Config[int, int]{
				TTL: time.Hour, Jitter: cacheaside.None, StaleWhileRevalidate: time.Hour, StaleIfError: time.Hour,
				NotFoundTTL: time.Hour, ReplicaLag: lag,
				Store: shared.connect(),
				Load: func(_ context.Context, key int) (int, error) {
					loads.Add(1)
					if v := int(replica.Load()); v != key {
						return v, nil
					}
					return 0, cacheaside.ErrNotFound
				},
			})
		}
		c, other := open(), open()
		synctest.Wait()
		time.Sleep(time.Minute)
		for key := range 2 { // 0 comes to be, and 1 is deleted
			require.NoError(t, c.Write(t.Context(), key, func(context.Context) error { return nil }))
		}
		for _, seen := range []int{0, 1} {
			replica.Store(int64(seen))
			for range 2 {
				for _, cache := range []*cacheaside.Cache[int, int]{c, other} {
					require.Equal(t, seen, mustGet(t, cache, 1-seen))
					_, err := cache.Get(t.Context(), seen)
					require.ErrorIs(t, err, cacheaside.ErrNotFound)
				}
				require.EqualValues(t, 2+2*seen, loads.Load(), "once, for all")
			}
			time.Sleep(lag)
		}
	})
}

// So does a value that is loaded after the Store has made a change and before it responds.
func TestLagLimitsConcurrentLoads(t *testing.T) {
	for name, change := range map[string]func(context.Context, *cacheaside.Cache[int, int]) error{
		"Write": func(ctx context.Context, c *cacheaside.Cache[int, int]) error {
			return c.Write(ctx, 1, func(context.Context) error { time.Sleep(5 * time.Second); return nil })
		},
		"Invalidate":    func(ctx context.Context, c *cacheaside.Cache[int, int]) error { return c.Invalidate(ctx, 1, 2) },
		"Expire":        func(ctx context.Context, c *cacheaside.Cache[int, int]) error { return c.Expire(ctx, 1, 2) },
		"InvalidateAll": func(ctx context.Context, c *cacheaside.Cache[int, int]) error { return c.InvalidateAll(ctx) },
	} {
		bubble(t, name, func(t *testing.T) {
			loads := 0
			c := newCache(t, cacheaside.Config[int, int]{
				TTL: time.Hour, Jitter: cacheaside.None, ReplicaLag: 2 * time.Second, Store: lateStore{newFakeStore().connect()},
				Load: func(context.Context, int) (int, error) { loads++; return loads, nil },
			})
			synctest.Wait()
			time.Sleep(time.Minute)
			told := make(chan error, 1)
			go func() { told <- change(t.Context(), c) }()
			time.Sleep(100 * time.Millisecond)
			if name == "Write" {
				time.Sleep(6 * time.Second) // a second for the fence
			}
			require.Empty(t, told)
			require.Equal(t, 1, mustGet(t, c, 1))
			time.Sleep(time.Second)
			require.NoError(t, <-told)
			require.Equal(t, 1, mustGet(t, c, 1), "the value of the Store")
			time.Sleep(2 * time.Second)
			require.Equal(t, 2, mustGet(t, c, 1))
		})
	}
}

// A lateStore answers a second after it has made a change.
type lateStore struct{ cacheaside.Store }

func aSecondLate(err error) error {
	time.Sleep(time.Second)
	return err
}

func (s lateStore) Fence(ctx context.Context, key, token string) (time.Duration, error) {
	d, err := s.Store.Fence(ctx, key, token)
	return d, aSecondLate(err)
}

func (s lateStore) Unfence(ctx context.Context, key, token string) error {
	return aSecondLate(s.Store.Unfence(ctx, key, token))
}

func (s lateStore) Invalidate(ctx context.Context, keys ...string) error {
	return aSecondLate(s.Store.Invalidate(ctx, keys...))
}

func (s lateStore) Expire(ctx context.Context, keys ...string) error {
	return aSecondLate(s.Store.Expire(ctx, keys...))
}

func (s lateStore) InvalidateAll(ctx context.Context) error {
	return aSecondLate(s.Store.InvalidateAll(ctx))
}

// A ReplicaLag that Update sets holds for changes just before, and bounds no keys that have not changed.
func TestUpdateSetsReplicaLag(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		loads := map[int]int{}
		c := newCache(t, cacheaside.Config[int, int]{TTL: time.Hour, Jitter: cacheaside.None,
			Load: func(_ context.Context, k int) (int, error) {
				loads[k]++
				return k, nil
			}})
		time.Sleep(time.Minute)
		require.NoError(t, c.Invalidate(t.Context(), 1))
		require.NoError(t, c.Update(func(cfg *cacheaside.Config[int, int]) { cfg.ReplicaLag = 2 * time.Second }))
		time.Sleep(time.Second)
		mustGet(t, c, 1)
		time.Sleep(time.Second)
		mustGet(t, c, 1)
		require.Equal(t, 2, loads[1], "the replica may have lagged")
		require.NoError(t, c.Invalidate(t.Context(), 1))
		for range 2 {
			for k := range 10 {
				mustGet(t, c, 100+k)
			}
			time.Sleep(3 * time.Second)
		}
		again := 0
		for k := range 10 {
			again += loads[100+k] - 1
		}
		require.Less(t, again, 5, "another key has changed, which few share a bucket with")
	})
}

// Without ReplicaLag, an Update does not shorten the TTL of a value that is being loaded.
func TestUpdateDuringALoadLeavesItsTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCache(t, cacheaside.Config[int, int]{Load: func(_ context.Context, k int) (int, error) {
			time.Sleep(time.Second)
			return k, nil
		}})
		go mustGet(t, c, 1)
		time.Sleep(time.Second / 2)
		require.NoError(t, c.Update(func(cfg *cacheaside.Config[int, int]) { cfg.StaleWhileRevalidate = time.Hour }))
		time.Sleep(time.Second)
		_, ok := c.Peek(1)
		require.True(t, ok)
	})
}

// A key may change while its load reads when it changed last.
func TestLagOfChangeDuringLoad(t *testing.T) {
	var c *cacheaside.Cache[int, int]
	var changes sync.WaitGroup
	c = newCache(t, cacheaside.Config[int, int]{ReplicaLag: time.Hour,
		Load: func(_ context.Context, k int) (int, error) {
			changes.Go(func() { _ = c.Invalidate(t.Context(), k) })
			runtime.Gosched()
			return k, nil
		}})
	for range 100 {
		require.Equal(t, 1, mustGet(t, c, 1))
		require.NoError(t, c.Invalidate(t.Context(), 1))
	}
	changes.Wait()
}

var _ policy.Describer = (*cacheaside.Cache[int, int])(nil)

func TestCacheDescribesItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := newFakeStore().connect()
		c := cacheaside.New(cacheaside.Config[int, int]{
			Name: "users", Store: conn, TTL: time.Minute, Clone: func(v int) int { return v },
			Load: func(_ context.Context, key int) (int, error) { time.Sleep(time.Second); return key, nil },
		})
		synctest.Wait()
		d := c.Describe()
		require.Equal(t, "cache", d.Kind)
		require.Equal(t, "users", d.Name)
		var mu sync.Mutex // Watch also reports events
		var events []policy.Event
		d.Observe(func(_ context.Context, e policy.Event) {
			mu.Lock()
			defer mu.Unlock()
			events = append(events, e)
		})
		mustGet(t, c, 1)
		mustGet(t, c, 1)
		mu.Lock()
		require.Equal(t, []policy.Event{
			{Kind: "cache", Name: "users", Key: "1", What: "loaded", Level: slog.LevelDebug,
				Attrs: []slog.Attr{slog.Duration("took", time.Second)}},
		}, events)
		mu.Unlock()
		metrics := map[string]float64{}
		for _, m := range d.Metrics() {
			metrics[m.Name] = m.Value
		}
		require.Len(t, metrics, 15)
		require.Equal(t, 1.0, metrics["cache.watching"])
		require.Equal(t, 1.0, metrics["cache.gets{outcome=hit}"])
		require.Equal(t, 1.0, metrics["cache.loads{outcome=loaded}"])
		require.Equal(t, 1.0, metrics["cache.entries"])
		require.Equal(t, time.Minute, d.Config().(cacheaside.Config[int, int]).TTL)
		require.Zero(t, d.Health(t.Context()))
		conn.fail()
		require.Error(t, c.Invalidate(t.Context(), 1))
		require.Equal(t, policy.Health{Status: policy.Warn, State: "invalidations_pending", Detail: "1 keys"},
			d.Health(t.Context()))
		mu.Lock()
		at := slices.IndexFunc(events, func(e policy.Event) bool { return e.What == "not_propagated" })
		require.GreaterOrEqual(t, at, 0)
		require.Equal(t, slog.LevelWarn, events[at].Level)
		require.Error(t, events[at].Err)
		require.Empty(t, events[at].Attrs)
		mu.Unlock()
		conn.recover()
		require.NoError(t, c.Close())
		require.Zero(t, d.Health(t.Context()))
	})
}

func TestDescriptionUpdateSeesTheConfigGiven(t *testing.T) {
	c := newCache(t, cacheaside.Config[int, int]{Name: "users", Load: newSource().load})
	update := c.Describe().Update
	require.NoError(t, update(true, func(cfg any) error {
		require.Zero(t, cfg.(*cacheaside.Config[int, int]).TTL)
		cfg.(*cacheaside.Config[int, int]).TTL = time.Hour
		return nil
	}))
	require.Equal(t, 5*time.Minute, c.Config().TTL, "a dry run changes nothing")
	require.ErrorIs(t, update(false, func(any) error { return errLoad }), errLoad)
	require.NoError(t, c.Update(func(cfg *cacheaside.Config[int, int]) { cfg.TTL *= 2 }))
	require.Equal(t, 10*time.Minute, c.Config().TTL)
}
