// Package cacheaside keeps the results of slow reads, in memory and in a cache
// that processes share, and never serves one from before the last write.
//
//	users := cacheaside.New(cacheaside.Config[int, User]{
//		Name: "users",
//		Load: func(ctx context.Context, id int) (User, error) { return selectUser(ctx, db, id) },
//		TTL:  time.Minute,
//	})
//	defer users.Close()
//	u, err := users.Get(ctx, 42) // loads at most once, however many ask
//	err = users.Update(ctx, 42, func(ctx context.Context) error {
//		return updateUser(ctx, db, u) // then invalidates, in the only right order
//	})
//
// What a Cache promises, with and without a [Store] that processes share:
//
//   - If Update, Invalidate or InvalidateAll returned before a Get began, that
//     Get returns a value at least as new as what was committed before the call.
//     A load that was under way then may still answer earlier calls; it is not
//     kept.
//   - There is at most one load of a key at a time in a process, between
//     invalidations, and one in all processes that share a Store, while its lease
//     lasts. When it has passed, another process loads as well, and the first
//     result is kept. A load that has outlived LoadTimeout, or whose callers have
//     all gone, no longer counts: the next call begins another (see Config.Finish).
//   - An error or a panic is never cached. [ErrNotFound] is remembered for
//     NotFoundTTL, which is not by default.
//   - Old values are served only where Stale, StaleOnError or SoftTimeout asks
//     for it, and never after an invalidation. Expire is the soft form.
//   - A load does not end with the call that began it: each caller waits as long
//     as its own ctx lasts, and the load is canceled when the last has gone, unless
//     Config.Finish is set. A refresh in the background goes on without callers.
//   - No lock is held while a function of the application runs.
//
// With a Store, the promise holds in each process for its own updates. What
// another process wrote is seen when its message arrives, within milliseconds;
// when the subscription is lost, memory is not used until it is back, unless
// Config.MemoryInOutage is set. Without a
// subscription the bound is the TTL. A Capacity below zero keeps nothing in
// memory and makes the promise hold across processes, at one round trip for each
// Get. An Update fences its key in the Store before it writes, so that a process
// that dies between its commit and the invalidation, or cannot reach the Store any
// more, costs misses, not staleness.
//
// A Store that loses what it held (a restart, an eviction) loses fences as well:
// then the TTL is the bound for a writer that cannot tell it of its commit. A Store
// that comes back with what it held earlier, from a snapshot or by a failover to a
// replica that lags, may hold values of that time. Each process tells it again what
// it told it in the ten seconds before the connection was lost, and does not use it
// for these keys until then, so that its own promise holds; other processes may get
// the old values until they hear of it, at worst for their TTL. Run it without
// persistence, and see redisstore's Config.EvalReplicated.
//
// Sources: the Cache-Aside pattern (Cloud Design Patterns); leases from "Scaling
// Memcache at Facebook" (NSDI 2013); XFetch from "Optimal Probabilistic Cache
// Stampede Prevention" (VLDB 2015); stale-while-revalidate and stale-if-error
// from RFC 5861. Memory is kept by github.com/maypok86/otter/v2.
package cacheaside

import (
	"context"
	"hash/maphash"
	"math"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/maypok86/otter/v2"

	"github.com/go-resilience/resilience/internal/ended"
)

// A Cache holds values of type V by keys of type K and loads what it does not
// hold. It is safe for concurrent use. Close it when it is no longer needed.
type Cache[K comparable, V any] struct {
	cfg       Config[K, V]
	entries   *otter.Cache[K, *entry[V]] // nil: nothing is kept in memory
	shards    [shards]shard[K, V]
	seed      maphash.Seed
	base      time.Time
	slots     chan struct{} // one for each load that runs
	shared    *shared[K, V] // nil without a Store
	printable bool

	// epoch is raised to make all that is in memory, and all that is being loaded
	// into it, out of date at once; see version. While remembers is false nothing
	// is kept.
	epoch     atomic.Uint64
	remembers atomic.Bool

	closed  atomic.Bool
	running sync.WaitGroup // the goroutines of the Cache

	tags   tags
	hits   hits
	counts counts

	breaks struct { // set by tests that show what a rule is for
		lease bool // a flight keeps what it loaded whether it was overtaken or not
		order bool // memory is told before the Store
	}
}

const shards = 64

// A shard serializes what happens to its keys, apart from hits.
type shard[K comparable, V any] struct {
	mu      sync.Mutex
	flights map[K]*flight[K, V]        // the flight whose result will be kept
	others  map[*flight[K, V]]struct{} // flights whose result will not be kept
	alone   map[K]*flight[K, V]        // of others, the last that loads without a claim; see turn
	lost    map[K]*lost                // the loads that go on though nobody waits for them
	primes  []*prime[K, V]             // see Prime
	pauses  map[K]time.Duration        // see pause
	timer   *time.Timer                // see watchOver
	watched bool                       // timer is set

	manyPauses int // from so many pauses on, the ones that have passed are dropped
	_          [64]byte
}

// New returns a Cache. It panics with the error of cfg.Validate if there is one.
// With a Store that can be watched it starts a goroutine, which ends with Close.
func New[K comparable, V any](cfg Config[K, V]) *Cache[K, V] {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	cfg = cfg.withDefaults()
	c := &Cache[K, V]{
		cfg:       cfg,
		seed:      maphash.MakeSeed(),
		base:      time.Now(),
		slots:     make(chan struct{}, cfg.Loads),
		printable: printable(reflect.TypeFor[K]()),
	}
	for i := range c.shards {
		c.shards[i].flights = make(map[K]*flight[K, V])
		c.shards[i].others = make(map[*flight[K, V]]struct{})
		c.shards[i].alone = make(map[K]*flight[K, V])
	}
	if cfg.Capacity > 0 {
		c.entries = otter.Must(&otter.Options[K, *entry[V]]{
			MaximumWeight: uint64(cfg.Capacity),
			Weigher:       func(_ K, e *entry[V]) uint32 { return e.cost },
			OnAtomicDeletion: func(e otter.DeletionEvent[K, *entry[V]]) {
				if e.WasEvicted() {
					c.counts.evicted.Add(1)
				}
			},
			// Its maintenance is short; done here, it leaves no goroutine behind.
			Executor: func(fn func()) { fn() },
		})
	}
	if cfg.Store == nil {
		c.remembers.Store(true)
	} else {
		c.remembers.Store(cfg.MemoryInOutage) // else when the Store is being watched
		c.shared = newShared(c)
	}
	return c
}

// now is the time since the Cache was made: a reading of the monotonic clock
// alone, which is half the price of time.Now.
func (c *Cache[K, V]) now() time.Duration { return time.Since(c.base) }

func (c *Cache[K, V]) shard(key K) *shard[K, V] { return &c.shards[c.shardOf(key)] }

func (c *Cache[K, V]) shardOf(key K) uint64 { return maphash.Comparable(c.seed, key) % shards }

// version is what an entry and a flight must have been made under to count: the
// epoch and, with a Store, how often others have invalidated keys of this slot.
func (c *Cache[K, V]) version(slot uint32) uint64 {
	v := c.epoch.Load() << 32
	if c.shared != nil {
		v |= uint64(c.shared.slots[slot].Load())
	}
	return v
}

// Get returns the value of key: from memory if it is fresh there, else from the
// Store, else from Load. Of the callers that need the same load one begins it and
// the others join. Each waits until its own ctx ends, and is then given an error
// that wraps context.Cause(ctx). The error of a load is returned as it is; see
// [ErrNotFound], [*PanicError] and [*TimeoutError] for those of the Cache.
func (c *Cache[K, V]) Get(ctx context.Context, key K) (V, error) {
	if ctx.Err() != nil {
		var zero V
		return zero, ended.Error(ctx)
	}
	early := false
	if c.entries != nil {
		e, ok := c.entries.GetIfPresent(key)
		if ok && e.version == c.version(e.slot) && (e.tags == nil || c.tags.holds(e.tags)) {
			now := c.now()
			if now < e.fresh {
				early = c.cfg.Ahead > 0 && c.ahead(e, now)
				if !early {
					c.hits.add()
					return c.give(e)
				}
			}
		}
	}
	e, err := c.resolve(ctx, key, early, GetOptions{})
	if err != nil {
		var zero V
		return zero, err
	}
	return c.give(e)
}

// give hands an entry to a caller.
func (c *Cache[K, V]) give(e *entry[V]) (V, error) {
	if e.absent {
		var zero V
		return zero, ErrNotFound
	}
	if c.cfg.Clone != nil {
		return c.cfg.Clone(e.value), nil
	}
	return e.value, nil
}

// resolve is Get past a miss.
func (c *Cache[K, V]) resolve(ctx context.Context, key K, early bool, o GetOptions) (*entry[V], error) {
	at, asked := c.asks(), c.tags.last.Load()
	if o.SkipMemory {
		at = noOld
	}
	e, f, mine, err := c.join(ctx, key, early, o, nil)
	if f == nil {
		return e, err
	}
	n := nestingOf(ctx)
	n.pause()
	if mine && c.flyInline(ctx, f) {
		err = ended.Error(ctx)
	} else {
		e, err = c.wait(ctx, f, at)
	}
	if resumed := n.resume(ctx); resumed != nil {
		return nil, resumed
	}
	if c.missedTags(f, e, err, asked) {
		return c.resolve(ctx, key, false, o) // what f does not answer any more
	}
	return e, err
}

// noOld is the time at which a caller asks that is to get no old value.
const noOld time.Duration = -1

// asks returns the time at which a caller asks, where it matters: without memory a
// caller may join a flight that has read an old value from the Store before.
func (c *Cache[K, V]) asks() time.Duration {
	if c.entries != nil {
		return 0
	}
	return c.now()
}

// join serves what may be served without a load, which it then begins in the
// background if that is due; or it joins the flight of the key, or launches one,
// which g lets fly if it is not nil. A flight that it returns is to be waited for or
// left. It is the caller's own to fly if mine is true.
func (c *Cache[K, V]) join(ctx context.Context, key K, early bool, o GetOptions, g *gathering[K, V]) (e *entry[V], f *flight[K, V], mine bool, err error) {
	if err := c.mayNest(loadOf(ctx), key); err != nil {
		return nil, nil, false, err
	}
	var written string
	if c.shared != nil {
		written = c.cfg.Key(key)
	}
	s := c.shard(key)
	s.mu.Lock()
	if c.closed.Load() {
		s.mu.Unlock()
		return nil, nil, false, ErrClosed
	}
	// Again, under the lock: the flight that was in progress may have landed.
	instant := time.Now()
	now := instant.Sub(c.base)
	f = c.current(s, key)
	e = c.peek(key)
	how := e.standing(now)
	switch {
	case o.SkipMemory && c.entries != nil:
		s.overtake(key)
		e, f, how = nil, nil, dead
	case o.Stale > 0 && how < stale && e != nil && !e.absent && now < after(e.fresh, o.Stale):
		how = stale
	}
	if how == kept && !e.paused(now) || how == dead {
		launch := f == nil
		if launch {
			f = c.launch(ctx, s, key, written, instant)
			if e != nil {
				f.old.Store(&oldValue[V]{e, math.MaxInt64})
			}
		}
		f.waiters++
		s.mu.Unlock()
		c.counts.missed.Add(1)
		mine = launch && g == nil && c.cfg.Inline
		if launch && !mine {
			g.fly(f)
		}
		return nil, f, mine, nil
	}
	refresh := f == nil && !e.paused(now) && (how == stale || early)
	if refresh {
		f = c.launch(ctx, s, key, written, instant)
		f.renew = how == fresh
		f.waiters++ // itself: it goes on when nobody waits
	}
	s.mu.Unlock()
	if refresh {
		g.fly(f)
	}
	if how != fresh {
		return c.serveStale(ctx, key, e, nil), nil, false, nil
	}
	c.hits.add()
	if refresh {
		c.tell(ctx, RefreshAhead, key, nil)
	}
	return e, nil, false, nil
}

// peek returns the entry of key whatever its age, or nil.
func (c *Cache[K, V]) peek(key K) *entry[V] {
	if c.entries == nil {
		return nil
	}
	e, ok := c.entries.GetIfPresent(key)
	if !ok || e.version != c.version(e.slot) || !c.tags.holds(e.tags) {
		return nil
	}
	return e
}

// serveStale counts and tells that e, past its TTL, is served: because of err,
// where a load has failed.
func (c *Cache[K, V]) serveStale(ctx context.Context, key K, e *entry[V], err error) *entry[V] {
	c.counts.stale.Add(1)
	c.tell(ctx, ServedStale, key, err)
	return e
}

// Peek returns the value of key if it is fresh in memory. It loads nothing and is
// not counted.
func (c *Cache[K, V]) Peek(key K) (V, bool) {
	e := c.peek(key)
	if e == nil || e.absent || e.standing(c.now()) != fresh {
		var zero V
		return zero, false
	}
	v, _ := c.give(e)
	return v, true
}

// Fetch returns a Get of key as the unit of work that policies wrap. It writes
// *dst, on the goroutine that calls it, if Get succeeds.
func (c *Cache[K, V]) Fetch(key K, dst *V) func(context.Context) error {
	return func(ctx context.Context) error {
		v, err := c.Get(ctx, key)
		if err == nil {
			*dst = v
		}
		return err
	}
}

// Close cancels the loads in progress, whose callers get [ErrClosed], and returns
// when they and the goroutines of the Cache have ended: a Load that does not heed
// its ctx delays it. What the Store could not be told is tried once more; an
// [*InvalidateError] says what remains. A Cache that is closed serves nothing.
// Close does not close what is behind the Store.
func (c *Cache[K, V]) Close() error {
	if c.closed.Swap(true) {
		c.running.Wait()
		return nil
	}
	c.remembers.Store(false)
	c.epoch.Add(1)
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		for key, f := range s.flights {
			delete(s.flights, key)
			s.others[f] = struct{}{}
		}
		for f := range s.others {
			f.ctx.cancel()
			f.fail(ErrClosed)
		}
		if s.timer != nil {
			s.timer.Stop()
		}
		s.mu.Unlock()
	}
	var err error
	if c.shared != nil {
		err = c.shared.close()
	}
	c.running.Wait()
	if c.entries != nil {
		c.entries.InvalidateAll()
	}
	return err
}
