// Package retry calls a function again while its error is worth another attempt.
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
// Retry only what may safely be done twice: an attempt that failed may still have taken
// effect. Then these rules hold:
//
//   - By default delays are random and grow (full jitter), so that clients that failed
//     together do not return together.
//   - A wait that could not end before the deadline of ctx is not begun. The error says
//     why no attempt followed and what the last one returned: see [Error].
//   - An error that another attempt cannot help ends the retrying and is returned as it
//     is: see [Permanent] and [Retryable]. So is an answer, an error with a method
//     Answered() bool that returns true: the dependency works, and its answer is no. An
//     answer is retried only if it has a method Retryable() bool that returns true, as
//     "too many requests" has.
//   - An error with a method RetryAfter() time.Duration sets the least delay.
//   - A refusal is an error with a method Refused() bool that returns true: a bulkhead,
//     say, was full, and nothing was sent to the dependency. A Retrier waits and tries
//     again; the refusal counts as an attempt, but costs no budget. An open breaker ends
//     the retrying: see Config.MaxRetryAfter.
//   - A [Budget] limits retries to a fraction of the calls. Without one, retries
//     multiply the load on a dependency that is down.
//   - Of nested retriers only the outermost retries, so that their attempts do not
//     multiply. It marks the ctx that fn is given, so pass that on. A Retrier with one
//     attempt sets no mark.
//
// Consider a consumer of a queue that runs for days under a Retrier, which begins it
// again when it fails. To the retriers in it, all of its work is one attempt of that
// Retrier, and none of them would retry. The consumer handles each message with
// [Fresh], which begins a new operation.
//
// A [Hedger] is for calls that are slow rather than failing.
//
// The pattern is Retry of the Cloud Design Patterns
// (https://learn.microsoft.com/azure/architecture/patterns/retry); for budgets and
// nested retries see "Addressing Cascading Failures" in Site Reliability Engineering
// (Beyer et al., 2016). Delays are computed by github.com/cenkalti/backoff/v4.
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
	"github.com/go-resilience/resilience/internal/linger"
)

// A Retrier calls functions again when they fail. It is safe for concurrent use.
type Retrier struct {
	cfg      Config        // with its defaults
	timedOut *timeoutError // the cause of an attempt's ctx that AttemptTimeout ended

	retried, recovered, failed, exhausted, overBudget atomic.Int64
}

// New returns a Retrier. It panics if cfg is not valid: see [Config.Validate].
func New(cfg Config) *Retrier {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	return &Retrier{
		cfg:      cfg.withDefaults(),
		timedOut: &timeoutError{name: cfg.Name, after: cfg.AttemptTimeout},
	}
}

// Stats is a snapshot of what a [Retrier] has done since it was made. Calls that
// succeeded at once are not counted; they cost nothing.
type Stats struct {
	Retried    int64 // attempts that followed another
	Recovered  int64 // calls that succeeded by a retry
	Failed     int64 // calls that returned an error
	Exhausted  int64 // those of them whose reason was ErrExhausted
	OverBudget int64 // those of them whose reason was ErrBudget
}

// Stats returns the figures of r.
func (r *Retrier) Stats() Stats {
	return Stats{
		Retried:    r.retried.Load(),
		Recovered:  r.recovered.Load(),
		Failed:     r.failed.Load(),
		Exhausted:  r.exhausted.Load(),
		OverBudget: r.overBudget.Load(),
	}
}

// Wrap returns a function that calls Do with fn.
func (r *Retrier) Wrap(fn func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return r.Do(ctx, fn) }
}

// Do calls fn until it succeeds, until its error is not worth another attempt, or until
// there is a reason to give up.
//
// It returns nil; the error of fn as it is, if another attempt would not help; or an
// [*Error] with the last error of fn and the reason for giving up. The reason may be that
// a policy further in, such as an open breaker, refused another attempt. Do does not call
// fn if ctx has already ended.
//
// Do calls fn on the caller's goroutine, with a ctx from which [AttemptFrom] returns the
// number of the attempt. Within an attempt of another Retrier, Do calls fn once and
// returns its error as it is (but see Config.Nested and [Fresh]).
//
// A call that succeeds at once reads no clock, unless MaxElapsed, AttemptTimeout or Budget
// needs it. Under context.Background it allocates nothing; the mark of any other ctx is
// one allocation.
func (r *Retrier) Do(ctx context.Context, fn func(context.Context) error) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	outer, nested := attempt.From(ctx)
	if nested && !r.cfg.Nested {
		err := r.attempt(ctx, fn)
		if !behavior.IsRefused(err) {
			r.earn(outer)
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
	if r.cfg.Attempts != 1 {
		first = firstAttempt(ctx)
	}
	if err := r.attempt(first, fn); err != nil {
		return r.retry(ctx, fn, err, start, outer)
	}
	r.earn(outer)
	return nil
}

// earn counts a call that reached the dependency, which earns budget for retries. A call
// in an attempt of another Retrier counts in the first of them only.
func (r *Retrier) earn(outer int) {
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

// retry continues a call whose first attempt returned err. outer is the number of the
// attempt of another Retrier that the call is part of, or 0.
func (r *Retrier) retry(ctx context.Context, fn func(context.Context) error, err error, start time.Time, outer int) error {
	c := call{Retrier: r, ctx: ctx, start: start, failedAt: time.Now(), kind: behavior.Refused}
	defer c.end()
	for n := 1; ; n++ {
		end := behavior.Read(err)
		if end.Kind != behavior.Refused && c.kind == behavior.Refused {
			r.earn(outer) // the first attempt that was made
		}
		if end.Kind == behavior.Refused && c.charged {
			c.refund() // nothing was sent
		}
		switch {
		case isPermanent(err, end):
			if outer > 0 {
				return c.fail(err) // the outermost Retrier takes the mark off
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
			return c.giveUp(n-1, err) // the refusal is the reason, not what went wrong
		case end.Kind == behavior.Failed && !r.worth(err, end):
			return c.fail(err)
		}
		c.remember(err, end.Kind)
		if r.cfg.Attempts > 0 && n >= r.cfg.Attempts {
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
				r.earn(outer)
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
	return end.Retryable || end.RetryAfter > 0 && end.RetryAfter <= r.cfg.MaxRetryAfter
}

// worth reports whether another attempt follows a failure.
func (r *Retrier) worth(err error, end behavior.End) bool {
	if r.cfg.If == nil {
		return end.Retryable
	}
	return r.cfg.If(err)
}

// A call is the state of a call of Do whose first attempt failed.
type call struct {
	*Retrier
	ctx      context.Context
	start    time.Time // of Do, if MaxElapsed needs it
	failedAt time.Time // when the first attempt had failed
	delays   backoff.BackOff
	timer    *time.Timer

	charge  uint64 // the argument of Budget.refund for the last retry
	charged bool   // the last retry was charged
	unspent bool   // it was charged, but is not made yet

	kind    behavior.Kind // of all attempts together: Failed before Answered before Refused
	decides error         // the last error of that kind
	earlier bool          // another error has followed it
	errs    []error
	buffer  [8]error
}

// end gives back what the call holds, whether it returns or panics.
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
		c.overBudget.Add(1)
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

// remember keeps err and as many of the errors before it as History allows.
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

// next returns how long to wait for another attempt after the nth, which returned an err
// that asks for a wait of after, or the reason why no attempt follows. It charges the
// budget for the attempt.
func (c *call) next(n int, err error, after time.Duration) (delay time.Duration, reason error) {
	if c.delays == nil {
		if c.delays = c.cfg.Backoff(); c.delays == nil {
			return 0, errNoBackOff
		}
		c.delays.Reset() // the engine asks for it before first use
	}
	delay = c.delays.NextBackOff()
	if delay >= 0 && c.cfg.Delay != nil {
		delay = c.cfg.Delay(c.ctx, c.failedAttempt(n, err, delay))
	}
	if delay < 0 {
		return 0, ErrExhausted
	}
	if longest := c.cfg.maxRetryAfter(); after > longest {
		return 0, limit(fmt.Sprintf("asked to wait %v, longer than MaxRetryAfter of %v", after, longest))
	} else if after > 0 {
		// Later than asked, never sooner, and at a random time.
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

// wait returns after d, or with false as soon as ctx ends.
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
