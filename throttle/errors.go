package throttle

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"
)

// ErrLimited is matched by every [*LimitedError].
var ErrLimited = errors.New("throttle: limited")

// ErrOutage is matched by a [*LimitedError] of a [Shared] that could not ask
// for the tokens and refuses what it cannot ask for. Its cause is there too.
var ErrOutage = errors.New("throttle: shared limit cannot be reached")

// A Reason says why a call was refused.
type Reason int

const (
	_                Reason = iota
	OverLimit               // the tokens were not there, and the call was not to wait for them
	WaitTooLong             // they would not have been there within MaxWait
	QueueFull               // MaxQueue callers were waiting for theirs
	DeadlineTooClose        // they would not have been there before the deadline of ctx
	ContextEnded            // ctx ended while the call waited
	TooCostly               // the call takes more than Burst leaves to its level: it can never be admitted
	TooManyKeys             // the key is new to a Group that holds MaxKeys of them
	Outage                  // the shared limit could not be asked
	Shed                    // an Adaptive keeps back what the server would refuse
	reasons          = iota
)

var reasonNames = [reasons]string{
	"", "over the limit", "wait too long", "queue full", "deadline too close", "context ended",
	"too costly", "too many keys", "outage", "shed",
}

// String returns the reason in words: "queue full".
func (r Reason) String() string {
	if r <= 0 || r >= reasons {
		return fmt.Sprintf("throttle.Reason(%d)", int(r))
	}
	return reasonNames[r]
}

// never is how long it takes until what cannot be admitted is.
const never = time.Duration(math.MaxInt64)

// A LimitedError reports a call that was refused. It matches [ErrLimited] and,
// by its Reason, what else there is to find: [context.DeadlineExceeded] for
// DeadlineTooClose, the error and the cause of ctx for ContextEnded, [ErrOutage]
// and the client's error for Outage.
type LimitedError struct {
	Name   string        // of the limiter
	Key    string        // of a Group's or a Shared's limit, its first 100 bytes; "(other keys)" for the one of ShareOne
	Reason Reason        // why the call was refused
	Limit  int           // the Burst at that time
	Level  int           // of the call; 0 is the most important
	Cost   int           // of the call, in tokens
	After  time.Duration // when to come back: see RetryAfter
	Err    error         // the cause, or nil
}

func (e *LimitedError) Error() string {
	var text strings.Builder
	text.WriteString("throttle: ")
	switch {
	case e.Name != "" && e.Key != "":
		text.WriteString(e.Name + "/" + e.Key + ": ")
	case e.Name != "" || e.Key != "":
		text.WriteString(e.Name + e.Key + ": ")
	}
	if e.Reason == TooCostly {
		fmt.Fprintf(&text, "limited (too costly): %d tokens at level %d are more than a burst of %d can give", e.Cost, e.Level, e.Limit)
		return text.String()
	}
	fmt.Fprintf(&text, "limited (%v)", e.Reason)
	if e.After > 0 && e.After < never {
		fmt.Fprintf(&text, ", retry after %v", e.After)
	}
	if e.Err != nil {
		fmt.Fprintf(&text, ": %v", e.Err)
	}
	return text.String()
}

// Is reports whether target is [ErrLimited].
func (e *LimitedError) Is(target error) bool { return target == ErrLimited }

// Unwrap returns the cause, if there is one beyond the limit.
func (e *LimitedError) Unwrap() error { return e.Err }

// RetryAfter returns how long it takes until the call could be admitted, if no
// other comes in between. Zero means that it is not known.
func (e *LimitedError) RetryAfter() time.Duration {
	if e.After == never {
		return 0
	}
	return e.After
}

// Retryable reports whether trying again can help: it cannot for a call that is
// too costly.
func (e *LimitedError) Retryable() bool { return e.Reason != TooCostly }

// Refused returns true: the call was not made.
func (e *LimitedError) Refused() bool { return true }
