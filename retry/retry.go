// Package retry calls a function again while its error is worth another
// attempt.
//
//	retries := retry.New(retry.Config{
//		Attempts: 4,
//		Budget:   budget, // shared by all that call this dependency
//		OnRetry: func(ctx context.Context, a retry.Attempt) {
//			slog.WarnContext(ctx, "retrying", "attempt", a.Number, "in", a.Delay, "err", a.Err)
//		},
//	})
//	err := retries.Do(ctx, func(ctx context.Context) error {
//		return fetch(ctx, 42)
//	})
//
// Retry what may safely be done twice: an attempt that failed may yet have taken
// effect. Then these rules hold:
//
//   - Delays are random and grow (full jitter): clients that failed together do
//     not come back together.
//   - A wait that could not end before the deadline of ctx is not begun. What
//     comes back says both why no attempt followed and what the last one said:
//     see [Error].
//   - An error that another attempt cannot help ends the retrying and comes back
//     as it is: see [Permanent] and [Retryable].
//   - An error with a method RetryAfter() time.Duration sets the least delay.
//   - A [Budget] keeps retries to a fraction of the calls when a dependency is
//     down, where retries make things worse.
//   - Only the outermost of nested retriers retries. Its mark travels in the ctx
//     that fn is given, so pass that on.
//
// [Hedge] is for calls that are slow rather than failing.
//
// The pattern is Retry of the Cloud Design Patterns
// (https://learn.microsoft.com/azure/architecture/patterns/retry); for budgets
// and nested retries see "Addressing Cascading Failures" in Site Reliability
// Engineering (Beyer et al., 2016). Delays are computed by
// github.com/cenkalti/backoff/v4.
package retry

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/linger"
)

// Config says when, how often and how long a [Retrier] retries.
type Config struct {
	// Name appears in errors and events. It may be empty.
	Name string

	// Attempts is how often fn is called at most, the first included. Zero means
	// 3, or with [Delays] one more than there are delays; a negative number, no
	// limit.
	Attempts int

	// MaxElapsed limits the time since the call of Do: a wait that would pass it
	// is not begun. It does not end an attempt; AttemptTimeout does. Zero means
	// no limit but the deadline of ctx.
	MaxElapsed time.Duration

	// AttemptTimeout is the time that each attempt's ctx leaves it. An attempt
	// that fails when it has passed is retried like any other. Within a
	// resiliencehttp.Transport an attempt that succeeds ends with the body of its
	// response. Zero means none.
	AttemptTimeout time.Duration

	// Backoff returns the delays of one call, from its first failure on: a new
	// BackOff each time, since they have state. Any negative delay ends the
	// retrying; a panic passes through. Nil means Exponential(100ms, 10s).
	// Validate calls it once.
	Backoff func() backoff.BackOff

	// MaxRetryAfter is the longest wait that an error may ask for by its
	// RetryAfter method; one that asks for more ends the retrying, since to come
	// back sooner would be of no use. Zero means a minute.
	MaxRetryAfter time.Duration

	// If reports whether an error is worth another attempt. It is not asked about
	// errors marked by [Permanent], or once ctx has ended: they never are. Nil
	// means [Retryable].
	If func(error) bool

	// Budget limits retries to a fraction of the calls. Share it among the
	// retriers of one dependency. Nil means no such limit.
	Budget *Budget

	// Nested makes it retry even when a Retrier further up the stack already
	// does, so that their attempts multiply. It is also for work that is detached
	// from its caller but has its ctx's values, as by context.WithoutCancel.
	Nested bool

	// History is how many errors an [Error] keeps: the last ones. Zero means 8.
	History int

	// OnRetry is called before each wait for another attempt, with the ctx of
	// Do. It is not called when no attempt is to follow.
	OnRetry func(context.Context, Attempt)
}

// An Attempt is one that failed and is to be followed by another.
type Attempt struct {
	Name   string
	Number int           // of the attempt that failed, from 1
	Err    error         // what it returned
	Delay  time.Duration // how long the wait for the next will be
	// Elapsed is the time since the first attempt failed; with MaxElapsed, since
	// the call of Do. Success at once needs no look at the clock.
	Elapsed time.Duration
}

// Validate reports what in c cannot mean anything. It calls Backoff once.
func (c Config) Validate() error {
	_, err := c.resolve()
	return err
}

// resolve returns c with its defaults in place, and what is wrong with it.
func (c Config) resolve() (Config, error) {
	f := invalid.Fields{Type: "retry.Config"}
	f.Need(c.MaxElapsed >= 0, "MaxElapsed", c.MaxElapsed, "0 (for no limit) or more")
	f.Need(c.AttemptTimeout >= 0, "AttemptTimeout", c.AttemptTimeout, "0 (for none) or more")
	f.Need(c.MaxRetryAfter >= 0, "MaxRetryAfter", c.MaxRetryAfter, "0 (for 1m) or more")
	f.Need(c.History >= 0, "History", c.History, "0 (for 8) or more")
	attempts := 3
	if c.Backoff == nil {
		c.Backoff = Exponential(defaultFirst, defaultLongest)
	} else {
		switch b := c.Backoff().(type) {
		case nil:
			f.Need(false, "Backoff", "a function that returns nil", "one that returns a new BackOff, or nil (for Exponential(100ms, 10s))")
		case *misuse:
			f.Need(false, "Backoff", b.what, b.want)
		default:
			if retries, ok := retriesOf(b); ok {
				attempts = retries + 1
				f.Need(c.Attempts <= 0 || c.Attempts == attempts, "Attempts", c.Attempts,
					fmt.Sprintf("0 or %d, one more than Backoff has delays", attempts))
			}
		}
	}
	switch {
	case c.Attempts == 0:
		c.Attempts = attempts
	case c.Attempts < 0:
		c.Attempts = math.MaxInt
	}
	if c.MaxRetryAfter == 0 {
		c.MaxRetryAfter = time.Minute
	}
	if c.If == nil {
		c.If = Retryable
	}
	if c.History == 0 {
		c.History = 8
	}
	return c, f.Err()
}

// A Retrier calls functions again when they fail. It is safe for concurrent use.
type Retrier struct {
	cfg      Config
	timedOut error // the cause of an attempt's ctx that AttemptTimeout ended

	retried, recovered, failed, exhausted, refused atomic.Int64
}

// New returns a Retrier. It panics if cfg is not valid: see [Config.Validate].
func New(cfg Config) *Retrier {
	cfg, err := cfg.resolve()
	if err != nil {
		panic(err)
	}
	return &Retrier{
		cfg: cfg,
		timedOut: fmt.Errorf("%san attempt took longer than AttemptTimeout of %v: %w",
			prefix(cfg.Name), cfg.AttemptTimeout, context.DeadlineExceeded),
	}
}

// Stats is a snapshot of what a [Retrier] has done since it was made. Calls that
// succeeded at once are not counted; they cost nothing.
type Stats struct {
	Retried   int64 // attempts that followed another
	Recovered int64 // calls that succeeded by a retry
	Failed    int64 // calls that returned an error
	Exhausted int64 // those of them whose reason was ErrExhausted
	Refused   int64 // those of them whose reason was ErrBudget
}

// Stats returns the figures of r.
func (r *Retrier) Stats() Stats {
	return Stats{
		Retried:   r.retried.Load(),
		Recovered: r.recovered.Load(),
		Failed:    r.failed.Load(),
		Exhausted: r.exhausted.Load(),
		Refused:   r.refused.Load(),
	}
}

// Wrap returns a function that calls Do with fn.
func (r *Retrier) Wrap(fn func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return r.Do(ctx, fn) }
}

// Do calls fn until it succeeds, until its error is not worth another attempt,
// or until there is a reason to give up.
//
// It returns nil; or fn's error as it is, if another attempt would not help; or
// an [*Error] with fn's last error and the reason for giving up, which may be that
// a policy further in, such as an open breaker, refused to make another. It does not
// call fn if ctx has already ended.
//
// fn is called on the caller's goroutine, with a ctx from which [AttemptFrom]
// tells the number of the attempt. Under a Retrier that already retries, fn is
// called once and its error is returned as it is (but see Config.Nested).
//
// Success at once takes no look at the clock, unless MaxElapsed, AttemptTimeout
// or Budget needs one. It allocates nothing under context.Background or under
// the ctx of the call before; a ctx of its own costs 24 bytes.
func (r *Retrier) Do(ctx context.Context, fn func(context.Context) error) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	outer, nested := AttemptFrom(ctx)
	if r.cfg.Budget != nil && outer <= 1 { // what an outer Retrier repeats is no new call
		r.cfg.Budget.call()
	}
	if nested && !r.cfg.Nested {
		err := r.attempt(ctx, fn)
		if err != nil {
			r.failed.Add(1)
		}
		return err
	}
	var start time.Time
	if r.cfg.MaxElapsed > 0 {
		start = time.Now()
	}
	err := r.attempt(firstAttempt(ctx), fn)
	if err != nil {
		err = r.retry(ctx, fn, err, start)
	}
	return err
}

// attempt calls fn with at most AttemptTimeout to finish.
func (r *Retrier) attempt(ctx context.Context, fn func(context.Context) error) error {
	if r.cfg.AttemptTimeout == 0 {
		return fn(ctx)
	}
	at := time.Now().Add(r.cfg.AttemptTimeout)
	ctx, cancel := context.WithDeadlineCause(ctx, at, r.timedOut)
	if work := linger.Of(ctx); work != nil {
		return work.Do(linger.WithLimit(ctx, at, r.timedOut), fn, func(error) { cancel() })
	}
	defer cancel()
	return fn(ctx)
}

// retry goes on with a call whose first attempt returned err.
func (r *Retrier) retry(ctx context.Context, fn func(context.Context) error, err error, start time.Time) error {
	if start.IsZero() {
		start = time.Now()
	}
	c := call{Retrier: r, ctx: ctx, start: start}
	defer c.end()
	for n := 1; ; n++ {
		if c.made && isRefused(err) && !isPermanent(err) && !r.cfg.If(err) {
			return c.giveUp(n-1, err) // what ends the retrying is not what went wrong
		}
		c.remember(err)
		if isPermanent(err) {
			return c.fail(unmarked(err))
		}
		if ctx.Err() != nil {
			if n == 1 && saysEnd(ctx, err) {
				return c.fail(err)
			}
			return c.giveUp(n, ended.Error(ctx))
		}
		if !r.cfg.If(err) {
			return c.fail(err)
		}
		if n >= r.cfg.Attempts {
			return c.giveUp(n, ErrExhausted)
		}
		delay, reason := c.next(err)
		if reason != nil {
			return c.giveUp(n, reason)
		}
		if r.cfg.OnRetry != nil {
			r.cfg.OnRetry(ctx, Attempt{Name: r.cfg.Name, Number: n, Err: err, Delay: delay, Elapsed: time.Since(start)})
		}
		if !c.wait(delay) {
			return c.giveUp(n, ended.Error(ctx))
		}
		r.retried.Add(1)
		c.unspent = false
		if err = r.attempt(&attemptCtx{ctx, n + 1}, fn); err == nil {
			if r.cfg.Budget != nil {
				r.cfg.Budget.refund(c.charge)
			}
			r.recovered.Add(1)
			return nil
		}
	}
}

// A call is what Do keeps of one that has failed at least once.
type call struct {
	*Retrier
	ctx    context.Context
	start  time.Time
	delays backoff.BackOff
	timer  *time.Timer

	charge  uint64 // what refund wants for the last retry
	unspent bool   // it was charged but is not made yet

	errs   []error
	buffer [8]error
	made   bool // an attempt that was not refused before it was made
}

// end gives back what the call holds, however it ends.
func (c *call) end() {
	if c.unspent {
		c.cfg.Budget.refund(c.charge)
	}
	if c.timer != nil {
		c.timer.Stop()
	}
}

func (c *call) fail(err error) error {
	c.failed.Add(1)
	return err
}

func (c *call) giveUp(attempts int, reason error) error {
	switch {
	case errors.Is(reason, ErrExhausted):
		c.exhausted.Add(1)
	case errors.Is(reason, ErrBudget):
		c.refused.Add(1)
	}
	return c.fail(&Error{
		Name:     c.cfg.Name,
		Attempts: attempts,
		Elapsed:  time.Since(c.start),
		Reason:   reason,
		Errs:     slices.Clone(c.errs),
		refused:  !c.made,
	})
}

// remember keeps err and as many of those before it as History allows.
func (c *call) remember(err error) {
	if c.errs == nil {
		c.errs = c.buffer[:0]
	}
	c.made = c.made || !isRefused(err)
	if len(c.errs) == c.cfg.History {
		c.errs = c.errs[:copy(c.errs, c.errs[1:])]
	}
	c.errs = append(c.errs, err)
}

// next returns how long to wait for another attempt after err, or why there
// should be none. It charges the budget for one that may be made.
func (c *call) next(err error) (delay time.Duration, reason error) {
	if c.delays == nil {
		if c.delays = c.cfg.Backoff(); c.delays == nil {
			return 0, errNoBackOff
		}
		c.delays.Reset() // which the engine asks for before first use
	}
	delay = c.delays.NextBackOff()
	if delay < 0 {
		return 0, ErrExhausted
	}
	if least := retryAfter(err); least > c.cfg.MaxRetryAfter {
		return 0, limit(fmt.Sprintf("asked to wait %v, longer than MaxRetryAfter of %v", least, c.cfg.MaxRetryAfter))
	} else if least > 0 {
		// Later than asked, never sooner, and not all at the same time.
		delay = max(delay, least+fullJitter(min(least/10, math.MaxInt64-least)))
	}
	if c.cfg.MaxElapsed > 0 && delay >= c.cfg.MaxElapsed-time.Since(c.start) {
		return 0, limit(fmt.Sprintf("a wait of %v would pass MaxElapsed of %v", delay, c.cfg.MaxElapsed))
	}
	if deadline, ok := c.ctx.Deadline(); ok && delay >= time.Until(deadline) {
		return 0, fmt.Errorf("a wait of %v would pass the deadline: %w", delay, context.DeadlineExceeded)
	}
	if c.cfg.Budget != nil {
		if c.charge, c.unspent = c.cfg.Budget.charge(); !c.unspent {
			return 0, ErrBudget
		}
	}
	return delay, nil
}

// wait returns after d, or at once with false if ctx ends before.
func (c *call) wait(d time.Duration) bool {
	if d > 0 {
		if c.timer == nil {
			c.timer = time.NewTimer(d)
		} else {
			c.timer.Reset(d)
		}
		select {
		case <-c.timer.C:
		case <-c.ctx.Done():
		}
	}
	return c.ctx.Err() == nil
}
