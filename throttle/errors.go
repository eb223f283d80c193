package throttle

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/go-resilience/resilience/internal/keyed"
)

// ErrLimited is matched by every [*LimitedError].
var ErrLimited = errors.New("throttle: limited")

// ErrOutage is matched by the [*LimitedError] of a [Shared] that could not reach Redis
// and refuses calls meanwhile. The error matches the cause of the outage, too.
var ErrOutage = errors.New("throttle: shared limit cannot be reached")

// A Reason says why a call was refused. The empty Reason stands for none.
type Reason string

// The reasons.
const (
	OverLimit        Reason = "over the limit"     // there were not enough tokens, and the call was not to wait
	OverQuota        Reason = "over the quota"     // there were not enough tokens left of a quota
	WaitTooLong      Reason = "wait too long"      // the tokens would not have been there within MaxWait, or were not
	QueueFull        Reason = "queue full"         // Queue calls were waiting, or MaxQueued in a Group, and none was less important
	Displaced        Reason = "displaced"          // the call waited, and a more important one took its place in a full queue
	DeadlineTooClose Reason = "deadline too close" // the tokens would not have been there before the deadline of ctx
	ContextEnded     Reason = "context ended"      // ctx ended while the call waited
	TooCostly        Reason = "too costly"         // the call takes more tokens than its level may spend at once: it can never be admitted
	Outage           Reason = "outage"             // a Shared could not reach Redis
	Shed             Reason = "shed"               // an Adaptive did not send the call, as the server would probably turn it away
)

// never is the After of a call that can never be admitted.
const never = time.Duration(math.MaxInt64)

// A LimitedError reports a refused call. It matches [ErrLimited]. Depending on its
// Reason it also matches [context.DeadlineExceeded] (DeadlineTooClose), the error and
// the cause of ctx (ContextEnded), or [ErrOutage] and the error of Eval (Outage).
type LimitedError struct {
	Name   string        // of the Limiter, Group, Shared or Adaptive
	Key    string        // of a Group or Shared: at most the first 100 bytes of its text, or "(other keys)" for that which other keys share
	Reason Reason        // why the call was refused
	Limit  int           // the Burst at that time or, if there is a Quota, its N
	Quota  Quota         // of OverQuota: the one whose window is over last; of TooCostly: the one that is too small, if it is not the Burst
	Level  int           // of the call; 0 is the most important
	Cost   int           // of the call, in tokens
	Waited time.Duration // how long the call waited
	After  time.Duration // how long until the call could be admitted; see RetryAfter
	Err    error         // the cause, or nil
}

func (e *LimitedError) Error() string {
	var text strings.Builder
	text.WriteString("throttle: ")
	if label := keyed.Label(e.Name, e.Key); label != "" {
		text.WriteString(label + ": ")
	}
	if e.Reason == TooCostly {
		what := fmt.Sprintf("a burst of %d", e.Limit)
		if e.Quota != (Quota{}) {
			what = fmt.Sprintf("the quota of %v", e.Quota)
		}
		fmt.Fprintf(&text, "limited (too costly): %d tokens at level %d are more than %s can give", e.Cost, e.Level, what)
		return text.String()
	}
	fmt.Fprintf(&text, "limited (%s", e.Reason)
	if e.Reason == OverQuota {
		fmt.Fprintf(&text, " of %s", e.Quota)
	}
	text.WriteString(")")
	if e.After > 0 {
		fmt.Fprintf(&text, ", retry after %v", e.After)
	}
	if e.Err != nil {
		fmt.Fprintf(&text, ": %v", e.Err)
	}
	return text.String()
}

// Is reports whether target is [ErrLimited].
func (e *LimitedError) Is(target error) bool { return target == ErrLimited }

// Unwrap returns the cause, or nil.
func (e *LimitedError) Unwrap() error { return e.Err }

// RetryAfter returns how long it takes until the call could be admitted, if no other
// call takes tokens meanwhile. Zero means that this is not known.
func (e *LimitedError) RetryAfter() time.Duration {
	if e.After == never {
		return 0
	}
	return e.After
}

// Retryable reports whether trying again can help: it cannot if the call is too
// costly.
func (e *LimitedError) Retryable() bool { return e.Reason != TooCostly }

// Refused returns true: the call was not made.
func (e *LimitedError) Refused() bool { return true }
