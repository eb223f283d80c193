package throttle

import (
	"iter"
	"sync/atomic"
	"time"
)

// Totals are counted from New or NewGroup on. They never go back: neither an Update nor
// a key that a Group evicts resets them.
type Totals struct {
	Admitted int64         // calls that got their tokens
	Refused  int64         // calls that did not; a call whose ctx had already ended is in neither
	Refusals Refusals      // the calls of Refused, by reason
	Spent    int64         // tokens, those given back included
	Refunded int64         // tokens that were given back
	Waited   int64         // calls of Admitted that had to wait
	WaitTime time.Duration // how long these calls waited, in all
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
	t.Refused = t.Refusals.Total()
	return t
}

// GroupStats is a snapshot of a [Group].
type GroupStats struct {
	// Totals are the sums over all keys of the group, also those that it has evicted,
	// and the calls whose key found no room.
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
	for i := range g.ledgers {
		s.add(g.ledgers[i].totals())
	}
	return s
}

func (t *Totals) add(more Totals) {
	t.Admitted += more.Admitted
	t.Refused += more.Refused
	t.Refusals.add(more.Refusals)
	t.Spent += more.Spent
	t.Refunded += more.Refunded
	t.Waited += more.Waited
	t.WaitTime += more.WaitTime
}

// SharedStats is a snapshot of what a [Shared] has done in this process. Its counters
// never go back.
type SharedStats struct {
	Admitted int64         // calls
	Refused  int64         // calls
	Refusals Refusals      // the calls of Refused, by reason
	Spent    int64         // tokens, those given back included
	Refunded int64         // tokens that were given back
	Asked    int64         // round trips to Redis
	AskTime  time.Duration // how long the round trips that have ended took, in all
	Failed   int64         // round trips without a valid answer
	Alone    int64         // calls that were decided by OnOutage
	Outages  int64         // outages that have begun, each of one hash slot

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

// Refusals counts refused calls by their [Reason]. [Shed] is counted in
// [AdaptiveStats].Refused.
type Refusals struct {
	OverLimit        int64
	OverQuota        int64
	WaitTooLong      int64
	QueueFull        int64
	Displaced        int64
	DeadlineTooClose int64
	ContextEnded     int64
	TooCostly        int64
	TooManyKeys      int64
	Outage           int64
}

// of returns the field of a reason.
func (r *Refusals) of(why Reason) *int64 {
	switch why {
	case OverLimit:
		return &r.OverLimit
	case OverQuota:
		return &r.OverQuota
	case WaitTooLong:
		return &r.WaitTooLong
	case QueueFull:
		return &r.QueueFull
	case Displaced:
		return &r.Displaced
	case DeadlineTooClose:
		return &r.DeadlineTooClose
	case ContextEnded:
		return &r.ContextEnded
	case TooCostly:
		return &r.TooCostly
	case TooManyKeys:
		return &r.TooManyKeys
	case Outage:
		return &r.Outage
	}
	panic("throttle: no calls are counted for the reason " + string(why))
}

// counted are the reasons that Refusals has fields for.
var counted = []Reason{
	OverLimit, OverQuota, WaitTooLong, QueueFull, Displaced, DeadlineTooClose, ContextEnded, TooCostly, TooManyKeys, Outage,
}

// All returns every reason with its number, zeros included.
func (r Refusals) All() iter.Seq2[Reason, int64] {
	return func(yield func(Reason, int64) bool) {
		for _, why := range counted {
			if !yield(why, *r.of(why)) {
				return
			}
		}
	}
}

// Total returns the number of refused calls.
func (r Refusals) Total() (sum int64) {
	for _, n := range r.All() {
		sum += n
	}
	return sum
}

func (r *Refusals) add(more Refusals) {
	for _, why := range counted {
		*r.of(why) += *more.of(why)
	}
}

// A tally is Refusals that are safe for concurrent use.
type tally struct {
	_ [0]atomic.Int64 // aligns the fields of n on 32-bit systems
	n Refusals
}

func (t *tally) add(why Reason) { atomic.AddInt64(t.n.of(why), 1) }

func (t *tally) load() (r Refusals) {
	for _, why := range counted {
		*r.of(why) = atomic.LoadInt64(t.n.of(why))
	}
	return r
}
