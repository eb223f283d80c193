package cacheaside

import (
	"time"

	"github.com/go-resilience/resilience/cacheaside/internal/entry"
	"github.com/go-resilience/resilience/cacheaside/internal/flight"
)

// turn waits until t may load without a claim. If it returns an answer, t does not load:
// the answer comes from another flight, or t has ended.
func (c *Cache[K, V]) turn(t *task[K, V]) (*entry.Entry[V], error) {
	for {
		t.shard.mu.Lock()
		other, before := t.shard.Turn(&t.Flight)
		t.shard.mu.Unlock()
		switch {
		case other != nil:
			return c.follow(t, other)
		case before == nil:
			return nil, nil
		}
		t.batch.skip(t)
		if !t.await(before) {
			return nil, t.Answer().Err
		}
	}
}

// rest waits for d before t asks the Store again about a load of another process, which
// replaces e, or nil. Without memory, callers may join t meanwhile. It reports whether t has been
// answered in that time.
func (c *Cache[K, V]) rest(t *task[K, V], e *entry.Entry[V], asked, d time.Duration) (_ *entry.Entry[V], answered bool, err error) {
	s := t.shard
	s.mu.Lock()
	s.Reserve(&t.Flight, e, asked)
	other := s.Rest(&t.Flight)
	s.mu.Unlock()
	if other != nil {
		e, err = c.follow(t, other)
		return e, true, err
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-t.Done:
		return nil, true, t.Answer().Err
	}
	s.mu.Lock()
	s.Rested(&t.Flight)
	s.mu.Unlock()
	return nil, false, nil
}

// follow returns the answer of another flight that t has joined.
func (c *Cache[K, V]) follow(t *task[K, V], other *flight.Flight[K, V]) (*entry.Entry[V], error) {
	t.batch.skip(t)
	t.result.Source = flight.Shared
	if !t.await(other) {
		c.leave(other)
		return nil, t.Answer().Err
	}
	a := other.Answer()
	t.result.Stale = a.Stale
	return a.Entry, a.Err
}

// await waits until another flight has been answered, or t itself: then it returns false.
// t waits for a slot if the other does.
func (t *task[K, V]) await(other *flight.Flight[K, V]) bool {
	t.shard.mu.Lock()
	jam := other.Jammed()
	t.shard.mu.Unlock()
	for {
		select {
		case <-other.Done:
			return true
		case <-jam:
			t.queue(true)
			defer t.queue(false)
			jam = nil
		case <-t.Done:
			return false
		}
	}
}
