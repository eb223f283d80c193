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
	"github.com/go-resilience/resilience/internal/refund"
	"github.com/go-resilience/resilience/internal/settings"
	"github.com/go-resilience/resilience/policy"
)

const defaultMaxKeys = 100_000

// GroupConfig configures a [Group].
type GroupConfig[K comparable] struct {
	// Config configures the limit of each key. Config.Name is the name of the group.
	Config Config

	// MaxKeys is the maximum number of keys. Zero means 100,000. A string key takes about 150 bytes of memory, plus its
	// text. With Quotas, a key takes about 100 more bytes, plus 32 bytes for each quota.
	MaxKeys int

	// IdleAfter is the time after which an unused key may be evicted even if the group has room for more keys. Zero
	// means 1 minute. [Unlimited] means that keys are evicted only to make room.
	IdleAfter time.Duration
}

// Validate returns an error that names each invalid field, or nil.
func (c GroupConfig[K]) Validate() error {
	f := invalid.Fields{Type: "throttle.GroupConfig"}
	f.Need(c.MaxKeys >= 0, "MaxKeys", c.MaxKeys, "0 (for 100000) or more")
	f.Need(c.IdleAfter >= 0 || c.IdleAfter == Unlimited, "IdleAfter", c.IdleAfter,
		"0 (for a minute) or more, or throttle.Unlimited")
	return errors.Join(c.Config.Validate(), f.Err())
}

// withDefaults returns c with its zero fields filled in. c must be valid.
func (c GroupConfig[K]) withDefaults() GroupConfig[K] {
	c.Config = c.Config.withDefaults()
	c.MaxKeys = cmp.Or(c.MaxKeys, defaultMaxKeys)
	c.IdleAfter = cmp.Or(c.IdleAfter, time.Minute)
	return c
}

// A Group holds a limit for each key, such as a tenant or an address. The methods of a Group are the methods of a
// [Limiter] with a key as an additional parameter. A Group is used like a resilience.Group of Limiters, but needs less
// memory. It is safe for concurrent use.
//
// A key can be evicted while its burst is full, none of its quotas has spent tokens and no call waits. When a new key
// arrives, the group evicts such keys if they have been unused for IdleAfter, at most 16 of them at a time. If the
// group holds MaxKeys keys, it evicts such a key earlier to make room. To find one, the group checks at most 16 keys.
// If it can evict none of the 16, the new key uses the overflow limit, which all such keys share. Errors and events
// report the key of the overflow limit as "(other keys)". A key that is not equal to itself, such as NaN, always uses
// the overflow limit. Choose keys that an attacker cannot create in large numbers.
type Group[K comparable] struct {
	limit
	table    *keyed.Table[K, meter]
	setting  settings.Setting[GroupConfig[K]] // locks are acquired in the order setting, table, limit
	evicted  atomic.Int64
	overflow atomic.Int64 // calls whose key found no room
}

// NewGroup returns a Group. It panics if cfg is invalid; see [GroupConfig.Validate].
func NewGroup[K comparable](cfg GroupConfig[K]) *Group[K] {
	g := &Group[K]{limit: limit{stats: newStats()}}
	g.setting.Init(cfg, GroupConfig[K].withDefaults, func(c *GroupConfig[K]) {
		c.Config.Quotas = slices.Clone(c.Config.Quotas)
	})
	filled := g.setting.Load()
	g.table = keyed.NewTable(keyed.Rule[K, meter]{
		Make:      func(*keyed.Member[K, meter]) {},
		InUse:     func(m *meter) bool { return !g.idle(m) },
		Evict:     func(*meter) { g.evicted.Add(1) },
		MaxKeys:   filled.MaxKeys,
		IdleAfter: filled.IdleAfter,
	})
	g.use(filled)
	return g
}

// use makes cfg the current configuration of all keys.
func (g *Group[K]) use(cfg *GroupConfig[K]) {
	members := g.table.Locked(g.mu.Lock) // before Unlock, no call takes tokens of a key that has the old configuration
	meters := []*meter{&g.table.Overflow().Value}
	for _, m := range members {
		meters = append(meters, &m.Value)
	}
	g.applyConfig(&cfg.Config, meters...)
	g.mu.Unlock()
	for range g.table.Each(members) { // Each unpins the members
	}
}

// pin returns the meter of key. If the group has no room for key, pin returns the meter that all such keys share.
func (g *Group[K]) pin(key K) *keyed.Member[K, meter] {
	m := g.table.Pin(key)
	if m == g.table.Overflow() {
		g.overflow.Add(1)
	}
	return m
}

// Do is like [Limiter.Do], but uses the limit of the given key.
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

// By returns a middleware that limits each call with the limit of the call's key. The function key returns the key of a
// call, given the call's ctx.
func (g *Group[K]) By(key func(context.Context) K) func(next func(context.Context) error) func(context.Context) error {
	return func(next func(context.Context) error) func(context.Context) error {
		return func(ctx context.Context) error { return g.Do(ctx, key(ctx), next) }
	}
}

// Wait is like [Limiter.Wait], but uses the limit of the given key.
func (g *Group[K]) Wait(ctx context.Context, key K) error {
	_, err := g.hold(ctx, key, byCost)
	return err
}

// Admit is like [Limiter.Admit], but uses the limit of the given key.
func (g *Group[K]) Admit(ctx context.Context, key K) (Decision, error) {
	h, err := g.hold(ctx, key, byCost)
	if err == nil {
		refund.Record(ctx, func() { g.settleKey(key, h, 0) })
	}
	m := g.table.Pin(key)
	defer g.table.Unpin(m)
	return g.decision(&m.Value, err), err
}

// hold admits a call that takes n tokens of the limit of key. n may be byCost.
func (g *Group[K]) hold(ctx context.Context, key K, n int) (hold, error) {
	m := g.pin(key)
	defer g.table.Unpin(m)
	h, err := g.enter(ctx, &m.Value, &g.setting.Load().Config, func() string { return g.text(m) }, n)
	h.overflow = m == g.table.Overflow()
	return h, err
}

// text returns the key of m in the form in which errors and events show it.
func (g *Group[K]) text(m *keyed.Member[K, meter]) string {
	if m == g.table.Overflow() {
		return keyed.Other
	}
	return keyed.Text(m.Key)
}

// settleKey corrects the tokens that h has taken from key. If key was evicted after the tokens were taken, all its
// tokens had been available again. If the group has no room for key now, settleKey refunds nothing, because the tokens
// would go to the meter that key shares with other keys.
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

// Allow is like [Limiter.Allow], but uses the limit of the given key.
func (g *Group[K]) Allow(key K) bool {
	m := g.pin(key)
	defer g.table.Unpin(m)
	return g.allow(&m.Value, 1)
}

// Reserve is like [Limiter.Reserve], but uses the limit of the given key.
func (g *Group[K]) Reserve(ctx context.Context, key K, n int) (*Reservation, error) {
	if n < 0 {
		return nil, negative(g.setting.Load().Config.Name, n)
	}
	return reserve(ctx, n, g.For(func(context.Context) K { return key }))
}

// For returns a [Part] that can be passed to [All]. The function key returns the key of a call, given the call's ctx.
// The Part is the limit of this key.
func (g *Group[K]) For(key func(context.Context) K) Part { return groupPart[K]{g, key} }

type groupPart[K comparable] struct {
	g   *Group[K]
	key func(context.Context) K
}

func (p groupPart[K]) reserve(ctx context.Context, n int) (part, error) {
	key := p.key(ctx)
	h, err := p.g.hold(ctx, key, n)
	cfg := &p.g.setting.Load().Config
	estimate := n != byCost || cfg.Cost != nil
	return part{cfg.Name, estimate, func(used int) { p.g.settleKey(key, h, used) }}, err
}

// Stats returns the metrics of all keys together.
func (g *Group[K]) Stats() Stats {
	s := g.limit.Stats()
	s.Evicted, s.Overflow, s.Keys = g.evicted.Load(), g.overflow.Load(), g.table.Len()
	return s
}

// Config returns the configuration with defaults filled in.
func (g *Group[K]) Config() GroupConfig[K] { return g.setting.Config() }

// Update is like [Limiter.Update], but changes the limits of all keys. Update cannot change MaxKeys and IdleAfter.
func (g *Group[K]) Update(change func(*GroupConfig[K])) error {
	return g.setting.Update(change, g.check, g.use)
}

// check returns an error if an update changes a field that cannot change.
func (g *Group[K]) check(was, next *GroupConfig[K]) error {
	f := invalid.Fields{Type: "throttle.GroupConfig"}
	f.Same("MaxKeys", was.MaxKeys, next.MaxKeys)
	f.Same("IdleAfter", was.IdleAfter, next.IdleAfter)
	return errors.Join(sameName(&was.Config, &next.Config), f.Err())
}

// Describe implements [policy.Describer]. The keys of a Group are not policies, so the Description has no Members.
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
