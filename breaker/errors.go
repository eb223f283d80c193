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
	// Until is when the breaker lets a probe through; zero if that is not known.
	Until time.Time
	// LastErr is what opened the breaker, or the reason given to [Breaker.Trip] or
	// [Breaker.ForceOpen]; it may be nil. It is not in the chain of errors: it
	// belongs to another call.
	LastErr error
}

func (e *OpenError) Error() string {
	var text strings.Builder
	text.WriteString("breaker: ")
	if e.Name != "" {
		text.WriteString(e.Name + ": ")
	}
	text.WriteString("circuit " + e.State.String())
	if left := e.RetryAfter(); left > 0 {
		fmt.Fprintf(&text, " for %v", left.Round(time.Millisecond))
	}
	if e.LastErr != nil {
		fmt.Fprintf(&text, " (last error: %v)", e.LastErr)
	}
	return text.String()
}

// Is reports whether target is [ErrOpen].
func (e *OpenError) Is(target error) bool { return target == ErrOpen }

// RetryAfter returns the time left until the breaker lets a probe through, as of
// now: zero if that has passed or is not known.
func (e *OpenError) RetryAfter() time.Duration {
	if e.Until.IsZero() {
		return 0
	}
	return max(0, time.Until(e.Until))
}

// Retryable returns false: the same call would be refused again.
func (e *OpenError) Retryable() bool { return false }

// Refused returns true: no call was made.
func (e *OpenError) Refused() bool { return true }
