package cacheaside

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// GetOptions change a single Get. The zero value changes nothing.
type GetOptions struct {
	// SkipMemory ignores what is in memory: the call asks the Store or, without one,
	// begins a load of its own. The result replaces the entry in memory. A load under way
	// is overtaken: it answers its callers and is not kept. Without a Store, the call
	// returns only what a load begun after the call has read, and no old value if that
	// fails. With a Store, it sees invalidations by other processes immediately; it may
	// get an old value that the Store holds, as Config.Stale and StaleOnError allow. Each
	// such call costs a load or a round trip, so it does not suit every call.
	SkipMemory bool
	// Stale extends Config.Stale for this call: for so long after its TTL a value from
	// memory is served immediately while it is refreshed in the background. Invalidated
	// values are never served. Less than Config.Stale has no effect.
	Stale time.Duration
}

// Get returns the value of key: from memory if it is fresh there, otherwise from the
// Store, otherwise from Load. Concurrent callers share one load. Each caller waits until
// its own ctx ends, and then gets an error that wraps context.Cause(ctx). The error of a
// load is returned unchanged, except to those who waited for the load of another process. The
// errors of the Cache itself are [ErrNotFound], [*TimeoutError] and [ErrClosed]. A load that
// panics or calls [runtime.Goexit] ends with an error that has the stack of its goroutine, by a
// method Stack() []byte, and wraps the value of the panic if that is an error.
func (c *Cache[K, V]) Get(ctx context.Context, key K) (V, error) {
	return c.GetWith(ctx, key, GetOptions{})
}

// GetWith is Get with options for this call.
func (c *Cache[K, V]) GetWith(ctx context.Context, key K, o GetOptions) (v V, err error) {
	if ctx.Err() != nil {
		return v, ended.Error(ctx)
	}
	cfg, early := c.cfg(), false
	if e, ok := c.entries.GetIfPresent(key); ok && !o.SkipMemory && c.versions.holds(e.mark) {
		if now := c.now(); now < e.fresh {
			if early = e.ahead(cfg.Ahead, now); !early {
				c.hits.add(1)
				return cfg.give(e)
			}
		}
	}
	var written string
	if c.tier != nil {
		written = cfg.Key(key)
	}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return v, ErrClosed
	}
	now := time.Now()
	p := c.plan(key, now.Sub(c.base), o, early)
	if p.move == launch || p.move == refresh {
		l := c.newLoad(ctx, now)
		l.flights = l.only[:0]
		p.begin(l, &l.first, key, written)
		c.begin(l)
	}
	c.mu.Unlock()
	e, err := c.carry(ctx, key, p)
	if err != nil {
		return v, err
	}
	return cfg.give(e)
}

// A plan is what a call does about a key that is not simply fresh in memory.
type plan[K comparable, V any] struct {
	move     move
	options  GetOptions
	entry    *entry[V]     // to be returned, or to be replaced; may be nil
	standing standing      // of entry
	waits    *flight[K, V] // the flight to wait for
	late     time.Duration // if not zero, when SoftTimeout will have passed
}

// plan returns the plan of a call, and makes it a caller of the flight that it waits for. The
// Cache is locked: a flight may have landed since the call looked into memory.
func (c *Cache[K, V]) plan(key K, now time.Duration, o GetOptions, early bool) plan[K, V] {
	p := plan[K, V]{options: o}
	if o.SkipMemory {
		delete(c.flights, key)
		p.move = launch
		return p
	}
	f := c.current(key)
	p.entry = c.peek(key)
	p.move, p.standing = decide(p.entry, now, o.Stale, early, f != nil)
	if p.move == wait {
		f.waiters++
		p.await(f)
	}
	return p
}

// begin adds the flight of a plan to l.
func (p *plan[K, V]) begin(l *load[K, V], f *flight[K, V], key K, written string) {
	l.add(f, key, written, p.entry)
	if p.move == launch {
		p.await(f)
	} else if f.question != nil { // the flight counts itself as a caller, so that it goes on without any
		f.ask.Refresh = p.standing == fresh
	}
}

func (p *plan[K, V]) await(f *flight[K, V]) {
	p.waits = f
	if soft := f.load.cfg.SoftTimeout; soft > 0 {
		p.late = later(f.load.start, soft)
	}
}

// carry carries out a plan. It returns the entry that the call is served, or its error.
func (c *Cache[K, V]) carry(ctx context.Context, key K, p plan[K, V]) (*entry[V], error) {
	switch {
	case p.waits != nil:
		return c.wait(ctx, key, p)
	case p.standing != fresh:
		return c.serveStale(ctx, key, p.entry, nil), nil
	}
	c.hits.add(1)
	if p.move == refresh {
		c.tell(ctx, EventRefreshBegun, key, nil)
	}
	return p.entry, nil
}

// wait waits for the answer of a flight.
func (c *Cache[K, V]) wait(ctx context.Context, key K, p plan[K, V]) (*entry[V], error) {
	f := p.waits
	var soft <-chan time.Time
	if p.late > 0 {
		timer := time.NewTimer(p.late - c.now())
		defer timer.Stop()
		soft = timer.C
	}
	late := false
	for {
		var offered <-chan struct{}
		if c.tier != nil || late { // only a Store has old values that are not in memory
			var old *entry[V]
			if old, offered = c.offered(f, p.options, late); old != nil {
				return c.serveStale(ctx, key, old, nil), nil // the flight goes on
			}
		}
		select {
		case <-f.done:
			return c.answered(ctx, p)
		case <-offered:
		case <-soft:
			late = true
		case <-ctx.Done():
			c.mu.Lock()
			c.leave(f)
			c.mu.Unlock()
			c.misses.Add(1)
			return nil, ended.Error(ctx)
		}
	}
}

// answered returns what a caller gets from the flight that has answered: if it has failed, the
// old value where that is allowed.
func (c *Cache[K, V]) answered(ctx context.Context, p plan[K, V]) (*entry[V], error) {
	f := p.waits
	switch {
	case f.err == nil && f.stale:
		return c.serveStale(ctx, f.key, f.entry, nil), nil
	case f.err != nil && f.backup != nil && (f.shared || !p.options.SkipMemory):
		return c.serveStale(ctx, f.key, f.backup, f.err), nil
	}
	c.misses.Add(1)
	return f.entry, f.err
}

// offered returns the old value that may be served while f goes on; late says that SoftTimeout
// has passed. If there is none, next is closed when f has another old value.
func (c *Cache[K, V]) offered(f *flight[K, V], o GetOptions, late bool) (old *entry[V], next <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	switch {
	case f.answered:
		return nil, nil
	case c.current(f.key) == f && (f.old.standing(now) >= stale || late && f.old.fallback(now)):
		return f.old, nil
	case late && !o.SkipMemory:
		if e := c.peek(f.key); e.fallback(now) {
			return e, nil
		}
	}
	if f.offered == nil {
		f.offered = make(chan struct{})
	}
	return nil, f.offered
}

// serveStale counts and reports that e is served past its TTL. err is the failure of the
// load, if it failed.
func (c *Cache[K, V]) serveStale(ctx context.Context, key K, e *entry[V], err error) *entry[V] {
	c.stale.Add(1)
	c.tell(ctx, EventServedStale, key, err)
	return e
}

// give returns the value of an entry to a caller.
func (cfg *Config[K, V]) give(e *entry[V]) (v V, err error) {
	switch {
	case e.absent:
		return v, ErrNotFound
	case cfg.Clone != nil:
		return cfg.Clone(e.value), nil
	}
	return e.value, nil
}

// Peek returns the value of key if it is fresh in memory. It loads nothing and counts
// nothing.
func (c *Cache[K, V]) Peek(key K) (v V, ok bool) {
	if e := c.peek(key); e.standing(c.now()) == fresh && !e.absent {
		v, _ = c.cfg().give(e)
		return v, true
	}
	return v, false
}

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
		if early := isFresh && e.ahead(cfg.Ahead, now); !isFresh || early {
			missing = append(missing, missed[K]{key: key, early: early})
			continue
		}
		hits++
		found.add(key, e, nil)
	}
	c.hits.add(hits)
	if len(missing) > 0 {
		if err := c.getMissing(ctx, missing, &found); err != nil {
			found.errs = append(found.errs, err)
		}
	}
	return found.values, found.err()
}

// A missed key is not fresh in memory, or is to be refreshed early.
type missed[K comparable] struct {
	key     K
	written string
	early   bool
}

// getMissing finds the values of missed keys, by one load of those that no flight loads. It
// returns an error if ctx ends first, or the Cache is closed.
func (c *Cache[K, V]) getMissing(ctx context.Context, missing []missed[K], found *finding[K, V]) error {
	seen := make(map[K]struct{}, len(missing))
	keys := missing[:0]
	for _, m := range missing {
		if _, twice := seen[m.key]; !twice {
			seen[m.key] = struct{}{}
			if c.tier != nil {
				m.written = found.cfg.Key(m.key)
			}
			keys = append(keys, m)
		}
	}
	plans := make([]plan[K, V], len(keys))
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return ErrClosed
	}
	now := time.Now()
	var l *load[K, V]
	for i, m := range keys {
		p := c.plan(m.key, now.Sub(c.base), GetOptions{}, m.early)
		if p.move == launch || p.move == refresh {
			if l == nil {
				l = c.newLoad(ctx, now)
				l.many = l.cfg.LoadMany != nil
			}
			p.begin(l, new(flight[K, V]), m.key, m.written)
		}
		plans[i] = p
	}
	if l != nil {
		c.begin(l)
	}
	c.mu.Unlock()

	var over error
	for i, p := range plans {
		f, key := p.waits, keys[i].key
		get := c.carry
		switch {
		case f == nil:
		case isClosed(f.done): // even if ctx has ended
			get = func(ctx context.Context, _ K, p plan[K, V]) (*entry[V], error) { return c.answered(ctx, p) }
		case over != nil:
			c.mu.Lock()
			c.leave(f)
			c.mu.Unlock()
			c.misses.Add(1)
			continue
		}
		e, err := get(ctx, key, p)
		switch {
		case err != nil && f != nil && !isClosed(f.done):
			over = err
		case err != nil && f != nil && f.failed != nil:
			found.fail(f.failed, key, err)
		default:
			found.add(key, e, err)
		}
	}
	return over
}

func isClosed(done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	default:
		return false
	}
}

// A finding is the result of GetMany so far.
type finding[K comparable, V any] struct {
	cfg    *Config[K, V]
	values map[K]V
	errs   []error
	failed map[*load[K, V]]*failure[K]
}

// A failure is that of a LoadMany, which is told once.
type failure[K comparable] struct {
	keys []K
	err  error
}

func (found *finding[K, V]) add(key K, e *entry[V], err error) {
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

func (found *finding[K, V]) fail(l *load[K, V], key K, err error) {
	if found.failed == nil {
		found.failed = make(map[*load[K, V]]*failure[K])
	}
	if found.failed[l] == nil {
		found.failed[l] = &failure[K]{err: err}
	}
	found.failed[l].keys = append(found.failed[l].keys, key)
}

// err joins the failures.
func (found *finding[K, V]) err() error {
	for _, f := range found.failed {
		found.errs = append(found.errs, fmt.Errorf("%s%s: %w", prefix(found.cfg.Name), some(f.keys), f.err))
	}
	return errors.Join(found.errs...)
}
