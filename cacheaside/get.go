package cacheaside

import (
	"context"
	"errors"
	"time"

	"github.com/go-resilience/resilience/cacheaside/internal/entry"
	"github.com/go-resilience/resilience/cacheaside/internal/flight"
	"github.com/go-resilience/resilience/internal/behavior"
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

// GetWith is Get with options for this call.
func (c *Cache[K, V]) GetWith(ctx context.Context, key K, o GetOptions) (V, error) {
	var zero V
	if ctx.Err() != nil {
		return zero, ended.Error(ctx)
	}
	e, err := c.resolve(ctx, key, flight.Call{SkipMemory: o.SkipMemory, Stale: o.Stale})
	if err != nil {
		return zero, err
	}
	return c.cfg().give(e)
}

// Get returns the value of key: from memory if it is fresh there, otherwise from the
// Store, otherwise from Load. Concurrent callers share one load. Each caller waits until
// its own ctx ends, and then gets an error that wraps context.Cause(ctx). The error of a
// load is returned unchanged. The errors of the Cache itself are [ErrNotFound],
// [*TimeoutError] and [ErrClosed], and wrap [ErrRecursive] or [ErrKeyCollision] if the program
// has such a bug. A load that panics or calls [runtime.Goexit] ends with an error that has the
// stack of its goroutine, by a method Stack() []byte, and wraps the value of the panic if that
// is an error.
func (c *Cache[K, V]) Get(ctx context.Context, key K) (V, error) {
	if ctx.Err() != nil {
		var zero V
		return zero, ended.Error(ctx)
	}
	cfg, early := c.cfg(), false
	if c.entries != nil {
		e, ok := c.entries.GetIfPresent(key)
		if ok && c.memory.Holds(e.Mark) {
			now := c.now()
			if now < e.Fresh {
				early = cfg.Ahead > 0 && e.Ahead(cfg.Ahead, now)
				if !early {
					c.hits.add()
					return cfg.give(e)
				}
			}
		}
	}
	e, err := c.resolve(ctx, key, flight.Call{Early: early})
	if err != nil {
		var zero V
		return zero, err
	}
	return c.cfg().give(e)
}

// give returns the value of an entry to a caller.
func (cfg *Config[K, V]) give(e *entry.Entry[V]) (V, error) {
	if e.Absent {
		var zero V
		return zero, ErrNotFound
	}
	if cfg.Clone != nil {
		return cfg.Clone(e.Value), nil
	}
	return e.Value, nil
}

// resolve is the slow path of Get.
func (c *Cache[K, V]) resolve(ctx context.Context, key K, call flight.Call) (*entry.Entry[V], error) {
	at := c.asks()
	if call.SkipMemory {
		at = flight.NoOld
	}
	p := c.join(ctx, key, call)
	if p.begun != nil {
		go c.fly(p.begun)
	}
	if p.waits == nil {
		return c.serve(ctx, key, p)
	}
	e, old, err := c.wait(ctx, p.waits, at)
	if !old {
		c.counts.misses.Add(1)
	}
	return e, err
}

// asks returns the time of a call, if that matters. Without memory, a caller may join a
// flight that read an old value from the Store before the call.
func (c *Cache[K, V]) asks() time.Duration {
	if c.entries != nil {
		return 0
	}
	return c.now()
}

// A plan is what a call does about a key that is not simply fresh in memory.
type plan[K comparable, V any] struct {
	err   error                // why it fails; otherwise
	waits *flight.Flight[K, V] // the flight that it waits for, or leaves; otherwise
	entry *entry.Entry[V]      // what it returns
	how   entry.Standing       // of entry
	begun *task[K, V]          // a flight that is to be started now; may be nil
}

// join returns the plan of a call for key. A plan with a flight makes the call one of its
// callers.
func (c *Cache[K, V]) join(ctx context.Context, key K, call flight.Call) (p plan[K, V]) {
	_, same := c.around(ctx, key)
	var written string
	if c.tier != nil {
		written = c.cfg().Key(key)
	}
	s := c.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.closed.Load() {
		p.err = ErrClosed
		return p
	}
	// Look again under the lock: a flight may have landed since.
	instant := time.Now()
	next := s.Plan(key, instant.Sub(c.base), call)
	p.entry, p.how = next.Entry, next.Standing
	switch next.Move {
	case flight.Serve:
	case flight.Refresh: // the flight counts itself, so that it goes on without callers
		p.begun = c.launch(ctx, s, key, written, instant, nil)
		p.begun.refresh = p.how == entry.Fresh
	default:
		switch {
		case same:
			p.err = c.recursive(key, "the load needs its own key")
		case next.Move == flight.Wait:
			p.waits = next.Flight
			s.Join(p.waits)
		default:
			p.begun = c.launch(ctx, s, key, written, instant, p.entry)
			p.waits = &p.begun.Flight
		}
	}
	return p
}

// serve returns, counts and reports what a plan without a wait has for its call.
func (c *Cache[K, V]) serve(ctx context.Context, key K, p plan[K, V]) (*entry.Entry[V], error) {
	switch {
	case p.err != nil:
		return nil, p.err
	case p.how != entry.Fresh:
		return c.serveStale(ctx, key, p.entry, nil), nil
	}
	c.hits.add()
	if p.begun != nil {
		c.tell(ctx, EventRefreshBegun, key, nil)
	}
	return p.entry, nil
}

// wait waits for the answer of f. at is the time of the call.
func (c *Cache[K, V]) wait(ctx context.Context, f *flight.Flight[K, V], at time.Duration) (e *entry.Entry[V], old bool, err error) {
	s := c.shard(f.Key)
	var jam <-chan struct{}
	if own, _ := c.around(ctx, f.Key); own {
		s.mu.Lock()
		jam = f.Jammed()
		s.mu.Unlock()
	}
	var soft <-chan time.Time
	if f.Terms.Soft > 0 {
		timer := time.NewTimer(f.Began + f.Terms.Soft - c.now())
		defer timer.Stop()
		soft = timer.C
	}
	late := false
	for {
		old, offered := c.offered(f, at, late)
		if old != nil {
			return c.serveStale(ctx, f.Key, old, nil), true, nil // f goes on
		}
		select {
		case <-f.Done:
			return c.answer(ctx, f, at)
		case <-offered:
		case <-soft:
			late = true
		case <-jam:
			c.leave(f)
			return nil, false, c.recursive(f.Key, "no other of Loads is free")
		case <-ctx.Done():
			c.leave(f)
			return nil, false, ended.Error(ctx)
		}
	}
}

// offered returns the old value that may be served now to a call made at a given time,
// which may be late: SoftTimeout has passed. If there is none, next is closed when f has
// another old value.
func (c *Cache[K, V]) offered(f *flight.Flight[K, V], at time.Duration, late bool) (old *entry.Entry[V], next <-chan struct{}) {
	if c.tier == nil && !late { // only a Store has old values that are not in memory
		return nil, nil
	}
	s := c.shard(f.Key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if old = s.Offers(f, at, c.now()); old == nil && late {
		old = s.Standby(f, at, c.now())
	}
	return old, f.Offered()
}

// answer returns what a caller gets when f has been answered: if it has failed, the old
// value where that is allowed. An answer, such as "forbidden", goes to the caller.
func (c *Cache[K, V]) answer(ctx context.Context, f *flight.Flight[K, V], at time.Duration) (e *entry.Entry[V], old bool, err error) {
	a := f.Answer()
	switch {
	case a.Stale:
		return c.serveStale(ctx, f.Key, a.Entry, nil), true, nil
	case a.Err == nil:
		return a.Entry, false, nil
	case isFailure(a.Err) && !behavior.IsAnswered(a.Err) && !errors.Is(a.Err, ErrClosed):
		if old := c.standby(f, at); old != nil {
			return c.serveStale(ctx, f.Key, old, a.Err), true, nil
		}
	}
	return nil, false, a.Err
}

// standby returns the old value that may be served to a call made at a given time if f
// fails or takes long. It returns nil if there is none.
func (c *Cache[K, V]) standby(f *flight.Flight[K, V], at time.Duration) *entry.Entry[V] {
	s := c.shard(f.Key)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.Standby(f, at, c.now())
}

// leave is called by a caller that stops waiting. The last one ends the load.
func (c *Cache[K, V]) leave(f *flight.Flight[K, V]) {
	s := c.shard(f.Key)
	s.mu.Lock()
	defer s.mu.Unlock()
	last, canceled := s.Leave(f)
	if canceled {
		c.counts.canceled.Add(1)
	}
	if last {
		f.End()
	}
}

// serveStale counts and reports that e is served past its TTL. err is the failure of the
// load, if it failed.
func (c *Cache[K, V]) serveStale(ctx context.Context, key K, e *entry.Entry[V], err error) *entry.Entry[V] {
	c.counts.stale.Add(1)
	c.tell(ctx, EventServedStale, key, err)
	return e
}

// Peek returns the value of key if it is fresh in memory. It loads nothing and counts
// nothing.
func (c *Cache[K, V]) Peek(key K) (V, bool) {
	e := c.memory.Peek(key)
	if e == nil || e.Absent || e.Standing(c.now()) != entry.Fresh {
		var zero V
		return zero, false
	}
	v, _ := c.cfg().give(e)
	return v, true
}

// Fetch returns a Get of key as a function for policies to wrap. If the Get succeeds,
// the function stores the value in *dst, on the goroutine that calls it.
func (c *Cache[K, V]) Fetch(key K, dst *V) func(context.Context) error {
	return func(ctx context.Context) error {
		v, err := c.Get(ctx, key)
		if err == nil {
			*dst = v
		}
		return err
	}
}
