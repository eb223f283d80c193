package retry

import (
	"errors"

	"github.com/cenkalti/backoff/v4"
)

// Permanent marks err as an error that another attempt cannot help, as that of
// cenkalti/backoff/v4 does: at any depth of a chain, unless an error that wraps the mark has a
// method Retryable that returns true. Permanent(nil) is nil. The Retrier that retries removes a
// mark that is the outermost error, so that err == target still holds.
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
