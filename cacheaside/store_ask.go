package cacheaside

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"math/bits"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// shared is the part of a Cache that deals with its Store.
type shared[K comparable, V any] struct {
	c      *Cache[K, V]
	store  Store
	ctx    context.Context // ends with Close
	cancel context.CancelFunc

	outage   outage
	fills    [256]fillQueue // one for each shard
	sweeping atomic.Bool    // a sweep is about to begin

	// What the Store must still be told: invalidations that it could not be told of
	// (untold) or may have lost (doubted), and leases that it may have granted without an
	// answer.
	untold, doubted untold
	abandoned       abandoned
	recent          recent
	behind          sync.Mutex // guards:
	catchingUp      bool       // a goroutine is telling it
	closing         bool

	// slots count invalidations by other processes. A converted key cannot be converted
	// back, so it is identified by its hash: an invalidation also reaches other keys of
	// the slot. The length is a power of two.
	slots []atomic.Uint32
}

const mostSlots = 1 << 20

// slotOf returns the slot of a key. With as many slots as entries, an invalidation by
// another process reaches one other entry on average.
func (s *shared[K, V]) slotOf(written string) uint32 {
	return crc32.ChecksumIEEE([]byte(written)) & uint32(len(s.slots)-1)
}

// newToken returns a unique token for the holder of a lease or a fence.
func newToken() string {
	return strconv.FormatUint(rand.Uint64(), 36) + strconv.FormatUint(rand.Uint64(), 36)
}

func newShared[K comparable, V any](c *Cache[K, V]) *shared[K, V] {
	s := &shared[K, V]{c: c, store: c.cfg().Store}
	s.outage.pause = func() time.Duration { return max(c.cfg().ErrorPause, 0) }
	s.ctx, s.cancel = context.WithCancel(context.Background())
	slots := 1
	if c.entries != nil {
		slots = 1 << bits.Len(uint(min(max(c.cfg().Capacity, 256), mostSlots)-1))
	}
	s.slots = make([]atomic.Uint32, slots)
	if c.entries != nil {
		c.running.Go(s.watch)
	}
	return s
}

func (s *shared[K, V]) shardOf(written string) int { return int(s.store.Shard(written)) }

// byShard groups items by the shard of their keys.
func byShard[T any](store Store, items []T, key func(T) string) map[int][]T {
	shards := make(map[int][]T)
	for _, item := range items {
		shard := int(store.Shard(key(item)))
		shards[shard] = append(shards[shard], item)
	}
	return shards
}

// mostAtOnce bounds the keys of one call of the Store, which serves no other process
// meanwhile. mostCalls bounds the concurrent calls of one GetMany or Invalidate.
const (
	mostAtOnce = 100
	mostCalls  = 8
)

// A claim is a lease granted by the Store. The zero claim is none.
type claim struct {
	token, grant string
}

// consult asks the Store for the answer of f. If the Store has none, f must load; with a
// claim, it must then fill the Store.
func (s *shared[K, V]) consult(f *flight[K, V]) (*entry[V], claim, error) {
	began, damaged := s.c.now(), false
	for {
		look, claimed, asked, ok := s.ask(f)
		if !ok {
			if s.c.entries != nil {
				return nil, claim{}, nil // callers join f, and its result is kept
			}
			e, err := s.c.turn(f)
			return e, claim{}, err
		}
		if damaged {
			look.Value = nil
		}
		e, err := s.read(f, look, asked)
		if err != nil {
			s.release(f, claimed)
			return nil, claim{}, err
		}
		switch look.State {
		case Hit:
			if e == nil { // unreadable; load it
				f.renew, damaged = true, true
				continue
			}
			s.c.counts.storeHits.Add(1)
			s.refreshAhead(f, e)
			return e, claim{}, answerOf(e)
		case Leased:
			s.offer(f, e, asked)
			return nil, claimed, nil
		case Missed:
			// A load failed recently, and the next is not due.
			if e.standing(s.c.now()) != dead && !e.absent {
				f.stale = e.standing(s.c.now()) != fresh
				return e, claim{}, nil
			}
			f.shard.unpause(f.key)
		case Fenced:
			e, err := s.c.turn(f)
			return e, claim{}, err
		case Busy:
			f.batch.skip(f)
			f.renew = false
			if e.standing(s.c.now()) == stale {
				e.pause = s.c.now() + min(look.Wait, pollMost)
				f.stale = true
				return e, claim{}, nil
			}
			f.old.CompareAndSwap(nil, s.oldFrom(e, asked))
			// The longer the load takes, the longer the intervals: polling adds at most an
			// eighth to the wait.
			wait := min(max((s.c.now()-began)/8, pollFirst), pollMost, max(look.Wait, time.Millisecond))
			if e, answered, err := s.c.rest(f, wait/2+rand.N(wait)); answered {
				return e, claim{}, err
			}
		default:
			return nil, claim{}, fmt.Errorf("%sthe Store answered with State %q", prefix(s.c.cfg().Name), look.State)
		}
	}
}

// Intervals at which the Store is asked again about a load of another process.
const (
	pollFirst = 5 * time.Millisecond
	pollMost  = 100 * time.Millisecond
)

// answerOf returns the error that goes with an entry.
func answerOf[V any](e *entry[V]) error {
	if e.absent {
		return ErrNotFound
	}
	return nil
}

// read decodes what the Store holds. It returns nil if that is nothing or unreadable.
func (s *shared[K, V]) read(f *flight[K, V], look Lookup, asked time.Duration) (*entry[V], error) {
	if look.Value == nil {
		return nil, nil
	}
	e, err := s.c.open(f.key, look.Value)
	if errors.Is(err, ErrKeyCollision) {
		return nil, fmt.Errorf("%s%v: the store has the value of another key as %q: %w",
			prefix(s.c.cfg().Name), f.key, f.written, ErrKeyCollision)
	}
	if err != nil {
		s.c.tell(&f.ctx, BadPayload, f.key, err)
		return nil, nil
	}
	// Times count from the call: the answer may have taken a while.
	f.cfg.fill(e, asked, look.Fresh)
	return e, nil
}

// offer gives the callers of f an old value: immediately if it may be served during a
// refresh, otherwise if the load fails.
func (s *shared[K, V]) offer(f *flight[K, V], e *entry[V], asked time.Duration) {
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
	f.old.Store(s.oldFrom(e, asked))
	if e.standing(c.now()) >= stale {
		close(f.offered)
	}
}

// oldFrom makes an old value of what the Store held at the time of the call.
func (s *shared[K, V]) oldFrom(e *entry[V], asked time.Duration) *oldValue[V] {
	if e == nil {
		return nil
	}
	if s.c.entries != nil {
		asked = math.MaxInt64
	}
	return &oldValue[V]{e, asked}
}

// refreshAhead decides, without memory, whether a hit in the Store is refreshed early.
func (s *shared[K, V]) refreshAhead(f *flight[K, V], e *entry[V]) {
	c := s.c
	beta := c.cfg().Ahead
	if c.entries != nil || f.renew || beta == 0 || !e.ahead(beta, c.now()) {
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

// pause returns how long a background goroutine waits before it tries the Store again.
func (s *shared[K, V]) pause() time.Duration {
	return max(s.c.cfg().ErrorPause, 50*time.Millisecond)
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

// A flight that cannot keep its result may only answer calls that began before it: it
// would not hear of changes during its load. Later callers join the next flight, which
// waits until the first has ended. So one such load of a key runs at a time, however
// many callers there are.

// turn waits until f may load without a claim. If it returns an answer, f does not load:
// the answer comes from another flight, or f has ended.
func (c *Cache[K, V]) turn(f *flight[K, V]) (*entry[V], error) {
	f.passing = true
	s := f.shard
	for {
		s.mu.Lock()
		if other := s.joinOther(f); other != nil {
			s.mu.Unlock()
			return c.follow(f, other)
		}
		before := s.alone[f.key]
		if before == nil || before.answered {
			s.overtake(f.key)
			if findable(f.key) {
				s.alone[f.key] = f
			}
			s.mu.Unlock()
			return nil, nil
		}
		s.stand(f)
		s.mu.Unlock()
		f.batch.skip(f)
		select {
		case <-before.done:
		case <-f.done:
			return nil, f.err
		}
	}
}

// rest waits for d before f asks the Store again. Without memory, callers may join f
// meanwhile. It reports whether f has been answered in that time.
func (c *Cache[K, V]) rest(f *flight[K, V], d time.Duration) (e *entry[V], answered bool, err error) {
	s := f.shard
	if c.entries == nil {
		s.mu.Lock()
		if other := s.joinOther(f); other != nil {
			s.mu.Unlock()
			e, err = c.follow(f, other)
			return e, true, err
		}
		s.stand(f)
		s.mu.Unlock()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-f.done:
		return nil, true, f.err
	}
	if c.entries == nil {
		s.mu.Lock()
		if s.flights[f.key] == f {
			s.overtake(f.key)
		}
		s.mu.Unlock()
	}
	return nil, false, nil
}

// stand lets callers join f. The shard is locked, and no other flight of the key may be
// joined.
func (s *shard[K, V]) stand(f *flight[K, V]) {
	if findable(f.key) && !f.answered {
		s.flights[f.key] = f
		delete(s.others, f)
	}
}

// joinOther makes f a caller of the current flight of its key, if that is another one,
// and returns that flight. The shard is locked.
func (s *shard[K, V]) joinOther(f *flight[K, V]) *flight[K, V] {
	other := s.flights[f.key]
	if other == nil || other == f {
		return nil
	}
	other.waiters++
	return other
}

// follow returns the answer of another flight that f has joined.
func (c *Cache[K, V]) follow(f, other *flight[K, V]) (*entry[V], error) {
	f.batch.skip(f)
	f.passing, f.follows = true, true
	f.ctx.partOf.Store(&other.ctx)
	offered := other.offered
	for {
		select {
		case <-other.done:
			f.stale = other.stale
			return other.entry, other.err
		case <-offered:
			f.old.Store(other.old.Load())
			close(f.offered)
			offered = nil
		case <-f.done:
			c.leave(other)
			return nil, f.err
		}
	}
}

// findable reports whether a map finds an element stored under key. A key that contains
// NaN does not equal itself.
func findable[K comparable](key K) bool {
	same := key
	return key == same
}
