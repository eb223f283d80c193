// Package cacheaside caches the results of slow reads, in memory and in a store that
// processes share, and after a write never serves a value from before it.
//
//	users := cacheaside.New(cacheaside.Config[int, User]{
//		Name: "users",
//		Load: func(ctx context.Context, id int) (User, error) { return selectUser(ctx, db, id) },
//		TTL:  time.Minute,
//	})
//	defer users.Close()
//	u, err := users.Get(ctx, 42) // concurrent callers share one load
//	err = users.Write(ctx, 42, func(ctx context.Context) error {
//		return updateUser(ctx, db, u) // write to the source; the cache invalidates 42
//	})
//
// A Cache keeps these promises, with and without a [Store] that processes share:
//
//   - If Write, Invalidate or InvalidateAll returned before a Get began, that Get
//     returns a value at least as new as what was committed before the call. A load
//     under way at that time may still answer callers that joined it earlier. Its result
//     is not kept.
//   - Between invalidations, one load of a key runs at a time in a process. With a
//     Store, one runs in all processes while its lease lasts. When the lease has run
//     out, another process loads too, and the first result is kept. A load no longer
//     counts once LoadTimeout has passed or all its callers have left: the next call
//     begins another (see Config.Finish).
//   - An error or a panic is never cached. [ErrNotFound] is remembered for NotFoundTTL,
//     which is zero by default.
//   - A value past its TTL is served only as Stale, StaleOnError and SoftTimeout allow,
//     and never after an invalidation. Expire is the soft form.
//   - A load does not end with the call that began it. Each caller waits as long as its
//     own ctx lasts. When the last caller leaves, the load is canceled, unless
//     Config.Finish is set. A background refresh needs no caller.
//   - No lock is held while a function of the application runs.
//
// With a Store, each process keeps the promise for its own writes. It sees the writes of
// other processes when their messages arrive, within milliseconds. When the subscription
// is lost, the process stops using its memory until the subscription is back, unless
// Config.MemoryInOutage is set. Without a subscription, the TTL is the bound. A negative
// Capacity keeps nothing in memory: the promise then holds across processes, at one
// round trip for each Get.
//
// Until a Write has returned, calls may get the new value and then the old one again:
// only its return is a point after which no call gets the old one.
//
// Write fences its key in the Store before it writes. If the process dies between its
// commit and the invalidation, or loses the Store, readers miss; they do not read an old
// value.
//
// A Store that loses its data (a restart, an eviction) loses fences too. Then the TTL is
// the bound for a process that committed and could not tell the Store. A Store may also
// come back with earlier data, from a snapshot or by a failover to a replica that lags.
// A process notices by a call that fails, or by the loss of its subscription. It then
// repeats its last 512 invalidations, as far as they are from the last ten seconds, and
// does not use the Store for those keys until then, so its own promise holds for them.
// Other processes may read old values until they hear of it, at worst for the TTL. So may
// the process itself if it notices nothing: when no call was under way, and it has no
// subscription, as with a negative Capacity, or one to another server of a cluster. Run
// the Store without persistence, and see EvalReplicated of package redisstore.
//
// Where the TTL is the bound, Stale and StaleOnError extend it as they extend the use of
// any value.
//
// Sources: the Cache-Aside pattern (Cloud Design Patterns); leases from "Scaling
// Memcache at Facebook" (NSDI 2013); XFetch from "Optimal Probabilistic Cache Stampede
// Prevention" (VLDB 2015); stale-while-revalidate and stale-if-error from RFC 5861. The
// memory is a cache of github.com/maypok86/otter/v2.
package cacheaside

import (
	"context"
	"hash/maphash"
	"math/rand/v2"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/maypok86/otter/v2"

	"github.com/go-resilience/resilience/cacheaside/internal/entry"
	"github.com/go-resilience/resilience/cacheaside/internal/flight"
	"github.com/go-resilience/resilience/cacheaside/internal/tier"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
)

// A Cache holds values of type V by keys of type K and loads the ones that it does not
// hold. It is safe for concurrent use. Close it when it is no longer needed.
type Cache[K comparable, V any] struct {
	setting   settings.Setting[Config[K, V]]
	entries   *otter.Cache[K, *entry.Entry[V]] // nil if nothing is kept in memory
	shards    [shards]shard[K, V]
	seed      maphash.Seed
	base      time.Time
	slots     slots
	tier      *tier.Tier // nil without a Store
	chance    func(below time.Duration) time.Duration
	printable bool

	memory flight.Memory[K, V]

	closed   atomic.Bool
	ended    chan struct{}  // closed when Close has ended
	sweeping atomic.Bool    // a sweep is about to begin
	running  sync.WaitGroup // the goroutines of the Cache

	observers notify.Observers[Event]
	panics    notify.Panics // of hooks
	hits      hits
	counts    counts
}

const shards = 64

// A shard serializes everything that happens to its keys, except hits.
type shard[K comparable, V any] struct {
	mu sync.Mutex
	flight.Table[K, V]
	_ [64]byte
}

// New returns a Cache. It panics with the error of cfg.Validate, if there is one. With a
// Store it starts a goroutine that watches the Store and ends with Close.
func New[K comparable, V any](cfg Config[K, V]) *Cache[K, V] {
	c := &Cache[K, V]{
		seed:      maphash.MakeSeed(),
		base:      time.Now(),
		printable: printable(reflect.TypeFor[K]()),
		chance:    rand.N[time.Duration],
		ended:     make(chan struct{}),
	}
	c.setting.Init(cfg, Config[K, V].withDefaults)
	cfg = c.Config()
	c.slots.setLimit(cfg.Loads)
	for i := range c.shards {
		c.shards[i].Table = flight.NewTable(&c.memory)
	}
	if cfg.Capacity > 0 {
		c.entries = otter.Must(&otter.Options[K, *entry.Entry[V]]{
			MaximumWeight: uint64(cfg.Capacity),
			Weigher:       func(_ K, e *entry.Entry[V]) uint32 { return e.Cost },
			OnAtomicDeletion: func(e otter.DeletionEvent[K, *entry.Entry[V]]) {
				if e.WasEvicted() {
					c.counts.evicted.Add(1)
				}
			},
			// Maintenance is short. Running it here leaves no goroutine behind.
			Executor: func(fn func()) { fn() },
		})
		c.memory.Entries = c.entries
	}
	if cfg.Store == nil {
		c.memory.Remembers.Store(true)
	} else {
		c.memory.Remembers.Store(cfg.MemoryInOutage) // without MemoryInOutage: once the Store is being watched
		c.tier = newTier(c)
		if c.entries != nil {
			c.memory.Divide(max(cfg.Capacity, 256))
			c.running.Go(c.watch)
		}
	}
	return c
}

// cfg returns the settings as they are now. They are never written to.
func (c *Cache[K, V]) cfg() *Config[K, V] { return c.setting.Load() }

// now returns the time since New. It reads only the monotonic clock, which costs half as
// much as time.Now.
func (c *Cache[K, V]) now() time.Duration { return time.Since(c.base) }

func (c *Cache[K, V]) shard(key K) *shard[K, V] {
	if !flight.Findable(key) { // it has another hash each time
		return &c.shards[0]
	}
	return &c.shards[maphash.Comparable(c.seed, key)%shards]
}

// Close cancels the loads in progress, whose callers get [ErrClosed], and waits until
// they and the goroutines of the Cache have ended. A Load that ignores its ctx delays it.
// A Load or a hook that calls Close would wait for itself. Close tries once more to tell
// the Store of invalidations that it missed; an [*InvalidateError] lists the remaining
// ones. A closed Cache serves nothing. Close does not close the Store.
func (c *Cache[K, V]) Close() error {
	if c.closed.Swap(true) {
		<-c.ended
		return nil
	}
	defer close(c.ended)
	c.memory.EndAll()
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		s.Close(ErrClosed, func(f *flight.Flight[K, V], canceled bool) {
			f.End()
			if canceled {
				c.counts.canceled.Add(1)
			}
		})
		s.mu.Unlock()
	}
	var err error
	if c.tier != nil {
		if keys, untold := c.tier.Close(); untold != nil {
			err = &InvalidateError{Name: c.cfg().Name, Keys: keys, Err: untold}
		}
	}
	c.running.Wait()
	if c.entries != nil {
		c.entries.InvalidateAll()
	}
	return err
}

// newTier returns the Tier of a Cache with a Store.
func newTier[K comparable, V any](c *Cache[K, V]) *tier.Tier {
	return tier.New(c.cfg().Store, tier.Host{
		Now:      c.now,
		Pause:    func() time.Duration { return max(c.cfg().ErrorPause, 0) },
		Go:       c.running.Go,
		Lost:     func(ctx context.Context, err error) { c.tellAll(ctx, EventStoreLost, err) },
		Restored: func(ctx context.Context) { c.tellAll(ctx, EventStoreRestored, nil) },
		Retold:   func(ctx context.Context) { c.tellAll(ctx, EventReinvalidated, nil) },
	})
}
