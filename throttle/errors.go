package throttle

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/go-resilience/resilience/internal/keyed"
)

// ErrLimited is matched by every [*LimitedError].
var ErrLimited = errors.New("throttle: limited")

// ErrOutage is matched by the [*LimitedError] of a limit of a fleet that cannot reach Redis
// and refuses calls meanwhile. The error matches the cause of the outage, too.
var ErrOutage = errors.New("throttle: shared limit cannot be reached")

// A Reason says why a call was refused. The empty Reason stands for none.
type Reason string

// The reasons.
const (
	OverLimit        Reason = "over the limit"     // there were not enough tokens, and the call was not to wait
	OverQuota        Reason = "over the quota"     // there were not enough tokens left of a quota
	WaitTooLong      Reason = "wait too long"      // the tokens would not have been there within MaxWait, or were not
	DeadlineTooClose Reason = "deadline too close" // the tokens would not have been there before the deadline of ctx
	ContextEnded     Reason = "context ended"      // ctx ended while the call waited
	TooCostly        Reason = "too costly"         // the call takes more tokens than there can ever be at once
	CoolingDown      Reason = "cooling down"       // a limit of a fleet was told to refuse calls for a while
	Outage           Reason = "outage"             // Redis, where a fleet's limit is kept, could not be reached
	Shed             Reason = "shed"               // the server would probably turn the call away (package adaptive)
)

// never is the After of a call that can never be admitted.
const never = time.Duration(math.MaxInt64)

// A LimitedError reports a refused call. It matches [ErrLimited]. Depending on its
// Reason it also matches [context.DeadlineExceeded] (DeadlineTooClose), the error and
// the cause of ctx (ContextEnded), or [ErrOutage] and the error of Redis (Outage).
type LimitedError struct {
	Name   string        // of the limit
	Key    string        // of a Group, at most 100 bytes of its text, or "(other keys)"; of a fleet's meter
	Reason Reason        // why the call was refused
	Limit  int           // the Burst at that time or, if there is a Quota, its N
	Quota  Quota         // of OverQuota: that whose window is over last; of TooCostly: that which is too small, or zero
	Cost   int           // of the call, in tokens
	Left   int           // of a limit of a fleet: what was left
	Waited time.Duration // how long the call waited
	After  time.Duration // how long until the call could be admitted; see RetryAfter
	Err    error         // the cause, or nil
}

func (e *LimitedError) Error() string {
	label := keyed.Label(e.Name, e.Key)
	if label != "" {
		label += ": "
	}
	if e.Reason == TooCostly {
		most := fmt.Sprintf("a burst of %d", e.Limit)
		if e.Quota != (Quota{}) {
			most = fmt.Sprintf("the quota of %v", e.Quota)
		}
		return fmt.Sprintf("throttle: %slimited (too costly): %d tokens are more than %s can give", label, e.Cost, most)
	}
	text := fmt.Sprintf("throttle: %slimited (%s", label, e.Reason)
	if e.Reason == OverQuota {
		text += " of " + e.Quota.String()
	}
	text += ")"
	if e.After > 0 {
		text += fmt.Sprintf(", retry after %v", e.After)
	}
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
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

// An EventKind says what an [Event] is.
type EventKind string

// The kinds.
const (
	EventRefused     EventKind = "refused"      // a call was refused
	EventWaited      EventKind = "waited"       // a call was admitted after a wait for its tokens
	EventOutageBegan EventKind = "outage began" // Redis no longer answers for a limit of a fleet
	EventRecovered   EventKind = "recovered"    // Redis answers again
)

// An Event is what an observer is told.
type Event struct {
	Kind   EventKind
	Name   string        // of the limit
	Key    string        // as in LimitedError
	Cost   int           // of the call, in tokens
	Waited time.Duration // how long the call waited
	Reason Reason        // of EventRefused
	Err    error         // of EventRefused: the [*LimitedError]; of EventOutageBegan: the cause
}

// Level returns how much attention the event needs, as slog has it: 4 for all but
// [EventWaited].
func (e Event) Level() int {
	if e.Kind == EventWaited {
		return -4
	}
	return 4
}

// Fields calls yield with each detail of the event.
func (e Event) Fields(yield func(name string, value any)) {
	yield("event", string(e.Kind))
	if e.Key != "" {
		yield("key", e.Key)
	}
	if e.Reason != "" {
		yield("reason", string(e.Reason))
	}
	if e.Waited > 0 {
		yield("waited", e.Waited)
	}
	if e.Err != nil {
		yield("error", e.Err)
	}
}

// A Decision says whether a call was admitted and what is left: the information that
// the headers of an HTTP response give a client. Of a limit with Quotas it tells about
// the one that binds: if the call was admitted, the one with the fewest tokens left;
// otherwise, of the quotas that have too few, the one whose window is over last.
type Decision struct {
	OK        bool
	Quota     Quota         // the quota that binds; zero if it is the Rate, with its Burst
	Limit     int           // the Burst, or N of the Quota
	Window    time.Duration // the time in which the Burst refills; or the length of the Quota's window
	Remaining int           // tokens that could be taken now, after this decision
	// RetryAfter is the time until the same tokens could be taken, if no other call takes any:
	// 0 if they were taken, the longest Duration if they never can be.
	RetryAfter time.Duration
	ResetAfter time.Duration // the time until Limit tokens are there again, if no call takes any
}

// Totals are counted from New or NewGroup on. They never go back: neither an Update nor
// a key that a Group evicts resets them.
type Totals struct {
	Admitted int64            // calls and reservations that got their tokens
	Refused  int64            // calls that did not; a call whose ctx had already ended is in neither
	Refusals map[Reason]int64 // the calls of Refused, by reason
	Spent    int64            // tokens, those given back included
	Refunded int64            // tokens that were given back
	Forgiven int64            // tokens of debts beyond one Burst
	Waited   int64            // calls of Admitted that had to wait
	WaitTime time.Duration    // how long these calls waited, in all
}

func (t *Totals) refuse(why Reason) {
	if t.Refusals == nil {
		t.Refusals = map[Reason]int64{}
	}
	t.Refused++
	t.Refusals[why]++
}

// Stats is a snapshot of a [Limiter].
type Stats struct {
	Totals

	Queued int // calls that wait now
}

// GroupStats is a snapshot of a [Group].
type GroupStats struct {
	// Totals are the sums over all keys of the group, also those that it has evicted and
	// those that found no room.
	Totals

	Evicted  int64 // keys that were evicted; never goes back
	Overflow int64 // calls of Totals whose key found no room; never goes back

	Keys   int // keys that the group holds
	Queued int // calls that wait now, for all keys together
}
