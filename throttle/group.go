package throttle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
)

// Overflow says what a [Group] does with a new key when it holds MaxKeys of them,
// none of which it can drop.
type Overflow int

const (
	// RefuseNew refuses it.
	RefuseNew Overflow = iota
	// ShareOne puts it under one limit, as Config has it, together with all
	// others for which there is no room.
	ShareOne
)

// GroupConfig says how a [Group] works.
type GroupConfig[K comparable] struct {
	// Config is the limit of each key, MaxQueue included. [Group.Set] gives a key
	// another Rate and Burst.
	Config Config

	// MaxWaiting is how many calls may wait, for all keys together. Zero means
	// 10 000.
	MaxWaiting int

	// MaxKeys is how many keys are held at once. Zero means 100 000. A key takes
	// at most 80 bytes if it is a string, next to a copy of its text.
	MaxKeys int

	// Overflow says what becomes of a new key when there are MaxKeys, and of a key
	// that is not equal to itself, such as NaN. Choose keys that an attacker cannot
	// make up for free.
	Overflow Overflow

	// IdleAfter is how long a key whose burst has refilled is kept, at least, for
	// [Group.Top] to report, unless its room is needed. Zero means a minute,
	// negative that it need not be kept.
	IdleAfter time.Duration

	// OnEvict, if not nil, is called for each key that is dropped, with what it
	// has used since it came, by the call that brought a new one: together with Top
	// this makes a full account.
	OnEvict func(Usage[K])
}

// Validate returns an error that says which fields cannot mean anything, or nil.
func (c GroupConfig[K]) Validate() error {
	f := invalid.Fields{Type: "throttle.GroupConfig"}
	f.Need(c.MaxWaiting >= 0, "MaxWaiting", c.MaxWaiting, "0 (for 10 000) or more")
	f.Need(c.MaxKeys >= 0, "MaxKeys", c.MaxKeys, "0 (for 100 000) or more")
	f.Need(c.Overflow == RefuseNew || c.Overflow == ShareOne, "Overflow", int(c.Overflow), "RefuseNew or ShareOne")
	return errors.Join(c.Config.Validate(), f.Err())
}

// A Group holds a limit for each key: each tenant, user or address. What one
// spends takes nothing from the others. It is safe for concurrent use, and built
// by [NewGroup].
//
// A key whose burst has refilled is as good as one that was never seen, so it is
// dropped after a while, a few at each key that is new. At most MaxKeys are held.
type Group[K comparable] struct {
	cfg      GroupConfig[K]
	seed     maphash.Seed // which keys meet in a shard, nobody outside can know
	keys     atomic.Int64
	waiters  waiters
	overflow *Limiter
	shards   []shard[K]
}

// NewGroup returns a Group without keys. It panics with the error of
// cfg.Validate, if there is one.
func NewGroup[K comparable](cfg GroupConfig[K]) *Group[K] {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	cfg.Config = cfg.Config.withDefaults()
	cfg.MaxWaiting = cmp.Or(cfg.MaxWaiting, 10_000)
	cfg.MaxKeys = cmp.Or(cfg.MaxKeys, 100_000)
	cfg.IdleAfter = max(cmp.Or(cfg.IdleAfter, time.Minute), 0)
	shards := 1
	for shards < 256 && shards*128 <= cfg.MaxKeys { // so that each has its share of what can be dropped
		shards *= 2
	}
	g := &Group[K]{cfg: cfg, seed: maphash.MakeSeed(), shards: make([]shard[K], shards)}
	g.waiters.max = int64(cfg.MaxWaiting)
	t := newTerms(newPace(cfg.Config.Rate, cfg.Config.Burst), cfg.Config.Reserve, time.Now())
	for i := range g.shards {
		g.shards[i].begin(&t)
	}
	if cfg.Overflow == ShareOne {
		g.overflow = newLimiter(cfg.Config, t)
		g.overflow.key = "(other keys)"
		g.overflow.queue.all = &g.waiters
	}
	return g
}

// Do runs fn if there are tokens for key, as [Limiter.Do] does.
func (g *Group[K]) Do(ctx context.Context, key K, fn func(context.Context) error) error {
	if err := g.Wait(ctx, key); err != nil {
		return err
	}
	return fn(ctx)
}

// Wrap returns a function that does next for key as [Group.Do] does it.
func (g *Group[K]) Wrap(key K, next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return g.Do(ctx, key, next) }
}

// Wait takes the tokens of a call for key, as [Limiter.Wait] does.
func (g *Group[K]) Wait(ctx context.Context, key K) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	n, level := g.cfg.Config.of(ctx)
	r := g.take(key, n, level, g.cfg.Config.MaxWait != 0)
	if r.own != nil {
		defer g.release(key, r.own)
		return r.own.acquire(ctx, n, level)
	}
	if r.why == 0 {
		return nil
	}
	err := &LimitedError{
		Name: g.cfg.Config.Name, Key: keyText(key), Reason: r.why, Limit: r.m.burst,
		Level: level, Cost: n, After: r.after(n, level),
	}
	if g.cfg.Config.OnReject != nil {
		g.cfg.Config.OnReject(ctx, err)
	}
	return err
}

// Allow takes a token of key if it is there, as [Limiter.Allow] does.
func (g *Group[K]) Allow(key K) bool {
	r := g.take(key, 1, g.cfg.Config.Levels-1, false)
	if r.own != nil {
		defer g.release(key, r.own)
		return r.own.Allow()
	}
	return r.why == 0
}

// AllowN takes n tokens of key if all of them are there, as [Limiter.AllowN]
// does.
func (g *Group[K]) AllowN(key K, n int) Decision {
	d, _ := g.decide(key, n, g.cfg.Config.Levels-1)
	return d
}

func (g *Group[K]) decide(key K, n, level int) (Decision, Reason) {
	r := g.take(key, n, level, false)
	if r.own != nil {
		defer g.release(key, r.own)
		return r.own.decide(n, level)
	}
	return r.decision(n, level), r.why
}

// Peek says what an AllowN of 1 would, as [Limiter.Peek] does. A key that is not
// held has all of its burst, if there is room for it.
func (g *Group[K]) Peek(key K) Decision {
	s, tag := g.shard(key)
	s.mu.Lock()
	defer g.unlock(s)
	level := g.cfg.Config.Levels - 1
	m := s.measure()
	i := s.table.find(tag, key)
	switch {
	case i >= 0 && s.table.slots[i].tag&apart != 0:
		return s.own[key].Peek()
	case i >= 0:
		m.tat = s.table.slots[i].tat
	case g.reserve(s, key, m):
		g.keys.Add(-1)
	case g.overflow != nil:
		return g.overflow.Peek()
	default:
		return result{m: m, why: TooManyKeys}.decision(1, level)
	}
	return m.decision(m.wait(1, level) == 0, 1, level)
}

// Refund gives back n tokens of key, as [Limiter.Refund] does. Those of a key that
// is not held come back to the limit of ShareOne; without that there are none, as
// the key's burst is full.
func (g *Group[K]) Refund(key K, n int) {
	if n <= 0 {
		return
	}
	s, tag := g.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.table.find(tag, key)
	if i < 0 {
		if g.overflow != nil {
			g.overflow.Refund(n)
		}
		return
	}
	n = int(min(int64(n), s.usage(i).Spent))
	slot := &s.table.slots[i]
	if slot.tag&apart != 0 {
		o := s.own[key]
		o.queue.mu.Lock()
		defer o.queue.mu.Unlock()
		o.giveBack(n)
		return
	}
	m := s.measure()
	s.table.add(i, -int64(n))
	s.stats.Spent -= int64(n)
	by := slot.tat - m.now
	if int64(n) <= by>>m.frac {
		by = m.tokens(n)
	}
	slot.tat -= max(by, 0)
}

// Set gives key a limit of its own, which it keeps, whatever MaxKeys says, until
// Set is called with a rate and a burst of 0. What it has spent stays spent, as
// with [Limiter.SetRate].
func (g *Group[K]) Set(key K, rate float64, burst int) error {
	undo := rate == 0 && burst == 0
	if key != key {
		return fmt.Errorf("throttle: the key %v is not equal to itself: it cannot have a limit", key)
	}
	if !undo {
		f := invalid.Fields{Type: "throttle.Config"}
		checkRate(&f, rate, burst)
		if err := f.Err(); err != nil {
			return err
		}
	}
	s, tag := g.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.table.find(tag, key)
	if undo {
		if o := s.own[key]; o != nil {
			o.set = false
			_ = o.SetRate(s.terms.rate, s.terms.burst)
			s.join(i)
		}
		return nil
	}
	if i < 0 {
		g.keys.Add(1)
		i = s.table.insert(tag, ownText(key))
	}
	o := g.part(s, i)
	o.set = true
	return o.SetRate(rate, burst)
}

// SetRate changes the limit of all keys but those that have one by Set. What has
// been spent stays spent, as with [Limiter.SetRate].
func (g *Group[K]) SetRate(rate float64, burst int) error {
	f := invalid.Fields{Type: "throttle.Config"}
	checkRate(&f, rate, burst)
	if err := f.Err(); err != nil {
		return err
	}
	for i := range g.shards {
		s := &g.shards[i]
		s.mu.Lock()
		t := newTerms(newPace(rate, burst), g.cfg.Config.Reserve, time.Now())
		s.begin(&t)
		for _, o := range s.own {
			if !o.set {
				_ = o.SetRate(rate, burst)
			}
		}
		s.mu.Unlock()
	}
	if g.overflow != nil {
		return g.overflow.SetRate(rate, burst)
	}
	return nil
}

// Usage is what a key has used since it came.
type Usage[K comparable] struct {
	Key     K
	Spent   int64 // tokens, less those given back
	Refused int64 // calls, as far as 4 294 967 295
}

// Top returns the n keys that have spent the most, and of those that have spent
// the same the ones that were refused more often; all keys if n is more than there
// are. It visits every key; other calls go on.
func (g *Group[K]) Top(n int) []Usage[K] {
	if n <= 0 {
		return nil
	}
	more := func(a, b Usage[K]) int {
		return cmp.Or(cmp.Compare(b.Spent, a.Spent), cmp.Compare(b.Refused, a.Refused))
	}
	var top []Usage[K]
	var least *Usage[K] // of the n that were the top at the last look
	for i := range g.shards {
		s := &g.shards[i]
		s.mu.Lock()
		for j := range s.table.slots {
			if s.table.slots[j].tag == 0 {
				continue
			}
			if u := s.usage(j); least == nil || more(u, *least) < 0 {
				top = append(top, u)
			}
		}
		s.mu.Unlock()
		if last := i == len(g.shards)-1; last || len(top)/2 >= n {
			slices.SortFunc(top, more)
			if len(top) >= n {
				least, top = new(top[n-1]), top[:n]
			}
		}
	}
	return top
}

// GroupStats is a snapshot of what a [Group] has done.
type GroupStats struct {
	Admitted int64 // calls
	Refused  int64 // calls
	Spent    int64 // tokens, less those given back
	Evicted  int64 // keys that were dropped
	Overflow int64 // calls, of the above, for which there was no room for a key
	Keys     int   // that are held now
	Waiting  int   // calls that wait now
}

// Stats returns what the group has done so far.
func (g *Group[K]) Stats() GroupStats {
	sum := GroupStats{Keys: int(g.keys.Load()), Waiting: int(g.waiters.now.Load())}
	for i := range g.shards {
		s := &g.shards[i]
		s.mu.Lock()
		sum.Admitted += s.stats.Admitted
		sum.Refused += s.stats.Refused
		sum.Spent += s.stats.Spent
		sum.Evicted += s.stats.Evicted
		sum.Overflow += s.stats.Overflow
		for _, o := range s.own {
			sum.add(o.Stats())
		}
		s.mu.Unlock()
	}
	if g.overflow != nil {
		sum.add(g.overflow.Stats())
	}
	return sum
}

func (s *GroupStats) add(own Stats) {
	s.Admitted += own.Admitted
	s.Refused += own.Refused
	s.Spent += own.Spent
}

// A result is what became of a call: taken unless there is a why, or to be asked
// of a limit of its own.
type result struct {
	m   measure
	why Reason
	own *own
}

func (r result) decision(n, level int) Decision {
	d := r.m.decision(r.why == 0, n, level)
	if r.why == TooManyKeys {
		d.Remaining, d.RetryAfter = 0, r.after(n, level)
	}
	return d
}

// after returns when to come back.
func (r result) after(n, level int) time.Duration {
	if r.why == TooManyKeys {
		return r.m.pace.until(0, r.m.tokens(1)) // when the first of the others can have refilled
	}
	return r.m.wait(n, level)
}

// take takes n tokens of key. Where the key has a limit of its own, or is to get
// one because it is over its limit and may wait, the caller takes them from that
// and releases it.
func (g *Group[K]) take(key K, n, level int, mayWait bool) result {
	s, tag := g.shard(key)
	s.mu.Lock()
	m := s.measure()
	i := s.table.find(tag, key)
	if i < 0 {
		if i = g.enter(s, tag, key, m); i < 0 {
			return g.overflowed(s, m)
		}
	}
	slot := &s.table.slots[i]
	if slot.tag&apart != 0 {
		o := s.own[key]
		o.users++
		s.mu.Unlock()
		return result{own: o}
	}
	m.tat = slot.tat
	var why Reason
	switch {
	case n <= 0:
	case m.cannot(n, level):
		why = TooCostly
	case slot.tat > m.now+m.room[level]-m.tokens(n):
		if why = OverLimit; mayWait {
			o := g.part(s, i)
			o.users++
			s.mu.Unlock()
			return result{own: o}
		}
	default:
		slot.tat = max(slot.tat, m.now) + m.tokens(n)
		s.table.add(i, int64(n))
		s.stats.Spent += int64(n)
		m.tat = slot.tat
	}
	if why == 0 {
		s.stats.Admitted++
	} else {
		s.stats.Refused++
		s.table.refuse(i, 1)
	}
	g.unlock(s)
	return result{m: m, why: why}
}

// overflowed decides on a key for which there is no room, and unlocks s.
func (g *Group[K]) overflowed(s *shard[K], m measure) result {
	s.stats.Overflow++
	var o *own
	if g.overflow != nil {
		o = &own{Limiter: g.overflow, set: true}
	} else {
		s.stats.Refused++
	}
	g.unlock(s)
	return result{m: m, why: TooManyKeys, own: o}
}

// release ends a call of a key's own limit.
func (g *Group[K]) release(key K, o *own) {
	s, tag := g.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if o.users--; o.users == 0 && !o.set { // and not that of the overflow
		s.join(s.table.find(tag, key))
	}
}
