package cacheaside

import "time"

// A flight that loads what cannot be kept may only answer callers that asked before
// it began: nobody will be told of what changes meanwhile. Later callers join the
// next flight, which stands and waits until the first has ended. So there is one
// such load of a key at a time, however many ask.

// turn readies f to load without a claim. If it returns an answer, that of another
// flight or the end of f, f is not to load.
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

// rest waits for d before f asks the Store again; where nothing is kept in memory,
// callers may join it until then. It reports whether f has been answered meanwhile.
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

// stand lets callers join f. The shard is locked; no other flight of the key stands.
func (s *shard[K, V]) stand(f *flight[K, V]) {
	if findable(f.key) && !f.answered {
		s.flights[f.key] = f
		delete(s.others, f)
	}
}

// joinOther makes f one of the callers of the flight of its key, if that is not f,
// and returns it. The shard is locked.
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

// findable reports whether what is stored under key in a map can be found there: no
// key with a NaN in it is equal to itself.
func findable[K comparable](key K) bool {
	same := key
	return key == same
}
