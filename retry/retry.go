// Package retry calls a function again while its error is worth another attempt.
//
//	retries := retry.New(retry.Config{
//		Attempts: 4,
//		Budget:   budget, // shared by all that call this dependency
//	})
//	err := retries.Do(ctx, func(ctx context.Context) error {
//		return fetch(ctx, 42)
//	})
//
// Retry only what may safely be done twice: an attempt that failed may still have taken effect.
//
//   - Delays are random and grow. RetryAfter() time.Duration of an error sets the least.
//   - A wait that could not end before the deadline of ctx, which limits the call, is not begun.
//   - An error that is [Permanent] or not resilience.Retryable, such as an answer, is returned as
//     it is.
//   - A refusal (Refused() bool) of a policy further in counts as an attempt, but costs no budget.
//     An open breaker ends the retrying.
//   - Without a [Budget], retries multiply the load on a dependency that is down.
//   - Of nested retriers only the outermost retries, unless it has one attempt. [Fresh] begins a
//     new operation.
//
// Sources: Retry (Cloud Design Patterns); for budgets, "Addressing Cascading Failures" in Site
// Reliability Engineering (Beyer et al., 2016). Delays are computed by
// github.com/cenkalti/backoff/v4.
package retry

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/go-resilience/resilience/internal/attempt"
	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
)

// A Retrier is made by [New], and safe for concurrent use.
type Retrier struct {
	setting   settings.Setting[Config]
	counts    counts
	observers notify.Observers[Event]
}

// New panics if cfg is not valid.
func New(cfg Config) *Retrier {
	r := new(Retrier)
	r.setting.Init(cfg, Config.withDefaults)
	return r
}

func (r *Retrier) Wrap(fn func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return r.Do(ctx, fn) }
}

// Do calls fn until it succeeds, another attempt would not help, or a limit or the end of ctx ends
// the retrying. It returns the error of fn as it is, or an [*Error].
func (r *Retrier) Do(ctx context.Context, fn func(context.Context) error) error {
	if ctx.Err() != nil {
		r.counts.end(endOf(ctx))
		return ended.Error(ctx)
	}
	cfg := r.setting.Load()
	if n, within := attempt.From(ctx); within {
		return r.doNested(ctx, cfg, fn, n)
	}
	fresh := call{Retrier: r, cfg: cfg, ctx: ctx, n: 1, kind: behavior.Refused}
	c := fresh
	for ; ; c.n++ {
		inner := ctx
		if cfg.Attempts != 1 {
			inner = attempt.With(ctx, c.n)
		}
		var began time.Time
		if cfg.HealthyAfter > 0 {
			began = time.Now()
		}
		err := cfg.attempt(inner, fn)
		end := behavior.Read(err)
		refused := end.Kind == behavior.Refused
		switch {
		case err != nil && !refused && cfg.HealthyAfter > 0 && time.Since(began) >= cfg.HealthyAfter:
			c = fresh
		case refused && c.charged: // nothing was sent
			cfg.Budget.giveBack()
		}
		if !refused && c.kind == behavior.Refused { // the first attempt that was made
			cfg.Budget.earn()
		}
		if err == nil && c.n == 1 {
			return c.over(firstTry, nil)
		}
		if err == nil {
			return c.over(recovered, nil)
		}
		r.counts.failed.Add(1)
		if c.failedAt.IsZero() {
			c.failedAt = time.Now()
		}
		switch {
		case !end.Retryable && (end.Kind == behavior.Answered || marked(err)):
			return c.over(permanent, unmarked(err))
		case ctx.Err() != nil && c.n == 1 && saysEnd(ctx, err):
			return c.over(endOf(ctx), err)
		case ctx.Err() != nil:
			c.remember(err, end.Kind)
			return c.giveUp(endOf(ctx), ended.Error(ctx))
		case refused && !end.Retryable && c.kind != behavior.Refused:
			c.n-- // err says why no attempt follows, not what went wrong
			return c.giveUp(permanent, err)
		case refused && !end.Retryable, end.Kind == behavior.Failed && !cfg.If(err):
			return c.over(permanent, err)
		}
		c.remember(err, end.Kind)
		a, outcome, cause := c.next(end.RetryAfter)
		if cause != nil {
			return c.giveUp(outcome, cause)
		}
		if cfg.OnRetry != nil {
			cfg.OnRetry(ctx, a)
		}
		r.observers.Tell(ctx, Event{
			Kind: EventRetried, Name: a.Name, Attempt: a.Number, Err: err, Delay: a.Delay, RetryingFor: a.RetryingFor,
		})
		if !wait(ctx, a.Delay) {
			if c.charged {
				cfg.Budget.giveBack()
			}
			return c.giveUp(endOf(ctx), ended.Error(ctx))
		}
		r.counts.retried.Add(1)
	}
}

// doNested makes one attempt within the nth attempt of another Retrier. The Budget counts the
// call in the first of them only: the others are retries of that Retrier.
func (r *Retrier) doNested(ctx context.Context, cfg *Config, fn func(context.Context) error, n int) error {
	err := cfg.attempt(ctx, fn)
	if n == 1 && !behavior.IsRefused(err) {
		cfg.Budget.earn()
	}
	if err == nil {
		r.counts.end(firstTry)
		return nil
	}
	r.counts.failed.Add(1)
	r.counts.end(nested)
	return err
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

// A call is one call of Do.
type call struct {
	*Retrier
	cfg      *Config
	ctx      context.Context
	n        int       // the number of the attempt, from 1
	failedAt time.Time // when the first attempt had failed
	delays   Backoff
	charged  bool // the present attempt took a retry out of the Budget

	kind    behavior.Kind // of all attempts together: Failed before Answered before Refused
	last    error         // of the last attempt
	earlier error         // the last of that kind, unless that is last
}

// remember keeps err for the Error. A refusal does not hide an earlier failure, since a policy
// further out would take a call that failed for one that was not made.
func (c *call) remember(err error, kind behavior.Kind) {
	switch {
	case kind == behavior.Failed, kind == c.kind, c.kind == behavior.Refused:
		c.kind, c.earlier = kind, nil
	case c.earlier == nil:
		c.earlier = c.last
	}
	c.last = err
}

// next returns the attempt that has failed, with the wait for another, whose error asks for at
// least a wait of after, or why no attempt follows. It charges the Budget for that attempt.
func (c *call) next(after time.Duration) (a Attempt, outcome string, cause error) {
	cfg := c.cfg
	if cfg.Attempts > 0 && c.n >= cfg.Attempts {
		return a, exhausted, ErrExhausted
	}
	if c.delays == nil {
		c.delays = cfg.Backoff()
		c.delays.Reset() // the engine asks for it before first use
	}
	a = Attempt{cfg.Name, c.n, c.last, c.delays.NextBackOff(), time.Since(c.failedAt)}
	if a.Delay >= 0 && cfg.Delay != nil {
		a.Delay = cfg.Delay(c.ctx, a)
	}
	if a.Delay < 0 {
		return a, exhausted, ErrExhausted
	}
	left := time.Duration(math.MaxInt64)
	until, limited := c.ctx.Deadline()
	if limited {
		left = time.Until(until)
	}
	if after > cfg.MaxRetryAfter {
		return a, exhausted, fmt.Errorf("%w: asked to wait %v, longer than MaxRetryAfter of %v",
			ErrExhausted, after, cfg.MaxRetryAfter)
	}
	if after > 0 {
		// Up to a tenth later than asked, so that clients that were sent away together do
		// not return together. At most half of the time that is left, because a wait that
		// fits would otherwise be given up for its jitter.
		a.Delay = max(a.Delay, after+fullJitter(max(0, min(after/10, (left-after)/2))))
	}
	if limited && a.Delay >= left {
		return a, deadline, fmt.Errorf("a wait of %v would pass the deadline: %w", a.Delay, context.DeadlineExceeded)
	}
	c.charged = cfg.Budget != nil && c.kind != behavior.Refused
	if c.charged && !cfg.Budget.take() {
		return a, overBudget, ErrOverBudget
	}
	return a, "", nil
}

// giveUp ends the call with an *Error.
func (c *call) giveUp(outcome string, cause error) error {
	return c.end(outcome, &Error{
		Name: c.cfg.Name, Attempts: c.n, RetryingFor: time.Since(c.failedAt),
		Cause: cause, Err: c.last, kind: c.kind, earlier: c.earlier,
	}, true)
}

// over ends the call with err, which is nil or the error of fn as it is.
func (c *call) over(outcome string, err error) error { return c.end(outcome, err, c.n > 1) }

func (c *call) end(outcome string, err error, tell bool) error {
	if tell && outcome != "" {
		c.observers.Tell(c.ctx, Event{
			Kind: EventEnded, Name: c.cfg.Name,
			Attempts: c.n, Err: err, RetryingFor: time.Since(c.failedAt), Outcome: outcome,
		})
	}
	c.counts.end(outcome)
	return err
}

// wait returns after d, or with false as soon as ctx ends.
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

// AttemptFrom returns the number of the attempt that ctx belongs to, from 1, or false if there is
// none.
func AttemptFrom(ctx context.Context) (n int, ok bool) { return attempt.From(ctx) }

// Fresh returns a ctx in which a [Retrier] retries, even within an attempt of another: for a message
// of a consumer that runs under one, and for work that outlives its caller.
func Fresh(ctx context.Context) context.Context {
	if _, ok := attempt.From(ctx); !ok {
		return ctx
	}
	return attempt.With(ctx, 0)
}
