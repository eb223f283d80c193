package bulkhead

import (
	"math"
	"time"
)

// A controller finds a limit by comparing the latency of the calls with that of an
// idle server, as the gradient controller of Envoy's adaptive concurrency filter does
// (https://www.envoyproxy.io/docs/envoy/latest/configuration/http/http_filters/adaptive_concurrency_filter).
//
// It looks at one cohort of calls after the other: the calls that begin in a certain
// time, all of which it waits for. The calls that end in a certain time would mislead
// it: after every change the short ones end first, and among mixed latencies that looks
// like a faster server.
//
// It compares the means of the logarithms of latencies, because one call in a hundred
// that takes a hundred times as long would drown an arithmetic mean in noise. Among
// mixed latencies, however, a wait that is short beside most of the work multiplies the
// latency of the short calls, and with it the logarithmic mean. So the controller also
// measures the rise that it allows: that of calls that wait for Tolerance times the
// mean latency, whatever the mixture.
//
// A controller has no clock. The caller gives it the time since a fixed moment, which
// may go back no more than calls race.
type controller struct {
	cfg     AdaptiveLimit
	limit   float64 // with a fraction, which makes it grow from 1
	former  float64 // at the last adjustment
	base    base
	latency float64 // mean logarithm of the last cohort
	scale   float64 // arithmetic mean latency of the last cohorts, in ns: their time scale
	scaled  bool    // scale is known, and not assumed

	cohort  cohort
	waiting bool // no call joins the cohort any more; some are still running
	slow    int  // cohorts in a row that made the limit shrink

	probing bool          // the cohort is a probe
	before  float64       // the limit to go back to when no more calls join the probe
	next    time.Duration // when to probe again
}

// A base is the known latency of an idle server.
type base struct {
	known    bool
	log      float64 // mean logarithm
	variance float64 // of log, by what it was learned from
	spread   float64 // variance of the logarithm of one call
	rise     float64 // of log, if each call waits for Tolerance times mean
	mean     float64 // arithmetic, in ns
}

type outcome int

const (
	answered outcome = iota
	overran          // is evidence of overload
	silent           // says nothing
)

// A call is what the controller needs again when the call ends.
type call struct {
	start  time.Duration
	cohort int
}

// A cohort is the calls that begin in a certain time.
type cohort struct {
	number   int
	from     time.Duration // when calls began to join it; when it began to wait for them
	began    int
	ended    int
	most     int     // slots in flight
	all      samples // calls that overran included
	answered samples
}

// samples sums up latencies.
type samples struct {
	n                           int
	sum, logs, squares, delayed float64 // of latencies in ns, their logarithms, ...
}

// add adds a latency, and the one that it would be after a wait.
func (s *samples) add(latency, wait float64) {
	latency = max(latency, 1)
	log := math.Log(latency)
	s.n++
	s.sum += latency
	s.logs += log
	s.squares += log * log
	s.delayed += math.Log(latency + wait)
}

func (s *samples) mean() float64 { return s.sum / float64(s.n) }
func (s *samples) log() float64  { return s.logs / float64(s.n) }
func (s *samples) rise() float64 { return (s.delayed - s.logs) / float64(s.n) }

// spread returns the variance of the logarithm of one latency.
func (s *samples) spread() float64 {
	return max(0, s.squares/float64(s.n)-s.log()*s.log())
}

const (
	cohortTime    = 100 * time.Millisecond // at the least, and as long as a call takes
	cohortSamples = 50
	fewSamples    = 10 // are enough after longTime
	longTime      = 10 // mean latencies: also the longest wait for the calls of a cohort

	shrinkMost, growMost = 0.7, 1.5 // times the limit, after one cohort
	slowCohorts          = 3        // in a row call for a probe
	slowGradient         = 0.95     // and less

	probePeriod = 10 * time.Second // at the least; longPeriod mean latencies
	longPeriod  = 100
	probeShare  = 0.75 // of the slots in which an idle server would do as much

	surprise = 3.0  // standard errors from the base: more is a change, and not noise
	drift    = 0.02 // of the base from cohort to cohort, as a standard deviation
	memory   = 200  // samples that the other figures of the base go back to

	overranAt = 4 // times an idle server's is the least latency of a call that overran
)

func newController(cfg AdaptiveLimit) controller {
	return controller{
		cfg:    cfg,
		limit:  float64(cfg.Initial),
		scale:  float64(cohortTime),
		cohort: cohort{number: 1},
	}
}

// Limit returns the present limit.
func (c *controller) Limit() int { return int(c.limit) }

func (c *controller) setLimit(limit float64) {
	c.limit = min(max(limit, float64(c.cfg.Min)), float64(c.cfg.Max))
}

// restart goes on from a limit set from outside.
func (c *controller) restart(now time.Duration, limit int) {
	c.nextCohort(now)
	c.setLimit(float64(limit))
}

// reform goes on with another configuration, and keeps what was learned.
func (c *controller) reform(now time.Duration, cfg AdaptiveLimit) {
	if cfg == c.cfg {
		return
	}
	if c.lowered() {
		c.abandon(now)
	}
	c.nextCohort(now)
	if c.base.known { // as if all calls took alike, until it is measured again
		c.base.rise *= math.Log1p(cfg.Tolerance) / math.Log1p(c.cfg.Tolerance)
	}
	c.cfg = cfg
	c.setLimit(c.limit)
}

func (c *controller) nextCohort(now time.Duration) {
	c.cohort = cohort{number: c.cohort.number + 1, from: now}
	c.waiting, c.probing = false, false
}

// lowered reports whether the limit is lowered for a probe.
func (c *controller) lowered() bool { return c.probing && !c.waiting }

// abandon ends a probe early, without a conclusion.
func (c *controller) abandon(now time.Duration) {
	c.setLimit(c.before)
	c.nextCohort(now)
	c.next = now + c.period()
}

// idle returns the latency of an idle server: the geometric mean, or 0 if it is not
// known yet.
func (c *controller) idle() time.Duration {
	if !c.base.known {
		return 0
	}
	return time.Duration(math.Exp(c.base.log))
}

// begin notes that a call starts, with which so many slots are in flight.
func (c *controller) begin(now time.Duration, inFlight int) call {
	c.advance(now)
	if c.waiting {
		return call{start: now}
	}
	k := &c.cohort
	k.began++
	k.most = max(k.most, inFlight)
	return call{start: now, cohort: k.number}
}

func (c *controller) end(ended call, now time.Duration, how outcome) {
	if ended.cohort == c.cohort.number {
		c.cohort.ended++
		c.sample(float64(now-ended.start), how)
	}
	c.advance(now)
}

func (c *controller) sample(latency float64, how outcome) {
	if how == silent {
		return
	}
	mean := c.scale
	if c.base.known {
		mean = c.base.mean
	}
	wait := c.cfg.Tolerance * mean
	if how == answered {
		c.cohort.answered.add(latency, wait)
	} else if c.base.known {
		latency = max(latency, overranAt*math.Exp(c.base.log))
	}
	c.cohort.all.add(latency, wait)
}

// advance takes a cohort through its three phases: calls join it, the controller waits
// for those that still run, and draws its conclusion.
func (c *controller) advance(now time.Duration) {
	k := &c.cohort
	age, scale := float64(now-k.from), c.scale
	if !c.waiting {
		enough := k.began >= cohortSamples && age >= max(float64(cohortTime), scale)
		if !enough && (k.began < fewSamples || age < longTime*scale) {
			return
		}
		if c.probing {
			c.setLimit(c.before)
		}
		c.waiting, k.from, age = true, now, 0
	}
	if k.ended < k.began && age < longTime*scale {
		return
	}
	for ; k.ended < k.began; k.ended++ {
		c.sample(age, answered) // at the least: the call still runs
	}
	c.conclude(now)
}

// conclude draws the conclusions from a cohort, and begins the next.
func (c *controller) conclude(now time.Duration) {
	k, probed := c.cohort, c.probing
	c.nextCohort(now)
	switch {
	case probed:
		c.learnFromProbe(&k.answered, now)
	case k.all.n >= fewSamples:
		c.adjust(&k, now)
	}
}

func (c *controller) adjust(k *cohort, now time.Duration) {
	c.latency = k.all.log()
	if !c.scaled { // the first calls after a start are slower, and tell only the time scale
		c.scaled, c.scale = true, k.all.mean()
		return
	}
	c.scale += (k.all.mean() - c.scale) * 0.3
	if !c.base.known {
		c.next = now + probePeriod
		if !c.learn(&k.answered) {
			return
		}
	}

	limit, most, former := math.Floor(c.limit), float64(k.most), c.former
	c.former = c.limit
	if most < 0.7*min(limit, former) { // the limit was not reached: the server was idle
		c.learn(&k.answered)
		if c.limit > 4*most {
			c.setLimit(max(0.99*c.limit, min(c.limit, float64(c.cfg.Initial))))
		}
		return
	}

	gradient := min(max(math.Exp(c.base.log+c.base.rise-c.latency), shrinkMost), growMost)
	if gradient < slowGradient {
		c.slow++
	} else {
		c.slow = 0
	}
	wanted := c.limit*gradient + math.Sqrt(c.limit*gradient)/2
	if wanted < c.limit || most >= 0.9*limit {
		c.setLimit(wanted)
	}
	if most >= limit && now >= c.next || c.slow >= slowCohorts {
		c.probe()
	}
}

// probe lowers the limit until no call waits at the server, so that the next cohort
// shows the latency of an idle one. By Little's law, the calls of an idle server take
// the part of the limit that their latency is of the present one.
func (c *controller) probe() {
	c.probing, c.before, c.slow = true, c.limit, 0
	c.setLimit(c.limit * probeShare * min(1, c.base.mean/c.scale))
}

func (c *controller) learnFromProbe(s *samples, now time.Duration) {
	former := c.base.log
	if !c.learn(s) {
		c.next = now + c.period()
		return
	}
	// A change is confirmed by another probe. Work that takes longer needs more slots for
	// as many calls a second, and has lost some meanwhile.
	if slower := c.base.log - former; slower > 0 {
		c.setLimit(c.limit * min(math.Exp(slower), 2))
	}
}

// period returns the time from one probe to the next.
func (c *controller) period() time.Duration {
	return max(probePeriod, time.Duration(longPeriod*c.scale))
}

// learn learns the latency of an idle server, up and down alike, and reports whether it
// has changed. A difference that may be noise counts by the precision of the samples
// beside that of the base: a Kalman filter. A few samples count for nothing.
func (c *controller) learn(s *samples) (changed bool) {
	b, n := &c.base, float64(s.n)
	if s.n < fewSamples {
		return false
	}
	if !b.known {
		*b = base{known: true, rise: s.rise()}
		b.log, b.variance, b.spread, b.mean = s.log(), s.spread()/n, s.spread(), s.mean()
		return true
	}
	// One cohort's own spread is not to be trusted: where one call in a hundred is
	// long, a cohort without any looks fast, and sure of it.
	noise := b.spread / n
	changed = math.Abs(s.log()-b.log) > surprise*math.Sqrt(noise+b.variance)
	if changed { // the rise was measured by the former mean
		b.log, b.variance, b.spread, b.mean = s.log(), noise, s.spread(), s.mean()
		least := math.Log1p(c.cfg.Tolerance) // as if all calls took alike
		b.rise = max(min(b.rise, s.rise()), least)
		return true
	}
	b.variance += drift * drift
	gain, weight := b.variance/(b.variance+noise), n/(n+memory)
	b.variance *= 1 - gain
	b.log += gain * (s.log() - b.log)
	b.rise += weight * (s.rise() - b.rise)
	b.mean += weight * (s.mean() - b.mean)
	b.spread += weight * (s.spread() - b.spread)
	return false
}
