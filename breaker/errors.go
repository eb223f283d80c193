package breaker

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// ErrOpen is matched by every [*OpenError].
var ErrOpen = errors.New("breaker: circuit open")

// A Reason says why a call was refused, in words. The empty Reason stands for none.
type Reason string

const (
	CircuitOpen       Reason = "circuit open"        // the open time has not passed
	CircuitHalfOpen   Reason = "circuit half-open"   // as many probes run as may
	CircuitForcedOpen Reason = "circuit forced open" // until Enable; see ForceOpen
)

// An OpenError reports a refused call. It matches [ErrOpen].
//
// All calls that are refused in one period share one OpenError. Do not modify it.
type OpenError struct {
	Name   string // of the breaker
	Reason Reason // why the call was refused
	// Until is when the open time ends, or ended: probes are let through from then on.
	// It is zero for CircuitForcedOpen.
	Until time.Time
	// LastErr is what opened the breaker, or the reason given to [Breaker.Trip] or
	// [Breaker.ForceOpen]; it may be nil. It belongs to another call, so Unwrap does not
	// return it.
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

// event returns the event of this refusal.
func (e *OpenError) event() Event {
	return Event{Kind: EventRefused, Name: e.Name, At: time.Now(), Err: e, Reason: e.Reason}
}

// Is reports whether target is [ErrOpen].
func (e *OpenError) Is(target error) bool { return target == ErrOpen }

// RetryAfter returns how long to wait, from now on, before the breaker may let a call
// through. It is never 0.
//
// For CircuitOpen it is the time left, and at least a millisecond. For CircuitHalfOpen it
// is an estimate of when the probes are done: as long again as the breaker has been
// half-open, from 10 milliseconds to a second. For CircuitForcedOpen, which has no known
// end, it is 30 seconds.
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

// Retryable reports whether it is worthwhile to wait for RetryAfter: true for
// CircuitHalfOpen. It returns false for CircuitOpen and CircuitForcedOpen, to stop retries
// against a dependency that is known to be down.
func (e *OpenError) Retryable() bool { return e.Reason == CircuitHalfOpen }

// Refused returns true: the call was not made.
func (e *OpenError) Refused() bool { return true }
