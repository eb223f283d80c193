package retry

import (
	"errors"
	"slices"

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

// isPermanent reports whether a mark of Permanent, or of that of cenkalti/backoff, decides
// about err, which reads as end.
func isPermanent(err error, end behavior.End) bool {
	return !end.Retryable && marked(err)
}

// marked reports whether a mark is in the tree of err.
func marked(err error) bool {
	if _, ok := err.(*permanentError); ok || behavior.IsPermanent(err) {
		return true
	}
	switch e := err.(type) {
	case interface{ Unwrap() []error }:
		return slices.ContainsFunc(e.Unwrap(), marked)
	case interface{ Unwrap() error }:
		return marked(e.Unwrap())
	}
	return false
}

// unmarked returns err without its outermost marks.
func unmarked(err error) error {
	for {
		if _, ok := err.(*permanentError); !ok && !behavior.IsPermanent(err) {
			return err
		}
		inner := errors.Unwrap(err)
		if inner == nil {
			return err
		}
		err = inner
	}
}
