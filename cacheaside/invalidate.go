package cacheaside

import (
	"context"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
)

// Invalidate makes sure that later calls do not get the cached values of keys, nor the
// results of loads under way. Call it after the change has been committed. Write calls
// it in the right order, and survives a crash in between. In memory Invalidate always
// succeeds, even if ctx has ended; an [*InvalidateError] lists the keys that the Store
// could not be told about.
func (c *Cache[K, V]) Invalidate(ctx context.Context, keys ...K) error {
	if c.closed.Load() {
		return ErrClosed
	}
	return c.eachKey(ctx, keys, c.forget, func(ctx context.Context, written []string) error {
		return c.cfg().Store.Invalidate(ctx, written...)
	})
}

// Expire ends the freshness of keys. Unlike after Invalidate, their values may still be
// served as Stale and StaleOnError allow, counted from now. Loads under way are not
// kept. Its errors are those of Invalidate.
func (c *Cache[K, V]) Expire(ctx context.Context, keys ...K) error {
	if c.closed.Load() {
		return ErrClosed
	}
	return c.eachKey(ctx, keys, c.age, func(ctx context.Context, written []string) error {
		return c.cfg().Store.Expire(ctx, written...)
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

// forget removes the entry of key and makes sure that no flight restores it.
func (c *Cache[K, V]) forget(key K) {
	s := c.shard(key)
	s.mu.Lock()
	s.change(key)
	if c.entries != nil {
		c.entries.Invalidate(key)
	}
	s.mu.Unlock()
}

// change makes sure that nothing begun for key earlier is kept, and that nothing delays
// its next load. The shard is locked.
func (s *shard[K, V]) change(key K) {
	s.overtake(key)
	delete(s.pauses, key)
}

// age is the soft form of forget.
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
	if x := c.cfg().expired(e, now); x.standing(now) != dead {
		c.entries.Set(key, x)
	} else {
		c.entries.Invalidate(key)
	}
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

// announce tells the Store first and memory second. In the other order, a flight could
// read the old value from the Store in between and keep it. If the Store cannot be told,
// announce arranges for it to be told later; until then this process does not use the
// Store for those keys.
func (s *shared[K, V]) announce(ctx context.Context, keys []K, token string,
	there func(context.Context, []string) error, here func(K)) error {
	// The change has been made. It must be announced even if the caller has left.
	ctx = context.WithoutCancel(ctx)
	changes := make([]*change[K], len(keys))
	for i, key := range keys {
		changes[i] = &change[K]{key: key, written: s.c.cfg().Key(key)}
	}
	tell := func(shard int, changes []*change[K]) {
		err := s.tellShard(ctx, shard, changes, there)
		for _, ch := range changes {
			if ch.err = err; err != nil {
				s.untold.add(ch.written, token)
			}
			here(ch.key)
		}
	}
	var telling sync.WaitGroup
	free := make(chan struct{}, mostCalls)
	for shard, changes := range byShard(s.store, changes, func(ch *change[K]) string { return ch.written }) {
		for some := range slices.Chunk(changes, mostAtOnce) {
			if len(some) == len(keys) { // the usual case
				tell(shard, some)
				continue
			}
			telling.Go(func() {
				free <- struct{}{}
				defer func() { <-free }()
				tell(shard, some)
			})
		}
	}
	telling.Wait()
	return s.notTold(ctx, changes)
}

// A change is a key that the Store must be told about.
type change[K comparable] struct {
	key     K
	written string
	err     error
}

// tellShard tells the Store of changes to keys of one shard, unless the shard is down.
func (s *shared[K, V]) tellShard(ctx context.Context, shard int, changes []*change[K],
	there func(context.Context, []string) error) (err error) {
	asked := s.c.now()
	if err := s.mayAsk(shard); err != nil {
		return err
	}
	written := make([]string, len(changes))
	for i, ch := range changes {
		written[i] = ch.written
	}
	defer func() {
		if v := recover(); v != nil { // memory must be told all the same
			err = fmt.Errorf("the Store panicked: %v\n%s", v, debug.Stack())
		}
		if err != nil {
			s.failed(ctx, shard, asked, err)
		}
	}()
	if err := there(ctx, written); err != nil {
		return err
	}
	for _, key := range written {
		s.recent.note(tell{key: key, at: s.c.now()})
	}
	s.worked(ctx, shard)
	return nil
}

// notTold returns an error that lists the changes that the Store could not be told of,
// or nil.
func (s *shared[K, V]) notTold(ctx context.Context, changes []*change[K]) error {
	var failed *InvalidateError
	for _, ch := range changes {
		if ch.err == nil {
			continue
		}
		if failed == nil {
			failed = &InvalidateError{Name: s.c.cfg().Name, Err: ch.err}
		}
		failed.Keys = append(failed.Keys, ch.written)
		s.c.tell(ctx, EventNotInvalidated, ch.key, ch.err)
	}
	if failed == nil {
		return nil
	}
	s.catchUp()
	return failed
}

func (s *shared[K, V]) announceAll(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx)
	asked := s.c.now()
	err := s.mayAsk(allShards)
	if err == nil {
		if err = s.store.InvalidateAll(ctx); err == nil {
			s.recent.note(tell{all: true, at: s.c.now()})
			s.worked(ctx, allShards)
			return nil
		}
		s.failed(ctx, allShards, asked, err)
	}
	s.untold.addAll()
	s.c.tellAll(ctx, EventNotInvalidated, err)
	s.catchUp()
	return &InvalidateError{Name: s.c.cfg().Name, Err: err}
}
