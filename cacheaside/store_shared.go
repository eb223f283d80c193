package cacheaside

import (
	"context"
	"hash/crc32"
	"math/bits"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// shared is the part of a Cache that deals with its Store.
type shared[K comparable, V any] struct {
	c      *Cache[K, V]
	store  Store
	ctx    context.Context // ends with Close
	cancel context.CancelFunc

	outage   outage
	fills    [256]fillQueue // one for each shard
	sweeping atomic.Bool    // a sweep is about to begin

	// What the Store must still be told: invalidations that it could not be told of
	// (untold) or may have lost (doubted), and leases that it may have granted without an
	// answer.
	untold, doubted untold
	abandoned       abandoned
	recent          recent
	behind          sync.Mutex // guards:
	catchingUp      bool       // a goroutine is telling it
	closing         bool

	// buckets count invalidations by other processes. A converted key cannot be converted
	// back, so it is identified by its hash: an invalidation also reaches other keys of
	// the bucket. The length is a power of two.
	buckets []atomic.Uint32
}

const mostBuckets = 1 << 20

// bucketOf returns the bucket of a key. With as many buckets as entries, an invalidation by
// another process reaches one other entry on average.
func (s *shared[K, V]) bucketOf(written string) uint32 {
	return crc32.ChecksumIEEE([]byte(written)) & uint32(len(s.buckets)-1)
}

// newToken returns a unique token for the holder of a lease or a fence.
func newToken() string {
	return strconv.FormatUint(rand.Uint64(), 36) + strconv.FormatUint(rand.Uint64(), 36)
}

func newShared[K comparable, V any](c *Cache[K, V]) *shared[K, V] {
	s := &shared[K, V]{c: c, store: c.cfg().Store}
	s.outage.pause = func() time.Duration { return max(c.cfg().ErrorPause, 0) }
	s.ctx, s.cancel = context.WithCancel(context.Background())
	buckets := 1
	if c.entries != nil {
		buckets = 1 << bits.Len(uint(min(max(c.cfg().Capacity, 256), mostBuckets)-1))
	}
	s.buckets = make([]atomic.Uint32, buckets)
	if c.entries != nil {
		c.running.Go(s.watch)
	}
	return s
}

func (s *shared[K, V]) shardOf(written string) int { return int(s.store.Shard(written)) }

// byShard groups items by the shard of their keys.
func byShard[T any](store Store, items []T, key func(T) string) map[int][]T {
	shards := make(map[int][]T)
	for _, item := range items {
		shard := int(store.Shard(key(item)))
		shards[shard] = append(shards[shard], item)
	}
	return shards
}

// mostAtOnce bounds the keys of one call of the Store, which serves no other process
// meanwhile. mostCalls bounds the concurrent calls of one GetMany or Invalidate.
const (
	mostAtOnce = 100
	mostCalls  = 8
)

// pause returns how long a background goroutine waits before it tries the Store again.
func (s *shared[K, V]) pause() time.Duration {
	return max(s.c.cfg().ErrorPause, 50*time.Millisecond)
}

// sleep reports whether d passed before ctx ended.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
