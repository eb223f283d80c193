// Package cacheaside caches the results of slow reads in memory and, optionally, in a [Store] that several processes
// share. After [Cache.Write] has returned, a [Cache.Get] in the same process returns no value from before the write.
//
//	users := cacheaside.New(cacheaside.Config[int, User]{
//		Name: "users",
//		Load: func(ctx context.Context, id int) (User, error) { return selectUser(ctx, db, id) },
//		TTL:  time.Minute,
//	})
//	defer users.Close()
//	u, err := users.Get(ctx, 42) // concurrent callers share one load
//	err = users.Write(ctx, 42, func(ctx context.Context) error {
//		return updateUser(ctx, db, u) // updates the database; Write then invalidates 42
//	})
//
// # Guarantees
//
// A Cache gives these guarantees, with and without a Store. The guarantees about invalidations apply to the process
// that invalidates; for other processes, see the next section.
//
//   - If a Get starts after Write, Invalidate or InvalidateAll has returned, the value that Get returns is at least as
//     new as the data that was committed before the invalidation. Write invalidates its key after its function has
//     returned. Exceptions: Load reads an outdated value (see Config.ReplicaLag), or the Store has lost data. If a load
//     is in flight during an invalidation, the result of the load is not cached. Callers that joined the load before
//     the invalidation may get the result.
//   - At most one load of a key runs at a time in each process. With a Store, at most one load of a key runs in all
//     processes together until the lease of the load expires. A lease is the right to load a key for a limited time.
//     There are three exceptions. After a load was canceled, timed out, was invalidated or was bypassed by SkipMemory,
//     that load may still run while a new load of the same key runs. While the Store fails, or a Write of the key is in
//     progress, each process loads the key by itself. Each Config.Version has its own lease.
//   - Panics, and errors other than ErrNotFound, are never cached. If a load fails, all callers that wait for the load
//     get an error, in every process, unless they may get a stale value. A load whose error is an answer, that a policy
//     refused or that was canceled fails only for the callers in its process: another process then starts a load.
//   - After its TTL, a value is served only if Config.StaleWhileRevalidate, StaleIfError or SoftTimeout allows the
//     value. A Get that starts after an invalidation of its key is never served the invalidated value.
//   - A caller waits for a load only until the caller's own ctx is done. When the last caller of a load has canceled,
//     the load is canceled, unless Config.FinishLoads is set.
//
// # Several processes
//
// With a Store, a process sees its own writes; for an exception, see Config.ReplicaLag. A process sees a write of
// another process when the Store notifies it of the write. If the Store has no subscription for notifications, a
// process may serve an outdated value from its memory. An outdated value is served for at most its TTL plus the larger
// of StaleWhileRevalidate and StaleIfError. A Get with [GetOptions].SkipMemory sees all writes of which the Store was
// notified, at the cost of one round trip to the Store. When a process detects that its subscription to the Store is
// lost, it serves no values from its memory until it has subscribed again.
//
// Write sets a fence on its key in the Store before it changes the source. If the Store cannot set the fence, Write
// continues without it (see [EventFenceFailed]). While the fence is in place, the Store has no value for the key, and
// every process loads the key from the source. So if a process dies after the change and before the invalidation, the
// Store has no outdated value for other processes to read.
//
// A Store can lose data in a restart, an eviction or a failover to a lagging replica. A Store that has lost data may
// return values from before a Write. Such a value is returned for at most its TTL plus the larger of
// StaleWhileRevalidate and StaleIfError. Run the Store without persistence, because a restored snapshot has outdated
// values.
//
// # Sources
//
// The package implements the Cache-Aside pattern (Cloud Design Patterns). Leases come from "Scaling Memcache at
// Facebook" (NSDI 2013). XFetch comes from "Optimal Probabilistic Cache Stampede Prevention" (VLDB 2015).
// Stale-while-revalidate and stale-if-error come from RFC 5861. The values in memory are stored in a cache of
// github.com/maypok86/otter/v2.
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

// A Cache caches the values of keys of type K. Create it with [New]. It is safe for concurrent use.
type Cache[K comparable, V any] struct {
	setting   settings.Setting[Config[K, V]]
	observers notify.Observers[Event]
	base      time.Time
	seed      maphash.Seed
	chance    func(below time.Duration) time.Duration
	entries   *otter.Cache[K, *entry[V]]
	tier      *tier // calls the Store; nil without a Store

	hits          *otterstats.Counter // divided among processors: parallel hits share no cache line
	stale, misses atomic.Int64

	running sync.WaitGroup // counts the goroutines of the Cache, for Close
	ended   chan struct{}  // closed when the first Close has returned

	mu            sync.Mutex
	flights       map[K]*flight[K, V]      // loads in progress that further calls may join, by key
	loads         map[*load[K, V]]struct{} // loads with flights that have not finished
	memoryEnabled bool                     // while false, memory is empty and stays empty
	stats         Stats
	closed        bool

	changes
}

// New returns a Cache. Call Close when the Cache is no longer used. New panics if cfg is invalid; see
// [Config.Validate].
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
		// otter's maintenance is short, so it runs on the caller's goroutine. On a separate one, it could outlast Close.
		Executor: func(fn func()) { fn() },
	})
	c.memoryEnabled = cfg.Store == nil // watch enables memory if there is a Store
	c.grow(cfg.Capacity, cfg.Store != nil)
	if cfg.Store != nil {
		c.tier = newTier(cfg.Store, c.now, func() time.Duration { return max(c.cfg().ErrorPause, 0) }, c.notifyGlobal)
		c.running.Go(c.watch)
		c.running.Go(c.tier.retryInvalidations)
	}
	return c
}

// cfg returns the current Config, with its defaults. A Config is never modified: Update replaces it.
func (c *Cache[K, V]) cfg() *Config[K, V] { return c.setting.Load() }

// now returns the time since New. It reads only the monotonic clock, which takes half as long as time.Now.
func (c *Cache[K, V]) now() time.Duration { return time.Since(c.base) }

// Close cancels the loads in flight and waits until they have returned, even if a Load ignores its ctx. The callers of
// canceled loads get [ErrClosed]. With a Store, Close then retries the invalidations that have not reached the Store.
// If some invalidations still fail, Close returns an [*InvalidateError] that lists their keys. Further calls to Close
// wait for the first call, and return nil. Load, Middleware and observers must not call Close. Otherwise Close would
// wait for them forever.
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
// Update calls change with the effective Config, with its defaults filled in. The function must not call the Cache. A
// field that the function does not modify still follows its default. Jitter or ErrorPause can be [None], which is
// negative, so test these fields for None before calculating with them. If Update returns an error or the function
// panics, the settings remain as they were. Cached entries keep their expiration times, and loads in flight keep their
// settings. A new function Key must return the same strings as the previous function. The fields Name, Store, Codec and
// Version cannot be changed.
func (c *Cache[K, V]) Update(change func(*Config[K, V])) error {
	return c.setting.Update(change, allow, c.follow)
}

// allow returns an error that names each field of next that differs from was although it cannot change.
func allow[K comparable, V any](was, next *Config[K, V]) error {
	f := invalid.Fields{Type: "cacheaside.Config"}
	f.Same("Name", was.Name, next.Name)
	f.Same("Store", was.Store, next.Store)
	f.Same("Codec", was.Codec, next.Codec)
	f.Same("Version", was.Version, next.Version)
	next.Store, next.Codec = was.Store, was.Codec // Same accepts some values that it cannot compare
	return f.Err()
}

// follow applies a changed Config to the parts of the Cache that have copies of its fields.
func (c *Cache[K, V]) follow(cfg *Config[K, V]) {
	c.entries.SetMaximum(uint64(cfg.Capacity))
	c.mu.Lock()
	defer c.mu.Unlock()
	c.grow(cfg.Capacity, cfg.Store != nil)
	c.allAt = c.now() // changes were not recorded without ReplicaLag: assume a change of all keys now
}

// watch receives the invalidations of other processes until Close. While it cannot receive them, memory is not used.
func (c *Cache[K, V]) watch() {
	for lost := false; c.tier.ctx.Err() == nil; c.tier.sleep() {
		err := c.tier.store.Watch(c.tier.ctx, func() {
			c.invalidateAllInMemory(true) // entries and loads may have missed an invalidation
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

// invalidateAllInMemory invalidates all entries in memory. It also prevents all loads in flight from caching their
// results there. Afterwards, memory is used only if enabled is true. The entries are freed in the background, because
// the next notifications of the Store must not wait for that.
func (c *Cache[K, V]) invalidateAllInMemory(enabled bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.memoryEnabled || enabled {
		c.allAt, c.memoryEnabled = c.now(), enabled
		c.all.Add(1)
		c.running.Go(c.entries.InvalidateAll)
	}
}

// storeKey returns key, converted to a string by Config.Key. Without a Store, it returns "".
func (c *Cache[K, V]) storeKey(key K) string {
	if c.tier == nil {
		return ""
	}
	return c.cfg().Key(key)
}

// hashOf returns the hash of key. With a Store, this is the hash of storeKey, because other processes report the keys
// that they have invalidated as strings.
func (c *Cache[K, V]) hashOf(key K, storeKey string) uint32 {
	if c.tier != nil {
		return hash(storeKey)
	}
	return uint32(maphash.Comparable(c.seed, key))
}

// recordChange records that the keys with the given hash have changed now. Without ReplicaLag, it does nothing. The
// Cache is locked.
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

// notify calls the observers with an event, which is about key unless that is nil. The Cache must not be locked.
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

// notifySafely is like notify, but logs the panic of an observer. The Cache uses it on its own goroutines, where a
// panic would end the program.
func (c *Cache[K, V]) notifySafely(ctx context.Context, kind EventKind, key *K, err error, took time.Duration) {
	defer func() {
		if v := recover(); v != nil {
			log.Printf("cacheaside: an observer panicked: %v\n%s", v, debug.Stack())
		}
	}()
	c.notify(ctx, kind, key, err, took)
}

// notifyGlobal is like notifySafely, for an event that is not about one key.
func (c *Cache[K, V]) notifyGlobal(ctx context.Context, kind EventKind, err error) {
	c.notifySafely(ctx, kind, nil, err, 0)
}
