package cacheaside

import (
	"context"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// GetOptions are options of a single Get. The zero value selects the defaults.
type GetOptions struct {
	// If SkipMemory is true, the call ignores the value in memory. With a Store, the call queries the Store, which has
	// received the invalidations of all processes. Without a Store, the call starts a new load. In both cases, the result
	// replaces the value in memory.
	//
	// If another load of the key is already in flight, the result of that load is not cached in memory. The Store may
	// still store that result, and the call may return it. A call with SkipMemory gets a stale value only from the Store,
	// and only if Config.StaleWhileRevalidate or StaleIfError allows the value.
	SkipMemory bool
}

// A Source is the origin of the result of [Cache.GetWith].
type Source string

const (
	SourceFresh  Source = "fresh"  // the result is from memory or the Store, within its TTL
	SourceStale  Source = "stale"  // the result is from memory or the Store, after its TTL
	SourceLoaded Source = "loaded" // the result is from a load that the call started or joined
)

// Get returns the value of key. Get looks for a fresh value in memory, and then in the Store. If neither has a fresh
// value, Get returns the result of Load.
//
// If ctx is done before the value is available, the error wraps context.Cause(ctx). An error of Load is returned
// unchanged or wrapped, with two exceptions. Callers that waited for a load of another process get an error that only
// reports that the load failed. While ErrNotFound is cached, callers get ErrNotFound itself. The Cache's own errors to
// test for are [ErrNotFound], [*TimeoutError] and [ErrClosed]. If Load panics or calls [runtime.Goexit], the returned
// error has a method Stack() []byte. If the panic value is an error, the returned error wraps it.
func (c *Cache[K, V]) Get(ctx context.Context, key K) (V, error) {
	v, _, err := c.GetWith(ctx, key, GetOptions{})
	return v, err
}

// GetWith is like [Cache.Get], with options for this call. GetWith also returns the source of the value or of
// ErrNotFound. With any other error, the source is "".
func (c *Cache[K, V]) GetWith(ctx context.Context, key K, o GetOptions) (v V, source Source, err error) {
	if ctx.Err() != nil {
		return v, "", ended.Error(ctx)
	}
	cfg, now := c.cfg(), c.now()
	one := [1]request[K, V]{{key: key, skipMemory: o.SkipMemory}}
	r := &one[0]

	// A fresh value in memory needs no lock.
	if e := c.peek(key); !r.skipMemory && e.freshness(now) == fresh {
		if r.refreshEarly = e.refreshEarly(cfg.RefreshAhead, now); !r.refreshEarly {
			c.hits.RecordHits(1)
			v, err = cfg.userValue(e)
			return v, SourceFresh, err
		}
	}

	// Otherwise the call joins the flight of key, or starts it, unless memory has a stale value to serve.
	if !c.enter(ctx, one[:], now, false) {
		return v, "", ErrClosed
	}
	e, err := c.serve(ctx, r)
	if err == nil {
		v, err = cfg.userValue(e)
	}
	return v, r.source, err
}

// A request is a Get, or one key of a GetMany, that memory by itself does not answer.
type request[K comparable, V any] struct {
	key          K
	storeKey     string
	skipMemory   bool
	refreshEarly bool // memory has a fresh value, and RefreshAhead starts a refresh

	entry  *entry[V]     // the entry to serve immediately; nil if the request waits for flight
	flight *flight[K, V] // nil if the request does not wait
	left   bool          // ctx was done before the flight had an answer
	source Source        // the source of the result; "" if the request failed
}

// enter finds for each request an entry in memory that may be served, or adds the request to the flight of its key. All
// flights that enter starts share one load. enter returns false if the Cache is closed.
func (c *Cache[K, V]) enter(ctx context.Context, rs []request[K, V], now time.Duration, many bool) bool {
	for i := range rs {
		rs[i].storeKey = c.storeKey(rs[i].key)
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
		c.launch(l)
	}
	return true
}

// join decides how r gets its value: from memory, from a flight in progress, or from a new flight. It adds a new flight
// to l, or to a new load if l is nil, and returns that load. It reads memory again, because a flight may have finished
// since memory was read without the lock. The Cache is locked.
func (c *Cache[K, V]) join(ctx context.Context, r *request[K, V], l *load[K, V], now time.Duration) *load[K, V] {
	var e *entry[V]
	if r.skipMemory {
		delete(c.flights, r.key)
	} else {
		e = c.peek(r.key)
	}
	s, paused := e.freshness(now), e != nil && now < e.pause
	switch {
	case s == fresh:
		r.entry, r.source = e, SourceFresh
	case s == stale, s == usableOnError && paused:
		r.entry, r.source = e, SourceStale
	}
	waits, refresh := r.entry == nil, !paused && (s == stale || r.refreshEarly)
	f := c.current(r.key)
	switch {
	case f != nil && waits:
		f.waiters++
	case f == nil && (waits || refresh):
		if l == nil {
			l = c.newLoad(c.cfg(), ctx, now)
		}
		f = l.startFlight(r.key, r.storeKey, e, s == fresh) // the Store may have a fresh value if the entry is stale
	}
	if waits {
		r.flight = f
	}
	return l
}

// serve returns the entry that answers r, or the error of r.
func (c *Cache[K, V]) serve(ctx context.Context, r *request[K, V]) (*entry[V], error) {
	switch {
	case r.flight != nil:
		return c.wait(ctx, r)
	case r.source == SourceStale:
		return c.serveStale(ctx, r, r.entry, nil), nil
	}
	c.hits.RecordHits(1)
	return r.entry, nil
}

// wait waits for the answer of the flight of r. It returns a stale value if one may be served before that.
func (c *Cache[K, V]) wait(ctx context.Context, r *request[K, V]) (*entry[V], error) {
	f := r.flight
	var soft <-chan time.Time
	if f.soft > 0 {
		timer := time.NewTimer(f.soft - c.now())
		defer timer.Stop()
		soft = timer.C
	}
	available := f.available
	for late := false; ; {
		select {
		case <-f.done:
			return c.receive(ctx, r)
		case <-available:
			available = nil
		case <-soft:
			late = true
		case <-ctx.Done():
			select {
			case <-f.done:
				return c.receive(ctx, r)
			default:
			}
			c.mu.Lock()
			c.leave(f)
			c.mu.Unlock()
			c.misses.Add(1)
			r.left = true
			return nil, ended.Error(ctx)
		}
		if e := c.staleWhileLoading(f, r.skipMemory, late); e != nil {
			return c.serveStale(ctx, r, e, nil), nil // the load continues
		}
	}
}

// receive returns the answer of the flight of r. If the load failed, receive returns a stale value if one may be
// served.
func (c *Cache[K, V]) receive(ctx context.Context, r *request[K, V]) (*entry[V], error) {
	f := r.flight
	a, b := f.answer, f.fallback
	switch {
	case a.source == SourceStale:
		return c.serveStale(ctx, r, a.entry, nil), nil
	case b.entry != nil && (b.fromStore || !r.skipMemory):
		return c.serveStale(ctx, r, b.entry, a.err), nil
	}
	c.misses.Add(1)
	if !isFailure(a.err) {
		r.source = a.source
	}
	return a.entry, a.err
}

// serveStale returns e, and counts and reports that e is served after its TTL. err is the error of the load, if the
// load failed.
func (c *Cache[K, V]) serveStale(ctx context.Context, r *request[K, V], e *entry[V], err error) *entry[V] {
	c.stale.Add(1)
	r.source = SourceStale
	c.notify(ctx, EventServedStale, &r.key, err, 0)
	return e
}

// userValue returns the value of e, cloned if the Config has a Clone. If e caches ErrNotFound, userValue returns that
// error.
func (cfg *Config[K, V]) userValue(e *entry[V]) (v V, err error) {
	switch {
	case e.absent:
		return v, ErrNotFound
	case cfg.Clone != nil:
		return cfg.Clone(e.value), nil
	}
	return e.value, nil
}

// peek returns the entry of key in memory, which may be too old to be served. It returns nil if there is none, or if it
// was invalidated.
func (c *Cache[K, V]) peek(key K) *entry[V] {
	if e, ok := c.entries.GetIfPresent(key); ok && c.holds(e.mark) {
		return e
	}
	return nil
}

// Peek returns the value of key if memory has a fresh value. Calls to Peek are not counted in [Stats].
func (c *Cache[K, V]) Peek(key K) (v V, ok bool) {
	if e := c.peek(key); e.freshness(c.now()) == fresh && !e.absent {
		v, _ = c.cfg().userValue(e)
		return v, true
	}
	return v, false
}
