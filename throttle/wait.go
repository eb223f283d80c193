package throttle

import (
	"context"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// Waiting is a reservation: the tokens are taken at once, by a tat further ahead
// than a burst, and the call goes on when the time has come up with it. So the
// whole line of tat holds one interval for each token, and each call begins to
// run before its intervals do: that is what bounds any interval of time.
//
// Who gives up leaves a gap, which would be lost, or filled twice. Instead all
// that were reserved after it move up, as if it had never come. This takes time
// proportional to their number.
type queue struct {
	waiting atomic.Int64 // changed under mu
	waited  atomic.Int64

	mu     sync.Mutex
	levels []line // one for each, as they run at different distances from their tat
	timer  *time.Timer
}

// A line holds the waiters of a level in the order of their tat, in which they
// also become due.
type line []*waiter

type waiter struct {
	units   int64 // that it takes
	tat     int64 // after it has taken them
	ready   chan struct{}
	granted bool // it is no longer in line
}

// wait takes the tokens of a call ahead of time, and waits for that.
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
	select {
	case <-w.ready:
	case <-ctx.Done():
	}
	if ctx.Err() == nil {
		l.queue.waited.Add(1)
		l.count(n)
		return nil
	}
	after = l.abandon(w, n, level)
	return l.refuse(ctx, ContextEnded, n, level, after, ended.Error(ctx))
}

// reserve takes n tokens and puts the call in line for them; there is no waiter
// if there is nothing left to wait for. Or it says why the call is refused.
func (l *Limiter) reserve(ctx context.Context, n, level int) (w *waiter, after time.Duration, why Reason) {
	q := &l.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		m := l.measureLocked()
		after = m.wait(n, level)
		if why = l.reject(ctx, m, after); why != 0 {
			return nil, after, why
		}
		units := m.tokens(n)
		tat := max(m.tat, m.now) + units
		if !l.tat.CompareAndSwap(m.tat, tat) {
			continue
		}
		if after == 0 {
			return nil, 0, 0
		}
		w = &waiter{units: units, tat: tat, ready: make(chan struct{})}
		q.levels[level] = append(q.levels[level], w)
		q.waiting.Add(1)
		if len(q.levels[level]) == 1 {
			l.arm(m)
		}
		return w, after, 0
	}
}

// reject says why a call is not to wait for so long; 0 if it may.
func (l *Limiter) reject(ctx context.Context, m measure, wait time.Duration) Reason {
	deadline, limited := ctx.Deadline()
	switch {
	case wait == 0:
		return 0
	case wait == never: // the burst has become smaller
		return TooCostly
	case m.tat-m.now > maxDebt, l.cfg.MaxWait > 0 && wait > l.cfg.MaxWait:
		return WaitTooLong
	case limited && time.Until(deadline) < wait:
		return DeadlineTooClose
	case l.queue.waiting.Load() >= int64(l.cfg.MaxQueue):
		return QueueFull
	}
	return 0
}

// abandon takes w out of line and gives its tokens back, unless its time had come.
// It returns how long another call like it would have to wait.
func (l *Limiter) abandon(w *waiter, n, level int) time.Duration {
	q := &l.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	if w.granted {
		// Others may have run behind it, within the time that its tokens stand for.
		l.extra.Add(int64(n))
	} else {
		i := slices.Index(q.levels[level], w)
		q.levels[level] = slices.Delete(q.levels[level], i, i+1)
		q.waiting.Add(-1)
		m := l.measureLocked()
		// What lies in the past cannot be given to anybody.
		l.moveUp(w.tat, w.tat-max(w.tat-w.units, m.now))
	}
	return l.serve().wait(n, level)
}

// putBack returns n tokens to those who wait, and then to the burst. Nobody's
// tokens move into the past: what would come there is more than a burst.
func (l *Limiter) putBack(n int) {
	m := l.measureLocked()
	first := m.tat
	for _, line := range l.queue.levels {
		if len(line) > 0 {
			first = min(first, line[0].tat-line[0].units)
		}
	}
	by := first - m.now
	if int64(n) <= by>>m.frac {
		by = m.tokens(n)
	}
	l.moveUp(m.now, by)
}

// moveUp moves by units ahead what was reserved after a tat.
func (l *Limiter) moveUp(after, by int64) {
	if by <= 0 {
		return
	}
	for _, line := range l.queue.levels {
		for _, w := range slices.Backward(line) {
			if w.tat <= after {
				break
			}
			w.tat -= by
		}
	}
	l.tat.Add(-by)
}

// due is what the timer calls when somebody's time has come.
func (l *Limiter) due() {
	l.queue.mu.Lock()
	defer l.queue.mu.Unlock()
	l.serve()
}

// serve lets those go on whose time has come, and sets the timer for the next.
func (l *Limiter) serve() measure {
	m := l.measureLocked()
	for level, line := range l.queue.levels {
		for len(line) > 0 && line[0].tat-m.room[level] <= m.now {
			l.queue.waiting.Add(-1)
			line[0].granted = true
			close(line[0].ready)
			line[0] = nil
			line = line[1:]
		}
		l.queue.levels[level] = line
	}
	l.arm(m)
	return m
}

// arm sets the timer for the first who is due.
func (l *Limiter) arm(m measure) {
	q := &l.queue
	first := int64(math.MaxInt64)
	for level, line := range q.levels {
		if len(line) > 0 {
			first = min(first, line[0].tat-m.room[level])
		}
	}
	switch {
	case first != math.MaxInt64 && q.timer != nil:
		q.timer.Reset(m.until(first))
	case first != math.MaxInt64:
		q.timer = time.AfterFunc(m.until(first), l.due)
	case q.timer != nil:
		q.timer.Stop()
		q.timer = nil
	}
}
