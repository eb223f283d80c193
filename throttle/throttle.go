// Package throttle limits the rate at which calls are made or accepted: in all,
// for each tenant, and across instances.
//
//	limit := throttle.New(throttle.Config{
//		Name:    "search",
//		Rate:    100,                   // tokens a second
//		Burst:   20,                    // that may be spent at once
//		MaxWait: 50 * time.Millisecond, // rather than refuse
//	})
//	err := limit.Do(ctx, func(ctx context.Context) error { return search(ctx, "go") })
//	if limited, ok := errors.AsType[*throttle.LimitedError](err); ok {
//		log.Printf("come back in %v", limited.RetryAfter()) // the call was never made
//	}
//
// What to know:
//
//   - Over any interval a [Limiter] admits at most Burst + Rate x interval tokens,
//     whatever the number of goroutines. It is exact to the nanosecond, at a token
//     a month as at 1e12 a second, and stays so for years.
//   - A full burst is there at the start. A call spends one token, or what Cost
//     says. A call that fails has spent its tokens all the same; [Limiter.Refund]
//     gives them back.
//   - Who is refused is told when to come back, by [LimitedError.RetryAfter].
//   - With a MaxWait a call waits for its tokens, behind the calls that are more
//     important and those of its level that came before it. A wait that cannot end
//     in time is refused at once.
//   - Of several Levels the less important are refused first, as Reserve says, and
//     leave a full queue first. [Limiter.Level] says which features to switch off
//     before that.
//
// A [Group] holds a limit for each of a million tenants, a [Shared] one limit for
// many instances, on Redis, and an [Adaptive] stops a client from sending what the
// server would refuse.
//
// Source: Throttling in the Cloud Design Patterns catalogue
// (https://learn.microsoft.com/azure/architecture/patterns/throttling). The
// algorithm is the generic cell rate algorithm in its virtual scheduling form
// (ITU-T I.371), of which a token bucket is another view.
package throttle

import (
	"context"
	"math"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
)

// Config says how a [Limiter] works.
type Config struct {
	// Name appears in errors. Optional.
	Name string

	// Rate is how many tokens a second there are to spend: above 0, at most 1e12.
	// It is required. [PerMinute], [PerHour] and [Every] help.
	Rate float64

	// Burst is how many tokens may be spent at once after a pause. Zero means a
	// second's worth: Rate, rounded up. It must refill within 36 years.
	Burst int

	// MaxWait is how long a call may wait for its tokens. Zero means that it is
	// refused at once where they are not there, negative that it may wait until
	// its ctx ends. A call that could not go on in time is refused immediately; one
	// that more important calls overtake is refused when MaxWait has passed. The
	// moments at which calls go on follow the rate exactly: where a timer is late,
	// those whose moment has passed go on together.
	MaxWait time.Duration

	// MaxQueue is how many calls may wait. Zero means 1000. Where so many wait, a call
	// that is more important than one of them takes its place: the last of the least
	// important is refused.
	MaxQueue int

	// Levels is the number of priority levels, at most 1000. Zero means 1. More
	// need a Priority.
	Levels int

	// Priority returns the level of a call: 0 is the most important. What it
	// returns is clamped to 0 ... Levels-1. It needs Levels.
	Priority func(context.Context) int

	// Reserve holds, for each level, the share of Burst that its calls leave to
	// the levels above, rounded down to whole tokens: with a Burst of 10 and
	// Reserve {0, 0.5}, a call of level 1 is admitted only if 5 tokens are left
	// after it. Each is at least 0, less than 1, and no less than the one before;
	// the first is 0. Nil means i/Levels for level i.
	Reserve []float64

	// Cost returns how many tokens a call takes. Nil means 1. A call that takes 0
	// or fewer is always admitted, one that takes more than Burst never.
	Cost func(context.Context) int

	// OnReject, if not nil, is called for each call that Do or Wait refuses, with
	// its ctx.
	OnReject func(context.Context, *LimitedError)
}

// Validate returns an error that says which fields cannot mean anything, or nil.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "throttle.Config"}
	c.validate(&f)
	return f.Err()
}

func (c Config) validate(f *invalid.Fields) {
	checkRate(f, c.Rate, c.Burst)
	f.Need(c.MaxQueue >= 0, "MaxQueue", c.MaxQueue, "0 (for 1000) or more")
	checkLevels(f, c.Levels, c.Priority, c.Reserve)
}

// A Limiter admits calls at a limited rate. It is safe for concurrent use, and
// built by [New].
type Limiter struct {
	cfg   Config
	key   string // of the Group's limit that it is
	epoch atomic.Pointer[terms]

	_        [64]byte // what follows changes with each call, what is above does not
	tat      atomic.Int64
	admitted atomic.Int64
	refused  atomic.Int64
	extra    atomic.Int64 // tokens spent, less the calls that were admitted
	_        [64]byte

	queue queue
	level atomic.Int32 // see Level
}

// The one word of state, tat, is the theoretical arrival time: the moment at
// which the burst is full again, in units of the present epoch. A call moves it
// by what it takes, and may do so up to the room of its level ahead of now.
//
// A new limit begins a new epoch, under the queue's lock: tat is sealed, the
// terms are exchanged, and tat is set to what is owed. It goes on from a higher
// number, so that who still goes by the old terms finds another tat than before.

// sealed is the tat between two epochs; nothing can be taken from it.
const sealed = math.MaxInt64

// terms are what a limit is measured with, until it changes.
type terms struct {
	pace
	base    time.Time
	begin   int64         // the time base, in units
	horizon time.Duration // since base; beyond it the units would overflow
	room    []int64       // by level, in units
}

// maxBegin is the highest number at which an epoch begins.
const maxBegin = int64(1) << 59

func newTerms(p pace, reserve []float64, base time.Time) terms {
	t := terms{pace: p, base: base, horizon: p.horizon(), room: make([]int64, len(reserve))}
	for level, share := range reserve {
		t.room[level] = p.tokens(p.burst - reserved(p.burst, share))
	}
	return t
}

// unitsAt returns elapsed as a number to compare a tat with.
func (t *terms) unitsAt(elapsed time.Duration) int64 { return t.begin + t.at(elapsed) }

// unitsLate is unitsAt for what may lie before base, or beyond the horizon: then
// it is, if not the number itself, more than any tat.
func (t *terms) unitsLate(elapsed time.Duration) int64 {
	most := t.until(0, math.MaxInt64-t.begin-1<<20)
	return t.unitsAt(min(max(elapsed, 0), most))
}

// New returns a Limiter with a full burst. It panics with the error of
// cfg.Validate, if there is one.
func New(cfg Config) *Limiter {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	cfg = cfg.withDefaults()
	return newLimiter(cfg, newTerms(newPace(cfg.Rate, cfg.Burst), cfg.Reserve, time.Now()))
}

func newLimiter(cfg Config, t terms) *Limiter {
	l := &Limiter{cfg: cfg}
	l.queue.levels = make([]line, cfg.Levels)
	l.level.Store(int32(cfg.Levels - 1))
	l.epoch.Store(&t)
	return l
}

func (c Config) withDefaults() Config {
	c.Levels = max(c.Levels, 1)
	c.Reserve = reserveOf(c.Levels, c.Reserve)
	if c.MaxQueue == 0 {
		c.MaxQueue = 1000
	}
	return c
}

// Do runs fn if there are tokens for it, and returns its error. It waits for
// them as Config allows, or returns a [*LimitedError] and does not call fn. If
// ctx has already ended, it returns why.
func (l *Limiter) Do(ctx context.Context, fn func(context.Context) error) error {
	if err := l.Wait(ctx); err != nil {
		return err
	}
	return fn(ctx)
}

// Wrap returns a function that does next as [Limiter.Do] does it.
func (l *Limiter) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return l.Do(ctx, next) }
}

// Wait takes the tokens of a call, as [Limiter.Do] does, for work that is not
// one function. With a MaxWait of 0 it does not wait, but admits or refuses.
func (l *Limiter) Wait(ctx context.Context) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	n, level := l.cfg.of(ctx)
	return l.acquire(ctx, n, level)
}

// of returns what a call costs and how important it is.
func (c *Config) of(ctx context.Context) (n, level int) {
	n = 1
	if c.Cost != nil {
		n = c.Cost(ctx)
	}
	if c.Priority != nil {
		level = min(max(c.Priority(ctx), 0), c.Levels-1)
	}
	return n, level
}

func (l *Limiter) acquire(ctx context.Context, n, level int) error {
	m, ok := l.take(n, level)
	switch {
	case ok:
		return nil
	case m.cannot(n, level):
		return l.refuse(ctx, TooCostly, n, level, never, nil)
	case l.cfg.MaxWait == 0:
		return l.refuse(ctx, OverLimit, n, level, m.wait(n, level), nil)
	}
	return l.wait(ctx, n, level)
}

// Allow takes a token if it is there, and reports whether it was. It does not
// wait. It asks for the least important level, as it knows no better, and like
// AllowN it does not call Cost, Priority or OnReject.
func (l *Limiter) Allow() bool {
	_, ok := l.take(1, l.cfg.Levels-1)
	if !ok {
		l.refused.Add(1)
	}
	return ok
}

// A Decision says whether tokens were taken, and how things stand: what the
// headers of an HTTP answer tell a client.
type Decision struct {
	OK         bool
	Limit      int           // the Burst
	Window     time.Duration // in which the Burst refills, to the nearest nanosecond
	Remaining  int           // tokens that could be taken now, after this
	RetryAfter time.Duration // until the same tokens could be taken, if nobody takes any: 0 if they were; the longest Duration if they never can
	ResetAfter time.Duration // until the burst is full again, if nobody takes any
}

// AllowN takes n tokens for the least important level if all of them are there.
// It does not wait. If n is 0 or less it takes none, and admits.
func (l *Limiter) AllowN(n int) Decision {
	d, _ := l.decide(n, l.cfg.Levels-1)
	return d
}

func (l *Limiter) decide(n, level int) (Decision, Reason) {
	m, ok := l.take(n, level)
	d := m.decision(ok, n, level)
	if ok {
		return d, 0
	}
	l.refused.Add(1)
	if m.cannot(n, level) {
		return d, TooCostly
	}
	return d, OverLimit
}

// Peek says what an AllowN of 1 would, and takes nothing. Its Remaining is what
// there is now.
func (l *Limiter) Peek() Decision {
	level := l.cfg.Levels - 1
	m := l.measure()
	return m.decision(m.wait(1, level) == 0, 1, level)
}

// Refund gives back n tokens of a call that was admitted but not made, to those
// who wait first. No more come back than were spent, nor than fill the burst. If n is
// 0 or less it does nothing. What is given back can be spent at once, so that an
// interval that began after the call was admitted may see that much more.
func (l *Limiter) Refund(n int) {
	l.queue.mu.Lock()
	defer l.queue.mu.Unlock()
	if n = int(min(int64(n), l.Stats().Spent)); n > 0 {
		l.giveBack(n)
	}
}

// giveBack gives back n tokens that were spent. The caller holds the lock.
func (l *Limiter) giveBack(n int) {
	l.extra.Add(-int64(n))
	l.putBack(n)
	l.serve()
}

// Stats is a snapshot of what a [Limiter] has done.
type Stats struct {
	Admitted int64 // calls
	Refused  int64 // calls
	Waited   int64 // calls that were admitted after a wait
	Spent    int64 // tokens, less those given back
	Waiting  int   // calls that wait now
}

// Stats returns what the limiter has done so far.
func (l *Limiter) Stats() Stats {
	s := Stats{
		Admitted: l.admitted.Load(),
		Refused:  l.refused.Load(),
		Waited:   l.queue.waited.Load(),
		Waiting:  int(l.queue.waiting.Load()),
	}
	s.Spent = s.Admitted + l.extra.Load()
	return s
}

// SetRate changes the limit. As in Config, a burst of 0 means a second's worth.
// If the limit cannot mean anything, it returns the error and changes nothing.
//
// What has been spent stays spent: if 7 of 10 tokens are gone, they are gone of
// 20 as well, which leaves 13, and refill at the new rate; of what would take
// longer, 54 years' worth is kept. A call that waits keeps its place and waits as
// long as the new rate has it, MaxWait at most, and then goes on even if it takes
// more than the new burst.
func (l *Limiter) SetRate(rate float64, burst int) error {
	f := invalid.Fields{Type: "throttle.Config"}
	checkRate(&f, rate, burst)
	if err := f.Err(); err != nil {
		return err
	}
	l.queue.mu.Lock()
	defer l.queue.mu.Unlock()
	l.begin(newPace(rate, burst))
	l.serve()
	return nil
}

// begin starts an epoch with the debt of the last. The caller holds the lock.
func (l *Limiter) begin(p pace) {
	last := l.epoch.Load()
	next := newTerms(p, l.cfg.Reserve, time.Now())
	now := last.unitsLate(next.base.Sub(last.base))
	tat := l.tat.Swap(sealed)
	if next.begin = max(tat, now) + 1; next.begin > maxBegin {
		next.begin = 0
	}
	q := &l.queue
	owed := next.convert(tat-q.units-now, &last.pace)
	q.units = 0
	for i := range q.levels {
		line := &q.levels[i]
		line.units = 0
		for w := line.first; w != nil; w = w.next {
			w.units = min(next.convert(w.units, &last.pace), maxBurst+maxDebt-owed-q.units)
			line.units += w.units
			q.units += w.units
		}
	}
	l.epoch.Store(&next)
	l.tat.Store(next.begin + owed + q.units)
}

// take moves the tat ahead by n tokens if the level has room for them. It
// returns how things stand after that.
func (l *Limiter) take(n, level int) (m measure, ok bool) {
	if l.queue.waiting.Load() != 0 {
		l.due() // first, if their timer is late
	}
	m = l.measure()
	if n <= 0 {
		l.count(0)
		return m, true
	}
	for {
		if m.cannot(n, level) { // the burst may have become smaller
			return m, false
		}
		units := m.tokens(n)
		if m.tat > m.now+m.room[level]-units {
			return m, false
		}
		// With max, a clock that was read too early does no harm.
		tat := max(m.tat, m.now) + units
		if l.tat.CompareAndSwap(m.tat, tat) {
			l.count(n)
			m.tat = tat
			return m, true
		}
		// Others want it, too. Adding nothing fetches the cache line to write it, as
		// is about to be done: so it changes hands once and not twice. The clock is
		// not read again, which would take longer than all of the rest.
		l.tat.Add(0)
		if m.tat, ok = l.tatOf(m.terms); !ok {
			m = l.measure()
		}
	}
}

// count counts a call that was admitted for n tokens.
func (l *Limiter) count(n int) {
	l.admitted.Add(1)
	if n != 1 {
		l.extra.Add(int64(n) - 1)
	}
}

// A measure is how a limit stands at a moment.
type measure struct {
	*terms
	elapsed  time.Duration
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
	l.queue.mu.Lock() // another epoch begins
	defer l.queue.mu.Unlock()
	return l.measureLocked()
}

// tatOf reads the tat, and reports whether it is one of the terms t: it is if they
// are still the same after that.
func (l *Limiter) tatOf(t *terms) (tat int64, ok bool) {
	tat = l.tat.Load()
	return tat, tat != sealed && l.epoch.Load() == t
}

// measureLocked is measure for who holds the lock, so that the epoch stays.
func (l *Limiter) measureLocked() measure {
	t := l.epoch.Load()
	elapsed := time.Since(t.base)
	// The units must not overflow, nor the time be one of before the epoch, as
	// that of a synctest bubble can be.
	if uint64(elapsed) > uint64(t.horizon) {
		l.begin(t.pace)
		t = l.epoch.Load()
		elapsed = max(time.Since(t.base), 0)
	}
	return measure{t, elapsed, t.unitsAt(elapsed), l.tat.Load()}
}

// until returns how long it takes until now is at target.
func (m measure) until(target int64) time.Duration {
	return m.pace.until(m.elapsed, target-m.begin)
}

// cannot reports whether the level's room could never do for n tokens.
func (m measure) cannot(n, level int) bool {
	return n > 0 && int64(n) > m.room[level]>>m.frac
}

// wait returns how long it takes until n tokens could be taken.
func (m measure) wait(n, level int) time.Duration {
	switch {
	case n <= 0:
		return 0
	case m.cannot(n, level):
		return never
	}
	return m.until(max(m.tat, m.now) + m.tokens(n) - m.room[level])
}

func (m measure) decision(ok bool, n, level int) Decision {
	d := Decision{
		OK:         ok,
		Limit:      m.burst,
		Window:     windowOf(m.rate, m.burst),
		Remaining:  int(max(m.room[level]-max(m.tat-m.now, 0), 0) >> m.frac),
		ResetAfter: m.until(m.tat),
	}
	if !ok {
		d.RetryAfter = m.wait(n, level)
	}
	return d
}

// refuse counts a refused call and reports it.
func (l *Limiter) refuse(ctx context.Context, why Reason, n, level int, after time.Duration, cause error) error {
	l.refused.Add(1)
	err := &LimitedError{
		Name: l.cfg.Name, Key: l.key, Reason: why, Limit: l.epoch.Load().burst,
		Level: level, Cost: n, After: after, Err: cause,
	}
	if l.cfg.OnReject != nil {
		l.cfg.OnReject(ctx, err)
	}
	return err
}
