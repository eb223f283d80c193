package cacheaside

import (
	"context"

	"github.com/go-resilience/resilience/cacheaside/internal/tier"
)

// Invalidate makes sure that later calls do not get the cached values of keys, nor the
// results of loads under way. Call it after the change has been committed. Write calls
// it in the right order, and survives a crash in between. In memory Invalidate always
// succeeds, even if ctx has ended; an [*InvalidateError] lists the keys that the Store
// could not be told about.
func (c *Cache[K, V]) Invalidate(ctx context.Context, keys ...K) error {
	return c.change(ctx, keys, c.forget, (*tier.Tier).Invalidate)
}

// Expire ends the freshness of keys. Unlike after Invalidate, their values may still be
// served as Stale and StaleOnError allow, counted from now. Loads under way are not
// kept. Its errors are those of Invalidate.
func (c *Cache[K, V]) Expire(ctx context.Context, keys ...K) error {
	return c.change(ctx, keys, c.age, (*tier.Tier).Expire)
}

// change makes a change to keys, in memory and in the Store.
func (c *Cache[K, V]) change(ctx context.Context, keys []K, here func(K),
	there func(*tier.Tier, context.Context, []string, func(int)) []error) error {
	if c.closed.Load() {
		return ErrClosed
	}
	if c.tier == nil {
		for _, key := range keys {
			here(key)
		}
		return nil
	}
	if untold := c.announce(ctx, keys, here, there); untold != nil {
		return untold
	}
	return nil
}

// InvalidateAll is Invalidate for every key.
func (c *Cache[K, V]) InvalidateAll(ctx context.Context) error {
	if c.closed.Load() {
		return ErrClosed
	}
	if c.tier == nil {
		c.forgetAll()
		return nil
	}
	if untold := c.tier.InvalidateAll(ctx, c.forgetAll); untold != nil {
		c.tellAll(context.WithoutCancel(ctx), EventNotInvalidated, untold)
		return &InvalidateError{Name: c.cfg().Name, Err: untold}
	}
	return nil
}

// forget removes the entry of key and makes sure that no flight restores it.
func (c *Cache[K, V]) forget(key K) {
	s := c.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Forget(key)
}

// age is the soft form of forget.
func (c *Cache[K, V]) age(key K) {
	s := c.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Expire(key, c.cfg().times(), c.now())
}

// forgetAll removes every entry.
func (c *Cache[K, V]) forgetAll() {
	c.outdate()
	if c.entries != nil {
		c.entries.InvalidateAll()
	}
}

// outdate makes every entry and every load under way out of date.
func (c *Cache[K, V]) outdate() {
	c.memory.EndAll()
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		s.OvertakeAll()
		s.mu.Unlock()
	}
}

// announce makes a change to keys, in the Store first and in memory second. In the other
// order, a flight could read the old value from the Store in between and keep it.
func (c *Cache[K, V]) announce(ctx context.Context, keys []K, here func(K),
	there func(*tier.Tier, context.Context, []string, func(int)) []error) (failed *InvalidateError) {
	written := make([]string, len(keys))
	for i, key := range keys {
		written[i] = c.cfg().Key(key)
	}
	errs := there(c.tier, ctx, written, func(i int) { here(keys[i]) })
	for i, err := range errs {
		if err == nil {
			continue
		}
		if failed == nil {
			failed = &InvalidateError{Name: c.cfg().Name, Err: err}
		}
		failed.Keys = append(failed.Keys, written[i])
		c.tell(context.WithoutCancel(ctx), EventNotInvalidated, keys[i], err)
	}
	return failed
}
