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
// A process that probes alone sees the queue of the others. So all processes probe at the
// same moments: every 10 s of Unix time, and if they need a probe earlier, mostly at a
// full second. Then the queue is empty. But clocks differ, and not all clients have a
// limit. So a probe raises the base only if its latencies differ among each other as those
// of slower work do: a queue adds about the same wait to all, and their logarithms differ
// less.
//
// A controller has no clock. The caller gives it the Unix time, which may go back no more
// than calls race.
type controller struct {
	cfg     AdaptiveLimit
	limit   float64 // with a fraction, which makes it grow from 1
	former  float64 // at the last adjustment
	base    base
	latency float64 // mean logarithm of the last cohort
	mean    float64 // arithmetic mean latency of the last cohort, in ns
	scale   float64 // of the last cohorts: their time scale
	scaled  bool    // scale is known, and not assumed

	cohort  cohort
	waiting bool // no call joins the cohort any more; some are still running
	reached bool // the last cohort reached the limit
	peak    peak

	moved time.Duration // when a call last began or ended, or got room to begin
	room  int           // the higher limit of those at the ends of the last two cohorts with calls
	last  int           // that at the end of the last of them

	probing bool          // the cohort is a probe
	common  bool          // and all processes make it
	before  float64       // the limit to go back to when no more calls join the probe
	next    time.Duration // when to probe again
	ceiling float64       // of base.log until the next common probe
	doubt   bool          // base is new or has just fallen, perhaps not far enough
}

// A peak is where the limit began to shrink.
type peak struct{ limit, latency float64 }

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

func newController(cfg AdaptiveLimit) controller {
	return controller{
		cfg:    cfg,
		limit:  float64(cfg.Initial),
		room:   cfg.Initial,
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
	c.room, c.last = c.Limit(), c.Limit()
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
	if c.cohort.began > 0 {
		c.room, c.last = max(c.Limit(), c.last), c.Limit()
	}
	c.cohort = cohort{number: c.cohort.number + 1, from: now}
	c.waiting, c.probing = false, false
}

// lowered reports whether the limit is lowered for a probe.
func (c *controller) lowered() bool { return c.probing && !c.waiting }

// abandon ends a probe early, without a conclusion.
func (c *controller) abandon(now time.Duration) {
	c.setLimit(c.before)
	c.nextCohort(now)
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
	c.moved = now
	c.advance(now)
	if c.waiting {
		return call{start: now}
	}
	k := &c.cohort
	if k.number == 1 && k.began == 0 {
		k.from = now
	}
	if c.probing && float64(now-k.from) < c.drain() {
		return call{start: now}
	}
	k.began++
	k.most = max(k.most, inFlight)
	return call{start: now, cohort: k.number}
}

// want notes that a call cannot begin under a limit of less than n. If the limit has shrunk
// below what calls hold that run for long, such as streams, no call can begin any more, so
// that nothing else would raise it again. It rises to no more than most: a server that hangs
// does not get ever more calls.
func (c *controller) want(now time.Duration, n, most int) {
	if n <= most && float64(now-c.moved) >= max(float64(cohortTime), longTime*c.scale) {
		c.moved = now
		c.setLimit(max(c.limit, float64(n)))
		c.before = max(c.before, c.limit) // a probe ends with no less
	}
}

func (c *controller) end(ended call, now time.Duration, how outcome) {
	c.moved = now
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
		if !c.probing && c.base.known && now >= c.next {
			c.probe(now, c.next%probePeriod == 0)
			c.next = c.following(now)
			return
		}
		least := max(float64(cohortTime), scale)
		if c.probing {
			least = 2 * c.drain()
		}
		enough := k.began >= cohortSamples && age >= least
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
	c.latency, c.mean = k.all.log(), k.all.mean()
	served := float64(k.answered.n) / float64(k.all.n)
	if !c.scaled { // the first calls after a start are slower, and tell only the time scale
		c.scaled, c.scale = true, c.mean
		return
	}
	c.scale += (c.mean - c.scale) / 2
	if !c.base.known {
		c.setLimit(min(c.limit, c.wanted(served)))
		if c.learn(&k.answered, math.Inf(1)) {
			c.ceiling, c.next, c.doubt = c.base.log, soon(now), true
			c.reached = true
		}
		return
	}

	limit, most, former := math.Floor(c.limit), float64(k.most), c.former
	c.former, c.reached = c.limit, most >= limit
	gradient := c.gradient()
	if most < 0.7*min(limit, former) && gradient >= slowGradient { // the server was idle
		c.learn(&k.answered, c.ceiling+0.05)
		if c.limit > 4*most {
			c.setLimit(max(0.97*c.limit, min(c.limit, float64(c.cfg.Initial))))
		}
		return
	}
	wanted := c.wanted(min(gradient, growMost, max(served, shrinkMost)))
	switch {
	case wanted >= slowGradient*c.limit:
		c.peak = peak{}
	case c.peak.limit == 0:
		c.peak = peak{c.limit, c.latency}
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
func (c *controller) gradient() float64 {
	return math.Exp(c.base.log + c.base.rise - c.latency)
}

// probe lowers the limit until no call waits at the server, so that the next cohort
// shows the latency of an idle one. By Little's law, the calls of an idle server take
// the part of the limit that their latency is of the present one. At a common probe, a
// limit that is not reached may stay: it makes nobody wait.
func (c *controller) probe(now time.Duration, common bool) {
	c.nextCohort(now)
	c.probing, c.common, c.before, c.peak = true, common, c.limit, peak{}
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
	c.doubt = changed && c.base.log < former
	if !changed {
		return
	}
	c.next = soon(now) // a change is confirmed by another probe
	if slower := c.base.log - former; slower > 0 {
		// It needs more slots for as many calls a second, and has lost some meanwhile.
		c.setLimit(c.limit * min(math.Exp(slower), 2))
	} else {
		c.setLimit(c.limit * min(1, c.gradient()))
		c.scale *= math.Exp(slower)
	}
}

// mayBeQueue reports whether the latencies of a probe are above the base by a queue
// that it could not empty. Slower work multiplies each latency, which leaves the spread
// as it is. A wait that is added to each divides it by the square of the rise; the waits
// differ, too. If work takes all alike all of a sudden, the spread is less still.
func (b *base) mayBeQueue(s *samples) bool {
	if b.spread < fewSpread || s.log() <= b.log {
		return false
	}
	alike := b.spread * math.Exp(2*(b.log-s.log()))
	return s.spread() < spreadOfWork*b.spread && s.spread() >= spreadOfQueue*alike
}

// period returns the time from one probe to the next.
func (c *controller) period() time.Duration {
	return max(probePeriod, time.Duration(longPeriod*c.scale))
}

// following returns the time of the next common probe.
func (c *controller) following(now time.Duration) time.Duration {
	return (now + c.period()) / probePeriod * probePeriod
}

// soon returns the next full second.
func soon(now time.Duration) time.Duration { return now.Truncate(time.Second) + time.Second }

// learn learns the latency of an idle server, up and down alike, and reports whether it
// has changed. A difference that may be noise counts by the precision of the samples
// beside that of the base: a Kalman filter. A few samples count for nothing. Above
// highest, the base does not rise.
func (c *controller) learn(s *samples, highest float64) (changed bool) {
	b, n := &c.base, float64(s.n)
	former := b.log
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
	noise := max(b.spread, s.spread()) / n
	b.variance += drift * drift
	defer func() { b.log = min(b.log, max(former, highest)) }()
	changed = math.Abs(s.log()-b.log) > surprise*math.Sqrt(noise+b.variance)
	if changed { // the rise was measured by the former mean
		b.log, b.variance, b.spread, b.mean = s.log(), noise, s.spread(), s.mean()
		least := math.Log1p(c.cfg.Tolerance) // as if all calls took alike
		b.rise = max(min(b.rise, s.rise()), least)
		return true
	}
	gain, weight := b.variance/(b.variance+noise), n/(n+memory)
	b.variance *= 1 - gain
	b.log += gain * (s.log() - b.log)
	b.rise += weight * (s.rise() - b.rise)
	b.mean += weight * (s.mean() - b.mean)
	b.spread += weight * (s.spread() - b.spread)
	return false
}
