package throttle

import (
	"context"
	"hash/maphash"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/keyed"
)

// A shard holds a part of the keys. A call holds its lock for one look-up. Only growing
// the table takes longer.
type shard[K comparable] struct {
	mu      sync.Mutex
	start   int64 // a time before all calls
	terms   *terms
	table   table[K]
	own     map[K]*own // the limits of the keys whose tag has the bit apart
	stats   shardStats // without those of own
	evicted []Usage[K] // to be told by unlock
	_       [64]byte
}

// shardStats counts the calls of a shard. The keys that it has evicted are included.
type shardStats struct {
	Totals
	evicted  int64
	overflow int64
}

func (s *shardStats) refuse(why Reason) {
	s.Refused++
	*s.Refusals.of(why)++
}

// An own limit is that of a key that has one by Set, or for which calls wait.
type own struct {
	*Limiter
	users int  // calls under way
	set   bool // by Set
}

// shard returns the shard that key belongs to, and key's tag in its table.
func (g *Group[K]) shard(key K) (s *shard[K], tag uint32) {
	hash := maphash.Comparable(g.seed, key)
	return &g.shards[hash&uint64(len(g.shards)-1)], tagOf(hash)
}

// measure reads the clock. Its tat is that of a full burst. The caller holds mu. A clock that was read before a key was
// evicted would mint tokens when the key comes back.
func (s *shard[K]) measure() measure {
	m := measure{terms: s.terms, now: steady()}
	m.tat.NS = m.now
	if by := s.start - m.now; by > 0 { // on the clock of a synctest bubble
		for i := range s.table.slots {
			s.table.slots[i].tat.NS -= by
		}
		s.start = m.now
	}
	return m
}

// begin makes t the terms. Tokens that have been spent stay spent.
func (s *shard[K]) begin(t *terms) {
	if s.terms != nil {
		now := s.measure().now
		for i := range s.table.slots {
			slot := &s.table.slots[i]
			slot.tat = t.rate.Follow(slot.tat, now, &s.terms.rate)
		}
		if t.quotas != nil || s.terms.quotas != nil {
			s.table.convert(t.inherit(s.terms))
		}
	}
	s.terms = t
	s.table.each = len(t.quotas)
}

// enter adds a new key and returns the index of its slot, or -1 if there is no room.
// It evicts a few keys that have been idle for long enough.
func (g *Group[K]) enter(s *shard[K], tag uint32, key K, m measure) int {
	if idleAfter := g.setting.Load().IdleAfter; idleAfter > 0 {
		g.sweep(s, 4, m.now-int64(idleAfter), idleAfter)
	}
	if !g.countKey(s, key, m) {
		return -1
	}
	return s.insert(tag, key, m.now)
}

// insert adds a key with a full burst and returns the index of its slot.
func (s *shard[K]) insert(tag uint32, key K, now int64) int {
	i := s.table.insert(tag, ownText(key))
	s.table.slots[i].tat.NS = now
	return i
}

// countKey counts a new key, if there is room for it.
func (g *Group[K]) countKey(s *shard[K], key K, m measure) bool {
	if key != key { // NaN: the table would never find it again
		return false
	}
	if g.keys.Add(1) > g.maxKeys.Load() && !g.makeRoom(s, m.now) {
		g.keys.Add(-1)
		return false
	}
	return true
}

// makeRoom looks for keys whose burst has refilled, and evicts them: in s, and in some
// other shards that are not locked. It does not search for long. It reports whether
// there is room for the key that countKey has counted.
func (g *Group[K]) makeRoom(s *shard[K], now int64) bool {
	g.sweep(s, 64, now, 0)
	first := rand.IntN(len(g.shards))
	for i := range min(8, len(g.shards)) {
		if g.keys.Load() <= g.maxKeys.Load() {
			return true
		}
		other := &g.shards[(first+i)%len(g.shards)]
		if other.mu.TryLock() { // not s, whose lock is held
			g.sweep(other, 64, other.measure().now, 0)
			s.evicted = append(s.evicted, other.evicted...)
			other.evicted = nil
			other.mu.Unlock()
		}
	}
	return g.keys.Load() <= g.maxKeys.Load()
}

// sweep looks at the next n slots and evicts the keys whose burst was full at a time,
// which is idle ago, and whose windows were over.
func (g *Group[K]) sweep(s *shard[K], n int, at int64, idle time.Duration) {
	var then moment
	if s.terms.quotas != nil {
		then = present().sub(idle)
	}
	s.table.sweep(n, func(i int) bool {
		if s.table.slots[i].tat.After(at) || s.terms.spentOf(s.table.windows(i), then) {
			return false
		}
		g.keys.Add(-1)
		s.stats.evicted++
		if g.setting.Load().OnEvict != nil || g.observers.Any() {
			s.evicted = append(s.evicted, s.usage(i))
		}
		return true
	})
}

// unlock unlocks s and tells of the keys that were evicted meanwhile.
func (g *Group[K]) unlock(ctx context.Context, s *shard[K]) {
	evicted := s.evicted
	s.evicted = nil
	s.mu.Unlock()
	for _, u := range evicted {
		cfg := g.setting.Load()
		if cfg.OnEvict != nil {
			cfg.OnEvict(ctx, u)
		}
		if g.observers.Any() {
			g.observers.Tell(ctx, Event{Kind: EventEvicted, Name: cfg.Config.Name, Key: keyed.Text(u.Key), Spent: u.Spent, Refused: u.Refused})
		}
	}
}

// part gives the key of a slot an own limit with the debt of the slot.
func (g *Group[K]) part(s *shard[K], i int) *own {
	slot := &s.table.slots[i]
	if slot.tag&apart != 0 {
		return s.own[slot.key]
	}
	o := &own{Limiter: g.newOwn(keyed.Text(slot.key), s.terms)}
	o.tat = slot.tat
	copy(o.windows, s.table.windows(i))
	slot.tag |= apart
	if s.own == nil {
		s.own = make(map[K]*own)
	}
	s.own[slot.key] = o
	return o
}

// join undoes part, unless a call uses the own limit.
func (s *shard[K]) join(i int) {
	slot := &s.table.slots[i]
	o := s.own[slot.key]
	if o.users > 0 {
		return
	}
	did := o.totals()
	s.stats.add(did)
	s.table.add(i, did.Spent-did.Refunded)
	s.table.refuse(i, did.Refused)
	slot.tat = o.tat
	copy(s.table.windows(i), o.windows)
	slot.tag &^= apart
	delete(s.own, slot.key)
}

// usages returns what the keys of the shard have used.
func (s *shard[K]) usages() []Usage[K] {
	s.mu.Lock()
	defer s.mu.Unlock()
	usages := make([]Usage[K], 0, s.table.used)
	for i := range s.table.slots {
		if s.table.slots[i].tag != 0 {
			usages = append(usages, s.usage(i))
		}
	}
	return usages
}

// usage returns what the key of a slot has used.
func (s *shard[K]) usage(i int) Usage[K] {
	slot := &s.table.slots[i]
	u := Usage[K]{Key: slot.key, Spent: s.table.tokens(i), Refused: int64(s.table.rest[i].refused)}
	if slot.tag&apart != 0 {
		did := s.own[slot.key].totals()
		u.Spent += did.Spent - did.Refunded
		u.Refused += did.Refused
	}
	return u
}
