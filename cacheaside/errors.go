package cacheaside

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/panics"
)

var (
	// ErrNotFound means that a key does not exist. Load returns ErrNotFound, possibly wrapped, and Get returns it to the
	// caller. ErrNotFound is an answer, not a failure, so policies count it as a success.
	ErrNotFound error = notFound{}
	// ErrClosed is returned by the methods of a closed Cache that read, write or invalidate.
	ErrClosed = errors.New("cacheaside: closed")
	// ErrNotPropagated means that an invalidation did not reach the Store. Every *InvalidateError matches
	// ErrNotPropagated.
	ErrNotPropagated = errors.New("cacheaside: invalidation not propagated")
)

type notFound struct{}

func (notFound) Error() string  { return "cacheaside: not found" }
func (notFound) Answered() bool { return true }

// errRemoteLoadFailed is the error of a caller that waited for a load of another process, which failed.
var errRemoteLoadFailed = errors.New("load of another process failed")

// answered marks an error of Load as an answer. It is needed for an error that matches ErrNotFound by its own Is
// method, because policies do not recognize such an error as an answer.
type answered struct{ error }

func (a answered) Unwrap() error  { return a.error }
func (a answered) Answered() bool { return true }

// isNotFound reports whether err, returned by a load, means only that the key does not exist. It returns false for a
// panic whose value is such an error, and for such an error that is joined with a failure.
func isNotFound(err error) bool {
	if !errors.Is(err, ErrNotFound) {
		return false
	}
	if _, panicked := errors.AsType[*panics.Error](err); panicked {
		return false
	}
	if _, isJoined := errors.AsType[joined](err); !isJoined {
		return true
	}
	return behavior.IsAnswered(err)
}

type joined interface {
	error
	Unwrap() []error
}

// failures returns the failures among the errors joined in err.
func failures(err error) (failed []error) {
	if all, ok := errors.AsType[joined](err); ok {
		for _, err := range all.Unwrap() {
			failed = append(failed, failures(err)...)
		}
	} else if isFailure(err) {
		failed = []error{err}
	}
	return failed
}

// isFailure reports whether err, returned by a load, is an error other than ErrNotFound.
func isFailure(err error) bool { return err != nil && !isNotFound(err) }

// An InvalidateError reports that an invalidation did not reach the Store. The Cache retries the invalidation in the
// background. Until a retry succeeds, other processes may read outdated values. Each outdated value is served for at
// most its TTL plus the larger of StaleWhileRevalidate and StaleIfError. An InvalidateError matches [ErrNotPropagated].
//
// If Write returns an InvalidateError, the write itself may have succeeded; see [WriteError].
type InvalidateError struct {
	Name string
	Keys []string // the keys as strings, converted by Config.Key; nil means all keys
	Err  error    // the Store's error for the first of Keys; Unwrap does not return it

	inWrite bool  // Write returned the error
	write   error // the error of the write function
}

func (e *InvalidateError) Error() string {
	keys := "all keys"
	if len(e.Keys) > 0 {
		keys = summarize(e.Keys)
	}
	before := prefix(e.Name)
	switch {
	case e.write != nil:
		before = e.write.Error() + "\n" + before
	case e.inWrite:
		before += "write succeeded, but "
	}
	return before + keys + " not invalidated in the store: " + e.Err.Error()
}

// Unwrap returns the error of the write, or nil if the write succeeded. Unwrap does not return Err, because a timeout
// of the Store would otherwise look like a timeout of the write.
func (e *InvalidateError) Unwrap() error { return e.write }

// Is reports whether target is [ErrNotPropagated].
func (e *InvalidateError) Is(target error) bool { return target == ErrNotPropagated }

// Answered reports whether the source has answered. Answered returns true if the write succeeded or its error is an
// answer.
func (e *InvalidateError) Answered() bool { return e.write == nil || behavior.IsAnswered(e.write) }

// Retryable reports whether the write failed with a retryable error. After a successful write, Retryable returns
// false, because a retry would repeat the write.
func (e *InvalidateError) Retryable() bool { return behavior.Read(e.write).Retryable }

// Refused reports whether a policy refused the write.
func (e *InvalidateError) Refused() bool { return behavior.IsRefused(e.write) }

// WriteError takes an error of [Cache.Write] and returns the error of the write function. WriteError returns nil if the
// write succeeded and only the invalidation failed. The write function may itself return an error of another Write.
// WriteError then returns the error of the innermost write function.
func WriteError(err error) error {
	e, ok := err.(*InvalidateError)
	for ok && e.inWrite {
		err = e.write
		e, ok = err.(*InvalidateError)
	}
	return err
}

// A TimeoutError reports that a load took longer than LoadTimeout, or that the function passed to Write took longer
// than its fence allows. A TimeoutError matches [context.DeadlineExceeded].
type TimeoutError struct {
	Name      string
	Operation string // "load" or "write"
	After     time.Duration
	Err       error // the error of the load; nil if the load has not returned
}

func (e *TimeoutError) Error() string {
	text := fmt.Sprintf("%s%s timed out after %v", prefix(e.Name), e.Operation, e.After)
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

// Unwrap returns Err.
func (e *TimeoutError) Unwrap() error { return e.Err }

// Is reports whether target is [context.DeadlineExceeded].
func (e *TimeoutError) Is(target error) bool { return target == context.DeadlineExceeded }

// Timeout returns true.
func (e *TimeoutError) Timeout() bool { return true }

// prefix returns the start of the error messages of the Cache with a name.
func prefix(name string) string {
	if name == "" {
		return "cacheaside: "
	}
	return "cacheaside: " + name + ": "
}

// summarize formats keys. If there are more than 10, it formats the first 10 and the number of all keys.
func summarize[T any](keys []T) string {
	const most = 10
	verb := "%v"
	if _, texts := any(keys).([]string); texts {
		verb = "%q"
	}
	if len(keys) <= most {
		return fmt.Sprintf(verb, keys)
	}
	return fmt.Sprintf("%s ...] (%d keys)", strings.TrimSuffix(fmt.Sprintf(verb, keys[:most]), "]"), len(keys))
}
