package cacheaside

import (
	"context"
	"errors"
	"fmt"
	"time"
)

var (
	// ErrNotFound is for Load to return, alone or wrapped, when a key does not
	// exist. Get passes it on; what is remembered of it for NotFoundTTL is
	// returned as ErrNotFound itself.
	ErrNotFound = errors.New("cacheaside: not found")
	// ErrClosed is returned by a Cache after Close.
	ErrClosed = errors.New("cacheaside: closed")
	// ErrNotInvalidated matches every *InvalidateError.
	ErrNotInvalidated = errors.New("cacheaside: not invalidated")
	// ErrKeyCollision is returned, wrapped, for a key that Config.Key writes like
	// another one.
	ErrKeyCollision = errors.New("cacheaside: two keys are written alike")
)

// InvalidateError reports that the Store could not be told that a value is out
// of date. The Cache itself no longer serves the value, and keeps trying to tell
// the Store; until then other processes may get the old value from it, for as
// long as its TTL lasts. It matches [ErrNotInvalidated].
//
// From Update, it says nothing of the write: that succeeded, unless its error is
// joined to this one.
type InvalidateError struct {
	Name string
	Keys []string // as written for the Store; none: all of them
	Err  error
}

func (e *InvalidateError) Error() string {
	what := "all keys"
	if len(e.Keys) > 0 {
		what = fmt.Sprintf("%q", e.Keys)
	}
	return prefix(e.Name) + what + " not invalidated in the store: " + e.Err.Error()
}

func (e *InvalidateError) Unwrap() error        { return e.Err }
func (e *InvalidateError) Is(target error) bool { return target == ErrNotInvalidated }

// Retryable reports false: the Cache is already trying again, and a retry around
// Update would repeat the write.
func (e *InvalidateError) Retryable() bool { return false }

// PanicError is what callers get when a load panicked or called
// [runtime.Goexit]. It is never cached.
type PanicError struct {
	Name  string
	Value any    // what the load panicked with; nil for Goexit
	Stack []byte // of the load's goroutine
}

func (e *PanicError) Error() string {
	if e.Value == nil {
		return prefix(e.Name) + "load called runtime.Goexit"
	}
	return fmt.Sprintf("%sload panicked: %v", prefix(e.Name), e.Value)
}

// Unwrap returns the value of the panic if it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// Retryable reports false: a panic is a mistake in the program.
func (e *PanicError) Retryable() bool { return false }

// TimeoutError reports that a load took longer than LoadTimeout, or that the
// write of an Update outlasted its fence. It is [context.DeadlineExceeded].
type TimeoutError struct {
	Name  string
	What  string // "load" or "write"
	After time.Duration
	Err   error // what the load returned; nil if it has not returned
}

func (e *TimeoutError) Error() string {
	text := fmt.Sprintf("%s%s timed out after %v", prefix(e.Name), e.What, e.After)
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

func (e *TimeoutError) Unwrap() error        { return e.Err }
func (e *TimeoutError) Is(target error) bool { return target == context.DeadlineExceeded }

// Timeout reports true, as [net.Error] has it.
func (e *TimeoutError) Timeout() bool { return true }

func prefix(name string) string {
	if name == "" {
		return "cacheaside: "
	}
	return "cacheaside: " + name + ": "
}
