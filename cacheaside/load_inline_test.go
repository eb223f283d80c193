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

	"github.com/go-resilience/resilience/cacheaside"
)

// heeds is a load of one second that respects its ctx.
func heeds(loads *atomic.Int32) func(context.Context, int) (int, error) {
	return func(ctx context.Context, key int) (int, error) {
		loads.Add(1)
		select {
		case <-time.After(time.Second):
			return key, nil
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

func TestInlineLoadsOnceForAllCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var loads atomic.Int32
		c := cacheaside.New(cacheaside.Config[int, int]{Inline: true, Load: heeds(&loads)})
		defer c.Close()
		var wg sync.WaitGroup
		for range 1000 {
			wg.Go(func() {
				if v, err := c.Get(t.Context(), 7); v != 7 || err != nil {
					t.Errorf("%d, %v", v, err)
				}
			})
		}
		wg.Wait()
		require.Equal(t, int32(1), loads.Load())
	})
}

// The caller that loads stays until its load returns. The load goes on if it has other
// callers.
func TestInlineCallerWhoseCtxEnds(t *testing.T) {
	for name, c := range map[string]struct {
		other, finish bool
		stays         time.Duration
	}{
		"alone":                   {stays: 100 * time.Millisecond},
		"while another waits":     {other: true, stays: time.Second},
		"of a load that finishes": {finish: true, stays: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var loads atomic.Int32
				cache := cacheaside.New(cacheaside.Config[int, int]{Inline: true, Finish: c.finish, Load: heeds(&loads)})
				defer cache.Close()
				cause := errors.New("gone")
				ctx, cancel := context.WithTimeoutCause(t.Context(), 100*time.Millisecond, cause)
				defer cancel()
				var wg sync.WaitGroup
				if c.other {
					wg.Go(func() {
						time.Sleep(time.Millisecond)
						if v, err := cache.Get(t.Context(), 7); v != 7 || err != nil {
							t.Errorf("the other: %d, %v", v, err)
						}
					})
				}
				begun := time.Now()
				_, err := cache.Get(ctx, 7)
				require.ErrorIs(t, err, cause)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.Equal(t, c.stays, time.Since(begun))
				wg.Wait()
				require.Equal(t, 7, mustGet(t, cache, 7))
				if c.other || c.finish {
					require.Equal(t, int32(1), loads.Load())
				}
			})
		})
	}
}

func TestInlineCallersThatJoinLeaveByTheirOwnCtx(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var loads atomic.Int32
		c := cacheaside.New(cacheaside.Config[int, int]{Inline: true, Load: heeds(&loads)})
		defer c.Close()
		var wg sync.WaitGroup
		wg.Go(func() { require.Equal(t, 7, mustGet(t, c, 7)) })
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		begun := time.Now()
		_, err := c.Get(ctx, 7)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 100*time.Millisecond, time.Since(begun))
		wg.Wait()
	})
}

func TestInlineFailuresAreThoseOfADetachedLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := nested(cacheaside.Config[int, int]{Inline: true, Loads: 1, LoadTimeout: time.Second},
			func(ctx context.Context, c *cacheaside.Cache[int, int], key int) (int, error) {
				switch key {
				case 1:
					panic("one")
				case 2:
					return 0, errLoad
				case 3:
					<-ctx.Done()
					return 0, ctx.Err()
				case 4:
					return c.Get(ctx, 5)
				case 5:
					return c.Get(ctx, 4)
				case 6:
					return c.Get(ctx, 7)
				}
				return key, nil
			})
		get := func(key int) error {
			_, err := c.Get(t.Context(), key)
			return err
		}
		require.ErrorAs(t, get(1), new(*cacheaside.PanicError))
		require.ErrorIs(t, get(2), errLoad)
		require.ErrorAs(t, get(3), new(*cacheaside.TimeoutError))
		begun := time.Now()
		require.ErrorIs(t, get(4), cacheaside.ErrRecursive)
		require.Zero(t, time.Since(begun))
		require.NoError(t, get(6))
		require.NoError(t, c.Invalidate(t.Context(), 6))
		require.Zero(t, c.Stats().Loading)
		require.NoError(t, c.Close())
		require.ErrorIs(t, get(9), cacheaside.ErrClosed)
		require.Zero(t, c.Tracked())
	})
}

// A load that must wait because two earlier ones run on without callers still ends on
// time.
func TestInlineLoadThatWaitsForLostLoadsTimesOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		end := make(chan struct{})
		var loads atomic.Int32
		c := cacheaside.New(cacheaside.Config[int, int]{Inline: true, LoadTimeout: time.Second,
			Load: func(context.Context, int) (int, error) {
				loads.Add(1)
				<-end
				return 7, nil
			},
		})
		defer c.Close()
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				_, err := c.Get(t.Context(), 7)
				if !errors.As(err, new(*cacheaside.TimeoutError)) {
					t.Errorf("a load that hangs: %v", err)
				}
			})
			time.Sleep(time.Second)
			synctest.Wait()
		}
		begun := time.Now()
		_, err := c.Get(t.Context(), 7)
		require.ErrorAs(t, err, new(*cacheaside.TimeoutError))
		require.Equal(t, time.Second, time.Since(begun))
		require.Equal(t, int32(2), loads.Load())
		close(end)
		wg.Wait()
	})
}

func TestInlineRefreshesInTheBackground(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var loads atomic.Int32
		c := cacheaside.New(cacheaside.Config[int, int]{Inline: true, TTL: time.Second, Stale: time.Hour, Load: heeds(&loads)})
		defer c.Close()
		mustGet(t, c, 7)
		time.Sleep(time.Minute)
		begun := time.Now()
		mustGet(t, c, 7)
		require.Zero(t, time.Since(begun))
		time.Sleep(2 * time.Second)
		require.Equal(t, int32(2), loads.Load())
	})
}

func TestInlineDoesNotCombineWithStoreOrSoftTimeout(t *testing.T) {
	cfg := cacheaside.Config[int, int]{Inline: true, Load: identity}
	require.NoError(t, cfg.Validate())
	cfg.StaleOnError, cfg.SoftTimeout = time.Hour, time.Second
	require.ErrorContains(t, cfg.Validate(), "Inline")
	require.ErrorContains(t, cacheaside.Config[int, int]{Inline: true, Load: identity, Store: newFakeStore().connect()}.Validate(), "Inline")
}

func TestNoStaleReadWithInlineLoads(t *testing.T) {
	violations, _ := stress(t, func(get func(int) int64) *cacheaside.Cache[int, int64] {
		return cacheaside.New(cacheaside.Config[int, int64]{Inline: true, Load: func(_ context.Context, key int) (int64, error) {
			return get(key), nil
		}})
	}, 2, 4, 4_000, func(c *cacheaside.Cache[int, int64], key int, commit func()) bool {
		commit()
		return c.Invalidate(context.Background(), key) == nil
	})
	require.Zero(t, violations)
}
