package throttle

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/go-resilience/resilience/internal/describe"
	"github.com/go-resilience/resilience/internal/keyed"
	"github.com/go-resilience/resilience/throttle/internal/figures"
)

// ErrLimited is matched by every [*LimitedError].
var ErrLimited = errors.New("throttle: limited")

// ErrOutage is matched where Redis, which keeps a fleet's limit, cannot be reached.
var ErrOutage = errors.New("throttle: shared limit cannot be reached")

// A Reason says why a call was refused.
type Reason string

const (
	OverLimit        Reason = "over the limit"     // and the call was not to wait
	OverQuota        Reason = "over the quota"     // for which no call waits
	WaitTooLong      Reason = "wait too long"      // longer than MaxWait
	DeadlineTooClose Reason = "deadline too close" // that of ctx
	ContextEnded     Reason = "context ended"      // while the call waited
	TooCostly        Reason = "too costly"         // more tokens than there can ever be at once
	CoolingDown      Reason = "cooling down"       // by Cool of package fleet
	Outage           Reason = "outage"             // of the Redis of package fleet
	Shed             Reason = "shed"               // by package adaptive
)

// never is the After of a call that can never be admitted.
const never = time.Duration(math.MaxInt64)

// A LimitedError reports a refused call. It matches [ErrLimited] and, by its Reason,
// [context.DeadlineExceeded] (DeadlineTooClose), the error and the cause of ctx (ContextEnded),
// or [ErrOutage] and the error of Redis (Outage).
type LimitedError struct {
	Name   string // of the limit
	Key    string // of a Group, at most 100 bytes of its text, or "(other keys)"; of a fleet's meter
	Reason Reason
	Limit  int   // the Burst at that time, or N of the Quota
	Quota  Quota // of OverQuota: that whose window is over last; of TooCostly: that which is too small, or zero
	Cost   int   // of the call, in tokens
	Left   int   // of a fleet's limit
	Waited time.Duration
	After  time.Duration // see RetryAfter
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

func (e *LimitedError) Is(target error) bool { return target == ErrLimited }

func (e *LimitedError) Unwrap() error { return e.Err }

// RetryAfter returns how long it takes until the call could be admitted, if no other takes tokens
// meanwhile. Zero means not known.
func (e *LimitedError) RetryAfter() time.Duration {
	if e.After == never {
		return 0
	}
	return e.After
}

// Retryable is false for [TooCostly].
func (e *LimitedError) Retryable() bool { return e.Reason != TooCostly }

func (e *LimitedError) Refused() bool { return true }

// An EventKind says what an [Event] is.
type EventKind string

const (
	EventRefused     EventKind = "refused"
	EventWaited      EventKind = "waited"       // and was admitted
	EventOutageBegan EventKind = "outage began" // Redis no longer answers for a limit of a fleet
	EventRecovered   EventKind = "recovered"    // Redis answers again
)

// An Event is what an observer is told.
type Event struct {
	Kind   EventKind
	Name   string
	Key    string // as in LimitedError
	Cost   int
	Waited time.Duration
	Reason Reason // of EventRefused
	Err    error  // of EventRefused: the [*LimitedError]; of EventOutageBegan: the cause
}

func (e Event) Level() int {
	if e.Kind == EventWaited {
		return -4
	}
	return 4
}

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

// A Decision says what the headers of an HTTP response tell a client. With Quotas it is of
// the limit with the fewest tokens left or, if quotas have too few, of that whose window is over
// last.
type Decision struct {
	OK         bool
	Quota      Quota         // zero if it is of the Rate
	Limit      int           // the Burst, or N of the Quota
	Window     time.Duration // in which the Burst refills, or that of the Quota
	Remaining  int           // tokens, after this decision
	RetryAfter time.Duration // until the call could be admitted: 0 if it was, the longest Duration if it never can be
	ResetAfter time.Duration // until Remaining is Limit
}

// Stats is a snapshot of a [Limiter], or of all keys of a [Group]. Its counters never go back.
type Stats struct {
	Admitted int64            // calls; one whose ctx had already ended counts nowhere
	Refused  int64            // calls
	Refusals map[Reason]int64 // calls of Refused
	Spent    int64            // tokens, those given back included
	Refunded int64            // tokens that were given back
	Forgiven int64            // tokens of debts
	Evicted  int64            // keys of a Group
	Overflow int64            // calls whose key found no room in a Group

	Queued int // calls that wait now
	Keys   int // that a Group holds
}

func (s *Stats) refuse(why Reason) {
	if s.Refusals == nil {
		s.Refusals = map[Reason]int64{}
	}
	s.Refused++
	s.Refusals[why]++
}

func (s Stats) figures() []describe.Figure {
	return figures.Calls(s.Admitted, s.Refusals,
		OverLimit, OverQuota, WaitTooLong, DeadlineTooClose, ContextEnded, TooCostly)
}
