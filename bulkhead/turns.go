package bulkhead

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/go-resilience/resilience/internal/keyed"
)

// Whose turn it is, and who gives way in a full queue: decided here from figures alone,
// for [Config.Share].

// A share is what the calls of one Config.Share hold and wait for, at all levels. It is
// known while one of them holds a slot or waits.
type share struct {
	name    string
	weight  int
	held    int     // slots
	waiters int     // calls
	lines   []*line // by level; nil where none has waited yet
}

func (s *share) text() string {
	if s == nil {
		return ""
	}
	return s.name
}

// shares are those that are known.
type shares struct {
	known  map[string]*share
	weight int // of all of them
}

const maxWeight = 1_000_000

// claim returns the claim of a call, if Share is set.
func (r *rules) claim(ctx context.Context) *claim {
	c := &claim{r.Share(ctx), 1}
	if r.Weight != nil {
		c.weight = min(max(r.Weight(c.share), 1), maxWeight)
	}
	return c
}

// of returns the share of a name, which is known once it has a call.
func (s *shares) of(name string, weight int) *share {
	of := s.known[name]
	if of == nil {
		return &share{name: name, weight: weight}
	}
	s.weight += weight - of.weight
	of.weight = weight
	return of
}

// count changes how many slots a share holds and how many of its calls wait.
func (s *shares) count(of *share, held, waiters int) {
	if of == nil {
		return
	}
	was := of.held+of.waiters > 0
	of.held += held
	of.waiters += waiters
	switch is := of.held+of.waiters > 0; {
	case is == was:
	case is:
		if s.known == nil {
			s.known = make(map[string]*share)
		}
		s.known[of.name] = of
		s.weight += of.weight
	default:
		delete(s.known, of.name)
		s.weight -= of.weight
	}
}

const sharesShown = 10

// busiest returns the figures of those that have most slots and waiting calls.
func (s *shares) busiest() (top []ShareStats) {
	for _, of := range s.known {
		busy := ShareStats{of.name, of.held, of.waiters}
		at, _ := slices.BinarySearchFunc(top, busy, func(a, b ShareStats) int {
			return cmp.Or(b.InFlight+b.Queued-a.InFlight-a.Queued, b.Queued-a.Queued, strings.Compare(a.Share, b.Share))
		})
		if at < sharesShown {
			top = slices.Insert(top[:min(len(top), sharesShown-1)], at, busy)
		}
	}
	for i := range top {
		top[i].Share = keyed.Text(top[i].Share)
	}
	return top
}

// hasPart reports whether a share holds its part of a limit, or more.
func (s *shares) hasPart(of *share, limit int) bool {
	return of != nil && float64(of.held)*float64(s.weight) >= float64(limit)*float64(of.weight)
}

// A waiter is a call in the queue.
type waiter struct {
	older, newer *waiter
	level        int
	line         *line
	cost         int
	since        time.Duration

	// Set when it leaves the queue, before ready is closed.
	ready    chan struct{}
	settled  bool
	admitted bool
	refusal  Reason // if not admitted
}

// slots returns those that w has once it is admitted.
func (w *waiter) slots() taken { return taken{w.cost, w.line.share} }

// A line holds the calls of one share that wait at one level, by age. Without
// Config.Share, there is one line for each level.
type line struct {
	share          *share // nil: of calls without one
	oldest, newest *waiter
	waiters        int
	cost           int // of all of them
	cheaper        int // than each waiter: so many slots are of use to none of them

	turn          float64 // when it is served, in slots for each weight
	sooner, later *line   // by turn, while calls wait

	// While slots are granted.
	tried *waiter // the last that was considered to pass the first of the level
	least int     // cost of those that stay
}

func (l *line) weight() float64 {
	if l.share == nil {
		return 1
	}
	return float64(l.share.weight)
}

// crowd returns how many calls wait for each weight, with some more.
func (l *line) crowd(more int) float64 { return float64(l.waiters+more) / l.weight() }

func (l *line) add(w *waiter) {
	w.line, w.older, l.newest = l, l.newest, w
	if w.older == nil {
		l.oldest, l.cheaper = w, w.cost-1
	} else {
		w.older.newer = w
	}
	l.cheaper = min(l.cheaper, w.cost-1)
	l.waiters++
	l.cost += w.cost
}

func (l *line) remove(w *waiter) {
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
	w.older, w.newer = nil, nil // who still points to w keeps none of those that come after it
	l.waiters--
	l.cost -= w.cost
}

// first returns the waiter that is served first.
func (l *line) first(newestFirst bool) *waiter {
	if newestFirst {
		return l.newest
	}
	return l.oldest
}

// behind returns the waiter that is served after w, or nil.
func (l *line) behind(w *waiter, newestFirst bool) *waiter {
	if newestFirst {
		return w.older
	}
	return w.newer
}

// last returns the waiter that is served last, the claim of its level only if it is alone,
// or nil.
func (l *line) last(newestFirst bool, claim *waiter) *waiter {
	w := l.first(!newestFirst)
	if w != nil && w == claim && w.newer != nil {
		return w.newer
	}
	return w
}

// claims reports whether the first waiter of a line may come to be first no longer without
// being served.
func (l *line) claims(newestFirst bool) bool { return newestFirst || l.share != nil }

// turns are the lines of one level in which calls wait. Each is served once in a round,
// or as often as its weight: self-clocked fair queueing, Golestani, INFOCOM 1994.
type turns struct {
	first, last *line
	now         float64 // the latest turn that was served
}

// add lets a line in, at the end of a round.
func (t *turns) add(l *line) {
	l.turn = t.now + 1/l.weight()
	t.place(l)
}

func (t *turns) place(l *line) {
	l.sooner, l.later = t.last, nil
	for l.sooner != nil && l.sooner.turn > l.turn {
		l.sooner, l.later = l.sooner.sooner, l.sooner
	}
	*t.after(l.sooner), *t.before(l.later) = l, l
}

func (t *turns) after(l *line) **line {
	if l == nil {
		return &t.first
	}
	return &l.later
}

func (t *turns) before(l *line) **line {
	if l == nil {
		return &t.last
	}
	return &l.sooner
}

func (t *turns) unlink(l *line) {
	*t.after(l.sooner), *t.before(l.later) = l.later, l.sooner
	l.sooner, l.later = nil, nil // as the links of a waiter
}

func (t *turns) remove(l *line) {
	if t.unlink(l); t.first == nil {
		t.now = 0
	}
}

// next returns the line that is served next, or nil: the first whose share does not hold
// its part of limit yet, or the first of all. With few shares that hold a part, few
// lines are looked at.
func (t *turns) next(s *shares, limit int) *line { return t.nextOf(s, limit, always) }

// nextOf is next for the lines that ok is true for.
func (t *turns) nextOf(s *shares, limit int, ok func(*line) bool) *line {
	var behind *line
	for l := t.first; l != nil; l = l.later {
		hasPart := s.hasPart(l.share, limit)
		switch {
		case hasPart && behind != nil, !ok(l):
		case !hasPart:
			return l
		default:
			behind = l
		}
	}
	return behind
}

func always(*line) bool { return true }

// served moves a line that n slots went to. A line that was passed over while its share
// held its part catches up by no more than limit slots for each weight.
func (t *turns) served(l *line, n, limit int) {
	t.now = max(t.now, l.turn)
	t.unlink(l)
	l.turn = max(l.turn, t.now-float64(limit)) + float64(n)/l.weight()
	t.place(l)
}

// mostCrowded returns the line in which most calls wait for each weight, if newcomer had
// one more: newcomer itself, unless another has more than that. A newcomer of nil stands
// for none.
func (t *turns) mostCrowded(newcomer *line) *line {
	most, crowd := newcomer, 0.0
	if newcomer != nil {
		crowd = newcomer.crowd(1)
	}
	for l := t.first; l != nil; l = l.later {
		if c := l.crowd(0); c > crowd {
			most, crowd = l, c
		}
	}
	return most
}
