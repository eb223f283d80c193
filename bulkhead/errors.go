package bulkhead

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/go-resilience/resilience/internal/keyed"
)

// ErrFull is matched by every [*FullError].
var ErrFull = errors.New("bulkhead: full")

// A Reason says why a call was refused, in words. The empty Reason stands for none.
type Reason string

const (
	NoSlot           Reason = "no slot"            // no slot was free, and the call was not to wait
	QueueFull        Reason = "queue full"         // no slot was free, and Queue calls were waiting
	Displaced        Reason = "displaced"          // a call that is served earlier took its place in a full queue
	WaitTooLong      Reason = "wait too long"      // it waited for MaxWait, or would have had to wait for longer
	DeadlineTooClose Reason = "deadline too close" // it would have had to wait until after the deadline of its ctx
	ContextEnded     Reason = "context ended"      // its ctx ended while it waited
	StandingQueue    Reason = "standing queue"     // it waited in a queue that has stood for too long; see CoDel
	TooCostly        Reason = "too costly"         // its cost is more than its level may use
)

// A FullError reports a refused call. It matches [ErrFull]. Depending on its Reason it
// also matches [context.DeadlineExceeded] (DeadlineTooClose), or the error and the cause
// of ctx, if that ended while the call waited (ContextEnded, for example).
//
// Calls that are refused under the same circumstances share one FullError. Do not
// modify it.
type FullError struct {
	Name     string        // of the bulkhead or its Group
	Key      string        // of a Group's bulkhead: at most the first 100 bytes of its text, or "(other keys)" for that which other keys share
	Reason   Reason        // why the call was refused
	Level    int           // of the call; 0 is the most important
	Cost     int           // of the call, in slots
	Share    string        // of the call, at most its first 100 bytes; see Config.Share
	Limit    int           // of the bulkhead, when it refused the call
	InFlight int           // slots that were taken then; above Limit after that has shrunk
	Queued   int           // calls that were waiting then
	Waited   time.Duration // how long the call had waited

	err   error // that Unwrap returns
	index int   // of Reason among reasons
	never bool  // the limit will not grow to what the call needs
}

func (e *FullError) Error() string {
	var text strings.Builder
	text.WriteString("bulkhead: ")
	if label := keyed.Label(e.Name, e.Key); label != "" {
		text.WriteString(label + ": ")
	}
	fmt.Fprintf(&text, "full (%s)", e.Reason)
	switch e.Reason {
	case TooCostly:
		fmt.Fprintf(&text, ": %d slots at level %d, limit %d", e.Cost, e.Level, e.Limit)
	default:
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

// Unwrap returns [context.DeadlineExceeded] for DeadlineTooClose, why the call's ctx
// ended if it did so while the call waited, and nil otherwise.
func (e *FullError) Unwrap() error { return e.err }

// Retryable reports whether another attempt can help. It cannot if the call costs more
// than its level may use, unless an adaptive limit may still grow to that.
func (e *FullError) Retryable() bool { return !e.never }

// Refused returns true: the call was not made.
func (e *FullError) Refused() bool { return true }
