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

var (
	// Each is the Cause of an [Error] if no attempt followed because of
	ErrExhausted  = errors.New("retry: no attempts left") // Attempts, MaxRetryAfter, or a negative delay
	ErrOverBudget = errors.New("retry: over budget")      // a [Budget]
)

// An Error reports that a [Retrier] gave up. It wraps Err, the last failure if refusals followed it,
// and Cause.
type Error struct {
	Name        string
	Attempts    int // refused ones included, but for the Cause
	RetryingFor time.Duration
	// Cause is ErrExhausted; ErrOverBudget; context.DeadlineExceeded, if a wait would have passed
	// the deadline; the end of ctx; or a refusal that ended the retrying, as an open breaker's.
	Cause error
	Err   error // of the last attempt

	kind    behavior.Kind // of all attempts together
	earlier error         // the last error of that kind, unless that is Err
}

func (e *Error) Error() string {
	text := prefix(e.Name) + "gave up after "
	if e.Attempts == 1 {
		text += "1 attempt"
	} else {
		text += fmt.Sprintf("%d attempts and %v of retrying", e.Attempts, e.RetryingFor.Round(time.Millisecond))
	}
	var cause string
	if e.Cause != nil {
		cause = e.Cause.Error()
		text += ": " + strings.TrimPrefix(cause, "retry: ")
	}
	if e.Err != nil && e.Err.Error() != cause { // a call that ended with its ctx often returns the cause itself
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

func (e *Error) Unwrap() []error {
	return slices.DeleteFunc([]error{e.Err, e.earlier, e.Cause}, func(err error) bool { return err == nil })
}

// Refused reports whether every attempt was refused.
func (e *Error) Refused() bool { return e.kind == behavior.Refused }

// Answered reports whether the dependency answered each attempt that was made.
func (e *Error) Answered() bool { return e.kind == behavior.Answered }

func (e *Error) Retryable() bool { return e.says().Retryable }

func (e *Error) RetryAfter() time.Duration { return e.says().RetryAfter }

func (e *Error) says() behavior.End { return behavior.Read(errors.Join(e.Err, e.earlier)) }

func (e *Error) Timeout() bool { return behavior.IsTimeout(e.Err) || behavior.IsTimeout(e.Cause) }

// An overtime is the cause of an attempt's ctx that the AttemptTimeout of a Config ended.
type overtime Config

func (c *overtime) Error() string {
	return fmt.Sprintf("%san attempt took longer than AttemptTimeout of %v", prefix(c.Name), c.AttemptTimeout)
}

func (c *overtime) Is(target error) bool { return target == context.DeadlineExceeded }
func (c *overtime) Timeout() bool        { return true }

// A timeoutError wraps an error of such an attempt that does not say that it is a timeout.
type timeoutError struct {
	*overtime
	err error
}

func (e *timeoutError) Error() string { return e.overtime.Error() + ": " + e.err.Error() }
func (e *timeoutError) Unwrap() error { return e.err }

// saysEnd reports whether err already says that ctx has ended, and why.
func saysEnd(ctx context.Context, err error) bool {
	cause := context.Cause(ctx)
	canCompare := reflect.ValueOf(cause).Comparable() // errors.Is panics for a struct that holds a slice
	return errors.Is(err, ctx.Err()) && canCompare && errors.Is(err, cause)
}
