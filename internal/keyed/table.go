// Package keyed is a table of members by key: made on demand, bounded, and evicted when they are
// idle or their place is needed.
package keyed

import (
	"iter"
	"sync"
	"time"
)

// A Rule says how a [Table] makes and evicts its members. Its functions, but for Evicted, are
// called under the lock of the Table: they are quick, and do not use the Table.
type Rule[K comparable, V any] struct {
	// Make returns the member of a key.
	Make func(K) V
	// Needed reports whether eviction would lose more of a member than its counters, such as an open
	// breaker. A nil Needed is false.
	Needed func(*V) bool
	// Evict is called before a member is evicted, unless it is nil.
	Evict func(*V)
	// Evicted is called after a member was evicted, without the lock, unless it is nil.
	Evicted func(V)
	// MaxKeys is how many members there are, at most.
	MaxKeys int
	// Idle is for how long a member must not have been used to be evicted although there is
	// room. If it is negative, members are evicted only to make room.
	Idle time.Duration
}

// A Table holds one member for each key, made on demand. It evicts a member that is idle or
// whose place is needed, the least recently used first, but none that is pinned or needed.
// While it is full of those, all new keys share the overflow, a member of its own.
type Table[K comparable, V any] struct {
	rule Rule[K, V]

	mu       sync.Mutex
	members  map[K]*Member[K, V]
	ends     Member[K, V] // next is the least recently used member, prev the most
	overflow Member[K, V]
}

// A Member is what a Table holds for a key.
type Member[K comparable, V any] struct {
	Value      V
	Key        K
	prev, next *Member[K, V] // nil in the overflow
	used       time.Duration // since began, when it was pinned or unpinned last; a Time takes three words
	pins       int32
}

// tries is how many members an insert looks at for one to evict: without a bound, an insert
// into a table full of pinned members would look at all of them.
const tries = 16

var began = time.Now()

// NewTable returns a Table with its overflow, which is made with the zero key.
func NewTable[K comparable, V any](rule Rule[K, V]) *Table[K, V] {
	t := &Table[K, V]{rule: rule, members: make(map[K]*Member[K, V])}
	t.ends.prev, t.ends.next = &t.ends, &t.ends
	var zero K
	t.overflow.Value = rule.Make(zero)
	return t
}

// Overflow returns the member that keys without a place share.
func (t *Table[K, V]) Overflow() *Member[K, V] { return &t.overflow }

// Pin returns the member of key, or the overflow. A member is not evicted until Unpin.
func (t *Table[K, V]) Pin(key K) *Member[K, V] {
	var pinned *Member[K, V]
	t.use(key, func(m *Member[K, V]) {
		pinned = m
		m.pins++
	})
	return pinned
}

// Do calls f with the value of key, or of the overflow, under the lock of the table. It is for
// values that are used in no time, and need no pin.
func (t *Table[K, V]) Do(key K, f func(v *V)) {
	t.use(key, func(m *Member[K, V]) { f(&m.Value) })
}

// use calls f with the member of key under the lock.
func (t *Table[K, V]) use(key K, f func(*Member[K, V])) {
	var evicted []V
	defer func() { // after the lock is given back
		for _, v := range evicted {
			t.rule.Evicted(v)
		}
	}()
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Since(began)
	m := t.members[key]
	switch {
	case m != nil:
		m.unlink()
	case key != key: // a NaN would never be found again
		f(&t.overflow)
		return
	default:
		if evicted = t.makeRoom(now); len(t.members) >= t.rule.MaxKeys {
			f(&t.overflow)
			return
		}
		key = detach(key)
		m = &Member[K, V]{Key: key, Value: t.rule.Make(key)}
		t.members[key] = m
	}
	m.linkBefore(&t.ends)
	m.used = now
	f(m)
}

// Unpin ends one Pin.
func (t *Table[K, V]) Unpin(m *Member[K, V]) {
	if m == &t.overflow {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	m.pins--
	m.used = time.Since(began)
	m.unlink()
	m.linkBefore(&t.ends)
}

// makeRoom evicts the members that are idle, and one more if the table is full. It looks at
// the least recently used ones, and moves those that must stay behind the others, so that the
// next insert looks at different ones. t.mu is held.
func (t *Table[K, V]) makeRoom(now time.Duration) (evicted []V) {
	for range min(tries, len(t.members)) {
		m := t.ends.next
		full := len(t.members) >= t.rule.MaxKeys
		idle := t.rule.Idle >= 0 && now-m.used >= t.rule.Idle
		if !full && !idle {
			break
		}
		m.unlink()
		m.linkBefore(&t.ends) // before Needed, which may panic
		if m.pins > 0 || t.rule.Needed != nil && t.rule.Needed(&m.Value) {
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

// Len returns the number of members, without the overflow.
func (t *Table[K, V]) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.members)
}

// Locked calls f under the lock of the table, with all members but the overflow, pinned. What
// f changes holds for each member that is not among them, since these are made later. They
// stay pinned while the result is not unpinned: see [Table.Each].
func (t *Table[K, V]) Locked(f func()) []*Member[K, V] {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make([]*Member[K, V], 0, len(t.members))
	for _, m := range t.members {
		m.pins++
		all = append(all, m)
	}
	f()
	return all
}

// Each yields pinned members, without the lock, and then unpins them. That does not count as a use,
// or who reads figures would keep idle members from being evicted.
func (t *Table[K, V]) Each(pinned []*Member[K, V]) iter.Seq[*Member[K, V]] {
	return func(yield func(*Member[K, V]) bool) {
		defer func() { // also when yield panics
			t.mu.Lock()
			defer t.mu.Unlock()
			for _, m := range pinned {
				m.pins--
			}
		}()
		for _, m := range pinned {
			if !yield(m) {
				return
			}
		}
	}
}
