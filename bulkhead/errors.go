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

// A Reason is the reason for a refusal.
type Reason string

const (
	NoSlot           Reason = "no_slot"            // no slot was free, and MaxWait is 0
	QueueFull        Reason = "queue_full"         // too many calls were waiting
	Displaced        Reason = "displaced"          // another call took its place in a full queue
	WaitTooLong      Reason = "wait_too_long"      // MaxWait passed
	DeadlineTooClose Reason = "deadline_too_close" // less time was left than calls typically take
	ContextEnded     Reason = "context_ended"      // ctx was done while the call waited
	TooCostly        Reason = "too_costly"         // it costs more than the limit
)

// reasons lists every Reason.
var reasons = []Reason{NoSlot, QueueFull, Displaced, WaitTooLong, DeadlineTooClose, ContextEnded, TooCostly}

// A FullError reports a refused call. It matches [ErrFull] and, if ctx was done while the call waited, the error and
// the cause of ctx. With [DeadlineTooClose] it matches [context.DeadlineExceeded].
type FullError struct {
	Name     string // the bulkhead's name
	Reason   Reason
	Level    int           // the call's level
	Cost     int           // the call's cost in slots
	Share    string        // the call's share, at most 100 bytes
	Limit    int           // the bulkhead's limit at that time
	InFlight int           // slots taken; more than Limit after that has been lowered
	Queued   int           // calls waiting
	Waited   time.Duration // the time that the call waited

	err error // the cause of ctx, or nil
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

// Unwrap returns the error and the cause of ctx if it was done, or nil.
func (e *FullError) Unwrap() error { return e.err }

// Refused returns true: the call was not made.
func (e *FullError) Refused() bool { return true }

// Retryable returns false for [TooCostly].
func (e *FullError) Retryable() bool { return e.Reason != TooCostly }
