package throttle

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/throttle/internal/bucket"
)

// A queue holds the waiting calls by level, and those of a level in the order of
// arrival. It counts the tokens that they are to take, by level and in all. The head is
// granted when its tokens are there. The others wait for the tokens ahead of them as well,
// and calls that do not wait find the tokens of all of them taken. So a waiter that
// arrives, leaves or overtakes changes one sum, however many waiters there are.
//
// A late timer does not move the schedule: all waiters that are due are granted
// together.
type queue struct {
	queued int
	tokens int // that all waiters are to take
	levels []line
	timer  *time.Timer
	all    *waiters // of the Group, or nil
}

// A line holds the waiters of one level in the order of arrival.
type line struct {
	first, last *waiter
	tokens      int // that its waiters are to take
}

type waiter struct {
	level, n   int     // n is in tokens
	ends       []int64 // of the windows of the quotas that it has taken its tokens from
	prev, next *waiter
	over       chan struct{} // closed when it has left the line
	granted    bool          // set before that, if it has its tokens
	tat        bucket.Time   // after it was granted
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
	granted, after := l.leave(w, why)
	waited := time.Since(start)
	late := ctx.Err() != nil
	if granted {
		l.countWaited(n, waited, late)
	}
	refused.Reason, refused.After, refused.Waited = why, after, waited
	switch {
	case late:
		refused.Reason, refused.Err = ContextEnded, ended.Error(ctx)
		return l.refuse(ctx, cfg, refused)
	case granted:
		if l.observers.Any() {
			l.observers.Tell(ctx, Event{
				Kind: EventWaited, Name: cfg.Name, Key: l.key, Level: level, Cost: n, Waited: waited,
			})
		}
		return nil
	}
	return l.refuse(ctx, cfg, refused)
}

// countWaited counts a call that was granted after a wait. If that was too late for the
// call, its tokens are lost: waiters behind it may have been granted within their time.
func (l *Limiter) countWaited(n int, waited time.Duration, late bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if late {
		l.did.Spent += int64(n)
		return
	}
	l.count(n)
	l.did.Waited++
	l.did.WaitTime += waited
}

// lineUp takes n tokens, and returns a waiter in line if they are not there yet. Or it
// returns an error whose Reason says why the call is refused.
func (l *Limiter) lineUp(ctx context.Context, cfg *Config, n, level int) (w *waiter, refused *LimitedError) {
	l.mu.Lock()
	defer l.mu.Unlock()
	refused = &LimitedError{Cost: n, Level: level}
	m := l.serve()
	if m.quotas != nil {
		if b := m.takeAll(l.windows, present(), n, level, true); b.why == OverQuota {
			b.refuse(refused)
			return nil, refused
		}
	}
	after := l.behind(m, n, level)
	if after == 0 {
		l.spendQuotas(m.terms, n)
		l.spend(m, n)
		return nil, refused
	}
	refused.After = after
	if refused.Reason = m.whyNotWait(ctx, cfg, after); refused.Reason == "" && !l.makeRoom(m, cfg.Queue, level) {
		refused.Reason = QueueFull
	}
	if refused.Reason != "" {
		return nil, refused
	}
	w = &waiter{level: level, n: n, ends: l.spendQuotas(m.terms, n), over: make(chan struct{})}
	l.enqueue(w)
	l.serve()
	return w, refused
}

// spendQuotas takes n tokens from the windows of the quotas, and returns their ends.
func (l *Limiter) spendQuotas(t *terms, n int) (ends []int64) {
	if t.quotas == nil {
		return nil
	}
	now := present()
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
	for _, line := range l.queue.levels[:level+1] {
		n += line.tokens
	}
	return m.until(l.due(m, n, level))
}

// due returns when n tokens are there for a level, if no waiter takes any of them.
func (l *Limiter) due(m measure, n, level int) bucket.Time {
	return m.rate.Due(l.tat, m.rate.Of(n), m.room[level])
}

// maxAhead is the longest time of missing tokens behind which a call waits.
const maxAhead = int64(18 * 365 * 24 * time.Hour)

// whyNotWait returns why a call may not wait for that long, or "".
func (m measure) whyNotWait(ctx context.Context, cfg *Config, wait time.Duration) Reason {
	deadline, limited := ctx.Deadline()
	switch {
	case wait == never: // the burst has just become smaller
		return TooCostly
	case m.ahead().NS > maxAhead, cfg.MaxWait > 0 && wait > cfg.MaxWait:
		return WaitTooLong
	case limited && time.Until(deadline) < wait:
		return DeadlineTooClose
	}
	return ""
}

// makeRoom makes room for one more waiter in a queue of most, and reports whether it
// could. In a full queue the last waiter of the least important level makes room for a
// call that is more important.
func (l *Limiter) makeRoom(m measure, most, level int) bool {
	q := &l.queue
	if q.queued < most && q.all.enter() {
		return true
	}
	for i := len(q.levels) - 1; i > level; i-- {
		if last := q.levels[i].last; last != nil {
			l.remove(m, last)
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

// enqueue puts w at the end of its line.
func (l *Limiter) enqueue(w *waiter) {
	q := &l.queue
	line := &q.levels[w.level]
	if w.prev = line.last; w.prev == nil {
		line.first = w
	} else {
		w.prev.next = w
	}
	line.last = w
	line.tokens += w.n
	q.tokens += w.n
	q.queued++
}

// dequeue takes w out of line.
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
	line.tokens -= w.n
	q.tokens -= w.n
	q.queued--
	q.all.leave()
	close(w.over)
}

// leave takes w out of line, unless it has left already, and reports whether w was
// granted. It returns how long a call like it would wait now.
func (l *Limiter) leave(w *waiter, why Reason) (granted bool, after time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	granted = w.granted
	// Waiters that are due are granted first: no other waiter may move up into the past.
	m := l.serve()
	select {
	case <-w.over:
		if w.granted && !granted && why == ContextEnded { // granted by this serve, and too late
			// What other waiters have had their time of since is lost.
			l.tat = m.rate.Sub(l.tat, m.rate.Sub(w.tat, m.rate.Back(w.tat, m.now, m.rate.Of(w.n))))
			l.unspendQuotas(w)
			w.granted = false
		}
	default:
		l.remove(m, w)
	}
	return w.granted, l.behind(l.serve(), w.n, w.level)
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

// remove takes w out of line. All waiters that are due have been granted before.
func (l *Limiter) remove(m measure, w *waiter) {
	if l.queue.head() == w {
		// w may wait for more than a burst. The part above a burst that it has waited for
		// already goes to no other call.
		l.tat = bucket.Later(l.tat, bucket.Time{NS: m.now})
	}
	l.dequeue(w)
	l.unspendQuotas(w)
}

// serve grants the waiters that are due, sets the timer for the next one, and returns the
// measure after that. The caller holds mu.
func (l *Limiter) serve() measure {
	q := &l.queue
	m := l.measure()
	for w := q.head(); w != nil && !l.due(m, w.n, w.level).After(m.now); w = q.head() {
		l.tat = m.rate.Add(l.tat, m.rate.Of(w.n))
		w.granted, w.tat = true, l.tat
		l.dequeue(w)
	}
	l.arm(m)
	return m
}

// arm sets the timer for the head.
func (l *Limiter) arm(m measure) {
	q := &l.queue
	switch w := q.head(); {
	case w != nil && q.timer != nil:
		q.timer.Reset(m.until(l.due(m, w.n, w.level)))
	case w != nil:
		q.timer = time.AfterFunc(m.until(l.due(m, w.n, w.level)), l.wake)
	case q.timer != nil:
		q.timer.Stop()
		q.timer = nil
	}
}

// wake serves the waiters. The timer calls it.
func (l *Limiter) wake() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.serve()
}

// begin makes cfg the limit. Tokens that have been spent stay spent. The caller holds mu.
func (l *Limiter) begin(cfg *Config) {
	last, next := l.terms.Load(), newTerms(cfg)
	now := l.measure().now
	if l.queue.queued > 0 { // what the head has saved is not worth the same at another rate
		l.tat = bucket.Later(l.tat, bucket.Time{NS: now})
	}
	l.tat = next.rate.Follow(l.tat, now, &last.rate)
	from := next.inherit(last)
	l.windows = pick(l.windows, from)
	for i := range l.queue.levels {
		for w := l.queue.levels[i].first; w != nil; w = w.next {
			w.ends = pick(w.ends, from)
		}
	}
	l.terms.Store(next)
}
