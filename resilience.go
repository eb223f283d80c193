// Package resilience combines policies, such as retries, circuit breakers and timeouts, around any
// func(context.Context) error.
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
// The packages of the patterns import neither each other nor this package.
//
// Every [Policy] of this module, and every [Middleware] of this package, guarantees:
//
//   - The policy runs the caller's function, fn, on the caller's goroutine, and never after the policy has
//     returned. The policy does not run fn if the ctx of the call is already done.
//   - A panic or a [runtime.Goexit] in fn passes through to the caller. Before that, the policy releases the call's
//     permit or slot, and stops counting the call as in flight.
//   - If the policy stops retrying or waiting after fn has failed, the policy returns an error that matches
//     fn's error. The policy's error also matches the reason for stopping, such as the error of ctx.
//   - The policy is safe for concurrent use. Create a policy once and share it.
//
// # Errors
//
// Policies communicate through the errors that calls return. A policy classifies an error by optional methods
// of the error:
//
//   - Refused() bool: true means that a policy did not start the call.
//   - Answered() bool: true means that the dependency works and that the error is its answer.
//   - Retryable() bool: false means that another attempt cannot help.
//   - RetryAfter() time.Duration: another attempt cannot help before this time has elapsed.
//   - Throttled() bool: true means that the dependency rejected the call because it is overloaded.
//
// The methods may belong to the error itself or to any error that it wraps. If an error and an error inside it
// both have the same method, the outer error's method decides. If [errors.Join] has joined several errors, the
// first error that has any of these methods decides. There are two exceptions. Joined errors are refused only
// if all of them are refused; otherwise, the refused errors among them are ignored. The RetryAfter of joined
// errors is the longest RetryAfter of those that are not ignored. docs/protocol.md shows how each policy treats
// each error.
//
// Policies also support the errors of github.com/cenkalti/backoff: an error that Permanent of v4, v5 or v6 has
// wrapped is not retryable, and a RetryAfterError of v5 or v6 has a RetryAfter.
//
// # Panics
//
// hedge.Hedger, cacheaside.Cache and saga.Runner also call functions on goroutines that they start. If a
// goroutine that a package has started panics, the package recovers the panic and converts it to an error, whose
// method Stack() []byte returns the stack trace of the panic.
//
// # Configuration
//
// These rules hold in every package:
//
//   - If a field is zero, the default from the field's documentation applies. A field without a default is
//     documented as required.
//   - A negative value is an error, except for the constants Unlimited (no limit) and None (nothing at all).
//     Each package defines only the constants that its fields accept. Structs that no New checks, such as
//     resiliencehttp.Transport and resiliencegrpc.Client, document what a negative value means.
//   - New panics if its Config is invalid. If a Config comes from outside the program, call Validate first.
//   - A policy's Update method takes a function that modifies the current configuration. Defaults are already
//     filled in when the function is called, so c.Queue += 10 works. If a field was never set and the function
//     does not modify it, the field still has its default. If the default depends on other fields, the default
//     changes with them.
package resilience

import (
	"context"
	"slices"

	"github.com/go-resilience/resilience/internal/ended"
)

// Unlimited means that there is no limit. Only fields whose documentation mentions Unlimited accept it.
const Unlimited = -1

// Func is the function that a policy runs, usually one call to a dependency. Func and [Middleware] are type
// aliases, so a method value such as retrier.Wrap is a Middleware without a conversion.
type Func = func(context.Context) error

// A Middleware adds a policy to a [Func]: it returns a Func that runs the original Func under the policy.
type Middleware = func(next Func) Func

// Policy is implemented by retry.Retrier, breaker.Breaker, bulkhead.Bulkhead, throttle.Limiter,
// throttle.Limits, fleet.Limits, Bulkhead of package bulkhead/adaptive, and Throttle of package
// throttle/adaptive.
type Policy interface {
	// Do runs fn under the policy. Do returns fn's error or an error of the policy.
	Do(ctx context.Context, fn Func) error
	// Wrap returns a Func that calls Do(ctx, next). Wrap is a [Middleware].
	Wrap(next Func) Func
}

// Chain composes middleware, outermost first: Chain(a, b)(fn) is a(b(fn)). Nil middleware is skipped, and
// Chain()(fn) is fn. If a function is called often, wrap the function once and reuse the resulting Func.
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
// mw must run fn on the caller's goroutine, as every Policy does.
//
// A policy with a time limit cancels fn's ctx when fn returns. fn must therefore return a value that no
// longer needs the ctx. For example, if fn returns a [net/http.Response] from http.Client.Do, the policy
// cuts off the body of the response. Read the body in fn, or put the policies into a
// resiliencehttp.Transport, where the time limit also covers the reading of the body.
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
