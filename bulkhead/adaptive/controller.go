package adaptive

import (
	"math"
	"time"
)

// A controller finds a limit by comparing the latency of the calls with that of an idle
// server. docs/decisions/adaptive-limit.md says why it does what it does.
//
// It looks at one cohort after the other: the calls that begin in a certain time. Then it waits
// for all of them, because of the calls that end in a certain time the short ones come first,
// which looks like a faster server. It compares means of logarithms, because one long call in a
// hundred would drown an arithmetic mean in noise.
//
// A controller has no clock. The caller gives it the Unix time, which may go back no more
// than calls race.
type controller struct {
	cfg     Config
	limit   float64 // with a fraction, since it would not grow from 1 otherwise
	former  float64 // limit at the last adjustment
	base    base
	latency float64 // mean logarithm of the last cohort
	mean    float64 // arithmetic mean of the last cohort, in ns; 0: there was none
	scale   float64 // mean of the last cohorts, in ns: how long things take

	cohort  cohort
	waiting bool                             // no call joins the cohort any more
	reached bool                             // the last cohort used the whole limit
	peak    struct{ limit, latency float64 } // where the limit began to shrink

	moved  time.Duration // when a call last began or ended, or the limit was raised for one
	recent [2]int        // the limit at the ends of the last two cohorts

	probing bool          // the cohort is a probe
	common  bool          // and all processes make it
	before  float64       // the limit that comes back when no more calls join the probe
	next    time.Duration // when to probe again
	ceiling float64       // of base.log until the next common probe
	doubt   bool          // base is new or has just fallen, perhaps not far enough
}

// A base is the latency of an idle server, as far as it is known.
type base struct {
	known    bool
	log      float64 // mean logarithm
	variance float64 // of log, by what it was learned from
	spread   float64 // variance of the logarithm of one call
	rise     float64 // of log, if each call waits for Tolerance times mean
	mean     float64 // arithmetic, in ns
}

// A result is what the end of a call says of the load.
type result int

const (
	answered result = iota
	overran         // the server has too much to do
	silent          // nothing
)

// A call is what the controller needs again when the call ends.
type call struct {
	start  time.Duration
	cohort int // 0: none
}

type cohort struct {
	number   int
	from     time.Duration // when calls began to join it, and then: when it began to wait
	began    int
	ended    int
	most     int     // slots that were taken
	all      samples // those that overran included
	answered samples
}

// samples sums up latencies.
type samples struct {
	n                           int
	sum, logs, squares, delayed float64 // of latencies in ns, their logarithms, ...
}

// add adds a latency. delayed sums up what it would be after a wait.
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
	cohortTime    = 100 * time.Millisecond // at the least, and as long as a call takes
	cohortSamples = 50
	fewSamples    = 10 // are enough after longTime
	longTime      = 10 // mean latencies: also the longest wait for the calls of a cohort

	shrinkMost, growMost = 0.7, 1.5 // times the limit, after one cohort
	slowGradient         = 0.95     // and less: the calls are slower than they may be
	relief               = 0.4      // of the limit's fall ought to show in the latency, in logarithms

	probePeriod = 10 * time.Second // at the least; longPeriod mean latencies
	longPeriod  = 100
	probeRise   = 1.5                   // times the base, at the most, after one probe
	probeShare  = 0.75                  // of the slots in which an idle server would do as much
	doubtShare  = 0.25                  // the same, in doubt
	drainTime   = 75 * time.Millisecond // at the least, until a queue is empty: clocks differ

	surprise = 3.0   // standard errors from the base: more is a change, and not noise
	drift    = 0.005 // of the base from cohort to cohort, as a standard deviation
	memory   = 200   // samples that the other figures of the base go back to

	spreadOfWork  = 0.75 // of the base's is the least spread of slower work
	spreadOfQueue = 0.3  // of what it is if all wait alike is the least spread of a queue
	fewSpread     = 0.01 // and less of the base tells nothing: a tenth of the latency

	overranAt = 4 // times an idle server's is the least latency of a call that overran
)

func newController(cfg Config) controller {
	return controller{
		cfg: cfg, limit: float64(cfg.Initial), recent: [2]int{cfg.Initial}, scale: float64(cohortTime),
		cohort: cohort{number: 1},
	}
}

// Limit returns the present limit.
func (c *controller) Limit() int { return int(c.limit) }

func (c *controller) setLimit(limit float64) {
	c.limit = min(max(limit, float64(c.cfg.Min)), float64(c.cfg.Max))
}

// lowered reports whether the limit is lowered for a probe.
func (c *controller) lowered() bool { return c.probing && !c.waiting }

// update goes on with another configuration and what was learned. A probe ends.
func (c *controller) update(now time.Duration, cfg Config) {
	if c.lowered() {
		c.limit = c.before
	}
	c.nextCohort(now)
	// As if all calls took alike, until it is measured again.
	c.base.rise *= math.Log1p(cfg.Tolerance) / math.Log1p(c.cfg.Tolerance)
	c.cfg = cfg
	c.setLimit(c.limit)
	c.recent[0], c.recent[1] = min(c.recent[0], cfg.Max), min(c.recent[1], cfg.Max)
}

func (c *controller) nextCohort(now time.Duration) {
	if c.cohort.began > 0 {
		c.recent = [2]int{c.Limit(), c.recent[0]}
	}
	c.cohort = cohort{number: c.cohort.number + 1, from: now}
	c.waiting, c.probing = false, false
}

// begin notes that a call starts, with which so many slots are taken.
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

// makeRoom is asked while a call waits or is refused for the limit. Calls that run for long,
// such as streams, may hold more slots than a limit that has shrunk has, so that no call begins
// or ends, and nothing else would raise it. If that is so for a while, the limit is raised by
// one more than are taken, but not above what it was lately and the slots of responses that are
// still being read: a server that hangs does not get ever more calls.
func (c *controller) makeRoom(now time.Duration, taken, reading int) {
	room := max(c.Limit(), taken) + 1
	least := max(float64(cohortTime), longTime*c.scale)
	if room <= max(c.recent[0], c.recent[1])+reading && float64(now-c.moved) >= least {
		c.moved = now
		c.setLimit(float64(room))
		c.before = max(c.before, c.limit) // a probe ends with no less
	}
}

// end notes the end of a call.
func (c *controller) end(ended call, now time.Duration, how result) {
	c.moved = now
	if ended.cohort == c.cohort.number {
		c.cohort.ended++
		c.sample(float64(now-ended.start), how)
	}
	c.advance(now)
}

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

// advance takes a cohort through its phases: calls join it, the controller waits for those that
// still run, and it draws its conclusion.
func (c *controller) advance(now time.Duration) {
	k := &c.cohort
	age, long := float64(now-k.from), longTime*c.scale
	if !c.waiting {
		if !c.probing && c.base.known && now >= c.next {
			c.probe(now, c.next%probePeriod == 0)
			// The common probes are at multiples of the period: processes that probe one by one see
			// each other's queue, take it for slower work, and drive each other's limits up.
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
		c.sample(age, answered) // at the least: the call still runs
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

// adjust makes the limit what a cohort says.
func (c *controller) adjust(k *cohort, now time.Duration) {
	first := c.mean == 0
	c.latency, c.mean = k.all.log(), k.all.mean()
	if first { // its calls are slower, without connections and caches
		c.scale = c.mean
		return
	}
	served := float64(k.answered.n) / float64(k.all.n)
	c.scale += (c.mean - c.scale) / 2
	if !c.base.known { // also if most calls fail, the limit is to come back when they no longer do
		c.setLimit(min(c.wanted(served), max(c.limit, float64(c.cfg.Initial))))
		if c.learn(&k.answered, math.Inf(1)) {
			c.ceiling, c.next, c.doubt, c.reached = c.base.log, soon(now), true, true
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
	wanted := c.wanted(min(gradient, growMost, max(served, shrinkMost)))
	if wanted >= slowGradient*c.limit {
		c.peak.limit = 0
	} else if c.peak.limit == 0 {
		c.peak.limit, c.peak.latency = c.limit, c.latency
	}
	if wanted < c.limit || most >= 0.9*limit {
		c.setLimit(wanted)
	}
	// Half the calls and nearly the same latency: the work may have become slower.
	if c.limit < c.peak.limit/2 && c.latency > c.peak.latency+relief*math.Log(c.limit/c.peak.limit) {
		c.probe(now, false)
	}
}

// wanted returns the limit after a cohort for which that part of it would have done. The
// square root lets it grow, and leaves it some slots though a part of the calls fails.
func (c *controller) wanted(part float64) float64 {
	return max(c.limit*part+math.Sqrt(c.limit*part), shrinkMost*c.limit)
}

// gradient returns the part of the limit in which the calls would take as long as they may.
func (c *controller) gradient() float64 { return math.Exp(c.base.log + c.base.rise - c.latency) }

// probe lowers the limit until no call waits at the server, so that the next cohort
// shows the latency of an idle one. By Little's law, the calls of an idle server take
// the part of the limit that their latency is of the present one. At a common probe, a
// limit that is not reached may stay: it makes nobody wait.
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

// drain returns how long a probe waits until the queue of the server is empty, in ns.
func (c *controller) drain() float64 { return max(float64(drainTime), c.scale) }

func (c *controller) learnFromProbe(s *samples, now time.Duration) {
	former := c.base.log
	if c.base.mayBeQueue(s) {
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
	c.next = soon(now) // a change is confirmed by another probe
	if slower > 0 {
		// It needs more slots for as many calls a second, and has lost some meanwhile.
		c.setLimit(c.limit * min(math.Exp(slower), 2))
	} else {
		c.setLimit(c.limit * min(1, c.gradient()))
		c.scale *= math.Exp(slower)
	}
}

// soon returns the next full second: processes that probe earlier than at the next common
// probe do so together, too.
func soon(now time.Duration) time.Duration { return now.Truncate(time.Second) + time.Second }

// mayBeQueue reports whether the latencies of a probe are above the base by a queue that it
// could not empty. Slower work multiplies each latency, which leaves the spread as it is. A wait
// that is added to each divides it by the square of the rise. If work takes all alike all of a
// sudden, the spread is less still.
func (b *base) mayBeQueue(s *samples) bool {
	if b.spread < fewSpread || s.log() <= b.log {
		return false
	}
	alike := b.spread * math.Exp(2*(b.log-s.log()))
	return s.spread() < spreadOfWork*b.spread && s.spread() >= spreadOfQueue*alike
}

// learn learns the latency of an idle server, up and down alike, and reports whether it
// has changed. A difference that may be noise counts by the precision of the samples
// beside that of the base: a Kalman filter. The base does not rise above highest.
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
	// One cohort's own spread is not to be trusted: where one call in a hundred is
	// long, a cohort without any looks fast, and sure of it.
	noise := max(b.spread, s.spread()) / n
	b.variance += drift * drift
	changed = math.Abs(s.log()-b.log) > surprise*math.Sqrt(noise+b.variance)
	if changed { // the rise was measured by the former mean; at the least, all calls take alike
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
