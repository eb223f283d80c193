package cacheaside_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/internal/integration/faultproxy"
	"github.com/go-resilience/resilience/internal/integration/services"
)

// For every fault between a process and Redis, the calls of this process return the current value, and its values are
// cached again as soon as possible. A process that reaches Redis sees the writes made during the fault.
func TestEveryFault(t *testing.T) {
	addr := services.Redis(t)
	for _, fault := range faultproxy.Every(100 * time.Millisecond) {
		t.Run(fault.Name, func(t *testing.T) {
			t.Parallel()
			var both sync.WaitGroup
			for name, connect := range connectors {
				proxy := faultproxy.New(t, addr)
				prefix := newPrefix(t)
				near := newStore(connect(t, proxy.Addr()), prefix, impatient)
				far := newStore(connect(t, addr), prefix)
				both.Go(func() { endure(t, name, proxy, fault, near, far) })
			}
			both.Wait()
		})
	}
}

// endure has a process with a memory go through a fault, next to one without that
// reaches Redis.
func endure(t *testing.T, name string, proxy *faultproxy.Proxy, fault faultproxy.Fault, near, far cacheaside.Store) {
	var row, loads atomic.Int64
	open := func(s cacheaside.Store) *cacheaside.Cache[int, int64] {
		return cacheaside.New(cacheaside.Config[int, int64]{
			Load:  func(context.Context, int) (int64, error) { loads.Add(1); return row.Load(), nil },
			Store: s, ErrorPause: 50 * time.Millisecond,
		})
	}
	c, other := open(near), open(far)
	defer other.Close()
	defer c.Close()
	slowest := time.Duration(0)
	timed := func(call func()) {
		began := time.Now()
		call()
		slowest = max(slowest, time.Since(began))
	}
	get := func(c *cacheaside.Cache[int, int64], key int) {
		timed(func() {
			v, _, err := c.GetWith(t.Context(), key, cacheaside.GetOptions{SkipMemory: c == other})
			assert.NoError(t, err, name)
			assert.Equal(t, row.Load(), v, name)
		})
	}
	kept := func() bool {
		get(c, 1)
		before := loads.Load()
		get(c, 1)
		return loads.Load() == before
	}
	assert.Eventually(t, kept, time.Minute, 10*time.Millisecond, name)
	fault.Begin(proxy)
	for range 10 {
		timed(func() {
			err := c.Write(t.Context(), 1, func(context.Context) error { row.Add(1); return nil })
			assert.NoError(t, cacheaside.WriteError(err), name)
		})
		get(c, 1)
	}
	proxy.Heal()
	told := func() bool { return c.Stats().PendingInvalidations == 0 }
	assert.Eventually(t, told, time.Minute, 10*time.Millisecond, name)
	get(other, 1)
	assert.Eventually(t, kept, time.Minute, 10*time.Millisecond, name)
	get(other, 1)
	assert.Less(t, slowest, 30*time.Second, "%s: a call waits for a few timeouts of Redis at most", name)
}
