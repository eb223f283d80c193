package cacheaside_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/retry"
)

// A load may outlast the call that started it, and a refresh always does. A slot in its Middleware is released when the
// load ends, not when that call's response has been read.
func TestLoadIsSeparateWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slots := bulkhead.New(bulkhead.Config{Limit: 1})
		c := newCache(t, cacheaside.Config[int, int]{
			TTL: time.Minute, StaleWhileRevalidate: time.Hour, Jitter: cacheaside.None,
			Middleware: slots.Wrap,
			Load: func(ctx context.Context, _ int) (int, error) {
				if linger.LimitOf(ctx) != nil {
					t.Error("under the timeout of its caller")
				}
				time.Sleep(time.Second)
				return 0, nil
			},
		})
		ctx, work := linger.Begin(t.Context())
		_, err := linger.Timed(ctx, time.Hour, errors.New("passed"), func(ctx context.Context) error {
			_, err := c.Get(ctx, 1)
			require.NoError(t, err)
			time.Sleep(2 * time.Minute)
			_, err = c.Get(ctx, 1)
			synctest.Wait()
			require.Equal(t, 1, slots.Stats().InFlight, "a refresh")
			work.Continue()
			return err
		})
		require.NoError(t, err)
		time.Sleep(2 * time.Second)
		require.Equal(t, 0, slots.Stats().InFlight)
		work.End(nil)
	})
}

// A refresh without callers times out like any other load.
func TestHangingRefreshIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log eventLog
		hang := false
		var hanging atomic.Int64
		c := newCache(t, cacheaside.Config[int, int]{
			TTL: time.Minute, Jitter: cacheaside.None, StaleWhileRevalidate: time.Hour, LoadTimeout: 10 * time.Second,
			ErrorPause: 5 * time.Second,
			Load: func(context.Context, int) (int, error) {
				if hang {
					hanging.Add(1)
					time.Sleep(time.Hour)
				}
				return 1, nil
			},
		})
		c.Observe(log.add)
		mustGet(t, c, 1)
		hang = true
		time.Sleep(time.Minute)
		mustGet(t, c, 1)
		time.Sleep(10*time.Second - 1)
		require.Zero(t, log.count(cacheaside.EventLoadFailed))
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		require.Equal(t, 1, log.count(cacheaside.EventLoadFailed))
		mustGet(t, c, 1)
		synctest.Wait()
		require.Equal(t, int64(1), hanging.Load(), "not retried immediately")
		time.Sleep(5 * time.Second)
		mustGet(t, c, 1)
		synctest.Wait()
		require.Equal(t, int64(2), hanging.Load())
	})
}

// If the load already has its result, a caller that cancels does not cancel the load.
func TestCallerCancelsDuringObserver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		c := newCache(t, cacheaside.Config[int, int]{
			Load: func(context.Context, int) (int, error) { return 1, nil },
		})
		c.Observe(func(context.Context, cacheaside.Event) { <-release })
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := c.Get(ctx, 1)
			require.ErrorIs(t, err, context.Canceled)
		})
		synctest.Wait()
		cancel()
		wg.Wait()
		require.Equal(t, int64(1), c.Stats().Loaded)
		require.Zero(t, c.Stats().Canceled)
		close(release)
		v, err := c.Get(t.Context(), 1)
		require.NoError(t, err)
		require.Equal(t, 1, v)
		require.Equal(t, int64(1), c.Stats().Hits)
	})
}

// With FinishLoads, callers whose timeout is shorter than a load do not restart it each time.
func TestFinishLoadsWithoutCallers(t *testing.T) {
	for where, capacity := range map[string]int{"memory": 0, "Store only": -1} {
		for _, finish := range []bool{false, true} {
			bubble(t, where, func(t *testing.T) {
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
		}
	}
}

// The result of a load that was invalidated, or that runs during a write, is not cached. So the load is canceled with
// its last caller, even with FinishLoads.
func TestFinishLoadsCancelsUncachedLoad(t *testing.T) {
	for name, fenced := range map[string]bool{"overtaken": false, "during a write": true} {
		bubble(t, name, func(t *testing.T) {
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

// A load is retried whether or not the caller that started it has a Retrier.
func TestSharedLoadUnderARetrierIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var loads atomic.Int64
		retries := retry.New(retry.Config{Attempts: 3, Backoff: retry.Constant(time.Millisecond)})
		c := newCache(t, cacheaside.Config[int, int64]{
			Middleware: retries.Wrap,
			Load: func(context.Context, int) (int64, error) {
				time.Sleep(10 * time.Millisecond)
				if n := loads.Add(1); n > 1 {
					return n, nil
				}
				return 0, errLoad
			},
		})
		outer := retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(time.Hour)})
		go func() {
			_ = outer.Do(t.Context(), func(ctx context.Context) error { _, err := c.Get(ctx, 1); return err })
		}()
		time.Sleep(time.Millisecond)
		v, err := c.Get(t.Context(), 1)
		require.NoError(t, err)
		require.EqualValues(t, 2, v)
		require.EqualValues(t, 2, loads.Load())
	})
}
