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
	// ErrNotFound is what Load returns, alone or wrapped, for a key that does not exist, and Get after
	// it. It is an answer and no failure.
	ErrNotFound error = notFound{}
	// ErrClosed is returned by the methods of a closed Cache.
	ErrClosed = errors.New("cacheaside: closed")
	// ErrNotPropagated matches every *InvalidateError.
	ErrNotPropagated = errors.New("cacheaside: invalidation not propagated")
)

type notFound struct{}

func (notFound) Error() string  { return "cacheaside: not found" }
func (notFound) Answered() bool { return true }

// errRemoteLoadFailed is what a caller gets that waited for the load of another process, if that has
// failed. It is a failure like that of an own load.
var errRemoteLoadFailed = errors.New("the load of another process has failed")

// answered marks the error of a load that matches ErrNotFound by an Is method. By itself
// such an error would not be read as an answer.
type answered struct{ error }

func (a answered) Unwrap() error  { return a.error }
func (a answered) Answered() bool { return true }

// isNotFound reports whether err, returned by a load, means that the key does not exist
// and nothing worse. A panic with such an error is worse.
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

// failures returns those of the errors joined in err that mean more than an absent key.
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

// isFailure reports whether err, returned by a load, means more than an absent key.
func isFailure(err error) bool { return err != nil && !isNotFound(err) }

// An InvalidateError reports that the Store could not be told of an invalidation, and is told
// later. Until then other processes may read the old values, for at most their TTL, extended by
// StaleWhileRevalidate and StaleIfError. It matches [ErrNotPropagated]. From Write it does not mean that the
// write failed; see [WriteError].
type InvalidateError struct {
	Name string
	Keys []string // as converted for the Store; nil means all keys
	Err  error    // of the Store, for the first of Keys

	inWrite bool
	write   error // of the write of that Write
}

func (e *InvalidateError) Error() string {
	what := "all keys"
	if len(e.Keys) > 0 {
		what = summarize(e.Keys)
	}
	before := prefix(e.Name)
	switch {
	case e.write != nil:
		before = e.write.Error() + "\n" + before
	case e.inWrite:
		before += "the write succeeded, but "
	}
	return before + what + " not invalidated in the store: " + e.Err.Error()
}

func (e *InvalidateError) Unwrap() []error {
	if e.write == nil {
		return []error{e.Err}
	}
	return []error{e.write, e.Err}
}

func (e *InvalidateError) Is(target error) bool { return target == ErrNotPropagated }

// Answered reports true unless the write failed: the source has answered.
func (e *InvalidateError) Answered() bool { return e.write == nil || behavior.IsAnswered(e.write) }

// Retryable reports false unless the write failed: a retry would repeat it.
func (e *InvalidateError) Retryable() bool { return behavior.Read(e.write).Retryable }

func (e *InvalidateError) Refused() bool { return behavior.IsRefused(e.write) }

// WriteError returns the error of the write itself, given the error of Write: nil if only the
// Store could not be told.
func WriteError(err error) error {
	if e, ok := err.(*InvalidateError); ok {
		return e.write
	}
	return err
}

// A TimeoutError reports that a load outlasted LoadTimeout, or the write of a Write its fence.
// It matches [context.DeadlineExceeded].
type TimeoutError struct {
	Name      string
	Operation string // "load" or "write"
	After     time.Duration
	Err       error // returned by the load; nil if it has not returned
}

func (e *TimeoutError) Error() string {
	text := fmt.Sprintf("%s%s timed out after %v", prefix(e.Name), e.Operation, e.After)
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

func (e *TimeoutError) Unwrap() error        { return e.Err }
func (e *TimeoutError) Is(target error) bool { return target == context.DeadlineExceeded }

func (e *TimeoutError) Timeout() bool { return true }

func prefix(name string) string {
	if name == "" {
		return "cacheaside: "
	}
	return "cacheaside: " + name + ": "
}

// summarize formats the first keys of many, and their number.
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
