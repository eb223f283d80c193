package resilience

import (
	"context"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
)

// A Result is what the end of a call says about the dependency.
type Result int

const (
	ResultSuccess Result = iota // nil
	ResultFailure               // any other error
	ResultAnswer                // see [Answered]
	ResultRefusal               // see [Refused]
	ResultIgnored               // the ctx has ended; [EndOf] tells a deadline from a cancel
)

// String returns "success", "failure", "answer", "refusal" or "ignored".
func (r Result) String() string {
	return [...]string{"success", "failure", "answer", "refusal", "ignored"}[r]
}

// ResultOf returns what err says of a call that was made under ctx, as all policies read it.
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

// IsTimeout reports whether err is [context.DeadlineExceeded], or a method Timeout() bool returns true.
// Of joined errors, one timeout is enough.
func IsTimeout(err error) bool { return behavior.IsTimeout(err) }

// EndOf returns why ctx has ended, or nil: [errors.Is] finds both ctx.Err() and context.Cause(ctx) in
// it. A policy returns it in place of a call.
func EndOf(ctx context.Context) error { return ended.Error(ctx) }

// A Work may go on after the functions of the policies have returned, as the body of an HTTP
// response is read after RoundTrip. A policy holds a slot until its end, and counts a break. It is
// safe for concurrent use.
//
// The code that begins such work makes it with [BeginWork], and calls End when it has really ended,
// or when the policies have returned and there is none:
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
// A policy holds something with [AtEnd], or asks [WorkOf] for OnEnd.
type Work linger.Work

// BeginWork returns ctx with new work.
func BeginWork(ctx context.Context) (context.Context, *Work) {
	ctx, w := linger.Begin(ctx)
	return ctx, (*Work)(w)
}

// WorkOf returns the work that a function called under ctx belongs to. It returns nil if there is
// none, or if its innermost function has returned.
func WorkOf(ctx context.Context) *Work { return (*Work)(linger.WorkOf(ctx)) }

// GoOn is called by the innermost function before it returns nil, if policies are to hold slots and
// timeouts until the work ends. Without it they only hear of the end.
func (w *Work) GoOn() { (*linger.Work)(w).GoOn() }

// End ends the work. err is nil if it ended well, says how it broke off, or wraps [context.Canceled]
// if the caller has left. A second call does nothing.
func (w *Work) End(err error) { (*linger.Work)(w).End(err) }

// OnEnd has f called once, on any goroutine, when the work ends, with the error of its end. It reports
// false if w is nil or has ended. A policy calls it after its function has returned nil.
func (w *Work) OnEnd(f func(error)) bool { return (*linger.Work)(w).OnEnd(f) }
