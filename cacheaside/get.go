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
	// SkipMemory asks the Store, and so sees invalidations by other processes at once, or without one
	// begins a load, and replaces the entry in memory. A load under way is overtaken. Old values come
	// from the Store alone, as Config.StaleWhileRevalidate and StaleIfError allow.
	SkipMemory bool
}

// Get returns the value of key: from memory if it is fresh there, otherwise from the Store,
// otherwise from Load. A caller whose ctx ends first gets an error that wraps
// context.Cause(ctx). The error of a load is returned unchanged, except to those who waited
// for another process. Errors of the Cache are [ErrNotFound], [*TimeoutError] and
// [ErrClosed]. A load that panics or calls [runtime.Goexit] ends with an error that has a
// method Stack() []byte and wraps the value of the panic if that is an error.
func (c *Cache[K, V]) Get(ctx context.Context, key K) (V, error) {
	v, _, err := c.GetWith(ctx, key, GetOptions{})
	return v, err
}

// A Source says where the result of a [Cache.GetWith] comes from.
type Source string

const (
	SourceFresh  Source = "fresh"  // from memory or the Store, within its TTL
	SourceStale  Source = "stale"  // from memory or the Store, past its TTL
	SourceLoaded Source = "loaded" // from a load that the call began, or waited for with others
)

// GetWith is like Get, with options for this call. It also returns the source of the value, or of ErrNotFound. The
// source is "" if there is neither.
func (c *Cache[K, V]) GetWith(ctx context.Context, key K, o GetOptions) (v V, source Source, err error) {
	if ctx.Err() != nil {
		return v, "", ended.Error(ctx)
	}
	cfg, now := c.cfg(), c.now()
	one := [1]request[K, V]{{key: key, skip: o.SkipMemory}}
	r := &one[0]
	if e := c.peek(key); !r.skip && e.standing(now) == fresh {
		if r.early = e.ahead(cfg.RefreshAhead, now); !r.early {
			c.hits.RecordHits(1)
			v, err = cfg.give(e)
			return v, SourceFresh, err
		}
	}
	if !c.enter(ctx, one[:], now, false) {
		return v, "", ErrClosed
	}
	e, err := c.serve(ctx, r)
	if err != nil {
		return v, r.source, err
	}
	v, err = cfg.give(e)
	return v, r.source, err
}

// A request is a Get, or a key of GetMany, that is not simply fresh in memory.
type request[K comparable, V any] struct {
	key     K
	written string
	skip    bool // memory
	early   bool // the value is fresh, and to be refreshed

	entry  *entry[V]     // is served at once,
	past   bool          // past its TTL,
	flight *flight[K, V] // or this is waited for
	left   bool          // until the ctx of the caller ended
	source Source        // of the result; "" if it failed
	by     *load[K, V]   // the LoadMany that has failed, if one has
}

// enter decides how requests get their values, and begins one load of what must be loaded. It reports
// false if the Cache is closed.
func (c *Cache[K, V]) enter(ctx context.Context, rs []request[K, V], now time.Duration, many bool) bool {
	for i := range rs {
		rs[i].written = c.written(rs[i].key)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	var l *load[K, V]
	for i := range rs {
		l = c.join(ctx, &rs[i], l, now)
	}
	if l != nil {
		l.many = many && l.cfg.LoadMany != nil
		c.launch(l, true)
	}
	return true
}

// join makes r a caller of the flight that it waits for, unless it is served at once. A flight that
// begins is one of l, which is made if it is nil. The Cache is locked: a flight may have landed since
// the call looked into memory.
func (c *Cache[K, V]) join(ctx context.Context, r *request[K, V], l *load[K, V], now time.Duration) *load[K, V] {
	var e *entry[V]
	if r.skip {
		delete(c.flights, r.key)
	} else {
		e = c.peek(r.key)
	}
	f, s := c.current(r.key), e.standing(now)
	paused := e != nil && now < e.pause
	served := s >= stale || s == kept && paused
	if served {
		r.entry, r.past = e, s != fresh
	}
	switch {
	case f == nil && (!served || !paused && (s == stale || r.early)):
		if l == nil {
			l = c.newLoad(c.cfg(), ctx, now)
		}
		f = l.add(r.key, r.written, e)
		if f.question != nil {
			f.ask.Refresh = s == fresh // otherwise the Store may have a fresh value
		}
	case !served:
		f.waiters++
	}
	if !served {
		r.flight = f
	}
	return l
}

// serve returns the entry that r is served, or its error.
func (c *Cache[K, V]) serve(ctx context.Context, r *request[K, V]) (*entry[V], error) {
	switch {
	case r.flight != nil:
		return c.wait(ctx, r)
	case r.past:
		return c.serveOld(ctx, r, r.entry, nil), nil
	}
	c.hits.RecordHits(1)
	r.source = SourceFresh
	return r.entry, nil
}

// wait waits for the answer of a flight, or an old value that may be served before.
func (c *Cache[K, V]) wait(ctx context.Context, r *request[K, V]) (*entry[V], error) {
	f := r.flight
	var soft <-chan time.Time
	if f.soft > 0 {
		timer := time.NewTimer(f.soft - c.now())
		defer timer.Stop()
		soft = timer.C
	}
	offered := f.offered
	for late := false; ; {
		select {
		case <-f.done:
			return c.answered(ctx, r)
		case <-offered:
			offered = nil
		case <-soft:
			late = true
		case <-ctx.Done():
			select {
			case <-f.done:
				return c.answered(ctx, r)
			default:
			}
			c.mu.Lock()
			c.leave(f)
			c.mu.Unlock()
			c.misses.Add(1)
			r.left = true
			return nil, ended.Error(ctx)
		}
		if e := c.meanwhile(f, r.skip, late); e != nil {
			return c.serveOld(ctx, r, e, nil), nil // the flight goes on
		}
	}
}

// answered returns what r gets from its flight, which has its answer: if it has failed, the old
// value where that is allowed.
func (c *Cache[K, V]) answered(ctx context.Context, r *request[K, V]) (*entry[V], error) {
	f := r.flight
	var e *entry[V]
	err := f.early
	if err == nil {
		e, err, r.by = f.entry, f.err, f.by
	}
	switch {
	case err == nil && f.past:
		return c.serveOld(ctx, r, e, nil), nil
	case f.old != nil && (f.shared || !r.skip):
		return c.serveOld(ctx, r, f.old, err), nil
	}
	c.misses.Add(1)
	switch {
	case isFailure(err):
	case f.loaded:
		r.source = SourceLoaded
	default:
		r.source = SourceFresh
	}
	return e, err
}

// meanwhile returns the old value that may be served while f goes on, or nil. late says that
// SoftTimeout has passed.
func (c *Cache[K, V]) meanwhile(f *flight[K, V], skip, late bool) *entry[V] {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	e, shared := c.spare(f, now)
	if !f.answered() && (shared && e.standing(now) >= stale || late && (shared || !skip)) {
		return e
	}
	return nil
}

// offer gives the callers of f an old value of the Store: at once if it may be served during a
// refresh, otherwise if the load fails or takes long.
func (c *Cache[K, V]) offer(f *flight[K, V], e *entry[V]) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f.answered() || !e.fallback(c.now()) {
		return
	}
	if !f.shared {
		close(f.offered)
	}
	f.old, f.shared = e, true
}

// serveOld counts and reports that e is served past its TTL. err is the failure of the load, if it
// failed.
func (c *Cache[K, V]) serveOld(ctx context.Context, r *request[K, V], e *entry[V], err error) *entry[V] {
	c.stale.Add(1)
	r.source = SourceStale
	c.tell(ctx, EventServedStale, &r.key, err, 0)
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

// Peek returns the value of key if it is fresh in memory. It counts nothing.
func (c *Cache[K, V]) Peek(key K) (v V, ok bool) {
	if e := c.peek(key); e.standing(c.now()) == fresh && !e.absent {
		v, _ = c.cfg().give(e)
		return v, true
	}
	return v, false
}

// GetMany returns the values of keys, each as Get would, and loads what is missing with one
// LoadMany. A key that does not exist is not in the map. The error joins the failures of others
// that are not. When ctx ends, the map holds what was found by then.
func (c *Cache[K, V]) GetMany(ctx context.Context, keys []K) (map[K]V, error) {
	if ctx.Err() != nil {
		return nil, ended.Error(ctx)
	}
	cfg, now, hits := c.cfg(), c.now(), 0
	values := make(map[K]V, len(keys))
	give := func(key K, e *entry[V]) {
		if v, err := cfg.give(e); err == nil {
			values[key] = v
		}
	}
	var missing []request[K, V]
	for _, key := range keys {
		e := c.peek(key)
		isFresh := e.standing(now) == fresh
		if early := isFresh && e.ahead(cfg.RefreshAhead, now); !isFresh || early {
			missing = append(missing, request[K, V]{key: key, early: early})
			continue
		}
		hits++
		give(key, e)
	}
	c.hits.RecordHits(hits)
	if missing == nil {
		return values, nil
	}
	if !c.enter(ctx, missing, now, true) {
		return values, ErrClosed
	}
	var errs []error
	var failed []failure[K, V]
	for i := range missing {
		r := &missing[i]
		e, err := c.serve(ctx, r)
		switch n := len(failed); {
		case err == nil:
			give(r.key, e)
		case r.left:
			errs = []error{err}
		case !isFailure(err):
		case n > 0 && r.by != nil && failed[n-1].by == r.by:
			failed[n-1].keys = append(failed[n-1].keys, r.key)
		default:
			failed = append(failed, failure[K, V]{r.by, []K{r.key}, err})
		}
	}
	for _, f := range failed {
		what := fmt.Sprint(f.keys[0])
		if f.by != nil {
			what = some(f.keys)
		}
		errs = append(errs, fmt.Errorf("%s%s: %w", prefix(cfg.Name), what, f.err))
	}
	return values, errors.Join(errs...)
}

// A failure is that of a key, or of a LoadMany, which is told once for keys in a row.
type failure[K comparable, V any] struct {
	by   *load[K, V]
	keys []K
	err  error
}
