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
	// ErrExhausted is the Cause of an [Error] if a limit of the Retrier ended the
	// retrying: Attempts, MaxRetryAfter, or a negative delay of Backoff or Delay.
	ErrExhausted = errors.New("retry: no attempts left")

	// ErrOverBudget is the Cause of an [Error] if a [Budget] did not allow the next
	// attempt.
	ErrOverBudget = errors.New("retry: over budget")
)

// An Error reports that a [Retrier] gave up on an error that was worth another attempt.
// [errors.Is] and [errors.As] find Err in it, the last failure (if refusals followed it) and
// the Cause.
type Error struct {
	// Name is the name of the Retrier.
	Name string
	// Attempts is how many attempts there were. Refused attempts count, but a refusal
	// that is the Cause does not.
	Attempts int
	// RetryingFor is the time since the first attempt failed.
	RetryingFor time.Duration
	// Cause is why no other attempt was made. To errors.Is it is one of these:
	// ErrExhausted; ErrOverBudget; context.DeadlineExceeded, if a wait could not have ended
	// before the deadline of ctx; the end of ctx and its cause; or the refusal, such as
	// that of an open breaker, that ended the retrying.
	Cause error
	// Err is the error of the last attempt.
	Err error

	kind    behavior.Kind // of all attempts together
	earlier error         // the last error of that kind, unless that is Err
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(prefix(e.Name))
	attempts := "attempts"
	if e.Attempts == 1 {
		attempts = "attempt"
	}
	fmt.Fprintf(&b, "gave up after %d %s", e.Attempts, attempts)
	if e.Attempts > 1 {
		fmt.Fprintf(&b, " and %v of retrying", e.RetryingFor.Round(time.Millisecond))
	}
	var cause string
	if e.Cause != nil {
		cause = e.Cause.Error()
		b.WriteString(": " + strings.TrimPrefix(cause, "retry: "))
	}
	// A call that ended with its ctx often returns the cause itself.
	if e.Err != nil && e.Err.Error() != cause {
		b.WriteString(": " + e.Err.Error())
	}
	if e.earlier != nil {
		fmt.Fprintf(&b, " (earlier: %v)", e.earlier)
	}
	return b.String()
}

func prefix(name string) string {
	if name == "" {
		return "retry: "
	}
	return "retry: " + name + ": "
}

// Unwrap returns Err, the last failure if that is another one, and the Cause.
func (e *Error) Unwrap() []error {
	return slices.DeleteFunc([]error{e.Err, e.earlier, e.Cause}, func(err error) bool { return err == nil })
}

// Refused reports whether no attempt was made: a policy further in refused every one.
func (e *Error) Refused() bool { return e.kind == behavior.Refused }

// Answered reports whether the dependency answered every attempt that was made, and that
// there was at least one. An example is a server that asks its client to slow down.
func (e *Error) Answered() bool { return e.kind == behavior.Answered }

// Retryable reports whether another call may help, by the last error and the last
// failure. The Cause does not count: a call that only an open breaker refused is not
// retryable, although the attempts were not used up.
func (e *Error) Retryable() bool {
	return behavior.Read(errors.Join(e.Err, e.earlier)).Retryable
}

// RetryAfter returns the time before which another call cannot help, or 0, by the last error and
// the last failure.
func (e *Error) RetryAfter() time.Duration {
	return behavior.Read(errors.Join(e.Err, e.earlier)).RetryAfter
}

// Timeout reports whether the last error or the Cause is a timeout. With it, an
// http.Client whose transport returns the Error reports a timeout too.
func (e *Error) Timeout() bool { return behavior.IsTimeout(e.Err) || behavior.IsTimeout(e.Cause) }

// A limit is an ErrExhausted that names the limit.
type limit string

func (l limit) Error() string        { return "retry: " + string(l) }
func (l limit) Is(target error) bool { return target == ErrExhausted }

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
	return errors.Is(err, ctx.Err()) && reflect.ValueOf(cause).Comparable() && errors.Is(err, cause)
}
