package bulkhead

import (
	"math"
	"time"
)

// A queue holds the calls that wait for slots, by level. While it is not empty,
// slots.word says so, and both change only under the mutex of the bulkhead.
type queue struct {
	lines   []line        // by level
	stood   time.Duration // since when it has not been empty
	pace    pace
	settled *waiter // waiters that have left and are to be told, linked by older
}

// A line holds the waiters of one level, by age.
type line struct {
	oldest, newest *waiter
	waiters        int
	cost           int // of all of them
	passed         int // slots granted out of order since the first waiter was last served

	// claim is a costly waiter that was first when the newest is, and did not fit. It
	// stays first: otherwise newer calls would take each slot before there are enough
	// for it.
	claim *waiter
}

// A waiter is a call in the queue.
type waiter struct {
	older, newer *waiter
	level        int
	cost         int
	since        time.Duration

	// Set when it leaves the queue, before ready is closed.
	ready    chan struct{}
	settled  bool
	admitted bool
	refusal  Reason // if not admitted
}

func (l *line) add(w *waiter) {
	w.older, l.newest = l.newest, w
	if w.older == nil {
		l.oldest, l.passed = w, 0
	} else {
		w.older.newer = w
	}
	l.waiters++
	l.cost += w.cost
}

func (l *line) remove(w *waiter) {
	if w.older == nil {
		l.oldest = w.newer
	} else {
		w.older.newer = w.newer
	}
	if w.newer == nil {
		l.newest = w.older
	} else {
		w.newer.older = w.older
	}
	if w == l.claim {
		l.claim = nil
	}
	l.waiters--
	l.cost -= w.cost
}

// first returns the waiter that is served first, or nil.
func (l *line) first(newestFirst bool) *waiter {
	switch {
	case !newestFirst:
		return l.oldest
	case l.claim != nil:
		return l.claim
	}
	return l.newest
}

// behind returns the waiter that is served after w, or nil.
func (l *line) behind(w *waiter, newestFirst bool) *waiter {
	if !newestFirst {
		return w.newer
	}
	next := w.older
	if w == l.claim {
		next = l.newest
	}
	if next != nil && next == l.claim {
		next = next.older
	}
	return next
}

// join takes the slots of a call or puts the call into the queue as w, if fewer than
// places calls wait. left and own are those of patience. If the call is neither queued
// nor refused, it has its slots. The mutex is held.
func (b *Bulkhead) join(w *waiter, places int, left time.Duration, own bool) (queued bool, refusal *FullError) {
	r, level, n, now := b.rules.Load(), w.level, w.cost, w.since
	var word uint64
	var displaced *waiter
	for {
		var ok bool
		if word, ok = b.admit(r, level, n, now); ok {
			return false, nil
		}
		displaced = nil
		if b.waiters.Load() >= int64(places) {
			if displaced = b.lastServed(level, b.newestFirst(r, now)); displaced == nil {
				return false, b.refusal(r, QueueFull, level, n)
			}
		}
		if n > r.most(int(b.limit.Load()), level) { // the limit may have shrunk since try looked
			return false, b.refusal(r, TooCostly, level, n)
		}
		if r.Order == FIFO && left < forever && b.queue.pace.least(b.ahead(level)+n) > left {
			reason := DeadlineTooClose
			if own {
				reason = WaitTooLong
			}
			return false, b.refusal(r, reason, level, n)
		}
		// This fails if a slot was given back since admit looked.
		if word&waiting != 0 || b.slots.word.CompareAndSwap(word, word|waiting) {
			break
		}
	}
	if word&waiting == 0 {
		b.queue.stood = now
		b.queue.pace.restart(now)
	}
	if displaced != nil {
		b.settle(displaced, false, Displaced)
	}
	b.queue.lines[level].add(w)
	b.waiters.Add(1)
	if displaced != nil || r.Order != FIFO { // displaced may have held up others; w may be first
		b.grant(r, now, 0)
	}
	return true, nil
}

// admit takes the n slots of a new call, if the call may pass the waiters that come
// before it. The mutex is held.
func (b *Bulkhead) admit(r *rules, level, n int, now time.Duration) (word uint64, ok bool) {
	kept := r.kept(int(b.limit.Load()), level)
	word, ok = b.slots.take(n, kept)
	if ok || word&waiting == 0 || freeIn(word)-kept < n {
		return word, ok
	}
	newestFirst := b.newestFirst(r, now)
	last := level // the last level of which a waiter may come before the call
	if newestFirst && b.queue.lines[level].claim == nil {
		last--
	}
	if n > b.allowance(last, newestFirst, nil) {
		return word, false
	}
	b.pass(last, n, newestFirst, nil)
	b.slots.word.Add(admitted - uint64(n))
	return word, true
}

// grant hands free slots to the waiters, in order, together with the slots that have
// just been freed. The mutex is held, and the queue was not empty when it was taken.
func (b *Bulkhead) grant(r *rules, now time.Duration, freed int) {
	newestFirst := b.newestFirst(r, now)
	word := b.slots.word.Load() + uint64(freed)
	taken := b.grantLevels(r, freeIn(word), newestFirst)
	if r.Order == CoDel && newestFirst && taken > 0 && b.refuseStanding(r, now) {
		taken += b.grantLevels(r, freeIn(word)-taken, newestFirst) // waiters that a refused one held up
	}
	word -= uint64(taken)
	if b.waiters.Load() == 0 {
		word &^= waiting
	}
	b.slots.word.Store(word)
}

// grantLevels hands out of free slots to the waiters of all levels and returns how
// many.
func (b *Bulkhead) grantLevels(r *rules, free int, newestFirst bool) (taken int) {
	limit := int(b.limit.Load())
	for level := range b.queue.lines {
		taken += b.grantLevel(level, free-taken-r.kept(limit, level), newestFirst)
	}
	return taken
}

// grantLevel hands out of room slots to the waiters of one level and returns how
// many.
func (b *Bulkhead) grantLevel(level, room int, newestFirst bool) (taken int) {
	l := &b.queue.lines[level]
	if newestFirst && l.claim == nil && l.newest != nil && room > 0 && room < l.newest.cost {
		l.claim = l.newest
	}
	var next *waiter
	for w := l.first(newestFirst); w != nil && taken < room; w = next {
		next = l.behind(w, newestFirst)
		if w.cost > room-taken {
			continue
		}
		allowed := b.allowance(level, newestFirst, w)
		if allowed <= 0 {
			break
		}
		if w.cost <= allowed {
			b.pass(level, w.cost, newestFirst, w)
			taken += w.cost
			b.settle(w, true, "")
		}
	}
	return taken
}

// allowance returns how many slots a call may take before the first waiters of the
// levels up to last, which cost more than it does. A waiter does not pass itself.
func (b *Bulkhead) allowance(last int, newestFirst bool, w *waiter) int {
	allowed := math.MaxInt
	for level := range last + 1 {
		l := &b.queue.lines[level]
		if first := l.first(newestFirst); first != nil && first != w {
			allowed = min(allowed, int(b.limit.Load())-l.passed)
		}
	}
	return allowed
}

// pass counts n slots on the levels up to last as taken by w, or by a new call if that
// is nil. The line counts them and not its first waiter: otherwise no slots would ever
// be kept if each first waiter gives up before it is served.
func (b *Bulkhead) pass(last, n int, newestFirst bool, w *waiter) {
	for level := range last + 1 {
		l := &b.queue.lines[level]
		switch l.first(newestFirst) {
		case nil:
		case w:
			l.passed = 0
		default:
			l.passed += n
		}
	}
}

// settle takes w out of the queue. unlock tells it.
func (b *Bulkhead) settle(w *waiter, admitted bool, refusal Reason) {
	b.queue.lines[w.level].remove(w)
	b.waiters.Add(-1)
	w.settled, w.admitted, w.refusal = true, admitted, refusal
	w.older, b.queue.settled = b.queue.settled, w
}

// unlock releases the mutex and then tells the waiters that were settled under it.
// Waking them takes longer than the rest of what happens under the mutex.
func (b *Bulkhead) unlock() {
	settled := b.queue.settled
	b.queue.settled = nil
	b.mu.Unlock()
	for w := settled; w != nil; w = w.older {
		close(w.ready)
	}
}

// abandon settles w as refused, unless it has been settled already.
func (b *Bulkhead) abandon(w *waiter, refusal Reason) {
	b.mu.Lock()
	defer b.unlock()
	if w.settled {
		return
	}
	b.settle(w, false, refusal)
	b.grant(b.rules.Load(), b.now(), 0) // w may have held up others
}

// refuseStanding refuses the waiters that have waited for too long in a queue that stands, and
// reports whether there were any.
func (b *Bulkhead) refuseStanding(r *rules, now time.Duration) (refused bool) {
	longest := r.standing() / codelFraction
	for level := range b.queue.lines {
		for w := b.queue.lines[level].oldest; w != nil && now-w.since > longest; w = w.newer {
			b.settle(w, false, StandingQueue)
			refused = true
		}
	}
	return refused
}

// lastServed returns the waiter that would be served last, if that is after a new call
// of level, or nil.
func (b *Bulkhead) lastServed(level int, newestFirst bool) *waiter {
	for below := len(b.queue.lines) - 1; below > level || newestFirst && below == level; below-- {
		l := &b.queue.lines[below]
		switch {
		case l.oldest == nil:
		case !newestFirst:
			return l.newest
		case l.oldest != l.claim:
			return l.oldest
		case l.claim.newer != nil:
			return l.claim.newer
		case below > level:
			return l.claim
		}
	}
	return nil
}

// ahead returns how many slots must become free for the waiters that come before a
// new call, if it goes by FIFO.
func (b *Bulkhead) ahead(level int) int {
	n := -max(freeIn(b.slots.word.Load()), 0)
	for l := range level + 1 {
		n += b.queue.lines[l].cost
	}
	return n
}

// newestFirst reports whether the newest waiter of a level is served first.
func (b *Bulkhead) newestFirst(r *rules, now time.Duration) bool {
	return r.Order == LIFO || r.Order == CoDel && now-b.queue.stood >= r.standing()
}
