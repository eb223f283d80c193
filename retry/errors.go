package retry

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

var (
	// Each is the Cause of an [Error] if no attempt followed because of
	ErrExhausted  = errors.New("retry: no attempts left") // Attempts, MaxRetryAfter, or a negative delay
	ErrOverBudget = errors.New("retry: over budget")      // a [Budget]
)

// An Error reports that a [Retrier] gave up on an error that was worth another attempt. It
// wraps Err, the last failure (if refusals followed it) and the Cause.
type Error struct {
	Name        string        // of the Retrier
	Attempts    int           // refused ones included, but for the Cause
	RetryingFor time.Duration // since the first attempt failed
	// Cause is why no other attempt was made: ErrExhausted; ErrOverBudget;
	// context.DeadlineExceeded, if a wait would have passed the deadline of ctx; the end of
	// ctx and its cause; or a refusal that ended the retrying, such as an open breaker's.
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
	all, n := [3]error{e.Err, e.earlier, e.Cause}, 0
	for _, err := range all {
		if err != nil {
			all[n] = err
			n++
		}
	}
	return all[:n]
}

// Refused reports whether policies further in refused every attempt.
func (e *Error) Refused() bool { return e.kind == behavior.Refused }

// Answered reports whether the dependency answered each attempt that was made.
func (e *Error) Answered() bool { return e.kind == behavior.Answered }

// Retryable reports whether another call may help, by the last error and the last failure.
func (e *Error) Retryable() bool { return e.says().Retryable }

// RetryAfter returns the time before which another call cannot help, or 0.
func (e *Error) RetryAfter() time.Duration { return e.says().RetryAfter }

func (e *Error) says() behavior.End { return behavior.Read(errors.Join(e.Err, e.earlier)) }

// Timeout reports whether the last error or the Cause is a timeout.
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
	kind := reflect.TypeOf(cause).Kind() // to compare a struct or an array panics, if it holds a slice
	return errors.Is(err, ctx.Err()) && (cause == ctx.Err() ||
		kind != reflect.Struct && kind != reflect.Array && errors.Is(err, cause))
}
