package cacheaside

// A load that heeds no ctx goes on when its callers have left or its time is over, and
// keeps its slot. So that one key does not take all slots, its next load waits while
// mostLost of them go on.
const mostLost = 2

// lost counts the loads of a key that go on though nobody waits for them.
type lost struct {
	n      int
	landed chan struct{} // closed when one of them has ended
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

// find takes back what lose did: f has landed. The shard is locked.
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

// mayLoad waits until f may load, and returns an error if f has been answered by then.
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
