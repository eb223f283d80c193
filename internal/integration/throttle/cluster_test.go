package throttle_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/throttle"
)

func TestSharedOnACluster(t *testing.T) {
	c := services.NewRedisCluster(t)
	for name, connect := range clients {
		t.Run("slots are moved/"+name, func(t *testing.T) { slotsAreMoved(t, c, connect) })
	}
	t.Run("a master hangs", func(t *testing.T) { aMasterIsGone(t, c, c.Masters[2].Pause, c.Masters[2].Resume) })
	t.Run("a master is killed", func(t *testing.T) { aMasterIsGone(t, c, c.Masters[2].Kill, c.Masters[2].Start) })
}

// Each tenant is admitted what its limit allows, to the call, while its slot moves
// from master to master and two instances make calls.
func slotsAreMoved(t *testing.T, c *services.RedisCluster, connect func(testing.TB, ...string) evalFunc) {
	const burst = 200
	p := prefix(t, client(t, c.Masters[0].Addr))
	tenants := []string{"a", "b", "c", "d", "e", "f"}
	var instances [2]*throttle.Shared
	for i := range instances {
		instances[i] = throttle.NewShared(throttle.SharedConfig{
			Name: "moves", Prefix: p, Eval: connect(t, c.Addrs()...), Rate: 1.0 / 3600, Burst: burst,
			Timeout: patient, OnOutage: throttle.RefuseAll,
		})
	}
	admitted, made := make([]atomic.Int64, len(tenants)), make([]atomic.Int64, len(tenants))
	var moved atomic.Bool
	var calls sync.WaitGroup
	for i, tenant := range tenants {
		for _, s := range instances {
			calls.Go(func() {
				for !moved.Load() || made[i].Load() < 2*burst {
					if s.Allow(t.Context(), tenant) {
						admitted[i].Add(1)
					}
					made[i].Add(1)
				}
			})
		}
	}
	for range 3 {
		for i, tenant := range tenants {
			key := p + "moves/" + tenant
			c.Move(key, (c.MasterOf(key)+1)%3, func() {
				for before := made[i].Load(); made[i].Load() < before+10; { // while it moves
					runtime.Gosched()
				}
			})
		}
	}
	moved.Store(true)
	calls.Wait()
	for i, tenant := range tenants {
		require.EqualValues(t, burst, admitted[i].Load(), tenant)
	}
	for _, s := range instances {
		require.Zero(t, s.Stats().Failed)
	}
}

// While the third master is gone its tenants follow OnOutage, and those of the others
// are decided by theirs. It is asked again by itself when it is back.
func aMasterIsGone(t *testing.T, c *services.RedisCluster, off, on func()) {
	const burst = 20
	type instance struct {
		*throttle.Shared
		tenants [3][]string // of each master
		outages chan error
	}
	instances := map[string]instance{}
	for name, connect := range clients {
		outages := make(chan error, 1000)
		p := prefix(t, client(t, c.Masters[0].Addr))
		s := instance{throttle.NewShared(throttle.SharedConfig{
			Name: "gone", Prefix: p, Eval: connect(t, c.Addrs()...), Rate: 1.0 / 3600, Burst: burst,
			// Long, so that a live master does not miss it on a busy machine.
			Timeout: 3 * time.Second, RetryEvery: 500 * time.Millisecond, OnOutage: throttle.RefuseAll,
		}), [3][]string{}, outages}
		s.Observe(func(_ context.Context, e throttle.Event) {
			if e.Kind == throttle.EventOutageBegan {
				outages <- e.Err
			}
		})
		for i := 0; len(s.tenants[0]) < 3 || len(s.tenants[1]) < 3 || len(s.tenants[2]) < 1; i++ {
			tenant := fmt.Sprint("tenant", i)
			master := c.MasterOf(p + "gone/" + tenant)
			s.tenants[master] = append(s.tenants[master], tenant)
		}
		for _, of := range s.tenants {
			require.NoError(t, s.Wait(t.Context(), of[0]))
		}
		instances[name] = s
	}
	// all runs a test of each instance, and returns when all have ended.
	all := func(what string, test func(t *testing.T, s instance)) {
		t.Run(what, func(t *testing.T) {
			for name, s := range instances {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					test(t, s)
				})
			}
		})
	}
	back := sync.OnceFunc(on)
	t.Cleanup(back)
	off()
	all("gone", func(t *testing.T, s instance) {
		gone := s.tenants[2][0]
		for len(s.outages) == 0 { // one answer that is late is no outage
			require.ErrorIs(t, s.Wait(t.Context(), gone), throttle.ErrOutage)
		}
		require.Error(t, <-s.outages)
		for i := range 2 * burst {
			for _, of := range s.tenants[:2] {
				for j, tenant := range of[:3] {
					err := s.Wait(t.Context(), tenant)
					if i < burst-1 || i == burst-1 && j > 0 { // one was spent before
						require.NoError(t, err, "call %d of %s", i, tenant)
					} else {
						require.ErrorIs(t, err, throttle.ErrLimited)
						require.NotErrorIs(t, err, throttle.ErrOutage, "call %d of %s", i, tenant)
					}
				}
			}
		}
		require.Empty(t, s.outages, "no other outage")
		require.ErrorIs(t, s.Wait(t.Context(), gone), throttle.ErrOutage)
	})
	back()
	all("back", func(t *testing.T, s instance) {
		gone := s.tenants[2][0]
		admitted := 0
		for d := s.Take(t.Context(), gone, 1); d.OK || s.Stats().Down; d = s.Take(t.Context(), gone, 1) {
			if d.OK {
				admitted++
			}
		}
		require.LessOrEqual(t, admitted, burst, "all of it, where the master has lost what it held")
		require.Positive(t, admitted)
		require.False(t, s.Stats().Down)
	})
}
