package cacheaside

import (
	"context"

	"github.com/go-resilience/resilience/internal/ended"
)

// Update calls write, which is to change what Load reads for key in the store of
// record, and then invalidates key, also when write failed or panicked: it may
// have had its effect. It returns the error of write.
//
// With a Store, the key is fenced before write is called: until Update returns,
// every call reads the store of record, and nothing that it reads is kept. The ctx
// that write gets ends before the fence does (see redisstore's Config.Write),
// with a [*TimeoutError] as its cause. If the Store cannot be reached, write is
// called without a fence.
//
// If the Store cannot be told after the write, the fence keeps the old value out of
// it, and Update returns what write returned: other processes miss until the Store
// has been told, or the fence has fallen. Only if there was no fence either may they
// get the old value. Then an [*InvalidateError] is returned, joined to the error of
// write if there is one. It matches [ErrUntold], and it does not mean that the write
// failed: [WriteError] takes it off. OnEvent is told in each case.
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
	w, writeCtx, cancel := c.shared.fence(ctx, key)
	defer cancel()
	// Calls from here on find the fence in the Store. What is in memory would
	// outlast this process's writer if that never returned.
	c.forget(key)
	defer func() {
		if untold := w.unfence(ctx); untold != nil {
			if err == nil {
				err = untold
			} else {
				err = &untoldError{err, untold}
			}
		}
	}()
	if writeCtx.Err() != nil {
		return ended.Error(writeCtx)
	}
	return write(writeCtx)
}

// Invalidate makes sure that what is cached of keys, and what is being loaded for
// them, is not served to later calls. Call it after the change has been
// committed; Update does it in the right order, and survives a crash in between.
// In memory it always succeeds, whatever ctx; an [*InvalidateError] says which
// keys the Store could not be told about.
func (c *Cache[K, V]) Invalidate(ctx context.Context, keys ...K) error {
	if c.closed.Load() {
		return ErrClosed
	}
	return c.eachKey(ctx, keys, c.forget, func(ctx context.Context, written []string) error {
		return c.cfg.Store.Invalidate(ctx, written...)
	})
}

// Expire ends the time for which keys are fresh. Unlike after Invalidate, their
// values may still be served as Stale and StaleOnError allow, counted from now.
// What is being loaded is not kept. Errors are those of Invalidate.
func (c *Cache[K, V]) Expire(ctx context.Context, keys ...K) error {
	if c.closed.Load() {
		return ErrClosed
	}
	return c.eachKey(ctx, keys, c.age, func(ctx context.Context, written []string) error {
		return c.cfg.Store.Expire(ctx, written...)
	})
}

func (c *Cache[K, V]) eachKey(ctx context.Context, keys []K, here func(K), there func(context.Context, []string) error) error {
	if c.shared != nil {
		return c.shared.announce(ctx, keys, "", there, here)
	}
	for _, key := range keys {
		here(key)
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
	s.change(key)
	if c.entries != nil {
		c.entries.Invalidate(key)
	}
	s.mu.Unlock()
}

// change makes sure that nothing that was begun for key before is kept, and that
// nothing keeps it from being loaded. The shard is locked.
func (s *shard[K, V]) change(key K) {
	s.overtake(key)
	s.touch(key)
	delete(s.pauses, key)
}

// age is forget in its soft form.
func (c *Cache[K, V]) age(key K) {
	s := c.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.change(key)
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

// forgetAll drops every entry.
func (c *Cache[K, V]) forgetAll() {
	c.outdate()
	if c.entries != nil {
		c.entries.InvalidateAll()
	}
}

// outdate makes every entry, and what is being loaded, out of date.
func (c *Cache[K, V]) outdate() {
	c.epoch.Add(1)
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		for key := range s.flights {
			s.overtake(key)
		}
		s.mu.Unlock()
	}
}
