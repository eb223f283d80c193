package cacheaside

import (
	"context"
	"math"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// GetOptions change a single Get. The zero value changes nothing.
type GetOptions struct {
	// SkipMemory ignores what is in memory: the call asks the Store or, without one,
	// begins a load of its own. The result replaces the entry in memory. A load under way
	// is overtaken: it answers its callers and is not kept. Without a Store, the call
	// returns only what a load begun after the call has read, and no old value if that
	// fails. With a Store, it sees invalidations by other processes immediately; it may
	// get an old value that the Store holds, as Config.Stale and StaleOnError allow. Each
	// such call costs a load or a round trip, so it does not suit every call.
	SkipMemory bool
	// Stale extends Config.Stale for this call: for so long after its TTL a value from
	// memory is served immediately while it is refreshed in the background. Invalidated
	// values are never served. Less than Config.Stale has no effect.
	Stale time.Duration
}

// GetWith is Get with options for this call.
func (c *Cache[K, V]) GetWith(ctx context.Context, key K, o GetOptions) (V, error) {
	var zero V
	if ctx.Err() != nil {
		return zero, ended.Error(ctx)
	}
	e, err := c.resolve(ctx, key, false, o)
	if err != nil {
		return zero, err
	}
	return c.cfg().give(e)
}

// Get returns the value of key: from memory if it is fresh there, otherwise from the
// Store, otherwise from Load. Concurrent callers share one load. Each caller waits until
// its own ctx ends, and then gets an error that wraps context.Cause(ctx). The error of a
// load is returned unchanged. The errors of the Cache itself are [ErrNotFound],
// [*PanicError], [*TimeoutError] and [ErrClosed], and wrap [ErrRecursive] or
// [ErrKeyCollision] if the program has such a bug.
func (c *Cache[K, V]) Get(ctx context.Context, key K) (V, error) {
	if ctx.Err() != nil {
		var zero V
		return zero, ended.Error(ctx)
	}
	cfg, early := c.cfg(), false
	if c.entries != nil {
		e, ok := c.entries.GetIfPresent(key)
		if ok && e.version == c.version(e.bucket) && (e.tags == nil || c.tags.holds(e.tags)) {
			now := c.now()
			if now < e.fresh {
				early = cfg.Ahead > 0 && e.ahead(cfg.Ahead, now)
				if !early {
					c.hits.add()
					return cfg.give(e)
				}
			}
		}
	}
	e, err := c.resolve(ctx, key, early, GetOptions{})
	if err != nil {
		var zero V
		return zero, err
	}
	return c.cfg().give(e)
}

// give returns the value of an entry to a caller.
func (cfg *Config[K, V]) give(e *entry[V]) (V, error) {
	if e.absent {
		var zero V
		return zero, ErrNotFound
	}
	if cfg.Clone != nil {
		return cfg.Clone(e.value), nil
	}
	return e.value, nil
}

// resolve is the slow path of Get.
func (c *Cache[K, V]) resolve(ctx context.Context, key K, early bool, o GetOptions) (*entry[V], error) {
	at, asked := c.asks(), c.tags.last.Load()
	if o.SkipMemory {
		at = noOld
	}
	e, f, err := c.join(ctx, key, early, o, nil)
	if f == nil {
		return e, err
	}
	e, old, err := c.wait(ctx, f, at)
	if !old && c.missedTags(f, e, err, asked) {
		return c.resolve(ctx, key, false, o) // f began before the last invalidation of its tags
	}
	if !old {
		c.counts.misses.Add(1)
	}
	return e, err
}

// noOld is the time of a call that must not get an old value.
const noOld time.Duration = -1

// asks returns the time of a call, if that matters. Without memory, a caller may join a
// flight that read an old value from the Store before the call.
func (c *Cache[K, V]) asks() time.Duration {
	if c.entries != nil {
		return 0
	}
	return c.now()
}

// join returns the entry of key if it can be served without a load, and begins the
// background refresh that is due. Otherwise it joins the flight of the key, or launches
// one, which g starts if g is not nil. The caller waits for the returned flight or
// leaves it.
func (c *Cache[K, V]) join(ctx context.Context, key K, early bool, o GetOptions, g *gathering[K, V]) (e *entry[V], f *flight[K, V], err error) {
	_, same := c.around(ctx, key)
	var written string
	if c.shared != nil {
		written = c.cfg().Key(key)
	}
	s := c.shard(key)
	s.mu.Lock()
	if c.closed.Load() {
		s.mu.Unlock()
		return nil, nil, ErrClosed
	}
	// Look again under the lock: a flight may have landed since.
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
		if same {
			s.mu.Unlock()
			return nil, nil, c.recursive(key, "the load needs its own key")
		}
		launch := f == nil
		if launch {
			f = c.launch(ctx, s, key, written, instant)
			if e != nil {
				f.old.Store(&oldValue[V]{e, math.MaxInt64})
			}
		}
		f.waiters++
		s.mu.Unlock()
		if launch {
			g.fly(f)
		}
		return nil, f, nil
	}
	refresh := f == nil && !e.paused(now) && (how == stale || early)
	if refresh {
		f = c.launch(ctx, s, key, written, instant)
		f.refresh = how == fresh
		f.waiters++ // the flight counts itself, so that it goes on without callers
	}
	s.mu.Unlock()
	if refresh {
		g.fly(f)
	}
	if how != fresh {
		return c.serveStale(ctx, key, e, nil), nil, nil
	}
	c.hits.add()
	if refresh {
		c.tell(ctx, EventRefreshBegun, key, nil)
	}
	return e, nil, nil
}

// peek returns the entry of key regardless of its age, or nil.
func (c *Cache[K, V]) peek(key K) *entry[V] {
	if c.entries == nil {
		return nil
	}
	e, ok := c.entries.GetIfPresent(key)
	if !ok || e.version != c.version(e.bucket) || !c.tags.holds(e.tags) {
		return nil
	}
	return e
}

// serveStale counts and reports that e is served past its TTL. err is the failure of the
// load, if it failed.
func (c *Cache[K, V]) serveStale(ctx context.Context, key K, e *entry[V], err error) *entry[V] {
	c.counts.stale.Add(1)
	c.tell(ctx, EventServedStale, key, err)
	return e
}

// Peek returns the value of key if it is fresh in memory. It loads nothing and counts
// nothing.
func (c *Cache[K, V]) Peek(key K) (V, bool) {
	e := c.peek(key)
	if e == nil || e.absent || e.standing(c.now()) != fresh {
		var zero V
		return zero, false
	}
	v, _ := c.cfg().give(e)
	return v, true
}

// Fetch returns a Get of key as a function for policies to wrap. If the Get succeeds,
// the function stores the value in *dst, on the goroutine that calls it.
func (c *Cache[K, V]) Fetch(key K, dst *V) func(context.Context) error {
	return func(ctx context.Context) error {
		v, err := c.Get(ctx, key)
		if err == nil {
			*dst = v
		}
		return err
	}
}
