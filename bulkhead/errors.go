package bulkhead

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// ErrFull is matched by every [*FullError].
var ErrFull = errors.New("bulkhead: full")

// A Reason says why a call was refused, in words.
type Reason string

const (
	NoSlot       Reason = "no slot"       // too few slots were free for the call, which was not to wait
	QueueFull    Reason = "queue full"    // too few were free, or kept for others, and Queue calls were waiting
	Displaced    Reason = "displaced"     // another call took its place in a full queue
	WaitTooLong  Reason = "wait too long" // it waited for MaxWait
	ContextEnded Reason = "context ended" // its ctx ended while it waited
	TooCostly    Reason = "too costly"    // its cost is more than the limit
)

// reasons are all of them, in the order of the figures.
var reasons = []Reason{NoSlot, QueueFull, Displaced, WaitTooLong, ContextEnded, TooCostly}

// A FullError reports a refused call. It matches [ErrFull] and, if the call's ctx ended while it
// waited, the error and the cause of that.
type FullError struct {
	Name     string // of the bulkhead
	Reason   Reason
	Level    int           // of the call; 0 is the most important
	Cost     int           // of the call, in slots
	Share    string        // of the call, at most its first 100 bytes; see Config.Share
	Limit    int           // of the bulkhead, then
	InFlight int           // slots that were taken; above Limit after that has shrunk
	Queued   int           // calls that were waiting
	Waited   time.Duration // by the call

	err error // why its ctx ended
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

// Is reports whether target is [ErrFull].
func (e *FullError) Is(target error) bool { return target == ErrFull }

// Unwrap returns why the call's ctx ended, if it did.
func (e *FullError) Unwrap() error { return e.err }

// Refused returns true: the call was not made.
func (e *FullError) Refused() bool { return true }

// Retryable returns false if the call costs more than the limit.
func (e *FullError) Retryable() bool { return e.Reason != TooCostly }
