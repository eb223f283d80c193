package cacheaside

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"strconv"
	"sync/atomic"
	"time"
)

// shared is what a Cache has to do with its Store.
type shared[K comparable, V any] struct {
	c      *Cache[K, V]
	store  Store
	ctx    context.Context // ends with Close
	cancel context.CancelFunc

	down  atomic.Bool
	until atomic.Int64 // the Store is not asked before this time

	untold untold

	// slots count what others have invalidated. A key that is written for the
	// Store cannot be read back, so it is known by its hash: another key of the
	// slot is invalidated along with it, once in a while.
	slots [1 << 16]atomic.Uint32
}

func slotOf(written string) uint16 {
	return uint16(crc32.ChecksumIEEE([]byte(written)))
}

// newToken names one holder of a lease or a fence among all there ever are.
func newToken() string {
	return strconv.FormatUint(rand.Uint64(), 36) + strconv.FormatUint(rand.Uint64(), 36)
}

func newShared[K comparable, V any](c *Cache[K, V]) *shared[K, V] {
	s := &shared[K, V]{c: c, store: c.cfg.Store}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	if c.entries != nil {
		c.running.Go(s.watch)
	}
	return s
}

// Asking again for what another process loads: at first after pollFirst, then at
// ever longer intervals.
const (
	pollFirst = 5 * time.Millisecond
	pollMost  = 100 * time.Millisecond
)

// consult asks the Store for what f is to answer. If it has no answer, f is to
// load; with a lease it is then to fill the Store.
func (s *shared[K, V]) consult(f *flight[K, V]) (e *entry[V], lease string, err error) {
	if s.c.now() < time.Duration(s.until.Load()) || s.untold.has(f.written) {
		return nil, "", nil
	}
	token, poll := newToken(), pollFirst
	for {
		asked := s.c.now()
		look, err := s.store.Acquire(&f.ctx, f.written, token, f.renew)
		if err != nil {
			if f.ctx.Err() != nil {
				return nil, "", s.c.over(&f.ctx, err)
			}
			s.failed(&f.ctx, err)
			return nil, "", nil
		}
		s.works(&f.ctx)
		e, err := s.read(f, look, asked)
		if err != nil {
			return nil, "", err
		}
		switch look.State {
		case Hit:
			if e == nil { // not to be read: load it anew
				f.renew = true
				continue
			}
			s.c.counts.storeHit.Add(1)
			s.refreshAhead(f, e)
			return e, "", answerOf(e)
		case Leased:
			s.offer(f, e)
			return nil, token, nil
		case Fenced:
			return nil, "", s.behindFence(f)
		case Busy:
			f.batch.skip(f)
			f.renew = false
			if e.standing(s.c.now()) == stale {
				e.pause = s.c.now() + min(look.Wait, pollMost)
				return e, "", nil
			}
			f.old.CompareAndSwap(nil, e)
			wait := min(poll, max(look.Wait, time.Millisecond))
			poll = min(2*poll, pollMost)
			if !sleep(&f.ctx, wait/2+rand.N(wait)) {
				return nil, "", s.c.over(&f.ctx, nil)
			}
		default:
			return nil, "", fmt.Errorf("%sthe Store answered with State %d", prefix(s.c.cfg.Name), look.State)
		}
	}
}

// answerOf is the error that goes with an entry.
func answerOf[V any](e *entry[V]) error {
	if e.absent {
		return ErrNotFound
	}
	return nil
}

// read makes an entry of what the Store holds; nil if that is nothing, or cannot
// be read.
func (s *shared[K, V]) read(f *flight[K, V], look Lookup, asked time.Duration) (*entry[V], error) {
	if look.Value == nil {
		return nil, nil
	}
	e, err := s.c.open(f.key, look.Value)
	if errors.Is(err, ErrKeyCollision) {
		return nil, fmt.Errorf("%s%v: the store has the value of another key as %q: %w",
			prefix(s.c.cfg.Name), f.key, f.written, ErrKeyCollision)
	}
	if err != nil {
		s.c.tell(&f.ctx, BadPayload, f.key, err)
		return nil, nil
	}
	// From when it was asked: the answer may have taken a while.
	s.c.fill(e, asked, look.Fresh)
	return e, nil
}

// offer lets those who wait for f have an old value that may be served while it
// is being refreshed, and keeps one that may be served if that fails.
func (s *shared[K, V]) offer(f *flight[K, V], e *entry[V]) {
	if e == nil || e.absent {
		return
	}
	c := s.c
	sh := f.shard
	sh.mu.Lock()
	if sh.flights[f.key] == f && f.version == c.version(f.slot) && c.remembers.Load() && c.peek(f.key) == nil {
		e.slot, e.version = f.slot, f.version
		c.entries.Set(f.key, e)
	}
	sh.mu.Unlock()
	f.old.Store(e)
	if e.standing(c.now()) >= stale {
		close(f.offered)
	}
}

// refreshAhead decides, where nothing is kept in memory, whether a hit in the
// Store is to be refreshed early.
func (s *shared[K, V]) refreshAhead(f *flight[K, V], e *entry[V]) {
	c := s.c
	if c.entries != nil || f.renew || c.cfg.Ahead == 0 || !c.ahead(e, c.now()) {
		return
	}
	sh := f.shard
	sh.mu.Lock()
	if c.closed.Load() {
		sh.mu.Unlock()
		return
	}
	early := c.launch(f.ctx.values, sh, f.key, f.written, time.Now())
	early.renew = true
	early.waiters++
	sh.mu.Unlock()
	go c.fly(early)
	c.tell(&f.ctx, RefreshAhead, f.key, nil)
}

// behindFence readies f to load while a writer is at work. Whoever asks from now
// on is to have a load that begins from now on: if the writer dies after its
// commit, nobody will be told of it. One such load runs at a time, for each key.
func (s *shared[K, V]) behindFence(f *flight[K, V]) error {
	f.fenced = true
	c := s.c
	if c.entries == nil {
		return nil
	}
	f.batch.skip(f)
	sh := f.shard
	sh.mu.Lock()
	before := sh.fenced[f.key]
	sh.mu.Unlock()
	if before != nil {
		select {
		case <-before.done:
		case <-f.done:
			return f.err
		}
	}
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if sh.flights[f.key] == f {
		sh.overtake(f.key)
		sh.fenced[f.key] = f
	}
	return nil
}

// fill stores what f loaded: e, or nil if there is nothing to remember.
func (s *shared[K, V]) fill(f *flight[K, V], lease string, e *entry[V]) {
	if lease == "" {
		return
	}
	ctx := context.WithoutCancel(&f.ctx)
	now := s.c.now()
	if e == nil || e.keep <= now {
		if f.old.Load() == nil {
			s.release(f, lease)
		} else if err := s.store.Invalidate(ctx, f.written); err != nil { // the old value is gone for good
			s.failed(ctx, err)
		}
		return
	}
	data, err := s.c.seal(f.key, e)
	if err != nil {
		s.c.tell(ctx, BadPayload, f.key, err)
		s.release(f, lease)
		return
	}
	filled, err := s.store.Fill(ctx, f.written, lease, data, e.fresh-now, e.keep-now)
	if err != nil {
		s.failed(ctx, err)
		return
	}
	// Invalidated, or somebody else took the lease when it was over.
	f.refused = !filled
}

// release gives a lease back.
func (s *shared[K, V]) release(f *flight[K, V], lease string) {
	if lease == "" {
		return
	}
	ctx := context.WithoutCancel(&f.ctx)
	if err := s.store.Release(ctx, f.written, lease); err != nil {
		s.failed(ctx, err)
	}
}

// fence fences key and returns the ctx of its writer.
func (s *shared[K, V]) fence(ctx context.Context, key K, token string) (context.Context, context.CancelFunc) {
	begun := time.Now()
	window, err := s.store.Fence(ctx, s.c.cfg.Key(key), token)
	if err != nil {
		s.c.tell(ctx, FenceFailed, key, err)
		if ctx.Err() == nil {
			s.failed(ctx, err)
		}
		return ctx, func() {}
	}
	s.works(ctx)
	return context.WithDeadlineCause(ctx, begun.Add(window),
		&TimeoutError{Name: s.c.cfg.Name, What: "write", After: window})
}

// inOrder tells the Store before memory. It is a variable so that a test can show
// what happens in the other order.
var inOrder = func(there func() error, here func()) error {
	err := there()
	here()
	return err
}

// announce tells the Store and then memory, and sees to it that the Store is told
// in the end. Until then what it holds of the key is not used here.
func (s *shared[K, V]) announce(ctx context.Context, key K, there func(context.Context, string) error, here func(K)) error {
	// The change is made: that whoever made it has gone is no reason to stop.
	ctx = context.WithoutCancel(ctx)
	written := s.c.cfg.Key(key)
	err := inOrder(func() error {
		err := there(ctx, written)
		if err != nil {
			s.untold.add(written)
		}
		return err
	}, func() { here(key) })
	if err == nil {
		s.works(ctx)
		return nil
	}
	s.failed(ctx, err)
	s.c.tell(ctx, NotInvalidated, key, err)
	s.catchUp()
	return &InvalidateError{Name: s.c.cfg.Name, Keys: []string{written}, Err: err}
}

func (s *shared[K, V]) announceAll(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx)
	err := s.store.InvalidateAll(ctx)
	if err == nil {
		s.works(ctx)
		return nil
	}
	s.untold.addAll()
	s.failed(ctx, err)
	s.c.tellAll(ctx, NotInvalidated, err)
	s.catchUp()
	return &InvalidateError{Name: s.c.cfg.Name, Err: err}
}

// failed leaves the Store alone for a while.
func (s *shared[K, V]) failed(ctx context.Context, err error) {
	s.until.Store(int64(s.c.now() + s.c.cfg.ErrorPause))
	if !s.down.Swap(true) {
		s.c.tellAll(ctx, StoreDown, err)
	}
}

func (s *shared[K, V]) works(ctx context.Context) {
	if s.down.Load() && s.down.Swap(false) {
		s.until.Store(0)
		s.c.tellAll(ctx, StoreUp, nil)
	}
}

// watch hears of what other processes invalidate. While it cannot, nothing is
// kept in memory.
func (s *shared[K, V]) watch() {
	c := s.c
	told := false
	for s.ctx.Err() == nil {
		err := s.store.Watch(s.ctx, func() {
			c.forgetAll() // what was being read may have changed unheard
			if !c.closed.Load() {
				c.remembers.Store(true)
			}
			told = false
			c.tellAll(s.ctx, WatchRestored, nil)
		}, s.heard)
		c.remembers.Store(false)
		c.forgetAll()
		if s.ctx.Err() != nil {
			return
		}
		if !told {
			told = true
			c.tellAll(s.ctx, WatchLost, err)
		}
		sleep(s.ctx, s.pause())
	}
}

// heard is called for each key that another process has invalidated.
func (s *shared[K, V]) heard(written string) {
	if written == "" {
		s.c.forgetAll()
		return
	}
	s.slots[slotOf(written)].Add(1)
}

// pause is how long to wait before the Store is tried again in the background.
func (s *shared[K, V]) pause() time.Duration {
	return max(s.c.cfg.ErrorPause, 50*time.Millisecond)
}

// sleep reports whether d passed before ctx ended.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
