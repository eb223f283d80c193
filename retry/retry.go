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
//     is: see [Permanent] and resilience.Retryable. So is an answer, an error with a method
//     Answered() bool that returns true: the dependency works, and its answer is no. An
//     answer is retried only if it has a method Retryable() bool that returns true, as
//     "too many requests" has.
//   - An error with a method RetryAfter() time.Duration sets the least delay.
//   - A refusal is an error with a method Refused() bool that returns true: a bulkhead,
//     say, was full, and nothing was sent to the dependency. A Retrier waits and tries
//     again; the refusal counts as an attempt, but costs no budget. An open breaker ends
//     the retrying: see Config.MaxRetryAfter.
//   - A [Budget] limits retries to a fraction of the calls. Without one, retries
//     multiply the load on a dependency that is down. A [BudgetGroup] has one for each
//     host or tenant.
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
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/go-resilience/resilience/internal/attempt"
	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
)

// A Retrier calls functions again when they fail. It is safe for concurrent use.
type Retrier struct {
	setting   settings.Setting[Config]
	counts    counts
	observers notify.Observers[Event]
}

// New returns a Retrier. It panics if cfg is not valid: see [Config.Validate].
func New(cfg Config) *Retrier {
	r := &Retrier{}
	r.setting.Init(cfg, Config.withDefaults)
	return r
}

// Wrap returns a function that calls Do with fn.
func (r *Retrier) Wrap(fn func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return r.Do(ctx, fn) }
}

// Do calls fn until it succeeds, until its error is not worth another attempt, or until a
// limit or the end of ctx ends the retrying.
//
// It returns nil; the error of fn as it is, if another attempt would not help; or an
// [*Error] with the last error of fn and the cause of giving up. The cause may be that
// a policy further in, such as an open breaker, refused another attempt. Do does not call
// fn if ctx has already ended.
//
// Do calls fn on the caller's goroutine, with a ctx from which [AttemptFrom] returns the
// number of the attempt. Within an attempt of another Retrier, Do calls fn once and
// returns its error as it is (but see [Fresh]).
//
// A call whose first attempt succeeds reads no clock, unless MaxElapsed, AttemptTimeout
// or Budget needs it. Under context.Background it allocates nothing; the mark of any other ctx is
// one allocation.
func (r *Retrier) Do(ctx context.Context, fn func(context.Context) error) error {
	cfg := r.setting.Load()
	background := ctx == context.Background() // never ends and has no attempt: see docs/decisions/retry.md
	if !background {
		if ctx.Err() != nil {
			r.counts.end(endOf(ctx))
			return ended.Error(ctx)
		}
		if n, nested := attempt.From(ctx); nested {
			return r.doNested(ctx, cfg, fn, n)
		}
	}
	var start time.Time
	if cfg.MaxElapsed > 0 {
		start = time.Now()
	}
	first := ctx
	if cfg.Attempts != 1 {
		first = firstAttempt(ctx, background)
	}
	var err error
	if cfg.AttemptTimeout == 0 { // spares a call: see docs/decisions/retry.md
		err = fn(first)
	} else {
		err = cfg.attempt(first, fn)
	}
	if err != nil {
		return r.retry(ctx, cfg, fn, err, start)
	}
	cfg.earn(ctx)
	r.counts.firstTry.Add(1)
	return nil
}

// doNested makes one attempt within the nth attempt of another Retrier. The budget counts the
// call in the first of them only.
func (r *Retrier) doNested(ctx context.Context, cfg *Config, fn func(context.Context) error, n int) error {
	err := cfg.attempt(ctx, fn)
	if n == 1 && !behavior.IsRefused(err) {
		cfg.earn(ctx)
	}
	if err == nil {
		r.counts.firstTry.Add(1)
		return nil
	}
	r.counts.firstFailed.Add(1)
	r.counts.nested.Add(1)
	return err
}

// earn counts a call that reached the dependency, which earns budget for retries.
func (c *Config) earn(ctx context.Context) {
	if c.budgeted() {
		c.earnBudget(ctx)
	}
}

// budgeted reports whether a call may have a Budget.
func (c *Config) budgeted() bool { return c.Budget != nil || c.BudgetFor != nil }

// earnBudget is not a part of earn, so that a call without a Budget pays for no call.
func (c *Config) earnBudget(ctx context.Context) { c.budget(ctx).earn() }

// budget returns the Budget of a call, or nil.
func (c *Config) budget(ctx context.Context) *Budget {
	if c.BudgetFor != nil {
		return c.BudgetFor(ctx)
	}
	return c.Budget
}

// attempt calls fn with at most AttemptTimeout to finish.
func (c *Config) attempt(ctx context.Context, fn func(context.Context) error) error {
	if c.AttemptTimeout == 0 {
		return fn(ctx)
	}
	late, err := linger.Timed(ctx, c.AttemptTimeout, (*overtime)(c), fn)
	if late && !behavior.IsTimeout(err) && behavior.Read(err).Retryable {
		return &timeoutError{(*overtime)(c), err}
	}
	return err
}

// retry continues a call whose first attempt returned err.
func (r *Retrier) retry(ctx context.Context, cfg *Config, fn func(context.Context) error, err error, start time.Time) error {
	r.counts.firstFailed.Add(1)
	c := call{Retrier: r, cfg: cfg, ctx: ctx, start: start, failedAt: time.Now(), kind: behavior.Refused}
	defer c.release()
	for n := 1; ; n++ {
		end := behavior.Read(err)
		if end.Kind != behavior.Refused && c.kind == behavior.Refused {
			cfg.earn(ctx) // the first attempt that was made
		}
		if end.Kind == behavior.Refused && c.charged {
			c.refund() // nothing was sent
		}
		f := failure{
			End: end, permanent: isPermanent(err, end), ended: ctx.Err() != nil,
			made: c.kind != behavior.Refused, waits: cfg.waits(end), last: cfg.Attempts > 0 && n >= cfg.Attempts,
		}
		f.itself = f.ended && n == 1 && saysEnd(ctx, err)
		f.worth = f.permanent || f.ended || end.Kind != behavior.Failed || cfg.worth(err, end)
		verdict := f.verdict()
		switch verdict {
		case final:
			if f.permanent {
				err = unmarked(err)
			}
			return c.over(n, OutcomePermanent, err)
		case stopped:
			return c.over(n, endOf(ctx), err)
		case turnedOff: // the refusal is the cause of the end, not what went wrong
			return c.giveUp(n-1, OutcomePermanent, err)
		case cut:
			c.remember(err, end.Kind)
			return c.giveUp(n, endOf(ctx), ended.Error(ctx))
		}
		c.remember(err, end.Kind)
		if verdict == exhausted {
			return c.giveUp(n, OutcomeExhausted, ErrExhausted)
		}
		delay, outcome, cause := c.next(n, err, end.RetryAfter)
		if cause != nil {
			return c.giveUp(n, outcome, cause)
		}
		c.tellRetry(n, err, delay)
		if !c.wait(delay) {
			return c.giveUp(n, endOf(ctx), ended.Error(ctx))
		}
		r.counts.retried.Add(1)
		c.unspent = false
		if err = cfg.attempt(attempt.With(ctx, n+1), fn); err == nil {
			if c.kind == behavior.Refused {
				cfg.earn(ctx)
			}
			if c.charged {
				c.refund()
			}
			return c.over(n+1, OutcomeRecovered, nil)
		}
	}
}

// waits reports whether another attempt follows a refusal.
func (c *Config) waits(end behavior.End) bool {
	return end.Retryable || end.RetryAfter > 0 && end.RetryAfter <= c.MaxRetryAfter
}

// worth reports whether another attempt follows a failure.
func (c *Config) worth(err error, end behavior.End) bool {
	if c.If == nil {
		return end.Retryable
	}
	return c.If(err)
}

// A call is the state of a call of Do whose first attempt failed.
type call struct {
	*Retrier
	cfg      *Config
	ctx      context.Context
	start    time.Time // of Do, if MaxElapsed needs it
	failedAt time.Time // when the first attempt had failed
	delays   Backoff
	timer    *time.Timer

	budget  *Budget // that the last retry was charged to
	charge  int64   // the argument of its refund
	charged bool    // the last retry was charged
	unspent bool    // it was charged, but is not made yet

	kind    behavior.Kind // of all attempts together: Failed before Answered before Refused
	decides error         // the last error of that kind
	earlier bool          // another error has followed it
	errs    []error
	buffer  [8]error
}

// release gives back what the call holds, whether it returns or panics.
func (c *call) release() {
	if c.unspent {
		c.refund()
	}
	if c.timer != nil {
		c.timer.Stop()
	}
}

func (c *call) refund() { c.budget.refund(c.charge) }

// over ends the call after a number of attempts with err, which is nil or the error of fn
// as it is. It tells the observers if the call was retried.
func (c *call) over(attempts int, o Outcome, err error) error {
	if attempts > 1 {
		c.tellEnd(attempts, o, err)
	}
	c.counts.end(o)
	return err
}

// giveUp ends the call with an *Error.
func (c *call) giveUp(attempts int, o Outcome, cause error) error {
	e := &Error{
		Name:        c.cfg.Name,
		Attempts:    attempts,
		RetryingFor: time.Since(c.failedAt),
		Cause:       cause,
		Errs:        slices.Clone(c.errs),
		kind:        c.kind,
	}
	if c.earlier {
		e.earlier = c.decides
	}
	c.tellEnd(attempts, o, e)
	c.counts.end(o)
	return e
}

// tellRetry tells the hook and the observers that another attempt follows the nth.
func (c *call) tellRetry(n int, err error, delay time.Duration) {
	if c.cfg.OnRetry != nil {
		c.cfg.OnRetry(c.ctx, c.failedAttempt(n, err, delay))
	}
	if c.observers.Any() {
		c.observers.Tell(c.ctx, Event{
			Kind: EventRetried, Name: c.cfg.Name,
			Attempt: n, Err: err, Delay: delay, RetryingFor: time.Since(c.failedAt),
		})
	}
}

// tellEnd tells the observers that the call is over.
func (c *call) tellEnd(attempts int, o Outcome, err error) {
	if c.observers.Any() {
		c.observers.Tell(c.ctx, Event{
			Kind: EventEnded, Name: c.cfg.Name,
			Attempts: attempts, Err: err, RetryingFor: time.Since(c.failedAt), Outcome: o,
		})
	}
}

// remember keeps err and as many of the errors before it as an Error has.
func (c *call) remember(err error, kind behavior.Kind) {
	if c.errs == nil {
		c.errs = c.buffer[:0]
	}
	if len(c.errs) == len(c.buffer) {
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
// that asks for a wait of after, or why no attempt follows. It charges the
// budget for the attempt.
func (c *call) next(n int, err error, after time.Duration) (delay time.Duration, o Outcome, cause error) {
	cfg := c.cfg
	if c.delays == nil {
		if c.delays = cfg.Backoff(); c.delays == nil {
			return 0, OutcomeExhausted, errNoBackOff
		}
		c.delays.Reset() // the engine asks for it before first use
	}
	delay = c.delays.NextBackOff()
	if delay >= 0 && cfg.Delay != nil {
		delay = cfg.Delay(c.ctx, c.failedAttempt(n, err, delay))
	}
	if delay < 0 {
		return 0, OutcomeExhausted, ErrExhausted
	}
	if longest := cfg.maxRetryAfter(); after > longest {
		return 0, OutcomeExhausted, limit(fmt.Sprintf("asked to wait %v, longer than MaxRetryAfter of %v", after, longest))
	} else if after > 0 {
		delay = max(delay, after+fullJitter(c.spread(after)))
	}
	if cfg.MaxElapsed > 0 && delay >= cfg.MaxElapsed-time.Since(c.start) {
		return 0, OutcomeDeadline, limit(fmt.Sprintf("a wait of %v would pass MaxElapsed of %v", delay, cfg.MaxElapsed))
	}
	if deadline, ok := c.ctx.Deadline(); ok && delay >= time.Until(deadline) {
		return 0, OutcomeDeadline, fmt.Errorf("a wait of %v would pass the deadline: %w", delay, context.DeadlineExceeded)
	}
	if cfg.budgeted() && c.kind != behavior.Refused {
		if c.budget = cfg.budget(c.ctx); c.budget == nil {
			c.charged = false
			return delay, "", nil
		}
		if c.budget, c.charge, c.charged = c.budget.charge(); !c.charged {
			c.budget.tellOverBudget(c.ctx)
			return 0, OutcomeOverBudget, ErrOverBudget
		}
		c.unspent = true
	}
	return delay, "", nil
}

// spread returns how much later than asked a wait of after may end: a tenth, so that clients
// that were sent away together do not return together, but at most half of the time that is
// left. A whole tenth would give up calls whose wait fits.
func (c *call) spread(after time.Duration) time.Duration {
	spread := min(after/10, math.MaxInt64-after)
	if c.cfg.MaxElapsed > 0 {
		spread = min(spread, (c.cfg.MaxElapsed-time.Since(c.start)-after)/2)
	}
	if deadline, ok := c.ctx.Deadline(); ok {
		spread = min(spread, (time.Until(deadline)-after)/2)
	}
	return max(0, spread)
}

func (c *call) failedAttempt(n int, err error, delay time.Duration) Attempt {
	return Attempt{Name: c.cfg.Name, Number: n, Err: err, Delay: delay, RetryingFor: time.Since(c.failedAt)}
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
