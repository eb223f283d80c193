package resilience

import (
	"context"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
)

// A Result is what the end of a call says about the dependency.
type Result int

// What a call can end with.
const (
	// ResultSuccess is the end of a call whose error is nil.
	ResultSuccess Result = iota
	// ResultFailure is a failure of the dependency, or one that cannot be told from it.
	ResultFailure
	// ResultAnswer is an error by which a dependency that works said no: see [Answered].
	ResultAnswer
	// ResultRefusal is the end of a call that a policy did not make: see [Refused].
	ResultRefusal
	// ResultIgnored is the end of a call whose ctx has ended: it says nothing, since the
	// error may be no more than that. [EndOf] tells a deadline from a cancel.
	ResultIgnored
)

// String returns "success", "failure", "answer", "refusal" or "ignored".
func (r Result) String() string {
	return [...]string{"success", "failure", "answer", "refusal", "ignored"}[r]
}

// ResultOf returns what err says of a call that was made under ctx. It reads err as all
// policies do: see the table of this package. [RetryAfter], [Retryable] and [Throttled] read
// the rest.
func ResultOf(ctx context.Context, err error) Result {
	switch behavior.ReadUnder(ctx, err).Kind {
	case behavior.Done:
		return ResultSuccess
	case behavior.Answered:
		return ResultAnswer
	case behavior.Refused:
		return ResultRefusal
	case behavior.Canceled, behavior.Overran:
		return ResultIgnored
	}
	return ResultFailure
}

// IsTimeout reports whether err is a timeout: [context.DeadlineExceeded], or an error with a
// method Timeout() bool that returns true. Of an error and what it wraps, the outermost that
// has the method decides; of joined errors, one timeout is enough.
func IsTimeout(err error) bool { return behavior.IsTimeout(err) }

// EndOf returns why ctx ended, or nil while it lives. [errors.Is] finds both ctx.Err() and
// context.Cause(ctx) in it. A policy returns it instead of a call for a ctx that has ended:
// ctx.Err() alone would lose the cause.
func EndOf(ctx context.Context) error { return ended.Error(ctx) }

// A Work is what policies are run for, where it may go on after their functions have returned:
// the body of an HTTP response is read after RoundTrip, and a stream of gRPC goes on after it
// was opened. A policy that holds something for a call, such as a slot, holds it until the
// end of the work, and one that counts results learns of a break. It is safe for concurrent
// use.
//
// The code that begins such work makes it with [BeginWork], and calls End when the work has
// really ended, or when the policies have returned and there is none. If they shall hold what
// they hold until then, its innermost function calls GoOn before it returns nil:
//
//	ctx, work := resilience.BeginWork(ctx)
//	err := policies(func(ctx context.Context) error {
//		stream, err = open(ctx)
//		if err == nil {
//			work.GoOn()
//			stream.onEnd = work.End
//		}
//		return err
//	})(ctx)
//	if err != nil {
//		work.End(nil)
//	}
//
// A policy of your own holds something with [AtEnd], or asks [WorkOf] for OnEnd.
type Work linger.Work

// BeginWork returns ctx with new work.
func BeginWork(ctx context.Context) (context.Context, *Work) {
	ctx, w := linger.Begin(ctx)
	return ctx, (*Work)(w)
}

// WorkOf returns the work that a function called under ctx belongs to. It returns nil if there
// is none, or if its innermost function has returned: a fallback that runs after that makes a
// call of its own.
func WorkOf(ctx context.Context) *Work { return (*Work)(linger.Of(ctx)) }

// GoOn has policies hold what they hold until the work ends. Without it they give it back when
// their functions return, and only hear of the end: a stream that lives for days would hold a
// slot as long.
func (w *Work) GoOn() { (*linger.Work)(w).GoOn() }

// End ends the work. err is nil if it ended well, says how it broke off, or wraps
// [context.Canceled] if the caller has left, which says nothing of the dependency. End calls what
// waits for the end, in the order in which the policies returned; a second call does nothing.
func (w *Work) End(err error) { (*linger.Work)(w).End(err) }

// OnEnd has f called once when the work ends, with the error of its end, and reports whether
// it does. It does not if w is nil or has ended. A policy calls it after the function that it
// wraps has returned nil. f must be safe to call on another goroutine.
func (w *Work) OnEnd(f func(error)) bool { return (*linger.Work)(w).OnEnd(f) }
