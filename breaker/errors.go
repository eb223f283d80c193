package breaker

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// ErrOpen is matched by every [*OpenError].
var ErrOpen = errors.New("breaker: circuit open")

// A Reason says why a call was refused, in words.
type Reason string

const (
	CircuitOpen       Reason = "circuit open"        // the open time has not passed
	CircuitHalfOpen   Reason = "circuit half-open"   // as many probes run as may
	CircuitForcedOpen Reason = "circuit forced open" // until Enable; see ForceOpen
)

// An OpenError reports a refused call. It matches [ErrOpen]. Calls share it: do not modify it.
type OpenError struct {
	Name   string    // of the breaker
	Reason Reason    // why the call was refused
	Until  time.Time // when the open time ends, or ended; zero for CircuitForcedOpen
	// LastErr is what opened the breaker, or the reason given to [Breaker.Trip] or
	// [Breaker.ForceOpen]; it may be nil. It is not wrapped: it belongs to another call.
	LastErr error

	since time.Time // of CircuitHalfOpen
}

func (e *OpenError) Error() string {
	var text strings.Builder
	text.WriteString("breaker: ")
	if e.Name != "" {
		text.WriteString(e.Name + ": ")
	}
	text.WriteString(string(e.Reason))
	if left := time.Until(e.Until); left > 0 {
		fmt.Fprintf(&text, " for %v", left.Round(time.Millisecond))
	}
	if e.LastErr != nil {
		fmt.Fprintf(&text, " (last error: %v)", e.LastErr)
	}
	return text.String()
}

func (e *OpenError) Is(target error) bool { return target == ErrOpen }

// RetryAfter returns how long to wait from now on: for CircuitOpen the time left, at least a
// millisecond; for CircuitHalfOpen as long again as the breaker has been half-open, from 10
// milliseconds to a second; for CircuitForcedOpen, which has no known end, 30 seconds.
func (e *OpenError) RetryAfter() time.Duration {
	switch e.Reason {
	case CircuitForcedOpen:
		return 30 * time.Second
	case CircuitHalfOpen:
		return min(max(10*time.Millisecond, time.Since(e.since)), time.Second)
	default:
		return max(time.Millisecond, time.Until(e.Until))
	}
}

// Retryable returns true for CircuitHalfOpen alone, to stop retries against a dependency that
// is known to be down.
func (e *OpenError) Retryable() bool { return e.Reason == CircuitHalfOpen }

// Refused returns true: the call was not made.
func (e *OpenError) Refused() bool { return true }
