package retry

import (
	"errors"

	"github.com/cenkalti/backoff/v4"
)

// Permanent marks err as an error that another attempt cannot help. The mark counts at any
// depth of an error's chain, unless an error that wraps it has a method Retryable that
// returns true. Permanent(nil) is nil.
//
// If the mark is the outermost error of the chain, a Retrier removes it and returns err
// itself, so that err == target still holds. Of nested retriers, the outermost does so.
// A Retrier knows the mark of cenkalti/backoff/v4 too.
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

// marked reports whether a mark is in the tree of err.
func marked(err error) bool {
	_, ours := errors.AsType[*permanentError](err)
	_, theirs := errors.AsType[*backoff.PermanentError](err)
	return ours || theirs
}

// unmarked returns err without its outermost marks.
func unmarked(err error) error {
	switch e := err.(type) {
	case *permanentError:
		return unmarked(e.err)
	case *backoff.PermanentError:
		if e.Err != nil {
			return unmarked(e.Err)
		}
	}
	return err
}
