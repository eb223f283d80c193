package cacheaside

import (
	"context"
	"iter"

	"github.com/go-resilience/resilience/internal/ended"
)

// A prime is a call of Prime under way. A shard records in it which of its keys have
// been invalidated since.
type prime[K comparable, V any] struct {
	touched map[K]struct{}
}

// touch records an invalidation of key for the calls of Prime under way. The shard is
// locked.
func (s *shard[K, V]) touch(key K) {
	for _, p := range s.primes {
		p.touched[key] = struct{}{}
	}
}

// Prime puts the values of a sequence into memory as if each had been loaded when Prime
// was called, to warm a cache from one query. It heeds invalidations as a load does: a
// key that is invalidated or written while Prime reads the sequence is left out,
// whether its value came before or after; after InvalidateAll, so are all remaining
// keys. Prime replaces entries in memory and overtakes loads in progress. It does not
// fill the Store. It stops with an error when ctx ends.
//
// The sequence itself must read the values from the store of record, after Prime was
// called. To cache a value that was just written, use Write.
func (c *Cache[K, V]) Prime(ctx context.Context, values iter.Seq2[K, V]) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	if c.closed.Load() {
		return ErrClosed
	}
	cfg, begun, version := c.cfg(), c.now(), c.versions()
	primes := make([]*prime[K, V], shards)
	for i := range c.shards {
		s := &c.shards[i]
		primes[i] = &prime[K, V]{touched: make(map[K]struct{})}
		s.mu.Lock()
		s.primes = append(s.primes, primes[i])
		s.mu.Unlock()
	}
	defer func() {
		for i := range c.shards {
			s := &c.shards[i]
			s.mu.Lock()
			s.primes = without(s.primes, primes[i])
			s.mu.Unlock()
		}
	}()
	for key, value := range values {
		if ctx.Err() != nil {
			return ended.Error(ctx)
		}
		if c.closed.Load() {
			return ErrClosed
		}
		if c.entries == nil || !findable(key) {
			continue
		}
		e := cfg.found(key, value, terms{}, begun, 0) // the duration of a single load is unknown
		if c.shared != nil {
			e.bucket = c.shared.bucketOf(cfg.Key(key))
		}
		e.version = version(e.bucket)
		i := c.shardOf(key)
		s := &c.shards[i]
		s.mu.Lock()
		if _, touched := primes[i].touched[key]; !touched && c.remembers.Load() {
			s.overtake(key)
			c.entries.Set(key, e)
		}
		s.mu.Unlock()
	}
	return nil
}

// versions returns version as it is now, for every bucket.
func (c *Cache[K, V]) versions() func(bucket uint32) uint64 {
	epoch := c.version(0)
	if c.shared == nil {
		return func(uint32) uint64 { return epoch }
	}
	all := make([]uint64, len(c.shared.buckets))
	for bucket := range all {
		all[bucket] = c.version(uint32(bucket))
	}
	return func(bucket uint32) uint64 { return all[bucket] }
}

func without[T comparable](list []T, x T) []T {
	kept := make([]T, 0, len(list))
	for _, y := range list {
		if y != x {
			kept = append(kept, y)
		}
	}
	return kept
}
