package cacheaside_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// Once a Write with a Store has called its function, no call is served from memory. Otherwise, a write that never
// returns would leave a value older than its commit.
func TestWriteInvalidatesMemoryFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newSource()
		c := newCache(t, cacheaside.Config[int, int]{Load: src.load, Store: newFakeStore().connect()})
		synctest.Wait()
		mustGet(t, c, 1)
		require.NoError(t, c.Write(t.Context(), 1, func(ctx context.Context) error {
			_, ok := c.Peek(1)
			require.False(t, ok)
			_ = src.write(1)(ctx)
			require.Equal(t, 1, mustGet(t, c, 1))
			return nil
		}))
	})
}

func TestLoadDuringWriteIsNotCached(t *testing.T) {
	src := newSource()
	c := newCache(t, cacheaside.Config[int, int]{Load: src.load})
	require.NoError(t, c.Write(t.Context(), 1, func(ctx context.Context) error {
		require.Equal(t, 0, mustGet(t, c, 1))
		return src.write(1)(ctx)
	}))
	require.Equal(t, 1, mustGet(t, c, 1))
}

// late is a Store whose answers to Acquire are delayed.
type late struct {
	cacheaside.Store
	hold chan struct{}
	on   *atomic.Bool
}

func (l late) Acquire(ctx context.Context, asks ...cacheaside.Request) ([]cacheaside.Response, error) {
	looks, err := l.Store.Acquire(ctx, asks...)
	if l.on.Load() {
		<-l.hold
	}
	return looks, err
}

// A stale value that the Store returned before an invalidation is not cached in memory after it.
func TestInvalidatedFlightOffersNoStaleValue(t *testing.T) {
	for name, invalidate := range map[string]func(*cacheaside.Cache[int, int], *fakeConn) error{
		"here": func(c *cacheaside.Cache[int, int], _ *fakeConn) error {
			return c.Invalidate(context.Background(), 1)
		},
		"elsewhere": func(_ *cacheaside.Cache[int, int], other *fakeConn) error {
			return other.Invalidate(context.Background(), "1")
		},
	} {
		bubble(t, name, func(t *testing.T) {
			shared := newFakeStore()
			l := late{shared.connect(), make(chan struct{}), new(atomic.Bool)}
			var failing atomic.Bool
			load := func(context.Context, int) (int, error) {
				if failing.Load() {
					return 0, errLoad
				}
				return 1, nil
			}
			cfg := cacheaside.Config[int, int]{TTL: time.Minute, Jitter: cacheaside.None, StaleIfError: time.Hour, Load: load}
			cfg.Store = shared.connect()
			first := newCache(t, cfg)
			cfg.Store = l
			c := newCache(t, cfg)
			synctest.Wait()
			mustGet(t, first, 1)
			time.Sleep(2 * time.Minute)
			failing.Store(true)
			l.on.Store(true)
			var wg sync.WaitGroup
			wg.Go(func() { _, _ = c.Get(t.Context(), 1) })
			synctest.Wait()
			require.NoError(t, invalidate(c, shared.connect()))
			l.on.Store(false)
			close(l.hold)
			wg.Wait()
			_, err := c.Get(t.Context(), 1)
			require.ErrorIs(t, err, errLoad)
		})
	}
}

// A stale value that the Store returns late is not served. The new value that is in memory by then is not stale.
func TestLateStaleValueIsNotServed(t *testing.T) {
	for name, skip := range map[string]bool{"Get": false, "with SkipMemory": true} {
		bubble(t, name, func(t *testing.T) {
			shared, src := newFakeStore(), newSource()
			store := late{shared.connect(), make(chan struct{}), new(atomic.Bool)}
			cfg := cacheaside.Config[int, int]{
				TTL: time.Minute, StaleWhileRevalidate: time.Hour, Store: shared.connect(),
				Load: func(ctx context.Context, key int) (int, error) {
					time.Sleep(time.Second)
					return src.load(ctx, key)
				},
			}
			mustGet(t, newCache(t, cfg), 1)
			cfg.Store = store
			c := newCache(t, cfg)
			time.Sleep(2 * time.Minute)
			store.on.Store(true)
			go func() {
				_, _, err := c.GetWith(t.Context(), 1, cacheaside.GetOptions{SkipMemory: skip})
				require.NoError(t, err)
			}()
			synctest.Wait()
			store.on.Store(false)
			require.NoError(t, c.Write(t.Context(), 1, src.write(1)))
			require.Equal(t, 1, mustGet(t, c, 1))
			close(store.hold)
			time.Sleep(time.Minute / 2)
			require.Zero(t, c.Stats().Stale)
			require.EqualValues(t, 3, src.loaded(1))
		})
	}
}

// If a key changes while its invalidation is being retried, the invalidation remains pending.
func TestChangeDuringRetryStaysPending(t *testing.T) {
	for call, change := range map[string]func(*cacheaside.Cache[int, int]) error{
		"Invalidate":    func(c *cacheaside.Cache[int, int]) error { return c.Invalidate(context.Background(), 1) },
		"InvalidateAll": func(c *cacheaside.Cache[int, int]) error { return c.InvalidateAll(context.Background()) },
	} {
		synctest.Test(t, func(t *testing.T) {
			shared, src := newFakeStore(), newSource()
			var failing, telling atomic.Bool
			failing.Store(true)
			var c *cacheaside.Cache[int, int]
			c = newCache(t, cacheaside.Config[int, int]{
				Load: src.load, ErrorPause: cacheaside.None,
				Store: unwatched{flaky{shared.connect(), func(what string) bool {
					if what == call && telling.Swap(false) {
						// The first invalidation is being retried when the second one fails.
						failing.Store(true)
						require.ErrorIs(t, change(c), cacheaside.ErrNotPropagated)
						return false
					}
					return what == call && failing.Load()
				}}},
			})
			require.ErrorIs(t, change(c), cacheaside.ErrNotPropagated)
			failing.Store(false)
			telling.Store(true)
			for telling.Load() {
				time.Sleep(time.Millisecond)
			}
			synctest.Wait()
			require.Equal(t, int64(1), c.Stats().PendingInvalidations)
			failing.Store(false)
			time.Sleep(time.Second)
			require.Zero(t, c.Stats().PendingInvalidations)
		})
	}
}

func TestExpireEndsThePauseAfterAFailedLoad(t *testing.T) {
	for _, tier := range []string{"memory", "both", "store"} {
		bubble(t, tier, func(t *testing.T) {
			var loads atomic.Int64
			var failing atomic.Bool
			cfg := cacheaside.Config[int, int64]{
				TTL: time.Minute, Jitter: cacheaside.None, StaleIfError: time.Hour, ErrorPause: time.Hour,
				Load: func(context.Context, int) (int64, error) {
					n := loads.Add(1)
					if failing.Load() {
						return 0, errLoad
					}
					return n, nil
				},
			}
			cfg.Store = newFakeStore().tier(tier)
			c := newCache(t, cfg)
			synctest.Wait()
			mustGet(t, c, 1)
			time.Sleep(2 * time.Minute)
			failing.Store(true)
			require.Equal(t, int64(1), mustGet(t, c, 1))
			failing.Store(false)
			require.Equal(t, int64(1), mustGet(t, c, 1), "the pause")
			require.NoError(t, c.Expire(t.Context(), 1))
			require.Equal(t, int64(3), mustGet(t, c, 1))
		})
	}
}

// After Expire, a process has the stale value in its memory, and serves it even if the Store does not respond.
func TestExpireLeavesStaleValueInMemory(t *testing.T) {
	for _, tier := range []string{"memory", "both"} {
		bubble(t, tier, func(t *testing.T) {
			conn, loads := newFakeStore().connect(), 0
			cfg := cacheaside.Config[int, int]{
				StaleIfError: time.Hour,
				Load: func(context.Context, int) (int, error) {
					if loads++; loads > 1 {
						return 0, errLoad
					}
					return 1, nil
				},
			}
			if tier == "both" {
				cfg.Store = conn
			}
			c := newCache(t, cfg)
			synctest.Wait()
			mustGet(t, c, 1)
			require.NoError(t, c.Expire(t.Context(), 1))
			conn.breakShard("1", true)
			require.Equal(t, 1, mustGet(t, c, 1))
			require.Equal(t, 2, loads)
		})
	}
}

// A call that waits while its value is invalidated does not get the stale value.
func TestNoStaleValueAfterInvalidation(t *testing.T) {
	for _, tier := range []string{"memory", "both"} {
		synctest.Test(t, func(t *testing.T) {
			var failing atomic.Bool
			cfg := cacheaside.Config[int, int]{
				TTL: time.Minute, Jitter: cacheaside.None, StaleIfError: time.Hour,
				Load: func(context.Context, int) (int, error) {
					time.Sleep(time.Second)
					if failing.Load() {
						return 0, errLoad
					}
					return 1, nil
				},
			}
			cfg.Store = newFakeStore().tier(tier)
			c := newCache(t, cfg)
			synctest.Wait()
			mustGet(t, c, 1)
			time.Sleep(2 * time.Minute)
			failing.Store(true)
			var wg sync.WaitGroup
			wg.Go(func() {
				if v, err := c.Get(t.Context(), 1); err != errLoad {
					t.Errorf("%d, %v", v, err)
				}
			})
			synctest.Wait()
			require.NoError(t, c.Invalidate(t.Context(), 1))
			wg.Wait()
		})
	}
}

// Callers do not wait again for a load that is known to be late.
func TestSoftTimeoutCountsFromTheStartOfTheLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := false
		c := newCache(t, cacheaside.Config[int, int]{
			TTL: time.Minute, Jitter: cacheaside.None, StaleIfError: time.Hour, SoftTimeout: time.Second,
			Load: func(context.Context, int) (int, error) {
				if slow {
					time.Sleep(10 * time.Second)
				}
				return 1, nil
			},
		})
		mustGet(t, c, 1)
		slow = true
		time.Sleep(2 * time.Minute)
		start := time.Now()
		for range 100 {
			mustGet(t, c, 1)
		}
		require.Equal(t, time.Second, time.Since(start))
		require.Equal(t, int64(100), c.Stats().Stale)
	})
}

// Polling for the load of another process adds little to its duration.
func TestLoadOfAnotherProcessIsNoticedSoon(t *testing.T) {
	for _, capacity := range []int{0, -1} {
		for _, takes := range []time.Duration{50 * time.Millisecond, 100 * time.Millisecond, 300 * time.Millisecond,
			2 * time.Second} {
			var worst time.Duration
			for range 100 {
				synctest.Test(t, func(t *testing.T) {
					shared := newFakeStore()
					var caches []*cacheaside.Cache[int, int]
					for range 2 {
						c := newCache(t, cacheaside.Config[int, int]{
							Load:  func(context.Context, int) (int, error) { time.Sleep(takes); return 1, nil },
							Store: watchedIf(capacity == 0, shared.connect()),
						})
						caches = append(caches, c)
					}
					synctest.Wait()
					go func() { _, _ = caches[0].Get(t.Context(), 1) }()
					synctest.Wait()
					start := time.Now()
					mustGet(t, caches[1], 1)
					worst = max(worst, time.Since(start)-takes)
					require.Less(t, shared.called("Acquire"), 80)
				})
			}
			require.LessOrEqual(t, worst, max(takes/4, 15*time.Millisecond), takes)
		}
	}
}

// A telling Store lets a test send messages.
type telling struct {
	cacheaside.Store
	heard chan func(string)
}

func (w *telling) Watch(ctx context.Context, up func(), heard func(string)) error {
	up()
	w.heard <- heard
	<-ctx.Done()
	return ctx.Err()
}

// InvalidateAll by another process counts immediately; the memory is freed afterwards.
func TestRemoteInvalidateAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &telling{Store: newFakeStore().connect(), heard: make(chan func(string), 1)}
		c := newCache(t, cacheaside.Config[int, int]{Load: identity, Store: w})
		heard := <-w.heard
		for range 3 {
			for i := range 100 {
				mustGet(t, c, i)
			}
			heard("")
			_, ok := c.Peek(1)
			require.False(t, ok)
			synctest.Wait()
			require.Zero(t, c.Stats().Entries)
		}
	})
}

// Each of several calls to Close waits until the pending invalidations have reached the Store.
func TestEveryCloseWaitsForInvalidations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		told := 0
		store := flaky{newFakeStore().connect(), func(call string) bool {
			if call == "Invalidate" {
				time.Sleep(time.Second)
				told++
			}
			return told == 1
		}}
		c := cacheaside.New(cacheaside.Config[int, int]{Load: newSource().load, Store: unwatched{store},
			ErrorPause: time.Hour})
		require.ErrorIs(t, c.Invalidate(t.Context(), 1), cacheaside.ErrNotPropagated)
		go func() { _ = c.Close() }()
		synctest.Wait()
		require.NoError(t, c.Close())
		require.Equal(t, 2, told)
	})
}

// A value that a call reads from the Store before an invalidation reaches it is not cached afterwards.
func TestInvalidateUpdatesStoreBeforeMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newSource()
		var c *cacheaside.Cache[int, int]
		c = newCache(t, cacheaside.Config[int, int]{
			Load: src.load,
			Store: flaky{newFakeStore().connect(), func(call string) bool {
				if call == "Invalidate" && c != nil {
					require.Equal(t, 0, mustGet(t, c, 1), "the call reads the value from before the change, and caches it")
				}
				return false
			}},
		})
		synctest.Wait()
		mustGet(t, c, 1)
		_ = src.write(1)(t.Context())
		require.NoError(t, c.Invalidate(t.Context(), 1))
		require.Equal(t, 1, mustGet(t, c, 1))
	})
}

// An invalidation in flight while Close is called either takes effect or returns ErrClosed. The race detector checks
// this test.
func TestChangesDuringClose(t *testing.T) {
	c := cacheaside.New(config{Load: identity})
	changed := make(chan error)
	go func() {
		for {
			if err := c.Invalidate(context.Background(), 1); err != nil {
				changed <- err
				return
			}
		}
	}()
	require.NoError(t, c.Close())
	require.ErrorIs(t, <-changed, cacheaside.ErrClosed)
}

func TestInvalidateAllFreesTheMemory(t *testing.T) {
	c := newCache(t, config{Load: identity})
	mustGet(t, c, 1)
	require.NoError(t, c.InvalidateAll(t.Context()))
	require.Zero(t, c.Stats().Entries)
}
