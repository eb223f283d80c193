package bulkhead_test

import (
	"context"
	"runtime"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
)

// A queue that is never empty forgets the calls that have left it, although it remembers which
// of those behind a costly call it has looked at.
func TestCallsThatHaveLeftTheQueueAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Limit: 2, Cost: costOf, MaxWait: -1})
		end := make(chan struct{})
		defer close(end)
		start := func(ctx context.Context) {
			go func() { _ = b.Do(ctx, func(context.Context) error { <-end; return nil }) }()
			synctest.Wait()
		}
		for _, cost := range []int{1, 1, 2, 1, 1, 1, 1} {
			start(costing(t.Context(), cost))
		}
		next := func() {
			start(t.Context())
			end <- struct{}{}
			synctest.Wait()
			require.NotZero(t, b.Stats().Queued[0])
		}
		for range 10 { // the costly call, too
			next()
		}
		heap := func() int64 {
			var m runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&m)
			return int64(m.HeapAlloc)
		}
		before := heap()
		for range 20_000 {
			next()
		}
		require.Less(t, heap()-before, int64(1<<20))
	})
}
