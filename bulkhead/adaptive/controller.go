package adaptive

import (
	"math"
	"time"
)

// A controller finds a limit by comparing the latency of calls with the latency of an idle server.
// docs/decisions/adaptive-limit.md gives the reasons for its rules.
//
// It evaluates cohorts, one after the other. A cohort is the calls that start in a period. The controller waits for all
// of them, because short calls end first, which would look like a faster server. It compares means of logarithms,
// because one long call in a hundred would make an arithmetic mean too noisy.
//
// A controller has no clock. Its callers pass the Unix time, which may go back only as far as concurrent calls race.
type controller struct {
	cfg     Config
	limit   float64 // has a fraction; otherwise it would not grow from 1
	former  float64 // limit before the last adjustment
	base    base
	latency float64 // mean logarithm of the last cohort
	mean    float64 // arithmetic mean of the last cohort, in ns; 0 before the first
	scale   float64 // mean of the last cohorts, in ns; the time scale of all rules

	cohort  cohort
	waiting bool                             // the cohort is complete, and its calls still run
	reached bool                             // the last cohort used the whole limit
	peak    struct{ limit, latency float64 } // where the limit started to shrink

	moved  time.Duration // when a call last started or ended, or the limit was raised for a call
	recent [2]int        // the limit at the ends of the last two cohorts

	probing bool          // the cohort is a probe
	common  bool          // all processes start this probe at the same time
	before  float64       // the limit to restore once the probe's cohort is complete
	next    time.Duration // when to start the next probe
	ceiling float64       // upper bound of base.log until the next common probe
	doubt   bool          // base is new or has just fallen, perhaps not far enough
}

// A base is the known latency of an idle server.
type base struct {
	known    bool
	log      float64 // mean logarithm
	variance float64 // estimation variance of log
	spread   float64 // variance of the logarithm of a single call
	rise     float64 // increase of log if each call waits for Tolerance times mean
	mean     float64 // arithmetic mean, in ns
}

// A result is the information of a finished call about the load.
type result int

const (
	answered result = iota
	overran         // the server is overloaded
	silent          // none
)

// A call is passed to end when the call has ended.
type call struct {
	start  time.Duration
	cohort int // the number of its cohort, or 0
}

type cohort struct {
	number   int
	from     time.Duration // when its first call could start; once it is complete, when it became so
	began    int           // calls
	ended    int           // calls
	most     int           // slots taken at the same time
	all      samples       // including calls that overran
	answered samples
}

// samples are sums over latencies.
type samples struct {
	n       int
	sum     float64 // of the latencies in ns
	logs    float64 // of their logarithms
	squares float64 // of the squares of these
	delayed float64 // of the logarithms after an additional wait
}

// add adds a latency, and the latency after an additional wait.
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

// spread returns the variance of the logarithms.
func (s *samples) spread() float64 { return max(0, s.squares/float64(s.n)-s.log()*s.log()) }

const (
	cohortTime    = 100 * time.Millisecond // minimum length of a cohort, which is also at least a mean latency
	cohortSamples = 50
	fewSamples    = 10 // enough after longTime
	longTime      = 10 // mean latencies; also the longest wait for the calls of a cohort

	shrinkMost, growMost = 0.7, 1.5 // times the limit, after one cohort
	slowGradient         = 0.95     // below it, the calls are slower than Tolerance allows
	relief               = 0.4      // share of the limit's fall that must show in the latency, in logarithms

	probePeriod = 10 * time.Second // minimum; the period is also at least longPeriod mean latencies
	longPeriod  = 100
	probeRise   = 1.5                   // maximum factor by which one probe raises the base
	probeShare  = 0.75                  // share of the slots that an idle server needs for the same throughput
	doubtShare  = 0.25                  // the same while the base is in doubt
	drainTime   = 75 * time.Millisecond // minimum time until a queue is empty, because clocks differ

	surprise = 3.0   // standard errors from the base beyond which a difference is a change, not noise
	drift    = 0.005 // standard deviation of the base's change from cohort to cohort
	memory   = 200   // samples over which the other values of the base are averaged

	spreadOfWork  = 0.75 // minimum spread of slower work, as a share of the base's spread
	spreadOfQueue = 0.3  // minimum spread of a queue, as a share of the spread if all calls wait equally long
	fewSpread     = 0.01 // a smaller spread of the base, a tenth of the latency, cannot be compared

	overranAt = 4 // minimum latency of a call that overran, as a multiple of the idle server's
)

func newController(cfg Config) controller {
	return controller{
		cfg: cfg, limit: float64(cfg.Initial), recent: [2]int{cfg.Initial}, scale: float64(cohortTime),
		cohort: cohort{number: 1},
	}
}

// Limit returns the current limit.
func (c *controller) Limit() int { return int(c.limit) }

// setLimit sets the limit, within Min and Max.
func (c *controller) setLimit(limit float64) {
	c.limit = min(max(limit, float64(c.cfg.Min)), float64(c.cfg.Max))
}

// loweredForProbe reports whether the limit is lowered for a probe.
func (c *controller) loweredForProbe() bool { return c.probing && !c.waiting }

// update changes the configuration and keeps what was learned. A probe ends.
func (c *controller) update(now time.Duration, cfg Config) {
	if c.loweredForProbe() {
		c.limit = c.before
	}
	c.nextCohort(now)
	// Until it is measured again, the rise is scaled as if all calls took equally long.
	c.base.rise *= math.Log1p(cfg.Tolerance) / math.Log1p(c.cfg.Tolerance)
	c.cfg = cfg
	c.setLimit(c.limit)
	c.recent[0], c.recent[1] = min(c.recent[0], cfg.Max), min(c.recent[1], cfg.Max)
}

// nextCohort starts a cohort, which is no probe.
func (c *controller) nextCohort(now time.Duration) {
	if c.cohort.began > 0 {
		c.recent = [2]int{c.Limit(), c.recent[0]}
	}
	c.cohort = cohort{number: c.cohort.number + 1, from: now}
	c.waiting, c.probing = false, false
}

// begin records the start of a call. taken is the number of slots taken, including its own.
func (c *controller) begin(now time.Duration, taken int) call {
	c.moved = now
	c.advance(now)
	k := &c.cohort
	if k.number == 1 && k.began == 0 {
		k.from = now
	}
	if c.waiting || c.probing && float64(now-k.from) < c.drain() {
		return call{start: now}
	}
	k.began++
	k.most = max(k.most, taken)
	return call{start: now, cohort: k.number}
}

// makeRoom is called while a call waits, or is refused, because of the limit. Long calls, such as streams, may hold
// more slots than a limit that has shrunk. Then no call starts or ends, and nothing else would raise the limit. If that
// lasts, the limit is raised to one more than are taken. It is not raised above its recent values plus the slots of
// responses that are still being read: a server that hangs must not get more and more calls.
func (c *controller) makeRoom(now time.Duration, taken, reading int) {
	room := max(c.Limit(), taken) + 1
	least := max(float64(cohortTime), longTime*c.scale)
	if room <= max(c.recent[0], c.recent[1])+reading && float64(now-c.moved) >= least {
		c.moved = now
		c.setLimit(float64(room))
		c.before = max(c.before, c.limit) // a probe ends with no less
	}
}

// end records the result of a call.
func (c *controller) end(ended call, now time.Duration, how result) {
	c.moved = now
	if ended.cohort == c.cohort.number {
		c.cohort.ended++
		c.sample(float64(now-ended.start), how)
	}
	c.advance(now)
}

// sample adds the latency of a call to the cohort.
func (c *controller) sample(latency float64, how result) {
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

// advance takes the cohort through its phases: calls join it, the controller waits for calls that still run, and
// evaluates the samples.
func (c *controller) advance(now time.Duration) {
	k := &c.cohort
	age, long := float64(now-k.from), longTime*c.scale
	if !c.waiting {
		if !c.probing && c.base.known && now >= c.next {
			c.probe(now, c.next%probePeriod == 0)
			// Common probes are at multiples of the period. Processes that probe one by one would see each other's
			// queue, take it for slower work, and drive each other's limits up.
			c.next = (now + max(probePeriod, time.Duration(longPeriod*c.scale))) / probePeriod * probePeriod
			return
		}
		least := max(float64(cohortTime), c.scale)
		if c.probing {
			least = 2 * c.drain()
		}
		if (k.began < cohortSamples || age < least) && (k.began < fewSamples || age < long) {
			return
		}
		if c.probing {
			c.setLimit(c.before)
		}
		c.waiting, k.from, age = true, now, 0
	}
	if k.ended < k.began && age < long {
		return
	}
	for ; k.ended < k.began; k.ended++ {
		c.sample(age, answered) // a lower bound: the call still runs
	}
	done, probed := c.cohort, c.probing
	c.nextCohort(now)
	switch {
	case probed:
		c.learnFromProbe(&done.answered, now)
	case done.all.n >= fewSamples:
		c.adjust(&done, now)
	}
}

// adjust adjusts the limit to the samples of a cohort.
func (c *controller) adjust(k *cohort, now time.Duration) {
	first := c.mean == 0
	c.latency, c.mean = k.all.log(), k.all.mean()
	if first { // its calls are slower, because connections and caches are cold
		c.scale = c.mean
		return
	}
	served := float64(k.answered.n) / float64(k.all.n)
	c.scale += (c.mean - c.scale) / 2
	if !c.base.known { // even if most calls fail, the limit must recover when they no longer do
		c.setLimit(min(c.desiredLimit(served), max(c.limit, float64(c.cfg.Initial))))
		if c.learn(&k.answered, math.Inf(1)) {
			c.ceiling, c.next, c.doubt, c.reached = c.base.log, nextSecond(now), true, true
		}
		return
	}

	limit, most, former, gradient := math.Floor(c.limit), float64(k.most), c.former, c.gradient()
	c.former, c.reached = c.limit, most >= limit
	if most < 0.7*min(limit, former) && gradient >= slowGradient { // the server was idle
		c.learn(&k.answered, c.ceiling+0.05)
		if c.limit > 4*most {
			c.setLimit(max(0.97*c.limit, min(c.limit, float64(c.cfg.Initial))))
		}
		return
	}
	wanted := c.desiredLimit(min(gradient, growMost, max(served, shrinkMost)))
	if wanted >= slowGradient*c.limit {
		c.peak.limit = 0
	} else if c.peak.limit == 0 {
		c.peak.limit, c.peak.latency = c.limit, c.latency
	}
	if wanted < c.limit || most >= 0.9*limit {
		c.setLimit(wanted)
	}
	// With half of the calls, the latency is nearly the same: the work may have become slower.
	if c.limit < c.peak.limit/2 && c.latency > c.peak.latency+relief*math.Log(c.limit/c.peak.limit) {
		c.probe(now, false)
	}
}

// desiredLimit returns the limit after a cohort that needed the given part of it. The square root lets the limit grow,
// and leaves it some slots while a part of the calls fails.
func (c *controller) desiredLimit(part float64) float64 {
	return max(c.limit*part+math.Sqrt(c.limit*part), shrinkMost*c.limit)
}

// gradient returns the part of the limit at which calls would take as long as Tolerance allows.
func (c *controller) gradient() float64 { return math.Exp(c.base.log + c.base.rise - c.latency) }

// probe lowers the limit until no call waits at the server. The next cohort then shows the latency of an idle server.
// By Little's law, an idle server needs a share of the limit that equals the ratio of its latency to the current
// latency. In a common probe, a limit that is not reached is not lowered, because no call waits then.
func (c *controller) probe(now time.Duration, common bool) {
	c.nextCohort(now)
	c.probing, c.common, c.before, c.peak.limit = true, common, c.limit, 0
	if common && !c.reached {
		return
	}
	share := probeShare
	if c.doubt {
		share = doubtShare
	}
	idle := c.base.mean * math.Exp(c.ceiling-c.base.log)
	c.setLimit(c.limit * share * min(1, idle/min(c.scale, c.mean)))
}

// drain returns the time after which the server's queue is taken to be empty in a probe, in ns.
func (c *controller) drain() float64 { return max(float64(drainTime), c.scale) }

// learnFromProbe updates the base, and the limit if the base has changed, from the samples of a probe.
func (c *controller) learnFromProbe(s *samples, now time.Duration) {
	former := c.base.log
	if c.base.isQueueing(s) {
		c.doubt = false
		if c.common {
			c.ceiling = former
		}
		return
	}
	highest := former + math.Log(probeRise)
	if c.doubt {
		highest = former
	}
	changed := c.learn(s, highest)
	if c.common || c.base.log < c.ceiling {
		c.ceiling = c.base.log
	}
	slower := c.base.log - former
	c.doubt = changed && slower < 0
	if !changed {
		return
	}
	c.next = nextSecond(now) // another probe confirms the change
	if slower > 0 {
		// The same number of calls a second needs more slots, and the limit has lost some by now.
		c.setLimit(c.limit * min(math.Exp(slower), 2))
	} else {
		c.setLimit(c.limit * min(1, c.gradient()))
		c.scale *= math.Exp(slower)
	}
}

// nextSecond returns the next full second. Processes that probe before the next common probe also do so at the same
// time.
func nextSecond(now time.Duration) time.Duration { return now.Truncate(time.Second) + time.Second }

// isQueueing reports whether a queue that the probe could not empty explains latencies above the base. Slower work
// multiplies each latency, which does not change the spread. A wait added to each latency divides the spread by the
// square of the rise. If all calls suddenly take equally long, the spread is smaller still.
func (b *base) isQueueing(s *samples) bool {
	if b.spread < fewSpread || s.log() <= b.log {
		return false
	}
	alike := b.spread * math.Exp(2*(b.log-s.log()))
	return s.spread() < spreadOfWork*b.spread && s.spread() >= spreadOfQueue*alike
}

// learn updates the base, and reports whether the latency of an idle server has changed. A difference that may be noise
// is weighted by the precision of the samples relative to that of the base, as in a Kalman filter. The base does not
// rise above highest.
func (c *controller) learn(s *samples, highest float64) (changed bool) {
	b, n := &c.base, float64(s.n)
	former := b.log
	if s.n < fewSamples {
		return false
	}
	if !b.known {
		*b = base{true, s.log(), s.spread() / n, s.spread(), s.rise(), s.mean()}
		return true
	}
	// The spread of a single cohort is not reliable: if one call in a hundred is long, a cohort without such a call
	// looks fast and precise.
	noise := max(b.spread, s.spread()) / n
	b.variance += drift * drift
	changed = math.Abs(s.log()-b.log) > surprise*math.Sqrt(noise+b.variance)
	if changed { // the rise was measured with the former mean; it is at least that of calls that take equally long
		rise := max(min(b.rise, s.rise()), math.Log1p(c.cfg.Tolerance))
		*b = base{true, s.log(), noise, s.spread(), rise, s.mean()}
	} else {
		gain, weight := b.variance/(b.variance+noise), n/(n+memory)
		b.variance *= 1 - gain
		b.log += gain * (s.log() - b.log)
		b.rise += weight * (s.rise() - b.rise)
		b.mean += weight * (s.mean() - b.mean)
		b.spread += weight * (s.spread() - b.spread)
	}
	b.log = min(b.log, max(former, highest))
	return changed
}
