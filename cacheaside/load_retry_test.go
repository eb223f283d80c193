package cacheaside_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/retry"
)

// failsOnce is a cache under a Retrier, of which the load with the number bad fails.
func failsOnce(loads *atomic.Int64, bad int64) *cacheaside.Cache[int, int64] {
	retries := retry.New(retry.Config{Attempts: 3, Backoff: retry.Constant(time.Millisecond)})
	return cacheaside.New(cacheaside.Config[int, int64]{
		TTL: time.Minute, Jitter: cacheaside.None, StaleWhileRevalidate: time.Hour, Middleware: retries.Wrap,
		Load: func(context.Context, int) (int64, error) {
			time.Sleep(10 * time.Millisecond)
			n := loads.Add(1)
			if n == bad {
				return 0, errLoad
			}
			return n, nil
		},
	})
}

// The Retrier of the caller that starts a refresh does not see the refresh's error, so the Retrier of the cache must
// retry it.
func TestRefreshUnderARetrierIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var loads atomic.Int64
		c := failsOnce(&loads, 2)
		defer c.Close()
		_, err := c.Get(t.Context(), 1)
		require.NoError(t, err)
		time.Sleep(2 * time.Minute)
		err = retry.New(retry.Config{}).Do(t.Context(), func(ctx context.Context) error {
			v, err := c.Get(ctx, 1)
			require.EqualValues(t, 1, v, "the stale value")
			return err
		})
		require.NoError(t, err)
		time.Sleep(time.Second)
		require.EqualValues(t, 3, loads.Load())
	})
}

// A load is retried whether or not the caller that started it has a Retrier.
func TestSharedLoadUnderARetrierIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var loads atomic.Int64
		c := failsOnce(&loads, 1)
		defer c.Close()
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
