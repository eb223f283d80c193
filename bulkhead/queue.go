package bulkhead

import (
	"cmp"
	"slices"
	"time"
)

// A queue holds the calls that wait: by level, within a level by share, within a share by age.
// It reads no clock and takes no lock.
type queue struct {
	levels  []waitingLevel    // nil until a call waits
	waiting int               // calls, at all levels
	shares  map[string]*share // with slots or waiters, by name
	common  share             // of the calls without a name: of all, if there is no Config.Share
}

// A share is what the calls of one Config.Share have, at all levels.
type share struct {
	name    string
	held    int // slots
	waiting int // calls
}

// A waitingLevel is what waits at one level.
type waitingLevel struct {
	lines []*line // of the shares that wait, by turn: remove moves one that was served to the back
	next  *waiter // for whom free slots are kept; nil until there are some
}

// A line is what waits of one share at one level.
type line struct {
	share          *share
	oldest, newest *waiter
	waiting        int
}

// A waiter is a call that waits.
type waiter struct {
	level, cost  int
	share        *share
	line         *line   // nil before and after it waits
	older, newer *waiter // in line
	since        time.Duration
	ready        chan struct{} // closed when it has its slots or is refused
	waited       time.Duration
	refusal      *FullError
}

// shareOf returns the share of a name.
func (q *queue) shareOf(name string) *share {
	if name == "" {
		return &q.common
	}
	s := q.shares[name]
	if s == nil {
		s = &share{name: name}
	}
	return s
}

// addHeld notes that a share has n slots more, or -n fewer.
func (q *queue) addHeld(s *share, n int) {
	s.held += n
	q.keepOrForget(s)
}

// keepOrForget forgets a share without slots and waiters, because there may be any number of names.
func (q *queue) keepOrForget(s *share) {
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
	if q.waiting == 0 {
		return false
	}
	return slices.ContainsFunc(q.levels[:level+1], func(l waitingLevel) bool { return len(l.lines) > 0 })
}

// lineOf returns the line of a share at a level, or nil.
func (q *queue) lineOf(s *share, level int) *line {
	lines := q.levels[level].lines
	if i := slices.IndexFunc(lines, func(l *line) bool { return l.share == s }); i >= 0 {
		return lines[i]
	}
	return nil
}

// add lets a call wait. levels is how many there are.
func (q *queue) add(w *waiter, levels int) {
	if q.levels == nil {
		q.levels = make([]waitingLevel, levels)
	}
	l := q.lineOf(w.share, w.level)
	if l == nil {
		l = &line{share: w.share, oldest: w}
		q.levels[w.level].lines = append(q.levels[w.level].lines, l)
	} else {
		w.older, l.newest.newer = l.newest, w
	}
	w.line, l.newest = l, w
	q.addWaiting(l, 1)
}

// addWaiting notes that n calls more wait in a line, or -n fewer.
func (q *queue) addWaiting(l *line, n int) {
	q.waiting += n
	l.waiting += n
	l.share.waiting += n
	q.keepOrForget(l.share)
}

// pickNext returns the call that is served next, or nil. It is asked when a slot is free: the
// answer stays the same until that call leaves, also if another share has fewer slots by then,
// since a costly call would never get its slots otherwise.
func (q *queue) pickNext() *waiter {
	for i := range q.levels {
		l := &q.levels[i]
		if l.next == nil && len(l.lines) > 0 {
			l.next = slices.MinFunc(l.lines, func(a, b *line) int { return cmp.Compare(a.share.held, b.share.held) }).oldest
		}
		if l.next != nil {
			return l.next
		}
	}
	return nil
}

// victim returns the call that gives way to newcomer in a full queue, or nil: the newest of the
// longest line of the least important level. A line of the same level must be longer than that
// of the newcomer would be, since the two would only change places.
func (q *queue) victim(newcomer *waiter) *waiter {
	for i := len(q.levels) - 1; i >= newcomer.level; i-- {
		lines := q.levels[i].lines
		if len(lines) == 0 {
			continue
		}
		longest := slices.MaxFunc(lines, func(a, b *line) int { return cmp.Compare(a.waiting, b.waiting) })
		if i > newcomer.level {
			return longest.newest
		}
		own := 1
		if l := q.lineOf(newcomer.share, i); l != nil {
			own += l.waiting
		}
		if longest.waiting > own {
			return longest.newest
		}
	}
	return nil
}

// remove takes a call out of the queue. If it was served, its share is the last in turn.
func (q *queue) remove(w *waiter, served bool) {
	at, l := &q.levels[w.level], w.line
	if at.next == w {
		at.next = nil
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
	w.line, w.older, w.newer = nil, nil, nil // else a call that runs for long keeps those that came after it
	q.addWaiting(l, -1)
	if served || l.waiting == 0 {
		i := slices.Index(at.lines, l)
		at.lines = slices.Delete(at.lines, i, i+1)
		if l.waiting > 0 {
			at.lines = append(at.lines, l)
		}
	}
}

// calls yields each call that waits; yield may remove it.
func (q *queue) calls(yield func(*waiter) bool) {
	for i := range q.levels {
		for _, l := range slices.Clone(q.levels[i].lines) {
			for w := l.oldest; w != nil; {
				next := w.newer
				if !yield(w) {
					return
				}
				w = next
			}
		}
	}
}
