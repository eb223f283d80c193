package adaptive

import (
	"math"
	"time"
)

// A controller finds a limit by comparing the latency of calls with the latency of an idle server.
// docs/decisions/adaptive-limit.md gives the reasons for the controller's rules.
//
// The controller evaluates cohorts, one after the other. A cohort consists of the calls that start within a period. The
// controller waits until all calls in a cohort have ended. Otherwise it would see only the short calls, which end
// first, and the server would look faster than it is. The controller compares means of the logarithms of latencies.
// Arithmetic means would be too noisy if one call in a hundred is long.
//
// A controller has no clock. Its callers pass the Unix time. If two calls run concurrently, the second may pass a
// slightly earlier time than the first.
type controller struct {
	cfg     Config
	limit   float64 // has a fraction; otherwise a limit of 1 would not grow
	former  float64 // limit before the last adjustment
	base    base
	latency float64 // mean logarithm of the last cohort's latencies
	mean    float64 // arithmetic mean of the last cohort's latencies, in ns; 0 before the first cohort ends
	scale   float64 // the usual latency: mean of the last cohorts, in ns; the time scale of all rules

	cohort  cohort
	waiting bool                             // the cohort is complete, and its calls still run
	reached bool                             // the last cohort used the whole limit
	peak    struct{ limit, latency float64 } // values when the limit started to shrink; limit is 0 if it does not

	moved  time.Duration // time at which a call last started or ended, or the limit was raised for a call
	recent [2]int        // the limit at the end of each of the last two cohorts

	probing bool          // the cohort is a probe
	common  bool          // all processes start this probe at the same time
	before  float64       // the limit to restore when the probe's cohort is complete
	next    time.Duration // time at which the next probe starts
	ceiling float64       // upper bound of base.log until the next common probe
	doubt   bool          // base is new or has just fallen; an idle server may be even faster
}

// A base is the known latency of an idle server.
type base struct {
	known    bool
	log      float64 // mean logarithm of the latency
	variance float64 // variance of the error of log
	spread   float64 // variance of the logarithm of a single call's latency
	rise     float64 // the amount by which log grows if each call waits for Tolerance times mean
	mean     float64 // arithmetic mean of the latency, in ns
}

// A result is the information that a finished call gives about the load of the server.
type result int

const (
	answered result = iota // the latency of the call is a sample
	overran                // the call ran out of time or was throttled, so the server is overloaded
	silent                 // the call gives no information
)

// A call holds the values of a call from begin to end. The caller of begin passes the call to end.
type call struct {
	start  time.Duration
	cohort int // the number of the cohort that the call belongs to; 0 if the call belongs to no cohort
}

// A cohort consists of the calls that start within a period, with their samples. It is complete when no more calls
// join it.
type cohort struct {
	number   int
	from     time.Duration // start of the period; if the cohort is complete, the end of the period
	began    int           // number of calls that have started
	ended    int           // number of calls that have ended
	most     int           // maximum number of slots taken at the same time
	all      samples       // samples of calls that were answered or overran
	answered samples       // samples of calls that were answered
}

// samples are sums over latencies.
type samples struct {
	n       int     // number of latencies
	sum     float64 // sum of the latencies, in ns
	logs    float64 // sum of the logarithms of the latencies
	squares float64 // sum of the squares of the logarithms
	delayed float64 // sum of the logarithms of latency + wait; see add
}

// add adds a latency. wait is the additional wait for the sum in delayed.
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

// spread returns the variance of the logarithms of the latencies.
func (s *samples) spread() float64 { return max(0, s.squares/float64(s.n)-s.log()*s.log()) }

const (
	cohortTime    = 100 * time.Millisecond // minimum length of a cohort, unless the usual latency is longer
	cohortSamples = 50                     // number of calls that completes a cohort after the minimum length
	fewSamples    = 10                     // number of calls that completes a cohort after longTime

	// longTime is a multiple of the usual latency. After this time, fewSamples calls are enough to complete a cohort. It
	// is also the longest time for which the controller waits until the calls in a complete cohort have ended.
	longTime = 10

	// After one cohort, the new limit is at least shrinkMost times the former limit. The argument of desiredLimit is at
	// most growMost.
	shrinkMost, growMost = 0.7, 1.5
	slowGradient         = 0.95 // a lower gradient means that the calls are slower than Tolerance allows

	// A limit that shrinks must lower the latency by at least relief times as much. Both changes are measured in
	// logarithms. If the latency falls by less, the server may have become slower, and a probe starts.
	relief = 0.4

	probePeriod = 10 * time.Second      // minimum period of common probes
	longPeriod  = 100                   // minimum period of common probes, in multiples of the usual latency
	probeRise   = 1.5                   // maximum factor by which one probe raises the base
	probeShare  = 0.75                  // the limit in a probe, as a share of an idle server's need at this load
	doubtShare  = 0.25                  // replaces probeShare while controller.doubt is set
	drainTime   = 75 * time.Millisecond // minimum time for a queue to become empty; clocks of processes differ

	surprise = 3.0   // a difference from the base is a change, not noise, if it exceeds this number of standard errors
	drift    = 0.005 // standard deviation of the base's change from cohort to cohort
	memory   = 200   // number of samples over which the base's spread, rise and mean are averaged

	spreadOfWork  = 0.75 // minimum spread of slower work, as a share of the base's spread
	spreadOfQueue = 0.3  // minimum spread of a queue, as a share of the spread if all calls wait equally long
	fewSpread     = 0.01 // minimum spread of the base for a comparison; deviation of about a tenth of the latency

	overranAt = 4 // minimum latency of a call that overran, as a multiple of the idle server's latency
)

func newController(cfg Config) controller {
	return controller{
		cfg: cfg, limit: float64(cfg.Initial), recent: [2]int{cfg.Initial}, scale: float64(cohortTime),
		cohort: cohort{number: 1},
	}
}

// Limit returns the current limit.
func (c *controller) Limit() int { return int(c.limit) }

// setLimit sets the limit. A limit outside Min and Max is clamped.
func (c *controller) setLimit(limit float64) {
	c.limit = min(max(limit, float64(c.cfg.Min)), float64(c.cfg.Max))
}

// loweredForProbe reports whether a probe has lowered the limit.
func (c *controller) loweredForProbe() bool { return c.probing && !c.waiting }

// update changes the configuration, and ends a probe that is in progress. The learned values remain.
func (c *controller) update(now time.Duration, cfg Config) {
	if c.loweredForProbe() {
		c.limit = c.before
	}
	c.nextCohort(now)
	// The next samples measure the rise for the new Tolerance. Until then, the former rise is scaled as if all calls
	// took equally long.
	c.base.rise *= math.Log1p(cfg.Tolerance) / math.Log1p(c.cfg.Tolerance)
	c.cfg = cfg
	c.setLimit(c.limit)
	c.recent[0], c.recent[1] = min(c.recent[0], cfg.Max), min(c.recent[1], cfg.Max)
}

// nextCohort starts a new cohort. The new cohort is not a probe.
func (c *controller) nextCohort(now time.Duration) {
	if c.cohort.began > 0 {
		c.recent = [2]int{c.Limit(), c.recent[0]}
	}
	c.cohort = cohort{number: c.cohort.number + 1, from: now}
	c.waiting, c.probing = false, false
}

// begin records the start of a call. taken is the number of slots taken, including the slots of the call.
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

// makeRoom is called when a call waits or is refused because of the limit. Long calls, such as streams, may hold more
// slots than a limit that has shrunk. If no call starts or ends, only makeRoom can raise the limit. After a minimum
// time without a start or an end, makeRoom raises the limit by one slot. If more slots than the limit are taken, the
// new limit is one more than the number of slots taken. The new limit is at most a recent limit plus the slots of
// responses that are still being read. Without this bound, a server that hangs would get more and more calls.
func (c *controller) makeRoom(now time.Duration, taken, reading int) {
	room := max(c.Limit(), taken) + 1
	least := max(float64(cohortTime), longTime*c.scale)
	if room <= max(c.recent[0], c.recent[1])+reading && float64(now-c.moved) >= least {
		c.moved = now
		c.setLimit(float64(room))
		c.before = max(c.before, c.limit) // the end of a probe must not lower the limit again
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

// sample adds the latency of a call, in ns, to the cohort.
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

// cutOff adds a sample for the work of a call that was cut off for lack of time after the call had ended. The latency
// of the work is not known. The sample gets at least the mean latency of the cohort. A shorter latency would make the
// usual latency too short. If neither the mean nor the base is known, cutOff adds no sample.
func (c *controller) cutOff() {
	if all := &c.cohort.all; c.base.known || all.n > 0 {
		c.sample(all.sum/float64(max(all.n, 1)), overran)
	}
}

// advance moves the cohort to its next phase if the current phase is over. In the first phase, calls join the cohort.
// In the second phase, the controller waits for calls that still run. Then the controller evaluates the samples.
func (c *controller) advance(now time.Duration) {
	k := &c.cohort
	age, long := float64(now-k.from), longTime*c.scale
	if !c.waiting {
		if !c.probing && c.base.known && now >= c.next {
			c.probe(now, c.next%probePeriod == 0)
			// Common probes start at multiples of the period, so all processes probe at the same time. If processes
			// probed one by one, each process would see the queue of the others. The process would take this queue
			// for slower work, and raise its limit.
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
		c.sample(age, answered) // the call still runs, so age is a lower bound
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
	if first { // the first calls are slower, because connections and caches are cold
		c.scale = c.mean
		return
	}
	served := float64(k.answered.n) / float64(k.all.n)
	c.scale += (c.mean - c.scale) / 2
	if !c.base.known { // the limit shrinks if most calls fail; it must grow again when calls succeed
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
	// The limit is less than half of its peak, but the latency is nearly the same. The work may have become slower.
	if c.limit < c.peak.limit/2 && c.latency > c.peak.latency+relief*math.Log(c.limit/c.peak.limit) {
		c.probe(now, false)
	}
}

// desiredLimit returns the new limit after a cohort. part is the share of the current limit that the cohort needed.
// The square root adds room: the limit can grow if part is 1, and it does not shrink to 0 if some calls fail.
func (c *controller) desiredLimit(part float64) float64 {
	return max(c.limit*part+math.Sqrt(c.limit*part), shrinkMost*c.limit)
}

// gradient returns a factor for the limit. If the limit were multiplied by this factor, calls would take as long as
// Tolerance allows.
func (c *controller) gradient() float64 { return math.Exp(c.base.log + c.base.rise - c.latency) }

// probe starts a probe: it lowers the limit until no call waits in the server. The next cohort then shows the latency
// of an idle server. By Little's law, an idle server needs only a share of the current limit. The share is the ratio of
// the idle server's latency to the current latency. If the last cohort did not reach the limit, no call waits in the
// server. In this case, a common probe does not lower the limit.
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

// drain returns the time from the start of a probe until the server's queue is assumed to be empty, in ns.
func (c *controller) drain() float64 { return max(float64(drainTime), c.scale) }

// learnFromProbe updates the base from the samples of a probe. If the base has changed, it also updates the limit.
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
		// The same number of calls a second needs more slots if calls take longer. The limit has shrunk while the longer
		// latency looked like a queue.
		c.setLimit(c.limit * min(math.Exp(slower), 2))
	} else {
		c.setLimit(c.limit * min(1, c.gradient()))
		c.scale *= math.Exp(slower)
	}
}

// nextSecond returns the next full second. Processes that probe between two common probes then probe at the same
// time.
func nextSecond(now time.Duration) time.Duration { return now.Truncate(time.Second) + time.Second }

// isQueueing reports whether the samples are slower than the base because of a queue that the probe could not empty.
// The spread of the samples distinguishes a queue from slower work. Slower work multiplies each latency by a factor,
// and does not change the spread. A queue adds a wait to each latency. If all calls wait equally long, the spread is
// divided by the square of the factor by which the mean latency has grown. A spread that is even smaller means that
// all calls suddenly take equally long, which is not caused by a queue.
func (b *base) isQueueing(s *samples) bool {
	if b.spread < fewSpread || s.log() <= b.log {
		return false
	}
	alike := b.spread * math.Exp(2*(b.log-s.log()))
	return s.spread() < spreadOfWork*b.spread && s.spread() >= spreadOfQueue*alike
}

// learn updates the base, and reports whether the latency of an idle server has changed. If the difference between the
// samples and the base may be noise, the base moves by a part of the difference. As in a Kalman filter, this part
// depends on the precision of the samples and on the precision of the base. The base does not rise above highest.
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
	// The spread of a single cohort is not reliable. If one call in a hundred is long, a cohort without a long call
	// looks fast and precise.
	noise := max(b.spread, s.spread()) / n
	b.variance += drift * drift
	changed = math.Abs(s.log()-b.log) > surprise*math.Sqrt(noise+b.variance)
	if changed {
		// s.rise was measured with the former mean. The new rise is at least the rise of calls that take equally long.
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
