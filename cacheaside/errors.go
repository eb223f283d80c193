package cacheaside

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

var (
	// ErrNotFound is for Load to return, alone or wrapped, when a key does not
	// exist. Get returns it; what is remembered of it for NotFoundTTL is returned as
	// ErrNotFound itself. It is an answer of a source that works, not a failure, and
	// says so to policies in Around: its method Answered returns true.
	ErrNotFound error = notFound{}
	// ErrClosed is returned by a Cache after Close.
	ErrClosed = errors.New("cacheaside: closed")
	// ErrUntold matches every *InvalidateError.
	ErrUntold = errors.New("cacheaside: the store could not be told")
	// ErrRecursive is returned, wrapped, by a Get that a load calls with its ctx for
	// its own key, or for one whose load waits for it: neither would ever end. It is
	// also returned when a thousand loads are nested. Its method Retryable returns
	// false.
	ErrRecursive error = recursive{}
	// ErrKeyCollision is returned, wrapped, for a key that Config.Key writes like
	// another one.
	ErrKeyCollision = errors.New("cacheaside: two keys are written alike")

	errNotFilled = errors.New("cacheaside: not filled")
)

type notFound struct{}

func (notFound) Error() string  { return "cacheaside: not found" }
func (notFound) Answered() bool { return true }

type recursive struct{}

func (recursive) Error() string   { return "cacheaside: a load needs its own key" }
func (recursive) Retryable() bool { return false }

// An answer is an error of a load that matches ErrNotFound by a method Is, and would
// not be read as an answer by itself.
type answered struct{ error }

func (a answered) Unwrap() error  { return a.error }
func (a answered) Answered() bool { return true }

// isNotFound reports whether err, of a load, means that the key does not exist, and
// nothing worse.
func isNotFound(err error) bool {
	if !errors.Is(err, ErrNotFound) {
		return false
	}
	if _, joined := errors.AsType[interface {
		error
		Unwrap() []error
	}](err); !joined {
		return true
	}
	return behavior.IsAnswered(err)
}

// isFailure reports whether err, of a load, is more than the absence of the key.
func isFailure(err error) bool { return err != nil && !isNotFound(err) }

// InvalidateError reports that the Store could not be told that values are out of
// date. The Cache itself no longer serves them, and keeps trying to tell the Store;
// until then other processes may get the old values from it, for as long as their
// TTL lasts. It matches [ErrUntold].
//
// From Update it says nothing of the write. That succeeded, unless its error is
// joined to this one; see [WriteError].
type InvalidateError struct {
	Name string
	Keys []string // as written for the Store; none: all of them
	Err  error    // of the Store, for the first of Keys
}

func (e *InvalidateError) Error() string {
	what := "all keys"
	if len(e.Keys) > 0 {
		what = some(e.Keys)
	}
	return prefix(e.Name) + what + " not invalidated in the store: " + e.Err.Error()
}

func (e *InvalidateError) Unwrap() error        { return e.Err }
func (e *InvalidateError) Is(target error) bool { return target == ErrUntold }

// Answered reports true: the source worked. A breaker around Update is to guard that,
// not the Store.
func (e *InvalidateError) Answered() bool { return true }

// Retryable reports false: the Cache is already trying again, and a retry around
// Update would repeat the write.
func (e *InvalidateError) Retryable() bool { return false }

// WriteError returns what the write of an Update returned, given what Update
// returned: nil if the write succeeded and only the Store could not be told.
func WriteError(err error) error {
	if _, only := err.(*InvalidateError); only {
		return nil
	}
	if e, ok := err.(*untoldError); ok {
		return e.write
	}
	return err
}

// An untoldError is the error of a write and that the Store could not be told of it.
type untoldError struct {
	write, untold error
}

func (e *untoldError) Error() string   { return e.write.Error() + "\n" + e.untold.Error() }
func (e *untoldError) Unwrap() []error { return []error{e.write, e.untold} }

// Retryable reports whether the write may be tried again.
func (e *untoldError) Retryable() bool { return behavior.Read(e.write).Retryable }

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

// some writes the first of many keys, and how many there are.
func some[T any](keys []T) string {
	const most = 10
	var b strings.Builder
	for i, key := range keys[:min(len(keys), most)] {
		if i > 0 {
			b.WriteByte(' ')
		}
		switch key := any(key).(type) {
		case string:
			fmt.Fprintf(&b, "%q", key)
		default:
			fmt.Fprintf(&b, "%v", key)
		}
	}
	if len(keys) > most {
		return fmt.Sprintf("[%s ...] (%d keys)", b.String(), len(keys))
	}
	return "[" + b.String() + "]"
}
