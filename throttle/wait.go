package throttle

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// A queue holds the calls that wait: the more important first, those of a level in
// the order of arrival. Their tokens are taken ahead of time, so that the tat of the
// Limiter is past them all, and calls that do not wait take none of them. The tokens
// belong to the queue, not to a place in it: the first call goes on when the tat, less
// what the others are to take, has come within its room. So a call that comes, leaves
// or overtakes changes one sum, however many wait.
//
// Moments pass on a schedule that a late timer does not move: the calls that should
// have gone on meanwhile go on together.
type queue struct {
	waiting atomic.Int64 // changed under mu
	waited  atomic.Int64
	all     *waiters // of the Group that the Limiter belongs to, or nil

	mu     sync.Mutex
	units  int64 // that all who wait are to take
	levels []line
	timer  *time.Timer
}

// A line holds the waiters of one level in the order of arrival.
type line struct {
	first, last *waiter
	units       int64 // that they are to take
}

type waiter struct {
	level      int
	units      int64 // that it is to take
	prev, next *waiter
	over       chan struct{} // closed when it is no longer in line
	granted    bool          // set before that: it may go on
	tat        int64         // after it has taken its tokens, if granted
}

// waiters counts the calls that wait for any limit of a Group.
type waiters struct {
	now atomic.Int64
	max int64
}

// wait puts a call in line for its tokens and waits for them.
func (l *Limiter) wait(ctx context.Context, n, level int) error {
	w, after, why := l.reserve(ctx, n, level)
	switch {
	case why == DeadlineTooClose:
		return l.refuse(ctx, why, n, level, after, context.DeadlineExceeded)
	case why != 0:
		return l.refuse(ctx, why, n, level, after, nil)
	case w == nil:
		l.count(n)
		return nil
	}
	var tooLong <-chan time.Time
	if l.cfg.MaxWait > 0 { // others may overtake it
		timer := time.NewTimer(l.cfg.MaxWait)
		defer timer.Stop()
		tooLong = timer.C
	}
	select {
	case <-w.over:
		why = QueueFull
	case <-tooLong:
		why = WaitTooLong
	case <-ctx.Done():
		why = ContextEnded
	}
	granted, after := l.leave(w, why, n, level)
	switch {
	case ctx.Err() != nil:
		if granted {
			// Others may have gone on behind it, within the time of its tokens.
			l.extra.Add(int64(n))
		}
		return l.refuse(ctx, ContextEnded, n, level, after, ended.Error(ctx))
	case granted:
		l.queue.waited.Add(1)
		l.count(n)
		return nil
	}
	return l.refuse(ctx, why, n, level, after, nil)
}

// reserve takes n tokens, and puts the call in line if they are not there yet. Or it
// says why the call is refused, and when to come back. All who are due have gone.
func (l *Limiter) reserve(ctx context.Context, n, level int) (w *waiter, after time.Duration, why Reason) {
	q := &l.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	placed := false
	for {
		m := l.measureLocked()
		after = l.behind(m, n, level)
		if after > 0 && !placed {
			if why = l.reject(ctx, m, after); why == 0 && !l.makeRoom(level) {
				why = QueueFull
			}
			if why != 0 {
				return nil, after, why
			}
			placed = true
		}
		units := m.tokens(n)
		tat := max(m.tat-q.units, m.now) + q.units + units
		if !l.tat.CompareAndSwap(m.tat, tat) { // by another call, or by one that made room
			continue
		}
		if !placed {
			return nil, 0, 0
		}
		w = &waiter{level: level, units: units, over: make(chan struct{})}
		l.enqueue(w)
		l.serve()
		return w, after, 0
	}
}

// behind returns how long it takes until a call of n tokens can go on, behind those
// that wait and are as important.
func (l *Limiter) behind(m measure, n, level int) time.Duration {
	if m.cannot(n, level) {
		return never
	}
	var ahead int64
	for i := range level + 1 {
		ahead += l.queue.levels[i].units
	}
	return m.until(m.tat - l.queue.units + ahead + m.tokens(n) - m.room[level])
}

// reject says why a call is not to wait for so long; 0 if it may.
func (l *Limiter) reject(ctx context.Context, m measure, wait time.Duration) Reason {
	deadline, limited := ctx.Deadline()
	switch {
	case wait == never: // the burst has become smaller, this moment
		return TooCostly
	case m.tat-m.now > maxDebt, l.cfg.MaxWait > 0 && wait > l.cfg.MaxWait:
		return WaitTooLong
	case limited && time.Until(deadline) < wait:
		return DeadlineTooClose
	}
	return 0
}

// makeRoom makes room for one more call to wait. Where the queue is full, the last of
// the least important calls leaves it for one that is more so.
func (l *Limiter) makeRoom(level int) bool {
	q := &l.queue
	if q.waiting.Load() < int64(l.cfg.MaxQueue) && q.all.enter() {
		return true
	}
	for i := len(q.levels) - 1; i > level; i-- {
		if last := q.levels[i].last; last != nil {
			l.remove(last)
			return q.all.enter()
		}
	}
	return false
}

func (a *waiters) enter() bool {
	if a == nil || a.now.Add(1) <= a.max {
		return true
	}
	a.now.Add(-1)
	return false
}

func (a *waiters) leave() {
	if a != nil {
		a.now.Add(-1)
	}
}

// enqueue puts w at the end of its line. Its tokens have been taken.
func (l *Limiter) enqueue(w *waiter) {
	q := &l.queue
	line := &q.levels[w.level]
	if w.prev = line.last; w.prev == nil {
		line.first = w
	} else {
		w.prev.next = w
	}
	line.last = w
	line.units += w.units
	q.units += w.units
	q.waiting.Add(1)
}

// dequeue takes w out of line, with the tokens that it is to take.
func (l *Limiter) dequeue(w *waiter) {
	q := &l.queue
	line := &q.levels[w.level]
	if w.prev == nil {
		line.first = w.next
	} else {
		w.prev.next = w.next
	}
	if w.next == nil {
		line.last = w.prev
	} else {
		w.next.prev = w.prev
	}
	w.prev, w.next = nil, nil
	line.units -= w.units
	q.units -= w.units
	q.waiting.Add(-1)
	q.all.leave()
	close(w.over)
}

// leave takes a waiter out of line, unless it no longer is, and reports whether its
// tokens are gone. It returns how long a call like it would have to wait now.
func (l *Limiter) leave(w *waiter, why Reason, n, level int) (granted bool, after time.Duration) {
	q := &l.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	granted = w.granted
	// Those who are due go first, as nobody is to move up into the past.
	m := l.serve()
	select {
	case <-w.over:
		if w.granted && !granted && why == ContextEnded { // only now, and in vain
			l.tat.Add(-max(0, min(w.units, w.tat-m.now)))
			w.granted = false
		}
	default:
		l.remove(w)
	}
	return w.granted, l.behind(l.serve(), n, level)
}

// head returns the waiter that is to go on first, or nil.
func (q *queue) head() *waiter {
	for i := range q.levels {
		if first := q.levels[i].first; first != nil {
			return first
		}
	}
	return nil
}

// remove takes w out of line and gives its tokens back. All who are due have gone.
func (l *Limiter) remove(w *waiter) {
	q := &l.queue
	back := w.units
	if m := l.measureLocked(); q.head() == w {
		// What it has waited for, on top of a burst, is there for nobody else.
		back -= max(0, m.now-(m.tat-q.units))
	}
	l.dequeue(w)
	l.tat.Add(-back)
}

// putBack returns n tokens to those who wait, and then to the burst. More than a
// burst is there for nobody.
func (l *Limiter) putBack(n int) {
	m := l.measureLocked()
	by := m.tat - l.queue.units - m.now
	if int64(n) <= by>>m.frac {
		by = m.tokens(n)
	}
	l.tat.Add(-max(by, 0))
}

// serve lets those go on whose time has come, and sets the timer for the next. The
// caller holds the lock.
func (l *Limiter) serve() measure {
	q := &l.queue
	m := l.measureLocked()
	for w := q.head(); w != nil && l.target(m, w) <= m.now; w = q.head() {
		w.granted, w.tat = true, m.tat-q.units+w.units
		l.dequeue(w)
	}
	l.arm(m)
	return m
}

// target returns when w, the head, goes on.
func (l *Limiter) target(m measure, w *waiter) int64 {
	return m.tat - l.queue.units + w.units - m.room[w.level]
}

// arm sets the timer for the head.
func (l *Limiter) arm(m measure) {
	q := &l.queue
	switch w := q.head(); {
	case w != nil && q.timer != nil:
		q.timer.Reset(m.until(l.target(m, w)))
	case w != nil:
		q.timer = time.AfterFunc(m.until(l.target(m, w)), l.due)
	case q.timer != nil:
		q.timer.Stop()
		q.timer = nil
	}
}

// due is what the timer calls.
func (l *Limiter) due() {
	l.queue.mu.Lock()
	defer l.queue.mu.Unlock()
	l.serve()
}
