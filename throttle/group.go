package throttle

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/keyed"
	"github.com/go-resilience/resilience/internal/settings"
	"github.com/go-resilience/resilience/policy"
)

const defaultMaxKeys = 100_000

// GroupConfig says how a [Group] works.
type GroupConfig[K comparable] struct {
	// Config is the limit of each key. Its Name is the group's.
	Config Config

	// MaxKeys is how many keys are held at once, at most. Zero means 100 000. A string takes
	// at most 150 bytes, and with Quotas 100 more and 32 for each.
	MaxKeys int

	// IdleAfter is how long a key must have had no call to be evicted. Zero means a minute,
	// negative that keys are evicted only to make room.
	IdleAfter time.Duration
}

func (c GroupConfig[K]) Validate() error {
	f := invalid.Fields{Type: "throttle.GroupConfig"}
	f.Need(c.MaxKeys >= 0, "MaxKeys", c.MaxKeys, "0 (for 100000) or more")
	return errors.Join(c.Config.Validate(), f.Err())
}

func (c GroupConfig[K]) withDefaults() GroupConfig[K] {
	c.Config = c.Config.withDefaults()
	c.MaxKeys = cmp.Or(c.MaxKeys, defaultMaxKeys)
	c.IdleAfter = cmp.Or(c.IdleAfter, time.Minute)
	return c
}

// A Group holds a limit for each key: each tenant, user or address. Its methods are those of a
// [Limiter] for the limit of a key. It is safe for concurrent use.
//
// A key whose burst is full and whose windows are over is evicted after a while. If MaxKeys are
// held and none can be evicted, all new keys, and keys that are not equal to themselves, share
// one limit, whose Key is "(other keys)". Choose keys that an attacker cannot make up for free.
type Group[K comparable] struct {
	limit
	table    *keyed.Table[K, meter]
	setting  settings.Setting[GroupConfig[K]] // whose lock is taken before that of table, and that before that of limit
	evicted  atomic.Int64
	overflow atomic.Int64 // calls whose key found no room
}

// NewGroup panics if cfg is not valid.
func NewGroup[K comparable](cfg GroupConfig[K]) *Group[K] {
	g := &Group[K]{limit: limit{stats: newStats()}}
	g.setting.Init(cfg, GroupConfig[K].withDefaults, func(c *GroupConfig[K]) {
		c.Config.Quotas = slices.Clone(c.Config.Quotas)
	})
	filled := g.setting.Load()
	g.table = keyed.NewTable(keyed.Rule[K, meter]{
		Make:      func(K, *meter) {},
		InUse:     func(m *meter) bool { return !g.idle(m) },
		Evict:     func(*meter) { g.evicted.Add(1) },
		MaxKeys:   filled.MaxKeys,
		IdleAfter: filled.IdleAfter,
	})
	g.use(filled)
	return g
}

func (g *Group[K]) use(cfg *GroupConfig[K]) {
	members := g.table.Locked(g.mu.Lock) // so that no call takes from a key that does not follow yet
	meters := []*meter{&g.table.Overflow().Value}
	for _, m := range members {
		meters = append(meters, &m.Value)
	}
	g.follow(&cfg.Config, meters...)
	g.mu.Unlock()
	for range g.table.Each(members) { // which unpins them
	}
}

// pin returns the meter of key, or that which keys without room share.
func (g *Group[K]) pin(key K) *keyed.Member[K, meter] {
	m := g.table.Pin(key)
	if m == g.table.Overflow() {
		g.overflow.Add(1)
	}
	return m
}

func (g *Group[K]) Do(ctx context.Context, key K, fn func(context.Context) error) error {
	h, err := g.hold(ctx, key, byCost)
	if err != nil {
		return err
	}
	err = fn(ctx)
	if behavior.IsRefused(err) {
		g.settleKey(key, h, 0)
	}
	return err
}

// By returns middleware that takes from the limit of the key of a ctx.
func (g *Group[K]) By(key func(context.Context) K) func(next func(context.Context) error) func(context.Context) error {
	return func(next func(context.Context) error) func(context.Context) error {
		return func(ctx context.Context) error { return g.Do(ctx, key(ctx), next) }
	}
}

func (g *Group[K]) Wait(ctx context.Context, key K) error {
	_, err := g.hold(ctx, key, byCost)
	return err
}

func (g *Group[K]) Admit(ctx context.Context, key K) (Decision, error) {
	_, err := g.hold(ctx, key, byCost)
	m := g.table.Pin(key)
	defer g.table.Unpin(m)
	return g.decision(&m.Value, err), err
}

func (g *Group[K]) hold(ctx context.Context, key K, n int) (hold, error) {
	m := g.pin(key)
	defer g.table.Unpin(m)
	h, err := g.enter(ctx, &m.Value, &g.setting.Load().Config, func() string { return g.text(m) }, n)
	h.overflow = m == g.table.Overflow()
	return h, err
}

// text returns the key of m as an error shows it.
func (g *Group[K]) text(m *keyed.Member[K, meter]) string {
	if m == g.table.Overflow() {
		return keyed.Other
	}
	return keyed.Text(m.Key)
}

// settleKey corrects what h has taken of key. If the key has been evicted since, it had got
// all of its tokens back: if it finds no room now, nothing of others' tokens is given back.
func (g *Group[K]) settleKey(key K, h hold, used int) {
	m := g.table.Overflow()
	if !h.overflow {
		if m = g.table.Pin(key); m == g.table.Overflow() {
			used = max(used, h.n)
		}
		defer g.table.Unpin(m)
	}
	g.settle(&m.Value, h, used)
}

func (g *Group[K]) Allow(key K) bool {
	m := g.pin(key)
	defer g.table.Unpin(m)
	return g.allow(&m.Value, 1)
}

func (g *Group[K]) Reserve(ctx context.Context, key K, n int) (*Reservation, error) {
	return reserve(ctx, max(0, n), g.For(func(context.Context) K { return key }))
}

// For returns the limit of the key of a ctx, for [All].
func (g *Group[K]) For(key func(context.Context) K) Part { return groupPart[K]{g, key} }

type groupPart[K comparable] struct {
	g   *Group[K]
	key func(context.Context) K
}

func (p groupPart[K]) reserve(ctx context.Context, n int) (part, error) {
	key := p.key(ctx)
	h, err := p.g.hold(ctx, key, n)
	estimate := n != byCost || p.g.setting.Load().Config.Cost != nil
	return part{estimate, func(used int) { p.g.settleKey(key, h, used) }}, err
}

func (g *Group[K]) Stats() Stats {
	s := g.limit.Stats()
	s.Evicted, s.Overflow, s.Keys = g.evicted.Load(), g.overflow.Load(), g.table.Len()
	return s
}

func (g *Group[K]) Config() GroupConfig[K] { return g.setting.Config() }

// Update is for all keys. MaxKeys and IdleAfter cannot change.
func (g *Group[K]) Update(change func(*GroupConfig[K])) error {
	return g.setting.Update(change, g.check, g.use)
}

func (g *Group[K]) check(was, next *GroupConfig[K]) error {
	f := invalid.Fields{Type: "throttle.GroupConfig"}
	f.Same("MaxKeys", was.MaxKeys, next.MaxKeys)
	f.Same("IdleAfter", was.IdleAfter, next.IdleAfter)
	return errors.Join(sameName(&was.Config, &next.Config), f.Err())
}

// Describe implements [policy.Describer]. The keys of a Group are not policies, so it has no Members.
func (g *Group[K]) Describe() policy.Description {
	return policy.Description{
		Kind:    "throttle",
		Name:    g.setting.Load().Config.Name,
		Metrics: func() []policy.Metric { return policy.Metrics("throttle", g.Stats()) },
		Config:  func() any { return g.Config() },
		Update: func(dryRun bool, change func(cfg any) error) error {
			return g.setting.Change(dryRun, change, g.check, g.use)
		},
		Observe: policy.Events(g.Observe, Event.describe),
	}
}
