package cacheaside_test

import (
	"context"
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// nested is a Cache whose Load may use the Cache.
func nested(cfg cacheaside.Config[int, int], load func(ctx context.Context, c *cacheaside.Cache[int, int], key int) (int, error)) *cacheaside.Cache[int, int] {
	var c *cacheaside.Cache[int, int]
	cfg.Load = func(ctx context.Context, key int) (int, error) { return load(ctx, c, key) }
	c = cacheaside.New(cfg)
	return c
}

// A load never waits for itself until LoadTimeout: the Get that would close the circle
// fails at once.
func TestGetThatWaitsForItsOwnLoadFailsAtOnce(t *testing.T) {
	for name, next := range map[string]map[int]int{
		"its own key":          {1: 1},
		"through another key":  {1: 2, 2: 1},
		"through several keys": {1: 2, 2: 3, 3: 4, 4: 2},
	} {
		for where, cfg := range map[string]func() cacheaside.Config[int, int]{
			"in memory": func() cacheaside.Config[int, int] { return cacheaside.Config[int, int]{} },
			"with a Store": func() cacheaside.Config[int, int] {
				return cacheaside.Config[int, int]{Store: newFakeStore().connect()}
			},
			"in a Store alone": func() cacheaside.Config[int, int] {
				return cacheaside.Config[int, int]{Store: newFakeStore().connect(), Capacity: -1}
			},
		} {
			t.Run(name+" "+where, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					c := nested(cfg(), func(ctx context.Context, c *cacheaside.Cache[int, int], key int) (int, error) {
						return c.Get(ctx, next[key])
					})
					defer c.Close()
					synctest.Wait()
					begun := time.Now()
					_, err := c.Get(t.Context(), 1)
					require.ErrorIs(t, err, cacheaside.ErrRecursive)
					var r interface{ Retryable() bool }
					require.ErrorAs(t, err, &r)
					require.False(t, r.Retryable())
					require.Less(t, time.Since(begun), time.Second)
					require.Zero(t, c.Stats().Loading)
				})
			})
		}
	}
}

func TestLoadsInACircleFail(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := nested(cacheaside.Config[int, int]{}, func(ctx context.Context, c *cacheaside.Cache[int, int], key int) (int, error) {
			time.Sleep(time.Second) // both run when they ask for each other
			_, err := c.Get(ctx, 3-key)
			if errors.Is(err, cacheaside.ErrRecursive) {
				return key, nil
			}
			return key, err
		})
		defer c.Close()
		begun := time.Now()
		var wg sync.WaitGroup
		for key := 1; key <= 2; key++ {
			wg.Go(func() {
				v, err := c.Get(t.Context(), key)
				if err != nil || v != key {
					t.Errorf("%d: %d, %v", key, v, err)
				}
			})
		}
		wg.Wait()
		require.Equal(t, time.Second, time.Since(begun))
	})
}

func TestLoadManyThatGetsItsOwnKeyFailsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c *cacheaside.Cache[int, int]
		c = cacheaside.New(cacheaside.Config[int, int]{
			Load:     identity,
			LoadMany: func(ctx context.Context, keys []int) (map[int]int, error) { return c.GetMany(ctx, keys[1:]) },
		})
		defer c.Close()
		begun := time.Now()
		_, err := c.GetMany(t.Context(), []int{1, 2, 3})
		require.ErrorIs(t, err, cacheaside.ErrRecursive)
		require.Zero(t, time.Since(begun))
	})
}

// A circle may lead through another Cache.
func TestCircleThroughTwoCachesIsSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var a, b *cacheaside.Cache[int, int]
		a = cacheaside.New(cacheaside.Config[int, int]{Load: func(ctx context.Context, key int) (int, error) { return b.Get(ctx, key) }})
		defer a.Close()
		b = cacheaside.New(cacheaside.Config[int, int]{Load: func(ctx context.Context, key int) (int, error) { return a.Get(ctx, key) }})
		defer b.Close()
		begun := time.Now()
		_, err := a.Get(t.Context(), 1)
		require.ErrorIs(t, err, cacheaside.ErrRecursive)
		require.Zero(t, time.Since(begun))
	})
}

// A recursion that never meets the same key again ends as well.
func TestEndlessRecursionEnds(t *testing.T) {
	t.Run("other keys", func(t *testing.T) {
		c := nested(cacheaside.Config[int, int]{}, func(ctx context.Context, c *cacheaside.Cache[int, int], key int) (int, error) {
			return c.Get(ctx, key+1)
		})
		defer c.Close()
		_, err := c.Get(t.Context(), 1)
		require.ErrorIs(t, err, cacheaside.ErrRecursive)
	})
	t.Run("a key that equals none", func(t *testing.T) {
		var c *cacheaside.Cache[float64, int]
		c = cacheaside.New(cacheaside.Config[float64, int]{
			Load: func(ctx context.Context, key float64) (int, error) { return c.Get(ctx, key) },
		})
		defer c.Close()
		_, err := c.Get(t.Context(), math.NaN())
		require.ErrorIs(t, err, cacheaside.ErrRecursive)
	})
}

// A Get that is served without a wait closes no circle, and neither does one after the
// load.
func TestGetOfOwnKeySucceedsWithoutWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var loads atomic.Int32
		var late context.Context
		c := nested(cacheaside.Config[int, int]{TTL: time.Second, Jitter: -1, Stale: time.Hour},
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

// A load that waits for another gives its slot to it, even if another call began that
// load, and even with one slot.
func TestLoadsThatNeedOthersDoNotUseUpLoads(t *testing.T) {
	for name, need := range map[string]func(ctx context.Context, c *cacheaside.Cache[int, int], key int) error{
		"Get": func(ctx context.Context, c *cacheaside.Cache[int, int], key int) error {
			_, err := c.Get(ctx, key)
			return err
		},
		"GetMany": func(ctx context.Context, c *cacheaside.Cache[int, int], key int) error {
			_, err := c.GetMany(ctx, []int{key, key + 10_000})
			return err
		},
		"several Gets at once": func(ctx context.Context, c *cacheaside.Cache[int, int], key int) error {
			errs := make(chan error)
			for i := range 3 {
				go func() {
					_, err := c.Get(ctx, key+i*10_000)
					errs <- err
				}()
			}
			return errors.Join(<-errs, <-errs, <-errs)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const slots = 4
				var running, most atomic.Int32
				c := nested(cacheaside.Config[int, int]{Loads: slots, LoadTimeout: time.Minute},
					func(ctx context.Context, c *cacheaside.Cache[int, int], key int) (int, error) {
						work := func() {
							n := running.Add(1)
							for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
							}
							time.Sleep(10 * time.Millisecond)
							running.Add(-1)
						}
						work()
						if key >= 1000 {
							return key, nil
						}
						if err := need(ctx, c, 1000+key%30); err != nil {
							return 0, err
						}
						work()
						return key, nil
					})
				defer c.Close()
				begun := time.Now()
				var wg sync.WaitGroup
				for key := range 100 {
					wg.Go(func() {
						if _, err := c.Get(t.Context(), key); err != nil {
							t.Errorf("%d: %v", key, err)
						}
					})
				}
				wg.Wait()
				require.Less(t, time.Since(begun), 2*time.Second)
				require.Equal(t, int32(slots), most.Load())
				synctest.Wait()
				require.Zero(t, c.Stats().Loading)
				require.Zero(t, c.Tracked())
			})
		})
	}
}

func TestLoadThatIsCanceledWhileItWaitsForAnotherGivesItsSlotBackOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := nested(cacheaside.Config[int, int]{Loads: 1}, func(ctx context.Context, c *cacheaside.Cache[int, int], key int) (int, error) {
			if key > 0 {
				return c.Get(ctx, key-1)
			}
			<-ctx.Done()
			return 0, ctx.Err()
		})
		defer c.Close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := c.Get(ctx, 3)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		synctest.Wait()
		require.Zero(t, c.Stats().Loading)
	})
}

// A load that ignores its ctx keeps its slot after its callers have left. One key must
// not take all slots.
func TestAbandonedLoadsOfOneKeyLeaveSlotsToOthers(t *testing.T) {
	for name, timeout := range map[string]time.Duration{"the callers leave": time.Hour, "the load times out": 100 * time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				hang := make(chan struct{})
				var hanging atomic.Int32
				c := cacheaside.New(cacheaside.Config[int, int]{
					Loads: 4, LoadTimeout: timeout,
					Load: func(_ context.Context, key int) (int, error) {
						if key == 1 {
							hanging.Add(1)
							<-hang
						}
						return key, nil
					},
				})
				for range 20 {
					ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
					_, err := c.Get(ctx, 1)
					require.ErrorIs(t, err, context.DeadlineExceeded)
					cancel()
				}
				require.Equal(t, int32(2), hanging.Load())
				require.Equal(t, 2, mustGet(t, c, 2))
				close(hang)
				synctest.Wait()
				require.Equal(t, 1, mustGet(t, c, 1))
				require.NoError(t, c.Close())
				require.Zero(t, c.Tracked())
			})
		})
	}
}

// The next load of the key begins as soon as one of its abandoned loads has ended.
func TestLoadBeginsWhenAnAbandonedOneHasEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := make(chan struct{})
		var loads atomic.Int32
		c := cacheaside.New(cacheaside.Config[int, int]{Load: func(context.Context, int) (int, error) {
			if loads.Add(1) <= 2 {
				<-hang
			}
			return 7, nil
		}})
		defer c.Close()
		for range 2 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			_, err := c.Get(ctx, 1)
			require.Error(t, err)
			cancel()
		}
		go func() {
			time.Sleep(time.Second)
			hang <- struct{}{}
		}()
		begun := time.Now()
		require.Equal(t, 7, mustGet(t, c, 1))
		require.Equal(t, time.Second, time.Since(begun))
		close(hang)
	})
}

// With Finish, callers less patient than a load do not start it over each time.
func TestFinishKeepsALoadWhoseCallersHaveLeft(t *testing.T) {
	for where, capacity := range map[string]int{"in memory": 0, "in a Store alone": -1} {
		for _, finish := range []bool{false, true} {
			t.Run(where, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var loads, canceled atomic.Int32
					cfg := cacheaside.Config[int, int]{
						Finish: finish, Capacity: capacity,
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
						cfg.Store = newFakeStore().connect()
					}
					c := cacheaside.New(cfg)
					defer c.Close()
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

// The result of an overtaken load has no use: the load does not go on.
func TestFinishCancelsALoadThatWasOvertaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		canceled := make(chan struct{})
		c := cacheaside.New(cacheaside.Config[int, int]{Finish: true, Load: func(ctx context.Context, key int) (int, error) {
			<-ctx.Done()
			close(canceled)
			return 0, ctx.Err()
		}})
		defer c.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		go func() {
			time.Sleep(time.Second)
			_ = c.Invalidate(t.Context(), 1)
		}()
		begun := time.Now()
		_, err := c.Get(ctx, 1)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		<-canceled
		require.Equal(t, 2*time.Second, time.Since(begun))
	})
}

func TestFinishEndsAtLoadTimeoutAndWithClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ended atomic.Int32
		c := cacheaside.New(cacheaside.Config[int, int]{Finish: true, LoadTimeout: time.Second, Load: func(ctx context.Context, key int) (int, error) {
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
