package bulkhead

import (
	"math"
	"time"
)

// A controller finds a limit by comparing the latency of the calls with base, that
// of an idle server. It is the gradient controller of Envoy's adaptive concurrency
// filter (https://www.envoyproxy.io/docs/envoy/latest/configuration/http/http_filters/adaptive_concurrency_filter),
// with geometric means and with gentle probes. It knows no clock: the times that
// it is given, since any one moment, must not go back by more than calls race.
//
// Latencies are held as float64 nanoseconds. The mean is the geometric one: the
// median of the usual, log-normal, latencies, and steady where some calls are
// short and the others long, between which a median would jump.
type controller struct {
	cfg     Adaptive
	limit   float64 // a fraction more or less makes it grow from 1
	base    float64 // 0: not known yet
	latency float64 // in the latest window

	starting int // calls to be left out: the first to end are the shortest
	window   window
	slow     int     // windows in a row that were slower than they may be
	good     float64 // the limit before these

	phase phase
	probe probe
	next  time.Duration // when to probe again
}

type phase int

const (
	watching phase = iota // no probe is under way
	draining              // the limit is lower, and the server works off its queue
	sampling              // calls that begin now are samples of an idle server
	settling              // the limit is back; samples are still running
)

type outcome int

const (
	answered outcome = iota
	dropped          // ran out of time
	silent           // says nothing
)

// A call is what the controller wants to be told again when it ends.
type call struct {
	start    time.Duration
	inFlight int // slots, itself included
	probe    int // the number of the probe of which it is a sample, or 0
}

// A window collects samples for one adjustment of the limit.
type window struct {
	from     time.Duration
	most     int  // in flight
	all      mean // with calls that ran out of time
	answered mean
}

type probe struct {
	number  int
	from    time.Duration // of the phase
	until   time.Duration
	latency float64 // before it
	limit   float64 // before it
	began   int     // samples that have begun
	ended   int
	samples mean
}

// A mean is a geometric mean.
type mean struct {
	n    int
	logs float64
}

func (m *mean) add(latency float64) {
	m.n++
	m.logs += math.Log(max(latency, 1))
}

func (m *mean) value() float64 { return math.Exp(m.logs / float64(m.n)) }

const (
	leftOut = 10 // of the first calls

	minWindow      = 100 * time.Millisecond
	windowSamples  = 50
	fewSamples     = 10 // are enough in a window of 10 latencies, or in a probe
	minProbePeriod = 10 * time.Second
	probeLimit     = 0.6 // of the limit
	probeSamples   = 30
	slowWindows    = 3    // in a row call for a probe
	slowGradient   = 0.95 // and less
	droppedAt      = 4    // times base is the least latency of a call out of time

	// A server that queues answers in probeLimit of the time when it has so much
	// less to do; one whose work has become slower, in the same time. More time
	// than before means that something has changed in the middle of the probe.
	noFaster, noSlower = 0.85, 1.2
)

func newController(cfg Adaptive) controller {
	initial := float64(cfg.Initial)
	return controller{cfg: cfg, limit: initial, good: initial, starting: leftOut}
}

// Limit returns the present limit.
func (c *controller) Limit() int { return int(c.limit) }

func (c *controller) setLimit(limit float64) {
	c.limit = min(max(limit, float64(c.cfg.Min)), float64(c.cfg.Max))
}

// restart goes on from a limit that somebody has set.
func (c *controller) restart(now time.Duration, limit int) {
	c.setLimit(float64(limit))
	c.good, c.slow, c.phase = c.limit, 0, watching
	c.window = window{from: now}
}

func (c *controller) begin(now time.Duration, inFlight int) call {
	c.advance(now)
	started := call{start: now, inFlight: inFlight}
	if c.phase == sampling {
		c.probe.began++
		started.probe = c.probe.number
	}
	return started
}

func (c *controller) end(ended call, now time.Duration, how outcome) {
	latency := float64(now - ended.start)
	switch {
	case c.starting > 0:
		c.starting--
		c.window.from = now
	case c.phase == watching:
		c.watch(ended, latency, how)
		if c.window.full(now) {
			c.adjust(now)
		}
	case ended.probe == c.probe.number:
		c.probe.ended++
		if how == answered {
			c.probe.samples.add(latency)
		}
	}
	c.advance(now)
}

func (c *controller) watch(ended call, latency float64, how outcome) {
	w := &c.window
	w.most = max(w.most, ended.inFlight)
	switch how {
	case answered:
		w.all.add(latency)
		w.answered.add(latency)
	case dropped:
		w.all.add(max(latency, droppedAt*c.base))
	}
}

// full reports whether there is enough in w. A window of few calls ends, too, or
// the limit would stay at its floor once it is there.
func (w *window) full(now time.Duration) bool {
	if w.all.n < fewSamples {
		return false
	}
	age, latency := float64(now-w.from), w.all.value()
	return age >= float64(minWindow) && age >= 2*latency &&
		(w.all.n >= windowSamples || age >= 10*latency)
}

// adjust draws the conclusions from a window, and begins the next.
func (c *controller) adjust(now time.Duration) {
	w := c.window
	c.window = window{from: now}
	c.latency = w.all.value()
	if c.base == 0 {
		if w.answered.n < fewSamples {
			return
		}
		c.base = w.answered.value()
		c.next = now + minProbePeriod
	}

	limit, most := math.Floor(c.limit), float64(w.most)
	if most < 0.7*limit { // the limit changes nothing: this is how an idle server answers
		if n := float64(w.answered.n); n > 0 {
			c.learn(w.answered.value(), 0.3*n/(n+100))
		}
		if c.limit > 4*most {
			c.setLimit(max(0.99*c.limit, min(c.limit, float64(c.cfg.Initial))))
		}
		c.slow = 0
		return
	}

	gradient := min(max(c.base*(1+c.cfg.Tolerance)/c.latency, 0.7), 1.5)
	if gradient < slowGradient {
		c.slow++
	} else {
		c.slow = 0
	}
	if c.slow <= 1 {
		c.good = c.limit
	}
	wanted := c.limit*gradient + math.Sqrt(c.limit*gradient)/2
	if wanted < c.limit || most >= 0.9*limit {
		c.setLimit(wanted)
	}
	if now >= c.next || c.slow >= slowWindows {
		c.startProbe(now)
	}
}

func (c *controller) learn(latency, weight float64) { c.base += (latency - c.base) * weight }

func (c *controller) startProbe(now time.Duration) {
	c.phase = draining
	c.probe = probe{
		number:  c.probe.number + 1,
		until:   now + time.Duration(1.5*c.latency),
		latency: c.latency,
		limit:   c.limit,
	}
	c.slow = 0
	c.setLimit(c.limit * probeLimit)
}

// advance takes a probe from phase to phase. All calls that begin in the time of
// sampling are samples: the first ones to end are the short ones.
func (c *controller) advance(now time.Duration) {
	p := &c.probe
	latency := time.Duration(p.latency)
	if c.phase == draining && now >= p.until {
		c.phase, p.from, p.until = sampling, now, now+5*latency/2
	}
	if c.phase == sampling && now >= p.until && (p.began >= probeSamples || now >= p.from+10*latency) {
		c.phase, p.from, p.until = settling, now, now+10*latency
		c.setLimit(p.limit)
	}
	if c.phase == settling && (p.ended >= p.began || now >= p.until) {
		c.conclude(now)
	}
}

// conclude draws the conclusion from a probe.
func (c *controller) conclude(now time.Duration) {
	p := &c.probe
	for ; p.ended < p.began; p.ended++ {
		p.samples.add(float64(now - p.from)) // at the least: it is still running
	}
	c.phase = watching
	c.window = window{from: now}
	c.next = now + max(minProbePeriod, time.Duration(100*p.latency))
	if p.samples.n < fewSamples {
		return
	}
	latency, base := p.samples.value(), c.base
	switch {
	case latency < base:
		c.learn(latency, 0.5)
	case latency > noFaster*p.latency && latency < noSlower*p.latency:
		c.base = latency
		c.setLimit(c.good)
	}
	if math.Abs(c.base-base) > 0.1*base { // a surprise is to be confirmed
		c.next = now + time.Duration(20*p.latency)
	}
}
