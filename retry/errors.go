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

// ErrExhausted is the Cause of an [Error] if Attempts ran out, the backoff ended, or an error asked for a
// longer wait than MaxRetryAfter.
var ErrExhausted = errors.New("retry: no attempts left")

// ErrOverBudget is the Cause of an [Error] if the [Budget] had no retry left.
var ErrOverBudget = errors.New("retry: over budget")

// Causes without durations, so that the text of an Error is the same each time.
var (
	errLongRetryAfter = fmt.Errorf("%w: RetryAfter is longer than MaxRetryAfter", ErrExhausted)
	errNoTimeLeft     = fmt.Errorf("wait would pass the deadline: %w", context.DeadlineExceeded)
)

// An Error reports that a [Retrier] gave up. It wraps Err and Cause. If refusals followed the last failure, it
// wraps that failure as well. Its text contains no durations: equal failures have equal texts.
type Error struct {
	Name        string        // of the Retrier
	Attempts    int           // including refused ones, except for the Cause
	RetryingFor time.Duration // since the first attempt failed
	// Cause is ErrExhausted, ErrOverBudget, context.DeadlineExceeded if a wait would have passed the
	// deadline, the end of ctx, or a refusal that ended the retrying, such as that of an open breaker.
	Cause error
	Err   error // of the last attempt

	kind    behavior.Kind // of all attempts together
	earlier error         // the last error of that kind, unless that is Err
}

// Error returns the text: the Retrier's name, the number of attempts, Cause and Err.
func (e *Error) Error() string {
	text := prefix(e.Name) + "gave up after "
	if e.Attempts == 1 {
		text += "1 attempt"
	} else {
		text += fmt.Sprintf("%d attempts", e.Attempts)
	}
	var cause string
	if e.Cause != nil {
		cause = e.Cause.Error()
		text += ": " + strings.TrimPrefix(cause, "retry: ")
	}
	if e.Err != nil && e.Err.Error() != cause { // the error of a call whose ctx is done is often the cause itself
		text += ": " + e.Err.Error()
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

// Unwrap returns Err, the earlier failure if there is one, and Cause.
func (e *Error) Unwrap() []error {
	return slices.DeleteFunc([]error{e.Err, e.earlier, e.Cause}, func(err error) bool { return err == nil })
}

// Refused reports whether every attempt was refused.
func (e *Error) Refused() bool { return e.kind == behavior.Refused }

// Answered reports whether the dependency answered every attempt that was made.
func (e *Error) Answered() bool { return e.kind == behavior.Answered }

// Retryable reports whether an outer retrier may try again.
func (e *Error) Retryable() bool { return e.outcome().Retryable }

// RetryAfter returns how long to wait before the next call can help, or 0.
func (e *Error) RetryAfter() time.Duration { return e.outcome().RetryAfter }

func (e *Error) outcome() behavior.End { return behavior.Read(errors.Join(e.Err, e.earlier)) }

// Timeout reports whether the call ran out of time.
func (e *Error) Timeout() bool { return behavior.IsTimeout(e.Err) || behavior.IsTimeout(e.Cause) }

// An attemptTimeoutCause is the cause of an attempt's ctx after the AttemptTimeout of a Config.
type attemptTimeoutCause Config

func (c *attemptTimeoutCause) Error() string {
	return fmt.Sprintf("%sattempt took longer than AttemptTimeout of %v", prefix(c.Name), c.AttemptTimeout)
}

func (c *attemptTimeoutCause) Is(target error) bool { return target == context.DeadlineExceeded }
func (c *attemptTimeoutCause) Timeout() bool        { return true }

// A timeoutError wraps the error of an attempt that ended after its AttemptTimeout, if that error does not
// report a timeout itself.
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
