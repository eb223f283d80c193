package notify_test

import (
	"context"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/notify"
)

func TestObserversAreCalledInOrder(t *testing.T) {
	var o notify.Observers[int]
	require.False(t, o.Any())
	var told []string
	add := func(name string) func() {
		return o.Observe(func(context.Context, int) { told = append(told, name) })
	}
	stopA := add("a")
	stopB := add("b")
	require.True(t, o.Any())
	o.Tell(t.Context(), 1)
	require.Equal(t, []string{"a", "b"}, told)

	stopA()
	stopA()
	told = nil
	o.Tell(t.Context(), 2)
	require.Equal(t, []string{"b"}, told)

	stopB()
	require.False(t, o.Any())
}

func TestObserverMayStopItself(t *testing.T) {
	var o notify.Observers[int]
	calls := 0
	var stop func()
	stop = o.Observe(func(context.Context, int) { calls++; stop() })
	o.Tell(t.Context(), 1)
	o.Tell(t.Context(), 2)
	require.Equal(t, 1, calls)
}

func TestQueueDeliversInOrder(t *testing.T) {
	var q notify.Queue
	var mu sync.Mutex // the lock of a policy
	next, running := 0, 0
	var told []int
	tell := func(_ context.Context, e any) {
		running++ // a race if two run at once
		require.Equal(t, 1, running)
		told = append(told, e.(int))
		running--
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 500 {
				mu.Lock()
				q.Add(next)
				next++
				mu.Unlock()
				q.Deliver(t.Context(), tell)
			}
		})
	}
	wg.Wait()
	q.Deliver(t.Context(), tell)
	require.Len(t, told, 4000)
	for i, e := range told {
		require.Equal(t, i, e)
	}
}

func TestQueueContinuesAfterPanic(t *testing.T) {
	var q notify.Queue
	type key struct{}
	mine := context.WithValue(t.Context(), key{}, "mine")
	var told []string
	var tell func(ctx context.Context, e any)
	tell = func(ctx context.Context, e any) {
		told = append(told, e.(string))
		switch e {
		case "boom":
			panic("boom")
		case "nested":
			require.Equal(t, "mine", ctx.Value(key{}))
			q.Add("inner")
			q.Deliver(ctx, tell) // returns: the outer call goes on with it
			require.NotContains(t, told, "inner")
		}
	}
	q.Add("boom")
	q.AddUnder(mine, "nested")
	require.Panics(t, func() { q.Deliver(t.Context(), tell) })
	q.Deliver(t.Context(), tell)
	require.Equal(t, []string{"boom", "nested", "inner"}, told)
}

// Whoever delivers goes on with an event that was added meanwhile, under its own ctx.
func TestQueuedEventHasAContext(t *testing.T) {
	var q notify.Queue
	told := 0
	q.Add(1)
	q.Deliver(t.Context(), func(ctx context.Context, e any) {
		told++
		require.NotNil(t, ctx)
		if e == 1 {
			q.Add(2)
		}
	})
	require.Equal(t, 2, told)
}
