package cacheaside

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"time"
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
				f.refresh, damaged = true, true
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
			f.refresh = false
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
		s.c.tell(f.ctx, EventCodecFailed, f.key, err)
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
	if sh.flights[f.key] == f && f.version == c.version(f.bucket) && c.remembers.Load() && c.peek(f.key) == nil {
		e.bucket, e.version = f.bucket, f.version
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
	if c.entries != nil || f.refresh || beta == 0 || !e.ahead(beta, c.now()) {
		return
	}
	sh := f.shard
	sh.mu.Lock()
	if c.closed.Load() {
		sh.mu.Unlock()
		return
	}
	early := c.launch(f.caller, sh, f.key, f.written, time.Now())
	early.refresh = true
	early.waiters++
	sh.mu.Unlock()
	go c.fly(early)
	c.tell(f.ctx, EventRefreshBegun, f.key, nil)
}
