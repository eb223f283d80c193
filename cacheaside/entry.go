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
	absent bool   // the key does not exist
	lagged bool   // it was loaded within ReplicaLag of a change
	weight uint32 // 0 counts as 1
	mark   mark
	fresh  time.Duration // served before this,
	stale  time.Duration // served while it is refreshed before this,
	keep   time.Duration // served if a load fails before this,
	pause  time.Duration // not refreshed before this
	took   time.Duration // duration of the load
}

// A freshness is what an entry may be used for at a time.
type freshness int

const (
	unusable      freshness = iota // nothing
	usableOnError                  // served if a load fails
	stale                          // served, and refreshed
	fresh                          // served
)

// freshness returns what e, or nil, may be used for.
func (e *entry[V]) freshness(now time.Duration) freshness {
	switch {
	case e == nil:
		return unusable
	case now < e.fresh:
		return fresh
	case now < e.stale:
		return stale
	case now < e.keep:
		return usableOnError
	}
	return unusable
}

// usable reports whether e may be served because a load has failed, or takes long.
func (e *entry[V]) usable(now time.Duration) bool {
	return e.freshness(now) != unusable && !e.absent
}

// refreshEarly reports whether the fresh entry e is refreshed by the caller that asks: XFetch. The
// probability grows with the duration of the load and toward the end of the TTL.
func (e *entry[V]) refreshEarly(beta float64, now time.Duration) bool {
	left, reach := float64(e.fresh-now), beta*float64(e.took)
	// -ln of the least value of Float64, 2^-53, is below 37, so no draw reaches further.
	return left < 37*reach && -math.Log(1-rand.Float64())*reach >= left
}

// setTimes sets the times of e, which is fresh for ttl from begun. Absence is never served stale.
func (cfg *Config[K, V]) setTimes(e *entry[V], begun, ttl time.Duration) {
	e.fresh = later(begun, ttl)
	e.stale, e.keep = e.fresh, e.fresh
	if !e.absent {
		e.stale = later(e.fresh, cfg.StaleWhileRevalidate)
		e.keep = later(e.fresh, max(cfg.StaleWhileRevalidate, cfg.StaleIfError))
	}
}

// expired returns a copy of e whose freshness has ended by now. It is served no longer than e.
func (cfg *Config[K, V]) expired(e *entry[V], now time.Duration) *entry[V] {
	x := *e
	cfg.setTimes(&x, min(e.fresh, now), 0)
	x.stale, x.keep, x.pause = min(e.stale, x.stale), min(e.keep, x.keep), 0
	return &x
}

// endBy ends all uses of e at a time.
func (e *entry[V]) endBy(end time.Duration) {
	e.fresh, e.stale, e.keep = min(e.fresh, end), min(e.stale, end), min(e.keep, end)
}

// later adds without overflow, because a TTL may be as long as a Duration can be.
func later(t, d time.Duration) time.Duration {
	if d > math.MaxInt64-max(t, 0) {
		return math.MaxInt64
	}
	return t + d
}

// changes counts the changes that other processes have made: to everything, or to the keys of a bucket. They name
// keys as converted for the Store, which cannot be converted back. So a key is known by its hash, and a change also
// ends the other keys of its bucket.
type changes struct {
	all   atomic.Uint32
	table atomic.Pointer[buckets] // hits read it without a lock; replaced under Cache.mu

	// When the last change was, by whatever process, guarded by Cache.mu. What a new Cache has not
	// heard of counts as changed when it began, or at its last Update.
	allAt time.Duration
	at    []time.Duration // of each bucket; nil until it is needed for ReplicaLag
}

// buckets has the version of each bucket. The number of buckets is a power of two.
type buckets struct {
	mask     uint32          // of a hash, for the bucket
	versions []atomic.Uint32 // nil without a Store
}

// A mark is when an entry or a flight began, as changes count. It has the whole hash of the key, and so remains valid
// when the number of buckets grows.
type mark struct {
	hash    uint32
	version uint64
}

// grow makes about one bucket for each of n keys, at most a million, and keeps a larger number. A new bucket has the
// version of the bucket that it was part of. The Cache is locked, because changes counted in the old table would be
// lost.
func (c *changes) grow(n int, shared bool) {
	size := uint32(1) << bits.Len(uint(min(max(n, 256), 1<<20)-1))
	old := c.table.Load()
	if old != nil && size <= old.mask+1 {
		return
	}
	next := &buckets{mask: size - 1}
	if shared {
		next.versions = make([]atomic.Uint32, size)
		for i := range next.versions {
			if old != nil {
				next.versions[i].Store(old.versions[uint32(i)&old.mask].Load())
			}
		}
	}
	if c.at != nil {
		at := make([]time.Duration, size)
		for i := range at {
			at[i] = c.at[uint32(i)&old.mask]
		}
		c.at = at
	}
	c.table.Store(next)
}

// touch counts a change to the keys with a hash. The Cache is locked.
func (c *changes) touch(hash uint32) {
	t := c.table.Load()
	t.versions[hash&t.mask].Add(1)
}

// hash returns the hash of a key as converted for the Store.
func hash(storeKey string) uint32 { return crc32.ChecksumIEEE([]byte(storeKey)) }

// version returns a number that changes with each change to the keys with a hash.
func (c *changes) version(hash uint32) uint64 {
	version := uint64(c.all.Load()) << 32
	if t := c.table.Load(); t.versions != nil {
		version |= uint64(t.versions[hash&t.mask].Load())
	}
	return version
}

func (c *changes) holds(m mark) bool { return m.version == c.version(m.hash) }

// lastChange returns when the keys with a hash changed last. The Cache is locked.
func (c *changes) lastChange(hash uint32) time.Duration {
	if c.at == nil {
		return c.allAt
	}
	return max(c.allAt, c.at[hash&c.table.Load().mask])
}
