package bulkhead

import (
	"cmp"
	"slices"
	"time"
)

// A queue holds the calls that wait: in a line for each share at each level, by age. It reads no
// clock and takes no lock.
type queue struct {
	lines   []*line           // by turn: one that was served moves to the back
	waiting int               // calls, in all lines
	shares  map[string]*share // with slots or waiters, by name
	common  share             // of the calls without a name: of all, if there is no Config.Share
}

// A share is what the calls of one Config.Share have, at all levels.
type share struct {
	name    string
	held    int // slots
	waiting int // calls
}

// A line is what waits of one share at one level.
type line struct {
	level          int
	share          *share
	oldest, newest *waiter
	waiting        int
	kept           bool // free slots are kept for the oldest
}

// A waiter is a call that waits.
type waiter struct {
	slots
	level        int
	line         *line   // nil before and after it waits
	older, newer *waiter // in line
	since        time.Duration
	ended        <-chan struct{} // Done of its ctx
	ready        chan struct{}   // closed when it has its slots or is refused; until then mu guards all of it
	waited       time.Duration
	refusal      *FullError
}

// shareOf returns the share of a name.
func (q *queue) shareOf(name string) *share {
	if name == "" {
		return &q.common
	}
	if s := q.shares[name]; s != nil {
		return s
	}
	return &share{name: name}
}

// count notes that a share has so many slots and so many waiting calls more. It forgets a share
// without any, because there may be any number of names.
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

// waitsUpTo reports whether a call waits that is as important as level or more.
func (q *queue) waitsUpTo(level int) bool {
	return slices.ContainsFunc(q.lines, func(l *line) bool { return l.level <= level })
}

// lineOf returns the line that a call waits in, or nil.
func (q *queue) lineOf(w *waiter) *line {
	i := slices.IndexFunc(q.lines, func(l *line) bool { return l.level == w.level && l.share == w.share })
	if i < 0 {
		return nil
	}
	return q.lines[i]
}

// add lets a call wait.
func (q *queue) add(w *waiter) {
	l := q.lineOf(w)
	if l == nil {
		l = &line{level: w.level, share: w.share, oldest: w}
		q.lines = append(q.lines, l)
	} else {
		w.older, l.newest.newer = l.newest, w
	}
	w.line, l.newest = l, w
	l.waiting++
	q.count(l.share, 0, 1)
}

// next returns the call that is served next. It is asked when a slot is free and a call waits: the
// answer stays the same until that call leaves or a more important one comes, also if another
// share has fewer slots by then, since a costly call would never get its slots otherwise.
func (q *queue) next() *waiter {
	held := func(l *line) int {
		if l.kept {
			return -1
		}
		return l.share.held
	}
	first := slices.MinFunc(q.lines, func(a, b *line) int {
		return cmp.Or(cmp.Compare(a.level, b.level), cmp.Compare(held(a), held(b)))
	})
	first.kept = true
	return first.oldest
}

// victim returns the call that gives way to newcomer in a full queue, or nil: the newest of the
// longest line of the least important level. A line of the same level must be longer than that
// of the newcomer would be, since the two would only change places.
func (q *queue) victim(newcomer *waiter) *waiter {
	longest := slices.MaxFunc(q.lines, func(a, b *line) int {
		return cmp.Or(cmp.Compare(a.level, b.level), cmp.Compare(a.waiting, b.waiting))
	})
	waiting := 1
	if l := q.lineOf(newcomer); l != nil {
		waiting += l.waiting
	}
	if longest.level > newcomer.level || longest.level == newcomer.level && longest.waiting > waiting {
		return longest.newest
	}
	return nil
}

// remove takes a call out of the queue. If it was served, its share is the last in turn.
func (q *queue) remove(w *waiter, served bool) {
	l := w.line
	if w.older == nil {
		l.oldest, l.kept = w.newer, false
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
	if served || l.waiting == 0 {
		i := slices.Index(q.lines, l)
		q.lines = slices.Delete(q.lines, i, i+1)
		if l.waiting > 0 {
			q.lines = append(q.lines, l)
		}
	}
}
