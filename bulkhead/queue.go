package bulkhead

import (
	"math"
	"time"
)

// An Order says which of the waiting callers of one level is served first.
type Order int

const (
	// FIFO serves the caller that has waited longest. A caller whose deadline, or
	// MaxWait, the queue cannot meet at its present pace is refused immediately. The
	// pace is known when at least 16 slots have been handed on since the queue was
	// last empty; until then, no caller is refused for it. A full queue refuses the
	// newcomer.
	FIFO Order = iota

	// LIFO serves the newest caller: under overload some are served fast, where FIFO
	// would serve all of them late. A full queue drops the oldest caller for the
	// newcomer.
	LIFO

	// CoDel is FIFO until the queue has not been empty for MaxWait (100 ms if that
	// is 0). From then on, until it is empty, it is LIFO, and whenever a slot is
	// handed on, callers that have waited for more than a twentieth of that time are
	// refused: controlled delay with adaptive LIFO, as in Maurer, Fail at Scale, ACM
	// Queue 13(8), 2015.
	CoDel
)

// A queue holds the callers that wait for a slot, by level. While it is not empty,
// slots.word says so, and either changes only under the mutex of the bulkhead.
type queue struct {
	lines   []line        // by level
	stood   time.Duration // since when it has not been empty
	pace    pace
	settled *waiter // have left and are to be told, linked by older
}

// A line holds the waiters of one level, by age.
type line struct {
	oldest, newest *waiter
	waiters        int
	weight         int // of all of them
	lightest       int // none of them weighs less
	passed         int // slots granted out of order since the first was last served

	// claim is a heavy waiter that was first where the newest is, and did not fit: it
	// stays first, or newer calls would take each slot before there are enough for it.
	claim *waiter
}

// A waiter is a caller in the queue.
type waiter struct {
	older, newer *waiter
	level        int
	weight       int
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
		l.oldest, l.lightest, l.passed = w, w.weight, 0
	} else {
		w.older.newer = w
		l.lightest = min(l.lightest, w.weight)
	}
	l.waiters++
	l.weight += w.weight
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
	l.weight -= w.weight
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

// join takes the slots of a call or puts it into the queue as w. If it is neither
// queued nor refused, the call has its slots. The mutex is held.
func (b *Bulkhead) join(w *waiter, patience time.Duration) (queued bool, refusal *FullError) {
	level, n, now := w.level, w.weight, w.since
	var word uint64
	var displaced *waiter
	for {
		var ok bool
		if word, ok = b.admit(level, n, now); ok {
			return false, nil
		}
		displaced = nil
		if b.waiters.Load() >= int64(b.cfg.Queue) {
			if displaced = b.lastServed(level, b.newestFirst(now)); displaced == nil {
				return false, b.refusal(QueueFull, level, n)
			}
		}
		if b.tooHeavy(n, level) { // since enter has looked
			return false, b.refusal(TooHeavy, level, n)
		}
		if b.cfg.Order == FIFO && patience < forever && b.queue.pace.least(b.ahead(level)+n) > patience {
			return false, b.refusal(DeadlineTooClose, level, n)
		}
		// A slot that was given back since admit looked makes this fail.
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
	if displaced != nil || b.cfg.Order != FIFO { // it may have held up others; another may be first by now
		b.grant(now, 0)
	}
	return true, nil
}

// admit takes the n slots of a newcomer, if it may pass those who wait and come
// before it. The mutex is held.
func (b *Bulkhead) admit(level, n int, now time.Duration) (word uint64, ok bool) {
	word, ok = b.slots.take(n, b.kept[level])
	if ok || word&waiting == 0 || freeIn(word)-b.kept[level] < n {
		return word, ok
	}
	newestFirst := b.newestFirst(now)
	last := level // the last level of which a waiter may come before it
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

// grant hands free slots to the waiters, in order, with freed ones that have been given
// back just now. The mutex is held, and the queue was not empty when it was taken. Only
// CoDel needs the time.
func (b *Bulkhead) grant(now time.Duration, freed int) {
	newestFirst := b.newestFirst(now)
	word := b.slots.word.Load() + uint64(freed)
	taken := b.grantLevels(freeIn(word), newestFirst)
	if b.cfg.Order == CoDel && newestFirst && taken > 0 && b.shed(now) {
		taken += b.grantLevels(freeIn(word)-taken, newestFirst) // those held up by who is gone
	}
	word -= uint64(taken)
	if b.waiters.Load() == 0 {
		word &^= waiting
	}
	b.slots.word.Store(word)
}

// grantLevels hands out of free slots to the waiters of all levels and returns how
// many.
func (b *Bulkhead) grantLevels(free int, newestFirst bool) (taken int) {
	for level := range b.queue.lines {
		taken += b.grantLevel(level, free-taken-b.kept[level], newestFirst)
	}
	return taken
}

// grantLevel hands out of room slots to the waiters of one level and returns how
// many.
func (b *Bulkhead) grantLevel(level, room int, newestFirst bool) (taken int) {
	l := &b.queue.lines[level]
	if newestFirst && l.claim == nil && l.newest != nil && room > 0 && room < l.newest.weight {
		l.claim = l.newest
	}
	lightest := math.MaxInt
	var next *waiter
	for w := l.first(newestFirst); w != nil; w = next {
		if room-taken < l.lightest {
			return taken
		}
		next = l.behind(w, newestFirst)
		if w.weight <= room-taken {
			allowed := b.allowance(level, newestFirst, w)
			if allowed < l.lightest {
				return taken
			}
			if w.weight <= allowed {
				b.pass(level, w.weight, newestFirst, w)
				taken += w.weight
				b.settle(w, true, 0)
				continue
			}
		}
		lightest = min(lightest, w.weight)
	}
	l.lightest = lightest
	return taken
}

// allowance returns how many slots a call may take before the first waiters of the
// levels up to last. Only a call lighter than those asks. A waiter does not pass itself.
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

// pass counts n slots on the levels up to last as taken by w, or by a newcomer if that
// is nil. The count is the line's and not the waiter's, or else no slots would ever be
// kept where first waiters give up before they are served.
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

// settle takes w out of the queue, and leaves it to unlock to tell it.
func (b *Bulkhead) settle(w *waiter, admitted bool, refusal Reason) {
	b.queue.lines[w.level].remove(w)
	b.waiters.Add(-1)
	w.settled, w.admitted, w.refusal = true, admitted, refusal
	w.older, b.queue.settled = b.queue.settled, w
}

// unlock releases the mutex and then tells those who were settled under it: waking
// them would take longer than all else that is done under the mutex.
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
	b.grant(b.now(), 0) // it may have held up others
}

// shed refuses those who have waited for too long in a queue that stands, and
// reports whether there were any.
func (b *Bulkhead) shed(now time.Duration) (refused bool) {
	longest := b.standing() / codelFraction
	for level := range b.queue.lines {
		for w := b.queue.lines[level].oldest; w != nil && now-w.since > longest; w = w.newer {
			b.settle(w, false, Shed)
			refused = true
		}
	}
	return refused
}

// lastServed returns the waiter that would be served last, if that is after a newcomer
// of level, or nil.
func (b *Bulkhead) lastServed(level int, newestFirst bool) *waiter {
	for below := b.cfg.Levels - 1; below > level || newestFirst && below == level; below-- {
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

// ahead returns the slots that are to be freed for those who wait and come
// before a newcomer, if it goes by FIFO.
func (b *Bulkhead) ahead(level int) int {
	n := -max(freeIn(b.slots.word.Load()), 0)
	for l := range level + 1 {
		n += b.queue.lines[l].weight
	}
	return n
}

// CoDel allows a wait of one codelFraction of the time after which a queue
// stands. That is MaxWait, or codelInterval.
const (
	codelInterval = 100 * time.Millisecond
	codelFraction = 20
)

func (b *Bulkhead) standing() time.Duration {
	if b.cfg.MaxWait > 0 {
		return b.cfg.MaxWait
	}
	return codelInterval
}

func (b *Bulkhead) newestFirst(now time.Duration) bool {
	return b.cfg.Order == LIFO || b.cfg.Order == CoDel && now-b.queue.stood >= b.standing()
}
