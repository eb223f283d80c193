package cacheaside_test

import (
	"context"
	"errors"
	"fmt"
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

func TestLoadOfAnotherCacheWithOtherKeys(t *testing.T) {
	names := cacheaside.New(cacheaside.Config[string, int]{Load: func(context.Context, string) (int, error) { return 1, nil }})
	defer names.Close()
	c := cacheaside.New(cacheaside.Config[int, int]{Load: func(ctx context.Context, _ int) (int, error) { return names.Get(ctx, "1") }})
	defer c.Close()
	require.Equal(t, 1, mustGet(t, c, 1))
}

// A load that had to wait for one of Loads, and has it now, is one that others may wait for:
// also behind a fence, where each load waits for the one before.
func TestLoadMayWaitForOneThatHasItsSlot(t *testing.T) {
	for _, fenced := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			var c *cacheaside.Cache[int, int]
			cfg := cacheaside.Config[int, int]{Loads: 2, Load: func(ctx context.Context, key int) (int, error) {
				switch key {
				case 1:
					return c.Get(ctx, 2)
				case 2:
					time.Sleep(3 * time.Second)
				default:
					time.Sleep(time.Duration(key) * time.Second / 10)
				}
				return key, nil
			}}
			if fenced {
				conn := newFakeStore().connect()
				conn.write = time.Hour
				_, err := conn.Fence(t.Context(), "2", "token")
				require.NoError(t, err)
				cfg.Store, cfg.Capacity = conn, -1
			}
			c = cacheaside.New(cfg)
			defer c.Close()
			for _, key := range []int{10, 15} { // all slots, one of them for a second
				go mustGet(t, c, key)
			}
			synctest.Wait()
			for range 2 {
				go mustGet(t, c, 2)
				time.Sleep(time.Millisecond)
			}
			time.Sleep(2 * time.Second)
			if fenced { // the second load of key 2 is under way
				time.Sleep(3 * time.Second)
			}
			require.Equal(t, 2, mustGet(t, c, 1))
		})
	}
}

// A load that needs another load while none of Loads is free fails at once: it has one of
// them itself.
func TestLoadThatWaitsForItsOwnSlotFailsAtOnce(t *testing.T) {
	both := func(get func(int) error) error {
		errs := make(chan error)
		for key := range 2 {
			go func() { errs <- get(100 + key) }()
		}
		return errors.Join(<-errs, <-errs)
	}
	type cache = *cacheaside.Cache[int, int]
	for name, need := range map[string]func(context.Context, cache) error{
		"Get":     func(ctx context.Context, c cache) error { _, err := c.Get(ctx, 100); return err },
		"GetMany": func(ctx context.Context, c cache) error { _, err := c.GetMany(ctx, []int{100, 101}); return err },
		"two Gets": func(ctx context.Context, c cache) error {
			return both(func(key int) error { _, err := c.Get(ctx, key); return err })
		},
		"through another Cache": func(ctx context.Context, c cache) error {
			other := cacheaside.New(cacheaside.Config[int, int]{Load: c.Get})
			defer other.Close()
			_, err := other.Get(ctx, 100)
			return err
		},
		"a load that another call began": func(ctx context.Context, c cache) error {
			go func() { _, _ = c.Get(context.Background(), 100) }()
			time.Sleep(time.Millisecond)
			_, err := c.Get(ctx, 100)
			return err
		},
	} {
		for _, many := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, LoadMany %v", name, many), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					cfg := cacheaside.Config[int, int]{Loads: 4}
					if many {
						cfg.LoadMany = func(_ context.Context, keys []int) (map[int]int, error) { return map[int]int{}, nil }
					}
					c := nested(cfg, func(ctx context.Context, c *cacheaside.Cache[int, int], key int) (int, error) {
						if key >= 100 {
							return key, nil
						}
						time.Sleep(time.Second) // all of them have begun
						return key, need(ctx, c)
					})
					defer c.Close()
					var wg sync.WaitGroup
					var failed atomic.Int32
					begun := time.Now()
					for key := range 4 {
						wg.Go(func() {
							_, err := c.Get(t.Context(), key)
							if err != nil && !errors.Is(err, cacheaside.ErrRecursive) {
								t.Error(err)
							}
							if err != nil {
								failed.Add(1)
							}
						})
					}
					wg.Wait()
					require.Positive(t, failed.Load())
					require.Less(t, time.Since(begun), 2*time.Second)
					failed.Store(0)
					require.NoError(t, c.InvalidateAll(t.Context()))
					require.Equal(t, 1, mustGet(t, c, 1), "one load leaves room for what it needs")
					synctest.Wait()
					require.Zero(t, c.Stats().Loading)
					require.Zero(t, c.Tracked())
				})
			})
		}
	}
}

// The same if the load of a fenced key follows another, or waits its turn, which waits for a
// slot.
func TestLoadThatWaitsForItsOwnSlotBehindAnotherFlightFailsAtOnce(t *testing.T) {
	for _, capacity := range []int{0, -1} {
		for _, later := range []time.Duration{0, 5 * time.Millisecond, 20 * time.Millisecond, 50 * time.Millisecond} {
			synctest.Test(t, func(t *testing.T) {
				shared := newFakeStore()
				shared.write = time.Hour
				_, err := shared.connect().Fence(t.Context(), "100", "w")
				require.NoError(t, err)
				store := slowly{Store: shared.connect(), takes: 10 * time.Millisecond}
				c := nested(cacheaside.Config[int, int]{Loads: 1, Capacity: capacity, Store: store},
					func(ctx context.Context, c *cacheaside.Cache[int, int], key int) (int, error) {
						if key == 100 {
							return key, nil
						}
						go func() { _, _ = c.Get(context.Background(), 100) }()
						time.Sleep(later)
						return c.Get(ctx, 100)
					})
				defer c.Close()
				begun := time.Now()
				_, err = c.Get(t.Context(), 1)
				require.ErrorIs(t, err, cacheaside.ErrRecursive)
				require.Less(t, time.Since(begun), time.Second)
			})
		}
	}
}

// The Get that fails so leaves the load that it waited for.
func TestLoadThatWaitedForItsOwnSlotLeavesNoLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := nested(cacheaside.Config[int, int]{Loads: 1}, func(ctx context.Context, c *cacheaside.Cache[int, int], key int) (int, error) {
			_, err := c.Get(ctx, 100)
			require.ErrorIs(t, err, cacheaside.ErrRecursive)
			synctest.Wait()
			require.Equal(t, int64(1), c.Stats().Canceled)
			return key, nil
		})
		defer c.Close()
		require.Equal(t, 1, mustGet(t, c, 1))
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
