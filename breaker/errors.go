package breaker

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/go-resilience/resilience/internal/keyed"
)

// ErrOpen is matched by every [*OpenError].
var ErrOpen = errors.New("breaker: circuit open")

// ErrTooManyKeys is matched by the [*OpenError] of a new key in a full [Group] with
// [RefuseNew].
var ErrTooManyKeys = errors.New("breaker: too many keys")

// An OpenError reports that a call was refused. It matches [ErrOpen].
//
// All calls that are refused in one period share one OpenError. Do not modify it.
type OpenError struct {
	Name string // of the breaker, or of its group
	Key  string // of the breaker in its group
	// State is Open, HalfOpen if all permits were taken, or ForcedOpen. It is ForcedOpen
	// for a key that a full Group refuses, too.
	State State
	// Until is when the open time ends, or ended: probes are let through from then on.
	// It is zero for ForcedOpen.
	Until time.Time
	// LastErr is what opened the breaker, or the reason given to [Breaker.Trip] or
	// [Breaker.ForceOpen]; it may be nil. It belongs to another call, so Unwrap does not
	// return it.
	LastErr error

	since   time.Time // of HalfOpen
	tooMany bool      // keys
}

func (e *OpenError) Error() string {
	var text strings.Builder
	text.WriteString("breaker: ")
	if label := keyed.Label(e.Name, e.Key); label != "" {
		text.WriteString(label + ": ")
	}
	if e.tooMany {
		text.WriteString("too many keys")
		return text.String()
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

// event returns the event of this refusal.
func (e *OpenError) event() Event {
	return Event{Kind: Refused, Name: e.Name, Key: e.Key, From: e.State, To: e.State, At: time.Now(), Err: e}
}

// Is reports whether target is [ErrOpen], or [ErrTooManyKeys] for the refusal of a new key.
func (e *OpenError) Is(target error) bool {
	return target == ErrOpen || e.tooMany && target == ErrTooManyKeys
}

const (
	leastWait  = time.Millisecond      // after the open time has passed
	leastProbe = 10 * time.Millisecond // bounds of the estimate while half-open
	mostProbe  = time.Second
	forcedWait = 30 * time.Second
)

// RetryAfter returns how long to wait, from now on, before the breaker may let a call
// through. It is never 0.
//
// For Open it is the time left, and at least a millisecond. For HalfOpen it is an
// estimate of when the probes are done: as long again as the breaker has been half-open,
// from 10 milliseconds to a second. For ForcedOpen, which has no known end, it is 30
// seconds.
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

// Retryable reports whether it is worthwhile to wait for RetryAfter: true for HalfOpen.
// It returns false for Open and ForcedOpen, to stop retries against a dependency that is
// known to be down.
func (e *OpenError) Retryable() bool { return e.State == HalfOpen }

// Refused returns true: the call was not made.
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
