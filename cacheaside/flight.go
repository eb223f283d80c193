package cacheaside

import (
	"context"
	"errors"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// A flight is one load of a key, and the lease for what it will store: it is kept
// only while shard.flights still has this very flight. An invalidation takes it
// from there. Those who wait for it are answered all the same; whoever comes
// later finds no flight to join.
type flight[K comparable, V any] struct {
	c       *Cache[K, V]
	shard   *shard[K, V]
	key     K
	slot    uint16
	version uint64 // of the slot, when it began
	written string // the key, for the Store
	renew   bool   // a fresh value in the Store is to be loaded anew
	fenced  bool   // the Store said that a writer is at work: not to be kept
	refused bool   // the Store did not take the result: not to be kept
	ctx     loadCtx
	value   V            // that Load returned
	batch   *batch[K, V] // of GetMany; nil: the flight loads by itself

	old     atomic.Pointer[entry[V]] // what may be served if the load fails
	offered chan struct{}            // closed when old may be served at once; nil without a Store

	// Guarded by the mutex of the shard.
	waiters  int
	answered bool // with what it found, or with why it will not find anything

	done  chan struct{} // closed when those who wait may read the answer:
	entry *entry[V]
	err   error
}

// holdsLease reports whether f may store what it loaded. It is a variable so that a
// test can show what happens without the rule.
var holdsLease = func(current bool) bool { return current }

// current returns the flight of key that a caller may join, or nil. The shard is
// locked.
func (c *Cache[K, V]) current(s *shard[K, V], key K) *flight[K, V] {
	f := s.flights[key]
	if f != nil && f.version != c.version(f.slot) {
		s.overtake(key)
		return nil
	}
	return f
}

// overtake makes sure that what is being loaded for key will not be kept.
func (s *shard[K, V]) overtake(key K) {
	if f := s.flights[key]; f != nil {
		delete(s.flights, key)
		s.others[f] = struct{}{}
	}
}

// launch makes the flight of key, which is to be flown by a goroutine of its own.
// The shard is locked; nobody waits for it yet.
func (c *Cache[K, V]) launch(ctx context.Context, s *shard[K, V], key K, written string, now time.Time) *flight[K, V] {
	f := &flight[K, V]{c: c, shard: s, key: key, written: written, done: make(chan struct{})}
	if c.shared != nil {
		f.slot = slotOf(written)
		f.offered = make(chan struct{})
	}
	f.version = c.version(f.slot)
	f.ctx.init(ctx, now.Add(c.cfg.LoadTimeout))
	if c.entries == nil {
		s.others[f] = struct{}{}
	} else {
		s.flights[key] = f
	}
	c.watchOver(s, c.cfg.LoadTimeout)
	c.running.Add(1)
	return f
}

// wait waits for the answer of f, on the caller's behalf.
func (c *Cache[K, V]) wait(ctx context.Context, f *flight[K, V]) (*entry[V], error) {
	var soft <-chan time.Time
	if c.cfg.SoftTimeout > 0 {
		timer := time.NewTimer(c.cfg.SoftTimeout)
		defer timer.Stop()
		soft = timer.C
	}
	offered := f.offered
	for {
		select {
		case <-f.done:
			if f.err != nil {
				return c.instead(ctx, f)
			}
			return f.entry, nil
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

// instead is what a caller gets when f has failed: the old value, where that is
// allowed.
func (c *Cache[K, V]) instead(ctx context.Context, f *flight[K, V]) (*entry[V], error) {
	if isFailure(f.err) && !errors.Is(f.err, ErrClosed) {
		if old := c.standby(f); old != nil {
			return c.serveStale(ctx, f.key, old, f.err), nil
		}
	}
	return nil, f.err
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
	s := f.shard
	s.mu.Lock()
	defer s.mu.Unlock()
	f.waiters--
	if f.waiters > 0 || f.answered {
		return
	}
	if s.flights[f.key] == f {
		s.overtake(f.key)
	}
	f.ctx.cancel()
	f.fail(context.Canceled)
}

// fail answers all who wait for f with err, unless they have been answered. The
// shard is locked.
func (f *flight[K, V]) fail(err error) {
	if !f.answered {
		f.answered, f.err = true, err
		close(f.done)
	}
}

// watchOver sees to it that flights of s, one of which has d to go, end in time.
// One timer serves all flights of a shard, since all have the same time: it is set
// for the first of them, and when it has gone off, for the first of those that are
// left. The shard is locked.
func (c *Cache[K, V]) watchOver(s *shard[K, V], d time.Duration) {
	switch {
	case s.watched:
		return
	case s.timer == nil:
		s.timer = time.AfterFunc(d, func() { c.endOverdue(s) })
	default:
		s.timer.Reset(d)
	}
	s.watched = true
}

// endOverdue answers those who wait for flights of s whose time is over, whether
// the load heeds its ctx or not.
func (c *Cache[K, V]) endOverdue(s *shard[K, V]) {
	var overdue []*flight[K, V]
	next := time.Duration(-1)
	s.mu.Lock()
	s.watched = false
	if c.closed.Load() {
		s.mu.Unlock()
		return
	}
	c.running.Add(1)
	defer c.running.Done()
	now := time.Now()
	look := func(f *flight[K, V]) {
		left := f.ctx.deadline.Sub(now)
		switch {
		case f.answered:
		case left <= 0:
			overdue = append(overdue, f)
		case next < 0 || left < next:
			next = left
		}
	}
	for _, f := range s.flights {
		look(f)
	}
	for f := range s.others {
		look(f)
	}
	if next >= 0 {
		c.watchOver(s, next)
	}
	for _, f := range overdue {
		c.counts.failed.Add(1)
		c.postpone(f)
		if s.flights[f.key] == f {
			s.overtake(f.key)
		}
		f.ctx.expire()
		f.fail(&TimeoutError{Name: c.cfg.Name, What: "load", After: c.cfg.LoadTimeout})
	}
	s.mu.Unlock()
	for _, f := range overdue {
		c.tell(&f.ctx, LoadFailed, f.key, f.err)
	}
}

// postpone keeps the old value from being refreshed for a while. The shard of f,
// which has failed, is locked.
func (c *Cache[K, V]) postpone(f *flight[K, V]) {
	if c.cfg.ErrorPause == 0 || f.shard.flights[f.key] != f {
		return
	}
	now := c.now()
	if old := c.peek(f.key); old.standing(now) != dead {
		x := *old
		x.pause = now + c.cfg.ErrorPause
		c.entries.Set(f.key, &x)
	}
}

// fly flies f, on a goroutine of its own.
func (c *Cache[K, V]) fly(f *flight[K, V]) {
	defer c.running.Done()
	returned := false
	defer func() {
		if !returned {
			fault := c.panicked(recover())
			f.batch.skip(f)
			c.land(f, nil, fault)
		}
	}()
	if f.batch == nil && len(c.slots) < cap(c.slots) { // else it waits its turn, and better be small
		growStack() // which an eviction needs
	}
	e, err := c.obtain(f)
	returned = true
	c.land(f, e, err)
}

// panicked makes the error of a load that panicked with value, or called Goexit.
func (c *Cache[K, V]) panicked(value any) *PanicError {
	return &PanicError{Name: c.cfg.Name, Value: value, Stack: debug.Stack()}
}

// land ends f, keeps what it found, if f still is the flight of its key, and
// answers those who wait.
func (c *Cache[K, V]) land(f *flight[K, V], e *entry[V], err error) {
	s := f.shard
	s.mu.Lock()
	holds := holdsLease(s.flights[f.key] == f && f.version == c.version(f.slot)) && !f.refused
	overtaken := false
	switch {
	case isFailure(err):
		c.postpone(f)
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
	late := f.answered // those who waited have been told why they got nothing
	f.answered = true
	s.mu.Unlock()

	switch {
	case isFailure(err) && (!late || errors.As(err, new(*PanicError))):
		c.counts.failed.Add(1)
		c.tell(&f.ctx, LoadFailed, f.key, err)
	case overtaken:
		c.counts.overtaken.Add(1)
		c.tell(&f.ctx, Overtaken, f.key, nil)
	}
	f.ctx.cancel()
	if !late {
		f.entry, f.err = e, err
		close(f.done)
	}
}
