package cacheaside

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// GetMany returns the values of keys, each as Get would. It loads the missing ones with
// one call of LoadMany if that is set. A key that does not exist is not in the map. The
// error joins the failures of the keys that are missing for another reason; the map then
// holds the others. When ctx ends, the map holds what was found by then.
func (c *Cache[K, V]) GetMany(ctx context.Context, keys []K) (map[K]V, error) {
	if ctx.Err() != nil {
		return nil, ended.Error(ctx)
	}
	cfg := c.cfg()
	found := finding[K, V]{cfg: cfg, values: make(map[K]V, len(keys))}
	var missing []missed[K]
	now, hits := c.now(), int64(0)
	for _, key := range keys {
		e := c.peek(key)
		isFresh := e.standing(now) == fresh
		early := isFresh && cfg.Ahead > 0 && e.ahead(cfg.Ahead, now)
		if !isFresh || early {
			missing = append(missing, missed[K]{key, early})
			continue
		}
		hits++
		found.take(key, e, nil)
	}
	if hits > 0 {
		c.hits.addMany(hits)
	}
	if len(missing) > 0 {
		if err := c.getMissing(ctx, missing, &found); err != nil {
			found.errs = append(found.errs, err)
		}
	}
	return found.values, found.err()
}

// A missed key is not fresh in memory, or is to be refreshed early.
type missed[K comparable] struct {
	key   K
	early bool
}

// getMissing finds the values of missed keys. It returns an error if ctx ends first.
func (c *Cache[K, V]) getMissing(ctx context.Context, keys []missed[K], found *finding[K, V]) error {
	type waiting struct {
		key K
		f   *flight[K, V]
	}
	var waits []waiting
	at, asked := c.asks(), c.tags.last.Load()
	waited := 0
	defer func() {
		for _, w := range waits[waited:] { // ctx has ended, or a function of the application panicked
			c.leave(w.f)
			c.counts.misses.Add(1)
		}
	}()
	func() {
		g := c.gather()
		defer g.launch()
		seen := make(map[K]struct{}, len(keys))
		for _, m := range keys {
			key := m.key
			if _, twice := seen[key]; twice {
				continue
			}
			seen[key] = struct{}{}
			e, f, err := c.join(ctx, key, m.early, GetOptions{}, g)
			if f != nil {
				waits = append(waits, waiting{key, f})
				continue
			}
			found.take(key, e, err)
		}
	}()
	if len(waits) == 0 {
		return nil
	}
	for _, w := range waits {
		waited++
		e, old, err := c.wait(ctx, w.f, at)
		again := !old && c.missedTags(w.f, e, err, asked)
		switch {
		case again:
			e, err = c.resolve(ctx, w.key, false, GetOptions{})
		case !old:
			c.counts.misses.Add(1)
		}
		switch {
		case err != nil && ctx.Err() != nil:
			return err
		case err != nil && !again && w.f.failedBatch() != nil:
			found.fail(w.f.failedBatch(), w.key)
		default:
			found.take(w.key, e, err)
		}
	}
	return nil
}

// failedBatch returns the batch whose failure is the answer of f, or nil. f may be under
// way.
func (f *flight[K, V]) failedBatch() *batch[K, V] {
	select {
	case <-f.done:
		return f.failed
	default:
		return nil
	}
}

// A finding is the result of GetMany so far.
type finding[K comparable, V any] struct {
	cfg    *Config[K, V]
	values map[K]V
	errs   []error
	failed map[*batch[K, V]][]K // keys failed by each LoadMany
}

func (found *finding[K, V]) take(key K, e *entry[V], err error) {
	if err == nil {
		var v V
		if v, err = found.cfg.give(e); err == nil {
			found.values[key] = v
		}
	}
	if isFailure(err) {
		found.errs = append(found.errs, fmt.Errorf("%s%v: %w", prefix(found.cfg.Name), key, err))
	}
}

func (found *finding[K, V]) fail(b *batch[K, V], key K) {
	if found.failed == nil {
		found.failed = make(map[*batch[K, V]][]K)
	}
	found.failed[b] = append(found.failed[b], key)
}

// err joins the failures: the error of a LoadMany once, with its keys.
func (found *finding[K, V]) err() error {
	errs := found.errs
	for b, keys := range found.failed {
		errs = append(errs, fmt.Errorf("%s%s: %w", prefix(found.cfg.Name), some(keys), b.err))
	}
	return errors.Join(errs...)
}

// A gathering is the flights that one GetMany has launched but not started. With a
// Store, they ask it together; with LoadMany, they load together.
type gathering[K comparable, V any] struct {
	c       *Cache[K, V]
	b       *batch[K, V] // nil without LoadMany
	flights []*flight[K, V]
}

func (c *Cache[K, V]) gather() *gathering[K, V] {
	g := &gathering[K, V]{c: c}
	if cfg := c.cfg(); cfg.LoadMany != nil {
		g.b = &batch[K, V]{c: c, cfg: cfg, done: make(chan struct{})}
	}
	return g
}

// fly starts f with the other flights, or immediately if g is nil.
func (g *gathering[K, V]) fly(f *flight[K, V]) {
	if g == nil {
		go f.c.fly(f)
		return
	}
	f.batch = g.b
	g.flights = append(g.flights, f)
}

// launch starts all flights. Until then they keep Close waiting, so that nothing begins
// after Close has returned.
func (g *gathering[K, V]) launch() {
	if len(g.flights) == 0 {
		return
	}
	if g.b != nil {
		g.b.undecided = len(g.flights)
	}
	if g.c.shared != nil {
		g.c.shared.launchMany(g.flights)
		return
	}
	for _, f := range g.flights {
		go g.c.fly(f)
	}
}

// A batch is one call of LoadMany, for the flights that GetMany launched. It begins when
// each flight has decided whether it needs a load, and is canceled when all flights that
// need it have ended. Its methods do nothing on a nil batch.
type batch[K comparable, V any] struct {
	c    *Cache[K, V]
	cfg  *Config[K, V]
	done chan struct{} // closed when the batch has ended

	mu        sync.Mutex
	undecided int
	needed    []*flight[K, V]
	left      int // how many of needed still wait
	started   bool
	loading

	// Written before done is closed.
	values map[K]V
	begun  time.Duration
	took   time.Duration
	err    error
}

// skip is called by a flight that needs no load, or loads by itself.
func (b *batch[K, V]) skip(f *flight[K, V]) {
	if b == nil || f.batch == nil {
		return
	}
	f.batch = nil
	b.mu.Lock()
	defer b.mu.Unlock()
	b.undecided--
	b.startIfDecided()
}

func (b *batch[K, V]) startIfDecided() {
	if b.started || b.undecided > 0 || len(b.needed) == 0 {
		return
	}
	b.started = true
	b.init(b.needed[0].caller, time.Now().Add(b.cfg.LoadTimeout), b)
	if b.left == 0 {
		b.cancel()
	}
	b.c.running.Go(b.run) // the last flight to decide keeps Close waiting until then
}

// run calls LoadMany for the flights that need it.
func (b *batch[K, V]) run() {
	c := b.c
	defer close(b.done)
	defer b.cancel()
	// As for a single load, a panic and Goexit become errors.
	returned := false
	defer func() {
		if !returned {
			b.err = c.panicked(recover())
		}
	}()
	b.begun, b.took, b.err = c.run(b.cfg, &b.loading, b)
	returned = true
}

func (b *batch[K, V]) attempt(ctx context.Context) (err error) {
	if ctx.Err() != nil { // no flight waits any more
		return ctx.Err()
	}
	keys := make([]K, len(b.needed))
	for i, f := range b.needed {
		keys[i] = f.key
	}
	b.values, err = b.cfg.LoadMany(ctx, keys)
	return err
}

func (b *batch[K, V]) queue(waits bool) {
	for _, f := range b.needed {
		f.queue(waits)
	}
}

// load is called by a flight that needs the load, and waits for it.
func (b *batch[K, V]) load(f *flight[K, V]) (*entry[V], error) {
	b.mu.Lock()
	b.undecided--
	b.needed = append(b.needed, f)
	b.left++
	b.startIfDecided()
	b.mu.Unlock()
	select {
	case <-b.done:
	case <-f.done: // f has been answered without the load
		b.mu.Lock()
		b.left--
		if b.left == 0 && b.started {
			b.cancel()
		}
		b.mu.Unlock()
		return nil, f.err
	}
	value, ok := b.values[f.key]
	var err error
	switch {
	case ok: // even if the other keys failed
	case b.err == nil:
		err = ErrNotFound
	default:
		err = b.err
		f.failing = b
	}
	f.took = b.took
	return b.c.loaded(f, value, &b.terms, b.begun, err)
}
