// Package keyed provides a bounded table of members by key, which creates members on demand and evicts
// those that are idle or whose room is needed.
package keyed

import (
	"iter"
	"sync"
	"sync/atomic"
	"time"
)

// A Rule configures how a [Table] creates and evicts its members. Except for Evicted, its functions are
// called while the table is locked: they must be fast, and must not use the table.
type Rule[K comparable, V any] struct {
	// Make initializes the value of a new member. v stays valid, and is the argument of InUse and Evict.
	Make func(key K, v *V)
	// InUse reports whether evicting a member would lose more than its counters, such as an open breaker.
	// Nil means that no unpinned member is in use.
	InUse func(v *V) bool
	// Evict, if not nil, is called before a member is evicted.
	Evict func(v *V)
	// Evicted, if not nil, is called after a member was evicted, without the lock.
	Evicted func(v V)
	// MaxKeys is the maximum number of members.
	MaxKeys int
	// IdleAfter is how long a member must have been unused to be evicted although there is room. If it is
	// negative, members are evicted only to make room.
	IdleAfter time.Duration
	// KeepStrays makes a key that has shared the overflow stay with it while the overflow is in use, but for
	// at most a minute. Otherwise it could take a whole budget from the overflow and another from a member.
	KeepStrays bool
}

// A Table holds one member for each key. It evicts a member that is idle or whose room is needed, the least
// recently used first, but never one that is pinned or in use. If the table is full of those, new keys
// share one more member, the overflow.
type Table[K comparable, V any] struct {
	rule Rule[K, V]

	mu       sync.Mutex
	members  map[K]*Member[K, V]
	ends     Member[K, V] // next is the least recently used member, prev the most recently used one
	overflow Member[K, V]
	strays   map[K]time.Duration // when keys came to share the overflow, since began
}

// A Member is the entry of a key.
type Member[K comparable, V any] struct {
	Value      V
	Key        K
	prev, next *Member[K, V] // nil in the overflow
	used       atomic.Int64  // when it was last pinned or unpinned, in nanoseconds since began
	pins       atomic.Int32  // incremented under the lock, so that it stays 0 during an eviction
}

const (
	// maxTries limits how many members an insert checks for one that it can evict. Otherwise an insert into
	// a table full of pinned members would check all of them.
	maxTries = 16
	// brief is how long a call may take for Unpin to leave its member where Pin has put it in the order of
	// use. It saves such calls a second acquisition of the lock.
	brief = time.Millisecond

	strayFor  = time.Minute // how long a key that has shared the overflow stays with it
	maxStrays = 1000        // if more keys come, all of them may get members
)

// began is the origin of all times here: a Duration takes a third of a Time's memory.
var began = time.Now()

// NewTable returns a Table. It creates the overflow, with the zero key.
func NewTable[K comparable, V any](rule Rule[K, V]) *Table[K, V] {
	t := &Table[K, V]{rule: rule, members: make(map[K]*Member[K, V])}
	t.ends.prev, t.ends.next = &t.ends, &t.ends
	rule.Make(t.overflow.Key, &t.overflow.Value)
	return t
}

// Overflow returns the member that keys without room share.
func (t *Table[K, V]) Overflow() *Member[K, V] { return &t.overflow }

// Pin returns the member for key, which it creates if there is room, or the overflow. The member is not
// evicted before Unpin is called.
func (t *Table[K, V]) Pin(key K) *Member[K, V] {
	now := time.Since(began)
	if m := t.pinExisting(key, now); m != nil {
		return m
	}
	return t.pinNew(key, now)
}

func (t *Table[K, V]) pinExisting(key K, now time.Duration) *Member[K, V] {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.members[key]
	if m != nil {
		m.pins.Add(1)
		t.touch(m, now)
	}
	return m
}

func (t *Table[K, V]) pinNew(key K, now time.Duration) (m *Member[K, V]) {
	var evicted []V
	defer func() { // after the lock is released, and even if Make panics
		for _, v := range evicted {
			t.rule.Evicted(v)
		}
	}()
	t.mu.Lock()
	defer t.mu.Unlock()
	m = t.members[key] // another goroutine may have created it since pinExisting
	switch {
	case m != nil:
		t.touch(m, now)
	case key != key || t.isStray(key, now): // a NaN would never be found again
		m = &t.overflow
	default:
		if evicted = t.makeRoom(now); len(t.members) >= t.rule.MaxKeys {
			m = &t.overflow
			t.addStray(key, now)
			break
		}
		key = detach(key)
		m = &Member[K, V]{Key: key}
		t.rule.Make(key, &m.Value)
		t.members[key] = m
		m.linkBefore(&t.ends)
		m.used.Store(int64(now))
	}
	m.pins.Add(1)
	return m
}

// Unpin ends one Pin.
func (t *Table[K, V]) Unpin(m *Member[K, V]) {
	if m != &t.overflow {
		now := time.Since(began)
		if was := m.used.Swap(int64(now)); now-time.Duration(was) >= brief {
			t.mu.Lock()
			t.touch(m, now)
			t.mu.Unlock()
		}
	}
	m.pins.Add(-1) // last: the member may be evicted from here on
}

// touch makes m the most recently used member. t.mu is held.
func (t *Table[K, V]) touch(m *Member[K, V], now time.Duration) {
	m.used.Store(int64(now))
	if m.next != &t.ends {
		m.unlink()
		m.linkBefore(&t.ends)
	}
}

// isStray reports whether key stays with the overflow although there may be room. t.mu is held.
func (t *Table[K, V]) isStray(key K, now time.Duration) bool {
	since, stray := t.strays[key]
	if stray && t.overflow.pins.Load() == 0 && !t.inUse(&t.overflow) {
		t.strays = nil
		return false
	}
	return stray && now-since < strayFor
}

// addStray records that key shares the overflow, if the rule requires it. t.mu is held.
func (t *Table[K, V]) addStray(key K, now time.Duration) {
	if !t.rule.KeepStrays {
		return
	}
	if t.strays == nil || len(t.strays) >= maxStrays {
		t.strays = make(map[K]time.Duration)
	}
	t.strays[detach(key)] = now
}

func (t *Table[K, V]) inUse(m *Member[K, V]) bool {
	return t.rule.InUse != nil && t.rule.InUse(&m.Value)
}

// makeRoom evicts the idle members and, if the table is full, one more. It checks the least recently used
// members, and moves those that must stay behind the others, so that the next insert checks different ones.
// t.mu is held.
func (t *Table[K, V]) makeRoom(now time.Duration) (evicted []V) {
	for range min(maxTries, len(t.members)) {
		m := t.ends.next
		full := len(t.members) >= t.rule.MaxKeys
		idle := t.rule.IdleAfter >= 0 && now-time.Duration(m.used.Load()) >= t.rule.IdleAfter
		if !full && !idle {
			break
		}
		m.unlink()
		m.linkBefore(&t.ends) // before InUse, which may panic
		if m.pins.Load() > 0 || t.inUse(m) {
			continue
		}
		m.unlink()
		delete(t.members, m.Key)
		if t.rule.Evict != nil {
			t.rule.Evict(&m.Value)
		}
		if t.rule.Evicted != nil {
			evicted = append(evicted, m.Value)
		}
	}
	return evicted
}

func (m *Member[K, V]) linkBefore(other *Member[K, V]) {
	m.prev, m.next = other.prev, other
	m.prev.next, other.prev = m, m
}

func (m *Member[K, V]) unlink() {
	m.prev.next, m.next.prev = m.next, m.prev
}

// Get returns the member for key, or nil. The member may be evicted at any time, and Get does not count as
// use.
func (t *Table[K, V]) Get(key K) *Member[K, V] {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.members[key]
}

// Len returns the number of members, without the overflow.
func (t *Table[K, V]) Len() int {
	n := 0
	t.View(func(members int) { n = members })
	return n
}

// View calls f with the number of members while the table is locked.
func (t *Table[K, V]) View(f func(members int)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f(len(t.members))
}

// Locked calls f while the table is locked, and returns all members of that moment, pinned, without the
// overflow. Other members are created later, so that Make sees what f has changed. The members stay pinned
// until the result has been passed to [Table.Each].
func (t *Table[K, V]) Locked(f func()) []*Member[K, V] {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make([]*Member[K, V], 0, len(t.members))
	for _, m := range t.members {
		m.pins.Add(1)
		all = append(all, m)
	}
	f()
	return all
}

// Each yields pinned members, without the lock, and then unpins them. That does not count as use, or a
// caller that reads metrics would keep idle members from being evicted.
func (t *Table[K, V]) Each(pinned []*Member[K, V]) iter.Seq[*Member[K, V]] {
	return func(yield func(*Member[K, V]) bool) {
		defer func() { // even if yield panics
			for _, m := range pinned {
				m.pins.Add(-1)
			}
		}()
		for _, m := range pinned {
			if !yield(m) {
				return
			}
		}
	}
}
