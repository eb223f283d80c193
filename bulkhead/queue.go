package bulkhead

import (
	"cmp"
	"slices"
	"time"
)

// A queue holds the waiting calls. It has a line for each share at each level. The calls in a line are ordered by
// age. A queue does not read a clock or acquire a lock.
type queue struct {
	lines    []*line           // lines in the order of their turns; a line that was served moves to the end
	waiting  int               // number of calls in all lines
	shares   map[string]*share // named shares that hold slots or have waiting calls, by name
	common   share             // the share of calls without a share name; the share of all calls if Config.Share is nil
	pressure []pressure        // the pressure of each level
}

// A share counts the held slots and the waiting calls of one share name, at all levels.
type share struct {
	name    string
	held    int // number of slots that the share's calls hold
	waiting int // number of waiting calls
}

// A line holds one share's waiting calls at one level.
type line struct {
	level          int
	share          *share
	oldest, newest *waiter
	waiting        int     // number of calls in the line
	served         bool    // a call in the line has been served
	reserving      *waiter // the call for which free slots are reserved, or nil
}

// A waiter is a call that does not get its slots immediately.
type waiter struct {
	slots
	level        int
	admission    timing          // timing of the slots, in the memory of the waiter
	line         *line           // the line in which the call waits; nil before and after the wait
	older, newer *waiter         // neighbors in line
	since        time.Duration   // start of the wait
	expires      time.Duration   // time at which the call has waited for MaxWait, or never
	deadline     time.Duration   // deadline of the call's ctx, or never
	ended        <-chan struct{} // Done channel of the call's ctx
	ready        chan struct{}   // closed when the call has its slots or is refused; mu guards the waiter until then
	refusal      *FullError
}

// hopeless reports whether the call's deadline is closer than the time that calls typically take.
func (w *waiter) hopeless(at time.Duration, s *service) bool {
	return w.deadline != never && tooClose(w.deadline-at, s.typical())
}

// end returns the time at which the call must be refused if it still waits then, or never if there is no such time.
// The result is valid only until s changes.
func (w *waiter) end(s *service) time.Duration {
	if w.deadline == never || s.typical() == 0 {
		return w.expires
	}
	return min(w.expires, w.deadline-s.typical()+1) // + 1, because w.hopeless is still false 1ns earlier
}

// overdue returns the reason why the call must be refused now. If the call may still wait, overdue returns "".
func (w *waiter) overdue(at time.Duration, s *service) Reason {
	select {
	case <-w.ended: // ctx may be done although the call's goroutine has not noticed it yet
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

// shareFor returns the share with the given name. If the queue has no such share, shareFor creates the share.
func (q *queue) shareFor(name string) *share {
	if name == "" {
		return &q.common
	}
	if s := q.shares[name]; s != nil {
		return s
	}
	return &share{name: name}
}

// count adds held slots and waiting calls to a share. The arguments may be negative. count is short enough to be
// inlined.
func (q *queue) count(s *share, held, waiting int) {
	s.held += held
	s.waiting += waiting
	q.waiting += waiting
	if s != &q.common {
		q.keep(s)
	}
}

// keep stores a named share in the map. It removes a share without slots and waiting calls from the map, because the
// number of names has no limit.
func (q *queue) keep(s *share) {
	if s.held == 0 && s.waiting == 0 {
		delete(q.shares, s.name)
	} else {
		q.shares[s.name] = s
	}
}

// abandon records that a caller has canceled a call that had to wait at a level.
func (q *queue) abandon(level int) { q.pressure[level] = q.pressure[level].canceled() }

// hasWaiterUpTo reports whether a waiting call is at least as important as level.
func (q *queue) hasWaiterUpTo(level int) bool {
	return slices.ContainsFunc(q.lines, func(l *line) bool { return l.level <= level })
}

// lineFor returns the line for the level and share of a call, or nil if there is no such line.
func (q *queue) lineFor(w *waiter) *line {
	i := slices.IndexFunc(q.lines, func(l *line) bool { return l.level == w.level && l.share == w.share })
	if i < 0 {
		return nil
	}
	return q.lines[i]
}

// add adds a call to the queue, as the newest call in its line.
func (q *queue) add(w *waiter) {
	l := q.lineFor(w)
	if l == nil {
		if !slices.ContainsFunc(q.lines, func(l *line) bool { return l.level == w.level }) {
			q.pressure[w.level] = 0
		}
		l = &line{level: w.level, share: w.share, oldest: w}
		q.lines = append(q.lines, l)
	} else {
		w.older, l.newest.newer = l.newest, w
	}
	w.line, l.newest = l, w
	l.waiting++
	q.count(l.share, 0, 1)
}

// next returns the call that is served next. It is called only if a slot is free and a call waits. It returns the
// same call until this call is removed or a more important call waits. It does so even if another share holds fewer
// slots by then, or if the order changes. Otherwise a costly call might never get its slots.
func (q *queue) next() *waiter {
	l := q.nextLine()
	if l.reserving == nil {
		l.reserving = l.oldest
		if q.pressure[l.level].order() == newestFirst {
			l.reserving = l.newest
		}
	}
	return l.reserving
}

// nextLine returns the line that is served next. At the most important level with waiting calls, this is the line
// whose share holds the fewest slots. Shares that hold equally many slots take turns. If the order is newestFirst,
// the newest line that has not been served yet has the first turn. If there are many shares with a single call each,
// that line contains the newest call.
func (q *queue) nextLine() *line {
	if len(q.lines) == 1 {
		return q.lines[0]
	}
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
	if q.pressure[first.level].order() == newestFirst {
		for _, l := range slices.Backward(q.lines) {
			if !l.served && compare(l, first) == 0 {
				return l
			}
		}
	}
	return first
}

// victim returns the call that newcomer displaces in a full queue, or nil. The displaced call is the newest call in
// the longest line of the least important level. If this is also newcomer's level, the longest line must be longer
// than newcomer's line would become. Otherwise the displacement would not make the lines more equal.
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

// remove removes a call from the queue. If the call was served, the call's line moves to the end.
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
	if served {
		l.served = true
		q.pressure[l.level] = q.pressure[l.level].served()
	}
	if served && len(q.lines) > 1 || l.waiting == 0 {
		i := slices.Index(q.lines, l)
		q.lines = slices.Delete(q.lines, i, i+1)
		if l.waiting > 0 {
			q.lines = append(q.lines, l)
		}
	}
}
