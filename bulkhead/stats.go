package bulkhead

import (
	"iter"
	"sync/atomic"
	"time"
)

// Stats are the figures of a [Bulkhead] at one moment. Admitted, Refused and Waited
// count from its start and never go back.
type Stats struct {
	Limit    int   // slots
	InFlight int   // slots that are taken; above Limit after that has shrunk
	Queued   []int // calls that wait, by level

	Admitted int64    // calls that got their slots
	Refused  Refusals // calls that did not; a call whose ctx had ended before is in neither
	Waited   int64    // calls of Admitted that had to wait

	LongestWait time.Duration // how long the oldest of the calls that wait now has waited

	// LongestHeld is the age of the oldest slot that was taken by Begin or belongs to a
	// response, which a resiliencehttp.Transport holds until its body has been read. If
	// it grows without end, a done is never called or a body is never closed. Slots of
	// other calls are not timed.
	LongestHeld time.Duration
}

// Refusals are numbers of refused calls, by [Reason].
type Refusals struct {
	NoSlot           int64
	QueueFull        int64
	Displaced        int64
	WaitTooLong      int64
	DeadlineTooClose int64
	ContextEnded     int64
	Shed             int64
	TooCostly        int64
	TooManyKeys      int64 // by a Group
}

var reasons = [...]Reason{
	NoSlot, QueueFull, Displaced, WaitTooLong, DeadlineTooClose, ContextEnded, Shed, TooCostly, TooManyKeys,
}

func (r *Refusals) of(reason Reason) *int64 {
	return [...]*int64{
		&r.NoSlot, &r.QueueFull, &r.Displaced, &r.WaitTooLong, &r.DeadlineTooClose, &r.ContextEnded,
		&r.Shed, &r.TooCostly, &r.TooManyKeys,
	}[reason.index()]
}

// index returns the place of r in reasons.
func (r Reason) index() int {
	switch r {
	case NoSlot:
		return 0
	case QueueFull:
		return 1
	case Displaced:
		return 2
	case WaitTooLong:
		return 3
	case DeadlineTooClose:
		return 4
	case ContextEnded:
		return 5
	case Shed:
		return 6
	case TooCostly:
		return 7
	default: // TooManyKeys
		return 8
	}
}

// All returns every reason with its number, zeros included.
func (r Refusals) All() iter.Seq2[Reason, int64] {
	return func(yield func(Reason, int64) bool) {
		for _, reason := range reasons {
			if !yield(reason, *r.of(reason)) {
				return
			}
		}
	}
}

// Total returns the number of refused calls.
func (r Refusals) Total() (n int64) {
	for _, of := range r.All() {
		n += of
	}
	return n
}

// refusalCounts count refused calls, by the index of their Reason in reasons.
type refusalCounts [len(reasons)]atomic.Int64

func (c *refusalCounts) add(reason Reason) { c[reason.index()].Add(1) }

func (c *refusalCounts) load() (r Refusals) {
	for i, reason := range reasons {
		*r.of(reason) = c[i].Load()
	}
	return r
}

// Stats returns the present figures. It is cheap enough to be called each second.
func (b *Bulkhead) Stats() Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.folded += b.slots.fold()
	s := Stats{
		Queued:      make([]int, len(b.queue.lines)),
		Limit:       int(b.limit.Load()),
		Refused:     b.refused.load(),
		Waited:      b.waited.Load(),
		LongestHeld: b.longestHeld(),
	}
	s.Admitted = b.folded + s.Waited
	s.InFlight = s.Limit - freeIn(b.slots.word.Load())
	for level := range b.queue.lines {
		l := &b.queue.lines[level]
		s.Queued[level] = l.waiters
		if l.oldest != nil {
			s.LongestWait = max(s.LongestWait, b.now()-l.oldest.since)
		}
	}
	return s
}
