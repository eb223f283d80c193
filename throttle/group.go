package throttle

import (
	"cmp"
	"context"
	"fmt"
	"hash/maphash"
	"iter"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/keyed"
)

// DefaultMaxKeys is the MaxKeys of a [GroupConfig] that leaves it zero.
const DefaultMaxKeys = 100_000

// An Overflow says what a [Group] does with a call of a new key when it holds MaxKeys
// keys and can forget none of them.
type Overflow int

const (
	// ShareOne puts all such keys together under one limit, as Config has it, whose Key
	// is "(other keys)".
	ShareOne Overflow = iota
	// RefuseNew refuses the call: [TooManyKeys].
	RefuseNew
)

// GroupConfig says how a [Group] works.
type GroupConfig[K comparable] struct {
	// Config is the limit of each key, Queue included. [Group.Set] gives a key another
	// Rate and Burst.
	Config Config

	// MaxWaiting is how many calls may wait, for all keys together. Zero means
	// 10 000.
	MaxWaiting int

	// MaxKeys is how many keys are held at once, at most. Zero means [DefaultMaxKeys]. A key
	// that is a string takes at most 80 bytes and a copy of its text.
	MaxKeys int

	// IdleAfter is how long, at least, a key whose burst has refilled is kept for
	// [Group.Top] to report, unless its room is needed. Zero means a minute, negative
	// that it is kept until its room is needed.
	IdleAfter time.Duration

	// Overflow says what happens to a call with a new key when MaxKeys keys are held and
	// none of them can be forgotten, and to a key that is not equal to itself, such as NaN. Zero means ShareOne. Choose keys that
	// an attacker cannot make up for free.
	Overflow Overflow

	// OnEvict, if not nil, is called with each key that is forgotten and what it has
	// used since it came. The call that brought a new key calls it, with its ctx or, in
	// methods without one, with [context.Background]. Together with Top it makes a full
	// account.
	OnEvict func(context.Context, Usage[K])
}

// Validate returns an error that names each invalid field, or nil.
func (c GroupConfig[K]) Validate() error {
	f := invalid.Fields{Type: "throttle.Config"}
	c.Config.validate(&f)
	f.Type = "throttle.GroupConfig"
	c.validate(&f)
	return f.Err()
}

// validate checks the fields other than Config.
func (c GroupConfig[K]) validate(f *invalid.Fields) {
	f.Need(c.MaxWaiting >= 0, "MaxWaiting", c.MaxWaiting, "0 (for 10 000) or more")
	f.Need(c.MaxKeys >= 0, "MaxKeys", c.MaxKeys, "0 (for 100 000) or more")
	f.Need(c.Overflow == ShareOne || c.Overflow == RefuseNew, "Overflow", int(c.Overflow), "ShareOne or RefuseNew")
}

// withDefaults returns a valid c with its zero fields filled in. It shares no memory
// with c.
func (c GroupConfig[K]) withDefaults() GroupConfig[K] {
	c.Config = c.Config.withDefaults()
	c.MaxWaiting = cmp.Or(c.MaxWaiting, 10_000)
	c.MaxKeys = cmp.Or(c.MaxKeys, DefaultMaxKeys)
	c.IdleAfter = cmp.Or(c.IdleAfter, time.Minute)
	return c
}

// A Group holds a limit for each key: each tenant, user or address. The calls of one
// key take no tokens from the others. It is safe for concurrent use. [NewGroup] makes
// one.
//
// A key whose burst has refilled is the same as one that was never seen. So such keys
// are forgotten after a while, a few whenever a new key comes. At most MaxKeys are held,
// apart from keys that Set adds.
type Group[K comparable] struct {
	cfg       atomic.Pointer[GroupConfig[K]] // with its defaults filled in; never written to
	observers observers
	seed      maphash.Seed // secret, so that nobody can choose keys that meet in a shard
	keys      atomic.Int64
	maxKeys   atomic.Int64
	waiters   waiters
	overflow  *Limiter // the limit of ShareOne
	shards    []shard[K]

	updates sync.Mutex     // held by Update; taken before the locks of the shards
	given   GroupConfig[K] // without defaults; under updates
}

// NewGroup returns a Group without keys. It panics with the error of
// cfg.Validate, if there is one.
func NewGroup[K comparable](cfg GroupConfig[K]) *Group[K] {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	given := cfg
	given.Config = given.Config.clone()
	cfg = cfg.withDefaults()
	shards := 1
	for shards < 256 && shards*128 <= cfg.MaxKeys { // so that a full shard has keys to drop
		shards *= 2
	}
	g := &Group[K]{seed: maphash.MakeSeed(), shards: make([]shard[K], shards), given: given}
	g.cfg.Store(&cfg)
	g.maxKeys.Store(int64(cfg.MaxKeys))
	g.waiters.max.Store(int64(cfg.MaxWaiting))
	t := newTerms(&cfg.Config, 0)
	for i := range g.shards {
		g.shards[i].begin(t)
	}
	g.overflow = g.newOwn(keyed.Other, t)
	return g
}

// newOwn returns a Limiter for one key.
func (g *Group[K]) newOwn(key string, t *terms) *Limiter {
	l := newLimiter(t, &g.observers)
	l.key = key
	l.queue.all = &g.waiters
	return l
}

// Do takes the tokens of a call from the limit of key, runs fn and returns its error,
// as [Limiter.Do] does.
func (g *Group[K]) Do(ctx context.Context, key K, fn func(context.Context) error) error {
	if err := g.Wait(ctx, key); err != nil {
		return err
	}
	return fn(ctx)
}

// Wrap returns a function that runs next for key as [Group.Do] does.
func (g *Group[K]) Wrap(key K, next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return g.Do(ctx, key, next) }
}

// By returns middleware that runs a function as [Group.Do] does, for the key of its
// ctx.
func (g *Group[K]) By(key func(context.Context) K) func(next func(context.Context) error) func(context.Context) error {
	return func(next func(context.Context) error) func(context.Context) error {
		return func(ctx context.Context) error { return g.Do(ctx, key(ctx), next) }
	}
}

// Wait takes the tokens of a call from the limit of key, as [Limiter.Wait] does.
func (g *Group[K]) Wait(ctx context.Context, key K) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	cfg := &g.cfg.Load().Config
	n, level := cfg.of(ctx)
	r := g.take(ctx, key, n, level, cfg.MaxWait != 0)
	if r.own != nil {
		defer g.release(key, r.own)
		return r.own.acquire(ctx, cfg, n, level)
	}
	if r.why == "" {
		return nil
	}
	err := &LimitedError{
		Name: cfg.Name, Key: keyed.Text(key), Reason: r.why, Limit: r.m.burst,
		Level: level, Cost: n, After: r.after(n, level),
	}
	report(ctx, cfg.OnReject, &g.observers, err, 0)
	return err
}

// Allow takes a token of key if there is one, as [Limiter.Allow] does.
func (g *Group[K]) Allow(key K) bool {
	r := g.take(context.Background(), key, 1, g.least(), false)
	if r.own != nil {
		defer g.release(key, r.own)
		return r.own.Allow()
	}
	return r.why == ""
}

// Take takes n tokens of key if all of them are there, as [Limiter.Take] does.
func (g *Group[K]) Take(key K, n int) Decision {
	d, _ := g.decide(context.Background(), key, n, g.least())
	return d
}

// least returns the least important level.
func (g *Group[K]) least() int { return g.cfg.Load().Config.Levels - 1 }

func (g *Group[K]) decide(ctx context.Context, key K, n, level int) (Decision, Reason) {
	r := g.take(ctx, key, n, level, false)
	if r.own != nil {
		defer g.release(key, r.own)
		return r.own.decide(n, level)
	}
	return r.decision(n, level), r.why
}

// Peek returns the Decision that a Take of 1 would return, as [Limiter.Peek] does. A
// key that is not held has all of its burst, if there is room for it.
func (g *Group[K]) Peek(key K) Decision {
	s, tag := g.shard(key)
	s.mu.Lock()
	defer g.unlock(context.Background(), s)
	m := s.measure()
	level := m.least
	i := s.table.find(tag, key)
	switch {
	case i >= 0 && s.table.slots[i].tag&apart != 0:
		return s.own[key].Peek()
	case i >= 0:
		m.tat = s.table.slots[i].tat
	case g.countKey(s, key, m):
		g.keys.Add(-1)
	case g.cfg.Load().Overflow == ShareOne:
		return g.overflow.Peek()
	default:
		return result{m: m, why: TooManyKeys}.decision(1, level)
	}
	return m.decision(m.wait(1, level) == 0, 1, level)
}

// Refund gives back n tokens of key, as [Limiter.Refund] does. For a key that is not
// held it gives them back to the limit of ShareOne. Without that limit it does nothing:
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
		if g.cfg.Load().Overflow == ShareOne {
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
	s.stats.Refunded += int64(n)
	by := slot.tat - m.now
	if int64(n) <= by>>m.frac {
		by = m.tokens(n)
	}
	slot.tat -= max(by, 0)
}

// Set gives key a rate and a burst of its own. The key keeps them, whatever MaxKeys
// says, until Set is called with a rate and a burst of 0. Tokens that have been spent
// stay spent, as with [Limiter.SetRate].
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
			o.use(*s.terms.cfg)
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
	cfg := *s.terms.cfg
	cfg.Rate, cfg.Burst = rate, burstOf(rate, burst)
	o.use(cfg)
	return nil
}

// Usage is what a key has used since the Group has held it.
type Usage[K comparable] struct {
	Key     K
	Spent   int64 // tokens, less those given back
	Refused int64 // calls, counted up to 4 294 967 295
}

// All returns the keys that the group holds, with what they have used. It holds no lock
// while it yields: keys that come or go meanwhile may or may not be among them.
func (g *Group[K]) All() iter.Seq2[K, Usage[K]] {
	return func(yield func(K, Usage[K]) bool) {
		for i := range g.shards {
			for _, u := range g.shards[i].usages() {
				if !yield(u.Key, u) {
					return
				}
			}
		}
	}
}

// Top returns the n keys that have spent the most, the busiest first; all keys if n is
// larger than their number. Of keys that have spent the same, those that were refused
// more often come first. Top visits every key, while other calls go on.
func (g *Group[K]) Top(n int) []Usage[K] {
	if n <= 0 {
		return nil
	}
	more := func(a, b Usage[K]) int {
		return cmp.Or(cmp.Compare(b.Spent, a.Spent), cmp.Compare(b.Refused, a.Refused))
	}
	var top []Usage[K]
	for i := range g.shards {
		top = append(top, g.shards[i].usages()...)
		slices.SortFunc(top, more)
		top = top[:min(n, len(top))]
	}
	return top
}

// A result is the outcome of Group.take.
type result struct {
	m   measure
	why Reason // "" if the tokens were taken
	own *own   // if not nil, the caller takes the tokens from it, and then releases it
}

func (r result) decision(n, level int) Decision {
	d := r.m.decision(r.why == "", n, level)
	if r.why == TooManyKeys {
		d.Remaining, d.RetryAfter = 0, r.after(n, level)
	}
	return d
}

// after returns how long until the call could be admitted.
func (r result) after(n, level int) time.Duration {
	if r.why == TooManyKeys {
		return r.m.pace.until(0, r.m.tokens(1)) // a key may have refilled and be dropped by then
	}
	return r.m.wait(n, level)
}

// take takes n tokens of key. If the key has an own limit, or gets one because the call
// may wait for its tokens, take returns that limit instead.
func (g *Group[K]) take(ctx context.Context, key K, n, level int, mayWait bool) result {
	s, tag := g.shard(key)
	s.mu.Lock()
	m := s.measure()
	i := s.table.find(tag, key)
	if i < 0 {
		if i = g.enter(s, tag, key, m); i < 0 {
			return g.overflowed(ctx, s, m)
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
	if why == "" {
		s.stats.Admitted++
	} else {
		s.stats.refuse(why)
		s.table.refuse(i, 1)
	}
	g.unlock(ctx, s)
	return result{m: m, why: why}
}

// overflowed is take for a key that found no room. It unlocks s.
func (g *Group[K]) overflowed(ctx context.Context, s *shard[K], m measure) result {
	s.stats.overflow++
	var o *own
	if g.cfg.Load().Overflow == ShareOne {
		o = &own{Limiter: g.overflow, set: true} // set: release is not to join it
	} else {
		s.stats.refuse(TooManyKeys)
	}
	g.unlock(ctx, s)
	return result{m: m, why: TooManyKeys, own: o}
}

// release ends the use of an own limit by a call.
func (g *Group[K]) release(key K, o *own) {
	s, tag := g.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if o.users--; o.users == 0 && !o.set {
		s.join(s.table.find(tag, key))
	}
}
