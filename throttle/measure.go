package throttle

import (
	"math"
	"time"
)

// The state of a limit is one word, the theoretical arrival time or tat: the moment
// at which the burst is full again, in units of the present epoch. A call moves the
// tat ahead by the units of its tokens. The tat may be ahead of now by at most the
// room of the call's level.
//
// A new limit begins a new epoch under queue.mu: begin seals the tat, exchanges the
// terms, and sets the tat to the present debt. An epoch begins at a higher number
// than any tat of the epoch before. So a call that still uses the old terms fails to
// swap the tat, and measures again.

// sealed is the tat between two epochs. No call can take from it.
const sealed = math.MaxInt64

// terms are the limit of one epoch.
type terms struct {
	pace
	cfg     *Config // with its defaults filled in; never written to
	base    time.Time
	begin   int64         // the time base, in units
	horizon time.Duration // the time since base after which the units would overflow
	least   int           // the least important level
	room    []int64       // in units, by level
	most    []int         // tokens that a call may take, by level: of the burst and of each quota
	quotas  []quotaTerms
}

// maxBegin is the highest number at which an epoch begins.
const maxBegin = int64(1) << 59

// newTerms returns the terms of cfg from now on.
func newTerms(cfg *Config) *terms {
	p := cfg.limit().pace()
	t := &terms{
		pace: p, cfg: cfg, base: time.Now(), horizon: p.horizon(),
		least: cfg.Levels - 1, room: make([]int64, cfg.Levels), quotas: newQuotaTerms(cfg.Quotas, cfg.Levels, cfg.Reserve),
	}
	for level := range t.room {
		most := roomOf(p.burst, cfg.Reserve, level)
		t.room[level] = p.tokens(most)
		for i := range t.quotas {
			most = min(most, t.quotas[i].room[level])
		}
		t.most = append(t.most, most)
	}
	return t
}

// unitsAt returns elapsed in units, to compare with a tat.
func (t *terms) unitsAt(elapsed time.Duration) int64 { return t.begin + t.at(elapsed) }

// unitsLate is unitsAt for an elapsed that may be negative or beyond the horizon.
// Beyond it the result is not exact, but above every tat.
func (t *terms) unitsLate(elapsed time.Duration) int64 {
	most := t.until(0, math.MaxInt64-t.begin-1<<20)
	return t.unitsAt(min(max(elapsed, 0), most))
}

// A measure is a limit at a moment. It has four words, as the compiler keeps no larger
// struct in registers.
type measure struct {
	*terms
	elapsed  time.Duration // since base
	now, tat int64
}

// measure reads the clock and the tat of the present epoch.
func (l *Limiter) measure() measure {
	t := l.epoch.Load()
	elapsed := time.Since(t.base)
	if uint64(elapsed) <= uint64(t.horizon) {
		if tat, ok := l.tatOf(t); ok {
			return measure{t, elapsed, t.unitsAt(elapsed), tat}
		}
	}
	l.queue.mu.Lock() // a new epoch begins, or has to
	defer l.queue.mu.Unlock()
	return l.measureLocked()
}

// tatOf reads the tat and reports whether it belongs to t: it does if t are still
// the terms after the tat was read.
func (l *Limiter) tatOf(t *terms) (tat int64, ok bool) {
	tat = l.tat.Load()
	return tat, tat != sealed && l.epoch.Load() == t
}

// measureLocked is measure for a caller that holds queue.mu, so that no other
// goroutine begins an epoch.
func (l *Limiter) measureLocked() measure {
	t := l.epoch.Load()
	elapsed := time.Since(t.base)
	// The units must not overflow. The time may also lie before base, for a Limiter
	// that is used inside and outside of a synctest bubble.
	if uint64(elapsed) > uint64(t.horizon) {
		l.begin(t.cfg)
		t = l.epoch.Load()
		elapsed = max(time.Since(t.base), 0)
	}
	return measure{t, elapsed, t.unitsAt(elapsed), l.tat.Load()}
}

// begin starts an epoch under cfg with the debt of the last epoch. The caller holds
// queue.mu.
func (l *Limiter) begin(cfg *Config) {
	last := l.epoch.Load()
	next := newTerms(cfg)
	now := last.unitsLate(next.base.Sub(last.base))
	tat := l.tat.Swap(sealed)
	if next.begin = max(tat, now) + 1; next.begin > maxBegin {
		next.begin = 0
	}
	q := &l.queue
	from := next.inherit(last)
	l.windows = pick(l.windows, from)
	owed := next.convert(tat-q.units-now, &last.pace)
	q.units = 0
	for i := range q.levels {
		line := &q.levels[i]
		line.units = 0
		for w := line.first; w != nil; w = w.next {
			w.units = min(next.convert(w.units, &last.pace), maxBurst+maxDebt-owed-q.units)
			w.ends = pick(w.ends, from)
			line.units += w.units
			q.units += w.units
		}
	}
	l.epoch.Store(next)
	l.tat.Store(next.begin + owed + q.units)
}

// until returns the time until now reaches target.
func (m measure) until(target int64) time.Duration {
	return m.pace.until(m.elapsed, target-m.begin)
}

// cannot reports whether n tokens are more than a level can ever spend at once.
func (m measure) cannot(n, level int) bool {
	return n > m.most[level]
}

// refusal returns why n tokens could not be taken.
func (m measure) refusal(b *bound, n, level int) Reason {
	if b != nil {
		return b.why
	}
	if m.cannot(n, level) {
		return TooCostly
	}
	return OverLimit
}

// wait returns the time until n tokens could be taken.
func (m measure) wait(n, level int) time.Duration {
	switch {
	case n <= 0:
		return 0
	case m.cannot(n, level):
		return never
	case m.rate == 0: // only quotas limit
		return 0
	}
	return m.until(max(m.tat, m.now) + m.tokens(n) - m.room[level])
}

// size returns the Limit of what is not about one quota: the burst, if there is a rate.
func (t *terms) size() int {
	if t.rate == 0 {
		return t.quotas[0].N
	}
	return t.burst
}

// remaining returns how many tokens a level could take from the burst.
func (m measure) remaining(level int) int {
	return int(max(m.room[level]-max(m.tat-m.now, 0), 0) >> m.frac)
}

func (m measure) decision(b *bound, ok bool, n, level int) Decision {
	if b != nil {
		return b.Decision
	}
	d := Decision{
		OK:         ok,
		Limit:      m.size(),
		Window:     windowOf(m.rate, m.burst),
		Remaining:  m.remaining(level),
		ResetAfter: m.until(m.tat),
	}
	if !ok {
		d.RetryAfter = m.wait(n, level)
	}
	return d
}
