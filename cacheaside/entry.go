package cacheaside

import (
	"hash/crc32"
	"math"
	"math/bits"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// An entry is one value in memory. It is never changed, because hits read it without a lock: an
// entry that has expired, or whose refresh has failed, is replaced by a copy. Times are since the
// Cache began.
type entry[V any] struct {
	value  V
	absent bool // the key does not exist
	lagged bool // it was loaded within Lag of a change
	mark   mark
	fresh  time.Duration // served before this,
	stale  time.Duration // served while it is refreshed before this,
	keep   time.Duration // served if a load fails before this,
	pause  time.Duration // not refreshed before this
	took   time.Duration // duration of the load
}

// A standing is what an entry may be used for at a time.
type standing int

const (
	dead  standing = iota // nothing
	kept                  // served if a load fails
	stale                 // served, and refreshed
	fresh                 // served
)

// standing returns what e, or nil, may be used for.
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

// fallback reports whether e may be served because a load has failed, or takes long.
func (e *entry[V]) fallback(now time.Duration) bool {
	return e.standing(now) != dead && !e.absent
}

// ahead reports whether the fresh entry e is refreshed by the caller that asks: XFetch. The
// probability grows with the duration of the load and toward the end of the TTL.
func (e *entry[V]) ahead(beta float64, now time.Duration) bool {
	left, reach := float64(e.fresh-now), beta*float64(e.took)
	// -ln of the least value of Float64, 2^-53, is below 37, so no draw reaches further.
	return left < 37*reach && -math.Log(1-rand.Float64())*reach >= left
}

// begin sets the times of e, which is fresh for ttl from begun. Absence is never served stale.
func (cfg *Config[K, V]) begin(e *entry[V], begun, ttl time.Duration) {
	e.fresh = later(begun, ttl)
	e.stale, e.keep = e.fresh, e.fresh
	if !e.absent {
		e.stale = later(e.fresh, cfg.Stale)
		e.keep = later(e.fresh, max(cfg.Stale, cfg.StaleOnError))
	}
}

// expired returns a copy of e whose freshness has ended by now. It is served no longer than e.
func (cfg *Config[K, V]) expired(e *entry[V], now time.Duration) *entry[V] {
	x := *e
	cfg.begin(&x, min(e.fresh, now), 0)
	x.stale, x.keep, x.pause = min(e.stale, x.stale), min(e.keep, x.keep), 0
	return &x
}

// until ends all uses of e at a time.
func (e *entry[V]) until(end time.Duration) {
	e.fresh, e.stale, e.keep = min(e.fresh, end), min(e.stale, end), min(e.keep, end)
}

// later adds without overflow, because a TTL may be as long as a Duration can be.
func later(t, d time.Duration) time.Duration {
	if d > math.MaxInt64-max(t, 0) {
		return math.MaxInt64
	}
	return t + d
}

// changes say what other processes have changed: everything, or the keys of a bucket. They name
// keys as they are written for the Store, which cannot be converted back; so a key is known by its
// hash, and the other keys of its bucket end with it.
type changes struct {
	all     atomic.Uint32
	buckets []atomic.Uint32 // of versions; there are none without a Store
	mask    uint32          // of a hash, for the bucket

	// When the last change was, by whatever process, guarded by Cache.mu. What a new Cache has not
	// heard of counts as changed when it began, or at its last Update.
	allAt time.Duration
	at    []time.Duration // of each bucket; nil until it is needed for Lag
}

// A mark is when an entry or a flight began, as changes count.
type mark struct {
	bucket  uint32
	version uint64
}

// divide makes about one bucket for each of n keys, at most a million.
func (c *changes) divide(n int, shared bool) {
	size := uint32(1) << bits.Len(uint(min(max(n, 256), 1<<20)-1))
	c.mask = size - 1
	if shared {
		c.buckets = make([]atomic.Uint32, size)
	}
}

func (c *changes) hash(written string) uint32 { return crc32.ChecksumIEEE([]byte(written)) & c.mask }

func (c *changes) version(bucket uint32) uint64 {
	version := uint64(c.all.Load()) << 32
	if c.buckets != nil {
		version |= uint64(c.buckets[bucket].Load())
	}
	return version
}

func (c *changes) holds(m mark) bool { return m.version == c.version(m.bucket) }

// last returns when the keys of a bucket changed last.
func (c *changes) last(bucket uint32) time.Duration {
	if c.at == nil {
		return c.allAt
	}
	return max(c.allAt, c.at[bucket])
}
