package throttle

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/go-resilience/resilience/internal/keyed"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/throttle/internal/events"
)

var (
	// ErrLimited is matched by every [*LimitedError].
	ErrLimited = errors.New("throttle: limited")
	// ErrOutage is matched by errors which report that a shared limit cannot be reached.
	ErrOutage = errors.New("throttle: shared limit cannot be reached")
)

// A Reason is why a call was refused.
type Reason string

const (
	OverLimit        Reason = "over_limit"         // and the call may not wait
	OverQuota        Reason = "over_quota"         // no call waits for a quota
	WaitTooLong      Reason = "wait_too_long"      // longer than MaxWait
	DeadlineTooClose Reason = "deadline_too_close" // the tokens come after the deadline of ctx
	ContextEnded     Reason = "context_ended"      // while the call waited
	TooCostly        Reason = "too_costly"         // more tokens than there can ever be at once
	CoolingDown      Reason = "cooling_down"       // after Cooldown of package fleet
	Outage           Reason = "outage"             // of the Redis of package fleet
	Shed             Reason = "shed"               // by package adaptive
)

// never is the After of a call that can never be admitted.
const never = time.Duration(math.MaxInt64)

// A LimitedError reports a refused call. It matches [ErrLimited] and, depending on its Reason,
// [context.DeadlineExceeded], the error and the cause of ctx, or [ErrOutage] and the error of Redis.
type LimitedError struct {
	Name   string // of the limit
	Key    string // of the group member, at most 100 bytes of its text, or "(other keys)"; of the fleet's meter
	Reason Reason
	Limit  int   // the burst at that time, or N of the quota; 0 if it admits nothing
	Quota  Quota // that refused the call: the one whose window ends last, or that is too small; zero if the rate did
	Cost   int   // of the call, in tokens
	Left   int   // tokens, of a fleet's limit
	Waited time.Duration
	After  time.Duration // see RetryAfter; the longest Duration if the call can never be admitted
	Err    error         // the cause, or nil
}

// Error returns a text with the name, the key, the reason and RetryAfter.
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
		return fmt.Sprintf("throttle: %slimited (too_costly): %d tokens are more than %s can give", label, e.Cost, most)
	}
	text := fmt.Sprintf("throttle: %slimited (%s", label, e.Reason)
	if e.Reason == OverQuota {
		text += " of " + e.Quota.String()
	}
	text += ")"
	if e.RetryAfter() > 0 {
		text += fmt.Sprintf(", retry after %v", e.After)
	}
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

// Is reports whether target is [ErrLimited], or what Reason stands for.
func (e *LimitedError) Is(target error) bool {
	switch target {
	case ErrLimited:
		return true
	case context.DeadlineExceeded:
		return e.Reason == DeadlineTooClose
	case ErrOutage:
		return e.Reason == Outage
	}
	return false
}

// Unwrap returns Err.
func (e *LimitedError) Unwrap() error { return e.Err }

// RetryAfter returns how long it takes until the call could be admitted, if no other call takes tokens before
// that. Zero means unknown, or never.
func (e *LimitedError) RetryAfter() time.Duration {
	if e.After == never {
		return 0
	}
	return e.After
}

// Retryable returns false if the call can never be admitted: if it is [TooCostly], or the limit admits nothing.
func (e *LimitedError) Retryable() bool { return e.Reason != TooCostly && e.After != never }

// Refused returns true: the call was not made.
func (e *LimitedError) Refused() bool { return true }

// An EventKind is the kind of an [Event].
type EventKind string

const (
	EventRefused     EventKind = "refused"      // a call was refused
	EventWaited      EventKind = "waited"       // a call was admitted after a wait
	EventOutageBegan EventKind = "outage_began" // Redis cannot be reached
	EventOutageEnded EventKind = "outage_ended" // Redis can be reached again
)

// An Event is something that happened to a limit.
type Event struct {
	Kind   EventKind
	Name   string // of the limit
	Key    string // as in [LimitedError]; of an outage, the node
	Cost   int    // of the call, in tokens
	Waited time.Duration
	Reason Reason // of EventRefused
	Err    error  // the [*LimitedError] of a refusal, or the cause of an outage
}

// describe converts e to the form that the tools read.
func (e Event) describe() policy.Event {
	return events.Describe(e.Name, e.Key, string(e.Kind), string(e.Reason), e.Waited, e.Err)
}

// A Decision is what the headers of a response tell a client about its limit. With quotas, it is about the limit
// with the fewest tokens left or, if a quota refused the call, about the quota whose window ends last.
type Decision struct {
	Admitted   bool
	Quota      Quota         // zero if the decision is about the rate
	Limit      int           // the burst, or N of the quota; 0 if it admits nothing, Unlimited without a limit
	Window     time.Duration // in which the burst refills, or that of the quota
	Remaining  int           // tokens, after this decision
	RetryAfter time.Duration // until the call could be admitted; 0 if it was, the longest Duration if it never can be
	ResetAfter time.Duration // until Remaining is Limit
}

// Stats are the metrics of a [Limiter], or of all keys of a [Group]. Counters never decrease. A call whose
// ctx had ended before it began is not counted.
type Stats struct {
	Admitted int64            `counter:"calls{outcome=admitted,reason=}"`
	Refused  int64            // calls
	Refusals map[Reason]int64 `counter:"calls{outcome=refused,reason=*}"` // every reason has an entry
	Spent    int64            `counter:"tokens{outcome=spent}"`           // including those given back
	Refunded int64            `counter:"tokens{outcome=refunded}"`
	Forgiven int64            `counter:"tokens{outcome=forgiven}"` // debt beyond a burst or quota
	Evicted  int64            `counter:"evictions"`                // keys of a Group
	Overflow int64            `counter:"overflows"`                // calls whose key had no room in a Group

	Queued int `gauge:"queued"` // calls waiting
	Keys   int `gauge:"keys"`   // held by a Group
}

// newStats returns Stats with an entry for every reason for which a limit of this process refuses calls.
func newStats() Stats {
	return Stats{Refusals: map[Reason]int64{
		OverLimit: 0, OverQuota: 0, WaitTooLong: 0, DeadlineTooClose: 0, ContextEnded: 0, TooCostly: 0,
	}}
}

// refuse counts a refused call.
func (s *Stats) refuse(why Reason) {
	s.Refused++
	s.Refusals[why]++
}
