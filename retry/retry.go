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
//   - By default delays are random and grow (full jitter): clients that failed
//     together do not come back together.
//   - A wait that could not end before the deadline of ctx is not begun. The error
//     says both why no attempt followed and what the last one said: see [Error].
//   - An error that another attempt cannot help ends the retrying and comes back
//     as it is: see [Permanent] and [Retryable]. So does an answer, an error with a
//     method Answered() bool that returns true: the dependency works, and its answer
//     is no. An answer is retried only if it has a method Retryable() bool that
//     returns true, as "too many requests" has.
//   - An error with a method RetryAfter() time.Duration sets the least delay.
//   - A refusal, an error with a method Refused() bool that returns true, was not
//     sent to the dependency: a bulkhead was full, say. It is waited out, and counts
//     as an attempt, but costs no budget. An open breaker ends the retrying: see
//     Config.MaxRetryAfter.
//   - A [Budget] keeps retries to a fraction of the calls when a dependency is
//     down, where retries make things worse.
//   - Only the outermost of nested retriers retries: their attempts do not multiply.
//     Its mark travels in the ctx that fn is given, so pass that on. A Retrier with
//     one attempt sets no mark. A loop that lives long (a consumer of a queue) and
//     has a Retrier around it handles each message with [Fresh], or no Retrier in it
//     would retry.
//
// A [Hedger] is for calls that are slow rather than failing.
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

	"github.com/go-resilience/resilience/internal/attempt"
	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/linger"
)

// Config says when, how often and how long a [Retrier] retries.
type Config struct {
	// Name appears in errors and events. It may be empty.
	Name string

	// Attempts is how often fn is called at most, the first included; a call that a
	// policy further in refuses counts. Zero means 3, or with [Delays] one more than
	// there are delays; a negative number, no limit.
	Attempts int

	// MaxElapsed limits the time since the call of Do: a wait that would pass it
	// is not begun. It does not end an attempt; AttemptTimeout does. Zero means
	// no limit but the deadline of ctx.
	MaxElapsed time.Duration

	// AttemptTimeout is the time that each attempt's ctx leaves it. An attempt that
	// fails when it has passed is retried like any other, and its error is
	// context.DeadlineExceeded beside what fn returned. Within a
	// resiliencehttp.Transport an attempt that succeeds ends with the body of its
	// response. Zero means none.
	AttemptTimeout time.Duration

	// Backoff returns the delays of one call, from its first failure on: a new
	// BackOff each time, since they have state. Any negative delay ends the
	// retrying; a panic passes through. Nil means Exponential(100ms, 10s).
	// Validate calls it once.
	Backoff func() backoff.BackOff

	// Delay returns the delay before the attempt that follows a, in place of a.Delay,
	// which is the Backoff's. Set it if the delay depends on the error or on ctx. A
	// negative delay ends the retrying. The limits of any wait hold, and RetryAfter
	// still sets the least. Nil means a.Delay.
	Delay func(ctx context.Context, a Attempt) time.Duration

	// MaxRetryAfter is the longest wait that an error may ask for by its RetryAfter
	// method; an error that asks for more ends the retrying, since to come back
	// sooner would be of no use. If MaxRetryAfter is set, a Retrier also waits for an
	// open breaker (a refusal that is not retryable, but says when it will be) that
	// asks for no more. Zero means a minute, and an open breaker ends the retrying.
	MaxRetryAfter time.Duration

	// If reports whether a failure is worth another attempt. It is asked once for
	// each attempt that failed. It is not asked about a refusal or an answer, about
	// an error marked by [Permanent], or once ctx has ended. Nil means [Retryable].
	If func(error) bool

	// Budget limits retries to a fraction of the calls. Share it among the
	// retriers of one dependency. Nil means no such limit.
	Budget *Budget

	// Nested makes it retry even when a Retrier further up the stack already
	// does, so that their attempts multiply. To begin an operation of its own within
	// that of another Retrier, use [Fresh].
	Nested bool

	// History is how many errors an [Error] keeps: the last ones. Zero means 8.
	History int

	// OnRetry is called before each wait for another attempt, with the ctx of
	// Do. It is not called when no attempt is to follow.
	OnRetry func(context.Context, Attempt)

	// OnGiveUp is called with the ctx of Do before Do returns an [*Error]. It is not
	// called for an error that comes back as it is, since another attempt would not
	// have helped.
	OnGiveUp func(context.Context, *Error)
}

// An Attempt is one that failed, or was refused, and is to be followed by another.
type Attempt struct {
	Name     string
	Number   int           // of the attempt that failed, from 1
	Err      error         // what it returned
	Delay    time.Duration // how long the wait for the next will be
	Retrying time.Duration // the time since the first attempt failed
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
	if c.History == 0 {
		c.History = 8
	}
	return c, f.Err()
}

// A Retrier calls functions again when they fail. It is safe for concurrent use.
type Retrier struct {
	cfg      Config
	timedOut *timeoutError // the cause of an attempt's ctx that AttemptTimeout ended
	waitsOut bool          // refusals that cannot be retried sooner, too

	retried, recovered, failed, exhausted, refused atomic.Int64
}

// New returns a Retrier. It panics if cfg is not valid: see [Config.Validate].
func New(cfg Config) *Retrier {
	waitsOut := cfg.MaxRetryAfter > 0
	cfg, err := cfg.resolve()
	if err != nil {
		panic(err)
	}
	return &Retrier{
		cfg:      cfg,
		timedOut: &timeoutError{name: cfg.Name, after: cfg.AttemptTimeout},
		waitsOut: waitsOut,
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
// called once and its error is returned as it is (but see Config.Nested and [Fresh]).
//
// Success at once takes no look at the clock, unless MaxElapsed, AttemptTimeout
// or Budget needs one. It allocates nothing under context.Background; the mark of
// any other ctx is one allocation.
func (r *Retrier) Do(ctx context.Context, fn func(context.Context) error) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	outer, nested := attempt.From(ctx)
	if nested && !r.cfg.Nested {
		err := r.attempt(ctx, fn)
		if !behavior.IsRefused(err) {
			r.sent(outer)
		}
		if err != nil {
			r.failed.Add(1)
		}
		return err
	}
	var start time.Time
	if r.cfg.MaxElapsed > 0 {
		start = time.Now()
	}
	first := ctx
	if r.cfg.Attempts > 1 {
		first = firstAttempt(ctx)
	}
	err := r.attempt(first, fn)
	if err != nil {
		return r.retry(ctx, fn, err, start, outer)
	}
	r.sent(outer)
	return nil
}

// sent counts a call of the dependency. What an outer Retrier repeats is no new call.
func (r *Retrier) sent(outer int) {
	if r.cfg.Budget != nil && outer <= 1 {
		r.cfg.Budget.call()
	}
}

// attempt calls fn with at most AttemptTimeout to finish.
func (r *Retrier) attempt(ctx context.Context, fn func(context.Context) error) error {
	if r.cfg.AttemptTimeout == 0 {
		return fn(ctx)
	}
	late, err := linger.Timed(ctx, r.cfg.AttemptTimeout, r.timedOut, fn)
	if late && !behavior.IsTimeout(err) && Retryable(err) {
		return &timeoutError{name: r.cfg.Name, after: r.cfg.AttemptTimeout, err: err}
	}
	return err
}

// retry goes on with a call whose first attempt returned err, under the attempt with
// the number outer of another Retrier, or 0.
func (r *Retrier) retry(ctx context.Context, fn func(context.Context) error, err error, start time.Time, outer int) error {
	c := call{Retrier: r, ctx: ctx, start: start, failedAt: time.Now(), kind: behavior.Refused}
	defer c.end()
	for n := 1; ; n++ {
		end := behavior.Read(err)
		if end.Kind != behavior.Refused && c.kind == behavior.Refused {
			r.sent(outer) // the first attempt that was made
		}
		if end.Kind == behavior.Refused && c.charged {
			c.refund() // nothing was sent
		}
		switch {
		case isPermanent(err, end):
			if outer > 0 {
				return c.fail(err) // the outermost takes the mark off
			}
			return c.fail(unmarked(err))
		case end.Kind == behavior.Answered && !end.Retryable:
			return c.fail(err)
		case ctx.Err() != nil:
			if n == 1 && saysEnd(ctx, err) {
				return c.fail(err)
			}
			c.remember(err, end.Kind)
			return c.giveUp(n, ended.Error(ctx))
		case end.Kind == behavior.Refused && !r.waits(end):
			if c.kind == behavior.Refused {
				return c.fail(err)
			}
			return c.giveUp(n-1, err) // what ends the retrying is not what went wrong
		case end.Kind == behavior.Failed && !r.worth(err, end):
			return c.fail(err)
		}
		c.remember(err, end.Kind)
		if n >= r.cfg.Attempts {
			return c.giveUp(n, ErrExhausted)
		}
		delay, reason := c.next(n, err, end.RetryAfter)
		if reason != nil {
			return c.giveUp(n, reason)
		}
		if r.cfg.OnRetry != nil {
			r.cfg.OnRetry(ctx, c.failedAttempt(n, err, delay))
		}
		if !c.wait(delay) {
			return c.giveUp(n, ended.Error(ctx))
		}
		r.retried.Add(1)
		c.unspent = false
		if err = r.attempt(attempt.With(ctx, n+1), fn); err == nil {
			if c.kind == behavior.Refused {
				r.sent(outer)
			}
			if c.charged {
				c.refund()
			}
			r.recovered.Add(1)
			return nil
		}
	}
}

// waits reports whether another attempt follows a refusal.
func (r *Retrier) waits(end behavior.End) bool {
	return end.Retryable || r.waitsOut && end.RetryAfter > 0 && end.RetryAfter <= r.cfg.MaxRetryAfter
}

// worth reports whether another attempt follows a failure.
func (r *Retrier) worth(err error, end behavior.End) bool {
	if r.cfg.If == nil {
		return end.Retryable
	}
	return r.cfg.If(err)
}

// A call is what Do keeps of one that has failed at least once.
type call struct {
	*Retrier
	ctx      context.Context
	start    time.Time // of Do, if MaxElapsed needs it
	failedAt time.Time // when the first attempt had failed
	delays   backoff.BackOff
	timer    *time.Timer

	charge  uint64 // what refund wants for the last retry
	charged bool   // the last retry was charged
	unspent bool   // it was charged but is not made yet

	kind    behavior.Kind // what all attempts say together: Failed before Answered before Refused
	decides error         // the last error that says so
	earlier bool          // another has followed it
	errs    []error
	buffer  [8]error
}

// end gives back what the call holds, however it ends.
func (c *call) end() {
	if c.unspent {
		c.refund()
	}
	if c.timer != nil {
		c.timer.Stop()
	}
}

func (c *call) refund() {
	c.cfg.Budget.refund(c.charge)
	c.unspent = false
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
	c.failed.Add(1)
	e := &Error{
		Name:     c.cfg.Name,
		Attempts: attempts,
		Retrying: time.Since(c.failedAt),
		Reason:   reason,
		Errs:     slices.Clone(c.errs),
		kind:     c.kind,
	}
	if c.earlier {
		e.earlier = c.decides
	}
	if c.cfg.OnGiveUp != nil {
		c.cfg.OnGiveUp(c.ctx, e)
	}
	return e
}

// remember keeps err and as many of those before it as History allows.
func (c *call) remember(err error, kind behavior.Kind) {
	if c.errs == nil {
		c.errs = c.buffer[:0]
	}
	if len(c.errs) == c.cfg.History {
		c.errs = c.errs[:copy(c.errs, c.errs[1:])]
	}
	c.errs = append(c.errs, err)

	switch {
	case kind == behavior.Failed, kind == c.kind, c.kind == behavior.Refused:
		c.kind, c.decides, c.earlier = kind, err, false
	default:
		c.earlier = true
	}
}

// next returns how long to wait for another attempt after the nth, which returned an
// err that asks for a wait of after, or why there should be none. It charges the
// budget for an attempt that may be made.
func (c *call) next(n int, err error, after time.Duration) (delay time.Duration, reason error) {
	if c.delays == nil {
		if c.delays = c.cfg.Backoff(); c.delays == nil {
			return 0, errNoBackOff
		}
		c.delays.Reset() // which the engine asks for before first use
	}
	delay = c.delays.NextBackOff()
	if delay >= 0 && c.cfg.Delay != nil {
		delay = c.cfg.Delay(c.ctx, c.failedAttempt(n, err, delay))
	}
	if delay < 0 {
		return 0, ErrExhausted
	}
	if after > c.cfg.MaxRetryAfter {
		return 0, limit(fmt.Sprintf("asked to wait %v, longer than MaxRetryAfter of %v", after, c.cfg.MaxRetryAfter))
	} else if after > 0 {
		// Later than asked, never sooner, and not all at the same time.
		delay = max(delay, after+fullJitter(min(after/10, math.MaxInt64-after)))
	}
	if c.cfg.MaxElapsed > 0 && delay >= c.cfg.MaxElapsed-time.Since(c.start) {
		return 0, limit(fmt.Sprintf("a wait of %v would pass MaxElapsed of %v", delay, c.cfg.MaxElapsed))
	}
	if deadline, ok := c.ctx.Deadline(); ok && delay >= time.Until(deadline) {
		return 0, fmt.Errorf("a wait of %v would pass the deadline: %w", delay, context.DeadlineExceeded)
	}
	if c.cfg.Budget != nil && c.kind != behavior.Refused {
		if c.charge, c.charged = c.cfg.Budget.charge(); !c.charged {
			return 0, ErrBudget
		}
		c.unspent = true
	}
	return delay, nil
}

func (c *call) failedAttempt(n int, err error, delay time.Duration) Attempt {
	return Attempt{Name: c.cfg.Name, Number: n, Err: err, Delay: delay, Retrying: time.Since(c.failedAt)}
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
