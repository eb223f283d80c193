package flight

import (
	"time"

	"github.com/go-resilience/resilience/cacheaside/internal/entry"
)

// A Result is how a load ended.
type Result[V any] struct {
	Answer[V]
	Outcome     Outcome
	Source      Source
	Invalidated bool // the Store reports an invalidation since the load began
}

// A Source is where a Result comes from.
type Source int

const (
	Stored Source = iota // a Store
	Loaded               // the store of record
	Absent               // the store of record, which has no such key
	Shared               // another flight
)

// An Outcome says whether a load has failed.
type Outcome int

const (
	Succeeded Outcome = iota // with a value, or because there is no such key
	Answered                 // with an answer that is neither kept nor a failure
	Failed
)

// A Verdict is what becomes of the entry in memory when a flight lands.
type Verdict int

const (
	Leave     Verdict = iota
	Overtaken         // by an invalidation: leave what is there now
	Postpone          // serve it for a pause, if it may be served at all
	Replace           // by the result
	Remove
)

// Landing is what is known of a flight when it lands.
type Landing struct {
	Outcome     Outcome
	Memory      bool // the cache has memory
	Joinable    bool // the flight has not been overtaken
	Passing     bool // the flight did not want to keep its result
	Invalidated bool // the Store reports an invalidation since the load began
	Keep        bool // there is an entry that may be kept
}

// Judge returns the verdict of a landing.
func Judge(l Landing) Verdict {
	switch {
	case l.Outcome == Failed:
		return Postpone
	case l.Outcome == Answered, !l.Memory && !l.Invalidated:
		return Leave
	case !l.Memory:
		return Overtaken
	case (!l.Joinable || l.Invalidated) && l.Passing:
		return Leave
	case !l.Joinable || l.Invalidated:
		return Overtaken
	case l.Keep:
		return Replace
	}
	return Remove // not found, or not kept
}

// Land ends f. It keeps the result if f may, and gives it to the callers, who read it once
// Done is closed: that is left to the caller of Land. A flight that is late has told them
// before why they get nothing.
func (t *Table[K, V]) Land(f *Flight[K, V], r Result[V], now time.Duration) (v Verdict, late bool) {
	current := t.holds(f) && !r.Invalidated
	if r.Source == Loaded {
		t.Unpause(f.Key)
	}
	e := r.Entry
	v = Judge(Landing{
		Outcome: r.Outcome, Memory: t.Entries != nil, Joinable: t.holds(f), Passing: f.phase != flying,
		Invalidated: r.Invalidated, Keep: e != nil && t.Remembers.Load() && now < e.Keep,
	})
	switch v {
	case Postpone:
		t.postpone(f, now)
	case Replace:
		e.Mark = f.mark
		t.Entries.Set(f.Key, e)
	case Remove:
		t.Entries.Invalidate(f.Key)
	}
	if t.flights[f.Key] == f {
		delete(t.flights, f.Key)
	}
	if t.alone[f.Key] == f {
		delete(t.alone, f.Key)
	}
	delete(t.others, f)
	t.find(f)
	if late = f.phase == lost; !late {
		f.phase, f.answer = landed, r.Answer
		f.answer.current = current
	}
	return v, late
}

// Offer gives the callers of f an old value, which the Store had when it was asked at
// asked, for when the load fails. It also keeps it in memory if nothing newer is there.
func (t *Table[K, V]) Offer(f *Flight[K, V], e *entry.Entry[V], asked time.Duration) {
	if t.holds(f) && t.Remembers.Load() && t.Peek(f.Key) == nil {
		e.Mark = f.mark
		t.Entries.Set(f.Key, e)
	}
	t.Reserve(f, e, asked)
}

// Reserve is Offer of a value that another process is replacing, or nil. It is not kept.
func (t *Table[K, V]) Reserve(f *Flight[K, V], e *entry.Entry[V], asked time.Duration) {
	if e == nil || e.Absent {
		return
	}
	if t.Entries != nil {
		asked = always
	}
	f.old = &oldValue[V]{e, asked}
	if f.offered != nil {
		close(f.offered)
		f.offered = nil
	}
}

// Offers returns the old value of f that may be served to a call made at a given time
// while f goes on, or nil.
func (t *Table[K, V]) Offers(f *Flight[K, V], at, now time.Duration) *entry.Entry[V] {
	if at == NoOld || f.answered() || f.old == nil || f.old.at < at || f.old.entry.Standing(now) < entry.Stale {
		return nil
	}
	return f.old.entry
}

// Standby returns the value that may be served to a call made at a given time if f fails
// or takes long, or nil.
func (t *Table[K, V]) Standby(f *Flight[K, V], at, now time.Duration) *entry.Entry[V] {
	if at == NoOld {
		return nil
	}
	e := t.Before(f, at)
	if e.Standing(now) == entry.Dead || e.Absent {
		return nil
	}
	return e
}

// Before returns the value that f is to replace, of any age: the one in memory, or the one
// from when f began if nothing has been invalidated since, and if it may be served to a
// call made at a given time. It returns nil if there is none.
func (t *Table[K, V]) Before(f *Flight[K, V], at time.Duration) *entry.Entry[V] {
	if e := t.Peek(f.Key); e != nil || f.old == nil || f.old.at < at {
		return e
	}
	if t.Entries == nil || f.answer.current || t.holds(f) {
		return f.old.entry
	}
	return nil
}

// HasOld reports whether f replaces a value that is in the Store. It is called by the
// goroutine of f.
func (f *Flight[K, V]) HasOld() bool { return f.old != nil }
