package breaker

import (
	"errors"
	"fmt"
	"time"
)

// ErrOpen is matched by every [*OpenError], also one that ended the retrying of a call that was made:
// resilience.Refused tells whether none was.
var ErrOpen = errors.New("breaker: circuit open")

// An OpenError reports a refused call. Calls share it: do not modify it.
type OpenError struct {
	Name  string    // of the breaker
	State State     // Open, HalfOpen or ForcedOpen
	Until time.Time // when the open time ends, or ended; zero if ForcedOpen
	// LastErr opened the breaker, or is the reason of an operator. It belongs to another call, and is
	// not wrapped.
	LastErr error

	since time.Time // of HalfOpen
}

func (e *OpenError) Error() string {
	text := "breaker: "
	if e.Name != "" {
		text += e.Name + ": "
	}
	text += "circuit " + string(e.State)
	if left := time.Until(e.Until); left > 0 {
		text += fmt.Sprintf(" for %v", left.Round(time.Millisecond))
	}
	if e.LastErr != nil {
		text += fmt.Sprintf(" (last error: %v)", e.LastErr)
	}
	return text
}

func (e *OpenError) Is(target error) bool { return target == ErrOpen }

// RetryAfter returns the open time left, at least a millisecond; if HalfOpen, as long again as the
// breaker has been that, from 10 milliseconds to a second; if ForcedOpen, 30 seconds.
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

func (e *OpenError) Retryable() bool { return e.State == HalfOpen }

func (e *OpenError) Refused() bool { return true }
