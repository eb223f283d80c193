// Package retry calls a function again if it fails with an error that may not occur the next time.
//
//	retries := retry.New(retry.Config{
//		Name:     "users",
//		Attempts: 4,
//		Budget:   budget, // shared by all callers of this dependency
//	})
//	err := retries.Do(ctx, func(ctx context.Context) error {
//		return fetch(ctx, 42)
//	})
//
// Retry only operations that are safe to run twice, because a failed attempt may still have taken effect.
//
//   - By default, the delays between attempts are random and grow. A delay is never shorter than an error's
//     RetryAfter or Config.MinDelay.
//   - If the deadline of ctx would pass during a wait, the call returns without the wait.
//   - An error of fn that is not retryable is returned without an [*Error] around it, unless ctx is done. For
//     example, a [Permanent] error is not retryable. An error whose method Answered() bool returns true is not
//     retryable either, unless its method Retryable() bool returns true.
//   - If a policy inside the Retrier refuses an attempt, the attempt counts as one of Config.Attempts but takes no
//     retry from the [Budget]. No retry follows if the policy is an open breaker. If the policy is a half-open breaker,
//     the call is retried.
//   - Without a [Budget], retries multiply the load on a dependency that is down.
//   - If retriers are nested, only the outermost one retries. A Retrier whose Config.Attempts is 1 does not count as
//     the outermost retrier. Under a ctx from [Fresh], an inner Retrier also retries. A saga that may repeat a step
//     counts as a retrier, so a Retrier in the step does not retry.
//
// A Retrier also supports the errors of github.com/cenkalti/backoff: Permanent of v4, v5 and v6, and RetryAfter of v5
// and v6.
//
// Sources: Retry (Cloud Design Patterns); "Addressing Cascading Failures" in Site Reliability Engineering
// (Beyer et al., 2016), for budgets. Delays are computed by github.com/cenkalti/backoff/v4.
package retry

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/go-resilience/resilience/internal/attempt"
	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/delay"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
)

// A Retrier retries calls. A Retrier is safe for concurrent use.
type Retrier struct {
	setting   settings.Setting[Config]
	budget    *Budget // the latest Budget; guarded by setting
	counts    counts
	observers notify.Observers[Event]
}

// New returns a Retrier. New panics if cfg is invalid; see [Config.Validate].
func New(cfg Config) *Retrier {
	r := new(Retrier)
	r.setting.Init(cfg, Config.withDefaults)
	r.useBudget(&cfg)
	return r
}

// useBudget counts r as a user of a new Budget. Calls to useBudget do not overlap.
func (r *Retrier) useBudget(cfg *Config) {
	if b := cfg.Budget; b != nil && b != r.budget {
		b.users.Add(1)
	}
	r.budget = cfg.Budget
}

// Wrap returns a function that calls [Retrier.Do](ctx, fn).
func (r *Retrier) Wrap(fn func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return r.Do(ctx, fn) }
}

// Do calls fn until fn succeeds, until fn fails with an error that is not retryable, until a limit is reached, or until
// ctx is done. Do returns the error of fn or an [*Error]. An error of fn is returned unchanged, with two exceptions: Do
// removes the wrapper of [Permanent], and may wrap the error of an attempt that exceeded AttemptTimeout. If ctx is done
// when Do is called, Do does not call fn, and returns an error that matches the error and the cause of ctx.
func (r *Retrier) Do(ctx context.Context, fn func(context.Context) error) error {
	if ctx.Err() != nil {
		r.counts.end(contextOutcome(ctx))
		return ended.Error(ctx)
	}
	cfg := r.setting.Load()
	if n, nested := attempt.From(ctx); nested {
		return r.doNested(ctx, cfg, fn, n)
	}
	fresh := call{Retrier: r, cfg: cfg, ctx: ctx, n: 1, kind: behavior.Refused}
	c := fresh
	for ; ; c.n++ {
		inner := ctx
		if cfg.Attempts != 1 {
			inner = attempt.With(ctx, c.n)
		}
		var start time.Time
		if cfg.HealthyAfter > 0 {
			start = time.Now()
		}
		err := cfg.attempt(inner, fn)
		end := behavior.Read(err)
		refused := end.Kind == behavior.Refused
		switch {
		case err != nil && !refused && cfg.HealthyAfter > 0 && time.Since(start) >= cfg.HealthyAfter:
			retried := c.retried
			c = fresh
			c.retried = retried
		case refused && c.charged: // the retry did not reach the dependency
			cfg.Budget.refund()
		}
		if !refused && c.kind == behavior.Refused { // the first attempt that an inner policy did not refuse
			cfg.Budget.credit()
		}
		if err == nil && c.n == 1 {
			r.counts.end(outcomeFirstTry)
			return nil
		}
		if err == nil {
			return c.finish(OutcomeRecovered, nil)
		}
		r.counts.failed.Add(1)
		if c.failedAt.IsZero() {
			c.failedAt = time.Now()
		}
		switch {
		case !end.Retryable && (end.Kind == behavior.Answered || behavior.HasPermanent(err)):
			return c.finish(OutcomePermanent, behavior.WithoutPermanent(err))
		case ctx.Err() != nil && c.n == 1 && reportsContextEnd(ctx, err):
			return c.finish(contextOutcome(ctx), err)
		case ctx.Err() != nil:
			c.remember(err, end.Kind)
			return c.giveUp(contextOutcome(ctx), ended.Error(ctx))
		case refused && !end.Retryable && c.kind != behavior.Refused:
			c.n-- // the refusal is the Cause of the Error, not one of the failed attempts
			return c.giveUp(OutcomePermanent, err)
		case refused && !end.Retryable, end.Kind == behavior.Failed && !cfg.RetryIf(err):
			return c.finish(OutcomePermanent, err)
		}
		c.remember(err, end.Kind)
		a, outcome, cause := c.next(end.RetryAfter)
		if cause != nil {
			return c.giveUp(outcome, cause)
		}
		c.retried = true
		r.observers.Tell(ctx, Event{
			Kind: EventRetried, Name: a.Name, Attempts: a.Number, Err: err, Delay: a.Delay, RetryingFor: a.RetryingFor,
		})
		if !wait(ctx, a.Delay) {
			if c.charged {
				cfg.Budget.refund()
			}
			return c.giveUp(contextOutcome(ctx), ended.Error(ctx))
		}
		r.counts.retried.Add(1)
	}
}

// doNested runs one attempt within the nth attempt of another Retrier. If n is 1, the attempt is a new call, which
// adds retries to the Budget. If n is larger, the attempt is a retry of the other Retrier and adds none.
func (r *Retrier) doNested(ctx context.Context, cfg *Config, fn func(context.Context) error, n int) error {
	err := cfg.attempt(ctx, fn)
	if n == 1 && !behavior.IsRefused(err) {
		cfg.Budget.credit()
	}
	if err == nil {
		r.counts.end(outcomeFirstTry)
		return nil
	}
	r.counts.failed.Add(1)
	if !ended.Lost(ctx) {
		r.counts.end(outcomeNested)
	}
	return err
}

// attempt calls fn with a ctx that is canceled after AttemptTimeout.
func (c *Config) attempt(ctx context.Context, fn func(context.Context) error) error {
	if c.AttemptTimeout == 0 {
		return fn(ctx)
	}
	late, err := linger.Timed(ctx, c.AttemptTimeout, (*attemptTimeoutCause)(c), fn)
	if late && !errors.Is(err, context.DeadlineExceeded) && behavior.Read(err).Retryable {
		return &timeoutError{(*attemptTimeoutCause)(c), err}
	}
	return err
}

// A call is the state of one call to Do.
type call struct {
	*Retrier
	cfg      *Config
	ctx      context.Context
	n        int       // the number of the current attempt, from 1
	failedAt time.Time // the time at which the first attempt failed
	delays   Backoff   // the delays before the retries; nil before the first retry
	charged  bool      // the current attempt has taken a retry out of the Budget
	retried  bool      // an EventRetried was sent, so an EventEnded must follow

	// kind is Failed if any attempt failed. Otherwise it is Answered if any attempt was answered, and Refused if every
	// attempt was refused.
	kind    behavior.Kind
	last    error // the error of the last attempt
	earlier error // the last error of an attempt of this kind; nil if that is last
}

// remember stores err for the Error. A refusal does not replace an earlier failure. If it did, an outer policy would
// treat a call that failed as a call that was refused.
func (c *call) remember(err error, kind behavior.Kind) {
	switch {
	case kind == behavior.Failed, kind == c.kind, c.kind == behavior.Refused:
		c.kind, c.earlier = kind, nil
	case c.earlier == nil:
		c.earlier = c.last
	}
	c.last = err
}

// next returns the failed attempt, including the wait before the next attempt. If no attempt follows, next returns
// the outcome and the cause instead. after is the RetryAfter of the failed attempt's error. next takes a retry out of
// the Budget, unless every attempt so far was refused.
func (c *call) next(after time.Duration) (a FailedAttempt, outcome Outcome, cause error) {
	cfg := c.cfg
	if cfg.Attempts > 0 && c.n >= cfg.Attempts {
		return a, OutcomeExhausted, ErrExhausted
	}
	if c.delays == nil {
		c.delays = cfg.Backoff()
		c.delays.Reset() // cenkalti/backoff requires it before the first use
	}
	a = FailedAttempt{cfg.Name, c.n, c.last, c.delays.NextBackOff(), time.Since(c.failedAt)}
	if a.Delay >= 0 && cfg.Delay != nil {
		a.Delay = cfg.Delay(c.ctx, a)
	}
	if a.Delay < 0 {
		return a, OutcomeExhausted, ErrExhausted
	}
	if after > cfg.MaxRetryAfter {
		return a, OutcomeExhausted, errLongRetryAfter
	}
	left := time.Duration(math.MaxInt64)
	deadline, limited := c.ctx.Deadline()
	if limited {
		left = time.Until(deadline)
	}
	a.Delay = atLeast(max(after, cfg.MinDelay), a.Delay, left)
	if limited && a.Delay >= left {
		return a, OutcomeDeadline, errNoTimeLeft
	}
	c.charged = cfg.Budget != nil && c.kind != behavior.Refused
	if c.charged && !cfg.Budget.take() {
		return a, OutcomeOverBudget, ErrOverBudget
	}
	return a, "", nil
}

// atLeast returns d, or the sum of least and a random jitter if the sum is longer. If least is 0, atLeast returns d.
// The jitter is at most a tenth of least. It keeps clients that failed together from retrying together. left is the
// time until the deadline. The jitter is at most half of left-least, because a longer jitter could move the retry
// past the deadline.
func atLeast(least, d, left time.Duration) time.Duration {
	if least <= 0 {
		return d
	}
	return max(d, least+delay.Full(max(0, min(least/10, (left-least)/2))))
}

// giveUp ends the call with an *Error. cause is the Cause of the *Error.
func (c *call) giveUp(outcome Outcome, cause error) error {
	return c.end(outcome, &Error{
		Name: c.cfg.Name, Attempts: c.n, RetryingFor: time.Since(c.failedAt),
		Cause: cause, Err: c.last, kind: c.kind, earlier: c.earlier,
	}, true)
}

// finish ends the call with err. err is nil or the error of fn.
func (c *call) finish(outcome Outcome, err error) error { return c.end(outcome, err, c.retried) }

func (c *call) end(outcome Outcome, err error, notify bool) error {
	if notify && outcome != outcomeLost {
		c.observers.Tell(c.ctx, Event{
			Kind: EventEnded, Name: c.cfg.Name,
			Attempts: c.n, Err: err, RetryingFor: time.Since(c.failedAt), Outcome: outcome,
		})
	}
	c.counts.end(outcome)
	return err
}

// wait returns true after d has elapsed, or false as soon as ctx is done.
func wait(ctx context.Context, d time.Duration) bool {
	if d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	return ctx.Err() == nil
}

// AttemptFrom returns the number of the attempt that ctx belongs to. Attempts are numbered from 1. ok reports
// whether a Retrier or a saga may repeat the work of ctx. For example, ok is false if ctx comes from [Fresh], or if
// the Config.Attempts of the Retrier is 1.
func AttemptFrom(ctx context.Context) (n int, ok bool) { return attempt.From(ctx) }

// Fresh returns a ctx under which a Retrier retries even within an attempt of another Retrier. Use Fresh at the start
// of a new operation. For example, if a consumer runs under a Retrier, the handling of each message is a new
// operation. Work that continues after its caller has returned is also a new operation.
func Fresh(ctx context.Context) context.Context {
	if _, ok := attempt.From(ctx); !ok {
		return ctx
	}
	return attempt.With(ctx, 0)
}
