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
// Each pattern is a package of its own and may be used without this one: retry, breaker,
// bulkhead, throttle, cacheaside, saga, lease and hedge. Package resiliencehttp has HTTP clients
// and servers, registry shows and changes the policies of a program, and faults makes
// failures to test with. The patterns import neither each other nor this package. They
// compose because [Func] and [Middleware] are aliases of unnamed types.
//
// Every [Policy], and every Middleware of this package, promises:
//
//   - It runs fn on the caller's goroutine and never after Do has returned.
//   - It does not call fn for a context that has already ended.
//   - A panic in fn passes through unchanged, and so does runtime.Goexit; the policy gives
//     back every permit, slot and count.
//   - It never loses the error of fn: errors.Is finds both that error and the reason for
//     giving up.
//   - It is safe for concurrent use, and meant to be built once and shared.
//
// A Hedger, a Cache and a saga's Runner call functions on goroutines of their own too. They
// turn a panic there into an error that has its stack, by a method Stack() []byte.
//
// # What errors say
//
// All policies read an error in the same way, by what it says about the dependency. An
// error says it by methods, at any depth of its chain:
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
// The first row that applies decides. A retrier does not wait for the RetryAfter of a failure
// or an answer whose Retryable() is false. Of an error and the errors that it wraps, the
// outermost that has the method decides. Of joined errors the first that says anything
// decides, without refusals beside a call that was made: these are refused only if all are.
//
// [Refused], [Answered], [Retryable], [RetryAfter], [Throttled] and [Answer] read and mark
// errors in this way for policies of your own, and [AtEnd] holds a slot until a response
// has been read. docs/protocol.md has a row for each way in which a call can end.
//
// The patterns are those of the Cloud Design Patterns catalog
// (https://learn.microsoft.com/azure/architecture/patterns/).
package resilience

import (
	"context"
	"slices"

	"github.com/go-resilience/resilience/internal/ended"
)

// Func is the unit of work that every pattern wraps.
//
// Func and [Middleware] are aliases of unnamed types, so that a method value such as
// retrier.Wrap is a Middleware without a conversion.
type Func = func(context.Context) error

// Middleware returns a Func that runs next under a policy.
type Middleware = func(next Func) Func

// Policy is the interface of a Retrier, a Breaker, a Bulkhead, a Limiter and a
// throttle/adaptive.
type Policy interface {
	// Do runs fn under the policy, on the caller's goroutine.
	Do(ctx context.Context, fn Func) error
	// Wrap returns a Func that runs next under the policy: a Middleware.
	Wrap(next Func) Func
}

// Chain composes middleware. The first is the outermost: Chain(a, b)(fn) is a(b(fn)). A
// nil Middleware is left out; Chain()(fn) is fn.
//
// Each application of the result wraps its argument anew. To save that work for a function
// that is called often, wrap it once and keep the result. Chain keeps a copy of mw.
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

// Value runs fn under mw and returns its result; on error, the zero T. A nil mw runs fn as
// it is. Value does not call fn with a ctx that has already ended.
//
// mw must call the Func that it wraps on the caller's goroutine and before it returns, as
// every [Policy] does; otherwise Value has a race. If mw turns an error into
// success, as [Fallback] may, Value returns the zero T and a nil error.
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
