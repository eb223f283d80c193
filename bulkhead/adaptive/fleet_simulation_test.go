package adaptive_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/go-resilience/resilience/bulkhead/adaptive"
	"github.com/go-resilience/resilience/internal/sim"
)

// TestFleetSimulation has adaptive limits share a server of a random size, with loads that
// change, calls of different lengths, clocks that differ, and timeouts. A limit is within its
// bounds whatever happens, and when the load has gone every client is served again.
func TestFleetSimulation(t *testing.T) {
	if raceDetector {
		t.Skip("a simulation is one goroutine")
	}
	sim.Simulation{Name: "fleet", Seeds: 30, Run: simulateFleetOf}.Test(t)
}

func simulateFleetOf(w *sim.World) {
	workers := sim.Pick(w, 10, 1, 2, 4, 20)
	cfg := adaptive.Config{Min: 1 + w.Choose(3), Max: sim.Pick(w, 200, 20, 1000)}
	n := 1 + w.Choose(6)
	var clients []*client
	for i := range n {
		mean := time.Duration(sim.Pick(w, 20, 10, 100)) * time.Millisecond
		c := &client{mean: mean, service: lognormal(mean), limit: adaptive.NewController(cfg)}
		if w.Chance(20) {
			c.service = bimodal(0.8, mean/2, 3*mean)
		}
		c.clock = 1000*time.Second + time.Duration(w.Choose(10_000))*time.Millisecond
		if i > 0 && w.Chance(15) {
			c.limit = nil // a client that takes what it likes
		}
		clients = append(clients, c)
	}
	s := simulateFleet(uint64(w.Choose(1<<30)), workers, clients...)
	if w.Chance(30) {
		s.timeout = 250 * time.Millisecond
	}
	load := func(of float64) {
		for _, c := range clients {
			c.rate = of / float64(n) * float64(workers) / c.mean.Seconds()
		}
		s.arrival = s.now + s.pause()
	}
	phase := func(of float64, d time.Duration) {
		load(of)
		s.run(d)
		for i, c := range clients {
			w.Note("%v of load %v: client %d: arrived %d, refused %d, ended %d", s.now, of, i, c.arrived, c.refused,
				len(c.latencies))
			if c.limit == nil {
				continue
			}
			w.Note("limit %d", c.limit.Limit())
			if l := c.limit.Limit(); l < cfg.Min || l > cfg.Max {
				w.Fail("bounds", "client %d has a limit of %d, not of %d to %d", i, l, cfg.Min, cfg.Max)
			}
			if c.inFlight < 0 || c.inFlight > cfg.Max+1 {
				w.Fail("in flight", "client %d has %d", i, c.inFlight)
			}
			w.Done(sim.Count{Calls: c.arrived, Faults: c.refused})
		}
	}
	for range 2 + w.Choose(4) {
		phase(float64(1+w.Choose(25))/10, time.Duration(1+w.Choose(8))*time.Second)
	}
	// The queue of clients without a limit may be long: it ends first.
	load(0.01)
	s.run(60 * time.Second)
	phase(0.3, 20*time.Second)
	phase(0.3, 10*time.Second)
	for i, c := range clients {
		if c.arrived > 20 && c.refused > c.arrived/2 {
			w.Fail("liveness", "client %d: %d of %d calls are refused at a third of the load: %s", i, c.refused, c.arrived,
				fmt.Sprint(c.limit.Limit()))
		}
	}
}
