package cacheaside

import (
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
)

// mostUntold bounds how many keys the Store is still to be told about. Beyond it,
// it is to be told that all are out of date.
const mostUntold = 10_000

// untold is a set of keys of which the Store has still to be told that its values
// are out of date. A key that changes again while it is being told of stays.
type untold struct {
	n atomic.Int64 // of keys, one more for all: while 0, asking takes no lock

	mu      sync.Mutex
	keys    map[string]untoldKey
	all     uint64 // the number of the last change of all keys; 0: none
	changes uint64
}

type untoldKey struct {
	key    string
	change uint64   // the number of its last change
	tokens []string // of fences that may still stand
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

// add adds key, with the token of a fence that may stand, or "".
func (u *untold) add(key, token string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.changes++
	if u.keys == nil {
		u.keys = make(map[string]untoldKey)
	}
	k := u.keys[key]
	k.key, k.change = key, u.changes
	if token != "" && len(k.tokens) < 100 { // the others fall when their time is over
		k.tokens = append(k.tokens[:len(k.tokens):len(k.tokens)], token)
	}
	u.keys[key] = k
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

// snapshot returns the keys to be told of, and the change of all that is to be told
// first, or 0.
func (u *untold) snapshot() (keys []untoldKey, all uint64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, k := range u.keys {
		keys = append(keys, k)
	}
	return keys, u.all
}

// told takes a key off, unless it has changed again.
func (u *untold) told(k untoldKey) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.keys[k.key].change == k.change {
		delete(u.keys, k.key)
	}
	u.count()
}

// toldAll takes all off that has not changed since, but not the fences.
func (u *untold) toldAll(change uint64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.all == change {
		u.all = 0
	}
	maps.DeleteFunc(u.keys, func(_ string, k untoldKey) bool { return k.change <= change && len(k.tokens) == 0 })
	u.count()
}

// trusts reports whether what the Store holds of key may be used.
func (s *shared[K, V]) trusts(key string) bool { return !s.untold.has(key) && !s.doubted.has(key) }

// catchUp sees to it that a goroutine tells the Store what it still has to know.
func (s *shared[K, V]) catchUp() {
	s.behind.Lock()
	defer s.behind.Unlock()
	if s.catchingUp || s.closing {
		return
	}
	s.catchingUp = true
	s.c.running.Go(func() {
		for sleep(s.ctx, s.pause()) {
			_ = s.tellUntold(s.ctx)
			if s.caughtUp() {
				return
			}
		}
	})
}

// caughtUp reports whether there is nothing left to tell, in which case the goroutine
// of catchUp ends.
func (s *shared[K, V]) caughtUp() bool {
	s.behind.Lock()
	defer s.behind.Unlock()
	s.catchingUp = s.untold.len() > 0 || s.doubted.len() > 0 || s.abandoned.len() > 0
	return !s.catchingUp
}

// tellUntold tells the Store once, and returns its first error.
func (s *shared[K, V]) tellUntold(ctx context.Context) error {
	err := s.tellEach(ctx, &s.untold)
	if err == nil {
		err = s.tellEach(ctx, &s.doubted)
	}
	if err == nil {
		err = s.releaseAbandoned(ctx)
	}
	return err
}

func (s *shared[K, V]) tellEach(ctx context.Context, u *untold) (first error) {
	keys, all := u.snapshot()
	asked := s.c.now()
	if all > 0 {
		if err := s.store.InvalidateAll(ctx); err != nil {
			s.failed(ctx, allShards, asked, err)
			return err
		}
		s.worked(ctx, allShards)
		s.recent.note(tell{all: true, at: s.c.now()})
		u.toldAll(all)
		if u == &s.untold {
			s.c.tellAll(ctx, Reinvalidated, nil)
		}
		keys, _ = u.snapshot()
	}
	failures := 0
	for shard, keys := range byShard(s.store, keys, func(k untoldKey) string { return k.key }) {
		asked = s.c.now()
		if err := s.catchUpShard(ctx, u, shard, keys); err != nil {
			s.failed(ctx, shard, asked, err)
			if first == nil {
				first = err
			}
			if failures++; failures > 1 { // the Store is down
				break
			}
		}
	}
	return first
}

func (s *shared[K, V]) catchUpShard(ctx context.Context, u *untold, shard int, keys []untoldKey) error {
	var plain []string
	for _, k := range keys {
		for _, token := range k.tokens {
			if err := s.store.Unfence(ctx, k.key, token); err != nil {
				return err
			}
		}
		if len(k.tokens) == 0 {
			plain = append(plain, k.key)
		}
	}
	for some := range slices.Chunk(plain, mostAtOnce) {
		if err := s.store.Invalidate(ctx, some...); err != nil {
			return err
		}
	}
	s.worked(ctx, shard)
	for _, k := range keys {
		s.recent.note(tell{key: k.key, at: s.c.now()})
		u.told(k)
		if u == &s.untold {
			s.c.tellAll(ctx, Reinvalidated, nil)
		}
	}
	return nil
}

// close ends what runs in the background, and tells the Store one last time.
func (s *shared[K, V]) close() error {
	s.behind.Lock()
	s.closing = true
	s.behind.Unlock()
	s.cancel()
	if s.untold.len() == 0 {
		return nil
	}
	err := s.tellEach(context.Background(), &s.untold)
	if err == nil {
		return nil
	}
	keys, all := s.untold.snapshot()
	failed := &InvalidateError{Name: s.c.cfg.Name, Err: err}
	if all == 0 {
		for _, k := range keys {
			failed.Keys = append(failed.Keys, k.key)
		}
		slices.Sort(failed.Keys)
	}
	return failed
}
