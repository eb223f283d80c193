package bulkhead

import (
	"cmp"
	"slices"
	"time"
)

// A queue holds the calls that wait: in a line for each share at each level, by age. It reads no clock and takes no
// lock.
type queue struct {
	lines     []*line           // in order of their turns: a line that was served moves to the end
	waiting   int               // calls, in all lines
	since     time.Duration     // start of the period in which the queue has not been empty
	shares    map[string]*share // those with slots or waiting calls, by name
	common    share             // of the calls without a name: all calls if Config.Share is nil
	abandoned bool              // a caller whose call waited has canceled it
	goneAt    time.Duration     // time of the last such cancellation
}

// A share counts the slots and waiting calls of one Config.Share, at all levels.
type share struct {
	name    string
	held    int // slots
	waiting int // calls
}

// A line holds the calls of one share that wait at one level.
type line struct {
	level          int
	share          *share
	since          time.Duration // start of the period in which the line has not been empty
	oldest, newest *waiter
	waiting        int
	served         bool    // a call in the line has been served in this period
	reserving      *waiter // the call that free slots are reserved for, or nil
}

// A waiter is a call that has to wait.
type waiter struct {
	slots
	level        int
	line         *line   // nil before and after it waits
	older, newer *waiter // neighbors in line
	since        time.Duration
	expires      time.Duration   // end of its MaxWait, or never
	deadline     time.Duration   // its ctx's deadline, or never
	ended        <-chan struct{} // Done of its ctx
	ready        chan struct{}   // closed when it has its slots or is refused; until then mu guards the waiter
	refusal      *FullError
}

// hopeless reports whether the call's deadline is too close.
func (w *waiter) hopeless(at time.Duration, s *service) bool {
	return w.deadline != never && tooClose(w.deadline-at, s.typical())
}

// end returns the time at which the call is refused if it still waits and s does not change, or never.
func (w *waiter) end(s *service) time.Duration {
	if w.deadline == never || s.typical() == 0 {
		return w.expires
	}
	return min(w.expires, w.deadline-s.typical()+1) // one later than it may be, so it is hopeless
}

// overdue returns why the call is to be refused, or "".
func (w *waiter) overdue(at time.Duration, s *service) Reason {
	select {
	case <-w.ended: // which its goroutine may not have noticed yet
		return ContextEnded
	default:
	}
	switch {
	case at >= w.expires:
		return WaitTooLong
	case w.hopeless(at, s):
		return DeadlineTooClose
	}
	return ""
}

// shareFor returns the share of a name.
func (q *queue) shareFor(name string) *share {
	if name == "" {
		return &q.common
	}
	if s := q.shares[name]; s != nil {
		return s
	}
	return &share{name: name}
}

// count adds slots and waiting calls to a share. It forgets a share that has neither, because there may be any number
// of names.
func (q *queue) count(s *share, held, waiting int) {
	s.held += held
	s.waiting += waiting
	q.waiting += waiting
	switch {
	case s == &q.common:
	case s.held == 0 && s.waiting == 0:
		delete(q.shares, s.name)
	case q.shares == nil:
		q.shares = map[string]*share{s.name: s}
	default:
		q.shares[s.name] = s
	}
}

// abandon records that a caller has canceled a call that waits or has waited.
func (q *queue) abandon(at time.Duration) { q.abandoned, q.goneAt = true, at }

// hasWaiterUpTo reports whether a call waits that is at least as important as level.
func (q *queue) hasWaiterUpTo(level int) bool {
	return slices.ContainsFunc(q.lines, func(l *line) bool { return l.level <= level })
}

// lineFor returns the line that a call waits in, or nil.
func (q *queue) lineFor(w *waiter) *line {
	i := slices.IndexFunc(q.lines, func(l *line) bool { return l.level == w.level && l.share == w.share })
	if i < 0 {
		return nil
	}
	return q.lines[i]
}

// add lets a call wait.
func (q *queue) add(w *waiter) {
	if q.waiting == 0 {
		q.since = w.since
	}
	l := q.lineFor(w)
	if l == nil {
		l = &line{level: w.level, share: w.share, since: w.since, oldest: w}
		q.lines = append(q.lines, l)
	} else {
		w.older, l.newest.newer = l.newest, w
	}
	w.line, l.newest = l, w
	l.waiting++
	q.count(l.share, 0, 1)
}

// next returns the call that is served next. It is called when a slot is free and a call waits. It returns the same
// call until that call is removed or a more important call waits, even if another share holds fewer slots by then or
// the order changes: otherwise a costly call might never get its slots.
func (q *queue) next(at, maxWait time.Duration) *waiter {
	l := q.nextLine(q.order(at, q.since, maxWait))
	if l.reserving == nil {
		l.reserving = l.oldest
		if q.order(at, l.since, maxWait) == newestFirst {
			l.reserving = l.newest
		}
	}
	return l.reserving
}

// order returns the order in which calls are served that have been waiting since a moment without a break.
func (q *queue) order(at, since, maxWait time.Duration) order {
	return demand{standing: at - since, abandoned: q.abandoned, sinceGone: at - q.goneAt, maxWait: maxWait}.order()
}

// nextLine returns the line that is served next. At the most important level, this is the line whose share holds the
// fewest slots. Shares that hold equally many take turns. With newestFirst, the newest share without a turn so far
// comes before them, because each of many shares may have a single call.
func (q *queue) nextLine(o order) *line {
	held := func(l *line) int {
		if l.reserving != nil {
			return -1
		}
		return l.share.held
	}
	compare := func(a, b *line) int {
		return cmp.Or(cmp.Compare(a.level, b.level), cmp.Compare(held(a), held(b)))
	}
	first := slices.MinFunc(q.lines, compare)
	if o == newestFirst {
		for _, l := range slices.Backward(q.lines) {
			if !l.served && compare(l, first) == 0 {
				return l
			}
		}
	}
	return first
}

// victim returns the call that newcomer displaces in a full queue, or nil. It is the newest call in the longest line of
// the least important level. A line at newcomer's level must be longer than newcomer's line would become; otherwise
// the two calls would only change places.
func (q *queue) victim(newcomer *waiter) *waiter {
	longest := slices.MaxFunc(q.lines, func(a, b *line) int {
		return cmp.Or(cmp.Compare(a.level, b.level), cmp.Compare(a.waiting, b.waiting))
	})
	waiting := 1
	if l := q.lineFor(newcomer); l != nil {
		waiting += l.waiting
	}
	if longest.level > newcomer.level || longest.level == newcomer.level && longest.waiting > waiting {
		return longest.newest
	}
	return nil
}

// remove takes a call out of the queue. If the call was served, its line moves to the end.
func (q *queue) remove(w *waiter, served bool) {
	l := w.line
	if l.reserving == w {
		l.reserving = nil
	}
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
	w.line = nil
	l.waiting--
	q.count(l.share, 0, -1)
	l.served = l.served || served
	if served || l.waiting == 0 {
		i := slices.Index(q.lines, l)
		q.lines = slices.Delete(q.lines, i, i+1)
		if l.waiting > 0 {
			q.lines = append(q.lines, l)
		}
	}
}
