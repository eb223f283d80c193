package cacheaside

import (
	"container/list"
	"sync"
)

// slots bound the loads that run at once. The bound can change at any time.
type slots struct {
	mu           sync.Mutex
	limit, taken int
	waiting      list.List // of chan struct{}, closed when the waiter has a slot
}

// tryTake takes a slot if one is free, and reports whether it did.
func (s *slots) tryTake() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.free() {
		return false
	}
	s.taken++
	return true
}

// take waits for a slot, after the earlier waiters, and reports whether it got one
// before done was closed.
func (s *slots) take(done <-chan struct{}) bool {
	ready := make(chan struct{})
	s.mu.Lock()
	waiter := s.waiting.PushBack(ready)
	s.grant()
	s.mu.Unlock()
	select {
	case <-ready:
		return true
	case <-done:
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-ready: // granted meanwhile
		s.taken--
		s.grant()
	default:
		s.waiting.Remove(waiter)
	}
	return false
}

// put returns a slot.
func (s *slots) put() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.taken--
	s.grant()
}

// setLimit changes the bound. Slots taken beyond a lower bound are not taken back.
func (s *slots) setLimit(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limit = n
	s.grant()
}

// grant gives the free slots to the first waiters. The slots are locked.
func (s *slots) grant() {
	for s.free() && s.waiting.Len() > 0 {
		s.taken++
		close(s.waiting.Remove(s.waiting.Front()).(chan struct{}))
	}
}

// free reports whether a slot is free. The slots are locked.
func (s *slots) free() bool { return s.taken < s.limit }

// inUse returns the number of slots taken.
func (s *slots) inUse() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.taken
}
