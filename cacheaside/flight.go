package cacheaside

import (
	"context"
	"slices"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

// A flightState is the progress of a flight, which is one load of a key and its callers. The flight starts with the
// first Get of its key, and finishes when its load has ended.
//
//	           this process loads                Load has returned
//	     ┌──────────────────────> flightLoading ──────────────────┐
//	     │                                                        v
//	flightLookup ──────────────────────────────────────────> flightFinished
//	     │            the Store has an answer                     ^
//	     └──────────────────────> flightFenced ───────────────────┘
//	           a write is in progress            Load has returned
//
//	flightLookup, flightLoading, flightFenced
//	     │
//	     │ LoadTimeout has passed, the last caller has canceled, or Close was called
//	     v
//	flightAbandoned ───────────────────────────────────────> flightFinished
//	                    Load has returned, or the Store has an answer
//
// A flight starts in flightLookup if the Cache has a Store, and otherwise in flightLoading. In the diagrams, "Load has
// returned" includes that Load has panicked, and that Middleware has returned without calling Load.
//
// When a flight is abandoned, its callers get an error, which no longer changes. If Load is running, it continues, and
// its ctx is done. But the ctx of a LoadMany is not done while it has other flights that are not abandoned.
//
// If a flight is abandoned in flightLookup, Load is not called for it. If the Store then grants a lease, the lease is
// released. The flight stays in flightAbandoned, unless the Store has an answer.
//
// With FinishLoads, a flight whose last caller cancels is abandoned only if the flight is fenced or not current. A
// refresh in the background counts as a caller that never cancels. A caller that waited for the flight and was then
// served a stale value also counts as a caller that never cancels.
//
// Further callers may join a flight while the flight is current. A flight is current while it is in Cache.flights under
// its key, and its key has not been invalidated since the flight started (see mark). A flight is no longer current
// after an invalidation, after a Get with SkipMemory, or when it has its answer. An invalidation does not change the
// state: the flight still answers its callers, but later callers start another flight.
//
// Memory caches the result if the flight is current when it finishes, and is not fenced. The Store has its own rule: it
// accepts the result of each flight that has a lease, even if the flight is abandoned. It rejects the result if the key
// was invalidated, or the result of another flight was stored, after it granted the lease. With ReplicaLag, only a
// current flight stores its result in the Store.
type flightState int

const (
	flightLookup    flightState = iota // the Store is queried, or another process loads the key
	flightLoading                      // Load runs, or is about to run
	flightFenced                       // Load runs, but its result must not be cached
	flightAbandoned                    // the callers have an error; Load may still run
	flightFinished                     // the load has ended, and the answer no longer changes
)

// A flight is one load of a key, together with the callers that wait for it.
type flight[K comparable, V any] struct {
	key       K
	storeKey  string        // the key as converted for the Store
	mark      mark          // the key's version at the start of the flight
	soft      time.Duration // the end of SoftTimeout; 0 without a SoftTimeout
	done      chan struct{} // closed when the callers have their answer
	available chan struct{} // closed when fallback has a value from the Store

	// Guarded by Cache.mu until done is closed.
	state    flightState
	load     *load[K, V]
	waiters  int // callers that have not canceled, and refreshes in the background
	fallback fallback[V]
	answer   result[K, V] // the result for the callers

	// Used only by the goroutine of the load.
	lookup lookup
	result result[K, V] // the result of the load: it becomes answer, unless the flight was abandoned
}

// A result is the outcome of a flight.
type result[K comparable, V any] struct {
	entry  *entry[V]
	err    error
	source Source      // SourceLoaded even if Load failed; "" if the load of another process failed
	by     *load[K, V] // the load of several keys that failed with err; nil if there is none
}

// A fallback is a stale value that the callers of a flight may get while Load runs, or after Load has failed.
type fallback[V any] struct {
	entry     *entry[V]
	fromStore bool
}

// A lookup is a flight's exchange with the Store.
type lookup struct {
	request    Request
	response   Response // zero if the Store was not queried, or did not respond
	unreadable bool     // the value in response was reported as unreadable
}

// leased reports whether this process has the lease. If so, it must store a value in the Store or release the lease.
func (l *lookup) leased() bool { return l.response.State == Leased }

// answered reports whether the callers of f have their answer. The Cache is locked.
func (f *flight[K, V]) answered() bool { return f.state >= flightAbandoned }

func (f *flight[K, V]) name() string { return f.storeKey }

// startFlight adds a flight for key to l. Its number of waiters is 1, for a caller or for a refresh in the background.
// old is the entry of key in memory, if any. If refresh is true, the Store grants a lease even if its value is fresh.
// The Cache is locked.
func (l *load[K, V]) startFlight(key K, storeKey string, old *entry[V], refresh bool) *flight[K, V] {
	c := l.c
	h := c.hashOf(key, storeKey)
	f := &flight[K, V]{
		key: key, storeKey: storeKey, mark: mark{h, c.version(h)}, done: make(chan struct{}),
		state: flightLoading, load: l, waiters: 1, fallback: fallback[V]{entry: old},
	}
	if soft := l.cfg.SoftTimeout; soft > 0 {
		f.soft = later(l.start, soft)
	}
	if c.tier != nil {
		f.state, f.available = flightLookup, make(chan struct{})
		f.lookup.request = Request{
			Key: storeKey, Version: l.cfg.Version, Refresh: refresh, Pause: max(l.cfg.ErrorPause, 0),
		}
	}
	l.flights = append(l.flights, f)
	if equalsItself(key) {
		c.flights[key] = f
	}
	return f
}

// equalsItself reports whether a map can find key. It cannot find a key that contains a NaN.
func equalsItself[K comparable](key K) bool {
	same := key
	return key == same
}

// current returns the flight of key that a call may join, or nil. The Cache is locked.
func (c *Cache[K, V]) current(key K) *flight[K, V] {
	f := c.flights[key]
	if f != nil && !c.holds(f.mark) {
		delete(c.flights, key)
		return nil
	}
	return f
}

// isCurrent reports whether a call may join f.
func (c *Cache[K, V]) isCurrent(f *flight[K, V]) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.current(f.key) == f
}

// detach makes sure that memory does not cache the result of f, and that no further call joins f. The Cache is locked.
func (c *Cache[K, V]) detach(f *flight[K, V]) {
	if c.current(f.key) == f {
		delete(c.flights, f.key)
	}
}

// usableFallback returns the stale value that the callers of f may get instead of its result, if there is one. A value
// from the Store remains usable if a Get with SkipMemory starts another flight of the key. Otherwise, frequent calls
// with SkipMemory would take the value from each other. The Cache is locked.
func (c *Cache[K, V]) usableFallback(f *flight[K, V], now time.Duration) fallback[V] {
	b := f.fallback
	if valid := c.current(f.key) == f || b.fromStore && c.holds(f.mark); !valid || !b.entry.usable(now) {
		b = fallback[V]{}
	}
	if e := c.peek(f.key); e.usable(now) && (b.entry == nil || e.fresh > b.entry.fresh) {
		b.entry = e // perhaps loaded by the other flight, and newer than the value from the Store
	}
	return b
}

// staleWhileLoading returns a stale value that may be served to a caller that still waits for f. It returns nil if
// there is none. late reports whether SoftTimeout has elapsed.
func (c *Cache[K, V]) staleWhileLoading(f *flight[K, V], skipMemory, late bool) *entry[V] {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	b := c.usableFallback(f, now)
	switch {
	case f.answered() || skipMemory && !b.fromStore:
		return nil
	case late, b.fromStore && b.entry.freshness(now) >= stale:
		return b.entry
	}
	return nil
}

// offerStale makes a value from the Store the fallback of f. The callers get the value immediately if
// StaleWhileRevalidate allows it, and otherwise when the load fails or SoftTimeout has elapsed.
func (c *Cache[K, V]) offerStale(f *flight[K, V], e *entry[V]) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f.answered() || !e.usable(c.now()) {
		return
	}
	if !f.fallback.fromStore {
		close(f.available)
	}
	f.fallback = fallback[V]{e, true}
}

// settle makes r the answer for the callers of f, and sets the state of f. The caller of settle then closes f.done. The
// Cache is locked.
func (c *Cache[K, V]) settle(f *flight[K, V], state flightState, r result[K, V], now time.Duration) {
	if f.load.many && (state == flightAbandoned || r.source == SourceLoaded) {
		r.by = f.load // a GetMany reports the error once, not for each key
	}
	f.state, f.answer = state, r
	if isFailure(r.err) && !behavior.IsAnswered(r.err) {
		f.fallback = c.usableFallback(f, now) // none after Close, which has ended all entries
	} else {
		f.fallback = fallback[V]{}
	}
	c.detach(f)
}

// abandon answers the callers of f with err although the load still runs. If all flights of the load have been
// abandoned, abandon cancels the load. The Cache is locked.
func (c *Cache[K, V]) abandon(f *flight[K, V], err error) {
	c.settle(f, flightAbandoned, result[K, V]{err: err}, c.now())
	close(f.done)
	if !slices.ContainsFunc(f.load.flights, func(f *flight[K, V]) bool { return !f.answered() }) {
		f.load.cancel()
	}
}

// leave removes one waiter from f. If f then has no waiters, f is abandoned. But with FinishLoads, f is abandoned only
// if it is fenced or not current. The Cache is locked.
func (c *Cache[K, V]) leave(f *flight[K, V]) {
	f.waiters--
	finishes := f.load.cfg.FinishLoads && f.state != flightFenced && c.current(f.key) == f
	if f.waiters == 0 && !f.answered() && !finishes {
		c.stats.Canceled++
		c.abandon(f, context.Canceled)
	}
}

// postponeRefresh delays the next refresh of the stale value of f, whose load has failed. The Cache is locked.
func (c *Cache[K, V]) postponeRefresh(f *flight[K, V], now time.Duration) {
	pause := f.load.cfg.ErrorPause
	e := c.peek(f.key)
	// Memory may have evicted the entry, or may hold an older one than the Store. After a caller has got the value from
	// the Store, the next callers must not get the older one.
	if b := f.fallback.entry; e == nil || b != nil && b.fresh > e.fresh {
		e = b
	}
	if pause > 0 && e != nil && c.memoryEnabled && c.current(f.key) == f {
		x := *e
		x.pause, x.mark = now+pause, f.mark
		c.entries.Set(f.key, &x)
	}
}
