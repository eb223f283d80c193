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
//     a month as at 1e12 a second, and rounds nothing, so it stays exact.
//   - A Limiter starts with a full burst. A call spends one token, or the number
//     that Cost returns. A call that fails has spent its tokens all the same;
//     [Limiter.Refund] gives them back.
//   - A Limiter may have quotas besides its rate: 1000 tokens a day, 10 000 a month of a
//     calendar. A call takes its tokens from all of them or from none. See [Quota].
//   - A refused call learns from [LimitedError.RetryAfter] when to come back.
//   - With a MaxWait, a call waits for its tokens in a queue: behind the calls of more
//     important levels and earlier calls of its own level. A call that could not get
//     its tokens in time is refused immediately.
//   - With Levels, the less important calls are refused first, as Reserve says, and
//     are displaced first from a full queue.
//   - [Limiter.Update] changes the configuration while the limiter runs, and keeps what
//     has been spent and the calls that wait. [Limiter.Observe] and [Limiter.Stats] tell
//     what it does.
//
// A [Group] holds a limit for each of many tenants; [Group.Snapshot] keeps what
// they have spent across a restart. A [Shared] has limits for many instances, kept in
// Redis. An [Adaptive] stops a client from sending calls that the server would turn
// away.
//
// Source: Throttling in the Cloud Design Patterns catalog
// (https://learn.microsoft.com/azure/architecture/patterns/throttling). The
// algorithm is the generic cell rate algorithm in its virtual scheduling form
// (ITU-T I.371), which is equivalent to a token bucket.
package throttle

import (
	"cmp"
	"context"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/settings"
)

// Config says how a [Limiter] works.
type Config struct {
	// Name appears in errors, events and figures. Optional.
	Name string

	// Rate is the number of tokens a second: above 0, at most 1e12. It is required,
	// unless there are Quotas: then zero means that only these limit. [PerMinute]
	// helps. It is taken as the fraction that it was computed from: 7.0/3600 is 7 tokens in
	// an hour, and not the float64 next to that.
	Rate float64

	// Burst is how many tokens may be spent at once after a pause. Zero means a
	// second's worth: Rate, rounded up. A Burst must refill within 36 years.
	Burst int

	// Quotas bound the tokens of longer times, such as a day: at most 8, each for another
	// window. A call takes its tokens from the Burst and from each quota, or from none of
	// them. A call that finds too few tokens in a quota is refused immediately, whatever
	// MaxWait is: [OverQuota]. A call that waits for the Rate takes its tokens from the
	// quotas when it begins to wait, so it counts in the windows of that time.
	Quotas []Quota

	// MaxWait is how long a call may wait for its tokens. Zero means that a call
	// without tokens is refused immediately, negative that it may wait until its ctx
	// ends. A call that could not get its tokens within MaxWait is refused
	// immediately; a call that is overtaken by more important ones is refused when
	// MaxWait has passed. Waiting calls are released on a schedule that follows the
	// rate exactly: if a timer is late, all calls that are due are released together.
	MaxWait time.Duration

	// Queue is how many calls may wait at once. Zero means 1000. If the queue is full, a
	// call that is more important than one of the waiting calls takes its place: the last
	// call of the least important level is refused. Queue needs a MaxWait.
	Queue int

	// Levels is the number of priority levels, at most 1000. Zero means 1. More
	// need a Priority.
	Levels int

	// Priority returns the level of a call: 0 is the most important. A value outside
	// 0 ... Levels-1 is clamped. Priority needs Levels.
	Priority func(context.Context) int

	// Reserve[i] is the share of Burst, and of each quota, that is kept for level i and
	// the levels more important than i. The shares add up: with a Burst of 10 and Reserve
	// {0.2, 0.3}, level 0 may spend all 10 tokens, level 1 may spend 8 of them, and level 2
	// may spend 5. The tokens that are kept are rounded down, and leave at least one token
	// to every level.
	//
	// There are at most Levels-1 shares, each at least 0; their sum is below 1. Missing
	// ones are 0. Nil means 1/(2 x Levels) for each level but the last, so that the
	// least important level may spend a little more than half of Burst. An empty slice
	// that is not nil keeps nothing.
	Reserve []float64

	// Cost returns how many tokens a call takes. Nil means 1. A call of cost 0 is always
	// admitted. A negative cost counts as 0. A call that costs more than its level may
	// spend at once is refused immediately: [TooCostly].
	Cost func(context.Context) int
}

// Validate returns an error that names each invalid field, or nil.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "throttle.Config"}
	c.validate(&f)
	return f.Err()
}

func (c Config) validate(f *invalid.Fields) {
	c.limit().validate(f)
	f.Need(c.Queue >= 0, "Queue", c.Queue, "0 (for 1000) or more")
	f.Need(c.Queue <= 0 || c.MaxWait != 0, "Queue", c.Queue, "0 where MaxWait is 0: no call waits")
	checkLevels(f, c.Levels, c.Priority)
	checkReserve(f, c.Levels, c.Reserve)
}

// withDefaults returns a valid c with its zero fields filled in. It shares no memory
// with c.
func (c Config) withDefaults() Config {
	c.setLimit(c.limit().withDefaults())
	if c.MaxWait != 0 {
		c.Queue = cmp.Or(c.Queue, 1000)
	}
	c.Levels = cmp.Or(c.Levels, 1)
	c.Reserve = reserveOf(c.Levels, c.Reserve)
	return c
}

func (c *Config) limit() Limit { return Limit{c.Rate, c.Burst, c.Quotas} }

func (c *Config) setLimit(l Limit) { c.Rate, c.Burst, c.Quotas = l.Rate, l.Burst, l.Quotas }

// of returns the tokens and the level of a call.
func (c *Config) of(ctx context.Context) (n, level int) {
	n = 1
	if c.Cost != nil {
		n = max(c.Cost(ctx), 0)
	}
	if c.Priority != nil {
		level = min(max(c.Priority(ctx), 0), c.Levels-1)
	}
	return n, level
}

// A Limiter admits calls at a limited rate. It is safe for concurrent use. [New]
// makes one.
type Limiter struct {
	account
	ledger    ledger
	observers observers
	setting   settings.Setting[Config] // whose lock is taken before mu
}

// New returns a Limiter with a full burst. It panics with the error of
// cfg.Validate, if there is one.
func New(cfg Config) *Limiter {
	l := &Limiter{}
	l.setting.Init(cfg, Config.withDefaults)
	l.account.make(&l.ledger, newTerms(l.setting.Load()))
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
	cfg := l.terms.Load().cfg
	n, level := cfg.of(ctx)
	return l.acquire(ctx, l.caller(), cfg, n, level)
}

func (l *Limiter) caller() caller { return caller{observers: &l.observers} }

// Admit takes the tokens of a call as [Limiter.Wait] does, and returns what is left for the
// level of the call, as [Limiter.Peek] does for the least important one.
func (l *Limiter) Admit(ctx context.Context) (Decision, error) {
	if ctx.Err() != nil {
		return l.Peek(), ended.Error(ctx)
	}
	cfg := l.terms.Load().cfg
	n, level := cfg.of(ctx)
	err := l.acquire(ctx, l.caller(), cfg, n, level)
	return l.peek(level), err
}

// Allow takes a token if there is one, and reports whether it did. It does not wait.
// Like [Limiter.Take] it takes the token for the least important level and does not
// call Cost or Priority.
func (l *Limiter) Allow() bool {
	_, _, ok := l.take(1, l.terms.Load().least, true)
	return ok
}

// Take takes n tokens for the least important level, if all of them are there. It
// does not wait. If n is 0 or less, Take takes none and admits.
func (l *Limiter) Take(n int) Decision {
	d, _ := l.decide(max(n, 0), l.terms.Load().least)
	return d
}

// Peek returns the Decision that a Take of 1 would return, but takes nothing: its
// Remaining is the number of tokens that are there now.
func (l *Limiter) Peek() Decision { return l.peek(l.terms.Load().least) }

// Refund gives back n tokens of a call that was admitted but not made. Waiting calls
// get them first. Refund gives back no more tokens than were spent, and no more than
// fill the burst. If n is 0 or less it does nothing. The tokens can be spent again
// immediately, so an interval that began after the call was admitted may see n tokens more.
func (l *Limiter) Refund(n int) { l.refund(n) }

// Stats returns a snapshot.
func (l *Limiter) Stats() Stats {
	s := Stats{Totals: l.totals()}
	l.mu.Lock()
	defer l.mu.Unlock()
	s.Queued = l.queued()
	return s
}

// Observe calls f with each event from now on, until stop is called: synchronously, with
// the ctx of the call, and while no lock is held. The kinds are EventRefused, and
// EventWaited, before the function of the call runs. Allow and
// Take cause no events, as their result tells all. A panic in f passes on to the caller. A
// second call of stop does nothing.
func (l *Limiter) Observe(f func(context.Context, Event)) (stop func()) {
	return l.observers.Observe(f)
}
