package bulkhead

import (
	"math"
	"time"
)

// A queue holds the calls that wait for slots, by level and share. While it is not empty,
// slots.word says so, and both change only under the mutex of the bulkhead.
type queue struct {
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

// A waiter is a call in the queue.
type waiter struct {
	older, newer *waiter
	level        int
	line         *line
	cost         int
	since        time.Duration

	// Set when it leaves the queue, before ready is closed.
	ready    chan struct{}
	settled  bool
	admitted bool
	refusal  Reason // if not admitted
}

// slots returns those that w has once it is admitted.
func (w *waiter) slots() taken { return taken{w.cost, w.line.share} }

func (l *line) add(w *waiter) {
	w.line, w.older, l.newest = l, l.newest, w
	if w.older == nil {
		l.oldest, l.cheaper = w, w.cost-1
	} else {
		w.older.newer = w
	}
	l.cheaper = min(l.cheaper, w.cost-1)
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
	l.waiters--
	l.cost -= w.cost
}

// first returns the waiter that is served first.
func (l *line) first(newestFirst bool) *waiter {
	if newestFirst {
		return l.newest
	}
	return l.oldest
}

// behind returns the waiter that is served after w, or nil.
func (l *line) behind(w *waiter, newestFirst bool) *waiter {
	if newestFirst {
		return w.older
	}
	return w.newer
}

// last returns the waiter that is served last, the claim of its level only if it is alone,
// or nil.
func (l *line) last(newestFirst bool, claim *waiter) *waiter {
	w := l.first(!newestFirst)
	if w != nil && w == claim && newestFirst && w.newer != nil {
		return w.newer
	}
	return w
}

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
func (q *queue) remove(w *waiter, admitted bool, limit int) {
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
		at.served(l, w.cost, limit)
	}
	if l.waiters == 0 {
		at.turns.remove(l)
	}
	q.shares.count(l.share, held, -1)
}

// all yields the waiters of a level, by share and age. The one that is yielded may leave.
func (at *level) all(yield func(*waiter) bool) {
	for l := at.turns.first; l != nil; l = l.later {
		for w := l.oldest; w != nil; w = w.newer {
			if !yield(w) {
				return
			}
		}
	}
}

// claims reports whether the first waiter of a line may come to be first no longer without
// being served.
func (l *line) claims(newestFirst bool) bool { return newestFirst || l.share != nil }

// first returns the waiter of a level that is served first, or nil.
func (q *queue) first(at *level, newestFirst bool, limit int) *waiter {
	if at.claim != nil && at.claim.line.claims(newestFirst) {
		return at.claim
	}
	if l := at.next(&q.shares, limit); l != nil {
		return l.first(newestFirst)
	}
	return nil
}

// mayPass reports whether a share may take slots that first does not fit into. One that has
// its part may not while that of first has not.
func (q *queue) mayPass(of *share, first *waiter, limit int) bool {
	return !q.shares.hasPart(of, limit) || q.shares.hasPart(first.line.share, limit)
}

// passer returns the waiter of a level that is served before first, which does not fit, or
// nil. It costs at most allowed slots. As these become fewer, no waiter is looked at twice.
func (q *queue) passer(at *level, first *waiter, newestFirst bool, allowed, limit int) *waiter {
	l := at.nextOf(&q.shares, limit, func(l *line) bool {
		if !q.mayPass(l.share, first, limit) || allowed <= l.cheaper { // a long queue is not looked through in vain whenever a call leaves it
			return false
		}
		for ; l.tried != nil; l.tried = l.behind(l.tried, newestFirst) {
			q.looked++
			if l.tried != first && l.tried.cost <= allowed {
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
	l.tried = l.behind(w, newestFirst)
	return w
}

// join takes the slots of a call or puts the call into the queue as w, if fewer than
// places calls wait. left and own are those of patience. If the call is neither queued
// nor refused, it has its slots, as w would have them. The mutex is held.
func (b *Bulkhead) join(w *waiter, c *claim, places int, left time.Duration, own bool) (queued bool, refusal *FullError) {
	r, now := b.rules.Load(), w.since
	l := b.queue.line(b.shareOf(c), w.level)
	w.line = l
	var word uint64
	var displaced *waiter
	for {
		var ok bool
		if word, ok = b.admit(r, l.share, w.level, w.cost, now); ok {
			b.queue.shares.count(l.share, w.cost, 0)
			return false, nil
		}
		displaced = nil
		if b.waiters.Load() >= int64(places) {
			if displaced = b.lastServed(l, w.level, b.newestFirst(r, now)); displaced == nil {
				return false, b.refusal(r, QueueFull, w.level, w.cost, c)
			}
		}
		if w.cost > r.most(int(b.limit.Load()), w.level) { // the limit may have shrunk since try looked
			return false, b.refusal(r, TooCostly, w.level, w.cost, c)
		}
		if r.Order == FIFO && left < forever && b.queue.pace.least(b.ahead(l, w.level)+w.cost) > left {
			reason := DeadlineTooClose
			if own {
				reason = WaitTooLong
			}
			return false, b.refusal(r, reason, w.level, w.cost, c)
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
	b.queue.add(w, l)
	b.waiters.Add(1)
	if displaced != nil || l.claims(r.Order != FIFO) { // displaced may have held up others; w may be first
		b.grant(r, now, 0)
	}
	return true, nil
}

// admit takes the n slots of a new call, if the call may pass the waiters that come
// before it. The mutex is held.
func (b *Bulkhead) admit(r *rules, of *share, level, n int, now time.Duration) (word uint64, ok bool) {
	limit := int(b.limit.Load())
	kept := r.kept(limit, level)
	word, ok = b.slots.take(n, kept)
	if ok || word&waiting == 0 || freeIn(word)-kept < n {
		return word, ok
	}
	newestFirst := b.newestFirst(r, now)
	last := level // the last level of which a waiter may come before the call
	if newestFirst && b.queue.levels[level].claim == nil {
		last--
	}
	if n > b.allowance(last) {
		return word, false
	}
	if of != nil {
		at := &b.queue.levels[level]
		if first := b.queue.first(at, newestFirst, limit); first != nil && !b.queue.mayPass(of, first, limit) {
			return word, false
		}
	}
	b.pass(last, n)
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
	for level := range b.queue.levels {
		taken += b.grantLevel(level, free-taken-r.kept(limit, level), newestFirst)
	}
	return taken
}

// grantLevel hands out of room slots to the waiters of one level and returns how
// many.
func (b *Bulkhead) grantLevel(level, room int, newestFirst bool) (taken int) {
	q, at, limit := &b.queue, &b.queue.levels[level], int(b.limit.Load())
	if room <= 0 {
		return 0
	}
	var first *waiter
	for first = q.first(at, newestFirst, limit); first != nil; first = q.first(at, newestFirst, limit) {
		if first.cost > min(room-taken, b.allowance(level-1)) {
			break
		}
		q.looked++
		b.pass(level-1, first.cost)
		at.passed = 0
		taken += first.cost
		b.settle(first, true, "")
	}
	if first == nil || taken >= room {
		return taken
	}
	if first.line.claims(newestFirst) && first.cost > room-taken {
		at.claim = first
	}
	for l := at.turns.first; l != nil; l = l.later {
		l.tried, l.least = l.first(newestFirst), math.MaxInt
	}
	for {
		w := q.passer(at, first, newestFirst, min(room-taken, b.allowance(level)), limit)
		if w == nil {
			return taken
		}
		b.pass(level, w.cost)
		taken += w.cost
		b.settle(w, true, "")
	}
}

// allowance returns how many slots a call may take before the first waiters of the
// levels up to last, which cost more than it does.
func (b *Bulkhead) allowance(last int) int {
	allowed := math.MaxInt
	for level := range last + 1 {
		if at := &b.queue.levels[level]; at.waiters > 0 {
			allowed = min(allowed, int(b.limit.Load())-at.passed)
		}
	}
	return allowed
}

// pass counts n slots as taken before the first waiters of the levels up to last. The
// level counts them and not its first waiter: otherwise no slots would ever be kept if
// each first waiter gives up before it is served.
func (b *Bulkhead) pass(last, n int) {
	for level := range last + 1 {
		if at := &b.queue.levels[level]; at.waiters > 0 {
			at.passed += n
		}
	}
}

// settle takes w out of the queue. unlock tells it.
func (b *Bulkhead) settle(w *waiter, admitted bool, refusal Reason) {
	b.queue.remove(w, admitted, int(b.limit.Load()))
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
	for level := range b.queue.levels {
		for w := range b.queue.levels[level].all {
			if now-w.since > longest {
				b.settle(w, false, StandingQueue)
				refused = true
			}
		}
	}
	return refused
}

// lastServed returns the waiter that gives its place in a full queue to a new call of a
// line at a level, or nil: the one that is served last of those of the least important
// level, and of the share there that waits most.
func (b *Bulkhead) lastServed(own *line, level int, newestFirst bool) *waiter {
	for below := len(b.queue.levels) - 1; below > level; below-- {
		at := &b.queue.levels[below]
		if l := at.mostCrowded(nil); l != nil {
			return l.last(newestFirst, at.claim)
		}
	}
	at := &b.queue.levels[level]
	l := at.mostCrowded(own)
	if l == own && !newestFirst {
		return nil
	}
	if w := l.last(newestFirst, at.claim); w == nil || w != at.claim {
		return w
	}
	return nil
}

// ahead returns how many slots must become free for the waiters that come before a new
// call of a line at a level, if it goes by FIFO.
func (b *Bulkhead) ahead(own *line, level int) int {
	n := own.cost - max(freeIn(b.slots.word.Load()), 0)
	for l := range level {
		n += b.queue.levels[l].cost
	}
	return n
}

// newestFirst reports whether the newest waiter of a level is served first.
func (b *Bulkhead) newestFirst(r *rules, now time.Duration) bool {
	return r.Order == LIFO || r.Order == CoDel && now-b.queue.stood >= r.standing()
}
