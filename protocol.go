package resilience

import (
	"context"
	"strconv"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
)

// Answer marks err as a valid answer of the dependency, such as "card declined". Breakers count an answer as
// a success, and retriers do not retry the call. The returned error has the text of err and unwraps to err.
// Answer(nil) is nil.
func Answer(err error) error {
	if err == nil {
		return nil
	}
	return &answerError{err}
}

// An answerError is an error that Answer has marked.
type answerError struct{ err error }

func (e *answerError) Error() string  { return e.err.Error() }
func (e *answerError) Unwrap() error  { return e.err }
func (e *answerError) Answered() bool { return true }

// Answered reports whether err is an answer of a dependency that works. An answer has a method Answered()
// bool that returns true, and is not [Refused].
func Answered(err error) bool { return behavior.IsAnswered(err) }

// Refused reports whether a policy refused the call that returned err, which means that the call was not
// made. A refusal has a method Refused() bool that returns true. Joined errors are refused only if all of
// them are refused.
func Refused(err error) bool { return behavior.IsRefused(err) }

// Retryable reports whether another attempt may help. If err has a method Retryable() bool, that method
// decides. Otherwise Retryable returns true unless err is nil or [Answered].
//
// Retryable returns true for [context.Canceled] and [context.DeadlineExceeded]. These errors do not show
// which ctx has ended, the caller's or another.
func Retryable(err error) bool { return behavior.Read(err).Retryable }

// RetryAfter returns the time to wait before another attempt can help: the result of err's method
// RetryAfter() time.Duration. It returns 0 if err has no such method. Of joined errors, the longest time
// counts.
func RetryAfter(err error) time.Duration { return behavior.Read(err).RetryAfter }

// Throttled reports whether the dependency rejected the call because the dependency is overloaded. HTTP
// servers do this with the statuses 429 and 503. Throttled returns the result of err's method Throttled()
// bool.
func Throttled(err error) bool { return behavior.Read(err).Throttled }

// IsTimeout reports whether err is a timeout: it matches [context.DeadlineExceeded], or its method Timeout()
// bool returns true. If err and an error that it wraps both have the method, the outer error decides. Of
// joined errors, one timeout is enough.
func IsTimeout(err error) bool { return behavior.IsTimeout(err) }

// ContextErr returns nil if ctx has not ended. Otherwise it returns an error in which [errors.Is] finds both
// ctx.Err() and [context.Cause](ctx). If ctx has ended, a policy returns this error and does not make the
// call.
//
// If a policy derives a ctx for its function, as [Timeout] does, the derived ctx ends when the policy
// returns. A resource that the function has opened under the derived ctx, such as the body of a
// [net/http.Response], is then cut off with [context.Canceled]. Within a resiliencehttp.Transport, the body
// is not cut off.
func ContextErr(ctx context.Context) error { return ended.Error(ctx) }

// A Result is the class of a call's result. All policies classify results in the same way.
type Result int

const (
	ResultSuccess Result = iota // the error is nil
	ResultFailure               // any other error
	ResultAnswer                // see [Answered]
	ResultRefusal               // see [Refused]
	ResultIgnored               // ctx has ended; [ContextErr] distinguishes a deadline from a cancellation
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

// ResultOf classifies err as the result of a call that was made under ctx.
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
