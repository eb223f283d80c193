// Package resilience composes policies around any func(ctx) error.
//
//	guarded := resilience.Chain(
//		retries.Wrap,                    // outermost: sees the outcome of all the rest
//		circuit.Wrap,                    // refuses while the dependency is down
//		slots.Wrap,                      // bounds what is in flight
//		resilience.Timeout(time.Second), // innermost: bounds each single attempt
//	)
//	user, err := resilience.Value(ctx, guarded, func(ctx context.Context) (*User, error) {
//		return fetchUser(ctx, 42)
//	})
//
// Each pattern is a package of its own and may be used without this one:
// retry, breaker, bulkhead, throttle, cacheaside and saga, and resiliencehttp
// for clients and servers that speak HTTP. They meet through the unnamed types
// behind [Func] and [Middleware] and import neither each other nor this package.
//
// What every policy of this module promises:
//
//   - It runs fn on the caller's goroutine and never after Do has returned.
//   - It does not call fn for a context that has already ended.
//   - A panic in fn, and runtime.Goexit, passes through unchanged; every permit,
//     slot and count is given back on the way.
//   - It never loses the error of the work: errors.Is finds both the cause and
//     the reason for giving up.
//   - It is safe for concurrent use, and meant to be built once and shared.
//
// # What errors say
//
// Each policy reads in an error what it says of the dependency, and all read it in the
// same way. An error speaks by its methods, at any depth of its chain:
//
//	                      breaker            retry              adaptive limit  cache load  saga step
//	nil                   success            end                success         kept        done
//	Answered() is true    success            end [1]            success         answer      not tried again
//	Refused() is true     ignored            waits, ends [2]    no sample       refused     no attempt
//	the caller left       ignored [3]        end                no sample [3]   failed      turns back
//	RetryAfter() > 0      opens for exactly  waits for it       overload        failed      attempt, waits for it
//	                      that time
//	anything else         failure            if Retryable()     [4]             failed      attempt
//
//	[1] unless it says Retryable() itself, as HTTP's 429 does
//	[2] counts against Attempts, not against the Budget; an open circuit ends the retrying
//	[3] a cancel; a deadline counts as a failure of a call that had run for Patience,
//	    and as overload
//	[4] overload if it is a time-out or Throttled(), else no sample
//
// The first that applies decides: Refused, Answered, the end of the caller's ctx,
// Retryable() false, RetryAfter. Of an error and what it wraps, the outermost that has
// the method decides. Of joined errors every part is asked: the whole is refused only
// if all parts are, and answered only if one is an answer and none failed. [Refused],
// [Answered], [Retryable], [RetryAfter] and [Answer] are for policies of other origin;
// docs/protocol.md has a row for each way in which a call can end.
//
// The patterns are those of the Cloud Design Patterns catalogue
// (https://learn.microsoft.com/azure/architecture/patterns/).
package resilience

import (
	"context"
	"slices"

	"github.com/go-resilience/resilience/internal/ended"
)

// Func is the unit of work that every pattern wraps.
//
// It is an alias of an unnamed type, as is [Middleware], so that a method value
// such as retrier.Wrap is a Middleware without a conversion.
type Func = func(context.Context) error

// Middleware returns a Func that runs next under a policy.
type Middleware = func(next Func) Func

// Policy is what a Retrier, a Breaker, a Bulkhead and a Limiter have in common.
type Policy interface {
	// Do runs fn under the policy, on the caller's goroutine.
	Do(ctx context.Context, fn Func) error
	// Wrap returns a Func that runs next under the policy: a Middleware.
	Wrap(next Func) Func
}

// Chain composes middleware. The first is the outermost: Chain(a, b)(fn) is
// a(b(fn)). A nil Middleware is left out; Chain() returns next as it is.
//
// The result wraps next anew each time that it is applied. Wrap a function that is
// called often once, and keep it. Chain keeps a copy of mw.
func Chain(mw ...Middleware) Middleware {
	mw = slices.Clone(mw)
	return func(next Func) Func {
		for i := len(mw) - 1; i >= 0; i-- {
			if mw[i] != nil {
				next = mw[i](next)
			}
		}
		return next
	}
}

// Value runs fn under mw and returns its result; on error, the zero T. A nil mw
// runs fn as it is. fn is not called with a ctx that has already ended.
//
// mw must call what it wraps on the caller's goroutine and not after it has
// returned, as every policy of this module does; Value then has no race.
// Where mw turns an error into success without a value ([Fallback]), the result
// is the zero T and a nil error.
func Value[T any](ctx context.Context, mw Middleware, fn func(context.Context) (T, error)) (T, error) {
	if mw == nil {
		mw = Chain()
	}
	var value T
	err := mw(func(ctx context.Context) error {
		if ctx.Err() != nil {
			return ended.Error(ctx)
		}
		v, err := fn(ctx)
		if err == nil {
			value = v
		}
		return err
	})(ctx)
	if err != nil {
		var zero T
		return zero, err
	}
	return value, nil
}
