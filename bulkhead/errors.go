package bulkhead

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// ErrFull matches every [*FullError]: errors.Is(err, ErrFull) returns true.
var ErrFull = errors.New("bulkhead: full")

// A Reason is the reason why a call was refused.
type Reason string

const (
	NoSlot           Reason = "no_slot"            // too few slots were free, and MaxWait is 0
	QueueFull        Reason = "queue_full"         // the queue was full
	Displaced        Reason = "displaced"          // a new call displaced the call in a full queue
	WaitTooLong      Reason = "wait_too_long"      // the call waited for MaxWait
	DeadlineTooClose Reason = "deadline_too_close" // ctx had less time left than calls typically take
	ContextEnded     Reason = "context_ended"      // ctx was done while the call waited
	TooCostly        Reason = "too_costly"         // the call costs more slots than the limit
)

// reasons lists every Reason.
var reasons = []Reason{NoSlot, QueueFull, Displaced, WaitTooLong, DeadlineTooClose, ContextEnded, TooCostly}

// A FullError reports a refused call. It matches [ErrFull]. If ctx was done while the call waited, the FullError also
// matches the error and the cause of ctx. If the reason is [DeadlineTooClose], the FullError also matches
// [context.DeadlineExceeded].
type FullError struct {
	Name     string // the bulkhead's name
	Reason   Reason
	Level    int           // the call's level
	Cost     int           // the call's cost in slots
	Share    string        // the call's share, at most 100 bytes
	Limit    int           // the bulkhead's limit when the call was refused
	InFlight int           // number of slots taken; may be above Limit after Limit was lowered
	Queued   int           // number of waiting calls
	Waited   time.Duration // the time that the call waited

	err     error // the error and the cause of ctx if ctx was done, or nil
	mayGrow bool  // the reason is TooCostly, but an adaptive limit may grow to Cost
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

// Is reports whether target is [ErrFull]. If the reason is [DeadlineTooClose], Is also returns true for
// [context.DeadlineExceeded].
func (e *FullError) Is(target error) bool {
	return target == ErrFull || e.Reason == DeadlineTooClose && target == context.DeadlineExceeded
}

// Unwrap returns the error and the cause of ctx if ctx was done, and nil otherwise.
func (e *FullError) Unwrap() error { return e.err }

// Refused returns true, because the call was not made.
func (e *FullError) Refused() bool { return true }

// Retryable returns true unless the reason is [TooCostly]. For TooCostly, Retryable returns true only if the limit is
// adaptive and may grow to Cost.
func (e *FullError) Retryable() bool { return e.Reason != TooCostly || e.mayGrow }

// An adaptive ctx is the ctx of a call whose limit may change. Package bulkhead/adaptive implements this interface.
type adaptive interface {
	// MaxLimit returns the highest limit.
	MaxLimit() int
}
