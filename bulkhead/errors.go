package bulkhead

import (
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
	NoSlot       Reason = "no slot"       // MaxWait is 0
	QueueFull    Reason = "queue full"    // Queue calls were waiting
	Displaced    Reason = "displaced"     // in a full queue, by another call
	WaitTooLong  Reason = "wait too long" // for MaxWait
	ContextEnded Reason = "context ended" // while it waited
	TooCostly    Reason = "too costly"    // it costs more than the limit
)

// reasons are all of them, in the order of the figures.
var reasons = []Reason{NoSlot, QueueFull, Displaced, WaitTooLong, ContextEnded, TooCostly}

// A FullError is a refused call. It matches [ErrFull] and, if the call's ctx ended while it waited,
// that error and its cause.
type FullError struct {
	Name     string // of the bulkhead
	Reason   Reason
	Level    int           // of the call, as Cost and Share
	Cost     int           // in slots
	Share    string        // at most its first 100 bytes
	Limit    int           // of the bulkhead, then
	InFlight int           // slots taken; above Limit after that has shrunk
	Queued   int           // calls
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

func (e *FullError) Is(target error) bool { return target == ErrFull }

func (e *FullError) Unwrap() error { return e.err }

func (e *FullError) Refused() bool { return true }

// Retryable is false for [TooCostly].
func (e *FullError) Retryable() bool { return e.Reason != TooCostly }
