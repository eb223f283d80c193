package retry

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

// ErrExhausted is matched by the Cause of an [Error] if all Attempts were used, if the next delay was negative, or if
// the RetryAfter of an error was longer than MaxRetryAfter.
var ErrExhausted = errors.New("retry: no attempts left")

// ErrOverBudget is the Cause of an [Error] if the [Budget] did not allow another retry.
var ErrOverBudget = errors.New("retry: over budget")

// These causes contain no durations, because the text of an Error must be the same each time.
var (
	errLongRetryAfter = fmt.Errorf("%w: RetryAfter is longer than MaxRetryAfter", ErrExhausted)
	errNoTimeLeft     = fmt.Errorf("wait would pass the deadline: %w", context.DeadlineExceeded)
)

// An Error reports that a [Retrier] stopped retrying. An Error wraps its fields Err and Cause. If the last attempts
// were refused but an earlier attempt failed, the Error also wraps the error of that failure. The text of an Error
// contains no durations, so equal failures have equal texts.
type Error struct {
	Name        string        // the Retrier's name
	Attempts    int           // the number of attempts; the last one is not counted if its refusal is the Cause
	RetryingFor time.Duration // the time since the first attempt failed
	// Cause is the reason why no attempt followed:
	//
	//   - If a limit was reached, Cause matches ErrExhausted or ErrOverBudget.
	//   - If a wait would have passed the deadline of ctx, Cause matches context.DeadlineExceeded.
	//   - If ctx is done, Cause is the error of ctx.
	//   - If a policy, such as an open breaker, refused an attempt and so ended the retries, Cause is the policy's
	//     error.
	Cause error
	Err   error // the error of the last attempt

	kind    behavior.Kind // see call.kind
	earlier error         // the last error of an attempt of this kind; nil if that is Err
}

// Error returns a text with the Retrier's name, the number of attempts, Cause and Err. The text omits Cause if Cause
// is ErrExhausted itself.
func (e *Error) Error() string {
	text := prefix(e.Name) + "gave up after "
	if e.Attempts == 1 {
		text += "1 attempt"
	} else {
		text += fmt.Sprintf("%d attempts", e.Attempts)
	}
	last := ": "
	var cause string
	if e.Cause != nil && e.Cause != ErrExhausted { // ErrExhausted adds nothing to the number of attempts
		cause = e.Cause.Error()
		text += ": " + strings.TrimPrefix(strings.TrimPrefix(cause, ErrExhausted.Error()+": "), "retry: ")
		last = "; last error: " // shows that the text that follows is not part of Cause
	}
	if e.Err != nil && e.Err.Error() != cause { // after ctx is done, Err and Cause are often the same error
		text += last + e.Err.Error()
	}
	if e.earlier != nil {
		text += fmt.Sprintf(" (earlier: %v)", e.earlier)
	}
	return text
}

func prefix(name string) string {
	if name == "" {
		return "retry: "
	}
	return "retry: " + name + ": "
}

// Unwrap returns the non-nil errors among Err, Cause and the error of the earlier failure.
func (e *Error) Unwrap() []error {
	return slices.DeleteFunc([]error{e.Err, e.earlier, e.Cause}, func(err error) bool { return err == nil })
}

// Refused reports whether every attempt was refused.
func (e *Error) Refused() bool { return e.kind == behavior.Refused }

// Answered reports whether the dependency answered every attempt that was not refused. If every attempt was refused,
// Answered returns false.
func (e *Error) Answered() bool { return e.kind == behavior.Answered }

// Retryable reports whether an outer retrier may retry the call.
func (e *Error) Retryable() bool { return e.outcome().Retryable }

// RetryAfter returns the time to wait before another call. It is the RetryAfter of Err joined with the error of the
// earlier failure, or 0 if they have none. The RetryAfter of Cause does not count.
func (e *Error) RetryAfter() time.Duration { return e.outcome().RetryAfter }

func (e *Error) outcome() behavior.End { return behavior.Read(errors.Join(e.Err, e.earlier)) }

// Timeout reports whether Err or Cause is a timeout.
func (e *Error) Timeout() bool { return behavior.IsTimeout(e.Err) || behavior.IsTimeout(e.Cause) }

// An attemptTimeoutCause is the cancellation cause of an attempt's ctx if the attempt exceeded AttemptTimeout.
type attemptTimeoutCause Config

func (c *attemptTimeoutCause) Error() string {
	return fmt.Sprintf("%sattempt took longer than AttemptTimeout of %v", prefix(c.Name), c.AttemptTimeout)
}

func (c *attemptTimeoutCause) Is(target error) bool { return target == context.DeadlineExceeded }
func (c *attemptTimeoutCause) Timeout() bool        { return true }

// A timeoutError wraps the error of an attempt that exceeded AttemptTimeout. It is used if the attempt's error
// is retryable and does not itself match context.DeadlineExceeded.
type timeoutError struct {
	*attemptTimeoutCause
	err error
}

func (e *timeoutError) Error() string { return e.attemptTimeoutCause.Error() + ": " + e.err.Error() }
func (e *timeoutError) Unwrap() error { return e.err }

// reportsContextEnd reports whether err already matches ctx.Err() and the cause of ctx.
func reportsContextEnd(ctx context.Context, err error) bool {
	cause := context.Cause(ctx)
	canCompare := reflect.ValueOf(cause).Comparable() // errors.Is panics for a struct that holds a slice
	return errors.Is(err, ctx.Err()) && canCompare && errors.Is(err, cause)
}
