package cacheaside

import (
	"context"
	"math"
	"math/rand/v2"
	"time"
)

// An entry is one value in memory. It does not change once it is there: what is
// known of it later (that it was expired, that a refresh failed) takes the form
// of another entry. Times are since the Cache was made.
type entry[V any] struct {
	value   V
	absent  bool          // the key does not exist
	slot    uint32        // of its key; see shared.slots
	version uint64        // of the slot, when its load began
	fresh   time.Duration // it is fresh before this,
	stale   time.Duration // served while it is being refreshed before this,
	keep    time.Duration // served when a load fails before this,
	pause   time.Duration // and not refreshed again before this
	took    time.Duration // by its load
	cost    uint32
	tags    *tagging // nil: none
}

// A standing is what may be done with an entry at a time.
type standing int

const (
	dead  standing = iota // nothing
	kept                  // serve it if a load fails
	stale                 // serve it, and refresh it
	fresh                 // serve it
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

// paused reports that e is to be served without a new load, because the last one
// failed a moment ago.
func (e *entry[V]) paused(now time.Duration) bool {
	return e.standing(now) != dead && now < e.pause
}

// after adds without going round: a TTL may be as long as a Duration can be.
func after(t, d time.Duration) time.Duration {
	if d > math.MaxInt64-max(t, 0) {
		return math.MaxInt64
	}
	return t + d
}

const maxCost = math.MaxUint32 >> 1

// terms are what a load says of its own result.
type terms struct {
	ttl   time.Duration
	cost  int
	timed bool // SetTTL was called
	tags  []string
}

// fill gives e its times: fresh for ttl from begun.
func (c *Cache[K, V]) fill(e *entry[V], begun, ttl time.Duration) {
	e.fresh = after(begun, ttl)
	e.stale, e.keep = e.fresh, e.fresh
	if !e.absent {
		e.stale = after(e.fresh, c.cfg.Stale)
		e.keep = after(e.fresh, max(c.cfg.Stale, c.cfg.StaleOnError))
	}
}

// found makes the entry of a value whose load began at begun and ends now.
func (c *Cache[K, V]) found(key K, value V, t terms, begun time.Duration) *entry[V] {
	e := &entry[V]{value: value, took: c.now() - begun, cost: 1}
	ttl := t.ttl
	if !t.timed {
		ttl = c.jitter(c.cfg.TTL)
	}
	c.fill(e, begun, ttl)
	if t.timed && ttl <= 0 {
		e.fresh, e.stale, e.keep = 0, 0, 0
	}
	cost := t.cost
	if cost == 0 && c.cfg.Cost != nil {
		cost = c.cfg.Cost(key, value)
	}
	e.cost = uint32(min(max(cost, 1), maxCost))
	return e
}

// missing makes the entry of a key that does not exist, or nil if that is not to
// be remembered.
func (c *Cache[K, V]) missing(t terms, begun time.Duration) *entry[V] {
	ttl := c.jitter(c.cfg.NotFoundTTL)
	if t.timed {
		ttl = t.ttl
	}
	if ttl <= 0 {
		return nil
	}
	e := &entry[V]{absent: true, cost: 1}
	c.fill(e, begun, ttl)
	return e
}

func (c *Cache[K, V]) jitter(ttl time.Duration) time.Duration {
	if c.cfg.Jitter == 0 {
		return ttl
	}
	return ttl - time.Duration(rand.Float64()*c.cfg.Jitter*float64(ttl))
}

// expired returns e as it is once it was expired: no longer fresh, and old from
// now on rather than from the end of its TTL.
func (c *Cache[K, V]) expired(e *entry[V], now time.Duration) *entry[V] {
	x := *e
	x.fresh = min(e.fresh, now)
	if e.absent { // that a key does not exist is never served for longer
		x.stale, x.keep = x.fresh, x.fresh
		return &x
	}
	x.stale = min(e.stale, after(x.fresh, c.cfg.Stale))
	x.keep = min(e.keep, after(x.fresh, max(c.cfg.Stale, c.cfg.StaleOnError)))
	x.pause = 0
	return &x
}

// SetTTL makes what the load that ctx was given to returns fresh for ttl, instead
// of Config.TTL and without jitter; for LoadMany, all of it. It also applies to
// ErrNotFound. Zero or less means that the result is not to be kept. Outside a
// load it has no effect. Call it from the goroutine of the load.
func SetTTL(ctx context.Context, ttl time.Duration) {
	if l := loadOf(ctx); l != nil {
		l.terms.ttl, l.terms.timed = ttl, true
	}
}

// SetCost makes what the load that ctx was given to returns count for cost
// against Config.Capacity, instead of what Config.Cost says. Less than 1 counts
// as 1. Outside a load it has no effect. Call it from the goroutine of the load.
func SetCost(ctx context.Context, cost int) {
	if l := loadOf(ctx); l != nil {
		l.terms.cost = max(cost, 1)
	}
}
