package cacheaside

import (
	"context"
	"maps"
	"sync"
	"sync/atomic"
)

// mostUntold bounds how many keys the Store is still to be told about. Beyond it,
// it is to be told that all are out of date.
const mostUntold = 10_000

// untold is what the Store could not be told: its values of these keys are out of
// date. A key that is told of and changes again meanwhile stays.
type untold struct {
	n atomic.Int64 // of keys, one more for all: so that none costs no lock

	mu      sync.Mutex
	keys    map[string]uint64 // each with the number of its last change
	all     uint64            // the number of the last change of all keys; 0: none
	changes uint64
	busy    bool // a goroutine is at it
	closed  bool
}

func (u *untold) has(key string) bool {
	if u.n.Load() == 0 {
		return false
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	_, ok := u.keys[key]
	return ok || u.all > 0
}

func (u *untold) len() int64 { return u.n.Load() }

func (u *untold) add(key string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.changes++
	if u.keys == nil {
		u.keys = make(map[string]uint64)
	}
	u.keys[key] = u.changes
	if len(u.keys) > mostUntold {
		u.keys, u.all = nil, u.changes
	}
	u.count()
}

func (u *untold) addAll() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.changes++
	u.keys, u.all = nil, u.changes
	u.count()
}

func (u *untold) count() {
	n := int64(len(u.keys))
	if u.all > 0 {
		n++
	}
	u.n.Store(n)
}

func (u *untold) snapshot() (keys map[string]uint64, all uint64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return maps.Clone(u.keys), u.all
}

// told takes a key off, or all if it is "", unless it has changed again.
func (u *untold) told(key string, change uint64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case key == "" && u.all == change:
		u.all = 0
		maps.DeleteFunc(u.keys, func(_ string, c uint64) bool { return c <= change })
	case key != "" && u.keys[key] == change:
		delete(u.keys, key)
	}
	u.count()
}

// catchUp sees to it that a goroutine tells the Store what it still has to know.
func (s *shared[K, V]) catchUp() {
	u := &s.untold
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.busy || u.closed {
		return
	}
	u.busy = true
	s.c.running.Go(func() {
		for sleep(s.ctx, s.pause()) {
			if s.tellUntold(s.ctx) == nil && u.rest() {
				s.works(s.ctx)
				return
			}
		}
	})
}

// rest reports that there is nothing left to do, and that the goroutine ends.
func (u *untold) rest() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.busy = u.all > 0 || len(u.keys) > 0
	return !u.busy
}

// tellUntold tells the Store once, and returns its first error.
func (s *shared[K, V]) tellUntold(ctx context.Context) error {
	keys, all := s.untold.snapshot()
	if all > 0 {
		if err := s.store.InvalidateAll(ctx); err != nil {
			return err
		}
		s.untold.told("", all)
		s.c.tellAll(ctx, Reinvalidated, nil)
	}
	for key, change := range keys {
		if change <= all {
			continue
		}
		if err := s.store.Invalidate(ctx, key); err != nil {
			return err
		}
		s.untold.told(key, change)
		s.c.tellAll(ctx, Reinvalidated, nil)
	}
	return nil
}

// close ends what runs in the background, and tells the Store one last time.
func (s *shared[K, V]) close() error {
	s.untold.mu.Lock()
	s.untold.closed = true
	s.untold.mu.Unlock()
	s.cancel()
	if s.untold.len() == 0 {
		return nil
	}
	err := s.tellUntold(context.Background())
	if err == nil {
		return nil
	}
	keys, all := s.untold.snapshot()
	failed := &InvalidateError{Name: s.c.cfg.Name, Err: err}
	if all == 0 {
		for key := range keys {
			failed.Keys = append(failed.Keys, key)
		}
	}
	return failed
}
