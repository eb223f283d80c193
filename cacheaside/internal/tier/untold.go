package tier

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
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
	u.all = u.changes // the keys too: they can be told while one shard is down
	u.count()
}

func (u *untold) count() {
	n := int64(len(u.keys))
	if u.all > 0 {
		n++
	}
	u.n.Store(n)
}

// snapshot returns the keys in the set, in the order of their changes, and the change of all
// keys, or 0.
func (u *untold) snapshot() (keys []untoldKey, all uint64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	keys = slices.SortedFunc(maps.Values(u.keys), func(a, b untoldKey) int { return cmp.Compare(a.change, b.change) })
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

// toldAll removes the change of all keys, unless it has been made again.
func (u *untold) toldAll(change uint64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.all == change {
		u.all = 0
	}
	u.count()
}
