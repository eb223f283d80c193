package resilience

import (
	"context"
	"strconv"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
)

// Answer marks err as a valid answer from the dependency, such as "card declined". Breakers count an answer
// as a success, and retriers do not retry the call, even if err is [Retryable]. The returned error has the
// text of err and wraps err. Answer(nil) is nil.
func Answer(err error) error {
	if err == nil {
		return nil
	}
	return &answerError{err}
}

// An answerError is an error that Answer has marked.
type answerError struct{ err error }

func (e *answerError) Error() string   { return e.err.Error() }
func (e *answerError) Unwrap() error   { return e.err }
func (e *answerError) Answered() bool  { return true }
func (e *answerError) Retryable() bool { return false }

// Answered reports whether err is an answer from a dependency that works. An answer is not [Refused], and its
// method Answered() bool returns true.
func Answered(err error) bool { return behavior.IsAnswered(err) }

// Refused reports whether a policy refused the call that returned err. A refused call was not made. The error
// of a refused call has a method Refused() bool that returns true. Joined errors are refused only if all of
// them are refused.
func Refused(err error) bool { return behavior.IsRefused(err) }

// Retryable reports whether another attempt may help. If err has a method Retryable() bool, that method
// decides. An err without a method Retryable is retryable unless it is nil, [Answered], or wrapped by the
// function Permanent of github.com/cenkalti/backoff.
//
// Retryable returns true for [context.Canceled] and [context.DeadlineExceeded]. An error of a ctx does not
// show whether the caller's ctx is done, or only the ctx of one attempt. If only the attempt's ctx is done,
// another attempt may help.
func Retryable(err error) bool { return behavior.Read(err).Retryable }

// RetryAfter returns the time to wait before another attempt can help. The time is the result of err's method
// RetryAfter() time.Duration, or the Duration of a RetryAfterError of github.com/cenkalti/backoff. RetryAfter
// returns 0 if err has neither, and if the time is negative. For joined errors, the result is the longest
// RetryAfter. If only some of the joined errors are [Refused], their RetryAfter does not count.
func RetryAfter(err error) time.Duration { return behavior.Read(err).RetryAfter }

// Throttled reports whether the dependency rejected the call because the dependency is overloaded. For
// example, HTTP servers respond with the statuses 429 and 503 when they are overloaded. Throttled returns the
// result of err's method Throttled() bool, or false if err has no such method.
func Throttled(err error) bool { return behavior.Read(err).Throttled }

// IsTimeout reports whether err is a timeout. An error that matches [context.DeadlineExceeded] is a timeout. For
// any other error, the method Timeout() bool decides: the method of err, or of the outermost error inside err
// that has the method. Joined errors are a timeout if any of them is a timeout.
func IsTimeout(err error) bool { return behavior.IsTimeout(err) }

// ContextErr returns nil if ctx is not done. Otherwise ContextErr returns an error that matches both
// ctx.Err() and [context.Cause](ctx). If ctx is done when a policy is called, the policy returns
// ContextErr(ctx) and does not start the call.
//
// A policy that derives a ctx for its function, such as [Timeout], cancels the derived ctx when the policy
// returns. The cancellation also cuts off a resource that the function has opened under the derived ctx, such
// as the body of a [net/http.Response]. The resource then fails with [context.Canceled]. In a
// resiliencehttp.Transport, the body can still be read after the policy has returned.
func ContextErr(ctx context.Context) error { return ended.Error(ctx) }

// A Result is the class of a call's result, such as success or failure. The policies of this module use the
// same classification. docs/protocol.md shows how each policy treats each class.
type Result int

const (
	ResultSuccess Result = iota // the error is nil
	ResultFailure               // an error that belongs to none of the classes below
	ResultAnswer                // see [Answered]
	ResultRefusal               // see [Refused]
	ResultIgnored               // the call failed, and its ctx is done or the deadline of its ctx has passed
)

// String returns "success", "failure", "answer", "refusal" or "ignored". For any other value n, it returns
// "Result(n)".
func (r Result) String() string {
	texts := [...]string{"success", "failure", "answer", "refusal", "ignored"}
	if r < 0 || int(r) >= len(texts) {
		return "Result(" + strconv.Itoa(int(r)) + ")"
	}
	return texts[r]
}

// ResultOf classifies err as the result of a call under ctx.
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
