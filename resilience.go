// Package resilience composes policies around any func(context.Context) error.
//
//	guarded := resilience.Chain(
//		retries.Wrap,                    // outermost: sees the outcome of everything below
//		circuit.Wrap,                    // refuses calls while the dependency is down
//		slots.Wrap,                      // limits how many calls are in flight
//		resilience.Timeout(time.Second), // innermost: limits each attempt
//	)
//	user, err := resilience.Do(ctx, guarded, func(ctx context.Context) (*User, error) {
//		return fetchUser(ctx, 42)
//	})
//
// Each pattern is a package of its own that imports neither the others nor this one: retry, hedge,
// breaker, bulkhead, throttle, cacheaside, saga and lease.
//
// Every [Policy], and every [Middleware] of this package, guarantees:
//
//   - It runs fn on the caller's goroutine, never after Do has returned, and never with a ctx that has
//     already ended.
//   - A panic in fn and [runtime.Goexit] pass through; permits, slots and counts are released first.
//   - [errors.Is] finds both the error of fn and the reason for giving up.
//   - It is safe for concurrent use, and meant to be built once and shared.
//
// # Errors
//
// Policies communicate through the errors that calls return. An error tells every policy what it means
// through optional methods, at any depth of its chain: Refused() bool, Answered() bool, Retryable() bool,
// RetryAfter() time.Duration and Throttled() bool. If an error and an error that it wraps have the same
// method, the outer one decides; of joined errors, the first that has any of the methods, except that they
// are refused only if all of them are, and that the longest RetryAfter counts. docs/protocol.md shows what
// each policy makes of each error.
//
// # Panics
//
// A Hedger, a Cache and a saga's Runner also call functions on goroutines of their own. A panic there becomes
// an error that has a method Stack() []byte.
//
// # Configuration
//
// The same rules hold in every package. The zero value of a field means the default that the field
// documents. A negative value is an error, except for the constants Unlimited (no limit) and None
// (switched off), which a package has where a field accepts them. New panics if its Config is invalid:
// call Validate first on a Config that comes from outside the program. Update sees effective values, with
// defaults filled in: c.Queue += 10 works. A field that the function leaves as it is shown continues to
// follow its default.
package resilience

import (
	"context"
	"slices"

	"github.com/go-resilience/resilience/internal/ended"
)

// Unlimited, in a field that accepts it, means that there is no limit.
const Unlimited = -1

// Func is the unit of work that every pattern wraps. Func and [Middleware] are aliases, so that a method
// value such as retrier.Wrap is a Middleware.
type Func = func(context.Context) error

// Middleware returns a [Func] that runs next under a policy.
type Middleware = func(next Func) Func

// Policy is implemented by retry.Retrier, breaker.Breaker, bulkhead.Bulkhead, throttle.Limiter,
// throttle.Limits, fleet.Limits and the adaptive variants.
type Policy interface {
	// Do runs fn under the policy and returns its error, or an error of the policy.
	Do(ctx context.Context, fn Func) error
	// Wrap is a [Middleware].
	Wrap(next Func) Func
}

// Chain composes middleware, outermost first: Chain(a, b)(fn) is a(b(fn)). Nil middleware is skipped, and
// Chain()(fn) is fn. For a function that is called often, keep the result of wrapping it.
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

// Do runs fn under mw and returns its result, or the zero T and an error. A nil mw means none. If mw turns
// an error into success, as [Fallback] may, Do returns the zero T and nil. For a function that returns
// only an error, call mw(fn)(ctx) or the Do method of a policy.
//
// mw must call the Func that it wraps on the caller's goroutine, as every Policy does.
//
// A policy with a time limit cancels the ctx of fn when fn returns. fn must therefore return a finished
// value: if it returns an [net/http.Response] from http.Client.Do, the body is cut off after Do has returned.
// Read the body in fn, or put the policies into a resiliencehttp.Transport, which waits for the body.
func Do[T any](ctx context.Context, mw Middleware, fn func(context.Context) (T, error)) (T, error) {
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
