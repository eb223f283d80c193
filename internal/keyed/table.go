// Package keyed provides a bounded table that holds a member for each key. The table creates members when they are
// needed. It evicts idle members, and also other members if it needs room.
package keyed

import (
	"iter"
	"sync"
	"sync/atomic"
	"time"
)

// A Rule configures how a [Table] creates and evicts its members. The table is locked during calls to Make,
// InUse and Evict. These functions must be fast and must not use the table.
type Rule[K comparable, V any] struct {
	// Make initializes the Value of a new member, whose Key is set. The Value is not moved, so a pointer to it stays
	// valid. This pointer is later passed to InUse and Evict.
	Make func(m *Member[K, V])
	// InUse reports whether an eviction would lose state that matters, such as an open breaker. Counters do not matter.
	// If InUse is nil, each member that is not pinned can be evicted.
	InUse func(v *V) bool
	// Evict, if not nil, is called before a member is evicted, with the table locked.
	Evict func(v *V)
	// Evicted, if not nil, is called after a member was evicted, without the lock of the table.
	Evicted func(v V)
	// MaxKeys is the maximum number of members.
	MaxKeys int
	// IdleAfter is the time after which an unused member may be evicted even if there is room. If IdleAfter is negative,
	// members are evicted only to make room.
	IdleAfter time.Duration
	// KeepStrays applies to a key that has shared the overflow. If KeepStrays is set, the key continues to use the
	// overflow while the overflow is in use, but at most for a minute. Otherwise the key could use up the overflow's
	// budget and then also its member's budget.
	KeepStrays bool
}

// A Table holds one member for each key. It evicts members that are idle. If it needs room, it evicts the least
// recently used member. It never evicts a member that is pinned or in use. If the table cannot make room, all new
// keys share one extra member, which is called the overflow.
type Table[K comparable, V any] struct {
	rule Rule[K, V]

	mu       sync.Mutex
	members  map[K]*Member[K, V]
	ends     Member[K, V] // next is the least recently used member, and prev the most recently used
	overflow Member[K, V]
	strays   map[K]time.Duration // the keys that share the overflow, with the times at which they started to do so
}

// A Member is the entry of a key in a [Table].
type Member[K comparable, V any] struct {
	Value      V
	Key        K
	prev, next *Member[K, V] // neighbors in the order of use; nil for the overflow
	used       atomic.Int64  // time of the last Pin or Unpin, in nanoseconds since began
	pins       atomic.Int32  // number of pins; incremented only with the lock held, so it stays 0 during an eviction
}

const (
	// maxTries limits the number of members that an insert checks to find a member that can be evicted. Without this
	// limit, an insert into a table full of pinned members would check all of them.
	maxTries = 16
	// brief is the duration of a short call. After a short call, Unpin does not move the member in the order of use, so
	// the call acquires the lock only once.
	brief = time.Millisecond

	strayFor  = time.Minute // maximum time for which a key that has shared the overflow continues to use it
	maxStrays = 1000        // maximum length of Table.strays; if the map is full, the next stray clears it
)

// began is the time from which all times in this package are counted. Times are stored as Durations, because a Time
// takes three times as much memory.
var began = time.Now()

// NewTable returns a Table. It creates the overflow with the zero key.
func NewTable[K comparable, V any](rule Rule[K, V]) *Table[K, V] {
	t := &Table[K, V]{rule: rule, members: make(map[K]*Member[K, V])}
	t.ends.prev, t.ends.next = &t.ends, &t.ends
	rule.Make(&t.overflow)
	return t
}

// Overflow returns the member that keys share if the table has no room for them.
func (t *Table[K, V]) Overflow() *Member[K, V] { return &t.overflow }

// Pin returns the member for key, and creates it if necessary. If there is no room for a new member, Pin returns the
// overflow. The member is not evicted before Unpin is called.
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
	m = t.members[key] // another goroutine may have created the member since pinExisting
	switch {
	case m != nil:
		t.touch(m, now)
	case key != key || t.isStray(key, now): // no lookup would find the member of a NaN
		m = &t.overflow
	default:
		if evicted = t.makeRoom(now); len(t.members) >= t.rule.MaxKeys {
			m = &t.overflow
			t.addStray(key, now)
			break
		}
		key = detach(key)
		m = &Member[K, V]{Key: key}
		t.rule.Make(m)
		t.members[key] = m
		m.linkBefore(&t.ends)
		m.used.Store(int64(now))
	}
	m.pins.Add(1)
	return m
}

// Unpin undoes one call to Pin.
func (t *Table[K, V]) Unpin(m *Member[K, V]) {
	if m != &t.overflow {
		now := time.Since(began)
		if was := m.used.Swap(int64(now)); now-time.Duration(was) >= brief {
			t.mu.Lock()
			t.touch(m, now)
			t.mu.Unlock()
		}
	}
	m.pins.Add(-1) // last, because the member may be evicted afterwards
}

// touch makes m the most recently used member. The caller holds t.mu.
func (t *Table[K, V]) touch(m *Member[K, V], now time.Duration) {
	m.used.Store(int64(now))
	if m.next != &t.ends {
		m.unlink()
		m.linkBefore(&t.ends)
	}
}

// isStray reports whether key must use the overflow even if there is room. The caller holds t.mu.
func (t *Table[K, V]) isStray(key K, now time.Duration) bool {
	since, stray := t.strays[key]
	if stray && t.overflow.pins.Load() == 0 && !t.inUse(&t.overflow) {
		t.strays = nil
		return false
	}
	return stray && now-since < strayFor
}

// addStray records that key shares the overflow, if KeepStrays is set. The caller holds t.mu.
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

// makeRoom evicts idle members. If the table is still full, makeRoom evicts one more member. It checks at most maxTries
// members, the least recently used member first. It moves members that must stay to the other end of the order of use.
// Then the next insert checks different members. The caller holds t.mu.
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

// Get returns the member for key, or nil. The member may be evicted at any time. Get does not count as a use of the
// member.
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

// Locked calls f while the table is locked, and returns all members except the overflow. Members that are created
// later see the changes that f makes. The returned members are pinned until the result has been passed to
// [Table.Each].
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

// Each yields pinned members and then unpins them. The table is not locked. Unlike Unpin, Each does not count as a
// use of the members. Otherwise, a caller that reads metrics would keep idle members from being evicted.
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
