package cacheaside

import (
	"math"
	"math/rand/v2"
	"time"
)

// An entry is one value in memory. It is immutable: an entry that has expired, or whose
// refresh failed, is replaced by another one. Times are since New.
type entry[V any] struct {
	value   V
	absent  bool          // the key does not exist
	bucket  uint32        // of the key; see shared.buckets
	version uint64        // of the bucket when the load began
	fresh   time.Duration // fresh before this,
	stale   time.Duration // served while it is refreshed before this,
	keep    time.Duration // served if a load fails before this,
	pause   time.Duration // not refreshed before this
	took    time.Duration // duration of the load
	cost    uint32
	tags    *tagging // nil if there are none
}

// A standing is what an entry may be used for at a time.
type standing int

const (
	dead  standing = iota // nothing
	kept                  // served if a load fails
	stale                 // served, and refreshed
	fresh                 // served
)

func (e *entry[V]) standing(now time.Duration) standing {
	switch {
	case e == nil:
		return dead
	case now < e.fresh:
		return fresh
	case now < e.stale:
		return stale
	case now < e.keep:
		return kept
	}
	return dead
}

// paused reports whether e is served without a new load because the last load failed
// recently.
func (e *entry[V]) paused(now time.Duration) bool {
	return e.standing(now) != dead && now < e.pause
}

// after adds without overflow: a TTL may be as long as a Duration can be.
func after(t, d time.Duration) time.Duration {
	if d > math.MaxInt64-max(t, 0) {
		return math.MaxInt64
	}
	return t + d
}

const maxCost = math.MaxUint32 >> 1

// fill sets the times of e, which is fresh for ttl from begun.
func (cfg *Config[K, V]) fill(e *entry[V], begun, ttl time.Duration) {
	e.fresh = after(begun, ttl)
	e.stale, e.keep = e.fresh, e.fresh
	if !e.absent {
		e.stale = after(e.fresh, cfg.Stale)
		e.keep = after(e.fresh, max(cfg.Stale, cfg.StaleOnError))
	}
}

// found makes the entry of a value whose load began at begun and ends now.
func (cfg *Config[K, V]) found(key K, value V, t terms, begun, took time.Duration) *entry[V] {
	e := &entry[V]{value: value, took: took, cost: 1}
	ttl := t.ttl
	if !t.timed {
		ttl = cfg.jitter(cfg.TTL)
	}
	cfg.fill(e, begun, ttl)
	if ttl <= 0 {
		e.fresh, e.stale, e.keep = 0, 0, 0
	}
	cost := t.cost
	if cost == 0 && cfg.Cost != nil {
		cost = cfg.Cost(key, value)
	}
	e.cost = uint32(min(max(cost, 1), maxCost))
	return e
}

// missing makes the entry of a key that does not exist, or returns nil if that is not
// remembered.
func (cfg *Config[K, V]) missing(t terms, begun time.Duration) *entry[V] {
	ttl := cfg.jitter(cfg.NotFoundTTL)
	if t.timed {
		ttl = t.ttl
	}
	if ttl <= 0 {
		return nil
	}
	e := &entry[V]{absent: true, cost: 1}
	cfg.fill(e, begun, ttl)
	return e
}

func (cfg *Config[K, V]) jitter(ttl time.Duration) time.Duration {
	if cfg.Jitter <= 0 {
		return ttl
	}
	return ttl - time.Duration(rand.Float64()*cfg.Jitter*float64(ttl))
}

// expired returns a copy of e that is no longer fresh and whose stale time begins now.
func (cfg *Config[K, V]) expired(e *entry[V], now time.Duration) *entry[V] {
	x := *e
	x.fresh = min(e.fresh, now)
	if e.absent { // absence is never served stale
		x.stale, x.keep = x.fresh, x.fresh
		return &x
	}
	x.stale = min(e.stale, after(x.fresh, cfg.Stale))
	x.keep = min(e.keep, after(x.fresh, max(cfg.Stale, cfg.StaleOnError)))
	x.pause = 0
	return &x
}

// ahead reports whether the fresh entry e is to be refreshed now: XFetch of "Optimal
// Probabilistic Cache Stampede Prevention" (VLDB 2015). Each caller draws for itself.
// The probability grows with the duration of the load and towards the end of the TTL.
func (e *entry[V]) ahead(beta float64, now time.Duration) bool {
	left := float64(e.fresh - now)
	reach := beta * float64(e.took)
	// -ln of the least value of Float64, 2^-53, is below 37: the draw cannot succeed.
	if left >= 37*reach {
		return false
	}
	return -math.Log(1-rand.Float64())*reach >= left
}
