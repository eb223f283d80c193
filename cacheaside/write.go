package cacheaside

import (
	"cmp"
	"context"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// Write calls the function write and then invalidates key, even if write fails or panics. If ctx is done before that,
// Write returns an error that wraps context.Cause(ctx) and does not call write. The function write must change the
// value of key in the source that Load reads. Write returns the error of write. To protect the source with a breaker,
// call Write in the function that the breaker runs.
//
// With a Store, Write first tries to fence the key. While the fence is in place, every process loads the key from the
// source and does not cache the result. If write takes too long, the ctx passed to write is canceled before the fence
// expires, with a [*TimeoutError] as its cause; see WriteTimeout in package redisstore.
//
// If the invalidation does not reach the Store, the fence keeps outdated values out of the Store until a retry succeeds
// or the fence expires. If the key has no fence, or write took longer than the fence allows, other processes may read
// an outdated value after a failed invalidation. In this case, Write returns an [*InvalidateError] that wraps the error
// of write. To get the error of write, call [WriteError] with the error of Write.
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
	t, began, token, storeKey := c.tier, time.Now(), newToken(), c.cfg().Key(key)
	// Wait for the response of the Store even if ctx is done. Otherwise the fence might be in place without this process
	// knowing it, and would remain until it expires.
	var window time.Duration
	unfenced := t.try(ctx, t.store.Shard(storeKey), true, func(ctx context.Context) (err error) {
		window, err = t.store.Fence(ctx, storeKey, token)
		return err
	})
	// Calls find the fence in the Store from now on. The entry in memory must go before write is called: if write never
	// returned, the entry would remain.
	c.invalidateMemory(keys, false)
	defer func() {
		fenced := unfenced == nil && time.Since(began) < window
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
		ctx, cancel = context.WithDeadlineCause(ctx, began.Add(window),
			&TimeoutError{Name: c.cfg().Name, Operation: "write", After: window})
		defer cancel()
	}
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	return write(ctx)
}

// Invalidate removes the cached values of keys. Later calls get neither the removed values nor the results of loads
// that are in flight. Call Invalidate after the change has been committed.
//
// In this process, Invalidate always takes effect, even if ctx is done. If Invalidate cannot update the Store, it
// returns an [*InvalidateError] that lists the keys, and the Cache retries in the background.
func (c *Cache[K, V]) Invalidate(ctx context.Context, keys ...K) error {
	return c.change(ctx, keys, false)
}

// Expire is like [Cache.Invalidate], but makes the values of keys stale instead of removing them. A stale value may be
// served for as long as Config.StaleWhileRevalidate or Config.StaleIfError allows, counted from the call to Expire or
// from the end of the value's TTL, whichever is earlier.
func (c *Cache[K, V]) Expire(ctx context.Context, keys ...K) error {
	return c.change(ctx, keys, true)
}

// InvalidateAll is like [Cache.Invalidate], for every key.
func (c *Cache[K, V]) InvalidateAll(ctx context.Context) error {
	if c.isClosed() {
		return ErrClosed
	}
	c.mu.Lock()
	c.allAt = c.now() // before the Store, as in invalidateStoreAndMemory
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

// change invalidates keys in memory and in the Store or, if soft is true, expires them.
func (c *Cache[K, V]) change(ctx context.Context, keys []K, soft bool) error {
	if c.isClosed() {
		return ErrClosed
	}
	if c.tier == nil {
		c.invalidateMemory(keys, soft)
		return nil
	}
	propagate := c.tier.store.Invalidate
	if soft {
		propagate = c.tier.store.Expire
	}
	if pending := c.invalidateStoreAndMemory(ctx, keys, "", soft, propagate); pending != nil {
		return pending
	}
	return nil
}

// invalidateStoreAndMemory propagates a change of keys to the Store, and then invalidates them in memory. In the other
// order, a load could read an outdated value from the Store between the two steps, and cache it in memory.
func (c *Cache[K, V]) invalidateStoreAndMemory(ctx context.Context, keys []K, token string, soft bool,
	propagate func(context.Context, ...string) error) (pending *InvalidateError) {
	cfg := c.cfg()
	storeKeys := make([]string, len(keys))
	for i, key := range keys {
		storeKeys[i] = c.storeKey(key)
	}
	c.mu.Lock()
	for _, key := range storeKeys { // before the change reaches the Store, which then accepts new values
		c.recordChange(hash(key))
	}
	c.mu.Unlock()
	failed := c.tier.propagate(ctx, storeKeys, token, propagate)
	c.invalidateMemory(keys, soft)
	if len(failed) == 0 {
		return nil
	}
	pending = &InvalidateError{Name: cfg.Name}
	for i, key := range keys {
		if err := failed[storeKeys[i]]; err != nil {
			pending.Keys, pending.Err = append(pending.Keys, storeKeys[i]), cmp.Or(pending.Err, err)
			c.notify(context.WithoutCancel(ctx), EventNotPropagated, &key, err, 0)
		}
	}
	return pending
}

// invalidateMemory removes the entries of keys from memory or, if soft is true, makes them stale. It detaches the
// flights of keys. Thus the results of loads in flight are not cached.
func (c *Cache[K, V]) invalidateMemory(keys []K, soft bool) {
	hashes := make([]uint32, len(keys)) // before the lock, because Config.Key may call the Cache
	for i, key := range keys {
		hashes[i] = c.hashOf(key, c.storeKey(key))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	cfg, now := c.cfg(), c.now()
	for i, key := range keys {
		c.recordChange(hashes[i])
		e := c.peek(key)
		delete(c.flights, key)
		if c.tier != nil { // SkipMemory may have removed another flight of key from the map
			c.touch(hashes[i])
		}
		if soft && e != nil {
			if e = cfg.expired(e, now); e.freshness(now) != unusable {
				e.mark.version = c.version(hashes[i])
				c.entries.Set(key, e)
				continue
			}
		}
		c.entries.Invalidate(key)
	}
}
