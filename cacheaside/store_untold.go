package cacheaside

import (
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// mostUntold bounds the keys that the Store must still be told about. Beyond it, the
// Store is told to invalidate all keys.
const mostUntold = 10_000

// untold is a set of keys whose invalidation the Store must still be told about. A key
// that changes again while the Store is being told stays in the set.
type untold struct {
	n atomic.Int64 // number of keys, plus one for all; while 0, has takes no lock

	mu      sync.Mutex
	keys    map[string]untoldKey
	all     uint64 // number of the last change of all keys; 0 if there is none
	changes uint64
}

type untoldKey struct {
	key    string
	change uint64   // number of the last change of the key
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
	if token != "" && len(k.tokens) < 100 { // further fences fall by themselves
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

// snapshot returns the keys in the set, and the change of all keys, or 0, which the
// Store must be told about first.
func (u *untold) snapshot() (keys []untoldKey, all uint64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, k := range u.keys {
		keys = append(keys, k)
	}
	return keys, u.all
}

// told removes a key unless it has changed again.
func (u *untold) told(k untoldKey) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.keys[k.key].change == k.change {
		delete(u.keys, k.key)
	}
	u.count()
}

// toldAll removes everything that has not changed since, except fences.
func (u *untold) toldAll(change uint64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.all == change {
		u.all = 0
	}
	maps.DeleteFunc(u.keys, func(_ string, k untoldKey) bool { return k.change <= change && len(k.tokens) == 0 })
	u.count()
}

// trusts reports whether the value of key in the Store may be used.
func (s *shared[K, V]) trusts(key string) bool { return !s.untold.has(key) && !s.doubted.has(key) }

// catchUp makes sure that a goroutine is telling the Store what it has missed.
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

// caughtUp reports whether there is nothing left to tell. The goroutine of catchUp then
// ends.
func (s *shared[K, V]) caughtUp() bool {
	s.behind.Lock()
	defer s.behind.Unlock()
	s.catchingUp = s.untold.len() > 0 || s.doubted.len() > 0 || s.abandoned.len() > 0
	return !s.catchingUp
}

// tellUntold tells the Store once and returns the first error.
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
			s.c.tellAll(ctx, EventReinvalidated, nil)
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
			if failures++; failures > 1 { // the whole Store is down
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
			s.c.tellAll(ctx, EventReinvalidated, nil)
		}
	}
	return nil
}

// close stops the background goroutines and tells the Store one last time.
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
	failed := &InvalidateError{Name: s.c.cfg().Name, Err: err}
	if all == 0 {
		for _, k := range keys {
			failed.Keys = append(failed.Keys, k.key)
		}
		slices.Sort(failed.Keys)
	}
	return failed
}

// recent records what the Store was told last. A Store that fails over to a lagging
// replica forgets some of it, and is told again after the connection was lost.
type recent struct {
	mu    sync.Mutex
	tells [512]tell
	next  int
}

type tell struct {
	key  string
	all  bool // all keys
	at   time.Duration
	told bool // false if nothing was noted here yet
}

// recentFor is the replication lag that is covered, unless the Store was told more than
// len(recent.tells) times in that time.
const recentFor = 10 * time.Second

func (r *recent) note(t tell) {
	r.mu.Lock()
	defer r.mu.Unlock()
	t.told = true
	r.tells[r.next] = t
	r.next = (r.next + 1) % len(r.tells)
}

// since returns what was told at or after a time.
func (r *recent) since(at time.Duration) (tells []tell) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range r.tells {
		if t.told && t.at >= at {
			tells = append(tells, t)
		}
	}
	return tells
}

// doubtRecent stops this process from using the Store for the keys that it was told
// about recently, until it has been told again.
func (s *shared[K, V]) doubtRecent() {
	tells := s.recent.since(s.c.now() - recentFor)
	for _, t := range tells {
		if t.all {
			s.doubted.addAll()
		} else {
			s.doubted.add(t.key, "")
		}
	}
	if len(tells) > 0 {
		s.catchUp()
	}
}
