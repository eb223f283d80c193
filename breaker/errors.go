package breaker

import (
	"errors"
	"time"
)

// ErrOpen is matched by every [*OpenError]. An error that a retrier returns because the breaker is open
// matches it even if an earlier attempt was made; resilience.Refused reports whether no call was made.
var ErrOpen = errors.New("breaker: circuit open")

// An OpenError reports a refused call. It matches [ErrOpen]. Refused calls share one value: do not modify it.
type OpenError struct {
	Name  string    // of the breaker
	State State     // Open, HalfOpen or ForcedOpen
	Until time.Time // when the open time ends or ended; zero if ForcedOpen
	// LastErr is the error that opened the breaker, or the reason that an operator gave. It belongs to another
	// call and is neither wrapped nor part of the text.
	LastErr error

	since time.Time // when the breaker became half-open
}

// Error returns a text that has only the breaker's name and state, so it is the same for every refused call
// and safe to show to a caller.
func (e *OpenError) Error() string {
	if e.Name == "" {
		return "breaker: circuit " + string(e.State)
	}
	return "breaker: " + e.Name + ": circuit " + string(e.State)
}

// Is reports whether target is [ErrOpen].
func (e *OpenError) Is(target error) bool { return target == ErrOpen }

// Refused returns true: the call was not made.
func (e *OpenError) Refused() bool { return true }

// Retryable reports whether a retry may help soon: only while the breaker is half-open.
func (e *OpenError) Retryable() bool { return e.State == HalfOpen }

// RetryAfter returns how long a caller should wait: if the breaker is open, the rest of the open time, at
// least 1ms; if it is half-open, the time since it became half-open, from 10ms to 1s; if it is forced open,
// 30s.
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
