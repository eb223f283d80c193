package bulkhead

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// ErrFull is matched by every [*FullError].
var ErrFull = errors.New("bulkhead: full")

// A Reason says why a call was refused.
type Reason string

const (
	NoSlot           Reason = "no_slot"            // and the call may not wait
	QueueFull        Reason = "queue_full"         // too many calls were waiting
	Displaced        Reason = "displaced"          // by another call, in a full queue
	WaitTooLong      Reason = "wait_too_long"      // MaxWait passed
	DeadlineTooClose Reason = "deadline_too_close" // less time was left than calls typically take
	ContextEnded     Reason = "context_ended"      // while the call waited
	TooCostly        Reason = "too_costly"         // it costs more than the limit
)

// reasons lists every Reason.
var reasons = []Reason{NoSlot, QueueFull, Displaced, WaitTooLong, DeadlineTooClose, ContextEnded, TooCostly}

// A FullError reports a refused call. It matches [ErrFull] and, if ctx ended while the call waited, the error and the
// cause of ctx. With [DeadlineTooClose] it matches [context.DeadlineExceeded].
type FullError struct {
	Name     string // of the bulkhead
	Reason   Reason
	Level    int           // of the call
	Cost     int           // of the call, in slots
	Share    string        // of the call, at most 100 bytes
	Limit    int           // of the bulkhead at that time
	InFlight int           // slots taken; more than Limit after that has been lowered
	Queued   int           // calls waiting
	Waited   time.Duration // by the call

	err error // why ctx ended
}

func (e *FullError) Error() string {
	var text strings.Builder
	text.WriteString("bulkhead: ")
	if e.Name != "" {
		text.WriteString(e.Name + ": ")
	}
	fmt.Fprintf(&text, "full (%s)", e.Reason)
	if e.Reason == TooCostly {
		fmt.Fprintf(&text, ": %d slots, limit %d", e.Cost, e.Limit)
	} else {
		fmt.Fprintf(&text, ": %d of %d in flight, %d waiting", e.InFlight, e.Limit, e.Queued)
	}
	if e.Waited > 0 {
		fmt.Fprintf(&text, ", waited %v", e.Waited)
	}
	if e.err != nil {
		fmt.Fprintf(&text, ": %v", e.err)
	}
	return text.String()
}

// Is reports whether target is [ErrFull], or [context.DeadlineExceeded] and the reason is [DeadlineTooClose].
func (e *FullError) Is(target error) bool {
	return target == ErrFull || e.Reason == DeadlineTooClose && target == context.DeadlineExceeded
}

// Unwrap returns why ctx ended, or nil.
func (e *FullError) Unwrap() error { return e.err }

// Refused returns true: the call was not made.
func (e *FullError) Refused() bool { return true }

// Retryable returns false for [TooCostly].
func (e *FullError) Retryable() bool { return e.Reason != TooCostly }
