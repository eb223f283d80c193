// Package entry is one value of a cache and its times: until when it is fresh, for how
// long it may be served after that, and when it is refreshed early. It reads no clock:
// times are since the cache began, and now is given.
package entry

import (
	"math"
	"math/rand/v2"
	"time"
)

// An Entry is one value in memory. It is immutable: an entry that has expired, or whose
// refresh failed, is replaced by another one.
type Entry[V any] struct {
	Value  V
	Absent bool // the key does not exist
	Mark   Mark
	Fresh  time.Duration // fresh before this,
	Stale  time.Duration // served while it is refreshed before this,
	Keep   time.Duration // served if a load fails before this,
	Pause  time.Duration // not refreshed before this
	Took   time.Duration // duration of the load
	Cost   uint32
}

// A Standing is what an entry may be used for at a time.
type Standing int

const (
	Dead  Standing = iota // nothing
	Kept                  // served if a load fails
	Stale                 // served, and refreshed
	Fresh                 // served
)

// Standing returns what e may be used for now. A nil Entry is Dead.
func (e *Entry[V]) Standing(now time.Duration) Standing {
	switch {
	case e == nil:
		return Dead
	case now < e.Fresh:
		return Fresh
	case now < e.Stale:
		return Stale
	case now < e.Keep:
		return Kept
	}
	return Dead
}

// Paused reports whether e, if it may be served, is served without a new load because the
// last load failed recently.
func (e *Entry[V]) Paused(now time.Duration) bool { return e != nil && now < e.Pause }

// Postponed returns a copy of e that is not refreshed before until.
func (e *Entry[V]) Postponed(until time.Duration) *Entry[V] {
	x := *e
	x.Pause = until
	return &x
}

// Ahead reports whether the fresh entry e is to be refreshed now: XFetch of "Optimal
// Probabilistic Cache Stampede Prevention" (VLDB 2015). Each caller draws for itself.
// The probability grows with the duration of the load and toward the end of the TTL.
func (e *Entry[V]) Ahead(beta float64, now time.Duration) bool {
	left := float64(e.Fresh - now)
	reach := beta * float64(e.Took)
	// -ln of the least value of Float64, 2^-53, is below 37: the draw cannot succeed.
	if left >= 37*reach {
		return false
	}
	return -math.Log(1-rand.Float64())*reach >= left
}

// Times say how long entries are used. Zero means not at all.
type Times struct {
	TTL, NotFoundTTL    time.Duration
	Jitter              float64
	Stale, StaleOnError time.Duration
}

// Terms are what a load sets for its own result.
type Terms struct {
	TTL   time.Duration
	Timed bool // TTL is set
}

// MaxCost is the highest cost of an entry.
const MaxCost = math.MaxUint32 >> 1

// Found returns the entry of a value whose load began at begun and took took. Its cost
// is at least 1.
func Found[V any](t Times, value V, cost int, by Terms, begun, took time.Duration) *Entry[V] {
	e := &Entry[V]{Value: value, Took: took, Cost: uint32(min(max(cost, 1), MaxCost))}
	ttl := by.TTL
	if !by.Timed {
		ttl = t.jitter(t.TTL)
	}
	e.Begin(t, begun, ttl)
	if ttl <= 0 {
		e.Fresh, e.Stale, e.Keep = 0, 0, 0
	}
	return e
}

// Missing returns the entry of a key that does not exist, or nil if that is not
// remembered.
func Missing[V any](t Times, by Terms, begun time.Duration) *Entry[V] {
	ttl := t.jitter(t.NotFoundTTL)
	if by.Timed {
		ttl = by.TTL
	}
	if ttl <= 0 {
		return nil
	}
	e := &Entry[V]{Absent: true, Cost: 1}
	e.Begin(t, begun, ttl)
	return e
}

// Begin sets the times of e, which is fresh for ttl from begun. Absence is never served
// stale.
func (e *Entry[V]) Begin(t Times, begun, ttl time.Duration) {
	e.Fresh = After(begun, ttl)
	e.Stale, e.Keep = e.Fresh, e.Fresh
	if !e.Absent {
		e.Stale = After(e.Fresh, t.Stale)
		e.Keep = After(e.Fresh, max(t.Stale, t.StaleOnError))
	}
}

// Expired returns a copy of e that is no longer fresh and whose stale time begins now.
func (e *Entry[V]) Expired(t Times, now time.Duration) *Entry[V] {
	x := *e
	x.Begin(t, min(e.Fresh, now), 0)
	x.Stale, x.Keep = min(e.Stale, x.Stale), min(e.Keep, x.Keep)
	x.Pause = 0
	return &x
}

func (t Times) jitter(ttl time.Duration) time.Duration {
	if t.Jitter <= 0 {
		return ttl
	}
	return ttl - time.Duration(rand.Float64()*t.Jitter*float64(ttl))
}

// After adds without overflow: a TTL may be as long as a Duration can be.
func After(t, d time.Duration) time.Duration {
	if d > math.MaxInt64-max(t, 0) {
		return math.MaxInt64
	}
	return t + d
}
