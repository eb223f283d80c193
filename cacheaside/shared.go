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

// shared is what a Cache has to do with its Store.
type shared[K comparable, V any] struct {
	c      *Cache[K, V]
	store  Store
	ctx    context.Context // ends with Close
	cancel context.CancelFunc

	outage   outage
	fills    [256]fillQueue // of each shard
	sweeping atomic.Bool    // a sweep is about to begin

	// What the Store has still to be told: what it could not be told, what it may
	// have lost, and the leases that it may have granted without an answer.
	untold, doubted untold
	abandoned       abandoned
	recent          recent
	behind          sync.Mutex // guards:
	catchingUp      bool       // a goroutine tells it
	closing         bool

	// slots count what others have invalidated. A key that is written for the
	// Store cannot be read back, so it is known by its hash; another key of the
	// slot is invalidated along with it, once in a while. A power of two.
	slots []atomic.Uint32
}

const mostSlots = 1 << 20

// slotOf returns the slot of a key: with as many slots as entries, an invalidation
// by another process takes one other entry along, on average.
func (s *shared[K, V]) slotOf(written string) uint32 {
	return crc32.ChecksumIEEE([]byte(written)) & uint32(len(s.slots)-1)
}

// newToken names one holder of a lease or a fence among all there ever are.
func newToken() string {
	return strconv.FormatUint(rand.Uint64(), 36) + strconv.FormatUint(rand.Uint64(), 36)
}

func newShared[K comparable, V any](c *Cache[K, V]) *shared[K, V] {
	s := &shared[K, V]{c: c, store: c.cfg.Store}
	s.outage.pause = c.cfg.ErrorPause
	s.ctx, s.cancel = context.WithCancel(context.Background())
	slots := 1
	if c.entries != nil {
		slots = 1 << bits.Len(uint(min(max(c.cfg.Capacity, 256), mostSlots)-1))
	}
	s.slots = make([]atomic.Uint32, slots)
	if c.entries != nil {
		c.running.Go(s.watch)
	}
	return s
}

func (s *shared[K, V]) shardOf(written string) int { return int(s.store.Shard(written)) }

// byShard sorts items by the shard of their keys.
func byShard[T any](store Store, items []T, key func(T) string) map[int][]T {
	shards := make(map[int][]T)
	for _, item := range items {
		shard := int(store.Shard(key(item)))
		shards[shard] = append(shards[shard], item)
	}
	return shards
}

// mostAtOnce bounds the keys of one call of the Store, which serves nobody else
// meanwhile; mostCalls the calls of one GetMany or Invalidate under way.
const (
	mostAtOnce = 100
	mostCalls  = 8
)

// A claim is a lease that the Store has granted. The zero claim is none.
type claim struct {
	token, grant string
}

// consult asks the Store for what f is to answer. If it has no answer, f is to
// load; with a claim it is then to fill the Store.
func (s *shared[K, V]) consult(f *flight[K, V]) (*entry[V], claim, error) {
	began, damaged := s.c.now(), false
	for {
		look, claimed, asked, ok := s.ask(f)
		if !ok {
			if s.c.entries != nil {
				return nil, claim{}, nil // callers join f, and what it loads is kept
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
			if e == nil { // load it anew
				f.renew, damaged = true, true
				continue
			}
			s.c.counts.storeHit.Add(1)
			s.refreshAhead(f, e)
			return e, claim{}, answerOf(e)
		case Leased:
			s.offer(f, e, asked)
			return nil, claimed, nil
		case Missed:
			// A load has failed a moment ago, and the next is not due.
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
			// The longer the load takes, the longer the intervals: asking adds an
			// eighth to the wait, at most.
			wait := min(max((s.c.now()-began)/8, pollFirst), pollMost, max(look.Wait, time.Millisecond))
			if e, answered, err := s.c.rest(f, wait/2+rand.N(wait)); answered {
				return e, claim{}, err
			}
		default:
			return nil, claim{}, fmt.Errorf("%sthe Store answered with State %d", prefix(s.c.cfg.Name), look.State)
		}
	}
}

// The intervals at which the Store is asked again for what another process loads.
const (
	pollFirst = 5 * time.Millisecond
	pollMost  = 100 * time.Millisecond
)

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

// offer lets the callers of f have an old value that may be served while it is
// being refreshed, and keeps one that may be served if that fails.
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

// oldFrom makes an old value of what the Store held when it was asked.
func (s *shared[K, V]) oldFrom(e *entry[V], asked time.Duration) *oldValue[V] {
	if e == nil {
		return nil
	}
	if s.c.entries != nil {
		asked = math.MaxInt64
	}
	return &oldValue[V]{e, asked}
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
