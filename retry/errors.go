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

// ErrExhausted is the Cause of an [Error] if Attempts ran out, if the backoff ended, or if the RetryAfter of an
// error was longer than MaxRetryAfter.
var ErrExhausted = errors.New("retry: no attempts left")

// ErrOverBudget is the Cause of an [Error] if the [Budget] had no retry left.
var ErrOverBudget = errors.New("retry: over budget")

// These causes contain no durations, so that the text of an Error is the same each time.
var (
	errLongRetryAfter = fmt.Errorf("%w: RetryAfter is longer than MaxRetryAfter", ErrExhausted)
	errNoTimeLeft     = fmt.Errorf("wait would pass the deadline: %w", context.DeadlineExceeded)
)

// An Error reports that a [Retrier] stopped retrying. An Error wraps Err and Cause. If refusals followed the last
// failure, the Error also wraps the last failure. The text contains no durations, so equal failures have equal
// texts.
type Error struct {
	Name        string        // the Retrier's name
	Attempts    int           // the number of attempts, including refused attempts other than the Cause
	RetryingFor time.Duration // the time since the first attempt failed
	// Cause is the reason for the end of the retrying. If a limit was reached, Cause matches ErrExhausted or
	// ErrOverBudget. If a wait would have passed the deadline, Cause matches context.DeadlineExceeded. If ctx is
	// done, Cause is the error of ctx. If a refusal ended the retrying, such as the refusal of an open breaker,
	// Cause is the refusal.
	Cause error
	Err   error // the error of the last attempt

	kind    behavior.Kind // the kind of the call; see call.kind
	earlier error         // the last error of an attempt of this kind; nil if Err is this error
}

// Error returns the text: the Retrier's name, the number of attempts, Cause if it is more than ErrExhausted, and Err.
func (e *Error) Error() string {
	text := prefix(e.Name) + "gave up after "
	if e.Attempts == 1 {
		text += "1 attempt"
	} else {
		text += fmt.Sprintf("%d attempts", e.Attempts)
	}
	last := ": "
	var cause string
	if e.Cause != nil && e.Cause != ErrExhausted { // which the number of attempts implies
		cause = e.Cause.Error()
		text += ": " + strings.TrimPrefix(strings.TrimPrefix(cause, ErrExhausted.Error()+": "), "retry: ")
		last = "; last error: " // which is no part of Cause
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

// Unwrap returns Err, the earlier failure and Cause. It omits any of them that is nil.
func (e *Error) Unwrap() []error {
	return slices.DeleteFunc([]error{e.Err, e.earlier, e.Cause}, func(err error) bool { return err == nil })
}

// Refused reports whether every attempt was refused.
func (e *Error) Refused() bool { return e.kind == behavior.Refused }

// Answered reports whether the dependency answered every attempt that was not refused. It returns false if every
// attempt was refused.
func (e *Error) Answered() bool { return e.kind == behavior.Answered }

// Retryable reports whether an outer retrier may retry the call.
func (e *Error) Retryable() bool { return e.outcome().Retryable }

// RetryAfter returns the shortest wait before another call may succeed. It returns 0 if no wait is known.
func (e *Error) RetryAfter() time.Duration { return e.outcome().RetryAfter }

func (e *Error) outcome() behavior.End { return behavior.Read(errors.Join(e.Err, e.earlier)) }

// Timeout reports whether the call ran out of time.
func (e *Error) Timeout() bool { return behavior.IsTimeout(e.Err) || behavior.IsTimeout(e.Cause) }

// An attemptTimeoutCause is the cancellation cause of an attempt's ctx if the attempt exceeded AttemptTimeout.
type attemptTimeoutCause Config

func (c *attemptTimeoutCause) Error() string {
	return fmt.Sprintf("%sattempt took longer than AttemptTimeout of %v", prefix(c.Name), c.AttemptTimeout)
}

func (c *attemptTimeoutCause) Is(target error) bool { return target == context.DeadlineExceeded }
func (c *attemptTimeoutCause) Timeout() bool        { return true }

// A timeoutError wraps the error of an attempt that exceeded AttemptTimeout. It is used if the attempt's error
// is retryable and does not itself report a timeout.
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
