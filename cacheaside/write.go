package cacheaside

import (
	"context"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// Write calls write, which changes in the store of record what Load reads for key, and
// then invalidates key. It invalidates even if write fails or panics, since the change
// may have been made. It returns the error of write.
//
// With a Store, Write fences the key before it calls write. While the fence stands,
// every process reads the store of record and keeps nothing. The ctx of write ends
// before the fence does (see Config.WriteTimeout of package redisstore), with a
// [*TimeoutError] as its cause. If the Store cannot be reached, write runs without a
// fence.
//
// If the Store cannot be told after the write, the fence still keeps the old value out
// of the Store, and Write returns the error of write: other processes miss until the
// Store has been told or the fence has fallen. Other processes can read the old value
// only if there was no fence either. Write then returns an [*InvalidateError], joined to
// the error of write if there is one. It matches [ErrUntold] and does not mean that the
// write failed; [WriteError] removes it. OnEvent reports each of these cases.
func (c *Cache[K, V]) Write(ctx context.Context, key K, write func(context.Context) error) (err error) {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	if c.isClosed() {
		return ErrClosed
	}
	if c.tier == nil {
		defer c.forget([]K{key})
		return write(ctx)
	}
	begun, token := time.Now(), newToken()
	window, untold := c.tier.fence(ctx, c.cfg().Key(key), token)
	// Calls from now on find the fence in the Store. The entry in memory would outlive a
	// write that never returns.
	c.forget([]K{key})
	defer func() {
		stands := time.Since(begun) < window
		untold := c.announce(ctx, []K{key}, func() { c.forget([]K{key}) }, c.event,
			func(ctx context.Context, keys []string) []error { return c.tier.unfence(ctx, keys[0], token) })
		switch {
		case untold == nil || stands:
		case err == nil:
			untold.written = true
			err = untold
		default:
			err = &untoldError{err, untold}
		}
	}()
	if untold != nil {
		c.tell(ctx, EventFenceFailed, key, untold)
	}
	if window > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadlineCause(ctx, begun.Add(window),
			&TimeoutError{Name: c.cfg().Name, What: "write", After: window})
		defer cancel()
	}
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	return write(ctx)
}

// Invalidate makes sure that later calls do not get the cached values of keys, nor the
// results of loads under way. Call it after the change has been committed. Write calls
// it in the right order, and survives a crash in between. In memory Invalidate always
// succeeds, even if ctx has ended; an [*InvalidateError] lists the keys that the Store
// could not be told about.
func (c *Cache[K, V]) Invalidate(ctx context.Context, keys ...K) error {
	return c.change(ctx, keys, func() { c.forget(keys) }, (*tier).invalidate)
}

// Expire ends the freshness of keys. Unlike after Invalidate, their values may still be
// served as Stale and StaleOnError allow, counted from now. Loads under way are not
// kept. Its errors are those of Invalidate.
func (c *Cache[K, V]) Expire(ctx context.Context, keys ...K) error {
	return c.change(ctx, keys, func() { c.age(keys) }, (*tier).expire)
}

// InvalidateAll is Invalidate for every key.
func (c *Cache[K, V]) InvalidateAll(ctx context.Context) error {
	if c.isClosed() {
		return ErrClosed
	}
	var untold error
	func() {
		defer c.forgetAll()
		if c.tier != nil {
			untold = c.tier.invalidateAll(ctx)
		}
	}()
	if untold != nil {
		if c.observed() {
			c.event(context.WithoutCancel(ctx), Event{Kind: EventNotInvalidated, Name: c.cfg().Name, Err: untold})
		}
		return &InvalidateError{Name: c.cfg().Name, Err: untold}
	}
	return nil
}

func (c *Cache[K, V]) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

// change makes a change to keys, in memory and in the Store.
func (c *Cache[K, V]) change(ctx context.Context, keys []K, here func(),
	there func(*tier, context.Context, []string) []error) error {
	if c.isClosed() {
		return ErrClosed
	}
	if c.tier == nil {
		here()
		return nil
	}
	untold := c.announce(ctx, keys, here, c.event, func(ctx context.Context, keys []string) []error { return there(c.tier, ctx, keys) })
	if untold != nil {
		return untold
	}
	return nil
}

// announce makes a change to keys, in the Store first and in memory second. In the other
// order, a flight could read the old value from the Store in between and keep it.
func (c *Cache[K, V]) announce(ctx context.Context, keys []K, here func(), report func(context.Context, Event),
	there func(context.Context, []string) []error) (failed *InvalidateError) {
	written := make([]string, len(keys))
	for i, key := range keys {
		written[i] = c.cfg().Key(key)
	}
	var errs []error
	func() {
		defer here() // even if the Store panics
		errs = there(ctx, written)
	}()
	for i, err := range errs {
		if err == nil {
			continue
		}
		if failed == nil {
			failed = &InvalidateError{Name: c.cfg().Name, Err: err}
		}
		failed.Keys = append(failed.Keys, written[i])
		if c.observed() {
			report(context.WithoutCancel(ctx), Event{Kind: EventNotInvalidated, Name: c.cfg().Name, Key: keys[i], Err: err})
		}
	}
	return failed
}

// forget removes the entries of keys and makes sure that no flight restores them.
func (c *Cache[K, V]) forget(keys []K) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, key := range keys {
		c.overtake(key)
		c.entries.Invalidate(key)
	}
}

// overtake makes sure that no flight of key is kept. The Cache is locked.
func (c *Cache[K, V]) overtake(key K) {
	delete(c.flights, key)
	if lag := c.cfg().Lag; lag > 0 {
		c.lags.note(lag, c.now(), c.lagKey(key))
	}
}

// age is the soft form of forget.
func (c *Cache[K, V]) age(keys []K) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	for _, key := range keys {
		c.overtake(key)
		e := c.peek(key)
		if e == nil {
			continue
		}
		if x := c.cfg().expired(e, now); x.standing(now) != dead {
			c.entries.Set(key, x)
		} else {
			c.entries.Invalidate(key)
		}
	}
}

// forgetAll removes every entry.
func (c *Cache[K, V]) forgetAll() {
	c.mu.Lock()
	c.lags.noteAll(c.cfg().Lag, c.now())
	c.versions.endAll()
	c.mu.Unlock()
	c.entries.InvalidateAll()
}
