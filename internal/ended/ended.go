// Package ended reports why a context is done.
package ended

import (
	"context"
	"errors"
	"time"
)

// Error returns nil if ctx is not done. Otherwise it returns an error that matches both ctx.Err() and
// context.Cause(ctx).
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

// By reports whether ctx is done because of a certain deadline. at is the time of the deadline, and cause is the
// cause that was given to it. If at is in the past, By returns true even if ctx is not canceled yet, because a
// connection with the same deadline often returns a moment before ctx is canceled.
func By(ctx context.Context, at time.Time, cause error) bool {
	if ctx.Err() != nil {
		return context.Cause(ctx) == cause
	}
	deadline, ok := ctx.Deadline()
	return ok && deadline.Equal(at) && !time.Now().Before(at)
}

// An endError is the error of a ctx that is done and whose cause does not match ctx.Err().
type endError struct{ err, cause error }

func (e *endError) Error() string   { return e.err.Error() + ": " + e.cause.Error() }
func (e *endError) Unwrap() []error { return []error{e.err, e.cause} }

// A LostError is the cause with which package hedge cancels a call after a parallel call has won.
type LostError string

func (e LostError) Error() string { return string(e) }

// Is reports whether target is a LostError with any text.
func (e LostError) Is(target error) bool {
	_, lost := target.(LostError)
	return lost
}

// Lost reports whether package hedge canceled ctx because a parallel call has won.
func Lost(ctx context.Context) bool { return errors.Is(context.Cause(ctx), LostError("")) }
