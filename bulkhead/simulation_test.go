package bulkhead_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/go-resilience/resilience/bulkhead"
)

// A simulation sends calls through an adaptive limit to a server, one event after
// the other in virtual time. The server has some workers, and a queue without
// bound in front of them. Calls arrive at random (a Poisson process); a call that finds
// the limit in use is refused.
type simulation struct {
	rng     *rand.Rand
	limit   *bulkhead.Controller
	service func(*rand.Rand) time.Duration // time that a call takes a worker
	workers int
	rate    float64 // calls a second

	now      time.Duration
	arrival  time.Duration // of the next call
	queue    []simulated
	served   int // of queue
	running  running
	inFlight int

	arrived, refused int
	latencies        []time.Duration
	limits           []int // each 10 ms, outside of probes
	sampled          time.Duration
}

type simulated struct {
	call        bulkhead.Call
	start, ends time.Duration
}

func simulate(seed uint64, cfg bulkhead.AdaptiveLimit, workers int, rate float64, service func(*rand.Rand) time.Duration) *simulation {
	return &simulation{
		rng:     rand.New(rand.NewPCG(seed, 5)),
		limit:   bulkhead.NewController(cfg),
		service: service,
		workers: workers,
		rate:    rate,
	}
}

// lognormal draws from the log-normal distribution with a coefficient of variation
// of 0.5.
func lognormal(mean time.Duration) func(*rand.Rand) time.Duration { return varied(mean, 0.5) }

// varied draws from the log-normal distribution with a coefficient of variation.
func varied(mean time.Duration, variation float64) func(*rand.Rand) time.Duration {
	sigma := math.Sqrt(math.Log(1 + variation*variation))
	mu := math.Log(float64(mean)) - sigma*sigma/2
	return func(r *rand.Rand) time.Duration { return time.Duration(math.Exp(mu + sigma*r.NormFloat64())) }
}

// bimodal draws short with the given probability, and otherwise long.
func bimodal(probability float64, short, long time.Duration) func(*rand.Rand) time.Duration {
	return func(r *rand.Rand) time.Duration {
		if r.Float64() < probability {
			return short
		}
		return long
	}
}

// run goes on for d. Its counts are of this time only.
func (s *simulation) run(d time.Duration) {
	s.arrived, s.refused, s.latencies, s.limits = 0, 0, s.latencies[:0], s.limits[:0]
	until := s.now + d
	if s.arrival == 0 {
		s.arrival = s.pause()
	}
	s.serve() // there may be more workers than before
	for {
		ends := len(s.running) > 0 && s.running[0].ends <= s.arrival
		next := s.arrival
		if ends {
			next = s.running[0].ends
		}
		if next > until {
			s.now = until
			return
		}
		s.now = next
		if ends {
			s.end(s.running.pop())
		} else {
			s.arrive()
			s.arrival += s.pause()
		}
		s.serve()
		if s.now >= s.sampled && !s.limit.Probing() {
			s.sampled = s.now + 10*time.Millisecond
			s.limits = append(s.limits, s.limit.Limit())
		}
	}
}

func (s *simulation) pause() time.Duration {
	return time.Duration(s.rng.ExpFloat64() / s.rate * float64(time.Second))
}

func (s *simulation) arrive() {
	s.arrived++
	if s.inFlight >= s.limit.Limit() {
		s.refused++
		return
	}
	s.inFlight++
	s.queue = append(s.queue, simulated{call: s.limit.Begin(s.now, s.inFlight), start: s.now})
}

func (s *simulation) serve() {
	for len(s.running) < s.workers && s.served < len(s.queue) {
		c := s.queue[s.served]
		if s.served++; s.served == len(s.queue) || s.served == 4096 {
			s.queue = append(s.queue[:0], s.queue[s.served:]...)
			s.served = 0
		}
		c.ends = s.now + s.service(s.rng)
		s.running.push(c)
	}
}

func (s *simulation) end(c simulated) {
	s.inFlight--
	s.limit.End(c.call, s.now, nil)
	s.latencies = append(s.latencies, s.now-c.start)
}

func (s *simulation) refusedShare() float64 { return float64(s.refused) / float64(s.arrived) }

// within returns the number of calls that took at most d.
func (s *simulation) within(d time.Duration) int {
	n := 0
	for _, l := range s.latencies {
		if l <= d {
			n++
		}
	}
	return n
}

func (s *simulation) p99() time.Duration {
	slices.Sort(s.latencies)
	return s.latencies[len(s.latencies)*99/100]
}

// limitAt returns the limit that was not exceeded in a share of the time.
func (s *simulation) limitAt(share float64) int {
	slices.Sort(s.limits)
	return s.limits[int(share*float64(len(s.limits)-1))]
}

func (s *simulation) medianLimit() int { return s.limitAt(0.5) }

// running holds the calls that a worker has: a heap, the next to end first. That of
// container/heap takes most of the time of a simulation.
type running []simulated

func (r *running) push(c simulated) {
	*r = append(*r, c)
	h := *r
	for i := len(h) - 1; i > 0; {
		parent := (i - 1) / 2
		if h[parent].ends <= h[i].ends {
			return
		}
		h[parent], h[i] = h[i], h[parent]
		i = parent
	}
}

func (r *running) pop() simulated {
	h := *r
	top, last := h[0], len(h)-1
	h[0] = h[last]
	h = h[:last]
	*r = h
	for i := 0; ; {
		child := 2*i + 1
		if child >= last {
			return top
		}
		if child+1 < last && h[child+1].ends < h[child].ends {
			child++
		}
		if h[i].ends <= h[child].ends {
			return top
		}
		h[i], h[child] = h[child], h[i]
		i = child
	}
}
