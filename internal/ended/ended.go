// Package ended says why a context has ended.
package ended

import (
	"context"
	"errors"
)

// Error returns why ctx ended, or nil while it lives. [errors.Is] finds both
// ctx.Err() and context.Cause(ctx) in it, whatever cause its owner gave.
func Error(ctx context.Context) error {
	err := ctx.Err()
	if err == nil {
		return nil
	}
	cause := context.Cause(ctx)
	if errors.Is(cause, err) {
		return cause
	}
	return &endError{err: err, cause: cause}
}

// endError is the end of a ctx whose cause does not say that it is one.
type endError struct{ err, cause error }

func (e *endError) Error() string   { return e.err.Error() + ": " + e.cause.Error() }
func (e *endError) Unwrap() []error { return []error{e.err, e.cause} }
