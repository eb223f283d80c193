package cacheaside

import (
	"hash/crc32"
	"math"
	"math/bits"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// An entry is the cached value of a key, or the cached fact that the key does not exist. An entry in memory is never
// modified, because hits read it without a lock. To expire an entry, or to delay its next refresh, a modified copy
// replaces it. All times are durations since New.
type entry[V any] struct {
	value  V
	absent bool   // the key does not exist
	lagged bool   // loaded within ReplicaLag of a change
	weight uint32 // 0 counts as 1
	mark   mark
	fresh  time.Duration // the entry is fresh before this time
	stale  time.Duration // the entry is served before this time, while it is refreshed
	keep   time.Duration // the entry is served before this time if a load fails
	pause  time.Duration // the entry is not refreshed before this time
	took   time.Duration // duration of the load
}

// A freshness is how an entry may be used.
type freshness int

const (
	unusable      freshness = iota // must not be served
	usableOnError                  // served if a load fails
	stale                          // served, and refreshed in the background
	fresh                          // served
)

// freshness returns how e may be used at the time now. A nil e is unusable.
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

// usable reports whether e may be served because a load has failed, or because SoftTimeout has elapsed.
func (e *entry[V]) usable(now time.Duration) bool {
	return e.freshness(now) != unusable && !e.absent
}

// refreshEarly reports whether the current call should refresh e although e is fresh. It decides at random, like
// XFetch: the probability grows with the duration of the load, and toward the end of the TTL.
func (e *entry[V]) refreshEarly(beta float64, now time.Duration) bool {
	left, reach := float64(e.fresh-now), beta*float64(e.took)
	// The first comparison avoids most random numbers: rand.Float64 returns a multiple of 2^-53, and -ln(2^-53) is below
	// 37, so the random number never exceeds 37 times reach.
	return left < 37*reach && -math.Log(1-rand.Float64())*reach >= left
}

// setTimes sets the times of e, which is fresh for ttl after began. The absence of a key is never served stale.
func (cfg *Config[K, V]) setTimes(e *entry[V], began, ttl time.Duration) {
	e.fresh = later(began, ttl)
	e.stale, e.keep = e.fresh, e.fresh
	if !e.absent {
		e.stale = later(e.fresh, cfg.StaleWhileRevalidate)
		e.keep = later(e.fresh, max(cfg.StaleWhileRevalidate, cfg.StaleIfError))
	}
}

// expired returns a copy of e that is no longer fresh. The copy is not served for longer than e would be.
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

// later returns t + d. If the sum would overflow, later returns the longest Duration, because a TTL may be that long.
func later(t, d time.Duration) time.Duration {
	if d > math.MaxInt64-max(t, 0) {
		return math.MaxInt64
	}
	return t + d
}

// changes counts invalidations of all keys and, with a Store, invalidations of single keys. Other processes report keys
// as strings (see Config.Key), which cannot be converted back to keys. So the invalidations of single keys are counted
// by the hashes of these strings, in buckets. An invalidation of a key also invalidates the other keys of its bucket.
type changes struct {
	all   atomic.Uint32
	table atomic.Pointer[buckets] // hits read the table without a lock; replaced under Cache.mu

	// The times of the last changes by any process: of all keys, and of single keys. They are guarded by Cache.mu. Changes
	// before the Cache was created or last updated are not recorded. So allAt also has the time of New or Update.
	allAt time.Duration
	at    []time.Duration // one for each bucket; nil until ReplicaLag is used
}

// buckets has the version of each bucket, which is the number of its invalidations. A bucket consists of the keys whose
// hashes have the same low bits. The number of buckets is a power of two.
type buckets struct {
	mask     uint32          // selects the bucket of a hash
	versions []atomic.Uint32 // nil without a Store
}

// A mark is the version of a key at the start of a flight. If the version has changed since, the key was invalidated.
// The mark has the whole hash of the key, so it remains valid when the number of buckets grows.
type mark struct {
	hash    uint32
	version uint64
}

// grow makes the number of buckets at least n, but at most a million. It never reduces the number of buckets. A new
// bucket gets the version of the bucket that had its keys before. If shared is false, there is no Store, and buckets
// have no versions. The Cache is locked: otherwise a change could be counted in the old table after that has been
// copied.
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

// touch counts an invalidation of the keys with the given hash. The Cache is locked.
func (c *changes) touch(hash uint32) {
	t := c.table.Load()
	t.versions[hash&t.mask].Add(1)
}

// hash returns the hash of a key that Config.Key has converted to a string.
func hash(storeKey string) uint32 { return crc32.ChecksumIEEE([]byte(storeKey)) }

// version returns a number that changes with each invalidation of the keys with the given hash.
func (c *changes) version(hash uint32) uint64 {
	version := uint64(c.all.Load()) << 32
	if t := c.table.Load(); t.versions != nil {
		version |= uint64(t.versions[hash&t.mask].Load())
	}
	return version
}

// holds reports whether m is still valid, that is, whether its bucket has had no invalidation since.
func (c *changes) holds(m mark) bool { return m.version == c.version(m.hash) }

// lastChange returns the time of the last change to the keys with the given hash. The Cache is locked.
func (c *changes) lastChange(hash uint32) time.Duration {
	if c.at == nil {
		return c.allAt
	}
	return max(c.allAt, c.at[hash&c.table.Load().mask])
}
