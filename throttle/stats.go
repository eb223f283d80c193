package throttle

import (
	"iter"
	"sync/atomic"
	"time"
)

// Stats is a snapshot of what a [Limiter] has done. Its counters never go back.
type Stats struct {
	Admitted int64         // calls
	Refused  int64         // calls
	Refusals Refusals      // the calls of Refused, by reason
	Spent    int64         // tokens, those given back included
	Refunded int64         // tokens that were given back
	Waited   int64         // calls that were admitted after a wait
	WaitTime time.Duration // how long these calls waited, in all

	Level   int // the result of Level now
	Waiting int // calls that wait now
}

// Stats returns a snapshot.
func (l *Limiter) Stats() Stats {
	s := l.counters()
	s.Level = l.Level()
	return s
}

// counters returns the Stats without the Level.
func (l *Limiter) counters() Stats {
	single := l.single.Load()
	reasons := l.refused.load()
	return Stats{
		Admitted: single + l.others.Load(),
		Refused:  reasons.Total(),
		Refusals: reasons,
		Spent:    single + l.spent.Load(),
		Refunded: l.refunded.Load(),
		Waited:   l.queue.waited.Load(),
		WaitTime: time.Duration(l.queue.waitTime.Load()),
		Waiting:  int(l.queue.waiting.Load()),
	}
}

// GroupStats is a snapshot of what a [Group] has done, also for the keys that it has
// forgotten. Its counters never go back.
type GroupStats struct {
	Admitted int64         // calls
	Refused  int64         // calls
	Refusals Refusals      // the calls of Refused, by reason
	Spent    int64         // tokens, those given back included
	Refunded int64         // tokens that were given back
	Waited   int64         // calls that were admitted after a wait
	WaitTime time.Duration // how long these calls waited, in all
	Evicted  int64         // keys that were forgotten
	Overflow int64         // calls of Admitted and Refused whose key found no room

	Keys    int // keys that are held now
	Waiting int // calls that wait now
}

// Stats returns a snapshot.
func (g *Group[K]) Stats() GroupStats {
	var all shardStats
	for i := range g.shards {
		g.shards[i].addTo(&all)
	}
	all.add(g.overflow.counters())
	return GroupStats{
		Admitted: all.Admitted, Refused: all.Refused, Refusals: all.Refusals,
		Spent: all.Spent, Refunded: all.Refunded, Waited: all.Waited, WaitTime: all.WaitTime,
		Evicted: all.evicted, Overflow: all.overflow,
		Keys: int(g.keys.Load()), Waiting: int(g.waiters.now.Load()),
	}
}

func (s *shard[K]) addTo(all *shardStats) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all.add(s.stats.Stats)
	all.evicted += s.stats.evicted
	all.overflow += s.stats.overflow
	for _, o := range s.own {
		all.add(o.counters())
	}
}

// add adds the counters of another limit.
func (s *Stats) add(did Stats) {
	s.Admitted += did.Admitted
	s.Refused += did.Refused
	s.Refusals.add(did.Refusals)
	s.Spent += did.Spent
	s.Refunded += did.Refunded
	s.Waited += did.Waited
	s.WaitTime += did.WaitTime
}

// SharedStats is a snapshot of what a [Shared] has done in this process. Its counters
// never go back.
type SharedStats struct {
	Admitted int64         // calls
	Refused  int64         // calls
	Refusals Refusals      // the calls of Refused, by reason
	Spent    int64         // tokens
	Asked    int64         // round trips to Redis
	AskTime  time.Duration // how long the round trips that have ended took, in all
	Failed   int64         // round trips without a valid answer
	Alone    int64         // calls that were decided by OnOutage
	Outages  int64         // outages that have begun, each of one hash slot

	Down bool // whether there is an outage now, of at least one hash slot
}

// Stats returns a snapshot.
func (s *Shared) Stats() SharedStats {
	reasons := s.refused.load()
	return SharedStats{
		Admitted: s.admitted.Load(), Refused: reasons.Total(), Refusals: reasons, Spent: s.spent.Load(),
		Asked: s.asked.Load(), AskTime: time.Duration(s.askTime.Load()), Failed: s.failed.Load(),
		Alone: s.alone.Load(), Outages: s.outages.begun.Load(), Down: s.outages.down.Load() > 0,
	}
}

// AdaptiveStats is a snapshot of what an [Adaptive] has done. Its counters never go back.
type AdaptiveStats struct {
	Sent      int64 // calls
	Accepted  int64 // calls that have ended and that the server accepted
	Throttled int64 // calls that the server refused or could not take
	Refused   int64 // calls that were shed

	Probability float64 // of shedding a call of the least important level now
}

// Stats returns a snapshot.
func (a *Adaptive) Stats() AdaptiveStats {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.advance()
	s := a.stats
	s.Probability = a.probability(len(a.sum.requests) - 1)
	return s
}

// Refusals counts refused calls by their [Reason].
type Refusals struct {
	OverLimit        int64
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
	OverLimit, WaitTooLong, QueueFull, Displaced, DeadlineTooClose, ContextEnded, TooCostly, TooManyKeys, Outage,
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
