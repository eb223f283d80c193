package adaptive_test

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
	"github.com/go-resilience/resilience/bulkhead/adaptive"
)

// A server whose capacity changes while the calls go on.
func TestAdaptiveFollowsAServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		workers := bulkhead.New(bulkhead.Config{Limit: 20, MaxWait: -1})
		var served atomic.Int64
		serve := func(context.Context) error {
			takes := time.Duration(10+served.Add(7)%20) * time.Millisecond
			return workers.Do(t.Context(), taking(takes, nil))
		}

		b := adaptive.New(adaptive.Config{Initial: 4})
		ctx, stop := context.WithCancel(t.Context())
		var clients sync.WaitGroup
		for range 80 {
			clients.Go(func() {
				for ctx.Err() == nil {
					if errors.Is(b.Do(ctx, serve), bulkhead.ErrFull) {
						time.Sleep(10 * time.Millisecond)
					}
				}
			})
		}
		until := func(ok func(limit int) bool, what string) {
			start := time.Now()
			for s := b.Stats(); s.Probing || !ok(s.Limit); s = b.Stats() {
				time.Sleep(time.Millisecond)
				require.Less(t, time.Since(start), 10*time.Second, "%s: %d", what, s.Limit)
			}
		}
		until(func(l int) bool { return l >= 18 }, "grows to the capacity of 20")
		require.InDelta(t, 20*time.Millisecond, b.Stats().Base, float64(4*time.Millisecond))
		require.NoError(t, setSlots(workers, 5))
		until(func(l int) bool { return l <= 11 }, "shrinks to the capacity of 5")
		require.NoError(t, setSlots(workers, 20))
		until(func(l int) bool { return l >= 18 }, "grows again")
		stop()
		clients.Wait()
		requireIdle(t, b)
	})
}

// setSlots changes the limit of b.
func setSlots(b *bulkhead.Bulkhead, n int) error {
	return b.Update(func(c *bulkhead.Config) { c.Limit = n })
}
