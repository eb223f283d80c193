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
type Reason int

const (
	NoSlot           Reason = iota // no slot was free for it, and Queue is 0
	QueueFull                      // no slot was free for it, and Queue callers were waiting
	Displaced                      // it waited, and a call that is served before it took its place
	MaxWaitPassed                  // it waited for MaxWait
	ContextEnded                   // its ctx ended while it waited
	DeadlineTooClose               // it would have waited for longer than MaxWait or its deadline allows
	Shed                           // it waited in a queue that has stood for too long; see CoDel
	TooHeavy                       // its weight is more than the limit leaves to its level
	reasons          = iota
)

var reasonNames = [reasons]string{
	"no slot", "queue full", "displaced", "max wait passed",
	"context ended", "deadline too close", "shed", "too heavy",
}

// String returns the reason in words: "queue full".
func (r Reason) String() string {
	if r < 0 || r >= reasons {
		return fmt.Sprintf("bulkhead.Reason(%d)", int(r))
	}
	return reasonNames[r]
}

// A FullError reports a call that was refused. It matches [ErrFull] and, where
// the call's ctx ended while it waited, the error and the cause of that ctx.
//
// Calls that are refused under the same circumstances share one FullError. It
// is not to be modified.
type FullError struct {
	Name     string        // of the bulkhead
	Reason   Reason        // why the call was refused
	Level    int           // of the call; 0 is the most important
	Weight   int           // of the call, in slots
	Limit    int           // of the bulkhead, when it refused the call
	InFlight int           // slots that were taken then; above Limit after that has shrunk
	Queued   int           // callers that were waiting then
	Waited   time.Duration // how long the call had waited

	err   error // why ctx ended
	never bool  // the limit will not grow to what the call needs
}

func (e *FullError) Error() string {
	var text strings.Builder
	text.WriteString("bulkhead: ")
	if e.Name != "" {
		text.WriteString(e.Name + ": ")
	}
	if e.Reason == TooHeavy {
		fmt.Fprintf(&text, "too heavy: weight %d at level %d, limit %d", e.Weight, e.Level, e.Limit)
		return text.String()
	}
	fmt.Fprintf(&text, "full (%v): %d of %d in flight, %d waiting", e.Reason, e.InFlight, e.Limit, e.Queued)
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

// Unwrap returns why the call's ctx ended while it waited; nil if it did not.
func (e *FullError) Unwrap() error { return e.err }

// Retryable reports whether another attempt can help. It cannot for a call whose weight
// is more than the limit leaves to its level, unless an adaptive limit may still grow to
// that.
func (e *FullError) Retryable() bool { return !e.never }

// Refused returns true: the call was not made.
func (e *FullError) Refused() bool { return true }
