package throttle

import (
	"cmp"
	"context"
	"fmt"
	"hash/maphash"
	"iter"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/keyed"
	"github.com/go-resilience/resilience/internal/settings"
)

// DefaultMaxKeys is the MaxKeys of a [GroupConfig] that leaves it zero. It is more than in
// other packages, since a key that is a string takes at most 96 bytes here.
const DefaultMaxKeys = 100_000

// An Overflow says what a [Group] does with a call of a new key when it holds MaxKeys
// keys and can evict none of them. The zero value means ShareOne.
type Overflow string

const (
	// ShareOne puts all such keys together under one limit, as Config has it, whose Key
	// is "(other keys)".
	ShareOne Overflow = "share one"

	// RefuseNew refuses the call: [TooManyKeys].
	RefuseNew Overflow = "refuse new"
)

// GroupConfig says how a [Group] works.
type GroupConfig[K comparable] struct {
	// Config is the limit of each key, Queue included. Its Name is the group's.
	// [Group.Set] gives a key another Limit.
	Config Config

	// MaxQueued is how many calls may wait, for all keys together. Zero means
	// 10 000.
	MaxQueued int

	// MaxKeys is how many keys are held at once, at most. Zero means [DefaultMaxKeys]. A key
	// that is a string takes at most 96 bytes, 32 more for each of the Quotas, and a copy of
	// its text.
	MaxKeys int

	// IdleAfter is how long the burst of a key must have been full, and its windows of
	// quotas over, for the key to be evicted, with what it has used. Zero means a
	// minute, as such a key has nothing to lose. Negative means that keys are evicted only
	// to make room.
	IdleAfter time.Duration

	// Overflow says what happens to a call with a new key when MaxKeys keys are held and
	// none of them can be evicted, and to a key that is not equal to itself, such as NaN.
	// Zero means ShareOne. Choose keys that an attacker cannot make up for free.
	Overflow Overflow

	// OnEvict, if not nil, is called with each key that is evicted and what it has used
	// since it came. The call that brought a new key calls it, with its ctx or, in
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
	f.Need(c.MaxQueued >= 0, "MaxQueued", c.MaxQueued, "0 (for 10 000) or more")
	f.Need(c.MaxKeys >= 0, "MaxKeys", c.MaxKeys, "0 (for 100 000) or more")
	f.Need(c.Overflow == "" || c.Overflow == ShareOne || c.Overflow == RefuseNew, "Overflow", strconv.Quote(string(c.Overflow)), `"share one" or "refuse new"`)
}

// withDefaults returns a valid c with its zero fields filled in. It shares no memory
// with c.
func (c GroupConfig[K]) withDefaults() GroupConfig[K] {
	c.Config = c.Config.withDefaults()
	c.MaxQueued = cmp.Or(c.MaxQueued, 10_000)
	c.MaxKeys = cmp.Or(c.MaxKeys, DefaultMaxKeys)
	c.IdleAfter = cmp.Or(c.IdleAfter, time.Minute)
	c.Overflow = cmp.Or(c.Overflow, ShareOne)
	return c
}

// A Group holds a limit for each key: each tenant, user or address. The calls of one
// key take no tokens from the others. It is safe for concurrent use. [NewGroup] makes
// one.
//
// A key whose burst has refilled, and whose windows of quotas are over, is the same as one
// that was never seen. So such keys are evicted after a while, a few whenever a new key
// comes. At most MaxKeys are held, apart from keys that Set adds.
type Group[K comparable] struct {
	setting   settings.Setting[GroupConfig[K]] // whose lock is taken before those of the shards
	observers observers
	seed      maphash.Seed // secret, so that nobody can choose keys that meet in a shard
	keys      atomic.Int64
	maxKeys   atomic.Int64
	waiters   waiters
	overflow  *Limiter // the limit of ShareOne
	shards    []shard[K]
}

// NewGroup returns a Group without keys. It panics with the error of
// cfg.Validate, if there is one.
func NewGroup[K comparable](cfg GroupConfig[K]) *Group[K] {
	v := settings.New(cfg, GroupConfig[K].withDefaults, "Levels")
	cfg = *v.Filled()
	shards := 1
	for shards < 256 && shards*128 <= cfg.MaxKeys { // so that a full shard has keys to evict
		shards *= 2
	}
	g := &Group[K]{seed: maphash.MakeSeed(), shards: make([]shard[K], shards)}
	g.setting.Adopt(v, nil)
	g.maxKeys.Store(int64(cfg.MaxKeys))
	g.waiters.max.Store(int64(cfg.MaxQueued))
	t := newTerms(&cfg.Config)
	for i := range g.shards {
		g.shards[i].start = steady()
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
	cfg := &g.setting.Load().Config
	n, level := cfg.of(ctx)
	r := g.take(ctx, key, n, level, cfg.MaxWait != 0)
	if r.own == nil && r.why == "" {
		return nil
	}
	return g.settle(ctx, cfg, key, n, level, &r)
}

// settle continues a call that began under cfg and that take has not admitted: its key has
// an own limit, or it is refused.
func (g *Group[K]) settle(ctx context.Context, cfg *Config, key K, n, level int, r *result) error {
	if r.own != nil {
		defer g.release(key, r.own)
		return r.own.acquire(ctx, cfg, n, level)
	}
	err := &LimitedError{
		Name: cfg.Name, Key: keyed.Text(key), Reason: r.why, Limit: r.m.size(),
		Level: level, Cost: n, After: r.after(n, level),
	}
	if r.bound != nil {
		r.bound.refuse(err)
	}
	report(ctx, cfg.OnRefuse, &g.observers, err)
	return err
}

// Admit takes the tokens of a call as [Group.Wait] does, and returns what is left for the
// level of the call, as [Group.Peek] does for the least important one.
func (g *Group[K]) Admit(ctx context.Context, key K) (Decision, error) {
	if ctx.Err() != nil {
		return g.Peek(key), ended.Error(ctx)
	}
	cfg := &g.setting.Load().Config
	n, level := cfg.of(ctx)
	r := g.take(ctx, key, n, level, cfg.MaxWait != 0)
	if r.own == nil && r.why == "" {
		return g.peek(key, level), nil
	}
	err := g.settle(ctx, cfg, key, n, level, &r)
	return g.peek(key, level), err
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
	d, _ := g.decide(context.Background(), key, max(n, 0), g.least())
	return d
}

// least returns the least important level.
func (g *Group[K]) least() int { return g.setting.Load().Config.Levels - 1 }

func (g *Group[K]) decide(ctx context.Context, key K, n, level int) (Decision, Reason) {
	r := g.take(ctx, key, n, level, false)
	if r.own != nil {
		defer g.release(key, r.own)
		return r.own.decide(n, level)
	}
	return r.decision(n, level), r.why
}

// Peek returns the Decision that a Take of 1 would return, as [Limiter.Peek] does. A
// key that is not held has all of its burst, if there is room for it: to find out, Peek may
// evict keys of a full group that have nothing to lose.
func (g *Group[K]) Peek(key K) Decision { return g.peek(key, g.least()) }

func (g *Group[K]) peek(key K, level int) Decision {
	s, tag := g.shard(key)
	s.mu.Lock()
	defer g.unlock(context.Background(), s)
	m := s.measure()
	var windows []window
	i := s.table.find(tag, key)
	switch {
	case i >= 0 && s.table.slots[i].tag&apart != 0:
		return s.own[key].peek(level)
	case i >= 0:
		m.tat = s.table.slots[i].tat
		windows = s.table.windows(i)
	case g.countKey(s, key, m):
		g.keys.Add(-1)
	case g.setting.Load().Overflow == ShareOne:
		return g.overflow.peek(level)
	default:
		return result{m: m, why: TooManyKeys}.decision(1, level)
	}
	if m.quotas != nil {
		if windows == nil {
			windows = make([]window, len(m.quotas))
		}
		return m.takeAll(windows, present(), 1, level, true).Decision
	}
	return m.decision(nil, m.wait(1, level) == 0, 1, level)
}

// Refund gives back n tokens of key, as [Limiter.Refund] does. For a key that is not
// held it gives them back to the limit of ShareOne. Without that limit it does nothing:
// the key's burst is full. It gives back no tokens that were spent before a [Group.Restore].
func (g *Group[K]) Refund(key K, n int) {
	if n <= 0 {
		return
	}
	s, tag := g.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.table.find(tag, key)
	if i < 0 {
		if g.setting.Load().Overflow == ShareOne {
			g.overflow.Refund(n)
		}
		return
	}
	n = int(min(int64(n), s.usage(i).Spent))
	slot := &s.table.slots[i]
	if slot.tag&apart != 0 {
		o := s.own[key]
		o.mu.Lock()
		defer o.mu.Unlock()
		o.giveBack(n)
		return
	}
	m := s.measure()
	s.table.add(i, -int64(n))
	s.stats.Refunded += int64(n)
	slot.tat = m.back(slot.tat, n)
	if m.quotas != nil {
		m.refund(s.table.windows(i), present(), n)
	}
}

// Set gives key a limit of its own. The key keeps it, whatever MaxKeys says, until Set is
// called with the zero Limit. Tokens that have been spent stay spent, as with
// [Limiter.SetLimit].
func (g *Group[K]) Set(key K, limit Limit) error {
	undo := limit.isZero()
	if key != key {
		return fmt.Errorf("throttle: the key %v is not equal to itself: it cannot have a limit", key)
	}
	if !undo {
		if err := limit.Validate(); err != nil {
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
			o.use(s.terms.cfg)
			s.join(i)
		}
		return nil
	}
	if i < 0 {
		g.keys.Add(1)
		i = s.insert(tag, key, s.measure().now)
	}
	o := g.part(s, i)
	o.set = true
	cfg := *s.terms.cfg
	cfg.setLimit(limit.withDefaults())
	o.use(&cfg)
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
	m     measure
	bound *bound // of a limit with quotas
	why   Reason // "" if the tokens were taken
	own   *own   // if not nil, the caller takes the tokens from it, and then releases it
}

func (r result) decision(n, level int) Decision {
	d := r.m.decision(r.bound, r.why == "", n, level)
	if r.why == TooManyKeys {
		d.Remaining, d.RetryAfter = 0, r.after(n, level)
	}
	return d
}

// after returns how long until the call could be admitted.
func (r result) after(n, level int) time.Duration {
	if r.why == TooManyKeys {
		return time.Duration(r.m.rate.Of(1).Up()) // a key may have refilled and be evicted by then
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
	var b *bound
	switch {
	case m.quotas != nil:
		b = s.takeAll(i, m, present(), n, level)
		if why = b.why; why == OverLimit && mayWait {
			return g.takeApart(s, i)
		}
	case n <= 0:
	case m.cannot(n, level):
		why = TooCostly
	case !m.fits(n, level):
		if why = OverLimit; mayWait {
			return g.takeApart(s, i)
		}
	default:
		m.tat = m.pay(m.tat, n)
		slot.tat = m.tat
		s.table.add(i, int64(n))
		s.stats.Spent += int64(n)
	}
	if why == "" {
		s.stats.Admitted++
	} else {
		s.stats.refuse(why)
		s.table.refuse(i, 1)
	}
	g.unlock(ctx, s)
	return result{m: m, bound: b, why: why}
}

// takeApart is take for a key of s whose call may wait. It unlocks s.
func (g *Group[K]) takeApart(s *shard[K], i int) result {
	o := g.part(s, i)
	o.users++
	s.mu.Unlock()
	return result{own: o}
}

// takeAll is take for a slot of a group with quotas.
func (s *shard[K]) takeAll(i int, m measure, now moment, n, level int) *bound {
	b := m.takeAll(s.table.windows(i), now, n, level, false)
	if b.OK {
		s.table.slots[i].tat = m.tat
		s.table.add(i, int64(n))
		s.stats.Spent += int64(n)
	}
	return b
}

// overflowed is take for a key that found no room. It unlocks s.
func (g *Group[K]) overflowed(ctx context.Context, s *shard[K], m measure) result {
	s.stats.overflow++
	var o *own
	if g.setting.Load().Overflow == ShareOne {
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
