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
	// Every [*LimitedError] matches ErrLimited.
	ErrLimited = errors.New("throttle: limited")
	// An error matches ErrOutage if it reports that a shared limit cannot be reached.
	ErrOutage = errors.New("throttle: shared limit cannot be reached")
)

// A Reason is the reason why a call was refused.
type Reason string

const (
	OverLimit        Reason = "over_limit"         // there are not enough tokens, and the call may not wait
	OverQuota        Reason = "over_quota"         // a quota does not have enough tokens; no call waits for a quota
	WaitTooLong      Reason = "wait_too_long"      // the call would wait, or has waited, for longer than MaxWait
	DeadlineTooClose Reason = "deadline_too_close" // the tokens would be available only after the deadline of ctx
	ContextEnded     Reason = "context_ended"      // ctx was done while the call waited
	TooCostly        Reason = "too_costly"         // the call costs more tokens than the limit can ever hold
	CoolingDown      Reason = "cooling_down"       // a cooldown of package fleet is in effect
	Outage           Reason = "outage"             // package fleet cannot reach Redis
	Shed             Reason = "shed"               // package adaptive did not send the call
)

// never is the After of a call that can never be admitted.
const never = time.Duration(math.MaxInt64)

// A LimitedError reports a refused call. Every LimitedError matches [ErrLimited]. For the following reasons, a
// LimitedError also matches other errors:
//
//   - DeadlineTooClose: [context.DeadlineExceeded].
//   - ContextEnded: the error and the cause of ctx.
//   - Outage: [ErrOutage] and the error of Redis.
//
// If several quotas refuse a call, Quota is the quota whose window ends last. If a quota is too small for the call,
// Quota is that quota.
//
// For a [Group], Key is the call's key as a text, cut to at most 100 bytes. If the Group has no room for a key, Key
// is "(other keys)". For package fleet, Key is the key of the meter that refused the call. If Reason is Outage, Key
// is the key of the call's first meter.
type LimitedError struct {
	Name   string // the limit's name
	Key    string // the key of a Group, or of a meter of package fleet
	Reason Reason
	Limit  int           // the burst when the call was refused, or N of Quota; 0 if the limit admits nothing
	Quota  Quota         // the quota that refused the call; zero if the rate refused the call
	Cost   int           // the call's cost in tokens
	Left   int           // the number of tokens or slots that a limit of package fleet has left; 0 for other limits
	Waited time.Duration // the time that the call waited
	After  time.Duration // the time until the call could be admitted; the longest Duration if it can never be admitted
	Err    error         // the cause, or nil
}

// Error returns a text with the name, the key, the reason, RetryAfter and the cause.
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

// Is reports whether target is [ErrLimited]. For the reason DeadlineTooClose, it also returns true for
// [context.DeadlineExceeded]. For the reason Outage, it also returns true for [ErrOutage].
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

// RetryAfter returns the time until the call could be admitted, if no other call takes tokens before then. Zero means
// that the time is unknown, or that the call can never be admitted.
func (e *LimitedError) RetryAfter() time.Duration {
	if e.After == never {
		return 0
	}
	return e.After
}

// Retryable reports whether the call could be admitted later. Retryable returns false if the call is [TooCostly], or
// if the limit admits nothing.
func (e *LimitedError) Retryable() bool { return e.Reason != TooCostly && e.After != never }

// Refused returns true, because the call did not run.
func (e *LimitedError) Refused() bool { return true }

// An EventKind is the kind of an [Event].
type EventKind string

const (
	EventRefused     EventKind = "refused"      // a call was refused
	EventWaited      EventKind = "waited"       // a call was admitted after a wait
	EventOutageBegan EventKind = "outage_began" // Redis cannot be reached
	EventOutageEnded EventKind = "outage_ended" // Redis can be reached again
)

// An Event reports a refused call, a call that waited, or the start or end of an outage.
type Event struct {
	Kind   EventKind
	Name   string        // the limit's name
	Key    string        // the key, as in [LimitedError]; for an outage, the Redis node
	Cost   int           // the call's cost in tokens
	Waited time.Duration // the time that the call waited
	Reason Reason        // the reason of an EventRefused
	Err    error         // the [*LimitedError] of a refusal, or the cause of an outage
}

// describe converts e to an event of package policy.
func (e Event) describe() policy.Event {
	return events.Describe(e.Name, e.Key, string(e.Kind), string(e.Reason), e.Waited, e.Err)
}

// A Decision is the state of a limit after a call was admitted or refused. A server can send the Decision in the
// headers of its response. If the limit has quotas, the Decision describes the rate or the quota that has the
// fewest tokens left. If quotas refused the call, the Decision describes the refusing quota whose window ends last.
// If the call can never be admitted, RetryAfter is the longest Duration. If there is no limit, Remaining is
// [math.MaxInt].
type Decision struct {
	Admitted   bool          // whether the call was admitted
	Quota      Quota         // the quota that the decision describes; zero if it describes the rate
	Limit      int           // the burst, or N of the quota; 0 if the limit admits nothing, Unlimited if there is no limit
	Window     time.Duration // the time in which a whole burst refills, or the length of the quota's window
	Remaining  int           // the tokens that remain after this decision
	RetryAfter time.Duration // the time until the call could be admitted; 0 if it was admitted or its ctx was already done
	ResetAfter time.Duration // the time until Remaining equals Limit
}

// Stats are the metrics of a [Limiter], or of all keys of a [Group]. Counters never decrease. A call is not counted
// if its ctx was already done when the call started.
type Stats struct {
	Admitted int64            `counter:"calls{outcome=admitted,reason=}"`
	Refused  int64            // the number of refused calls
	Refusals map[Reason]int64 `counter:"calls{outcome=refused,reason=*}"` // every reason has an entry
	Spent    int64            `counter:"tokens{outcome=spent}"`           // tokens that calls took, including Refunded
	Refunded int64            `counter:"tokens{outcome=refunded}"`        // tokens that were refunded
	Forgiven int64            `counter:"tokens{outcome=forgiven}"`        // tokens that were used but not charged
	Evicted  int64            `counter:"evictions"`                       // keys that a Group evicted
	Overflow int64            `counter:"overflows"`                       // calls whose key found no room in a Group

	Queued int `gauge:"queued"` // calls that are waiting
	Keys   int `gauge:"keys"`   // keys that a Group holds
}

// newStats returns Stats. Refusals has an entry for every reason for which a Limiter or a Group refuses calls.
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
