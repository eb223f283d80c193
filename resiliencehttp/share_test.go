package resiliencehttp_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencehttp"
)

type tenantKey struct{}

func tenantOf(ctx context.Context) string { return ctx.Value(tenantKey{}).(string) }

// A site is an http.Server, with clients that each make one request after the other, over
// connections in memory: the time of a bubble of testing/synctest does not depend on the machine.
type site struct {
	base  *http.Transport
	slots *bulkhead.Bulkhead
	mu    sync.Mutex
	made  map[string]int
	took  map[string][]time.Duration // by tenant: of the requests that were served
	busy  time.Duration              // time that slots were at work
	takes time.Duration              // how long a request is served
}

func newSite(t *testing.T, takes time.Duration, cfg bulkhead.Config) *site {
	s := &site{
		slots: bulkhead.New(cfg), takes: takes, made: map[string]int{}, took: map[string][]time.Duration{},
	}
	guarded := resiliencehttp.Server{}.Bulkhead(s.slots)(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		begun := time.Now()
		time.Sleep(takes/2 + rand.N(takes))
		s.mu.Lock()
		defer s.mu.Unlock()
		s.busy += time.Since(begun)
	}))
	s.base = serveMemory(t, func(w http.ResponseWriter, r *http.Request) {
		guarded.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), tenantKey{}, r.Header.Get("Tenant"))))
	}, nil)
	s.base.MaxIdleConnsPerHost = 100
	return s
}

// run lets the clients of each tenant make requests, until done returns true.
func (s *site) run(clients map[string]int, done func() bool) {
	var wg sync.WaitGroup
	for tenant, n := range clients {
		for range n {
			wg.Go(func() {
				for !done() {
					time.Sleep(rand.N(s.takes / 4)) // else whoever has a place asks first for the one it leaves
					r, err := http.NewRequest("GET", "http://site.test/", nil)
					if err != nil {
						panic(err)
					}
					r.Header.Set("Tenant", tenant)
					begun := time.Now()
					resp, err := s.base.RoundTrip(r)
					took, served := time.Since(begun), err == nil && resp.StatusCode == 200
					if !done() { // those that wait at the end are in no turn
						s.mu.Lock()
						s.made[tenant]++
						if served {
							s.took[tenant] = append(s.took[tenant], took)
						}
						s.mu.Unlock()
					}
					if err == nil {
						_ = resp.Body.Close()
					}
					if !served {
						time.Sleep(s.takes / 2) // it was refused
					}
				}
			})
		}
	}
	wg.Wait()
}

func median(list []time.Duration) time.Duration {
	return slices.Sorted(slices.Values(list))[len(list)/2]
}

// A server has 20 slots. Of its ten tenants, nine use half of their part, and one asks for
// more than ten times its own. The same server runs without the flood, and without shares.
func TestARealServerKeepsAFloodFromItsTenants(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := bulkhead.Config{Limit: 20, MaxWait: -1, Queue: 12}
		const takes = 60 * time.Millisecond
		mixed := newSite(t, takes, cfg)
		cfg.Share = tenantOf
		alone, shared := newSite(t, takes, cfg), newSite(t, takes, cfg)
		nine, flooded := map[string]int{}, map[string]int{"flood": 30}
		for i := range 9 {
			tenant := fmt.Sprint("tenant ", i)
			nine[tenant], flooded[tenant] = 1, 1
		}
		var wg sync.WaitGroup
		begun := time.Now()
		rounds := 200 * takes
		if testing.Short() {
			rounds = 80 * takes
		}
		over := func() bool { return time.Since(begun) >= rounds }
		for s, clients := range map[*site]map[string]int{alone: nine, shared: flooded, mixed: flooded} {
			wg.Go(func() { s.run(clients, over) })
		}
		wg.Wait()

		made, served, mixedMade, mixedServed := 0, 0, 0, 0
		var own, usual []time.Duration
		for tenant := range nine {
			made, served = made+shared.made[tenant], served+len(shared.took[tenant])
			mixedMade, mixedServed = mixedMade+mixed.made[tenant], mixedServed+len(mixed.took[tenant])
			own, usual = append(own, shared.took[tenant]...), append(usual, alone.took[tenant]...)
		}
		t.Logf("the nine: %d of %d served (without shares %d of %d), median %v (alone %v); the flood: %d of %d; "+
			"slots at work for %v (without shares %v)", served, made, mixedServed, mixedMade, median(own), median(usual),
			len(shared.took["flood"]), shared.made["flood"], shared.busy, mixed.busy)
		require.GreaterOrEqual(t, float64(served), 0.99*float64(made), "of the nine")
		require.Less(t, float64(mixedServed), 0.97*float64(mixedMade), "of the nine, without shares")
		require.LessOrEqual(t, median(own).Seconds(), 1.2*median(usual).Seconds(), "latency of the nine")
		require.GreaterOrEqual(t, shared.busy.Seconds(), 0.98*mixed.busy.Seconds(), "all")
	})
}
