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
// Each pattern is a separate package: retry, hedge, breaker, bulkhead, throttle, cacheaside, saga and lease.
// These packages import neither each other nor this package.
//
// Every [Policy], and every [Middleware] of this package, guarantees:
//
//   - It runs fn on the caller's goroutine, and never after Do has returned. It does not run fn if ctx has
//     already ended.
//   - A panic or a [runtime.Goexit] in fn passes through to the caller. Permits, slots and counts are
//     released first.
//   - If the policy stops, [errors.Is] finds both the error of fn and the reason for stopping in the returned
//     error.
//   - It is safe for concurrent use. Create a policy once and share it.
//
// # Errors
//
// Policies communicate through the errors that calls return. Policies classify an error by its optional
// methods: Refused() bool, Answered() bool, Retryable() bool, RetryAfter() time.Duration and Throttled()
// bool. The methods may belong to any error in the chain. If an error and an error that it wraps have the
// same method, the outer error decides. Of joined errors, the first error that has any of the methods
// decides, with two exceptions. Joined errors are refused only if all of them are refused. The longest
// RetryAfter counts. docs/protocol.md shows how each policy treats each error.
//
// # Panics
//
// A Hedger, a Cache and a saga's Runner also call functions on separate goroutines. A panic on such a
// goroutine becomes an error that has a method Stack() []byte.
//
// # Configuration
//
// The same rules hold in every package:
//
//   - The zero value of a field means the default that the field documents.
//   - A negative value is an error, except for the constants Unlimited (no limit) and None (switched off). A
//     package defines the constants that its fields accept.
//   - New panics if its Config is invalid. If a Config comes from outside the program, call Validate first.
//   - Update passes the effective configuration to its function. Defaults are filled in, so c.Queue += 10
//     works. If a field was not set and the function does not alter the field, the field continues to follow
//     its default.
package resilience

import (
	"context"
	"slices"

	"github.com/go-resilience/resilience/internal/ended"
)

// Unlimited is a value for the fields that accept it. Unlimited means that there is no limit.
const Unlimited = -1

// Func is the unit of work that every pattern wraps. Func and [Middleware] are aliases. A method value such
// as retrier.Wrap is therefore a Middleware.
type Func = func(context.Context) error

// Middleware returns a [Func] that runs next under a policy.
type Middleware = func(next Func) Func

// Policy is implemented by retry.Retrier, breaker.Breaker, bulkhead.Bulkhead, throttle.Limiter,
// throttle.Limits, fleet.Limits and the adaptive variants.
type Policy interface {
	// Do runs fn under the policy. It returns fn's error or an error of the policy.
	Do(ctx context.Context, fn Func) error
	// Wrap returns a Func that runs next under the policy. Wrap is a [Middleware].
	Wrap(next Func) Func
}

// Chain composes middleware, outermost first: Chain(a, b)(fn) is a(b(fn)). Nil middleware is skipped, and
// Chain()(fn) is fn. If a function is called often, wrap the function once and keep the result.
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

// Do runs fn under mw and returns fn's result, or the zero T and an error. If mw is nil, fn runs without a
// policy. If mw turns an error into success, as [Fallback] may, Do returns the zero T and nil. For a function
// that returns only an error, call mw(fn)(ctx) or the Do method of a policy.
//
// mw must call the Func that it wraps on the caller's goroutine, as every Policy does.
//
// A policy with a time limit cancels the ctx of fn when fn returns. fn must therefore return a finished
// value. For example, if fn returns a [net/http.Response] from http.Client.Do, the body of the response is
// cut off after Do has returned. Read the body in fn, or put the policies into a resiliencehttp.Transport: in
// a Transport, the time limit also covers the reading of the body.
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
