package resilience

import (
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

// Refused reports whether a policy refused the call that returned err, which was not made: a method
// Refused() bool returns true. Joined errors are Refused if all of them are.
func Refused(err error) bool { return behavior.IsRefused(err) }

// Answered reports whether err is the answer of a dependency that works, such as "card declined": a
// method Answered() bool returns true, and err is not [Refused].
func Answered(err error) bool { return behavior.IsAnswered(err) }

// RetryAfter returns how long to wait before another attempt can help, or 0 if err does not say: the
// result of its method RetryAfter() time.Duration. Of joined errors the longest counts.
func RetryAfter(err error) time.Duration { return behavior.Read(err).RetryAfter }

// Retryable reports whether another attempt may help: what a method Retryable() bool returns, or
// else whether err is neither nil nor [Answered]. It is true for context.Canceled and
// context.DeadlineExceeded, which do not say whose ctx has ended. A Retrier checks its caller's.
func Retryable(err error) bool { return behavior.Read(err).Retryable }

// Throttled reports whether a dependency turned the call away because it has too much to do, as
// HTTP's 429 and 503 say: a method Throttled() bool returns true.
func Throttled(err error) bool { return behavior.Read(err).Throttled }

// Answer marks err as [Answered]. The result unwraps to err and has its text. Answer(nil) is nil.
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
