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

// waitInLine takes the tokens of a call, if need be after a wait.
func (a *account) waitInLine(ctx context.Context, by caller, cfg *Config, n, level int) error {
	w, refused := a.lineUp(ctx, cfg, n, level)
	why := refused.Reason
	switch {
	case why == DeadlineTooClose:
		refused.Err = context.DeadlineExceeded
		return a.tellRefused(ctx, by, cfg, refused)
	case why != "":
		return a.tellRefused(ctx, by, cfg, refused)
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
	granted, after := a.leave(w, why)
	waited := time.Since(start)
	late := ctx.Err() != nil
	if granted {
		a.countWaited(n, waited, late)
	}
	refused.Reason, refused.After, refused.Waited = why, after, waited
	switch {
	case late:
		refused.Reason, refused.Err = ContextEnded, ended.Error(ctx)
		return a.tellRefused(ctx, by, cfg, refused)
	case granted:
		if by.observers.Any() {
			by.observers.Tell(ctx, Event{
				Kind: EventWaited, Name: cfg.Name, Key: by.key, Level: level, Cost: n, Waited: waited,
			})
		}
		return nil
	}
	return a.tellRefused(ctx, by, cfg, refused)
}

// countWaited counts a call that was granted after a wait. If that was too late for the
// call, its tokens are lost: waiters behind it may have been granted within their time.
func (a *account) countWaited(n int, waited time.Duration, late bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if late {
		a.lose(n)
		return
	}
	a.count(n)
	a.did.Waited++
	a.did.WaitTime += waited
}

// lineUp takes n tokens, and returns a waiter in line if they are not there yet. Or it
// returns an error whose Reason says why the call is refused.
func (a *account) lineUp(ctx context.Context, cfg *Config, n, level int) (w *waiter, refused *LimitedError) {
	a.mu.Lock()
	defer a.mu.Unlock()
	refused = &LimitedError{Cost: n, Level: level}
	m := a.serve()
	if m.quotas != nil {
		if b := m.takeAll(a.more.windows, present(), n, level, true); b.why == OverQuota {
			b.refuse(refused)
			return nil, refused
		}
	}
	refused.After = a.behind(m, n, level)
	if refused.After == 0 {
		a.spendQuotas(m.terms, n)
		a.spend(m, n)
		return nil, refused
	}
	call := arrival{wait: refused.After, maxWait: cfg.MaxWait, left: never, ahead: time.Duration(m.ahead().NS)}
	if deadline, limited := ctx.Deadline(); limited {
		call.left = time.Until(deadline)
	}
	if refused.Reason = call.refusal(); refused.Reason == "" && !a.makeRoom(m, cfg.Queue, level) {
		refused.Reason = QueueFull
	}
	if refused.Reason != "" {
		return nil, refused
	}
	w = &waiter{level: level, n: n, ends: a.spendQuotas(m.terms, n), over: make(chan struct{})}
	a.enqueue(w)
	a.serve()
	return w, refused
}

// An arrival is what a call finds for which the tokens are not there.
type arrival struct {
	wait    time.Duration // until they are; never: more than there can be at once
	maxWait time.Duration // negative: the call may wait for any time
	left    time.Duration // until its deadline; never: it has none
	ahead   time.Duration // the time of the tokens that are missing
}

// maxAhead is the longest time of missing tokens behind which a call waits.
const maxAhead = 18 * 365 * 24 * time.Hour

// refusal returns why the call may not wait, or "".
func (a arrival) refusal() Reason {
	switch {
	case a.wait == never: // the burst has just become smaller
		return TooCostly
	case a.ahead > maxAhead, a.maxWait > 0 && a.wait > a.maxWait:
		return WaitTooLong
	case a.left < a.wait:
		return DeadlineTooClose
	}
	return ""
}

// spendQuotas takes n tokens from the windows of the quotas, and returns their ends.
func (a *account) spendQuotas(t *terms, n int) (ends []int64) {
	if t.quotas == nil {
		return nil
	}
	now := present()
	for i := range t.quotas {
		q := &t.quotas[i]
		a.more.windows[i] = q.spend(q.at(a.more.windows[i], now), now, n)
		ends = append(ends, a.more.windows[i].end)
	}
	return ends
}

// unspendQuotas gives the tokens of w back to the windows that it has taken them from,
// unless these are over.
func (a *account) unspendQuotas(w *waiter) {
	for i, end := range w.ends {
		if spent := &a.more.windows[i]; spent.end == end {
			spent.used -= min(int64(w.n), spent.used)
		}
	}
}

// behind returns how long a call of n tokens would wait, behind the waiters of its
// level and the more important ones.
func (a *account) behind(m measure, n, level int) time.Duration {
	if m.cannot(n, level) {
		return never
	}
	if a.more != nil {
		for _, line := range a.more.queue.levels[:min(level+1, len(a.more.queue.levels))] {
			n += line.tokens
		}
	}
	return m.until(a.due(m, n, level))
}

// due returns when n tokens are there for a level, if no waiter takes any of them.
func (a *account) due(m measure, n, level int) bucket.Time {
	return m.rate.Due(a.tat, m.rate.Of(n), m.room[level])
}

// makeRoom makes room for one more waiter in a queue of most, and reports whether it
// could. In a full queue the last waiter of the least important level makes room for a
// call that is more important.
func (a *account) makeRoom(m measure, most, level int) bool {
	q := a.queue()
	if q.queued < most && a.waiters.enter() {
		return true
	}
	for i := len(q.levels) - 1; i > level; i-- {
		if last := q.levels[i].last; last != nil {
			a.waiters.add() // first, so that no call of another key gets the place
			a.remove(m, last)
			return true
		}
	}
	return false
}

func (w *waiters) enter() bool {
	if w == nil || w.now.Add(1) <= w.max.Load() {
		return true
	}
	w.now.Add(-1)
	return false
}

func (w *waiters) add() {
	if w != nil {
		w.now.Add(1)
	}
}

func (w *waiters) leave() {
	if w != nil {
		w.now.Add(-1)
	}
}

// enqueue puts w at the end of its line.
func (a *account) enqueue(w *waiter) {
	q := a.queue()
	if q.levels == nil {
		q.levels = make([]line, len(a.terms.Load().room))
	}
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
func (a *account) dequeue(w *waiter) {
	q := a.queue()
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
	a.waiters.leave()
	close(w.over)
}

// leave takes w out of line, unless it has left already, and reports whether w was
// granted. It returns how long a call like it would wait now.
func (a *account) leave(w *waiter, why Reason) (granted bool, after time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	granted = w.granted
	// Waiters that are due are granted first: no other waiter may move up into the past.
	m := a.serve()
	select {
	case <-w.over:
		if w.granted && !granted && why == ContextEnded { // granted by this serve, and too late
			// What other waiters have had their time of since is lost.
			a.tat = m.rate.Sub(a.tat, m.rate.Sub(w.tat, m.rate.Back(w.tat, m.now, m.rate.Of(w.n))))
			a.unspendQuotas(w)
			w.granted = false
		}
	default:
		a.remove(m, w)
	}
	return w.granted, a.behind(a.serve(), w.n, w.level)
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
func (a *account) remove(m measure, w *waiter) {
	if a.queue().head() == w {
		// w may wait for more than a burst. The part above a burst that it has waited for
		// already goes to no other call.
		a.tat = bucket.Later(a.tat, bucket.Time{NS: m.now})
	}
	a.dequeue(w)
	a.unspendQuotas(w)
}

// serve grants the waiters that are due, sets the timer for the next one, and returns the
// measure after that. The caller holds mu.
func (a *account) serve() measure {
	if a.more == nil {
		return a.measure()
	}
	q := a.queue()
	m := a.measure()
	for w := q.head(); w != nil && !a.due(m, w.n, w.level).After(m.now); w = q.head() {
		a.tat = m.rate.Add(a.tat, m.rate.Of(w.n))
		w.granted, w.tat = true, a.tat
		a.dequeue(w)
	}
	a.arm(m)
	return m
}

// arm sets the timer for the head.
func (a *account) arm(m measure) {
	q := a.queue()
	switch w := q.head(); {
	case w != nil && q.timer != nil:
		q.timer.Reset(m.until(a.due(m, w.n, w.level)))
	case w != nil:
		q.timer = time.AfterFunc(m.until(a.due(m, w.n, w.level)), a.wake)
	default:
		if q.timer != nil {
			q.timer.Stop()
			q.timer = nil // it may belong to a bubble of testing/synctest
		}
		if a.more.windows == nil {
			a.more = nil
		}
	}
}

// queue returns the queue, to be written to.
func (a *account) queue() *queue {
	if a.more == nil {
		a.more = &more{}
	}
	return &a.more.queue
}

// wake serves the waiters. The timer calls it.
func (a *account) wake() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.serve()
}
