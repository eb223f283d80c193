package throttle

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// A queue holds the waiting calls by level, and those of a level in the order of
// arrival. Their tokens are taken ahead of time: the tat of the Limiter includes them,
// so calls that do not wait cannot take them. The tokens belong to the queue and not
// to a place in it: the head is granted when the tat, less the tokens of the other
// waiters, is within the head's room. So a waiter that arrives, leaves or overtakes
// changes one sum, however many waiters there are.
//
// A late timer does not move the schedule: all waiters that are due are granted
// together.
type queue struct {
	queued   atomic.Int64 // waiters; changed under mu
	waited   atomic.Int64 // calls that were admitted after a wait
	waitTime atomic.Int64 // of these calls, a time.Duration
	all      *waiters     // of the Group, or nil

	mu     sync.Mutex
	units  int64 // that all waiters are to take
	levels []line
	timer  *time.Timer
}

// A line holds the waiters of one level in the order of arrival.
type line struct {
	first, last *waiter
	units       int64 // that its waiters are to take
}

type waiter struct {
	level      int
	units      int64   // that it is to take
	n          int     // the same in tokens
	ends       []int64 // of the windows of the quotas that it has taken its tokens from
	prev, next *waiter
	over       chan struct{} // closed when it has left the line
	granted    bool          // set before that, if it has its tokens
	tat        int64         // the tat without the waiters behind it, if granted
}

// waiters counts the waiting calls of all limits of a Group.
type waiters struct {
	now atomic.Int64
	max atomic.Int64
}

// wait takes the tokens of a call, if need be after a wait in line.
func (l *Limiter) wait(ctx context.Context, cfg *Config, n, level int) error {
	w, refused := l.lineUp(ctx, cfg, n, level)
	why := refused.Reason
	switch {
	case why == DeadlineTooClose:
		refused.Err = context.DeadlineExceeded
		return l.refuse(ctx, cfg, refused)
	case why != "":
		return l.refuse(ctx, cfg, refused)
	case w == nil:
		l.count(n)
		return nil
	}
	start := time.Now()
	var tooLong <-chan time.Time
	if cfg.MaxWait > 0 { // more important calls may overtake it
		timer := time.NewTimer(cfg.MaxWait)
		defer timer.Stop()
		tooLong = timer.C
	}
	select {
	case <-w.over:
		why = Displaced // unless granted
	case <-tooLong:
		why = WaitTooLong
	case <-ctx.Done():
		why = ContextEnded
	}
	granted, after := l.leave(w, why, n, level)
	waited := time.Since(start)
	refused.Reason, refused.After, refused.Waited = why, after, waited
	switch {
	case ctx.Err() != nil:
		if granted {
			// The tokens are lost: waiters behind it may have been granted within their
			// time.
			l.spent.Add(int64(n))
		}
		refused.Reason, refused.Err = ContextEnded, ended.Error(ctx)
		return l.refuse(ctx, cfg, refused)
	case granted:
		l.queue.waited.Add(1)
		l.queue.waitTime.Add(int64(waited))
		l.count(n)
		if l.observers.Any() {
			l.observers.Tell(ctx, Event{
				Kind: EventWaited, Name: cfg.Name, Key: l.key, Level: level, Cost: n, Waited: waited,
			})
		}
		return nil
	}
	return l.refuse(ctx, cfg, refused)
}

// lineUp takes n tokens, and returns a waiter in line if they are not there yet. Or it
// returns an error whose Reason says why the call is refused. All waiters that are due
// have been granted before.
func (l *Limiter) lineUp(ctx context.Context, cfg *Config, n, level int) (w *waiter, refused *LimitedError) {
	q := &l.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	refused = &LimitedError{Cost: n, Level: level}
	placed := false
	for {
		m := l.measureLocked()
		if m.quotas != nil {
			if b := m.takeAll(l.windows, l.watch.now(), n, level, true); b.why == OverQuota {
				b.refuse(refused)
				return nil, refused
			}
		}
		after := l.behind(m, n, level)
		if after > 0 && !placed {
			refused.After = after
			if refused.Reason = l.whyNotWait(ctx, cfg, m, after); refused.Reason == "" && !l.makeRoom(cfg.Queue, level) {
				refused.Reason = QueueFull
			}
			if refused.Reason != "" {
				return nil, refused
			}
			placed = true
		}
		units := m.tokens(n)
		tat := max(m.tat-q.units, m.now) + q.units + units
		if !l.tat.CompareAndSwap(m.tat, tat) { // changed by another call, or by makeRoom
			continue
		}
		ends := l.spendQuotas(m.terms, n)
		if !placed {
			return nil, refused
		}
		w = &waiter{level: level, n: n, units: units, ends: ends, over: make(chan struct{})}
		l.enqueue(w)
		l.serve()
		return w, refused
	}
}

// spendQuotas takes n tokens from the windows of the quotas, and returns their ends.
func (l *Limiter) spendQuotas(t *terms, n int) (ends []int64) {
	if t.quotas == nil {
		return nil
	}
	now := l.watch.now()
	for i := range t.quotas {
		q := &t.quotas[i]
		l.windows[i] = q.spend(q.at(l.windows[i], now), now, n)
		ends = append(ends, l.windows[i].end)
	}
	return ends
}

// unspendQuotas gives the tokens of w back to the windows that it has taken them from,
// unless these are over.
func (l *Limiter) unspendQuotas(w *waiter) {
	for i, end := range w.ends {
		if spent := &l.windows[i]; spent.end == end {
			spent.used -= min(int64(w.n), spent.used)
		}
	}
}

// behind returns how long a call of n tokens would wait, behind the waiters of its
// level and the more important ones.
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

// whyNotWait returns why a call may not wait for that long, or "".
func (l *Limiter) whyNotWait(ctx context.Context, cfg *Config, m measure, wait time.Duration) Reason {
	deadline, limited := ctx.Deadline()
	switch {
	case wait == never: // the burst has just become smaller
		return TooCostly
	case m.tat-m.now > maxDebt, cfg.MaxWait > 0 && wait > cfg.MaxWait:
		return WaitTooLong
	case limited && time.Until(deadline) < wait:
		return DeadlineTooClose
	}
	return ""
}

// makeRoom makes room for one more waiter in a queue of most, and reports whether it
// could. In a full queue the last waiter of the least important level makes room for a
// call that is more important.
func (l *Limiter) makeRoom(most, level int) bool {
	q := &l.queue
	if q.queued.Load() < int64(most) && q.all.enter() {
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
	if a == nil || a.now.Add(1) <= a.max.Load() {
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

// enqueue puts w at the end of its line. Its units are part of the tat already.
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
	q.queued.Add(1)
}

// dequeue takes w and its units out of line.
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
	line.units -= w.units
	q.units -= w.units
	q.queued.Add(-1)
	q.all.leave()
	close(w.over)
}

// leave takes w out of line, unless it has left already, and reports whether w was
// granted. It returns how long a call like it would wait now.
func (l *Limiter) leave(w *waiter, why Reason, n, level int) (granted bool, after time.Duration) {
	q := &l.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	granted = w.granted
	// Waiters that are due are granted first: no other waiter may move up into the past.
	m := l.serve()
	select {
	case <-w.over:
		if w.granted && !granted && why == ContextEnded { // granted by this serve, and too late
			l.tat.Add(-max(0, min(w.units, w.tat-m.now)))
			l.unspendQuotas(w)
			w.granted = false
		}
	default:
		l.remove(w)
	}
	return w.granted, l.behind(l.serve(), n, level)
}

// head returns the waiter that is to be granted next, or nil.
func (q *queue) head() *waiter {
	for i := range q.levels {
		if first := q.levels[i].first; first != nil {
			return first
		}
	}
	return nil
}

// remove takes w out of line and gives its tokens back. All waiters that are due have
// been granted before.
func (l *Limiter) remove(w *waiter) {
	q := &l.queue
	back := w.units
	if m := l.measureLocked(); q.head() == w {
		// w may wait for more than a burst. The part above a burst that it has waited
		// for already goes to no other call.
		back -= max(0, m.now-(m.tat-q.units))
	}
	l.dequeue(w)
	l.unspendQuotas(w)
	l.tat.Add(-back)
}

// putBack gives n tokens to the waiters, and the rest to the burst. Tokens that do
// not fit into the burst are lost.
func (l *Limiter) putBack(n int) {
	m := l.measureLocked()
	by := m.tat - l.queue.units - m.now
	if int64(n) <= by>>m.frac {
		by = m.tokens(n)
	}
	l.tat.Add(-max(by, 0))
}

// serve grants the waiters that are due, and sets the timer for the next one. The
// caller holds queue.mu.
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

// target returns when w, the head, is due.
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

// due serves the waiters. The timer calls it.
func (l *Limiter) due() {
	l.queue.mu.Lock()
	defer l.queue.mu.Unlock()
	l.serve()
}
