package breaker

import (
	"errors"
	"time"
)

// Every [*OpenError] matches ErrOpen. A retry.Error also matches ErrOpen if an open breaker ended the retries. The
// breaker may have admitted an earlier attempt. To find out whether every attempt was refused, use resilience.Refused.
var ErrOpen = errors.New("breaker: circuit open")

// An OpenError reports a refused call. It matches [ErrOpen]. Several refused calls return the same *OpenError, so do
// not modify it.
type OpenError struct {
	Name  string    // the breaker's name
	State State     // Open, HalfOpen or ForcedOpen
	Until time.Time // end of the open time; in the past if State is HalfOpen; zero if ForcedOpen
	// LastErr is the error that opened the breaker, or the reason that an operator gave. LastErr is not the error of
	// the refused call, so OpenError does not wrap LastErr, and the text of Error does not contain it.
	LastErr error

	since time.Time // the time at which the breaker became half-open
}

// Error returns a text that contains only the breaker's name and state. The text is the same for all calls that are
// refused in the same state, and is safe to show to a caller.
func (e *OpenError) Error() string {
	if e.Name == "" {
		return "breaker: circuit " + string(e.State)
	}
	return "breaker: " + e.Name + ": circuit " + string(e.State)
}

// Is reports whether target is [ErrOpen].
func (e *OpenError) Is(target error) bool { return target == ErrOpen }

// Refused returns true: the breaker did not call the function.
func (e *OpenError) Refused() bool { return true }

// Retryable reports whether a retry may soon succeed. Retryable returns true only if State is HalfOpen.
func (e *OpenError) Retryable() bool { return e.State == HalfOpen }

// RetryAfter returns the time that a caller should wait before the next call. The time depends on State:
//
//   - Open: the remaining open time, at least 1ms.
//   - HalfOpen: the time since the breaker became half-open, at least 10ms and at most 1s.
//   - ForcedOpen: 30s.
func (e *OpenError) RetryAfter() time.Duration {
	switch e.State {
	case ForcedOpen:
		return 30 * time.Second
	case HalfOpen:
		return min(max(10*time.Millisecond, time.Since(e.since)), time.Second)
	default:
		return max(time.Millisecond, time.Until(e.Until))
	}
}
