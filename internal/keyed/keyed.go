// Package keyed holds the members of a group, one for each key: made on demand,
// bounded in number, evicted when idle.
//
//	members := keyed.New(keyed.Config[string, *Bulkhead]{
//		Make: func(key string) *Bulkhead { return New(configOf(key)) },
//		Max:  10_000,
//		Idle: 10 * time.Minute,
//		Needed: (*Bulkhead).busy,
//	})
//	e := members.Pin("tenant 7")
//	if e == nil { ... } // no room: a member that all such keys share, or a refusal
//	defer e.Unpin()
//	return e.Value.Do(ctx, fn)
//
// A key has one live member at a time: a member is evicted only while it is not
// pinned, and its key gets a new one only after that. There is no goroutine and no
// sweep: each insert looks at a few members and evicts idle ones.
package keyed

import (
	"crypto/sha256"
	"fmt"
	"hash/maphash"
	"iter"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/go-resilience/resilience/internal/invalid"
)

// Shards is the number of shards of a [Map].
const Shards = 32

const (
	glances = 4  // members that an insert looks at for idle ones
	search  = 64 // members that an insert into a full map looks at for one to evict
)

// Config says how a [Map] makes its members and how long it keeps them.
type Config[K comparable, V any] struct {
	// Make makes the member of a key; required. It runs without a lock, and for
	// one key perhaps on several goroutines at once: one result is kept.
	Make func(K) V
	// Max is the most members there are at any moment; required. SetBounds changes it.
	Max int
	// Idle is how long a member must not have been pinned to be evicted while
	// there is room. Zero or less: members are evicted for room only. SetBounds changes it.
	Idle time.Duration
	// Needed reports whether a member must not be evicted now, because its state would
	// be lost; nil: no member is needed. It is called for a member that is not pinned,
	// with a lock held: it must be quick, and not use the map.
	Needed func(V) bool
	// Added, if not nil, is told of each member that is added, with the lock of its shard
	// held and before any other goroutine can see the member. A group whose settings have
	// changed since Make brings the member up to date here; see [Map.All].
	Added func(V)
	// Evict, if not nil, is told of each member that is evicted, with the lock of its
	// shard held. Evict keeps the counts of evicted members, and [Map.Shards] adds those
	// of the present ones, so that a sum loses no count and has none twice.
	Evict func(shard int, v V)
}

// A Map holds one member for each key. It is safe for concurrent use.
//
// A full map evicts a member to make room for a new key. It looks at a few members and
// evicts the first that was not used lately. If all of them were, it evicts one that was
// used once, or else one that was used again. It never evicts a member that is pinned or
// Needed. If it finds no member to evict, the new key gets none and the map
// remembers nothing of it, so the memory is bounded for any number of keys.
type Map[K comparable, V any] struct {
	cfg    Config[K, V]
	max    atomic.Int64
	idle   atomic.Int64
	seed   maphash.Seed
	start  time.Time
	size   atomic.Int64 // members, and places reserved for those being made
	next   atomic.Uint64
	shards [Shards]shard[K, V]
}

type shard[K comparable, V any] struct {
	mu   sync.Mutex
	m    map[K]*Entry[K, V]
	ring []*Entry[K, V] // the same members, to go round
	hand int

	number int
	_      [64]byte // keeps a busy shard off its neighbor's cache line
}

// An Entry is a member with its key, as [Map.Pin] returns it.
type Entry[K comparable, V any] struct {
	Key   K
	Value V

	pins   atomic.Int64 // or evicted, if the member has left the map
	recent atomic.Int32 // how often the hand comes by until it counts as not used lately
	seen   time.Duration
	index  int // in the ring
}

const evicted = -1

// How recent a member is that was used since the hand came by.
const (
	once  = 1 // it was made
	again = 2 // it was there already
)

// Other is the text, in place of a key, of the one member that all keys without a member
// of their own share.
const Other = "(other keys)"

const maxText = 100

// Text returns the text of a key in errors, events and figures: at most its first 100
// bytes, and no part of a character.
func Text[K any](key K) string {
	text, ok := any(key).(string)
	if !ok {
		text = fmt.Sprint(key)
	}
	if len(text) <= maxText {
		return strings.Clone(text)
	}
	end := maxText
	for end > maxText-utf8.UTFMax && !utf8.RuneStart(text[end]) {
		end--
	}
	return strings.Clone(text[:end])
}

// Short returns a key from outside as a table keeps it: one of more than 200 bytes is its
// SHA-256, so that keys do not fill the memory.
func Short(key string) string {
	if len(key) <= 200 {
		return key
	}
	return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(key)))
}

// Label returns how an error shows the member of a key: "users[tenant 7]". Either part may
// be empty.
func Label(name, key string) string {
	if key == "" {
		return name
	}
	return name + "[" + key + "]"
}

// New returns an empty map.
func New[K comparable, V any](cfg Config[K, V]) *Map[K, V] {
	m := &Map[K, V]{cfg: cfg, seed: maphash.MakeSeed(), start: time.Now()}
	m.max.Store(int64(cfg.Max))
	m.idle.Store(int64(cfg.Idle))
	for i := range m.shards {
		m.shards[i].m = make(map[K]*Entry[K, V])
		m.shards[i].number = i
	}
	return m
}

// Pin returns the member of key, made if there is none, and keeps it in the map
// until [Entry.Unpin]. It returns nil if there is no room and none can be made, and
// for a key that does not equal itself, such as NaN: a member of such a key could
// never be found again. For a key that has a member it allocates nothing.
func (m *Map[K, V]) Pin(key K) *Entry[K, V] {
	s := &m.shards[maphash.Comparable(m.seed, key)%Shards]
	s.mu.Lock()
	e := s.m[key]
	if e != nil {
		e.pin()
	}
	s.mu.Unlock()
	if e == nil {
		return m.insert(s, key)
	}
	return e
}

func (m *Map[K, V]) insert(s *shard[K, V], key K) *Entry[K, V] {
	if key != key || !m.reserve() {
		return nil
	}
	inserted := false
	defer func() {
		if !inserted { // another was faster, or Make has panicked
			m.size.Add(-1)
		}
	}()
	made := &Entry[K, V]{Key: key, Value: m.cfg.Make(key)}
	now := time.Since(m.start)

	s.mu.Lock()
	defer s.mu.Unlock()
	m.evictIdle(s, now)
	if e := s.m[key]; e != nil {
		e.pin()
		return e
	}
	if m.cfg.Added != nil {
		m.cfg.Added(made.Value)
	}
	made.hold()
	made.seen = now
	made.index = len(s.ring)
	s.m[key] = made
	s.ring = append(s.ring, made)
	inserted = true
	return made
}

// reserve takes a place for a member that is about to be made, evicting another
// if the map is full. It reports whether there is one.
func (m *Map[K, V]) reserve() bool {
	for {
		n := m.size.Load()
		if n >= m.max.Load() {
			if !m.evictAny() {
				return false
			}
		} else if m.size.CompareAndSwap(n, n+1) {
			if n < m.max.Load() {
				return true
			}
			m.size.Add(-1) // SetBounds has lowered Max meanwhile
		}
	}
}

// SetBounds changes Max and Idle. If there are more members than most, it changes nothing
// and returns an error about the field MaxKeys of the struct config. The caller sees to it
// that calls of SetBounds do not overlap.
func (m *Map[K, V]) SetBounds(config string, most int, idle time.Duration) error {
	was := m.max.Load()
	if m.size.Load() <= int64(most) {
		m.max.Store(int64(most))
		if m.size.Load() <= int64(most) { // no member was added in between
			m.idle.Store(int64(idle))
			return nil
		}
		m.max.Store(was)
	}
	f := invalid.Fields{Type: config}
	f.Need(false, "MaxKeys", most, fmt.Sprintf("at least the %d keys that the group holds", m.Len()))
	return f.Err()
}

// evictIdle lets the hand of a locked shard pass a few members and evicts those
// that have been idle for long enough.
func (m *Map[K, V]) evictIdle(s *shard[K, V], now time.Duration) {
	idle := time.Duration(m.idle.Load())
	if idle <= 0 {
		return
	}
	for range min(glances, len(s.ring)) {
		e := s.pass()
		if e.fade() > 0 || e.pins.Load() > 0 {
			e.seen = now
		} else if now-e.seen >= idle {
			m.evict(s, e)
		}
	}
}

// evictAny makes room in a full map and reports whether it could. It begins at
// another shard each time and locks one at a time.
func (m *Map[K, V]) evictAny() bool {
	var recent *Entry[K, V] // the least recent, if all that it looks at are recent
	var recentIn *shard[K, V]
	least := int32(again + 1)
	first, looks := m.next.Add(1), search
	for i := range uint64(Shards) {
		s := &m.shards[(first+i)%Shards]
		s.mu.Lock()
		for range min(looks, len(s.ring)) {
			looks--
			e := s.pass()
			if n := e.fade(); n > 0 {
				e.seen = time.Since(m.start)
				if n < least && m.evictable(e) {
					recent, recentIn, least = e, s, n
				}
			} else if m.evict(s, e) {
				s.mu.Unlock()
				return true
			}
		}
		s.mu.Unlock()
		if looks == 0 {
			break
		}
	}
	if recent == nil {
		return false
	}
	recentIn.mu.Lock()
	defer recentIn.mu.Unlock()
	return m.evict(recentIn, recent)
}

func (m *Map[K, V]) evictable(e *Entry[K, V]) bool {
	return e.pins.Load() == 0 && (m.cfg.Needed == nil || !m.cfg.Needed(e.Value))
}

// evict takes e out of its locked shard, unless it is pinned or Needed.
func (m *Map[K, V]) evict(s *shard[K, V], e *Entry[K, V]) bool {
	if !e.pins.CompareAndSwap(0, evicted) {
		return false
	}
	// Only now, when All cannot hold it any more, is its state final.
	if m.cfg.Needed != nil && m.cfg.Needed(e.Value) {
		e.pins.Store(0)
		return false
	}
	last := len(s.ring) - 1
	s.ring[e.index] = s.ring[last]
	s.ring[e.index].index = e.index
	s.ring[last] = nil
	s.ring = s.ring[:last]
	delete(s.m, e.Key)
	m.size.Add(-1)
	if m.cfg.Evict != nil {
		m.cfg.Evict(s.number, e.Value)
	}
	return true
}

// pass returns the member under the hand of a locked shard and moves the hand on.
func (s *shard[K, V]) pass() *Entry[K, V] {
	if s.hand >= len(s.ring) {
		s.hand = 0
	}
	e := s.ring[s.hand]
	s.hand++
	return e
}

// Get returns the member of key, if there is one. It does not pin the member and does
// not count as use.
func (m *Map[K, V]) Get(key K) (V, bool) {
	s := &m.shards[maphash.Comparable(m.seed, key)%Shards]
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.m[key]; e != nil {
		return e.Value, true
	}
	var none V
	return none, false
}

// Len returns the number of members, those being made included.
func (m *Map[K, V]) Len() int { return int(m.size.Load()) }

// All returns the members, each pinned while it is yielded. It holds no lock
// meanwhile: a member that is added or evicted may or may not be among them. Being
// yielded does not count as use.
//
// To change all members, store the new settings where Make and Added find them, and then
// change what All yields. A member that was made with the old settings is either yielded,
// or added later, and then Added is told of it.
func (m *Map[K, V]) All() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		for i := range m.shards {
			s := &m.shards[i]
			s.mu.Lock()
			entries := slices.Clone(s.ring)
			s.mu.Unlock()
			for _, e := range entries {
				if e.hold() && !e.yield(yield) {
					return
				}
			}
		}
	}
}

// Shards calls f for each shard with its members, and with its lock held: f must be
// quick, and not use the map. No member of the shard comes or goes meanwhile.
func (m *Map[K, V]) Shards(f func(shard int, members iter.Seq2[K, V])) {
	for i := range m.shards {
		m.shards[i].visit(f)
	}
}

func (s *shard[K, V]) visit(f func(int, iter.Seq2[K, V])) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s.number, func(yield func(K, V) bool) {
		for _, e := range s.ring {
			if !yield(e.Key, e.Value) {
				return
			}
		}
	})
}

func (e *Entry[K, V]) yield(to func(K, V) bool) bool {
	defer e.release()
	return to(e.Key, e.Value)
}

// Unpin ends one Pin.
func (e *Entry[K, V]) Unpin() {
	e.touch(once) // its idle time begins now
	e.release()
}

// End is Unpin, as the end of what was held.
func (e *Entry[K, V]) End(error) { e.Unpin() }

// Begin calls begin with the member of a pinned e, for a call that is not one function.
// The first call of done ends the call and unpins e, and further calls do nothing. If begin
// returns an error, or a hook in it panics, Begin unpins e.
func (e *Entry[K, V]) Begin(begin func(V) (done func(error), err error)) (done func(error), err error) {
	begun := false
	defer func() {
		if !begun {
			e.Unpin()
		}
	}()
	end, err := begin(e.Value)
	if err != nil {
		return nil, err
	}
	begun = true
	var over atomic.Bool
	return func(err error) {
		if !over.Swap(true) {
			defer e.Unpin()
			end(err)
		}
	}, nil
}

// pin is for an entry of a locked shard.
func (e *Entry[K, V]) pin() {
	e.hold()
	e.touch(again)
}

// hold reports whether e was still in the map, and is pinned.
func (e *Entry[K, V]) hold() bool {
	for {
		n := e.pins.Load()
		if n == evicted {
			return false
		}
		if e.pins.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (e *Entry[K, V]) release() {
	if e.pins.Add(-1) < 0 {
		panic("keyed: Unpin without a Pin")
	}
}

// touch notes a use of e. It writes only if that changes something: a write at each call
// would take the cache line of a busy member from every other core.
func (e *Entry[K, V]) touch(n int32) {
	if e.recent.Load() < n {
		e.recent.Store(n)
	}
}

// fade returns how recent e was and makes it less recent by one.
func (e *Entry[K, V]) fade() int32 {
	n := e.recent.Load()
	if n > 0 {
		e.recent.CompareAndSwap(n, n-1)
	}
	return n
}
