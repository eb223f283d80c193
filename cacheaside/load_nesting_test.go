package cacheaside_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// nested is a Cache whose Load may use the Cache.
func nested(cfg cacheaside.Config[int, int],
	load func(ctx context.Context, c *cacheaside.Cache[int, int], key int) (int, error)) *cacheaside.Cache[int, int] {
	var c *cacheaside.Cache[int, int]
	cfg.Load = func(ctx context.Context, key int) (int, error) { return load(ctx, c, key) }
	c = cacheaside.New(cfg)
	return c
}

// A Get that is served without a wait closes no circle, and neither does one after the
// load.
func TestGetOfOwnKeySucceedsWithoutWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var loads atomic.Int32
		var late context.Context
		c := nested(cacheaside.Config[int, int]{TTL: time.Second, Jitter: cacheaside.None, StaleWhileRevalidate: time.Hour},
			func(ctx context.Context, c *cacheaside.Cache[int, int], key int) (int, error) {
				late = ctx
				if loads.Add(1) == 1 {
					return 1, nil
				}
				old, err := c.Get(ctx, key) // refreshes itself
				return old + 1, err
			})
		defer c.Close()
		require.Equal(t, 1, mustGet(t, c, 1))
		time.Sleep(2 * time.Second)
		require.Equal(t, 1, mustGet(t, c, 1))
		synctest.Wait()
		require.Equal(t, 2, mustGet(t, c, 1))
		require.NoError(t, c.Invalidate(t.Context(), 1))
		loads.Store(0)
		v, err := c.Get(context.WithoutCancel(late), 1)
		require.NoError(t, err)
		require.Equal(t, 1, v)
	})
}

func TestLoadOfAnotherCacheWithOtherKeys(t *testing.T) {
	names := newCache(t, cacheaside.Config[string, int]{
		Load: func(context.Context, string) (int, error) { return 1, nil },
	})
	c := newCache(t, cacheaside.Config[int, int]{
		Load: func(ctx context.Context, _ int) (int, error) { return names.Get(ctx, "1") },
	})
	require.Equal(t, 1, mustGet(t, c, 1))
}

// With FinishLoads, callers whose timeout is shorter than a load do not restart it each time.
func TestFinishLoadsWithoutCallers(t *testing.T) {
	for where, capacity := range map[string]int{"memory": 0, "Store only": -1} {
		for _, finish := range []bool{false, true} {
			t.Run(where, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var loads, canceled atomic.Int32
					cfg := cacheaside.Config[int, int]{
						FinishLoads: finish,
						Load: func(ctx context.Context, key int) (int, error) {
							loads.Add(1)
							select {
							case <-time.After(150 * time.Millisecond):
								return key, nil
							case <-ctx.Done():
								canceled.Add(1)
								return 0, ctx.Err()
							}
						},
					}
					if capacity < 0 {
						cfg.Store = unwatched{newFakeStore().connect()}
					}
					c := newCache(t, cfg)
					answers := 0
					for range 20 {
						ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
						if _, err := c.Get(ctx, 1); err == nil {
							answers++
						}
						cancel()
					}
					if !finish {
						require.Zero(t, answers)
						return
					}
					require.Equal(t, 19, answers)
					require.Equal(t, int32(1), loads.Load())
					require.Zero(t, canceled.Load())
				})
			})
		}
	}
}

// The result of a load that was invalidated, or that runs during a write, is not cached. So the load is canceled with
// its last caller, even with FinishLoads.
func TestFinishLoadsCancelsUncachedLoad(t *testing.T) {
	for name, fenced := range map[string]bool{"overtaken": false, "during a write": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				canceled := make(chan struct{})
				store := newFakeStore().connect()
				c := newCache(t, cacheaside.Config[int, int]{FinishLoads: true, Store: store,
					Load: func(ctx context.Context, key int) (int, error) {
						<-ctx.Done()
						close(canceled)
						return 0, ctx.Err()
					}})
				synctest.Wait()
				ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
				defer cancel()
				if fenced {
					_, err := store.Fence(t.Context(), "1", "of another process")
					require.NoError(t, err)
				} else {
					go func() {
						time.Sleep(time.Second)
						_ = c.Invalidate(t.Context(), 1)
					}()
				}
				begun := time.Now()
				_, err := c.Get(ctx, 1)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				<-canceled
				require.Equal(t, 2*time.Second, time.Since(begun))
			})
		})
	}
}

func TestFinishLoadsEndsAtTimeoutAndClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ended atomic.Int32
		c := cacheaside.New(cacheaside.Config[int, int]{FinishLoads: true, LoadTimeout: time.Second,
			Load: func(ctx context.Context, key int) (int, error) {
				<-ctx.Done()
				ended.Add(1)
				return 0, ctx.Err()
			}})
		for key := range 2 {
			ctx, cancel := context.WithTimeout(t.Context(), 600*time.Millisecond)
			_, err := c.Get(ctx, key)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			cancel()
		}
		synctest.Wait()
		require.Equal(t, int32(1), ended.Load())
		begun := time.Now()
		require.NoError(t, c.Close())
		require.Equal(t, int32(2), ended.Load())
		require.Zero(t, time.Since(begun))
	})
}
