package bulkhead

import (
	"iter"
	"slices"
	"sync/atomic"
	"time"
)

// Totals are counted from New or NewGroup on. They never go back: neither an Update nor
// a bulkhead that a Group evicts resets them.
type Totals struct {
	Admitted int64            // calls that got their slots, or cost nothing
	Refused  int64            // calls that did not; a call whose ctx had already ended is in neither
	Refusals map[Reason]int64 // the calls of Refused, by reason
	Waited   int64            // calls of Admitted that had to wait
	WaitTime time.Duration    // how long these calls waited, in all
}

func (t *Totals) add(more Totals) {
	t.Admitted += more.Admitted
	t.Waited += more.Waited
	t.WaitTime += more.WaitTime
	t.Refused += more.Refused
	for reason, n := range more.Refusals {
		t.refused(reason, n)
	}
}

// refused adds n calls that were refused for a reason to Refusals.
func (t *Totals) refused(reason Reason, n int64) {
	if n == 0 {
		return
	}
	if t.Refusals == nil {
		t.Refusals = map[Reason]int64{}
	}
	t.Refusals[reason] += n
}

// Stats is a snapshot of a [Bulkhead].
type Stats struct {
	Totals

	Limit    int   // slots; during a probe of an adaptive limit, the lowered one
	InFlight int   // slots that are taken; above Limit after that has shrunk
	Queued   []int // calls that wait now, by level

	LongestWait time.Duration // how long the oldest of the calls that wait now has waited

	// LongestHeld is the age of the oldest slot that was taken by Begin or belongs to a
	// response, which a resiliencehttp.Transport holds until its body has been read. If
	// it grows without end, a done is never called or a body is never closed. Slots of
	// other calls are not timed.
	LongestHeld time.Duration

	// Shares are up to ten shares, those with most slots and waiting calls first. See
	// Config.Share.
	Shares []ShareStats
}

// ShareStats are the figures of one share of a [Bulkhead], at one moment.
type ShareStats struct {
	Share    string // at most the first 100 bytes of it
	InFlight int    // slots that its calls have
	Queued   int    // calls that wait now
}

// GroupStats is a snapshot of a [Group].
type GroupStats struct {
	// Totals are the sums over all bulkheads of the group, also the shared one and those
	// that the group has evicted.
	Totals

	Keys int // bulkheads that the group holds, without the shared one

	// Sums over these bulkheads and the shared one, as in Stats.
	Limit    int
	InFlight int
	Queued   []int // by level, up to the most Levels that one of them has

	// The longest of any of them, as in Stats.
	LongestWait time.Duration
	LongestHeld time.Duration
}

// reasons are all; the most frequent come first.
var reasons = [...]Reason{
	NoSlot, QueueFull, Displaced, WaitTooLong, DeadlineTooClose, ContextEnded, StandingQueue, TooCostly,
}

// index returns the place of r in reasons.
func (r Reason) index() int { return slices.Index(reasons[:], r) }

// counters count calls. The word of the slots counts the calls that found theirs free.
type counters struct {
	costless atomic.Int64 // calls admitted without a slot
	waited   atomic.Int64 // calls admitted after a wait
	waitTime atomic.Int64 // of these, in nanoseconds
	refused  [len(reasons)]atomic.Int64
}

func (c *counters) totals() (t Totals) {
	t.Waited, t.WaitTime = c.waited.Load(), time.Duration(c.waitTime.Load())
	t.Admitted = c.costless.Load() + t.Waited
	for i, reason := range reasons {
		n := c.refused[i].Load()
		t.refused(reason, n)
		t.Refused += n
	}
	return t
}

// Stats returns a snapshot. It is cheap enough to be taken each second.
func (b *Bulkhead) Stats() Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.folded += b.queue.slots.fold()
	s := Stats{
		Totals:      b.counts.totals(),
		Queued:      make([]int, len(b.queue.levels)),
		Limit:       int(b.queue.limit.Load()),
		LongestHeld: b.longestHeld(),
		Shares:      b.queue.shares.busiest(),
	}
	s.Admitted += b.folded
	s.InFlight = s.Limit - freeIn(b.queue.slots.word.Load())
	for level := range b.queue.levels {
		at := &b.queue.levels[level]
		s.Queued[level] = at.waiters
		for l := at.turns.first; l != nil; l = l.later {
			s.LongestWait = max(s.LongestWait, b.now()-l.oldest.since)
		}
	}
	return s
}

// Stats returns a snapshot.
func (g *Group[K]) Stats() (s GroupStats) {
	s.include(g.members.Shared())
	g.members.Shards(func(shard int, members iter.Seq[*Bulkhead]) {
		s.Totals.add(g.evicted[shard])
		for b := range members {
			s.include(b)
			s.Keys++
		}
	})
	return s
}

func (s *GroupStats) include(b *Bulkhead) {
	of := b.Stats()
	s.Totals.add(of.Totals)
	s.Limit += of.Limit
	s.InFlight += of.InFlight
	s.Queued = append(s.Queued, make([]int, max(len(of.Queued)-len(s.Queued), 0))...)
	for level, n := range of.Queued {
		s.Queued[level] += n
	}
	s.LongestWait = max(s.LongestWait, of.LongestWait)
	s.LongestHeld = max(s.LongestHeld, of.LongestHeld)
}
