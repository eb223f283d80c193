package retry

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v4"
)

var (
	// ErrExhausted is the reason of an [Error] when one of the retrier's own
	// limits ended the retrying: Attempts, MaxElapsed, MaxRetryAfter, or a
	// Backoff that has no more delays to give.
	ErrExhausted = errors.New("retry: no attempts left")

	// ErrBudget is the reason of an [Error] when a shared [Budget] refused the
	// next attempt.
	ErrBudget = errors.New("retry: budget exhausted")
)

// An Error reports that a [Retrier] gave up on an error that was worth another
// attempt. It unwraps to the last error and to the Reason, so that [errors.Is]
// and [errors.As] find both.
type Error struct {
	Name     string
	Attempts int           // how many were made
	Elapsed  time.Duration // see [Attempt]
	// Reason is why no other attempt was made. By errors.Is it is ErrExhausted,
	// ErrBudget, context.DeadlineExceeded if a wait could not have ended before
	// the deadline of ctx, or why ctx ended, its cause included.
	Reason error
	// Errs are the errors of the last attempts, oldest first: at most
	// Config.History of them, at least one.
	Errs []error

	refused bool
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(prefix(e.Name))
	attempts := "attempts"
	if e.Attempts == 1 {
		attempts = "attempt"
	}
	fmt.Fprintf(&b, "gave up after %d %s in %v", e.Attempts, attempts, e.Elapsed.Round(time.Millisecond))
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
	return b.String()
}

func prefix(name string) string {
	if name == "" {
		return "retry: "
	}
	return "retry: " + name + ": "
}

// Unwrap returns the last error and the Reason.
func (e *Error) Unwrap() []error { return []error{e.last(), e.Reason} }

// Refused reports whether no attempt was made at all: every one was refused by a
// policy further in, which says so by a method Refused() bool of its error.
func (e *Error) Refused() bool { return e.refused }

// Timeout reports whether the last error or the Reason is a time-out, as
// [net.Error] has it. An http.Client asks the error of its transport for this.
func (e *Error) Timeout() bool { return isTimeout(e.last()) || isTimeout(e.Reason) }

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

// Permanent marks err as one that another attempt cannot help. A Retrier
// returns err itself, without the mark, so that err == target still holds.
// Permanent(nil) is nil.
//
// The mark counts wherever it is in the chain of an error; it is taken off
// where it is the outermost.
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

// isPermanent reports whether err carries the mark of Permanent or of
// backoff.Permanent.
func isPermanent(err error) bool {
	if _, ok := errors.AsType[*permanentError](err); ok {
		return true
	}
	_, ok := errors.AsType[*backoff.PermanentError](err)
	return ok
}

// unmarked returns err without the mark of Permanent, if that is the outermost.
func unmarked(err error) error {
	switch e := err.(type) {
	case *permanentError:
		return e.err
	case *backoff.PermanentError:
		return e.Err
	}
	return err
}

// Retryable reports whether another attempt may help. It is what a Retrier asks
// if its Config has no If. It is false for nil, for an error marked by
// [Permanent] or by backoff.Permanent, and for an error that has a method
// Retryable() bool which returns false, as an open breaker's does. Of several in
// one chain, the first that [errors.As] finds decides.
//
// It is true for any other error, [context.DeadlineExceeded] and
// [context.Canceled] among them: a Retrier itself sees to the end of its
// caller's ctx, and what is left are time limits of single attempts.
func Retryable(err error) bool {
	if err == nil || isPermanent(err) {
		return false
	}
	e, ok := errors.AsType[retryable](err)
	return !ok || e.Retryable()
}

// retryable, refused, delayed and timeout are how errors of other packages speak to
// this one. They embed error because that is what errors.AsType looks for.
type retryable interface {
	error
	Retryable() bool
}

type refused interface {
	error
	Refused() bool
}

// isRefused reports whether err says that the work was not begun.
func isRefused(err error) bool {
	e, ok := errors.AsType[refused](err)
	return ok && e.Refused()
}

type timeout interface {
	error
	Timeout() bool
}

func isTimeout(err error) bool {
	if errors.Is(err, context.DeadlineExceeded) {
		return true // though another error in the chain may come first
	}
	e, ok := errors.AsType[timeout](err)
	return ok && e.Timeout()
}

type delayed interface {
	error
	RetryAfter() time.Duration
}

// retryAfter returns the least delay that err asks for, or 0.
func retryAfter(err error) time.Duration {
	e, ok := errors.AsType[delayed](err)
	if !ok {
		return 0
	}
	return max(0, e.RetryAfter())
}

// saysEnd reports whether err says already that ctx, which has ended, has.
func saysEnd(ctx context.Context, err error) bool {
	return errors.Is(err, ctx.Err()) && errors.Is(err, context.Cause(ctx))
}
