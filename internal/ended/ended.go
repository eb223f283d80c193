// Package ended says why a context has ended.
package ended

import (
	"context"
	"errors"
	"time"
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

// By reports whether ctx, which was made to end at a time with a cause, has ended by
// that: also if the time has passed and ctx is not canceled yet, since a connection with
// the same deadline often returns a moment before.
func By(ctx context.Context, at time.Time, cause error) bool {
	if ctx.Err() != nil {
		return context.Cause(ctx) == cause
	}
	deadline, ok := ctx.Deadline()
	return ok && deadline.Equal(at) && !time.Now().Before(at)
}

// endError is the end of a ctx whose cause does not say that it is one.
type endError struct{ err, cause error }

func (e *endError) Error() string   { return e.err.Error() + ": " + e.cause.Error() }
func (e *endError) Unwrap() []error { return []error{e.err, e.cause} }

// LostError is the cause of the end of a call that lost a hedge: it is not needed any more.
type LostError string

func (e LostError) Error() string { return string(e) }

func (e LostError) Is(target error) bool {
	_, lost := target.(LostError)
	return lost
}

// Lost reports whether ctx has ended because its call lost a hedge.
func Lost(ctx context.Context) bool { return errors.Is(context.Cause(ctx), LostError("")) }
