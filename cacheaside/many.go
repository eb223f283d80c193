package cacheaside

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// GetMany returns the values of keys, each as Get would; what has to be loaded is
// loaded by one call of LoadMany, if there is one. A key that does not exist is
// not in the map. An error says, joined, what went wrong with the keys that are
// missing for another reason; the map then holds the others. When ctx ends, the
// map holds what had been found by then.
func (c *Cache[K, V]) GetMany(ctx context.Context, keys []K) (map[K]V, error) {
	if ctx.Err() != nil {
		return nil, ended.Error(ctx)
	}
	values := make(map[K]V, len(keys))
	type waiting struct {
		key K
		f   *flight[K, V]
	}
	var (
		missed []waiting
		errs   []error
		seen   = make(map[K]struct{}, len(keys))
		b      *batch[K, V]
	)
	if c.cfg.LoadMany != nil {
		b = &batch[K, V]{c: c, done: make(chan struct{})}
	}
	take := func(key K, e *entry[V], err error) {
		if err == nil {
			var v V
			if v, err = c.give(e); err == nil {
				values[key] = v
			}
		}
		if isFailure(err) {
			errs = append(errs, fmt.Errorf("%s%v: %w", prefix(c.cfg.Name), key, err))
		}
	}
	for _, key := range keys {
		if _, twice := seen[key]; twice {
			continue
		}
		seen[key] = struct{}{}
		e, f, err := c.join(ctx, key, false, b)
		if f != nil {
			missed = append(missed, waiting{key, f})
			continue
		}
		take(key, e, err)
	}
	b.close()
	for i, w := range missed {
		e, err := c.wait(ctx, w.f)
		if ctx.Err() != nil && err != nil {
			for _, w := range missed[i+1:] {
				c.leave(w.f)
			}
			return values, errors.Join(append(errs, err)...)
		}
		take(w.key, e, err)
	}
	return values, errors.Join(errs...)
}

// A batch is one call of LoadMany, for the flights that GetMany launched. It
// begins when each of them has said whether it needs a load, and is canceled when
// all that need it have ended. Its methods do nothing on a nil batch.
type batch[K comparable, V any] struct {
	c    *Cache[K, V]
	done chan struct{} // closed when it has ended

	mu        sync.Mutex
	closed    bool // no more flights join
	undecided int
	needed    []*flight[K, V]
	left      int // of needed, those that wait
	started   bool
	ctx       loadCtx

	// Written before done is closed.
	values map[K]V
	begun  time.Duration
	err    error
}

// add makes f part of b. Its shard is locked.
func (b *batch[K, V]) add(f *flight[K, V]) {
	if b == nil {
		return
	}
	b.mu.Lock()
	b.undecided++
	b.mu.Unlock()
	f.batch = b
}

// close is called when all flights have been added.
func (b *batch[K, V]) close() {
	if b == nil {
		return
	}
	b.mu.Lock()
	b.closed = true
	b.startIfDecided()
	b.mu.Unlock()
}

// skip is for a flight that needs no load, or will load by itself.
func (b *batch[K, V]) skip(f *flight[K, V]) {
	if b == nil || f.batch == nil {
		return
	}
	f.batch = nil
	b.mu.Lock()
	b.undecided--
	b.startIfDecided()
	b.mu.Unlock()
}

func (b *batch[K, V]) startIfDecided() {
	if b.started || !b.closed || b.undecided > 0 || len(b.needed) == 0 {
		return
	}
	b.started = true
	b.ctx.init(b.needed[0].ctx.values, time.Now().Add(b.c.cfg.LoadTimeout))
	if b.left == 0 {
		b.ctx.cancel()
	}
	// Not later than the flights that wait for it: Close waits for those.
	b.c.running.Add(1)
	go b.run()
}

// run calls LoadMany for the flights that need it.
func (b *batch[K, V]) run() {
	c := b.c
	defer c.running.Done()
	defer close(b.done)
	defer b.ctx.cancel()
	// As for a single load: what it panics with, and Goexit, becomes an error.
	returned := false
	defer func() {
		if !returned {
			b.err = c.panicked(recover())
		}
	}()
	b.begun, b.err = c.run(&b.ctx, b)
	returned = true
}

func (b *batch[K, V]) attempt(ctx context.Context) (err error) {
	keys := make([]K, len(b.needed))
	for i, f := range b.needed {
		keys[i] = f.key
	}
	b.values, err = b.c.cfg.LoadMany(ctx, keys)
	return err
}

// load is for a flight that needs the load, and waits for it.
func (b *batch[K, V]) load(f *flight[K, V]) (*entry[V], error) {
	b.mu.Lock()
	b.undecided--
	b.needed = append(b.needed, f)
	b.left++
	b.startIfDecided()
	b.mu.Unlock()
	select {
	case <-b.done:
	case <-f.done: // it has been answered without the load
		b.mu.Lock()
		b.left--
		if b.left == 0 && b.started {
			b.ctx.cancel()
		}
		b.mu.Unlock()
		return nil, f.err
	}
	value, ok := b.values[f.key]
	err := b.err
	if err == nil && !ok {
		err = ErrNotFound
	}
	return b.c.loaded(f, value, &b.ctx.terms, b.begun, err)
}
