package cacheaside

import (
	"cmp"
	"context"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// Write calls write, which changes in the store of record what Load reads for key, and then
// invalidates key, even if write fails or panics. A breaker belongs around it. Write returns
// the error of write.
//
// With a Store, Write fences the key first, if it can. While the fence fenced, every process
// reads the store of record and keeps nothing. The ctx of write ends before it falls (see
// Config.WriteTimeout of package redisstore), with a [*TimeoutError] as its cause.
//
// If the Store cannot be told after the write, the fence keeps the old value out of it until
// it is told later or the fence falls. Without a fence other processes can read the old
// value: Write then returns an [*InvalidateError], joined to the error of write if there is
// one; [WriteError] removes it.
func (c *Cache[K, V]) Write(ctx context.Context, key K, write func(context.Context) error) (err error) {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	if c.isClosed() {
		return ErrClosed
	}
	keys := []K{key}
	if c.tier == nil {
		defer c.invalidateMemory(keys, false)
		return write(ctx)
	}
	t, begun, token, written := c.tier, time.Now(), newToken(), c.cfg().Key(key)
	// Fence waits for the answer even if ctx ends, because a fence that nobody removes would stand
	// until it falls.
	var window time.Duration
	unfenced := t.tryChange(ctx, t.store.Shard(written), func(ctx context.Context) (err error) {
		window, err = t.store.Fence(ctx, written, token)
		return err
	})
	// Calls from now on find the fence in the Store. The entry in memory would outlive a
	// write that never returns.
	c.invalidateMemory(keys, false)
	defer func() {
		fenced := unfenced == nil && time.Since(begun) < window
		pending := c.invalidateStoreAndMemory(ctx, keys, token, false, func(ctx context.Context, keys ...string) error {
			return t.store.Unfence(ctx, keys[0], token)
		})
		if pending != nil && !fenced {
			pending.inWrite, pending.write = true, err
			err = pending
		}
	}()
	if unfenced != nil {
		c.notify(ctx, EventFenceFailed, &key, unfenced, 0)
	} else {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadlineCause(ctx, begun.Add(window),
			&TimeoutError{Name: c.cfg().Name, Operation: "write", After: window})
		defer cancel()
	}
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	return write(ctx)
}

// Invalidate makes sure that later calls get neither the cached values of keys nor the
// results of loads under way. Call it after the change has been committed. In memory it
// always succeeds, even if ctx has ended; an [*InvalidateError] lists the keys that the Store
// could not be told about.
func (c *Cache[K, V]) Invalidate(ctx context.Context, keys ...K) error {
	return c.change(ctx, keys, false)
}

// Expire is Invalidate that leaves the values of keys to be served as StaleWhileRevalidate and StaleIfError
// allow, counted from now.
func (c *Cache[K, V]) Expire(ctx context.Context, keys ...K) error {
	return c.change(ctx, keys, true)
}

// InvalidateAll is Invalidate for every key.
func (c *Cache[K, V]) InvalidateAll(ctx context.Context) error {
	if c.isClosed() {
		return ErrClosed
	}
	c.mu.Lock()
	c.allAt = c.now() // before the Store is told, as in invalidateStoreAndMemory
	c.mu.Unlock()
	var pending error
	if c.tier != nil {
		pending = c.tier.invalidateAll(ctx)
	}
	c.mu.Lock()
	c.all.Add(1)
	c.mu.Unlock()
	c.entries.InvalidateAll()
	if pending != nil {
		c.notify(context.WithoutCancel(ctx), EventNotPropagated, nil, pending, 0)
		return &InvalidateError{Name: c.cfg().Name, Err: pending}
	}
	return nil
}

func (c *Cache[K, V]) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

// change makes a change to keys, in memory and in the Store. The soft form is Expire.
func (c *Cache[K, V]) change(ctx context.Context, keys []K, soft bool) error {
	if c.isClosed() {
		return ErrClosed
	}
	if c.tier == nil {
		c.invalidateMemory(keys, soft)
		return nil
	}
	tell := c.tier.store.Invalidate
	if soft {
		tell = c.tier.store.Expire
	}
	if pending := c.invalidateStoreAndMemory(ctx, keys, "", soft, tell); pending != nil {
		return pending
	}
	return nil
}

// invalidateStoreAndMemory makes a change to keys, in the Store first and in memory second. In the other
// order, a flight could read the old value from the Store in between and keep it.
func (c *Cache[K, V]) invalidateStoreAndMemory(ctx context.Context, keys []K, token string, soft bool,
	tell func(context.Context, ...string) error) (pending *InvalidateError) {
	cfg := c.cfg()
	written := make([]string, len(keys))
	for i, key := range keys {
		written[i] = c.storeKey(key)
	}
	c.mu.Lock()
	for _, key := range written { // before the Store is told: from then on it takes what is loaded
		c.recordChange(hash(key))
	}
	c.mu.Unlock()
	failed := c.tier.propagate(ctx, written, token, tell)
	c.invalidateMemory(keys, soft)
	if len(failed) == 0 {
		return nil
	}
	pending = &InvalidateError{Name: cfg.Name}
	for i, key := range keys {
		if err := failed[written[i]]; err != nil {
			pending.Keys, pending.Err = append(pending.Keys, written[i]), cmp.Or(pending.Err, err)
			c.notify(context.WithoutCancel(ctx), EventNotPropagated, &key, err, 0)
		}
	}
	return pending
}

// invalidateMemory removes the entries of keys, or ends their freshness, and makes sure that no flight
// restores them.
func (c *Cache[K, V]) invalidateMemory(keys []K, soft bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	cfg, now := c.cfg(), c.now()
	for _, key := range keys {
		if cfg.ReplicaLag > 0 {
			c.recordChange(c.hashOf(key, c.storeKey(key)))
		}
		delete(c.flights, key)
		if e := c.peek(key); soft && e != nil {
			if e = cfg.expired(e, now); e.freshness(now) != unusable {
				c.entries.Set(key, e)
				continue
			}
		}
		c.entries.Invalidate(key)
	}
}
