package bulkhead

import (
	"math"
	"sync/atomic"
	"time"
)

// A queue holds the slots, and the calls that wait for them, by level and share. While one
// waits, slots.word says so. It changes under the mutex of the bulkhead; while none waits,
// slots also change without.
type queue struct {
	slots   slots
	limit   atomic.Int64
	waiters atomic.Int64

	// By which it is changed now; see by.
	rules       *rules
	now         time.Duration
	newestFirst bool // the newest waiter of a level is served first

	levels  []level
	shares  shares
	stood   time.Duration // since when it has not been empty
	pace    pace
	settled *waiter // waiters that have left and are to be told, linked by older
	looked  int     // how often a waiter was considered for free slots: what tests count
}

// A level holds the waiters of one level, by share.
type level struct {
	turns
	own     line // of calls without a share
	waiters int
	cost    int // of all of them
	passed  int // slots granted out of order since the first waiter was last served

	// claim is a costly waiter that was first, and did not fit, where newer calls or those
	// of other shares may come to be first. It stays first: otherwise these would take each
	// slot before there are enough for it.
	claim *waiter
}

// by returns q, to be changed by rules, now.
func (q *queue) by(r *rules, now time.Duration) *queue {
	q.rules, q.now = r, now
	q.newestFirst = r.Order == LIFO || r.Order == CoDel && now-q.stood >= r.standing()
	return q
}

// slotsInAll returns the limit.
func (q *queue) slotsInAll() int { return int(q.limit.Load()) }

// line returns that of a share, where its calls wait at a level.
func (q *queue) line(of *share, at int) *line {
	if of == nil {
		return &q.levels[at].own
	}
	if of.lines == nil {
		of.lines = make([]*line, len(q.levels))
	}
	if of.lines[at] == nil {
		of.lines[at] = &line{share: of}
	}
	return of.lines[at]
}

func (q *queue) add(w *waiter, l *line) {
	at := &q.levels[w.level]
	if at.waiters == 0 {
		at.passed = 0
	}
	if l.add(w); l.waiters == 1 {
		at.turns.add(l)
	}
	at.waiters++
	at.cost += w.cost
	q.shares.count(l.share, 0, 1)
}

// remove takes w out. If it is admitted, its share holds its slots.
func (q *queue) remove(w *waiter, admitted bool) {
	l, at := w.line, &q.levels[w.level]
	l.remove(w)
	if w == at.claim {
		at.claim = nil
	}
	at.waiters--
	at.cost -= w.cost
	held := 0
	if admitted {
		held = w.cost
		at.served(l, w.cost, q.slotsInAll())
	}
	if l.waiters == 0 {
		at.turns.remove(l)
	}
	q.shares.count(l.share, held, -1)
}

// all yields the waiters of a level, by share and age. The one that is yielded may leave.
func (at *level) all(yield func(*waiter) bool) {
	var later *line
	for l := at.turns.first; l != nil; l = later {
		later = l.later
		var newer *waiter
		for w := l.oldest; w != nil; w = newer {
			newer = w.newer
			if !yield(w) {
				return
			}
		}
	}
}

// first returns the waiter of a level that is served first, or nil.
func (q *queue) first(at *level) *waiter {
	if at.claim != nil && at.claim.line.claims(q.newestFirst) {
		return at.claim
	}
	if l := at.next(&q.shares, q.slotsInAll()); l != nil {
		return l.first(q.newestFirst)
	}
	return nil
}

// mayPass reports whether a share may take slots that first does not fit into. One that has
// its part may not while that of first has not.
func (q *queue) mayPass(of *share, first *waiter) bool {
	limit := q.slotsInAll()
	return !q.shares.hasPart(of, limit) || q.shares.hasPart(first.line.share, limit)
}

// passer returns the waiter of a level that is served before first, which does not fit, or
// nil. It costs at most allowed slots. As these become fewer, no waiter is looked at twice.
func (q *queue) passer(at *level, first *waiter, allowed int) *waiter {
	l := at.nextOf(&q.shares, q.slotsInAll(), func(l *line) bool {
		if !q.mayPass(l.share, first) || allowed <= l.cheaper { // a long queue is not looked through in vain whenever a call leaves it
			return false
		}
		for ; l.tried != nil; l.tried = l.behind(l.tried, q.newestFirst) {
			q.looked++
			if l.tried.cost <= allowed {
				return true
			}
			l.least = min(l.least, l.tried.cost)
		}
		l.cheaper = l.least - 1
		return false
	})
	if l == nil {
		return nil
	}
	w := l.tried
	l.tried = l.behind(w, q.newestFirst)
	return w
}

// enter takes the slots of a call or puts the call into the queue as w, if fewer than
// places calls wait. left and own are those of patience. If the call is neither queued
// nor refused, it has its slots, as w would have them.
func (q *queue) enter(w *waiter, of *share, places int, left time.Duration, own bool) (queued bool, refusal Reason) {
	l := q.line(of, w.level)
	w.line = l
	var word uint64
	var displaced *waiter
	for {
		var ok bool
		if word, ok = q.admit(l.share, w.level, w.cost); ok {
			q.shares.count(l.share, w.cost, 0)
			return false, ""
		}
		a := arrival{cost: w.cost, most: q.rules.most(q.slotsInAll(), w.level), own: own}
		if displaced = nil; q.waiters.Load() >= int64(places) {
			displaced = q.lastServed(l, w.level)
			a.full = displaced == nil
		}
		a.late = q.rules.Order == FIFO && q.pace.least(q.ahead(l, w.level)+w.cost) > left
		if refusal = a.refusal(); refusal != "" {
			return false, refusal
		}
		// This fails if a slot was given back since admit looked.
		if word&waiting != 0 || q.slots.word.CompareAndSwap(word, word|waiting) {
			break
		}
	}
	if word&waiting == 0 {
		q.stood = q.now
		q.by(q.rules, q.now)
		q.pace.restart(q.now)
	}
	if displaced != nil {
		q.settle(displaced, false, Displaced)
	}
	q.add(w, l)
	q.waiters.Add(1)
	if displaced != nil || l.claims(q.rules.Order != FIFO) { // displaced may have held up others; w may be first
		q.grant(0)
	}
	return true, ""
}

const forever = math.MaxInt64 // as patience

// An arrival is what a call without slots finds at the queue.
type arrival struct {
	full       bool // as many calls wait as may, and none gives way
	cost, most int  // slots that it needs, and that its level may ever have: the limit may have shrunk
	late       bool // it will wait for longer than it can,
	own        bool // by its MaxWait, and not by its ctx
}

// refusal returns why the call may not wait, or "".
func (a arrival) refusal() Reason {
	switch {
	case a.full:
		return QueueFull
	case a.cost > a.most:
		return TooCostly
	case !a.late:
		return ""
	case a.own:
		return WaitTooLong
	}
	return DeadlineTooClose
}

// admit takes the n slots of a new call, if the call may pass the waiters that come
// before it.
func (q *queue) admit(of *share, level, n int) (word uint64, ok bool) {
	kept := q.rules.kept(q.slotsInAll(), level)
	word, ok = q.slots.take(n, kept)
	if ok || freeIn(word)-kept < n {
		return word, ok
	}
	last := level // the last level of which a waiter may come before the call
	if q.newestFirst && q.levels[level].claim == nil {
		last--
	}
	if n > q.allowance(last) {
		return word, false
	}
	if of != nil {
		if first := q.first(&q.levels[level]); first != nil && !q.mayPass(of, first) {
			return word, false
		}
	}
	q.pass(last, n)
	q.slots.word.Add(admitted - uint64(n))
	return word, true
}

// grant hands free slots to the waiters, in order, together with the slots that have
// just been freed. The queue was not empty when the mutex was taken.
func (q *queue) grant(freed int) {
	word := q.slots.word.Load() + uint64(freed)
	taken := q.grantLevels(freeIn(word))
	if q.rules.Order == CoDel && q.newestFirst && taken > 0 && q.refuseStanding() {
		taken += q.grantLevels(freeIn(word) - taken) // waiters that a refused one held up
	}
	word -= uint64(taken)
	if q.waiters.Load() == 0 {
		word &^= waiting
	}
	q.slots.word.Store(word)
}

// grantLevels hands out of free slots to the waiters of all levels and returns how
// many.
func (q *queue) grantLevels(free int) (taken int) {
	for level := range q.levels {
		room := free - taken - q.rules.kept(q.slotsInAll(), level)
		g := granting{queue: q, level: level}
		for w := g.next(room); w != nil; w = g.next(room) {
			room -= w.cost
			taken += w.cost
			q.settle(w, true, "")
		}
	}
	return taken
}

// A granting is one pass of grantLevels over a level.
type granting struct {
	*queue
	level int
	first *waiter // which does not fit; then others may pass it
}

// next decides which waiter of the level is served next, out of room slots, or nil.
func (g *granting) next(room int) *waiter {
	at := &g.levels[g.level]
	if room <= 0 {
		return nil
	}
	if g.first == nil {
		w := g.queue.first(at)
		if w == nil {
			return nil
		}
		if w.cost <= min(room, g.allowance(g.level-1)) {
			g.looked++
			g.pass(g.level-1, w.cost)
			at.passed = 0
			return w
		}
		if g.first = w; w.line.claims(g.newestFirst) && w.cost > room {
			at.claim = w
		}
		for l := at.turns.first; l != nil; l = l.later {
			l.tried, l.least = l.first(g.newestFirst), math.MaxInt
		}
	}
	w := g.passer(at, g.first, min(room, g.allowance(g.level)))
	if w != nil {
		g.pass(g.level, w.cost)
	}
	return w
}

// allowance returns how many slots a call may take before the first waiters of the
// levels up to last, which cost more than it does.
func (q *queue) allowance(last int) int {
	allowed := math.MaxInt
	for level := range last + 1 {
		if at := &q.levels[level]; at.waiters > 0 {
			allowed = min(allowed, q.slotsInAll()-at.passed)
		}
	}
	return allowed
}

// pass counts n slots as taken before the first waiters of the levels up to last. The
// level counts them and not its first waiter: otherwise no slots would ever be kept if
// each first waiter gives up before it is served. Where none waits, add forgets them.
func (q *queue) pass(last, n int) {
	for level := range last + 1 {
		q.levels[level].passed += n
	}
}

// settle takes w out of the queue. Bulkhead.unlock tells it.
func (q *queue) settle(w *waiter, admitted bool, refusal Reason) {
	q.remove(w, admitted)
	q.waiters.Add(-1)
	w.settled, w.admitted, w.refusal = true, admitted, refusal
	w.older, q.settled = q.settled, w
}

// refuseStanding refuses the waiters that have waited for too long in a queue that stands, and
// reports whether there were any.
func (q *queue) refuseStanding() (refused bool) {
	longest := q.rules.standing() / codelFraction
	for level := range q.levels {
		for w := range q.levels[level].all {
			if q.now-w.since > longest {
				q.settle(w, false, StandingQueue)
				refused = true
			}
		}
	}
	return refused
}

// lastServed returns the waiter that gives its place in a full queue to a new call of a
// line at a level, or nil: the one that is served last of those of the least important
// level, and of the share there that waits most.
func (q *queue) lastServed(own *line, level int) *waiter {
	for below := len(q.levels) - 1; below > level; below-- {
		at := &q.levels[below]
		if l := at.mostCrowded(nil); l != nil {
			return l.last(q.newestFirst, at.claim)
		}
	}
	at := &q.levels[level]
	l := at.mostCrowded(own)
	if l == own && !q.newestFirst {
		return nil
	}
	if w := l.last(q.newestFirst, at.claim); w != at.claim {
		return w
	}
	return nil
}

// ahead returns how many slots must become free for the waiters that come before a new
// call of a line at a level, if it goes by FIFO.
func (q *queue) ahead(own *line, level int) int {
	n := own.cost - max(freeIn(q.slots.word.Load()), 0)
	for l := range level {
		n += q.levels[l].cost
	}
	return n
}
