package fleet

import (
	"cmp"
	"context"
	"math"
	"slices"
	"time"

	"github.com/go-resilience/resilience/throttle"
)

// A line contains the calls of this process that wait for the same rate. Only the first call asks Redis, because Redis
// would refuse the calls behind it, too. Calls with a lower cost come first, because Redis can admit them earlier: an
// expensive call that the calls of other processes overtake must not delay the calls behind it. Calls with the same
// cost are in the order of their arrival.
type line struct {
	calls []*waiter
	empty time.Time // when the rate has 0 tokens, according to the last answer of Redis
	next  time.Time // like empty, but the calls that have had their turn since the last answer count as admitted
}

// A rateID identifies a line. While a limit is being changed, calls with the old and the new limit do not share a line.
type rateID struct {
	cfg       *Config // changed by Update: another Eval may use another Redis
	key       string  // the key of the rate's state in Redis
	limit     int64
	perSecond float64
}

// A waiter is a call that may wait for rates. After a refusal, it is in the line of the rate that refuses it for the
// longest time. A call is due when the rate has added the call's tokens since next. When it is the first of its line
// and due, it has its turn: it leaves the line and asks Redis.
type waiter struct {
	r      *Reservation
	start  time.Time
	rate   rateID
	refill time.Duration // the time in which the rate adds the tokens of the call
	number int64         // the position in the order of arrival; 0 until the call joins a line
	end    time.Time     // the end of MaxWait or the deadline of ctx; zero if there is neither
	wake   chan struct{} // receives when the call must check its position and its due time again
	turn   bool
}

// lineUp waits in the line of a meter, which has refused w with e, until w has its turn. If w must not wait or must not
// wait any longer, lineUp returns the reason or an error. reason is the reason that is already known, or empty.
func (l *Limits) lineUp(
	ctx context.Context, w *waiter, meter int, e *throttle.LimitedError, reason throttle.Reason,
) (throttle.Reason, error) {
	m := &w.r.meters[meter]
	if rate := (rateID{w.r.cfg, w.r.keys[meter], m.limit, m.perSecond}); rate != w.rate {
		l.handOver(w)
		w.rate, w.refill = rate, time.Duration(1e9*min(float64(m.cost)/m.perSecond, longest.Seconds()))
	}
	if w.wake == nil {
		w.wake = make(chan struct{}, 1)
		if w.r.cfg.MaxWait != Unlimited {
			w.end = w.start.Add(w.r.cfg.MaxWait)
		}
		if deadline, ok := ctx.Deadline(); ok && (w.end.IsZero() || deadline.Before(w.end)) {
			w.end = deadline
		}
	}
	l.join(w, e.After)
	defer l.leave(w)
	var err error
	for wait := time.Duration(0); reason == "" && err == nil; {
		after, poll := l.check(w)
		if w.turn {
			break
		}
		e.After, e.Waited = max(after, time.Microsecond), time.Since(w.start) // 0 would mean that the time is unknown
		if wait, reason = w.r.cfg.waitFor(ctx, e, poll); reason == "" {
			err = pause(ctx, l.closed, wait, w.wake)
		}
	}
	return reason, err
}

// join adds w to its line. Redis has just answered that w is due after a certain time. This answer also determines when
// the other calls are due. join wakes the first call, and each call that is due after its end.
func (l *Limits) join(w *waiter, after time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	q := l.lines[w.rate]
	if q == nil {
		q = &line{}
		l.lines[w.rate] = q
	}
	l.arrived++
	w.number = cmp.Or(w.number, l.arrived)
	w.turn, q.empty = false, time.Now().Add(after-w.refill)
	q.next = q.empty
	q.calls = slices.Insert(q.calls, q.find(w), w)
	for i, other := range q.calls {
		if i == 0 || !other.end.IsZero() && q.empty.Add(other.refill).After(other.end) {
			other.notify()
		}
	}
}

// check gives w its turn if w is the first of its line and due. The tokens of w then count as taken, so the next call
// has its turn as soon as it is due, even if Redis has not answered w. Thus, a late answer delays only one call. But
// these tokens are not part of after, because they must not cause a refusal: Redis may have more tokens than expected,
// for example after a settlement. w checks again after the time poll.
func (l *Limits) check(w *waiter) (after, poll time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	q := l.lines[w.rate]
	after, poll = time.Until(q.empty.Add(w.refill)), math.MaxInt64 // w wakes when it is the first, or when MaxWait ends
	if q.calls[0] == w {
		poll = time.Until(q.next.Add(w.refill))
	}
	if poll <= 0 {
		w.turn, q.next = true, q.next.Add(w.refill)
	}
	return after, poll
}

// leave removes w from its line.
func (l *Limits) leave(w *waiter) {
	l.mu.Lock()
	defer l.mu.Unlock()
	q := l.lines[w.rate]
	i := q.find(w)
	if q.calls = slices.Delete(q.calls, i, i+1); len(q.calls) == 0 {
		delete(l.lines, w.rate)
	} else if i == 0 {
		q.calls[0].notify()
	}
}

// handOver ends the turn of w. The first call of the line is then due immediately, because the rate may have more
// tokens than expected, for example after a settlement.
func (l *Limits) handOver(w *waiter) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if q := l.lines[w.rate]; q != nil && w.turn {
		if now := time.Now().Add(-q.calls[0].refill); now.Before(q.next) {
			q.next = now
		}
		q.calls[0].notify()
	}
	w.turn = false
}

// find returns the position of w in q.
func (q *line) find(w *waiter) int {
	i, _ := slices.BinarySearchFunc(q.calls, w, func(a, b *waiter) int {
		return cmp.Or(cmp.Compare(a.refill, b.refill), cmp.Compare(a.number, b.number))
	})
	return i
}

// notify wakes w.
func (w *waiter) notify() {
	select {
	case w.wake <- struct{}{}:
	default: // w will wake up anyway
	}
}
