// The tests in this file need unexported names.

package cacheaside

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside/internal/entry"
)

// together calls any two of calls at once. The race detector sees one that takes no lock:
// nothing else puts the two goroutines in order.
func together(calls ...func()) {
	for i, one := range calls {
		for _, other := range calls[:i+1] {
			var both sync.WaitGroup
			for _, call := range []func(){one, other} {
				both.Go(func() {
					for range 20 {
						call()
					}
				})
			}
			both.Wait()
		}
	}
}

func TestSlotsUnderStress(t *testing.T) {
	var s slots
	gone := make(chan struct{})
	close(gone)
	together(
		func() { s.setLimit(1) },
		func() {
			if s.tryTake() {
				s.put()
			}
		},
		func() {
			if s.take(gone) {
				s.put()
			}
		},
		func() { s.inUse() },
	)
	require.Zero(t, s.inUse())
}

// The goroutine of a load offers an old value while its Load and its callers look for one.
func TestOldValueUnderStress(t *testing.T) {
	ctx, end := context.WithCancel(t.Context())
	c := New(Config[int, int]{TTL: time.Hour, Load: func(ctx context.Context, _ int) (int, error) {
		<-ctx.Done()
		return 0, ctx.Err()
	}})
	defer c.Close()
	defer end()
	c.memory.Remembers.Store(false) // so that the old value is that of the flight
	s := c.shard(1)
	s.mu.Lock()
	task := c.launch(ctx, s, 1, "1", time.Now(), nil)
	s.mu.Unlock()
	go c.fly(task)
	together(
		func() { c.offer(task, &entry.Entry[int]{Keep: time.Hour}, 0) },
		func() { task.previous() },
		func() { c.standby(&task.Flight, 0) },
	)
}
