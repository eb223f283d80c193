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
// Each pattern is a package of its own, which imports neither the others nor this one: retry,
// breaker, bulkhead, throttle, cacheaside, saga, lease and hedge.
//
// Every [Policy], and every Middleware of this package, promises:
//
//   - It runs fn on the caller's goroutine, never after Do has returned, and not for a ctx that has
//     already ended.
//   - A panic in fn and runtime.Goexit pass through; every permit, slot and count is given back.
//   - errors.Is finds both the error of fn and the reason for giving up.
//   - It is safe for concurrent use, and meant to be built once and shared.
//
// A Hedger, a Cache and a saga's Runner call functions on goroutines of their own too. A panic there
// becomes an error that has a method Stack() []byte.
//
// # What errors say
//
// An error says by methods, at any depth of its chain, what it means to all policies:
//
//	                      breaker            retry              adaptive limit  cache load  saga step
//	nil                   success            end                success         kept        done
//	Refused() is true     ignored            waits, ends [1]    no sample       refused     no attempt
//	Answered() is true    success            end [2]            success         answer      not tried again
//	the caller left       ignored [3]        end                no sample [3]   failed      turns back
//	RetryAfter() > 0      failure [4]        waits for it       overload        failed      attempt, waits for it
//	anything else         failure            if Retryable()     [5]             failed      attempt
//
//	[1] counts against Attempts, not against the Budget; an open circuit ends the retrying
//	[2] unless its Retryable() is true, as that of HTTP's 429 is
//	[3] by a cancel; a deadline is overload, and a failure if the call had run for Patience
//	[4] as any other; if it opens the breaker, then for that time (Trip opens it at once)
//	[5] overload if it is a timeout or Throttled(), else no sample
//
// The first row that applies decides. Of an error and what it wraps, the outermost that has the
// method decides; of joined errors the first that says anything, but the longest RetryAfter counts;
// they are refused only if all are.
// docs/protocol.md has a row for each way in which a call can end.
//
// The patterns are those of https://learn.microsoft.com/azure/architecture/patterns/.
package resilience

import (
	"context"
	"slices"

	"github.com/go-resilience/resilience/internal/ended"
)

// Func is the unit of work that every pattern wraps. It and [Middleware] are aliases of unnamed
// types, so that a method value such as retrier.Wrap is a Middleware.
type Func = func(context.Context) error

// Middleware returns a Func that runs next under a policy.
type Middleware = func(next Func) Func

// Policy is the interface of a Retrier, a Breaker, a Bulkhead, a Limiter and a throttle/adaptive.
type Policy interface {
	Do(ctx context.Context, fn Func) error
	Wrap(next Func) Func // a Middleware
}

// Chain composes middleware. The first is the outermost: Chain(a, b)(fn) is a(b(fn)). A nil
// Middleware is left out; Chain()(fn) is fn. For a function that is called often, keep the result of
// wrapping it.
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

// Value runs fn under mw, unless that is nil, and returns its result; on error, the zero T. If mw
// turns an error into success, as [Fallback] may, Value returns the zero T and a nil error. mw must
// call the Func that it wraps on the caller's goroutine, as every [Policy] does.
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
