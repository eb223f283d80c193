package bulkhead_test

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
)

func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// A queue that is never empty forgets the calls that have left it.
func TestDepartedWaitersAreForgotten(t *testing.T) {
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
		before := heap()
		for range 20_000 {
			next()
		}
		require.Less(t, heap()-before, int64(1<<20))
	})
}

// Nor does a call that runs for long keep the shares that have waited beside its own.
func TestDepartedSharesAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Share: shareOf})
		start := func(share string) (leave func()) {
			ctx, cancel := context.WithCancel(ofShare(t.Context(), share))
			go func() { _ = b.Do(ctx, func(context.Context) error { <-ctx.Done(); return nil }) }()
			synctest.Wait()
			return func() { cancel(); synctest.Wait() }
		}
		first := start("first")
		long := start("a share of much weight")
		leave := start("0")
		first()
		before := heap()
		for i := range 20_000 {
			next := start(fmt.Sprint(i % 10))
			leave()
			leave = next
		}
		require.Equal(t, 2, bulkhead.Shares(b))
		require.Less(t, heap()-before, int64(1<<20))
		leave()
		long()
	})
}
