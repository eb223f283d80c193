package resilience

import (
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

// Refused reports whether err says that the call was not made: a policy of this
// module refused it. It does so if err, or an error that it wraps, has a method
// Refused() bool that returns true. Of joined errors, all must say so.
func Refused(err error) bool { return behavior.IsRefused(err) }

// Answered reports whether err is the answer of a dependency that worked, such as
// "not found" or "card declined", rather than a failure of it. It is one if err, or
// an error that it wraps, has a method Answered() bool that returns true, and is not
// [Refused]. Of joined errors one must be an answer, and none may have failed.
func Answered(err error) bool { return behavior.IsAnswered(err) }

// RetryAfter returns the time before which another attempt cannot help, or 0: what
// the method RetryAfter() time.Duration of err, or of an error that it wraps,
// returns. Of joined errors the longest counts.
func RetryAfter(err error) time.Duration { return behavior.Read(err).RetryAfter }

// Retryable reports whether another attempt may help. It is false for nil, for an
// error whose method Retryable() bool returns false, and for an error that is
// [Answered], unless its Retryable returns true. Of joined errors one that is not
// retryable is enough; those that are Refused do not matter, unless all are.
//
// It is true for context.Canceled and context.DeadlineExceeded, which do not say
// whose context has ended. A Retrier asks its caller's.
func Retryable(err error) bool { return behavior.Read(err).Retryable }

// Answer marks err as the answer of a dependency that worked: see [Answered]. A
// breaker counts it as a success, a retrier returns it at once, and an adaptive limit
// takes it for the normal course. The result unwraps to err and has its text.
// Answer(nil) is nil.
func Answer(err error) error {
	if err == nil {
		return nil
	}
	return &answerError{err}
}

type answerError struct{ err error }

func (e *answerError) Error() string  { return e.err.Error() }
func (e *answerError) Unwrap() error  { return e.err }
func (e *answerError) Answered() bool { return true }
