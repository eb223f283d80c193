package adaptive_test

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/go-resilience/resilience/bulkhead/adaptive"
)

// A simulation sends the calls of clients to a server that they share, one event after
// the other in virtual time. The server has some workers, and a queue without bound in
// front of them. Calls arrive at random (a Poisson process); a call that finds the limit
// of its client in use is refused. What is said of a simulation is that of its first
// client.
type simulation struct {
	*client
	clients []*client
	rng     *rand.Rand
	workers int
	timeout time.Duration // after which a client gives a call up; the server does not; 0: never

	now     time.Duration
	arrival time.Duration // of the next call
	queue   []*simulated
	served  int // of queue
	running running
	pending []*simulated // by age, if there is a timeout
	sampled time.Duration
}

type client struct {
	limit   *adaptive.Controller           // nil: none
	service func(*rand.Rand) time.Duration // time that a call takes a worker
	mean    time.Duration                  // of service, where it matters
	rate    float64                        // calls a second
	clock   time.Duration                  // what it shows when the simulation begins

	inFlight         int
	arrived, refused int
	latencies        []time.Duration
	limits           []int // each 10 ms, outside of probes
}

type simulated struct {
	client      *client
	call        adaptive.Call
	start, ends time.Duration
	over        bool
}

func simulate(
	seed uint64, cfg adaptive.Config, workers int, rate float64, service func(*rand.Rand) time.Duration,
) *simulation {
	return simulateFleet(seed, workers, &client{limit: adaptive.NewController(cfg), service: service, rate: rate})
}

func simulateFleet(seed uint64, workers int, clients ...*client) *simulation {
	return &simulation{client: clients[0], clients: clients, rng: rand.New(rand.NewPCG(seed, 5)), workers: workers}
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
	for _, c := range s.clients {
		c.arrived, c.refused, c.latencies, c.limits = 0, 0, c.latencies[:0], c.limits[:0]
	}
	until := s.now + d
	if s.arrival == 0 {
		s.arrival = s.pause()
	}
	s.serve() // there may be more workers than before
	for {
		next, event := s.arrival, s.arrive
		if len(s.running) > 0 && s.running[0].ends <= next {
			next, event = s.running[0].ends, s.finish
		}
		if len(s.pending) > 0 && s.pending[0].start+s.timeout <= next {
			next, event = s.pending[0].start+s.timeout, s.giveUp
		}
		if next > until {
			s.now = until
			return
		}
		s.now = next
		event()
		if s.now >= s.sampled {
			s.sample()
		}
	}
}

func (s *simulation) sample() {
	s.sampled = s.now + 10*time.Millisecond
	for _, c := range s.clients {
		if c.limit != nil && !c.limit.Probing() {
			c.limits = append(c.limits, c.limit.Limit())
		}
	}
}

func (s *simulation) pause() time.Duration {
	rate := 0.0
	for _, c := range s.clients {
		rate += c.rate
	}
	return time.Duration(s.rng.ExpFloat64() / rate * float64(time.Second))
}

// arrive begins a call of one of the clients, by their rates.
func (s *simulation) arrive() {
	s.arrival = s.now + s.pause()
	c := s.client
	if len(s.clients) > 1 {
		rate := 0.0
		for _, other := range s.clients {
			if rate += other.rate; s.rng.Float64()*rate < other.rate {
				c = other
			}
		}
	}
	c.arrived++
	call := &simulated{client: c, start: s.now}
	if c.limit != nil {
		if c.inFlight >= c.limit.Limit() {
			c.refused++
			return
		}
		c.inFlight++
		call.call = c.limit.Begin(c.clock+s.now, c.inFlight)
	}
	s.queue = append(s.queue, call)
	if s.timeout > 0 {
		s.pending = append(s.pending, call)
	}
	s.serve()
}

func (s *simulation) serve() {
	for len(s.running) < s.workers && s.served < len(s.queue) {
		c := s.queue[s.served]
		if s.served++; s.served == len(s.queue) || s.served == 4096 {
			s.queue = append(s.queue[:0], s.queue[s.served:]...)
			s.served = 0
		}
		c.ends = s.now + c.client.service(s.rng)
		s.running.push(c)
	}
}

func (s *simulation) finish() {
	if c := s.running.pop(); !c.over {
		c.client.latencies = append(c.client.latencies, s.now-c.start)
		s.end(c, nil)
	}
	s.serve()
}

func (s *simulation) giveUp() {
	if c := s.pending[0]; !c.over {
		s.end(c, context.DeadlineExceeded)
	}
	s.pending = s.pending[1:]
}

func (s *simulation) end(c *simulated, err error) {
	c.over = true
	if c.client.limit != nil {
		c.client.inFlight--
		c.client.limit.End(c.call, c.client.clock+s.now, err)
	}
}

func (c *client) refusedShare() float64 { return float64(c.refused) / float64(c.arrived) }

// within returns the number of calls that took at most d.
func (c *client) within(d time.Duration) int {
	n := 0
	for _, l := range c.latencies {
		if l <= d {
			n++
		}
	}
	return n
}

func (c *client) p99() time.Duration {
	slices.Sort(c.latencies)
	return c.latencies[len(c.latencies)*99/100]
}

// limitAt returns the limit that was not exceeded in a share of the time.
func (c *client) limitAt(share float64) int {
	slices.Sort(c.limits)
	return c.limits[int(share*float64(len(c.limits)-1))]
}

func (c *client) medianLimit() int { return c.limitAt(0.5) }

// running holds the calls that a worker has: a heap, the next to end first. That of
// container/heap takes most of the time of a simulation.
type running []*simulated

func (r *running) push(c *simulated) {
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

func (r *running) pop() *simulated {
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
