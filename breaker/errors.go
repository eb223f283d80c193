package breaker

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// ErrOpen is matched by every [*OpenError].
var ErrOpen = errors.New("breaker: circuit open")

// An OpenError reports a call that was refused. It matches [ErrOpen].
//
// All calls that are refused in one period share one OpenError. It is not to be
// modified.
type OpenError struct {
	Name  string // of the breaker
	State State  // Open, HalfOpen (the permits were taken) or ForcedOpen
	// Until is when the open time ends, or ended: from then on probes are let through.
	// It is zero while forced open.
	Until time.Time
	// LastErr is what opened the breaker, or the reason given to [Breaker.Trip] or
	// [Breaker.ForceOpen]; it may be nil. It is not in the chain of errors: it
	// belongs to another call.
	LastErr error

	since time.Time // of HalfOpen
}

func (e *OpenError) Error() string {
	var text strings.Builder
	text.WriteString("breaker: ")
	if e.Name != "" {
		text.WriteString(e.Name + ": ")
	}
	text.WriteString("circuit " + e.State.String())
	if left := time.Until(e.Until); e.State == Open && left > 0 {
		fmt.Fprintf(&text, " for %v", left.Round(time.Millisecond))
	}
	if e.LastErr != nil {
		fmt.Fprintf(&text, " (last error: %v)", e.LastErr)
	}
	return text.String()
}

// Is reports whether target is [ErrOpen].
func (e *OpenError) Is(target error) bool { return target == ErrOpen }

const (
	leastWait  = time.Millisecond      // of an open time that has passed
	leastProbe = 10 * time.Millisecond // the estimates for a half-open breaker
	mostProbe  = time.Second
	forcedWait = 30 * time.Second
)

// RetryAfter returns how long to wait before the breaker may let a call through, as of
// now. It is never 0.
//
// For Open it is the time left, and at least a millisecond. For HalfOpen it is an
// estimate of when the probes are done: as long again as the breaker has been half-open,
// from 10 milliseconds to a second. For ForcedOpen, which lasts until an operator ends
// it, it is 30 seconds.
func (e *OpenError) RetryAfter() time.Duration {
	switch e.State {
	case ForcedOpen:
		return forcedWait
	case HalfOpen:
		return min(max(leastProbe, time.Since(e.since)), mostProbe)
	default:
		return max(leastWait, time.Until(e.Until))
	}
}

// Retryable reports whether waiting for RetryAfter is worth while: true for HalfOpen.
// It returns false for Open and ForcedOpen, so that nothing keeps calling a dependency
// that is known to be down.
func (e *OpenError) Retryable() bool { return e.State == HalfOpen }

// Refused returns true: no call was made.
func (e *OpenError) Refused() bool { return true }

// A PanicError is a panic of [Config].Ping, which counts as a failed ping.
type PanicError struct {
	Value any
	Stack []byte // of the panic
}

func (e *PanicError) Error() string { return fmt.Sprintf("breaker: Ping panicked: %v", e.Value) }

// Unwrap returns the value of the panic if that is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}
