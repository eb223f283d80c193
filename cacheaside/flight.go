package cacheaside

import (
	"context"
	"errors"
	"runtime/debug"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/go-resilience/resilience/internal/ended"
)

// A flight is one load of a key, and the lease for what it will store: it is kept
// only while shard.flights still has this very flight. An invalidation takes it
// from there. Those who wait for it are answered all the same; whoever comes
// later finds no flight to join.
type flight[K comparable, V any] struct {
	key     K
	id      string // what singleflight merges by: a key has a new one for each flight
	slot    uint16
	version uint64 // of the slot, when it began
	written string // the key, for the Store
	renew   bool   // a fresh value in the Store is to be loaded anew
	fenced  bool   // the Store said that a writer is at work: not to be kept
	refused bool   // the Store did not take the result: not to be kept
	terms   terms  // what the load says of its result
	ctx     context.Context
	cancel  context.CancelFunc
	batch   *batch[K, V] // of GetMany; nil: the flight loads by itself

	old     atomic.Pointer[entry[V]] // what may be served if the load fails
	offered chan struct{}            // closed when old may be served at once; nil without a Store

	// Guarded by the mutex of the shard.
	waiters int
	landed  bool  // it has an answer,
	fault   error // or this is why it will not have one
}

var lastFlight atomic.Uint64

// holdsLease reports whether f may store what it loaded. It is a variable so that a
// test can show what happens without the rule.
var holdsLease = func(current bool) bool { return current }

// current returns the flight of key that a caller may join, or nil. The shard is
// locked.
func (c *Cache[K, V]) current(s *shard[K, V], key K) *flight[K, V] {
	f := s.flights[key]
	switch {
	case f == nil:
		return nil
	case f.ctx.Err() != nil: // its time is over, and nobody has noticed yet
		c.postpone(s, f)
	case f.version == c.version(f.slot):
		return f
	}
	s.overtake(key)
	return nil
}

// overtake makes sure that what is being loaded for key will not be kept.
func (s *shard[K, V]) overtake(key K) {
	if f := s.flights[key]; f != nil {
		delete(s.flights, key)
		s.others[f] = struct{}{}
	}
}

// launch makes the flight of key. The shard is locked; nobody waits for it yet.
func (c *Cache[K, V]) launch(ctx context.Context, s *shard[K, V], key K, written string) *flight[K, V] {
	f := &flight[K, V]{key: key, id: strconv.FormatUint(lastFlight.Add(1), 36), written: written}
	if c.shared != nil {
		f.slot = slotOf(written)
		f.offered = make(chan struct{})
	}
	f.version = c.version(f.slot)
	f.ctx, f.cancel = context.WithTimeout(&detached{ctx, &f.terms}, c.cfg.LoadTimeout)
	if c.entries == nil {
		s.others[f] = struct{}{}
	} else {
		s.flights[key] = f
	}
	c.running.Add(1)
	return f
}

// wait waits for the answer of f, on the caller's behalf.
func (c *Cache[K, V]) wait(ctx context.Context, f *flight[K, V], landing <-chan singleflight.Result) (*entry[V], error) {
	var soft <-chan time.Time
	if c.cfg.SoftTimeout > 0 {
		timer := time.NewTimer(c.cfg.SoftTimeout)
		defer timer.Stop()
		soft = timer.C
	}
	offered := f.offered
	for {
		select {
		case r := <-landing:
			return c.answer(ctx, f, r)
		case <-f.ctx.Done():
			if err := c.faultOf(f); err != nil {
				return c.instead(ctx, f, err)
			}
			return c.answer(ctx, f, <-landing)
		case <-offered:
			if old := f.old.Load(); old.standing(c.now()) >= stale {
				return c.serveStale(ctx, f.key, old, nil), nil // and f goes on
			}
			offered = nil
		case <-soft:
			if old := c.standby(f); old != nil {
				return c.serveStale(ctx, f.key, old, nil), nil // and f goes on
			}
		case <-ctx.Done():
			c.leave(f)
			return nil, ended.Error(ctx)
		}
	}
}

// answer is what a caller gets from a flight that has landed.
func (c *Cache[K, V]) answer(ctx context.Context, f *flight[K, V], r singleflight.Result) (*entry[V], error) {
	if r.Err != nil {
		return c.instead(ctx, f, r.Err)
	}
	return r.Val.(*entry[V]), nil
}

// instead is what a caller gets when f has failed with err: the old value, where
// that is allowed.
func (c *Cache[K, V]) instead(ctx context.Context, f *flight[K, V], err error) (*entry[V], error) {
	if isFailure(err) && !errors.Is(err, ErrClosed) {
		if old := c.standby(f); old != nil {
			return c.serveStale(ctx, f.key, old, err), nil
		}
	}
	return nil, err
}

// standby returns the old value that may be served when f fails, or nil.
func (c *Cache[K, V]) standby(f *flight[K, V]) *entry[V] {
	old := c.peek(f.key)
	if c.entries == nil {
		old = f.old.Load()
	}
	if old.standing(c.now()) == dead || old.absent {
		return nil
	}
	return old
}

// leave is for a caller that no longer waits. The last one cancels the load.
func (c *Cache[K, V]) leave(f *flight[K, V]) {
	s := c.shard(f.key)
	s.mu.Lock()
	defer s.mu.Unlock()
	f.waiters--
	if f.waiters > 0 || f.landed {
		return
	}
	if s.flights[f.key] == f {
		s.overtake(f.key)
	}
	f.endWith(context.Canceled)
}

// endWith cancels f. The shard is locked.
func (f *flight[K, V]) endWith(err error) {
	if !f.landed && f.fault == nil {
		f.fault = err
	}
	f.cancel()
}

// faultOf returns why f, whose ctx has ended, will have no answer; nil if it has
// one. Whoever comes first ends a flight whose time is over.
func (c *Cache[K, V]) faultOf(f *flight[K, V]) error {
	s := c.shard(f.key)
	s.mu.Lock()
	if f.landed || f.fault != nil {
		defer s.mu.Unlock()
		return f.fault
	}
	err := &TimeoutError{Name: c.cfg.Name, What: "load", After: c.cfg.LoadTimeout}
	f.fault = err
	c.postpone(s, f)
	if s.flights[f.key] == f {
		s.overtake(f.key)
	}
	s.mu.Unlock()
	c.failed(f, err)
	return err
}

// failed counts and tells that f has failed.
func (c *Cache[K, V]) failed(f *flight[K, V], err error) {
	c.counts.failed.Add(1)
	c.tell(f.ctx, LoadFailed, f.key, err)
}

// postpone keeps the old value from being refreshed for a while. The shard is
// locked, and f has failed.
func (c *Cache[K, V]) postpone(s *shard[K, V], f *flight[K, V]) {
	if c.cfg.ErrorPause == 0 || s.flights[f.key] != f {
		return
	}
	now := c.now()
	if old := c.peek(f.key); old.standing(now) != dead {
		x := *old
		x.pause = now + c.cfg.ErrorPause
		c.entries.Set(f.key, &x)
	}
}

// fly runs f, on the goroutine that singleflight gave it.
func (c *Cache[K, V]) fly(f *flight[K, V]) (landed any, err error) {
	defer c.running.Done()
	returned := false
	defer func() {
		if returned {
			return
		}
		// A panic is recovered here. After Goexit nothing is, and singleflight
		// does not answer: then it is the end of f.ctx that those who wait see.
		fault := c.panicked(recover())
		if fault.Value == nil {
			s := c.shard(f.key)
			s.mu.Lock()
			f.fault = fault
			s.mu.Unlock()
		}
		f.batch.skip(f)
		landed, err = nil, fault
		c.land(f, nil, fault)
	}()
	var e *entry[V]
	e, err = c.obtain(f)
	returned = true
	c.land(f, e, err)
	return e, err
}

// panicked makes the error of a load that panicked with value, or called Goexit.
func (c *Cache[K, V]) panicked(value any) *PanicError {
	return &PanicError{Name: c.cfg.Name, Value: value, Stack: debug.Stack()}
}

// land ends f and keeps what it found, if f still is the flight of its key.
func (c *Cache[K, V]) land(f *flight[K, V], e *entry[V], err error) {
	s := c.shard(f.key)
	s.mu.Lock()
	holds := holdsLease(s.flights[f.key] == f && f.version == c.version(f.slot)) && !f.refused
	late := f.fault != nil // those who waited have been answered already
	overtaken := false
	switch {
	case isFailure(err):
		c.postpone(s, f)
	case c.entries == nil:
	case !holds:
		overtaken = !f.fenced
	case e != nil && c.remembers.Load() && c.now() < e.keep:
		e.slot, e.version = f.slot, f.version
		c.entries.Set(f.key, e)
	default: // not found, or not to be kept
		c.entries.Invalidate(f.key)
	}
	if s.flights[f.key] == f {
		delete(s.flights, f.key)
	}
	if s.fenced[f.key] == f {
		delete(s.fenced, f.key)
	}
	delete(s.others, f)
	f.landed = f.fault == nil
	s.mu.Unlock()

	switch {
	case isFailure(err) && (!late || errors.As(err, new(*PanicError))):
		c.failed(f, err)
	case overtaken:
		c.counts.overtaken.Add(1)
		c.tell(f.ctx, Overtaken, f.key, nil)
	}
	f.cancel()
}
