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
	mark   mark
	fresh  time.Duration // served before this,
	stale  time.Duration // served while it is refreshed before this,
	keep   time.Duration // served if a load fails before this,
	pause  time.Duration // not refreshed before this
	took   time.Duration // duration of the load
	cost   uint32
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
	return beta > 0 && left < 37*reach && -math.Log(1-rand.Float64())*reach >= left
}

const mostCost = math.MaxUint32 >> 1

// newEntry returns the entry of a result whose load began at begun, or nil if the result is not
// remembered. ttl overrides the TTL of cfg if it is not nil.
func (cfg *Config[K, V]) newEntry(
	key K, value V, absent bool, ttl *time.Duration, begun, took time.Duration,
) *entry[V] {
	e := &entry[V]{value: value, absent: absent, took: took, cost: 1}
	freshFor := cfg.TTL
	if absent {
		freshFor = cfg.NotFoundTTL
	} else if cfg.Cost != nil {
		e.cost = uint32(min(max(cfg.Cost(key, value), 1), mostCost))
	}
	if cfg.Jitter > 0 {
		freshFor -= time.Duration(rand.Float64() * cfg.Jitter * float64(freshFor))
	}
	if ttl != nil {
		freshFor = *ttl
	}
	switch {
	case freshFor > 0:
		cfg.begin(e, begun, freshFor)
	case absent:
		return nil
	}
	return e
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

// A move is what a call does about its key.
type move int

const (
	serve   move = iota // return the entry
	refresh             // return the entry, and launch a flight that replaces it
	wait                // wait for the flight that is under way
	launch              // launch a flight, and wait for it
)

// decide returns the move of a call that finds e, or nil, and perhaps a flight under way. longer
// is how long after its TTL the call takes e, if that is longer than e is stale; early says that
// the call is to refresh e although it is fresh.
func decide[V any](e *entry[V], now, longer time.Duration, early, underWay bool) (move, standing) {
	s := e.standing(now)
	if s < stale && e != nil && !e.absent && now < later(e.fresh, longer) {
		s = stale
	}
	paused := e != nil && now < e.pause
	switch {
	case s == dead || s == kept && !paused:
		if underWay {
			return wait, s
		}
		return launch, s
	case !underWay && !paused && (s == stale || early):
		return refresh, s
	}
	return serve, s
}

// A mark is when an entry or a flight began, as versions count.
type mark struct {
	bucket  uint32
	version uint64
}

// versions say what is out of date because another process has changed it: everything, or the
// keys of a bucket. Other processes name keys as they are written for the Store, which cannot be
// converted back; so a key is known by its hash, and the other keys of its bucket end with it.
type versions struct {
	all     atomic.Uint64
	buckets []atomic.Uint32 // a power of two of them, or none without a Store
}

// divide makes about one bucket for each of n keys, at most a million.
func (v *versions) divide(n int) {
	v.buckets = make([]atomic.Uint32, 1<<bits.Len(uint(min(max(n, 256), 1<<20)-1)))
}

func (v *versions) mark(written string) mark {
	var m mark
	if v.buckets != nil {
		m.bucket = v.bucket(written)
	}
	m.version = v.version(m.bucket)
	return m
}

func (v *versions) holds(m mark) bool { return m.version == v.version(m.bucket) }

func (v *versions) endAll() { v.all.Add(1) }

func (v *versions) end(written string) { v.buckets[v.bucket(written)].Add(1) }

func (v *versions) bucket(written string) uint32 {
	return crc32.ChecksumIEEE([]byte(written)) & uint32(len(v.buckets)-1)
}

func (v *versions) version(bucket uint32) uint64 {
	version := v.all.Load() << 32
	if v.buckets != nil {
		version |= uint64(v.buckets[bucket].Load())
	}
	return version
}
