package retry

import (
	"errors"

	"github.com/cenkalti/backoff/v4"

	"github.com/go-resilience/resilience/internal/behavior"
)

// Permanent marks err as an error that another attempt cannot help. The mark counts at any
// depth of an error's chain, unless an error that wraps it has a method Retryable that
// returns true. Permanent(nil) is nil.
//
// If the mark is the outermost error of the chain, a Retrier removes it and returns err
// itself, so that err == target still holds. Of nested retriers, the outermost does so.
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

// isPermanent reports whether a mark of Permanent or of backoff.Permanent decides about
// err, which reads as end.
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

// unmarked returns err without its outermost marks.
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

// Retryable reports whether another attempt may help. A Retrier whose Config has no If
// asks it. It is false for nil, for an error marked by [Permanent] or by
// backoff.Permanent, for an error whose method Retryable() bool returns false, and for an
// error whose method Answered() bool returns true, unless its Retryable returns true. Of
// an error and the errors that it wraps, the outermost that has the method decides. Of
// joined errors, one that is not retryable is enough. Refused ones do not count, unless all
// are refused; then it takes all of them.
//
// It is true for any other error, including [context.DeadlineExceeded] and
// [context.Canceled]: a Retrier checks its caller's ctx itself, and other contexts belong
// to single attempts.
func Retryable(err error) bool {
	end := behavior.Read(err)
	return end.Retryable && !isPermanent(err, end)
}
