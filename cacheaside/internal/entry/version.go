package entry

import (
	"hash/crc32"
	"math/bits"
	"sync/atomic"
)

// A Mark is the state of a cache in which an entry or a load began: the bucket of its key,
// and the version of that bucket.
type Mark struct {
	Bucket  uint32
	Version uint64
}

// Versions say what has become out of date: everything, or the keys of a bucket. A key as
// written for a store cannot be converted back, so it is known by its hash: to end it ends
// the other keys of its bucket too. The zero Versions end only everything.
type Versions struct {
	all     atomic.Uint64
	buckets []atomic.Uint32 // a power of two of them
}

const mostBuckets = 1 << 20

// Divide makes a bucket for each of so many keys: the end of one then ends one other on
// average. It precedes all use.
func (v *Versions) Divide(keys int) {
	v.buckets = make([]atomic.Uint32, 1<<bits.Len(uint(min(keys, mostBuckets)-1)))
}

// Mark returns the present Mark of a key as written.
func (v *Versions) Mark(written string) Mark {
	b := v.bucket(written)
	return Mark{b, v.version(b)}
}

// Holds reports whether what began at m is up to date.
func (v *Versions) Holds(m Mark) bool { return m.Version == v.version(m.Bucket) }

// EndAll makes everything that began before out of date.
func (v *Versions) EndAll() { v.all.Add(1) }

// End makes what began before for the keys of a bucket out of date.
func (v *Versions) End(written string) { v.buckets[v.bucket(written)].Add(1) }

func (v *Versions) bucket(written string) uint32 {
	if v.buckets == nil {
		return 0
	}
	return crc32.ChecksumIEEE([]byte(written)) & uint32(len(v.buckets)-1)
}

func (v *Versions) version(bucket uint32) uint64 {
	version := v.all.Load() << 32
	if v.buckets != nil {
		version |= uint64(v.buckets[bucket].Load())
	}
	return version
}
