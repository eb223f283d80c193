package retry

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/go-resilience/resilience/internal/behavior"
)

var (
	// ErrExhausted is the reason of an [Error] when one of the retrier's own
	// limits ended the retrying: Attempts, MaxElapsed, MaxRetryAfter, or a
	// Backoff or Delay that ended it.
	ErrExhausted = errors.New("retry: no attempts left")

	// ErrBudget is the reason of an [Error] when a shared [Budget] refused the
	// next attempt.
	ErrBudget = errors.New("retry: budget exhausted")
)

// An Error reports that a [Retrier] gave up on an error that was worth another
// attempt. [errors.Is] and [errors.As] find in it the last error, the last failure
// (if refusals followed it) and the Reason.
type Error struct {
	Name string
	// Attempts is how many attempts there were. It counts those that were refused,
	// but not a refusal that is the Reason.
	Attempts int
	// Retrying is the time since the first attempt failed.
	Retrying time.Duration
	// Reason is why no other attempt was made. By errors.Is it is ErrExhausted;
	// ErrBudget; context.DeadlineExceeded, if a wait could not have ended before
	// the deadline of ctx; why ctx ended, its cause included; or the refusal, such
	// as an open breaker's, that ended the retrying.
	Reason error
	// Errs are the errors of the last attempts, oldest first: at most
	// Config.History of them, at least one.
	Errs []error

	kind    behavior.Kind // what all the attempts say together
	earlier error         // the last that says so, unless that is the last of Errs
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
		fmt.Fprintf(&b, " and %v of retrying", e.Retrying.Round(time.Millisecond))
	}
	var reason string
	if e.Reason != nil {
		reason = e.Reason.Error()
		b.WriteString(": ")
		b.WriteString(strings.TrimPrefix(reason, "retry: "))
	}
	// A call that ended with its ctx often returns the reason itself.
	if last := e.last(); last != nil && last.Error() != reason {
		b.WriteString(": ")
		b.WriteString(last.Error())
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

// Unwrap returns the last error, the last failure if that is another one, and the
// Reason.
func (e *Error) Unwrap() []error {
	return slices.DeleteFunc([]error{e.last(), e.earlier, e.Reason}, func(err error) bool { return err == nil })
}

// Refused reports whether no attempt was made at all: a policy further in refused
// every one.
func (e *Error) Refused() bool { return e.kind == behavior.Refused }

// Answered reports whether the attempts that were made were answered by a dependency
// that works, such as one that asks its caller to slow down: there was at least one,
// and none failed.
func (e *Error) Answered() bool { return e.kind == behavior.Answered }

// Retryable reports whether another call may help, as the last error and the last
// failure say. The Reason has no say: what only an open breaker has refused is not
// retryable, though attempts were left for it.
func (e *Error) Retryable() bool {
	return behavior.Read(errors.Join(e.last(), e.earlier)).Retryable
}

// Timeout reports whether the last error or the Reason is a time-out, as
// [net.Error] has it. An http.Client asks the error of its transport for this.
func (e *Error) Timeout() bool { return behavior.IsTimeout(e.last()) || behavior.IsTimeout(e.Reason) }

func (e *Error) last() error {
	if len(e.Errs) == 0 {
		return nil
	}
	return e.Errs[len(e.Errs)-1]
}

var errNoBackOff = errors.New("retry: Config.Backoff returned nil")

// limit is an ErrExhausted that says which limit it was.
type limit string

func (l limit) Error() string        { return "retry: " + string(l) }
func (l limit) Is(target error) bool { return target == ErrExhausted }

// timeoutError is the cause of an attempt's ctx that AttemptTimeout ended, and wraps
// an error of that attempt which does not say that it is a time-out.
type timeoutError struct {
	name  string
	after time.Duration
	err   error
}

func (e *timeoutError) Error() string {
	text := fmt.Sprintf("%san attempt took longer than AttemptTimeout of %v", prefix(e.name), e.after)
	if e.err != nil {
		text += ": " + e.err.Error()
	}
	return text
}

func (e *timeoutError) Unwrap() error        { return e.err }
func (e *timeoutError) Is(target error) bool { return target == context.DeadlineExceeded }
func (e *timeoutError) Timeout() bool        { return true }

// Permanent marks err as one that another attempt cannot help. The mark counts
// wherever it is in the chain of an error, unless an error that wraps it has a method
// Retryable that returns true. Permanent(nil) is nil.
//
// If the mark is the outermost of an error, a Retrier takes it off and returns err
// itself, so that err == target still holds. Of nested retriers the outermost one
// does so.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{err}
}

type permanentError struct{ err error }

func (e *permanentError) Error() string   { return e.err.Error() }
func (e *permanentError) Unwrap() error   { return e.err }
func (e *permanentError) Retryable() bool { return false }

// isPermanent reports whether err, which says end, carries a mark of Permanent or of
// backoff.Permanent that decides.
func isPermanent(err error, end behavior.End) bool {
	if _, ok := errors.AsType[*backoff.PermanentError](err); ok {
		return true
	}
	if end.Retryable {
		return false
	}
	_, ok := errors.AsType[*permanentError](err)
	return ok
}

// unmarked returns err without the marks of Permanent that are outermost.
func unmarked(err error) error {
	for {
		switch e := err.(type) {
		case *permanentError:
			err = e.err
		case *backoff.PermanentError:
			if e.Err == nil {
				return err
			}
			err = e.Err
		default:
			return err
		}
	}
}

// Retryable reports whether another attempt may help. It is what a Retrier goes by
// if its Config has no If. It is false for nil, for an error marked by [Permanent] or
// by backoff.Permanent, for an error that has a method Retryable() bool which returns
// false, and for one that has a method Answered() bool which returns true, unless its
// Retryable returns true. Of an error and what it wraps, the outermost that has the
// method decides; of joined errors, one that is not retryable is enough.
//
// It is true for any other error, [context.DeadlineExceeded] and
// [context.Canceled] among them: a Retrier itself sees to the end of its
// caller's ctx, and what is left are time limits of single attempts.
func Retryable(err error) bool {
	end := behavior.Read(err)
	return end.Retryable && !isPermanent(err, end)
}

// saysEnd reports whether err already says that ctx has ended, and why.
func saysEnd(ctx context.Context, err error) bool {
	cause := context.Cause(ctx)
	return errors.Is(err, ctx.Err()) && reflect.ValueOf(cause).Comparable() && errors.Is(err, cause)
}
