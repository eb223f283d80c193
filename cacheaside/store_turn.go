package cacheaside

import (
	"time"
)

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
		if !f.await(before, nil) {
			return nil, f.err
		}
	}
}

// await waits until another flight has been answered, or f itself: then it returns false.
// f waits for a slot if the other does. offered is called once, when the other offers an
// old value.
func (f *flight[K, V]) await(other *flight[K, V], offered func()) bool {
	jam := other.jammed()
	var offer <-chan struct{}
	if offered != nil {
		offer = other.offered
	}
	for {
		select {
		case <-other.done:
			return true
		case <-offer:
			offered()
			offer = nil
		case <-jam:
			f.queue(true)
			defer f.queue(false)
			jam = nil
		case <-f.done:
			return false
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

// stand lets callers join f, which may have been overtaken before. The shard is locked,
// and no other flight of the key may be joined.
func (s *shard[K, V]) stand(f *flight[K, V]) {
	if findable(f.key) && !f.answered {
		if f.c.entries != nil {
			f.old.Store(nil)
		}
		s.flights[f.key] = f
		delete(s.others, f)
	}
}

// joinOther makes f a caller of the current flight of its key, if that is another one,
// and returns that flight, which f then follows. The shard is locked.
func (s *shard[K, V]) joinOther(f *flight[K, V]) *flight[K, V] {
	other := s.flights[f.key]
	if other == nil || other == f {
		return nil
	}
	other.waiters++
	f.follows = true
	return other
}

// follow returns the answer of another flight that f has joined.
func (c *Cache[K, V]) follow(f, other *flight[K, V]) (*entry[V], error) {
	f.batch.skip(f)
	f.passing = true
	if !f.await(other, func() {
		f.old.Store(other.old.Load())
		close(f.offered)
	}) {
		c.leave(other)
		return nil, f.err
	}
	if other.err != nil { // other may still run, and write to stale
		return nil, other.err
	}
	f.stale = other.stale
	return other.entry, nil
}

// findable reports whether a map finds an element stored under key. A key that contains
// NaN does not equal itself.
func findable[K comparable](key K) bool {
	same := key
	return key == same
}
