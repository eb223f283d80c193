package throttle

import (
	"slices"
	"time"
)

// Totals are counted from New or NewGroup on. They never go back: neither an Update nor
// a key that a Group evicts resets them.
type Totals struct {
	Admitted int64            // calls that got their tokens
	Refused  int64            // calls that did not; a call whose ctx had already ended is in neither
	Refusals map[Reason]int64 // the calls of Refused, by reason
	Spent    int64            // tokens, those given back included
	Refunded int64            // tokens that were given back
	Waited   int64            // calls of Admitted that had to wait
	WaitTime time.Duration    // how long these calls waited, in all
}

// Stats is a snapshot of a [Limiter].
type Stats struct {
	Totals

	Queued int // calls that wait now
}

func (l *ledger) totals() Totals {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.did
	t.Refused, t.Refusals = byReason(l.refusals)
	return t
}

// reasons are those that Refusals count: all but Shed, of which an Adaptive has no other.
var reasons = [...]Reason{
	OverLimit, OverQuota, WaitTooLong, QueueFull, Displaced, DeadlineTooClose, ContextEnded, TooCostly, Outage,
}

// A tally counts refused calls by their place in reasons.
type tally [len(reasons)]int64

// index returns the place of r in reasons.
func (r Reason) index() int { return slices.Index(reasons[:], r) }

// byReason returns the sum of the refused calls, and Refusals.
func byReason(n tally) (sum int64, refusals map[Reason]int64) {
	for i, reason := range reasons {
		if n[i] == 0 {
			continue
		}
		if refusals == nil {
			refusals = map[Reason]int64{}
		}
		refusals[reason] = n[i]
		sum += n[i]
	}
	return sum, refusals
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

// Stats returns a snapshot.
func (g *Group[K]) Stats() GroupStats {
	s := GroupStats{
		Evicted: g.evicted.Load(), Overflow: g.overflow.Load(),
		Keys: g.members.Len(), Queued: int(g.waiters.now.Load()),
	}
	var refusals tally
	for i := range g.ledgers {
		g.ledgers[i].addTo(&s.Totals, &refusals)
	}
	s.Refused, s.Refusals = byReason(refusals)
	return s
}

func (l *ledger) addTo(t *Totals, refusals *tally) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t.Admitted += l.did.Admitted
	t.Spent += l.did.Spent
	t.Refunded += l.did.Refunded
	t.Waited += l.did.Waited
	t.WaitTime += l.did.WaitTime
	for i, n := range l.refusals {
		refusals[i] += n
	}
}

// SharedStats is a snapshot of what a [Shared] has done in this process. Its counters
// never go back.
type SharedStats struct {
	Admitted int64            // calls
	Refused  int64            // calls
	Refusals map[Reason]int64 // the calls of Refused, by reason
	Spent    int64            // tokens, those given back included
	Refunded int64            // tokens that were given back
	Asked    int64            // round trips to Redis
	AskTime  time.Duration    // how long the round trips that have ended took, in all
	Failed   int64            // round trips without a valid answer
	Alone    int64            // calls that were decided by OnOutage
	Outages  int64            // outages that have begun, each of one hash slot

	Down bool // whether there is an outage now, of at least one hash slot
}

// AdaptiveStats is a snapshot of what an [Adaptive] has done. Its counters never go back.
type AdaptiveStats struct {
	Sent      int64 // calls
	Accepted  int64 // calls that have ended and that the server accepted
	Throttled int64 // calls that the server turned away or could not take
	Refused   int64 // calls that were shed

	Probability float64 // of shedding a call of the least important level now
}
