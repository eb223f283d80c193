package cacheaside

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/cacheaside/internal/entry"
	"github.com/go-resilience/resilience/cacheaside/internal/flight"
	"github.com/go-resilience/resilience/cacheaside/internal/tier"
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
		e := c.memory.Peek(key)
		isFresh := e.Standing(now) == entry.Fresh
		early := isFresh && cfg.Ahead > 0 && e.Ahead(cfg.Ahead, now)
		if !isFresh || early {
			missing = append(missing, missed[K]{key, early})
			continue
		}
		hits++
		found.add(key, e, nil)
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
	var waits []*flight.Flight[K, V]
	at := c.asks()
	waited := 0
	defer func() {
		for _, f := range waits[waited:] { // a function of the application panicked
			c.leave(f)
			c.counts.misses.Add(1)
		}
	}()
	func() {
		g := c.gather()
		defer g.launch()
		seen := make(map[K]struct{}, len(keys))
		for _, m := range keys {
			if _, twice := seen[m.key]; twice {
				continue
			}
			seen[m.key] = struct{}{}
			p := c.join(ctx, m.key, flight.Call{Early: m.early})
			if p.begun != nil {
				p.begun.batch = g.b
				g.flights = append(g.flights, p.begun)
			}
			if p.waits != nil {
				waits = append(waits, p.waits)
				continue
			}
			e, err := c.serve(ctx, m.key, p)
			found.add(m.key, e, err)
		}
	}()
	var over error
	for _, f := range waits {
		waited++
		find, answered := c.wait, isAnswered(f)
		switch {
		case answered:
			find = c.answer // even if ctx has ended
		case over != nil:
			c.leave(f)
			c.counts.misses.Add(1)
			continue
		}
		e, old, err := find(ctx, f, at)
		if !old {
			c.counts.misses.Add(1)
		}
		switch b, batched := failedBatch(f); {
		case err != nil && !answered && ctx.Err() != nil:
			over = err
		case err != nil && batched:
			found.fail(b, f.Key)
		default:
			found.add(f.Key, e, err)
		}
	}
	return over
}

func isAnswered[K comparable, V any](f *flight.Flight[K, V]) bool {
	select {
	case <-f.Done:
		return true
	default:
		return false
	}
}

// failedBatch returns the batch whose failure is the answer of f. f may be under way.
func failedBatch[K comparable, V any](f *flight.Flight[K, V]) (b *batch[K, V], ok bool) {
	if isAnswered(f) {
		b, ok = f.Answer().With.(*batch[K, V])
	}
	return b, ok
}

// A finding is the result of GetMany so far.
type finding[K comparable, V any] struct {
	cfg    *Config[K, V]
	values map[K]V
	errs   []error
	failed map[*batch[K, V]][]K // keys failed by each LoadMany
}

func (found *finding[K, V]) add(key K, e *entry.Entry[V], err error) {
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
	flights []*task[K, V]
}

func (c *Cache[K, V]) gather() *gathering[K, V] {
	g := &gathering[K, V]{c: c}
	if cfg := c.cfg(); cfg.LoadMany != nil {
		g.b = &batch[K, V]{c: c, cfg: cfg, done: make(chan struct{})}
	}
	return g
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
	if g.c.tier == nil {
		for _, f := range g.flights {
			go g.c.fly(f)
		}
		return
	}
	questions, asks := make([]*tier.Question, len(g.flights)), make(map[*tier.Question]*task[K, V], len(g.flights))
	for i, f := range g.flights {
		questions[i] = g.c.question(f)
		asks[questions[i]] = f
	}
	g.c.tier.AskMany(g.flights[0].ctx, questions, func(some []*tier.Question) {
		for _, q := range some {
			f := asks[q]
			f.asked = q
			go g.c.fly(f)
		}
	})
}

// A batch is one call of LoadMany, for the flights that GetMany launched. It begins when
// each flight has decided, once, whether it needs a load, and is canceled when all flights
// that need it have ended. Its methods do nothing on a nil batch.
type batch[K comparable, V any] struct {
	c    *Cache[K, V]
	cfg  *Config[K, V]
	done chan struct{} // closed when the batch has ended

	mu        sync.Mutex
	undecided int
	needed    []*task[K, V]
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
func (b *batch[K, V]) skip(f *task[K, V]) {
	if f.batch == nil {
		return
	}
	f.batch = nil
	b.mu.Lock()
	defer b.mu.Unlock()
	b.undecided--
	b.startIfDecided()
}

func (b *batch[K, V]) startIfDecided() {
	if b.undecided > 0 || b.left == 0 {
		return
	}
	b.started = true
	b.init(b.needed[0].caller, time.Now().Add(b.cfg.LoadTimeout), b)
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

func (b *batch[K, V]) of(cache any) bool { return b.c == cache }

func (b *batch[K, V]) loads(key K) bool {
	return slices.ContainsFunc(b.needed, func(t *task[K, V]) bool { return t.Key == key })
}

func (b *batch[K, V]) attempt(ctx context.Context) (err error) {
	if ctx.Err() != nil { // no flight waits any more
		return ctx.Err()
	}
	keys := make([]K, len(b.needed))
	for i, f := range b.needed {
		keys[i] = f.Key
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
func (b *batch[K, V]) load(f *task[K, V]) (*entry.Entry[V], error) {
	b.mu.Lock()
	b.undecided--
	b.needed = append(b.needed, f)
	b.left++
	b.startIfDecided()
	b.mu.Unlock()
	select {
	case <-b.done:
	case <-f.Done: // f has been answered without the load
		b.mu.Lock()
		b.left--
		if b.left == 0 && b.started {
			b.cancel()
		}
		b.mu.Unlock()
		return nil, f.Answer().Err
	}
	value, ok := b.values[f.Key]
	var err error
	switch {
	case ok: // even if the other keys failed
	case b.err == nil:
		err = ErrNotFound
	default:
		if err = b.err; isFailure(err) {
			f.result.With = b
		}
	}
	f.took = b.took
	return f.loaded(value, b.terms, b.begun, err)
}
