package cacheaside_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/internal/linger"
)

// loadWith runs look as a load with a LoadTimeout of one second, on behalf of ctx.
func loadWith(ctx context.Context, look func(context.Context)) error {
	c := cacheaside.New(cacheaside.Config[int, int]{
		LoadTimeout: time.Second,
		Load: func(ctx context.Context, _ int) (int, error) {
			look(ctx)
			return 0, nil
		},
	})
	_, err := c.Get(ctx, 1)
	_ = c.Close() // after look has returned
	return err
}

// The ctx of a load behaves like any ctx with a deadline, whichever of its methods is called first.
func TestLoadContextHasDeadline(t *testing.T) {
	for name, first := range map[string]func(context.Context){
		"Done called early": func(ctx context.Context) { ctx.Done() },
		"Done called late":  func(context.Context) {},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				err := loadWith(t.Context(), func(ctx context.Context) {
					first(ctx)
					deadline, ok := ctx.Deadline()
					if !ok || time.Until(deadline) != time.Second || ctx.Err() != nil || context.Cause(ctx) != nil {
						t.Errorf("at first: %v, %v, %v", time.Until(deadline), ok, ctx.Err())
					}
					time.Sleep(time.Second - 1)
					if ctx.Err() != nil {
						t.Errorf("before its end: %v", ctx.Err())
					}
					time.Sleep(time.Nanosecond)
					synctest.Wait()
					for range 2 { // the second time after Done was called
						if ctx.Err() != context.DeadlineExceeded || context.Cause(ctx) != context.DeadlineExceeded {
							t.Errorf("at its end: %v, %v", ctx.Err(), context.Cause(ctx))
						}
						<-ctx.Done()
					}
				})
				require.ErrorIs(t, err, context.DeadlineExceeded)
			})
		})
		t.Run(name+", canceled", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				gone := errors.New("gone")
				caller, cancel := context.WithCancelCause(t.Context())
				err := loadWith(caller, func(ctx context.Context) {
					first(ctx)
					cancel(gone)
					synctest.Wait()
					time.Sleep(2 * time.Second) // its deadline does not change what ended it
					for range 2 {
						if ctx.Err() != context.Canceled || context.Cause(ctx) != context.Canceled {
							t.Errorf("%v, %v", ctx.Err(), context.Cause(ctx))
						}
						<-ctx.Done()
					}
				})
				require.ErrorIs(t, err, gone)
			})
		})
		t.Run(name+", and the load returns", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var of context.Context
				require.NoError(t, loadWith(t.Context(), func(ctx context.Context) {
					first(ctx)
					of = ctx
				}))
				require.Equal(t, context.Canceled, of.Err())
				<-of.Done()
			})
		})
	}
}

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

// Contexts derived from the ctx of a load end with it, and cost no goroutine.
func TestChildrenOfTheContextOfALoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		caller, cancel := context.WithCancel(t.Context())
		_ = loadWith(caller, func(ctx context.Context) {
			before := runtime.NumGoroutine()
			var children []context.Context
			for range 100 {
				child, cancel := context.WithTimeout(ctx, time.Hour)
				defer cancel()
				children = append(children, child)
			}
			if n := runtime.NumGoroutine() - before; n > 0 {
				t.Errorf("%d goroutines for 100 children", n)
			}
			cancel()
			for _, child := range children {
				<-child.Done()
				if child.Err() != context.Canceled {
					t.Errorf("%v", child.Err())
				}
			}
		})
	})
}

// Done and Value may be called concurrently while the load is being canceled. Done must not return a channel that is
// never closed.
func TestDoneDuringCancel(t *testing.T) {
	for range 2000 {
		caller, cancel := context.WithCancel(t.Context())
		_ = loadWith(caller, func(ctx context.Context) {
			var wg sync.WaitGroup
			for range 2 {
				wg.Go(func() {
					runtime.Gosched()
					ctx.Value(0)
					<-ctx.Done()
				})
			}
			cancel()
			wg.Wait()
		})
	}
}

// Every flight ends at its own time, regardless of their number and order.
func TestEachLoadTimesOutOnTime(t *testing.T) {
	for _, capacity := range []int{0, -1} {
		synctest.Test(t, func(t *testing.T) {
			const n = 500
			var log eventLog
			cfg := cacheaside.Config[int, int]{
				LoadTimeout: 10 * time.Second,
				Load: func(_ context.Context, k int) (int, error) {
					if k%3 == 0 {
						time.Sleep(time.Second)
						return k, nil
					}
					time.Sleep(time.Minute) // ignores its ctx
					return k, nil
				},
			}
			if capacity < 0 {
				cfg.Store = unwatched{newFakeStore().connect()}
			}
			c := cacheaside.New(cfg)
			c.Observe(log.add)
			var wg sync.WaitGroup
			for k := range n {
				time.Sleep(time.Duration(k%7) * 100 * time.Millisecond)
				wg.Go(func() {
					begun := time.Now()
					_, err := c.Get(t.Context(), k)
					took := time.Since(begun)
					switch {
					case k%3 == 0 && (err != nil || took != time.Second):
						t.Errorf("%d: %v after %v", k, err, took)
					case k%3 != 0 && (!errors.Is(err, context.DeadlineExceeded) || took != 10*time.Second):
						t.Errorf("%d: %v after %v", k, err, took)
					}
				})
			}
			wg.Wait()
			require.NoError(t, c.Close())
			require.Equal(t, n-(n+2)/3, log.count(cacheaside.EventLoadFailed))
			require.Equal(t, int64(n-(n+2)/3), c.Stats().TimedOut)
		})
	}
}

// A load that ignores its ctx may return after a load that timed out later. The Cache refers to neither of them then.
func TestLoadsReturnInAnyOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCache(t, cacheaside.Config[int, int]{LoadTimeout: 10 * time.Second,
			Load: func(_ context.Context, k int) (int, error) {
				time.Sleep(time.Duration(k) * time.Second)
				return k, nil
			}})
		go func() { _, _ = c.Get(t.Context(), 15) }()
		time.Sleep(time.Second + 1)
		go mustGet(t, c, 9) // returns as the other one has timed out
		time.Sleep(time.Minute)
		require.Zero(t, c.Tracked())
		require.EqualValues(t, 1, c.Stats().TimedOut)
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

// An observer that does not return delays only its own goroutine.
func TestHangingObserverDelaysNoAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 500 // more than one per shard
		release := make(chan struct{})
		c := cacheaside.New(cacheaside.Config[int, int]{
			LoadTimeout: 10 * time.Second,
			Load:        func(context.Context, int) (int, error) { time.Sleep(time.Minute); return 0, nil },
		})
		c.Observe(func(context.Context, cacheaside.Event) { <-release })
		begun := time.Now()
		var wg sync.WaitGroup
		for k := range n {
			wg.Go(func() {
				if _, err := c.Get(t.Context(), k); !errors.Is(err, context.DeadlineExceeded) ||
					time.Since(begun) != 10*time.Second {
					t.Errorf("%d: %v after %v", k, err, time.Since(begun))
				}
			})
		}
		wg.Wait()
		close(release)
		require.NoError(t, c.Close())
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
