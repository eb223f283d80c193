// Package throttle limits the rate at which calls are made or accepted: in all,
// for each tenant, and across instances.
//
//	limit := throttle.New(throttle.Config{
//		Name:    "search",
//		Rate:    100,                   // tokens a second
//		Burst:   20,                    // tokens that may be spent at once
//		MaxWait: 50 * time.Millisecond, // how long a call may wait for its tokens
//	})
//	err := limit.Do(ctx, func(ctx context.Context) error { return search(ctx, "go") })
//	if limited, ok := errors.AsType[*throttle.LimitedError](err); ok {
//		log.Printf("come back in %v", limited.RetryAfter()) // the call was not made
//	}
//
// What to know:
//
//   - Over any interval a [Limiter] admits at most Burst + Rate x interval tokens,
//     whatever the number of goroutines. It is exact to the nanosecond, at a token
//     a month as at 1e12 a second, and stays exact for years.
//   - A Limiter starts with a full burst. A call spends one token, or the number
//     that Cost returns. A call that fails has spent its tokens all the same;
//     [Limiter.Refund] gives them back.
//   - A refused call learns from [LimitedError.RetryAfter] when to come back.
//   - With a MaxWait, a call waits for its tokens in a queue: behind calls of more
//     important levels and earlier calls of its own level. A call that could not get
//     its tokens in time is refused immediately.
//   - With Levels, the less important calls are refused first, as Reserve says, and
//     are displaced first from a full queue. [Limiter.Level] tells an application
//     which features to switch off before essential calls are refused.
//
// A [Group] holds a limit for each of up to a million tenants. A [Shared] is one
// limit for many instances, kept in Redis. An [Adaptive] stops a client from sending
// calls that the server would refuse.
//
// Source: Throttling in the Cloud Design Patterns catalogue
// (https://learn.microsoft.com/azure/architecture/patterns/throttling). The
// algorithm is the generic cell rate algorithm in its virtual scheduling form
// (ITU-T I.371), which is equivalent to a token bucket.
package throttle

import (
	"cmp"
	"context"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
)

// Config says how a [Limiter] works.
type Config struct {
	// Name appears in errors. Optional.
	Name string

	// Rate is the number of tokens a second: above 0, at most 1e12. It is required.
	// [PerMinute], [PerHour] and [Every] help.
	Rate float64

	// Burst is how many tokens may be spent at once after a pause. Zero means a
	// second's worth: Rate, rounded up. A Burst must refill within 36 years.
	Burst int

	// MaxWait is how long a call may wait for its tokens. Zero means that a call
	// without tokens is refused immediately, negative that it may wait until its ctx
	// ends. A call that could not get its tokens within MaxWait is refused
	// immediately; a call that is overtaken by more important ones is refused when
	// MaxWait has passed. Waiting calls are released on a schedule that follows the
	// rate exactly: if a timer is late, all calls that are due are released together.
	MaxWait time.Duration

	// Queue is how many calls may wait. Zero means 1000. If the queue is full, a call
	// that is more important than one of the waiting calls takes its place: the last
	// call of the least important level is refused. Queue needs a MaxWait.
	Queue int

	// Levels is the number of priority levels, at most 1000. Zero means 1. More
	// need a Priority.
	Levels int

	// Priority returns the level of a call: 0 is the most important. A value outside
	// 0 ... Levels-1 is clamped. Priority needs Levels.
	Priority func(context.Context) int

	// Reserve[i] is the share of Burst that is kept for level i and the levels above
	// it. The shares add up: level j may spend Burst x (1 - Reserve[0] - ... -
	// Reserve[j-1]), where the reserved part is rounded down to whole tokens. With a
	// Burst of 10 and a Reserve of {0.5}, a call of level 1 is admitted only if it
	// leaves 5 tokens. There are at most Levels-1 shares, each at least 0; their sum
	// is below 1. Nil means 1/(2 x Levels) for each level but the last, so that the
	// least important level may spend a little more than half of Burst. An empty slice
	// that is not nil keeps nothing.
	Reserve []float64

	// Cost returns how many tokens a call takes. Nil means 1. A call that takes 0
	// or fewer is always admitted. A call that takes more than its level may spend at
	// once is never admitted.
	Cost func(context.Context) int

	// OnReject, if not nil, is called with the call's ctx for each call that Do or
	// Wait refuses.
	OnReject func(context.Context, *LimitedError)
}

// Validate returns an error that lists the invalid fields, or nil.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "throttle.Config"}
	checkRate(&f, c.Rate, c.Burst)
	f.Need(c.Queue >= 0, "Queue", c.Queue, "0 (for 1000) or more")
	f.Need(c.Queue <= 0 || c.MaxWait != 0, "Queue", c.Queue, "0 where MaxWait is 0: no call waits")
	checkLevels(&f, c.Levels, c.Priority)
	checkReserve(&f, c.Levels, c.Reserve)
	return f.Err()
}

// withDefaults returns a valid c with its zero fields filled in. It shares no memory
// with c.
func (c Config) withDefaults() Config {
	c.Burst = burstOf(c.Rate, c.Burst)
	if c.MaxWait != 0 {
		c.Queue = cmp.Or(c.Queue, 1000)
	}
	c.Levels = cmp.Or(c.Levels, 1)
	c.Reserve = reserveOf(c.Levels, c.Reserve)
	return c
}

// of returns the tokens and the level of a call.
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

// A Limiter admits calls at a limited rate. It is safe for concurrent use. [New]
// makes one.
type Limiter struct {
	cfg   Config
	key   string // of the Group member that it is
	epoch atomic.Pointer[terms]

	_        [64]byte // the fields below change with each call, those above do not
	tat      atomic.Int64
	admitted atomic.Int64
	refused  atomic.Int64
	extra    atomic.Int64 // tokens spent, less the calls that were admitted
	_        [64]byte

	queue queue
	level atomic.Int32 // the last result of Level
}

// New returns a Limiter with a full burst. It panics with the error of
// cfg.Validate, if there is one.
func New(cfg Config) *Limiter {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	cfg = cfg.withDefaults()
	return newLimiter(cfg, newTerms(newPace(cfg.Rate, cfg.Burst), cfg, time.Now()))
}

func newLimiter(cfg Config, t terms) *Limiter {
	l := &Limiter{cfg: cfg}
	l.queue.levels = make([]line, cfg.Levels)
	l.level.Store(int32(cfg.Levels - 1))
	l.epoch.Store(&t)
	return l
}

// Do takes the tokens of a call, runs fn and returns its error. Without tokens the
// call waits, if MaxWait allows it. Otherwise Do returns a [*LimitedError] and does
// not run fn. If ctx has already ended, Do returns why.
func (l *Limiter) Do(ctx context.Context, fn func(context.Context) error) error {
	if err := l.Wait(ctx); err != nil {
		return err
	}
	return fn(ctx)
}

// Wrap returns a function that runs next as [Limiter.Do] does.
func (l *Limiter) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return l.Do(ctx, next) }
}

// Wait takes the tokens of a call as [Limiter.Do] does, for work that is not one
// function. With a MaxWait of 0 it admits or refuses the call immediately.
func (l *Limiter) Wait(ctx context.Context) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	n, level := l.cfg.of(ctx)
	return l.acquire(ctx, n, level)
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

// Allow takes a token if there is one, and reports whether it did. It does not wait.
// Like [Limiter.Take] it takes the token for the least important level and does not
// call Cost, Priority or OnReject.
func (l *Limiter) Allow() bool {
	_, ok := l.take(1, l.cfg.Levels-1)
	if !ok {
		l.refused.Add(1)
	}
	return ok
}

// A Decision says whether tokens were taken and what is left: the information that
// the headers of an HTTP response give a client.
type Decision struct {
	OK         bool
	Limit      int           // the Burst
	Window     time.Duration // the time in which the Burst refills, to the nearest nanosecond
	Remaining  int           // tokens that could be taken now, after this decision
	RetryAfter time.Duration // the time until the same tokens could be taken, if no other call takes any: 0 if they were taken; the longest Duration if they never can be
	ResetAfter time.Duration // the time until the burst is full again, if no call takes any
}

// Take takes n tokens for the least important level, if all of them are there. It
// does not wait. If n is 0 or less, Take takes none and admits.
func (l *Limiter) Take(n int) Decision {
	d, _ := l.decide(n, l.cfg.Levels-1)
	return d
}

func (l *Limiter) decide(n, level int) (Decision, Reason) {
	m, ok := l.take(n, level)
	d := m.decision(ok, n, level)
	if ok {
		return d, ""
	}
	l.refused.Add(1)
	if m.cannot(n, level) {
		return d, TooCostly
	}
	return d, OverLimit
}

// Peek returns the Decision that a Take of 1 would return, but takes nothing: its
// Remaining is the number of tokens that are there now.
func (l *Limiter) Peek() Decision {
	level := l.cfg.Levels - 1
	m := l.measure()
	return m.decision(m.wait(1, level) == 0, 1, level)
}

// Refund gives back n tokens of a call that was admitted but not made. Waiting calls
// get them first. Refund gives back no more tokens than were spent, and no more than
// fill the burst. If n is 0 or less it does nothing. The tokens can be spent again at
// once, so an interval that began after the call was admitted may see n tokens more.
func (l *Limiter) Refund(n int) {
	l.queue.mu.Lock()
	defer l.queue.mu.Unlock()
	if n = int(min(int64(n), l.Stats().Spent)); n > 0 {
		l.giveBack(n)
	}
}

// giveBack gives back n tokens that were spent. The caller holds queue.mu.
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
// If the limit is invalid, SetRate returns the error and changes nothing.
//
// Tokens that have been spent stay spent: if 7 of 10 tokens are gone, then 7 of 20
// are gone as well, which leaves 13, and they refill at the new rate. A debt that
// would take longer than 54 years to refill is cut to that. A waiting call keeps its
// place and its MaxWait, and waits as long as the new rate requires. It is admitted
// even if it takes more than the new burst.
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

// take moves the tat ahead by n tokens if the level has room for them. It returns
// the measure after that.
func (l *Limiter) take(n, level int) (m measure, ok bool) {
	if l.queue.waiting.Load() != 0 {
		l.due() // waiting calls go first, even if their timer is late
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
		// Because of max, a clock that was read too early does no harm.
		tat := max(m.tat, m.now) + units
		if l.tat.CompareAndSwap(m.tat, tat) {
			l.count(n)
			m.tat = tat
			return m, true
		}
		// Another call was faster. Reading the clock again would take longer than all
		// of the rest.
		if m.tat, ok = l.tatOf(m.terms); !ok {
			m = l.measure()
		}
	}
}

// count counts an admitted call of n tokens.
func (l *Limiter) count(n int) {
	l.admitted.Add(1)
	if n != 1 {
		l.extra.Add(int64(n) - 1)
	}
}

// refuse counts and reports a refused call.
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
