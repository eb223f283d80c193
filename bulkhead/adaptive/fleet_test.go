package adaptive_test

import (
	"flag"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/go-resilience/resilience/bulkhead/adaptive"
)

var allFleets = flag.Bool("fleets", false, "simulate every fleet with eight seeds and every load with all of its seeds")

// A fleet is some clients of one server of 40 workers, each with a limit of its own.
type fleet struct {
	clients int
	load    float64
	how     string

	step      bool          // from 0.5 to load and back; otherwise at load from the start
	apart     time.Duration // the clocks of the first and the last client
	timeout   time.Duration
	unlimited int  // clients that have no limit
	loads     bool // every other client has three times the load of the others
	lengths   bool // every other client has calls of 100 ms, the others of 5 ms
}

const fleetWorkers = 40

// fleets returns all rows. Of those that hold, the ordinary run simulates a few.
func fleets() (all []fleet) {
	for _, n := range []int{1, 2, 3, 4, 6, 10, 50} {
		for _, load := range []float64{0.6, 1.2, 1.5, 2} {
			all = append(all, fleet{clients: n, load: load})
		}
		all = append(all,
			fleet{clients: n, load: 2, how: ", from 0.5", step: true},
			fleet{clients: n, load: 2, how: ", timeouts", timeout: 250 * time.Millisecond})
		if n == 1 {
			continue
		}
		for _, load := range []float64{1.5, 2} {
			all = append(all,
				fleet{clients: n, load: load, how: ", unequal loads", loads: true},
				fleet{clients: n, load: load, how: ", calls of 5 and 100 ms", lengths: true},
				fleet{clients: n, load: load, how: ", clocks 50 ms apart", apart: 50 * time.Millisecond},
				fleet{clients: n, load: load, how: ", clocks 5 s apart", apart: 5 * time.Second})
			if n >= 4 {
				all = append(all, fleet{clients: n, load: load, how: ", a quarter without a limit", unlimited: n / 4})
			}
		}
	}
	return all
}

// holds reports whether the row is one that the limit masters.
func (f fleet) holds() bool {
	switch {
	case f.clients == 10 && f.load == 2:
		return !f.lengths && f.apart < time.Second
	case f.clients == 50:
		return !f.lengths && !(f.load == 2 && (f.loads || f.unlimited > 0))
	}
	return true
}

// A verdict is what a fleet achieves from 10 s after the start of the load, for 40 s.
type verdict struct {
	goodput float64 // of what the server can do: answers within 100 ms, or five times the service time
	shares  float64 // most work of a client by the least, where all clients could use more
	after   int     // highest limit 10 s after the load has gone
}

func (f fleet) simulate(seed uint64) (v verdict) {
	var clients []*client
	for i := range f.clients {
		c := &client{mean: 20 * time.Millisecond, rate: 1}
		if f.lengths {
			c.mean = []time.Duration{5 * time.Millisecond, 100 * time.Millisecond}[i%2]
		}
		if f.loads {
			c.rate = 0.5 + float64(i%2)
		}
		c.service = lognormal(c.mean)
		c.rate *= f.load / float64(f.clients) * fleetWorkers / c.mean.Seconds()
		c.clock = 1000*time.Second + time.Duration(seed)*1370*time.Millisecond +
			f.apart*time.Duration(i)/time.Duration(max(1, f.clients-1))
		if i >= f.unlimited {
			c.limit = adaptive.NewController(adaptive.Config{})
		}
		clients = append(clients, c)
	}
	s := simulateFleet(seed, fleetWorkers, clients...)
	s.timeout = f.timeout
	scale := func(by float64) {
		for _, c := range clients {
			c.rate *= by
		}
		s.arrival = s.now + s.pause()
	}
	if f.step {
		scale(0.5 / f.load)
		s.run(20 * time.Second)
		scale(f.load / 0.5)
	}
	s.run(10 * time.Second)
	s.run(40 * time.Second)
	least, most := math.Inf(1), 0.0
	for _, c := range clients {
		work := float64(c.within(max(100*time.Millisecond, 5*c.mean))) * c.mean.Seconds()
		v.goodput += work / (fleetWorkers * 40 * min(f.load, 1))
		if c.limit != nil {
			least, most = min(least, work), max(most, work)
		}
	}
	v.shares = most / least
	if f.step {
		scale(0.5 / f.load)
		s.run(10 * time.Second)
		for _, c := range clients {
			v.after = max(v.after, c.limit.Limit())
		}
	}
	return v
}

// TestAdaptiveFleetsShareAServer prints the table of docs/decisions. With -fleets, it has
// all rows.
func TestAdaptiveFleetsShareAServer(t *testing.T) {
	if raceDetector || testing.Short() {
		t.Skip("a long simulation of one goroutine")
	}
	seeds := uint64(1)
	if *allFleets {
		seeds = 8
	}
	table := "worst of the seeds\n| clients | load | goodput | shares | limit after |\n|---|---|---|---|---|"
	for _, f := range fleets() {
		if !*allFleets && (!f.holds() || f.load == 1.2 || f.clients == 3 || f.clients == 6) {
			continue
		}
		worst := verdict{goodput: 2}
		for seed := range seeds {
			v := f.simulate(seed)
			worst = verdict{min(worst.goodput, v.goodput), max(worst.shares, v.shares), max(worst.after, v.after)}
		}
		table += fmt.Sprintf("\n| %d | %v%s | %.3f | %.1f | %d |", f.clients, f.load, f.how, worst.goodput,
			worst.shares, worst.after)
		if f.holds() && (worst.goodput < 0.95 || worst.after > 2*fleetWorkers) {
			t.Errorf("%d clients, load %v%s: %+v", f.clients, f.load, f.how, worst)
		}
	}
	t.Log(table)
}
