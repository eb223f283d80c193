package resilience

import (
	"context"
	"strconv"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
)

// Answer marks err as a valid answer of the dependency, such as "card declined": breakers count it as a
// success, and retriers do not retry it. The result has the text of err and unwraps to it. Answer(nil)
// is nil.
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

// Answered reports whether err is an answer of a dependency that works: its method Answered() bool returns
// true and err is not [Refused].
func Answered(err error) bool { return behavior.IsAnswered(err) }

// Refused reports whether a policy refused the call that returned err, so that the call was not made: its
// method Refused() bool returns true. Joined errors are refused only if all of them are.
func Refused(err error) bool { return behavior.IsRefused(err) }

// Retryable reports whether another attempt may help. It returns what the method Retryable() bool of err
// returns; without that method, it is true unless err is nil or [Answered].
//
// It is true for [context.Canceled] and [context.DeadlineExceeded], which do not say whose ctx has ended.
func Retryable(err error) bool { return behavior.Read(err).Retryable }

// RetryAfter returns how long to wait before another attempt can help, or 0 if err does not say: the
// result of its method RetryAfter() time.Duration. Of joined errors, the longest time counts.
func RetryAfter(err error) time.Duration { return behavior.Read(err).RetryAfter }

// Throttled reports whether the dependency turned the call away because it is overloaded, as HTTP 429 and
// 503 do: the method Throttled() bool of err returns true.
func Throttled(err error) bool { return behavior.Read(err).Throttled }

// IsTimeout reports whether err is, or joins, [context.DeadlineExceeded] or an error whose method
// Timeout() bool returns true.
func IsTimeout(err error) bool { return behavior.IsTimeout(err) }

// ContextErr returns an error in which [errors.Is] finds both ctx.Err() and [context.Cause](ctx), or nil if
// ctx has not ended. A policy returns it in place of making a call.
//
// A ctx that a policy has derived, as [Timeout] does, ends when the policy returns. What the function has
// opened under that ctx, such as the body of an [net/http.Response], is cut off then with
// [context.Canceled], unless it goes through a resiliencehttp.Transport.
func ContextErr(ctx context.Context) error { return ended.Error(ctx) }

// A Result classifies the end of a call, as all policies read it.
type Result int

const (
	ResultSuccess Result = iota // nil
	ResultFailure               // any other error
	ResultAnswer                // see [Answered]
	ResultRefusal               // see [Refused]
	ResultIgnored               // ctx has ended; [ContextErr] distinguishes a deadline from a cancel
)

// String returns "success", "failure", "answer", "refusal" or "ignored", and "Result(n)" for another n.
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
