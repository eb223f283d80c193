package cacheaside

import (
	"hash/crc32"
	"math"
	"math/bits"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// An entry is one value in memory. It is never modified after it was stored, because hits read it without a lock: a
// copy replaces an entry that has expired, or whose refresh has failed. Times count from the start of the Cache.
type entry[V any] struct {
	value  V
	absent bool   // the key does not exist
	lagged bool   // loaded within ReplicaLag of a change
	weight uint32 // 0 counts as 1
	mark   mark
	fresh  time.Duration // fresh before this time
	stale  time.Duration // served before this time, while it is refreshed
	keep   time.Duration // served before this time if a load fails
	pause  time.Duration // not refreshed before this time
	took   time.Duration // duration of the load
}

// A freshness says what an entry may be used for.
type freshness int

const (
	unusable      freshness = iota // must not be served
	usableOnError                  // served if a load fails
	stale                          // served, and refreshed in the background
	fresh                          // served
)

// freshness returns what e may be used for. A nil e is unusable.
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

// usable reports whether e may be served because a load has failed, or because SoftTimeout has passed.
func (e *entry[V]) usable(now time.Duration) bool {
	return e.freshness(now) != unusable && !e.absent
}

// refreshEarly reports whether the current caller refreshes the fresh entry e, by the rule of XFetch: the probability
// grows with the duration of the load, and toward the end of the TTL.
func (e *entry[V]) refreshEarly(beta float64, now time.Duration) bool {
	left, reach := float64(e.fresh-now), beta*float64(e.took)
	// Float64 is a multiple of 2^-53, and -ln(2^-53) is below 37, so no draw exceeds 37 times reach.
	return left < 37*reach && -math.Log(1-rand.Float64())*reach >= left
}

// setTimes sets the times of e, which is fresh for ttl after began. An absent key is never served stale.
func (cfg *Config[K, V]) setTimes(e *entry[V], began, ttl time.Duration) {
	e.fresh = later(began, ttl)
	e.stale, e.keep = e.fresh, e.fresh
	if !e.absent {
		e.stale = later(e.fresh, cfg.StaleWhileRevalidate)
		e.keep = later(e.fresh, max(cfg.StaleWhileRevalidate, cfg.StaleIfError))
	}
}

// expired returns a copy of e that is no longer fresh. It is not served for longer than e would be.
func (cfg *Config[K, V]) expired(e *entry[V], now time.Duration) *entry[V] {
	x := *e
	cfg.setTimes(&x, min(e.fresh, now), 0)
	x.stale, x.keep, x.pause = min(e.stale, x.stale), min(e.keep, x.keep), 0
	return &x
}

// endBy makes e unusable from end on.
func (e *entry[V]) endBy(end time.Duration) {
	e.fresh, e.stale, e.keep = min(e.fresh, end), min(e.stale, end), min(e.keep, end)
}

// later returns t + d, or the longest Duration if that would overflow: a TTL may be as long as a Duration.
func later(t, d time.Duration) time.Duration {
	if d > math.MaxInt64-max(t, 0) {
		return math.MaxInt64
	}
	return t + d
}

// changes counts the invalidations by other processes: of all keys, or of the keys of a bucket. Other processes name
// keys as converted for the Store, which cannot be converted back. So a key is identified by its hash, and an
// invalidation also invalidates the other keys of its bucket.
type changes struct {
	all   atomic.Uint32
	table atomic.Pointer[buckets] // hits read it without a lock; replaced under Cache.mu

	// The time of the last change by any process, guarded by Cache.mu. Changes that the Cache does not know about
	// count as made when it was created, or at its last Update.
	allAt time.Duration
	at    []time.Duration // by bucket; nil until ReplicaLag is used
}

// buckets has the version of each bucket. The number of buckets is a power of two.
type buckets struct {
	mask     uint32          // selects the bucket of a hash
	versions []atomic.Uint32 // nil without a Store
}

// A mark is the version of a key when an entry or a flight started. It has the whole hash of the key, and so remains
// valid when the number of buckets grows.
type mark struct {
	hash    uint32
	version uint64
}

// grow creates about one bucket for each of n keys, at most a million. It does not reduce their number. A new bucket
// has the version of the bucket that it was part of. The Cache is locked, because a change that is counted in the old
// table would be lost.
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

// touch counts an invalidation of the keys with a hash. The Cache is locked.
func (c *changes) touch(hash uint32) {
	t := c.table.Load()
	t.versions[hash&t.mask].Add(1)
}

// hash returns the hash of a key as converted for the Store.
func hash(storeKey string) uint32 { return crc32.ChecksumIEEE([]byte(storeKey)) }

// version returns a number that changes with each invalidation of the keys with a hash.
func (c *changes) version(hash uint32) uint64 {
	version := uint64(c.all.Load()) << 32
	if t := c.table.Load(); t.versions != nil {
		version |= uint64(t.versions[hash&t.mask].Load())
	}
	return version
}

// holds reports whether no key with the hash of m was invalidated since m.
func (c *changes) holds(m mark) bool { return m.version == c.version(m.hash) }

// lastChange returns the time of the last change to the keys with a hash. The Cache is locked.
func (c *changes) lastChange(hash uint32) time.Duration {
	if c.at == nil {
		return c.allAt
	}
	return max(c.allAt, c.at[hash&c.table.Load().mask])
}
