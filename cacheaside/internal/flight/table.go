package flight

import (
	"context"
	"maps"
	"time"

	"github.com/go-resilience/resilience/cacheaside/internal/entry"
)

// A Table is the flights of some keys. All calls are made under one lock, which is that of
// the table.
type Table[K comparable, V any] struct {
	*Memory[K, V]
	flights map[K]*Flight[K, V]        // flights whose result will be kept
	others  map[*Flight[K, V]]struct{} // flights whose result will not be kept
	alone   map[K]*Flight[K, V]        // of others: the flight of each key that loads without a lease; see Turn
	lost    map[K]*lostLoads           // loads that run on without callers
	pauses  map[K]time.Duration        // see Pause

	manyPauses int // number of pauses at which those that have passed are removed
}

// NewTable returns a Table without flights.
func NewTable[K comparable, V any](m *Memory[K, V]) Table[K, V] {
	return Table[K, V]{
		Memory:  m,
		flights: make(map[K]*Flight[K, V]),
		others:  make(map[*Flight[K, V]]struct{}),
		alone:   make(map[K]*Flight[K, V]),
	}
}

// Len returns the number of keys and flights in the table.
func (t *Table[K, V]) Len() int {
	return len(t.flights) + len(t.others) + len(t.alone) + len(t.lost) + len(t.pauses)
}

// Launch adds f, which loads key from now on, with one waiter: the caller, or itself if it
// is to go on without callers. old is the entry that it replaces, or nil.
func (t *Table[K, V]) Launch(f *Flight[K, V], key K, written string, old *entry.Entry[V]) {
	f.Key, f.mark, f.Done, f.waiters = key, t.Mark(written), make(chan struct{}), 1
	if old != nil {
		f.old = &oldValue[V]{old, always}
	}
	if !Findable(key) {
		f.phase = passing
	}
	if t.Entries == nil || f.phase == passing {
		t.others[f] = struct{}{}
	} else {
		t.flights[key] = f
	}
}

// Join adds a caller to f.
func (t *Table[K, V]) Join(f *Flight[K, V]) { f.waiters++ }

// Leave removes a caller of f that stops waiting. If it was the last, the load is to be
// ended; canceled says whether it was a load, and not the wait for another.
func (t *Table[K, V]) Leave(f *Flight[K, V]) (last, canceled bool) {
	f.waiters--
	if f.waiters > 0 || f.answered() || f.Terms.Finish && t.keeps(f) {
		return false, false
	}
	canceled = f.phase != following
	t.lose(f, context.Canceled)
	return true, canceled
}

// Overdue ends f with err if it has no answer yet; counts says whether it was a load, and
// not the wait for another.
func (t *Table[K, V]) Overdue(f *Flight[K, V], now time.Duration, err error) (overdue, counts bool) {
	if f.answered() {
		return false, false
	}
	counts = f.phase != following
	t.postpone(f, now)
	t.lose(f, err)
	return true, counts
}

// Close ends all flights with err, and calls each with whether it was a load without an
// answer.
func (t *Table[K, V]) Close(err error, each func(f *Flight[K, V], canceled bool)) {
	t.OvertakeAll()
	for f := range t.others {
		each(f, f.phase < following)
		t.lose(f, err)
	}
}

// current returns the flight of key that a caller may join, or nil.
func (t *Table[K, V]) current(key K) *Flight[K, V] {
	f := t.flights[key]
	if f != nil && !t.Holds(f.mark) {
		t.overtake(key)
		return nil
	}
	return f
}

// holds reports whether a caller may join f, so that its result will be kept in memory.
func (t *Table[K, V]) holds(f *Flight[K, V]) bool { return t.flights[f.Key] == f && t.Holds(f.mark) }

// keeps reports whether the result of f will be kept, as far as is known.
func (t *Table[K, V]) keeps(f *Flight[K, V]) bool {
	if t.Entries == nil {
		return Findable(f.Key) && t.alone[f.Key] != f
	}
	return t.holds(f)
}

// overtake makes sure that the result of the flight of key is not kept.
func (t *Table[K, V]) overtake(key K) {
	if f := t.flights[key]; f != nil {
		delete(t.flights, key)
		t.others[f] = struct{}{}
	}
}

// OvertakeAll makes sure that the result of no flight is kept.
func (t *Table[K, V]) OvertakeAll() {
	for key := range t.flights {
		t.overtake(key)
	}
}

// Forget removes the entry of key, makes sure that nothing begun earlier is kept, and that
// nothing delays its next load.
func (t *Table[K, V]) Forget(key K) {
	t.overtake(key)
	t.Unpause(key)
	if t.Entries != nil {
		t.Entries.Invalidate(key)
	}
}

// Expire is the soft form of Forget: the entry may be served as its times allow.
func (t *Table[K, V]) Expire(key K, times entry.Times, now time.Duration) {
	t.overtake(key)
	t.Unpause(key)
	e := t.Peek(key)
	if e == nil {
		return
	}
	if x := e.Expired(times, now); x.Standing(now) != entry.Dead {
		t.Entries.Set(key, x)
	} else {
		t.Entries.Invalidate(key)
	}
}

// postpone delays the next refresh of the old value of f, which has failed.
func (t *Table[K, V]) postpone(f *Flight[K, V], now time.Duration) {
	if f.Terms.ErrorPause <= 0 || f.phase >= following || !Findable(f.Key) {
		return
	}
	if t.Entries != nil && t.flights[f.Key] != f {
		return
	}
	until := now + f.Terms.ErrorPause
	e := t.Peek(f.Key)
	if e != nil { // even if it is dead: a call may take it
		t.Entries.Set(f.Key, e.Postponed(until))
	}
	if e.Standing(now) == entry.Dead && f.old != nil && f.old.entry.Standing(now) != entry.Dead {
		t.pause(f.Key, now, until)
	}
}

// pause prevents loads of key if its old value is in the Store rather than in memory.
func (t *Table[K, V]) pause(key K, now, until time.Duration) {
	if t.pauses == nil {
		t.pauses = make(map[K]time.Duration)
	}
	if len(t.pauses) >= t.manyPauses {
		maps.DeleteFunc(t.pauses, func(_ K, until time.Duration) bool { return until <= now })
		t.manyPauses = 2*len(t.pauses) + 100
	}
	t.pauses[key] = until
}

// Paused reports whether key must not be loaded because a load failed recently.
func (t *Table[K, V]) Paused(key K, now time.Duration) bool { return now < t.pauses[key] }

// Unpause ends the pause of key.
func (t *Table[K, V]) Unpause(key K) { delete(t.pauses, key) }

// A load that ignores its ctx runs on after its callers have left or its time has
// passed, and keeps its slot. To keep one key from taking all slots, the next load of a
// key waits while mostLost such loads of it run on.
const mostLost = 2

// lostLoads are the loads of a key that run on without callers.
type lostLoads struct {
	n      int
	landed chan struct{} // closed when one of them ends
}

// lose answers the callers of f with err, unless they have an answer. Its load runs on.
func (t *Table[K, V]) lose(f *Flight[K, V], err error) {
	if f.answered() {
		return
	}
	if t.flights[f.Key] == f {
		t.overtake(f.Key)
	}
	f.phase, f.answer.Err = lost, err
	close(f.Done)
	if !Findable(f.Key) {
		return
	}
	if t.lost == nil {
		t.lost = make(map[K]*lostLoads)
	}
	l := t.lost[f.Key]
	if l == nil {
		l = &lostLoads{landed: make(chan struct{})}
		t.lost[f.Key] = l
	}
	l.n++
}

// find undoes lose: f has landed.
func (t *Table[K, V]) find(f *Flight[K, V]) {
	l := t.lost[f.Key]
	if f.phase != lost || l == nil {
		return
	}
	close(l.landed)
	l.landed = make(chan struct{})
	if l.n--; l.n == 0 {
		delete(t.lost, f.Key)
	}
}

// Crowd returns nil if f may load, otherwise a channel that is closed when it is to ask
// again: too many loads of its key run on without callers.
func (t *Table[K, V]) Crowd(f *Flight[K, V]) <-chan struct{} {
	if l := t.lost[f.Key]; l != nil && l.n >= mostLost {
		return l.landed
	}
	return nil
}
