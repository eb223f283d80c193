// Package keyed is what the groups of all packages are made of: members by key, made on
// demand from the Config of the group, bounded in number, evicted when idle.
//
//	g.members = keyed.New(version, keyed.Kind[K, GroupConfig[K], settings.Version[Config], Breaker]{ ... })
//	e := g.members.Pin("tenant 7")
//	defer e.Unpin()
//	return e.Value.Do(ctx, fn)
//
// A key has one live member at a time: a member is evicted only while it is not
// pinned, and its key gets a new one only after that. There is no goroutine and no
// sweep: each insert looks at a few members and evicts idle ones.
package keyed

import (
	"cmp"
	"fmt"
	"hash/maphash"
	"iter"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/settings"
)

// Bounds are the fields of the same names of the Config of a group.
type Bounds struct {
	MaxKeys   int
	IdleAfter time.Duration
}

// Check records what is wrong with b.
func (b Bounds) Check(f *invalid.Fields, maxKeys int) {
	f.Need(b.MaxKeys >= 0, "MaxKeys", b.MaxKeys, fmt.Sprintf("0 (for %d) or more", maxKeys))
}

// Filled returns the fields of b, the zero ones with their defaults.
func (b Bounds) Filled(maxKeys int, idleAfter time.Duration) (int, time.Duration) {
	return cmp.Or(b.MaxKeys, maxKeys), cmp.Or(b.IdleAfter, idleAfter)
}

// Shards is the number of shards of a [Group]. It is no power of two: the map of a shard of a
// group of a million keys is well filled.
const Shards = 40

const (
	glances = 4  // members that an insert looks at for idle ones
	search  = 64 // members that an insert into a full group looks at for one to evict
)

// A Kind says what a group with the Config G has for members: values V by keys K, which
// follow an E that is made from G.
type Kind[K comparable, G config, E, V any] struct {
	Type   string // the name of G, in errors
	Bounds func(*G) Bounds
	// Fixed returns an error if a field differs that cannot change.
	Fixed func(was, next *G) error
	// Each returns what the members follow under the present Config.
	Each func(*settings.Setting[G]) *E
	// Own returns what the member of key follows instead, forever; nil: what Each returns.
	// It may be nil.
	Own func(g *G, key K) *E
	// Make makes a member in place. It runs without a lock, and for one key perhaps on
	// several goroutines at once: one result is kept. A nil key is that of the member that
	// keys share.
	Make func(v *V, key *K, each *E)
	// Follow has a member follow another E. The lock of its shard may be held.
	Follow func(v *V, each *E)
	// Needed reports whether a member must not be evicted now, because its state would be
	// lost; nil: no member is needed. It is called for a member that is not pinned, with the
	// lock of its shard held: it must be quick, and not use the group.
	Needed func(*V) bool
	// Evict, if not nil, is told of each member that is evicted, with the lock of its shard
	// held. Evict keeps the counts of evicted members, and [Group.Shards] adds those of the
	// present ones, so that a sum loses no count and has none twice.
	Evict func(shard int, key K, v *V)
}

type config interface{ Validate() error }

// A Group holds one member for each key. It is safe for concurrent use.
//
// A full group evicts a member to make room for a new key. It looks at a few members and
// evicts the first that was not used lately. If all of them were, it evicts one that was
// used once, or else one that was used again. It never evicts a member that is pinned or
// Needed. If it finds no member to evict, the new key gets the member that such keys share, and
// the group remembers nothing of it, so the memory is bounded for any number of keys.
type Group[K comparable, G config, E, V any] struct {
	settings.Setting[G]
	kind   Kind[K, G, E, V]
	each   atomic.Pointer[E]
	shared Entry[V]
	max    atomic.Int64
	seed   maphash.Seed // secret, so that nobody can choose keys that meet in a shard
	start  time.Time
	size   atomic.Int64 // members, and places reserved for those being made
	next   atomic.Uint64
	shards [Shards]shard[K, V]
}

type shard[K comparable, V any] struct {
	mu     sync.Mutex
	m      map[K]*Entry[V]
	number int
	_      [64]byte // keeps a busy shard off its neighbor's cache line
}

// An Entry is a member, as [Group.Pin] returns it.
type Entry[V any] struct {
	pins   atomic.Int32 // or evicted, if the member has left the group
	recent uint8        // how often it is looked at until it counts as not used lately
	own    bool         // follows what Own returned
	shared bool
	seen   time.Duration // when it was last looked at while it was recent or pinned

	Value V
}

const evicted = -1

// How recent a member is that was used since it was last looked at.
const (
	once  = 1 // it was made
	again = 2 // it was there already
)

// New returns a group without members.
func New[K comparable, G config, E, V any](cfg G, fill func(G) G, kind Kind[K, G, E, V]) *Group[K, G, E, V] {
	g := &Group[K, G, E, V]{kind: kind, seed: maphash.MakeSeed(), start: time.Now()}
	g.Init(cfg, fill)
	g.max.Store(int64(g.bounds().MaxKeys))
	g.each.Store(kind.Each(&g.Setting))
	for i := range g.shards {
		g.shards[i].m = make(map[K]*Entry[V])
		g.shards[i].number = i
	}
	kind.Make(&g.shared.Value, nil, g.each.Load())
	g.shared.shared = true
	return g
}

func (g *Group[K, G, E, V]) bounds() Bounds { return g.kind.Bounds(g.Load()) }

// Update changes the Config, and all members follow that have nothing of their own. It
// returns an error if there are more of them than the new MaxKeys.
func (g *Group[K, G, E, V]) Update(change func(*G)) error {
	return g.Setting.Update(change, g.admit, g.follow)
}

// Change is Update for a caller who does not know G.
func (g *Group[K, G, E, V]) Change(dry bool, f func(any) error) error {
	admit := g.admit
	if dry {
		admit = func(was, next *G) error {
			if err := g.fixed(was, next); err != nil {
				return err
			}
			return g.fits(int64(g.kind.Bounds(next).MaxKeys), g.max.Load())
		}
	}
	return g.Setting.Change(dry, f, admit, g.follow)
}

func (g *Group[K, G, E, V]) fixed(was, next *G) error {
	if g.kind.Fixed == nil {
		return nil
	}
	return g.kind.Fixed(was, next)
}

func (g *Group[K, G, E, V]) admit(before, next *G) error {
	if err := g.fixed(before, next); err != nil {
		return err
	}
	most, was := int64(g.kind.Bounds(next).MaxKeys), g.max.Load()
	g.max.Store(most) // before the look at size, so that none is added in between
	err := g.fits(most, was)
	if err != nil {
		g.max.Store(was)
	}
	return err
}

func (g *Group[K, G, E, V]) fits(most, was int64) error {
	if held := g.size.Load(); most < was && held > most {
		f := invalid.Fields{Type: g.kind.Type}
		f.Need(false, "MaxKeys", most, fmt.Sprintf("at least the %d keys that the group holds", held))
		return f.Err()
	}
	return nil
}

func (g *Group[K, G, E, V]) follow(*G) {
	each := g.kind.Each(&g.Setting)
	g.each.Store(each) // a member that is made meanwhile is either visited, or added after this: see insert
	g.kind.Follow(&g.shared.Value, each)
	for _, e := range g.entries() {
		if !e.own {
			g.kind.Follow(&e.Value, each)
		}
	}
}

// Pin returns the member of key, made if there is none, and keeps it in the group until
// [Entry.Unpin]. If there is no room and none can be made, it returns the member that such
// keys share; so it does for a key that does not equal itself, such as NaN: a member of such a
// key could never be found again. For a key that has a member it allocates nothing.
func (g *Group[K, G, E, V]) Pin(key K) *Entry[V] {
	s := g.shard(key)
	s.mu.Lock()
	e := s.m[key]
	if e != nil {
		e.pins.Add(1) // not evicted, as it is there
		e.recent = again
	}
	s.mu.Unlock()
	if e != nil {
		return e
	}
	if key == key && g.reserve() {
		return g.insert(s, key)
	}
	return g.Overflow()
}

// Overflow returns the member that keys without room share, pinned.
func (g *Group[K, G, E, V]) Overflow() *Entry[V] {
	g.shared.hold()
	return &g.shared
}

// Add is Pin without regard to MaxKeys. The key equals itself.
func (g *Group[K, G, E, V]) Add(key K) *Entry[V] {
	if e := g.Find(key); e != nil {
		return e
	}
	g.size.Add(1)
	return g.insert(g.shard(key), key)
}

// Find returns the member of key, pinned, or nil if there is none. It is no use of it.
func (g *Group[K, G, E, V]) Find(key K) *Entry[V] {
	s := g.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.m[key]
	if e != nil {
		e.hold()
	}
	return e
}

// Room reports whether there is room for a new key. To find out, it may evict a member.
func (g *Group[K, G, E, V]) Room(key K) bool {
	if key != key || !g.reserve() {
		return false
	}
	g.size.Add(-1)
	return true
}

func (g *Group[K, G, E, V]) shard(key K) *shard[K, V] {
	return &g.shards[maphash.Comparable(g.seed, key)%Shards]
}

// insert makes the member of a key that a place is reserved for, unless it has one now.
func (g *Group[K, G, E, V]) insert(s *shard[K, V], key K) *Entry[V] {
	inserted := false
	defer func() {
		if !inserted { // another was faster, or Own has panicked
			g.size.Add(-1)
		}
	}()
	key = own(key)
	made := &Entry[V]{recent: once}
	each := g.each.Load()
	if g.kind.Own != nil {
		if of := g.kind.Own(g.Load(), key); of != nil {
			made.own, each = true, of
		}
	}
	g.kind.Make(&made.Value, &key, each)
	made.hold()

	s.mu.Lock()
	defer s.mu.Unlock()
	made.seen = time.Since(g.start)
	g.evictIdle(s, made.seen)
	if e := s.m[key]; e != nil {
		e.hold()
		return e
	}
	if now := g.each.Load(); !made.own && now != each { // there was an Update
		g.kind.Follow(&made.Value, now)
	}
	s.m[key] = made
	inserted = true
	return made
}

// reserve takes a place for a member that is about to be made, evicting another
// if the group is full. It reports whether there is one.
func (g *Group[K, G, E, V]) reserve() bool {
	for {
		n := g.size.Load()
		if n >= g.max.Load() {
			if evicted, again := g.evictAny(); !evicted && !again {
				return false
			}
		} else if g.size.CompareAndSwap(n, n+1) {
			if n < g.max.Load() {
				return true
			}
			g.size.Add(-1) // an Update has lowered MaxKeys meanwhile
		}
	}
}

// evictIdle looks at a few members of a locked shard and evicts those that have been idle
// for long enough. The order of a map is another one each time.
func (g *Group[K, G, E, V]) evictIdle(s *shard[K, V], now time.Duration) {
	idle := g.bounds().IdleAfter
	if idle <= 0 {
		return
	}
	looks := glances
	for key, e := range s.m {
		if looks--; looks < 0 {
			return
		}
		if e.fade(now) == 0 && now-e.seen >= idle {
			g.evict(s, key, e)
		}
	}
}

// evictAny makes room in a full group and reports whether it could, and otherwise whether
// it lost a race for a member, so that another may do. It begins at another shard each time
// and locks one at a time.
func (g *Group[K, G, E, V]) evictAny() (done, again bool) {
	var ( // the least recent, if all that it looks at are recent
		recent    *Entry[V]
		recentKey K
		recentIn  *shard[K, V]
	)
	least := uint8(math.MaxUint8)
	now := time.Since(g.start)
	first, looks := g.next.Add(1), search
	for i := range uint64(Shards) {
		s := &g.shards[(first+i)%Shards]
		s.mu.Lock()
		for key, e := range s.m {
			if looks--; looks < 0 {
				break
			}
			if n := e.fade(now); n == 0 && g.evict(s, key, e) {
				s.mu.Unlock()
				return true, false
			} else if n > 0 && n < least && e.pins.Load() == 0 && !g.needed(e) {
				recent, recentKey, recentIn, least = e, key, s, n
			}
		}
		s.mu.Unlock()
		if looks < 0 {
			break
		}
	}
	if recent == nil {
		return false, false
	}
	recentIn.mu.Lock()
	defer recentIn.mu.Unlock()
	done = g.evict(recentIn, recentKey, recent)
	return done, !done
}

func (g *Group[K, G, E, V]) needed(e *Entry[V]) bool {
	return g.kind.Needed != nil && g.kind.Needed(&e.Value)
}

// evict takes e out of its locked shard, unless it is pinned or Needed.
func (g *Group[K, G, E, V]) evict(s *shard[K, V], key K, e *Entry[V]) bool {
	if !e.pins.CompareAndSwap(0, evicted) {
		return false
	}
	// Only now, when All cannot hold it any more, is its state final.
	if g.needed(e) {
		e.pins.Store(0)
		return false
	}
	delete(s.m, key)
	g.size.Add(-1)
	if g.kind.Evict != nil {
		g.kind.Evict(s.number, key, &e.Value)
	}
	return true
}

// Len returns the number of members, those being made included.
func (g *Group[K, G, E, V]) Len() int { return int(g.size.Load()) }

// Each returns what the members follow that have nothing of their own.
func (g *Group[K, G, E, V]) Each() *E { return g.each.Load() }

// Max returns MaxKeys.
func (g *Group[K, G, E, V]) Max() int { return int(g.max.Load()) }

// Shared returns the member that keys share.
func (g *Group[K, G, E, V]) Shared() *V { return &g.shared.Value }

// All returns the members, without the shared one, each pinned while it is yielded. It holds
// no lock meanwhile: a member that is added or evicted may or may not be among them. Being
// yielded does not count as use.
func (g *Group[K, G, E, V]) All() iter.Seq2[K, *V] {
	return func(yield func(K, *V) bool) {
		for key, e := range g.entries() {
			if !yield(key, &e.Value) {
				return
			}
		}
	}
}

func (g *Group[K, G, E, V]) entries() iter.Seq2[K, *Entry[V]] {
	return func(yield func(K, *Entry[V]) bool) {
		var of []member[K, V]
		for i := range g.shards {
			s := &g.shards[i]
			of = of[:0]
			s.mu.Lock()
			for key, e := range s.m {
				of = append(of, member[K, V]{key, e})
			}
			s.mu.Unlock()
			for _, m := range of {
				if m.e.hold() && !m.pinned(yield) {
					return
				}
			}
		}
	}
}

type member[K comparable, V any] struct {
	key K
	e   *Entry[V]
}

func (m member[K, V]) pinned(yield func(K, *Entry[V]) bool) bool {
	defer m.e.Unpin()
	return yield(m.key, m.e)
}

// Shards calls f for each shard with its members, and with its lock held: f must be
// quick, and not use the group. No member of the shard comes or goes meanwhile.
func (g *Group[K, G, E, V]) Shards(f func(shard int, members iter.Seq[*V])) {
	for i := range g.shards {
		g.shards[i].visit(f)
	}
}

func (s *shard[K, V]) visit(f func(int, iter.Seq[*V])) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s.number, func(yield func(*V) bool) {
		for _, e := range s.m {
			if !yield(&e.Value) {
				return
			}
		}
	})
}

// IsShared reports whether e is the member that keys share.
func (e *Entry[V]) IsShared() bool { return e.shared }

// Unpin ends one Pin.
func (e *Entry[V]) Unpin() {
	if e.pins.Add(-1) < 0 {
		panic("keyed: Unpin without a Pin")
	}
}

// End is Unpin, as the end of what was held.
func (e *Entry[V]) End(error) { e.Unpin() }

// Begin calls begin with the member of a pinned e, for a call that is not one function.
// The first call of done ends the call and unpins e, and further calls do nothing. If begin
// returns an error, or a hook in it panics, Begin unpins e.
func (e *Entry[V]) Begin(begin func(*V) (done func(error), err error)) (done func(error), err error) {
	begun := false
	defer func() {
		if !begun {
			e.Unpin()
		}
	}()
	end, err := begin(&e.Value)
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

// hold reports whether e was still in the group, and is pinned.
func (e *Entry[V]) hold() bool {
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

// fade returns how recent e is, and makes it less recent by one, unless it is pinned: its
// idle time begins when it is no longer recent. The shard is locked.
func (e *Entry[V]) fade(now time.Duration) uint8 {
	n := e.recent
	switch {
	case e.pins.Load() > 0:
		e.seen = now
		return max(n, once)
	case n > 0:
		e.recent--
		e.seen = now
	}
	return n
}
