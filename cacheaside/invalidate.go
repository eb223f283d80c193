package cacheaside

import (
	"context"
	"errors"

	"github.com/go-resilience/resilience/internal/ended"
)

// Update calls write, which is to change what Load reads for key in the store of
// record, and then invalidates key, also when write failed or panicked: it may
// have had its effect. It returns the error of write; where the Store could not
// be told, an [*InvalidateError] is joined to it.
//
// With a Store, the key is fenced before write is called: until Update returns,
// all who ask read the store of record and nothing they read is kept. The ctx
// that write gets ends before the fence does (see redisstore's Config.Write),
// with a [*TimeoutError] as its cause. If the Store cannot be reached, write is
// called without a fence.
func (c *Cache[K, V]) Update(ctx context.Context, key K, write func(context.Context) error) (err error) {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	if c.closed.Load() {
		return ErrClosed
	}
	if c.shared == nil {
		defer c.forget(key)
		return write(ctx)
	}
	token := newToken()
	writeCtx, cancel := c.shared.fence(ctx, key, token)
	defer cancel()
	// Those who ask from here on find the fence in the Store; what is in memory
	// would outlast this process if it died before it could tell the others.
	c.forget(key)
	defer func() {
		untold := c.shared.announce(ctx, key, func(ctx context.Context, written string) error {
			return c.cfg.Store.Unfence(ctx, written, token)
		}, c.forget)
		if err == nil {
			err = untold
		} else if untold != nil {
			err = errors.Join(err, untold)
		}
	}()
	if writeCtx.Err() != nil {
		return ended.Error(writeCtx)
	}
	return write(writeCtx)
}

// Invalidate makes sure that what is cached of keys, and what is being loaded for
// them, is not served to anyone who asks later. Call it after the change has been
// committed; Update does it in the right order, and survives a crash in between.
// In memory it always succeeds, whatever ctx; an [*InvalidateError] says which
// keys the Store could not be told about.
func (c *Cache[K, V]) Invalidate(ctx context.Context, keys ...K) error {
	if c.closed.Load() {
		return ErrClosed
	}
	return c.eachKey(ctx, keys, c.forget, func(ctx context.Context, written string) error {
		return c.cfg.Store.Invalidate(ctx, written)
	})
}

// Expire ends the time for which keys are fresh. Unlike after Invalidate, their
// values may still be served as Stale and StaleOnError allow, counted from now.
// What is being loaded is not kept. Errors are those of Invalidate.
func (c *Cache[K, V]) Expire(ctx context.Context, keys ...K) error {
	if c.closed.Load() {
		return ErrClosed
	}
	return c.eachKey(ctx, keys, c.age, func(ctx context.Context, written string) error {
		return c.cfg.Store.Expire(ctx, written)
	})
}

// eachKey tells the Store, then memory: in the other order a flight could read
// the old value from the Store in between, and keep it. Memory is told whatever
// the Store answers.
func (c *Cache[K, V]) eachKey(ctx context.Context, keys []K, here func(K), there func(context.Context, string) error) error {
	var failed *InvalidateError
	for _, key := range keys {
		if c.shared == nil {
			here(key)
			continue
		}
		var one *InvalidateError
		if err := c.shared.announce(ctx, key, there, here); errors.As(err, &one) {
			if failed == nil {
				failed = one
			} else {
				failed.Keys = append(failed.Keys, one.Keys...)
			}
		}
	}
	if failed != nil {
		return failed
	}
	return nil
}

// InvalidateAll is Invalidate for every key.
func (c *Cache[K, V]) InvalidateAll(ctx context.Context) error {
	if c.closed.Load() {
		return ErrClosed
	}
	var err error
	if c.shared != nil {
		err = c.shared.announceAll(ctx)
	}
	c.forgetAll()
	return err
}

// forget drops the entry of key and makes sure that no flight brings it back.
func (c *Cache[K, V]) forget(key K) {
	s := c.shard(key)
	s.mu.Lock()
	s.overtake(key)
	s.touch(key)
	if c.entries != nil {
		c.entries.Invalidate(key)
	}
	s.mu.Unlock()
}

// age is forget in its soft form.
func (c *Cache[K, V]) age(key K) {
	s := c.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.overtake(key)
	s.touch(key)
	e := c.peek(key)
	if e == nil {
		return
	}
	now := c.now()
	if x := c.expired(e, now); x.standing(now) != dead {
		c.entries.Set(key, x)
	} else {
		c.entries.Invalidate(key)
	}
}

// forgetAll drops every entry. The epoch makes them, and what is being loaded,
// out of date at once; the rest is to free the memory.
func (c *Cache[K, V]) forgetAll() {
	c.epoch.Add(1)
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		for key := range s.flights {
			s.overtake(key)
		}
		s.mu.Unlock()
	}
	if c.entries != nil {
		c.entries.InvalidateAll()
	}
}
