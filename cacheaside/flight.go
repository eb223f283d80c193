package cacheaside

import (
	"context"
	"errors"
	"maps"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
)

// A flight is one load of a key and the right to keep its result: the result is kept
// only if shard.flights still holds this flight when it lands. An invalidation removes
// it from there. The flight then still answers its callers, but later callers do not
// find it.
type flight[K comparable, V any] struct {
	c       *Cache[K, V]
	cfg     *Config[K, V] // the settings when the flight began
	shard   *shard[K, V]
	key     K
	version uint64        // of the bucket when the flight began
	began   time.Duration // since New
	tagged  uint64        // number of the last invalidation of tags when the flight began
	written string        // the key as converted for the Store
	loading               // its call of Load
	unwatch func() bool   // see overdue
	value   V             // returned by Load
	took    time.Duration // duration of the load, 0 if it has not returned
	batch   *batch[K, V]  // of GetMany; nil if the flight loads by itself
	failing *batch[K, V]  // the batch whose failure fails this flight, once it has landed
	asked   *answer       // the answer of the Store, if GetMany has asked it
	looked  time.Duration // when the Store was last asked

	old     atomic.Pointer[oldValue[V]] // may be served if the load fails
	offered chan struct{}               // closed when old may be served immediately; nil without a Store

	bucket      uint32
	refresh     bool // load even if the value in the Store is fresh
	crowded     bool // mostLost loads of the key run on without callers
	passing     bool // the result is not kept, because changes during the load are not heard
	loaded      bool // a load has returned a value
	absent      bool // a load has returned ErrNotFound
	invalidated bool // the Store reports an invalidation since the load began; the result is not kept

	// Guarded by the mutex of the shard.
	answered bool // callers have the result, or the reason why there is none
	lost     bool // has not landed, and no caller waits for it
	follows  bool // takes its answer from another flight
	queued   bool // waits for a slot
	waiters  int32
	jam      chan struct{} // see jammed

	done    chan struct{} // closed when the callers may read the answer
	err     error
	failed  *batch[K, V] // the batch whose failure is err
	entry   *entry[V]
	stale   bool // entry is past its TTL; to be read only if err is nil
	current bool // no invalidation until f ended
}

// An oldValue is what a flight is to replace. A call that began after an invalidation of
// it must not get it:
//
//   - With memory, only callers of a flight that has not been overtaken get it, whenever
//     they called. A flight that may be joined again after it was overtaken has none; see
//     stand.
//   - Without memory, a flight does not hear of invalidations. Only calls that began
//     before at get it, which is when the Store was asked for it.
type oldValue[V any] struct {
	entry *entry[V]
	at    time.Duration
}

// current returns the flight of key that a caller may join, or nil. The shard is locked.
func (c *Cache[K, V]) current(s *shard[K, V], key K) *flight[K, V] {
	f := s.flights[key]
	if f != nil && f.version != c.version(f.bucket) {
		s.overtake(key)
		return nil
	}
	return f
}

// overtake makes sure that the result of the flight of key is not kept. The shard is
// locked.
func (s *shard[K, V]) overtake(key K) {
	if f := s.flights[key]; f != nil {
		delete(s.flights, key)
		s.others[f] = struct{}{}
	}
}

// launch creates the flight of key. Its caller starts it, on a goroutine of its own. The
// shard is locked, and no caller waits for the flight yet.
func (c *Cache[K, V]) launch(ctx context.Context, s *shard[K, V], key K, written string, now time.Time) *flight[K, V] {
	cfg := c.cfg()
	f := &flight[K, V]{
		c: c, cfg: cfg, shard: s, key: key, began: now.Sub(c.base), written: written, done: make(chan struct{}),
	}
	if c.shared != nil {
		f.bucket = c.shared.bucketOf(written)
		f.offered = make(chan struct{})
	}
	f.version, f.tagged = c.version(f.bucket), c.tags.last.Load()
	f.init(ctx, now.Add(cfg.LoadTimeout), f)
	f.unwatch = context.AfterFunc(f.ctx, func() { c.overdue(f) })
	if l := s.lost[key]; l != nil {
		f.crowded = l.n >= mostLost
	}
	f.passing = !findable(key)
	if c.entries == nil || f.passing {
		s.others[f] = struct{}{}
	} else {
		s.flights[key] = f
	}
	c.running.Add(1)
	return f
}

// wait waits for the answer of f. at is the time of the call.
func (c *Cache[K, V]) wait(ctx context.Context, f *flight[K, V], at time.Duration) (e *entry[V], old bool, err error) {
	var jam <-chan struct{}
	if own, _ := c.around(ctx, f.key); own {
		jam = f.jammed()
	}
	var soft <-chan time.Time
	if f.cfg.SoftTimeout > 0 {
		timer := time.NewTimer(f.began + f.cfg.SoftTimeout - c.now())
		defer timer.Stop()
		soft = timer.C
	}
	offered := f.offered
	for {
		select {
		case <-f.done:
			return c.answer(ctx, f, at)
		case <-offered:
			if old := f.old.Load(); at != noOld && old.entry.standing(c.now()) >= stale && old.at >= at {
				return c.serveStale(ctx, f.key, old.entry, nil), true, nil // f goes on
			}
			offered = nil
		case <-soft:
			if old := c.standby(f, at); old != nil {
				return c.serveStale(ctx, f.key, old, nil), true, nil // f goes on
			}
		case <-jam:
			c.leave(f)
			return nil, false, c.recursive(f.key, "no other of Loads is free")
		case <-ctx.Done():
			c.leave(f)
			return nil, false, ended.Error(ctx)
		}
	}
}

// answer returns what a caller gets when f has been answered.
func (c *Cache[K, V]) answer(ctx context.Context, f *flight[K, V], at time.Duration) (e *entry[V], old bool, err error) {
	switch {
	case f.err != nil:
		return c.instead(ctx, f, at)
	case f.stale:
		return c.serveStale(ctx, f.key, f.entry, nil), true, nil
	}
	return f.entry, false, nil
}

// instead returns what a caller gets when f has failed: the old value if that is
// allowed, otherwise the error. An answer, such as "forbidden", goes to the caller.
func (c *Cache[K, V]) instead(ctx context.Context, f *flight[K, V], at time.Duration) (e *entry[V], old bool, err error) {
	if isFailure(f.err) && !behavior.IsAnswered(f.err) && !errors.Is(f.err, ErrClosed) {
		if old := c.standby(f, at); old != nil {
			return c.serveStale(ctx, f.key, old, f.err), true, nil
		}
	}
	return nil, false, f.err
}

// standby returns the old value that may be served to a call made at a given time if f
// fails or takes long. It returns nil if there is none.
func (c *Cache[K, V]) standby(f *flight[K, V], at time.Duration) *entry[V] {
	if at == noOld {
		return nil
	}
	e := c.before(f, at)
	if e.standing(c.now()) == dead || e.absent {
		return nil
	}
	return e
}

// before returns the value that f is to replace, of any age: the one in memory, or the one
// from when f began if nothing has been invalidated since, and if it may be served to a
// call made at a given time. It returns nil if there is none.
func (c *Cache[K, V]) before(f *flight[K, V], at time.Duration) *entry[V] {
	e, old := c.peek(f.key), f.old.Load()
	if e != nil || old == nil || old.at < at || !c.tags.holds(old.entry.tags) {
		return e
	}
	f.shard.mu.Lock()
	defer f.shard.mu.Unlock()
	if c.entries == nil || f.current || f.shard.flights[f.key] == f && f.version == c.version(f.bucket) {
		return old.entry
	}
	return nil
}

// leave is called by a caller that stops waiting. The last one cancels the load.
func (c *Cache[K, V]) leave(f *flight[K, V]) {
	s := f.shard
	s.mu.Lock()
	defer s.mu.Unlock()
	f.waiters--
	if f.waiters > 0 || f.answered || f.cfg.Finish && c.isKept(f) {
		return
	}
	if s.flights[f.key] == f {
		s.overtake(f.key)
	}
	if !f.follows { // otherwise the other flight counts
		c.counts.canceled.Add(1)
	}
	f.end()
	f.fail(context.Canceled)
	s.lose(f)
}

// isKept reports whether the result of f will be kept, as far as is known. The shard of
// f is locked.
func (c *Cache[K, V]) isKept(f *flight[K, V]) bool {
	s := f.shard
	if c.entries == nil {
		return findable(f.key) && s.alone[f.key] != f
	}
	return s.flights[f.key] == f && f.version == c.version(f.bucket)
}

// fail answers the callers of f with err, unless they have an answer. The shard is
// locked.
func (f *flight[K, V]) fail(err error) {
	if !f.answered {
		f.answered, f.err = true, err
		close(f.done)
	}
}

// end ends the ctx of f, unless its deadline has passed.
func (f *flight[K, V]) end() {
	f.unwatch()
	f.cancel()
}

// overdue answers the callers of f when LoadTimeout has passed, even if its load ignores
// its ctx. It is called when that ctx has ended.
func (c *Cache[K, V]) overdue(f *flight[K, V]) {
	if !errors.Is(f.ctx.Err(), context.DeadlineExceeded) {
		return
	}
	s := f.shard
	s.mu.Lock()
	if f.answered {
		s.mu.Unlock()
		return
	}
	c.running.Add(1) // Close has not begun to wait: it answers the callers first
	defer c.running.Done()
	c.postpone(f)
	reports := !f.follows // otherwise the other flight does
	if reports {
		c.counts.timedOut.Add(1)
	}
	if s.flights[f.key] == f {
		s.overtake(f.key)
	}
	err := &TimeoutError{Name: f.cfg.Name, What: "load", After: f.cfg.LoadTimeout}
	f.fail(err)
	s.lose(f)
	s.mu.Unlock()
	if reports {
		c.tellLoad(f, EventLoadFailed, c.now()-f.began, err)
	}
}

// postpone delays the next refresh of an old value. The shard of f, which has failed, is
// locked.
func (c *Cache[K, V]) postpone(f *flight[K, V]) {
	s := f.shard
	if f.cfg.ErrorPause <= 0 || f.answered || f.follows || !findable(f.key) {
		return
	}
	if c.entries != nil && s.flights[f.key] != f {
		return
	}
	now := c.now()
	if e := c.peek(f.key); e.standing(now) != dead {
		x := *e
		x.pause = now + f.cfg.ErrorPause
		c.entries.Set(f.key, &x)
	} else if old := f.old.Load(); old != nil && old.entry.standing(now) != dead {
		s.pause(f.key, now, f.cfg.ErrorPause)
	}
}

// pause prevents loads of key for d if its old value is in the Store rather than in
// memory. The shard is locked.
func (s *shard[K, V]) pause(key K, now, d time.Duration) {
	if s.pauses == nil {
		s.pauses = make(map[K]time.Duration)
	}
	if len(s.pauses) >= s.manyPauses {
		maps.DeleteFunc(s.pauses, func(_ K, until time.Duration) bool { return until <= now })
		s.manyPauses = 2*len(s.pauses) + 100
	}
	s.pauses[key] = now + d
}

// paused reports whether key must not be loaded because a load failed recently.
func (s *shard[K, V]) paused(key K, now time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return now < s.pauses[key]
}

func (s *shard[K, V]) unpause(key K) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pauses, key)
}

// fly runs f, on a goroutine of its own.
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
	e, err := c.obtain(f)
	returned = true
	c.land(f, e, err)
}

// panicked returns the error of a load that panicked with value, or called Goexit.
func (c *Cache[K, V]) panicked(value any) *PanicError {
	return &PanicError{Name: c.cfg().Name, Value: value, Stack: debug.Stack()}
}

// land ends f. It keeps the result if f still is the flight of its key, and answers the
// callers.
func (c *Cache[K, V]) land(f *flight[K, V], e *entry[V], err error) {
	s := f.shard
	s.mu.Lock()
	holds := s.flights[f.key] == f && f.version == c.version(f.bucket) && !f.invalidated
	overtaken := false
	if f.loaded {
		delete(s.pauses, f.key)
	}
	switch {
	case behavior.IsAnswered(err) && isFailure(err): // neither kept nor postponed
	case isFailure(err):
		c.postpone(f)
	case c.entries == nil:
		overtaken = f.invalidated
	case !holds:
		overtaken = !f.passing
	case e != nil && !c.tags.holds(e.tags):
		overtaken = true
		c.entries.Invalidate(f.key)
	case e != nil && c.remembers.Load() && c.now() < e.keep:
		e.bucket, e.version = f.bucket, f.version
		c.entries.Set(f.key, e)
	default: // not found, or not kept
		c.entries.Invalidate(f.key)
	}
	if s.flights[f.key] == f {
		delete(s.flights, f.key)
	}
	if s.alone[f.key] == f {
		delete(s.alone, f.key)
	}
	delete(s.others, f)
	s.find(f)
	late := f.answered // callers already know why they got nothing
	if !late {
		f.answered, f.current, f.entry, f.err = true, holds, e, err
		if isFailure(err) {
			f.failed = f.failing
		}
	}
	s.mu.Unlock()

	defer func() { // even if OnEvent panics
		f.end()
		if !late {
			close(f.done)
		}
	}()
	switch {
	case f.follows: // the other flight reports it
	case isFailure(err):
		if !late || errors.As(err, new(*PanicError)) {
			took := f.took
			if took == 0 {
				took = c.now() - f.began
			}
			c.failed(f, took, err)
		}
	default:
		c.succeeded(f, late)
		if overtaken {
			c.counts.overtaken.Add(1)
			c.tell(f.ctx, EventOvertaken, f.key, nil)
		}
	}
}

// succeeded counts and reports a load of f that returned a value or ErrNotFound. If f
// was late, its timeout or cancellation has been counted.
func (c *Cache[K, V]) succeeded(f *flight[K, V], late bool) {
	count, kind := &c.counts.loaded, EventLoaded
	switch {
	case f.absent:
		count, kind = &c.counts.notFound, EventNotFound
	case !f.loaded: // the Store had the answer
		return
	}
	if !late {
		count.Add(1)
	}
	c.tellLoad(f, kind, f.took, nil)
}

// failed counts and reports a load of f that returned an error other than ErrNotFound.
func (c *Cache[K, V]) failed(f *flight[K, V], took time.Duration, err error) {
	count, kind := &c.counts.failed, EventLoadFailed
	switch behavior.Read(err).Kind {
	case behavior.Refused:
		count, kind = &c.counts.refused, EventLoadRefused
	case behavior.Answered:
		count, kind = &c.counts.answered, EventLoadAnswered
	default:
		if _, panicked := errors.AsType[*PanicError](err); panicked {
			count = &c.counts.panicked
		} else if _, late := errors.AsType[*TimeoutError](err); late {
			count = &c.counts.timedOut
		}
	}
	count.Add(1)
	c.tellLoad(f, kind, took, err)
}

func (c *Cache[K, V]) tellLoad(f *flight[K, V], kind EventKind, took time.Duration, err error) {
	if c.observed() {
		c.event(f.ctx, Event{Kind: kind, Name: f.cfg.Name, Key: f.key, Err: err, Took: took})
	}
}

// A load that ignores its ctx runs on after its callers have left or its time has
// passed, and keeps its slot. To keep one key from taking all slots, the next load of a
// key waits while mostLost such loads of it run on.
const mostLost = 2

// lost counts the loads of a key that run on without callers.
type lost struct {
	n      int
	landed chan struct{} // closed when one of them ends
}

// lose counts f, which has been answered without its load. The shard is locked.
func (s *shard[K, V]) lose(f *flight[K, V]) {
	if !findable(f.key) {
		return
	}
	if s.lost == nil {
		s.lost = make(map[K]*lost)
	}
	l := s.lost[f.key]
	if l == nil {
		l = &lost{landed: make(chan struct{})}
		s.lost[f.key] = l
	}
	f.lost = true
	l.n++
}

// find undoes lose: f has landed. The shard is locked.
func (s *shard[K, V]) find(f *flight[K, V]) {
	if !f.lost {
		return
	}
	l := s.lost[f.key]
	close(l.landed)
	l.landed = make(chan struct{})
	if l.n--; l.n == 0 {
		delete(s.lost, f.key)
	}
}

// mayLoad waits until f may load. It returns an error if f has been answered meanwhile.
func (c *Cache[K, V]) mayLoad(f *flight[K, V]) error {
	s := f.shard
	for f.crowded {
		s.mu.Lock()
		l := s.lost[f.key]
		if l == nil || l.n < mostLost {
			s.mu.Unlock()
			return nil
		}
		landed := l.landed
		s.mu.Unlock()
		select {
		case <-landed:
		case <-f.done:
			return f.err
		}
	}
	return nil
}
