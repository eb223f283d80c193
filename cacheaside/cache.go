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
// A Cache keeps these promises, with and without a [Store]:
//
//   - A Get that begins after Write, Invalidate or InvalidateAll has returned gets a value
//     at least as new as what was committed before the call. A load under way then may
//     still answer callers that joined it earlier; its result is not kept.
//   - One load of a key runs at a time: in a process or, with a Store, in all of them while
//     its lease lasts. One that was overtaken, canceled or timed out may run beside the next.
//   - An error or a panic is never cached. A load that fails has failed for all who wait
//     for it, in every process.
//   - A value past its TTL is served only as StaleWhileRevalidate, StaleIfError and SoftTimeout allow,
//     and never after an invalidation.
//   - Each caller waits for a load as long as its own ctx lasts. When the last one leaves, the
//     load is canceled (see Config.FinishLoads).
//
// With a Store, each process keeps the first promise for its own writes and, by
// [GetOptions].SkipMemory, at one round trip, for those of all. Otherwise it sees the writes of
// others when their messages arrive or, without a subscription, when the TTL has passed, extended
// by StaleWhileRevalidate and StaleIfError. While the subscription is lost, memory is not used. Write fences its
// key in the Store before it writes, so that readers miss if the process dies before the
// invalidation.
//
// A Store that loses what it was told, by a restart, an eviction or a failover to a replica
// that lags, may hold values from before a Write. Then the TTL is the bound, extended by
// StaleWhileRevalidate and StaleIfError. Run it without persistence.
//
// Sources: the Cache-Aside pattern (Cloud Design Patterns); leases from "Scaling
// Memcache at Facebook" (NSDI 2013); XFetch from "Optimal Probabilistic Cache Stampede
// Prevention" (VLDB 2015); stale-while-revalidate and stale-if-error from RFC 5861. The
// memory is a cache of github.com/maypok86/otter/v2.
package cacheaside

import (
	"context"
	"hash/maphash"
	"log"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/maypok86/otter/v2"
	otterstats "github.com/maypok86/otter/v2/stats"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
)

// A Cache is safe for concurrent use.
type Cache[K comparable, V any] struct {
	setting   settings.Setting[Config[K, V]]
	observers notify.Observers[Event]
	base      time.Time
	seed      maphash.Seed
	chance    func(below time.Duration) time.Duration
	entries   *otter.Cache[K, *entry[V]]
	tier      *tier // nil without a Store

	hits          *otterstats.Counter // divided among processors, so that parallel hits do not share a cache line
	stale, misses atomic.Int64

	running sync.WaitGroup // the goroutines of the Cache
	ended   chan struct{}  // closed when Close has ended

	mu            sync.Mutex
	flights       map[K]*flight[K, V]      // flights that a call may join, and whose results will be cached
	loads         map[*load[K, V]]struct{} // loads with flights that have not landed
	memoryEnabled bool                     // while false, nothing is kept in memory
	stats         Stats
	closed        bool

	changes
}

// New returns a Cache, which must be closed. It panics with the error of cfg.Validate, if
// there is one.
func New[K comparable, V any](cfg Config[K, V]) *Cache[K, V] {
	c := &Cache[K, V]{
		base: time.Now(), seed: maphash.MakeSeed(), chance: rand.N[time.Duration],
		flights: make(map[K]*flight[K, V]), loads: make(map[*load[K, V]]struct{}), ended: make(chan struct{}),
		hits: otterstats.NewCounter(),
	}
	c.setting.Init(cfg, Config[K, V].withDefaults)
	cfg = c.Config()
	c.entries = otter.Must(&otter.Options[K, *entry[V]]{
		MaximumWeight: uint64(cfg.Capacity),
		Weigher:       func(_ K, e *entry[V]) uint32 { return max(e.weight, 1) },
		// Maintenance is short. Running it here leaves no goroutine behind.
		Executor: func(fn func()) { fn() },
	})
	c.memoryEnabled = cfg.Store == nil // otherwise once the Store is being watched
	c.grow(cfg.Capacity, cfg.Store != nil)
	if cfg.Store != nil {
		c.tier = newTier(cfg.Store, c.now, func() time.Duration { return max(c.cfg().ErrorPause, 0) }, c.notifyGlobal)
		c.running.Go(c.watch)
		c.running.Go(c.tier.retryInvalidations)
	}
	return c
}

// cfg returns the settings as they are now. They are never written to.
func (c *Cache[K, V]) cfg() *Config[K, V] { return c.setting.Load() }

// now returns the time since New. It reads only the monotonic clock, which costs half as
// much as time.Now.
func (c *Cache[K, V]) now() time.Duration { return time.Since(c.base) }

// Close cancels the loads under way, whose callers get [ErrClosed], waits for them, and tries
// once more to tell the Store what it missed: an [*InvalidateError] lists what remains. A
// Load or a hook that calls it waits for itself.
func (c *Cache[K, V]) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		<-c.ended
		return nil
	}
	defer close(c.ended)
	c.closed = true
	c.all.Add(1)
	for l := range c.loads {
		for _, f := range l.flights {
			if !f.answered() {
				c.stats.Canceled++
				c.abandon(f, ErrClosed)
			}
		}
	}
	c.mu.Unlock()
	if c.tier != nil {
		c.tier.end()
	}
	c.running.Wait()
	c.entries.InvalidateAll()
	if c.tier != nil {
		if keys, pending := c.tier.flushPending(context.Background()); pending != nil {
			return &InvalidateError{Name: c.cfg().Name, Keys: keys, Err: pending}
		}
	}
	return nil
}

// Config returns a copy of the current Config, with its defaults filled in.
func (c *Cache[K, V]) Config() Config[K, V] { return c.setting.Config() }

// Update changes the settings of a Cache that is in use:
//
//	err := users.Update(func(cfg *cacheaside.Config[int, User]) { cfg.TTL = time.Minute })
//
// change gets the effective Config, with its defaults filled in, and must not call the Cache. A field that
// it leaves as it is shown still follows its default. If Update returns an error, or change panics, nothing
// has changed. Entries keep their times, and loads in progress their settings. A new Key must write keys as
// the previous one did. Name, Store, Codec and Version cannot change.
func (c *Cache[K, V]) Update(change func(*Config[K, V])) error {
	return c.setting.Update(change, allow, c.follow)
}

func allow[K comparable, V any](was, next *Config[K, V]) error {
	f := invalid.Fields{Type: "cacheaside.Config"}
	f.Same("Name", was.Name, next.Name)
	f.Same("Store", was.Store, next.Store)
	f.Same("Codec", was.Codec, next.Codec)
	f.Same("Version", was.Version, next.Version)
	next.Store, next.Codec = was.Store, was.Codec // what cannot be compared stays, too
	return f.Err()
}

func (c *Cache[K, V]) follow(cfg *Config[K, V]) {
	c.entries.SetMaximum(uint64(cfg.Capacity))
	c.mu.Lock()
	defer c.mu.Unlock()
	c.grow(cfg.Capacity, cfg.Store != nil)
	c.allAt = c.now() // for a ReplicaLag that is set: nobody has noted changes until now
}

// watch listens for invalidations by other processes until Close. While it cannot hear them,
// nothing is kept in memory.
func (c *Cache[K, V]) watch() {
	for lost := false; c.tier.ctx.Err() == nil; c.tier.sleep() {
		err := c.tier.store.Watch(c.tier.ctx, func() {
			c.invalidateAllInMemory(true) // entries and loads may have missed a change
			lost = false
			c.notifyGlobal(context.Background(), EventWatchBegan, nil)
		}, func(storeKey string) {
			if storeKey == "" {
				c.invalidateAllInMemory(true)
				return
			}
			c.mu.Lock()
			defer c.mu.Unlock()
			c.touch(hash(storeKey))
			c.recordChange(hash(storeKey))
		})
		c.invalidateAllInMemory(false)
		if !lost && c.tier.ctx.Err() == nil {
			lost = true
			c.notifyGlobal(context.Background(), EventWatchLost, err)
		}
	}
}

// invalidateAllInMemory ends all entries and all loads under way, and says whether memory is used from now on.
// Entries are freed beside, because messages that follow must not wait for that.
func (c *Cache[K, V]) invalidateAllInMemory(memoryEnabled bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.memoryEnabled || memoryEnabled {
		c.allAt, c.memoryEnabled = c.now(), memoryEnabled
		c.all.Add(1)
		c.running.Go(c.entries.InvalidateAll)
	}
}

// storeKey returns key as it is written for the Store, or "" without one.
func (c *Cache[K, V]) storeKey(key K) string {
	if c.tier == nil {
		return ""
	}
	return c.cfg().Key(key)
}

// hashOf returns the hash of a key, which written is converted from.
func (c *Cache[K, V]) hashOf(key K, storeKey string) uint32 {
	if c.tier != nil {
		return hash(storeKey)
	}
	return uint32(maphash.Comparable(c.seed, key))
}

// recordChange records when the keys with a hash have changed, if that matters. The Cache is locked.
func (c *Cache[K, V]) recordChange(hash uint32) {
	if c.cfg().ReplicaLag <= 0 {
		return
	}
	mask := c.table.Load().mask
	if c.at == nil {
		c.at = make([]time.Duration, mask+1)
	}
	c.at[hash&mask] = c.now()
}

// notify reports an event, about key unless that is nil, on the goroutine of a call. No lock is
// held.
func (c *Cache[K, V]) notify(ctx context.Context, kind EventKind, key *K, err error, took time.Duration) {
	if !c.observers.Any() {
		return
	}
	e := Event{Kind: kind, Name: c.cfg().Name, Err: err, Took: took}
	if key != nil {
		e.Key = *key
	}
	c.observers.Tell(ctx, e)
}

// notifySafely is notify on a goroutine of the Cache, where nobody else would recover the panic of a hook.
func (c *Cache[K, V]) notifySafely(ctx context.Context, kind EventKind, key *K, err error, took time.Duration) {
	defer func() {
		if v := recover(); v != nil {
			log.Printf("cacheaside: an observer panicked: %v\n%s", v, debug.Stack())
		}
	}()
	c.notify(ctx, kind, key, err, took)
}

// notifyGlobal reports an event that is not about one key, perhaps on a goroutine of the Cache.
func (c *Cache[K, V]) notifyGlobal(ctx context.Context, kind EventKind, err error) {
	c.notifySafely(ctx, kind, nil, err, 0)
}
