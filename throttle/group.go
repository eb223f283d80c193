package throttle

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/keyed"
	"github.com/go-resilience/resilience/internal/settings"
)

const defaultMaxKeys = 100_000

// GroupConfig says how a [Group] works.
type GroupConfig[K comparable] struct {
	// Config is the limit of each key, Queue included. Its Name is the group's.
	// [Group.Set] gives a key another Limit.
	Config Config

	// MaxQueued is how many calls may wait, for all keys together. Zero means
	// 10 000.
	MaxQueued int

	// MaxKeys is how many keys are held at once, at most; only [Group.Set] and
	// [Group.Restore] hold a key with a limit of its own beyond that. Such keys count, too:
	// with MaxKeys of them there is no room for others. Zero means 100 000. A key that is a
	// string takes at most 150 bytes, a copy of its text included; with Quotas
	// 100 more, and 16 for each of them.
	MaxKeys int

	// IdleAfter is how long a key must have had no call to be evicted, with what it has
	// used: once its burst is full, and its windows of quotas are over. Zero means a
	// minute, as such a key has nothing to lose. Negative means that keys are evicted only
	// to make room.
	IdleAfter time.Duration
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
	c.bounds().Check(f, defaultMaxKeys)
}

func (c *GroupConfig[K]) bounds() keyed.Bounds {
	return keyed.Bounds{MaxKeys: c.MaxKeys, IdleAfter: c.IdleAfter}
}

// withDefaults returns a valid c with its zero fields filled in. It shares no memory
// with c.
func (c GroupConfig[K]) withDefaults() GroupConfig[K] {
	c.Config = c.Config.withDefaults()
	c.MaxQueued = cmp.Or(c.MaxQueued, 10_000)
	c.MaxKeys, c.IdleAfter = c.bounds().Filled(defaultMaxKeys, time.Minute)
	return c
}

// A Group holds a limit for each key: each tenant, user or address. The calls of one
// key take no tokens from the others. It is safe for concurrent use. [NewGroup] makes
// one.
//
// A key whose burst has refilled, and whose windows of quotas are over, is the same as one
// that was never seen. So such keys are evicted after a while, a few whenever a new key
// comes. If MaxKeys are held and none of them can be evicted, a new key finds no room: all
// such keys share one limit, as Config has it, whose Key is "(other keys)". So does a key that
// is not equal to itself, such as NaN. Choose keys that an attacker cannot make up for free.
type Group[K comparable] struct {
	members *keyed.Group[K, GroupConfig[K], terms, account]
	ledgers [64]struct {
		ledger
		_ [64]byte // keeps a busy one off its neighbor's cache line
	}
	observers observers
	waiters   waiters
	evicted   atomic.Int64 // keys
	overflow  atomic.Int64 // calls whose key found no room
}

// NewGroup returns a Group without keys. It panics with the error of
// cfg.Validate, if there is one.
func NewGroup[K comparable](cfg GroupConfig[K]) *Group[K] {
	g := &Group[K]{}
	for i := range g.ledgers {
		g.ledgers[i].waiters = &g.waiters
	}
	g.members = keyed.New(cfg, GroupConfig[K].withDefaults, keyed.Kind[K, GroupConfig[K], terms, account]{
		Type:   "throttle.GroupConfig",
		Fixed:  func(was, next *GroupConfig[K]) error { return was.Config.fixed(&next.Config) },
		Bounds: (*GroupConfig[K]).bounds,
		Each: func(s *settings.Setting[GroupConfig[K]]) *terms {
			cfg := s.Load()
			g.waiters.max.Store(int64(cfg.MaxQueued))
			return newTerms(&cfg.Config)
		},
		Make:   g.make,
		Follow: (*account).adopt,
		Needed: func(a *account) bool { return !a.idle() },
		Evict:  func(int, K, *account) { g.evicted.Add(1) },
	})
	return g
}

func (g *Group[K]) make(a *account, _ *K, each *terms) {
	l := &g.ledgers[rand.IntN(len(g.ledgers))]
	l.mu.Lock()
	defer l.mu.Unlock()
	a.make(&l.ledger, each)
}

// pin returns the account of a call, pinned.
func (g *Group[K]) pin(key K) *keyed.Entry[account] {
	e := g.members.Pin(key)
	if e.IsShared() {
		g.overflow.Add(1)
	}
	return e
}

// Do takes the tokens of a call from the limit of key, runs fn and returns its error,
// as [Limiter.Do] does.
func (g *Group[K]) Do(ctx context.Context, key K, fn func(context.Context) error) error {
	if err := g.Wait(ctx, key); err != nil {
		return err
	}
	return fn(ctx)
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
	cfg := &g.members.Load().Config
	n, level := cfg.of(ctx)
	return g.acquire(ctx, cfg, key, n, level)
}

func (g *Group[K]) acquire(ctx context.Context, cfg *Config, key K, n, level int) error {
	e := g.pin(key)
	defer e.Unpin()
	m, b, ok := e.Value.take(n, level, false)
	if ok {
		return nil
	}
	by := caller{&g.observers, keyed.Other}
	if !e.IsShared() {
		by.key = keyed.Text(key)
	}
	return e.Value.wait(ctx, by, cfg, n, level, m, b)
}

// unknown returns an account that belongs to no key.
func (g *Group[K]) unknown() *account {
	a := &account{}
	g.make(a, nil, g.members.Each())
	return a
}

// Admit takes the tokens of a call as [Group.Wait] does, and returns what is left for the
// level of the call, as [Group.Peek] does for the least important one.
func (g *Group[K]) Admit(ctx context.Context, key K) (Decision, error) {
	if ctx.Err() != nil {
		return g.Peek(key), ended.Error(ctx)
	}
	cfg := &g.members.Load().Config
	n, level := cfg.of(ctx)
	err := g.acquire(ctx, cfg, key, n, level)
	return g.peek(key, level), err
}

// Allow takes a token of key if there is one, as [Limiter.Allow] does.
func (g *Group[K]) Allow(key K) bool {
	e := g.pin(key)
	defer e.Unpin()
	_, _, ok := e.Value.take(1, g.least(), true)
	return ok
}

// Take takes n tokens of key if all of them are there, as [Limiter.Take] does.
func (g *Group[K]) Take(key K, n int) Decision {
	d, _ := g.decide(key, max(n, 0), g.least())
	return d
}

func (g *Group[K]) decide(key K, n, level int) (Decision, Reason) {
	e := g.pin(key)
	defer e.Unpin()
	return e.Value.decide(n, level)
}

// least returns the least important level.
func (g *Group[K]) least() int { return g.members.Load().Config.Levels - 1 }

// Peek returns the Decision that a Take of 1 would return, as [Limiter.Peek] does. A
// key that is not held has all of its burst, if there is room for it: to find out, Peek may
// evict keys of a full group that have nothing to lose.
func (g *Group[K]) Peek(key K) Decision { return g.peek(key, g.least()) }

func (g *Group[K]) peek(key K, level int) Decision {
	e := g.members.Find(key)
	if e == nil {
		if g.members.Room(key) {
			return g.unknown().peek(level)
		}
		e = g.members.Overflow()
	}
	defer e.Unpin()
	return e.Value.peek(level)
}

// Refund gives back n tokens of key, as [Limiter.Refund] does. For a key that is not
// held it gives them back to the limit that other keys share. It gives back no tokens that
// were spent before a [Group.Restore].
func (g *Group[K]) Refund(key K, n int) {
	e := g.members.Find(key)
	if e == nil {
		e = g.members.Overflow()
	}
	defer e.Unpin()
	e.Value.refund(n)
}

// Set gives key a limit of its own. The key keeps it, whatever MaxKeys says, until Set is
// called with the zero Limit. Tokens that have been spent stay spent, as with
// [Limiter.Update].
func (g *Group[K]) Set(key K, limit Limit) error {
	if key != key {
		return fmt.Errorf("throttle: the key %v is not equal to itself: it cannot have a limit", key)
	}
	if limit.isZero() {
		if e := g.members.Find(key); e != nil {
			defer e.Unpin()
			e.Value.unassign(g.members.Each)
		}
		return nil
	}
	if err := limit.Validate(); err != nil {
		return err
	}
	e := g.members.Add(key)
	defer e.Unpin()
	e.Value.assign(limit, g.members.Each, true)
	return nil
}

// assign gives a a limit by Set, unless it has one and that is to stay. Another goroutine
// that changes each then has a follow it.
func (a *account) assign(limit Limit, each func() *terms, again bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.set || again {
		a.set = true
		a.begin(each().with(limit.withDefaults()))
	}
}

func (a *account) unassign(each func() *terms) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.set {
		a.set = false
		a.begin(each())
	}
}

// adopt puts what all keys follow into effect, but for the limit by Set.
func (a *account) adopt(each *terms) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.set {
		each = each.with(a.terms.Load().cfg.limit())
	}
	a.begin(each)
}

// with returns t with another limit.
func (t *terms) with(limit Limit) *terms {
	cfg := *t.cfg
	cfg.setLimit(limit)
	return newTerms(&cfg)
}

// Usage is what a key has used since the Group has held it.
type Usage struct {
	Spent   int64 // tokens, less those given back
	Refused int64 // calls, counted up to 4 294 967 295
}

func (a *account) usage() Usage {
	a.mu.Lock()
	defer a.mu.Unlock()
	return Usage{a.spent, int64(a.refused)}
}

// All returns the keys that the group holds, with what they have used. It holds no lock
// while it yields: keys that come or go meanwhile may or may not be among them.
func (g *Group[K]) All() iter.Seq2[K, Usage] {
	return func(yield func(K, Usage) bool) {
		for key, a := range g.members.All() {
			if !yield(key, a.usage()) {
				return
			}
		}
	}
}
