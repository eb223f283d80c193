package resilience

import (
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

// Refused reports whether the call that returned err was not made, because a policy of this
// module refused it: err, or an error that it wraps, has a method Refused() bool that
// returns true. Joined errors are Refused if all of them are.
func Refused(err error) bool { return behavior.IsRefused(err) }

// Answered reports whether err is the answer of a dependency that works, such as "not
// found" or "card declined", rather than a failure: err, or an error that it wraps, has a
// method Answered() bool that returns true, and err is not [Refused]. Of joined errors the
// first that says anything decides, without refused ones beside others.
func Answered(err error) bool { return behavior.IsAnswered(err) }

// RetryAfter returns the time before which another attempt cannot help, or 0. It calls the
// method RetryAfter() time.Duration of err, or of an error that it wraps. Of joined errors
// the first that says anything decides, as for [Answered].
func RetryAfter(err error) time.Duration { return behavior.Read(err).RetryAfter }

// Retryable reports whether another attempt may help. It is false for nil, for an error
// whose method Retryable() bool returns false, and for an error that is [Answered], unless
// its Retryable returns true. Of joined errors the first that says
// anything decides, as for [Answered].
//
// It is true for context.Canceled and context.DeadlineExceeded, which do not say whose ctx
// has ended. A Retrier checks its caller's.
func Retryable(err error) bool { return behavior.Read(err).Retryable }

// Throttled reports whether a dependency turned the call away because it has too much to
// do, as HTTP's 429 and 503 say: a method Throttled() bool of err, or of an error that it
// wraps, returns true. Package throttle/adaptive counts it as throttled. The adaptive limit of a
// bulkhead counts it as overload, unless it is [Answered], as HTTP's 429 is.
func Throttled(err error) bool { return behavior.Read(err).Throttled }

// Answer marks err as the answer of a dependency that works: see [Answered]. A breaker
// counts it as a success, a retrier returns it immediately, and an adaptive limit counts it
// as a normal call. The result unwraps to err and has its text. Answer(nil) is nil.
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
