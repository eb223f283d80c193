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
//   - An error that another attempt cannot help ends the retrying and is returned as it is:
//     see [Permanent] and resilience.Retryable. So is an answer, an error with a method
//     Answered() bool that returns true, unless its method Retryable returns true, as that
//     of "too many requests" does.
//   - An error with a method RetryAfter() time.Duration sets the least delay.
//   - A refusal is an error with a method Refused() bool that returns true: a bulkhead,
//     say, was full, and nothing was sent to the dependency. A Retrier waits and tries
//     again; the refusal counts as an attempt, but costs no budget. An open breaker ends
//     the retrying.
//   - A [Budget] limits retries to a fraction of the calls. Without one, retries multiply
//     the load on a dependency that is down. For a budget for each host or tenant, make a
//     resilience.Group of Retriers, each with a Budget of its own.
//   - Of nested retriers only the outermost retries, so that their attempts do not
//     multiply. It marks the ctx that fn is given, so pass that on. A Retrier with one
//     attempt sets no mark. [Fresh] begins a new operation.
//
// Package hedge is for calls that are slow rather than failing.
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
	r := new(Retrier)
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
func (r *Retrier) Do(ctx context.Context, fn func(context.Context) error) error {
	if ctx.Err() != nil {
		r.counts.end(endOf(ctx))
		return ended.Error(ctx)
	}
	cfg := r.setting.Load()
	if n, nested := attempt.From(ctx); nested {
		return r.doNested(ctx, cfg, fn, n)
	}
	c := call{Retrier: r, cfg: cfg, ctx: ctx, kind: behavior.Refused}
	for n := 1; ; n++ {
		inner := ctx
		if cfg.Attempts != 1 {
			inner = attempt.With(ctx, n)
		}
		var began time.Time
		if cfg.HealthyAfter > 0 {
			began = time.Now()
		}
		err := cfg.attempt(inner, fn)
		if err == nil {
			return c.succeed(n)
		}
		end := behavior.Read(err)
		if c.charged && end.Kind == behavior.Refused { // nothing was sent
			cfg.Budget.giveBack()
		}
		if c.failedAt.IsZero() {
			c.failedAt = time.Now()
			r.counts.firstFailed.Add(1)
		}
		if cfg.HealthyAfter > 0 && end.Kind != behavior.Refused && time.Since(began) >= cfg.HealthyAfter {
			c = call{Retrier: r, cfg: cfg, ctx: ctx, kind: behavior.Refused, failedAt: time.Now()}
			n = 1
		}
		if c.kind == behavior.Refused && end.Kind != behavior.Refused { // the first attempt that was made
			cfg.Budget.earn()
		}
		switch {
		case end.Kind == behavior.Answered && !end.Retryable, !end.Retryable && marked(err):
			return c.over(n, OutcomePermanent, unmarked(err))
		case ctx.Err() != nil && n == 1 && saysEnd(ctx, err):
			return c.over(n, endOf(ctx), err)
		case ctx.Err() != nil:
			c.remember(err, end.Kind)
			return c.giveUp(n, endOf(ctx), ended.Error(ctx))
		case end.Kind == behavior.Refused && !end.Retryable && c.kind != behavior.Refused:
			return c.giveUp(n-1, OutcomePermanent, err) // err says why no attempt follows, not what went wrong
		case end.Kind == behavior.Refused && !end.Retryable, end.Kind == behavior.Failed && !cfg.worth(err, end):
			return c.over(n, OutcomePermanent, err)
		}
		c.remember(err, end.Kind)
		if cfg.Attempts > 0 && n >= cfg.Attempts {
			return c.giveUp(n, OutcomeExhausted, ErrExhausted)
		}
		delay, outcome, cause := c.next(n, err, end.RetryAfter)
		if cause != nil {
			return c.giveUp(n, outcome, cause)
		}
		c.tellRetry(c.failedAttempt(n, err, delay))
		if !wait(ctx, delay) {
			if c.charged {
				cfg.Budget.giveBack()
			}
			return c.giveUp(n, endOf(ctx), ended.Error(ctx))
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
		r.counts.firstTry.Add(1)
		return nil
	}
	r.counts.firstFailed.Add(1)
	r.counts.nested.Add(1)
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

// worth reports whether another attempt follows a failure.
func (c *Config) worth(err error, end behavior.End) bool {
	if c.If == nil {
		return end.Retryable
	}
	return c.If(err)
}

// A call is the state of one call of Do.
type call struct {
	*Retrier
	cfg      *Config
	ctx      context.Context
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

// next returns how long to wait for another attempt after the nth, which returned an err that
// asks for a wait of after, or why no attempt follows. It charges the Budget for the attempt.
func (c *call) next(n int, err error, after time.Duration) (delay time.Duration, o Outcome, cause error) {
	cfg := c.cfg
	if c.delays == nil {
		c.delays = cfg.Backoff()
		c.delays.Reset() // the engine asks for it before first use
	}
	delay = c.delays.NextBackOff()
	if delay >= 0 && cfg.Delay != nil {
		delay = cfg.Delay(c.ctx, c.failedAttempt(n, err, delay))
	}
	if delay < 0 {
		return 0, OutcomeExhausted, ErrExhausted
	}
	left := time.Duration(math.MaxInt64)
	deadline, limited := c.ctx.Deadline()
	if limited {
		left = time.Until(deadline)
	}
	if after > cfg.MaxRetryAfter {
		return 0, OutcomeExhausted, limit(fmt.Sprintf("asked to wait %v, longer than MaxRetryAfter of %v", after, cfg.MaxRetryAfter))
	} else if after > 0 {
		// Up to a tenth later than asked, so that clients that were sent away together do
		// not return together. At most half of the time that is left, because a wait that
		// fits would otherwise be given up for its jitter.
		delay = max(delay, after+fullJitter(max(0, min(after/10, (left-after)/2))))
	}
	if limited && delay >= left {
		return 0, OutcomeDeadline, fmt.Errorf("a wait of %v would pass the deadline: %w", delay, context.DeadlineExceeded)
	}
	c.charged = cfg.Budget != nil && c.kind != behavior.Refused
	if c.charged && !cfg.Budget.take(c.ctx) {
		return 0, OutcomeOverBudget, ErrOverBudget
	}
	return delay, "", nil
}

// succeed ends the call, whose nth attempt has succeeded.
func (c *call) succeed(n int) error {
	if c.kind == behavior.Refused { // it was the first that was made
		c.cfg.Budget.earn()
	}
	if c.failedAt.IsZero() {
		c.counts.firstTry.Add(1)
		return nil
	}
	return c.over(n, OutcomeRecovered, nil)
}

// over ends the call after a number of attempts with err, which is nil or the error of fn
// as it is. It tells the observers if the call was retried.
func (c *call) over(attempts int, o Outcome, err error) error {
	return c.end(attempts > 1, attempts, o, err)
}

// giveUp ends the call with an *Error.
func (c *call) giveUp(attempts int, o Outcome, cause error) error {
	return c.end(true, attempts, o, &Error{
		Name: c.cfg.Name, Attempts: attempts, RetryingFor: time.Since(c.failedAt),
		Cause: cause, Err: c.last, kind: c.kind, earlier: c.earlier,
	})
}

func (c *call) end(tell bool, attempts int, o Outcome, err error) error {
	if tell && o != "" && c.observers.Any() {
		c.observers.Tell(c.ctx, Event{
			Kind: EventEnded, Name: c.cfg.Name,
			Attempts: attempts, Err: err, RetryingFor: time.Since(c.failedAt), Outcome: o,
		})
	}
	c.counts.end(o)
	return err
}

// tellRetry tells the hook and the observers that another attempt follows a.
func (c *call) tellRetry(a Attempt) {
	if c.cfg.OnRetry != nil {
		c.cfg.OnRetry(c.ctx, a)
	}
	if c.observers.Any() {
		c.observers.Tell(c.ctx, Event{
			Kind: EventRetried, Name: a.Name,
			Attempt: a.Number, Err: a.Err, Delay: a.Delay, RetryingFor: a.RetryingFor,
		})
	}
}

func (c *call) failedAttempt(n int, err error, delay time.Duration) Attempt {
	return Attempt{Name: c.cfg.Name, Number: n, Err: err, Delay: delay, RetryingFor: time.Since(c.failedAt)}
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

// AttemptFrom returns the number of the attempt that ctx belongs to, from 1. It returns 0
// and false if no [Retrier] retries the operation. If retriers are nested, it is the
// number of the innermost one that retries.
//
// Use it to tell a server or a trace: as a header, or as an attribute of a span.
func AttemptFrom(ctx context.Context) (n int, ok bool) { return attempt.From(ctx) }

// Fresh returns a ctx in which a new operation begins: a [Retrier] called with it retries,
// even within an attempt of another Retrier.
//
// Consider a consumer of a queue that runs for days under a Retrier, which begins it again
// when it fails. To the retriers in it, all of its work is one attempt of that Retrier, and
// none of them would retry. The consumer handles each message with Fresh(ctx). The same holds
// for work that continues after its caller has left (context.WithoutCancel).
//
// An error marked by [Permanent] ends the operation in which it is returned, and loses the
// mark there. Mark it again to end the retrying further up.
func Fresh(ctx context.Context) context.Context {
	if _, ok := attempt.From(ctx); !ok {
		return ctx
	}
	return attempt.With(ctx, 0)
}
