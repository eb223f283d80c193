package breaker

import (
	"context"
	"errors"
	"iter"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/keyed"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
)

const defaultMaxKeys = 10_000

// GroupConfig says how a [Group] makes its breakers, and how many it holds.
type GroupConfig[K comparable] struct {
	// Config is the Config of each breaker. Its Name is that of the group.
	Config Config
	// ConfigFor, if not nil, returns the Config of the breaker of a key, instead of
	// Config. Its Name is ignored. The call that needs the breaker panics if its Config
	// is not valid. ConfigFor may be called more than once for a key, by several
	// goroutines.
	ConfigFor func(K) Config
	// MaxKeys is how many breakers the group holds at once, at most. Zero means
	// 10 000.
	MaxKeys int
	// IdleAfter is how long a breaker must have had no call to be evicted, with what it
	// has counted, also if its Window is longer. Zero means 10 minutes. Negative means
	// that breakers are evicted only to make room.
	IdleAfter time.Duration
}

// Validate returns an error that names each invalid field, or nil.
func (c GroupConfig[K]) Validate() error {
	f := invalid.Fields{Type: "breaker.GroupConfig"}
	c.bounds().Check(&f, defaultMaxKeys)
	return errors.Join(f.Err(), c.Config.Validate())
}

func (c GroupConfig[K]) withDefaults() GroupConfig[K] {
	c.Config = c.Config.withDefaults()
	c.MaxKeys, c.IdleAfter = c.bounds().Filled(defaultMaxKeys, 10*time.Minute)
	return c
}

func (c *GroupConfig[K]) bounds() keyed.Bounds {
	return keyed.Bounds{MaxKeys: c.MaxKeys, IdleAfter: c.IdleAfter}
}

// own returns the Config of a key, if that is not the one of all keys.
func (c *GroupConfig[K]) own(key K) *settings.Version[Config] {
	if c.ConfigFor == nil {
		return nil
	}
	cfg := c.ConfigFor(key)
	cfg.Name = c.Config.Name
	return newVersion(cfg)
}

// A Group holds one [Breaker] for each key, such as a shard, a host or a tenant, so that a
// key that fails is refused and the others are not. A Group is safe for concurrent use.
// [NewGroup] makes one.
//
// The group makes a breaker at the first call for its key, and evicts the breaker when
// the key has had no call for IdleAfter, or when it holds MaxKeys and needs room for a new
// key. It never evicts a breaker that has a call under way, has open time left, is forced
// open or disabled, or pings.
//
// The group is full while it holds MaxKeys breakers and finds none, among a few, that it
// may evict. A new key then has no breaker of its own: its calls share one breaker, made
// from Config, with the calls of all other such keys. Its Key is "(other keys)". So the memory
// is bounded, and each key that has a breaker keeps it. A key that fails can shut out the
// others that share its breaker. A MaxKeys well above the number of keys that fail at the
// same time avoids that. A key that does not equal itself, such as NaN, is always treated
// as a new key of a full group.
type Group[K comparable] struct {
	members   *keyed.Group[K, GroupConfig[K], settings.Version[Config], Breaker]
	observers notify.Observers[Event]
	done      atomic.Bool
	evicted   [keyed.Shards]Totals // of the breakers evicted from a shard, whose lock guards it
}

// NewGroup returns an empty Group. It panics with the error of cfg.Validate, if there
// is one.
func NewGroup[K comparable](cfg GroupConfig[K]) *Group[K] {
	g := &Group[K]{}
	g.members = keyed.New(cfg, GroupConfig[K].withDefaults, keyed.Kind[K, GroupConfig[K], settings.Version[Config], Breaker]{
		Type:   "breaker.GroupConfig",
		Fixed:  func(was, next *GroupConfig[K]) error { return was.Config.fixed(&next.Config) },
		Bounds: (*GroupConfig[K]).bounds,
		Each: func(s *settings.Setting[GroupConfig[K]]) *settings.Version[Config] {
			return newVersion(s.Given().Config)
		},
		Own: (*GroupConfig[K]).own,
		Make: func(b *Breaker, key *K, each *settings.Version[Config]) {
			b.make(each)
			b.key, b.groupDone = keyed.TextOf(key), &g.done
			b.observers.In(&g.observers)
		},
		Follow: func(b *Breaker, each *settings.Version[Config]) { b.setting.Adopt(each, Config.withDefaults, b.follow) },
		Needed: (*Breaker).needed,
		Evict:  func(shard int, _ K, b *Breaker) { g.evicted[shard].add(b.lockedSums()) },
	})
	return g
}

// Name returns the Name of the group's Config.
func (g *Group[K]) Name() string { return g.members.Load().Config.Name }

// Do calls fn under the breaker of key, as [Breaker.Do] does.
func (g *Group[K]) Do(ctx context.Context, key K, fn func(context.Context) error) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	e := g.members.Pin(key)
	defer e.Unpin()
	return e.Value.Do(ctx, fn)
}

// By returns a middleware that calls a function under the breaker of the key of its ctx.
func (g *Group[K]) By(key func(context.Context) K) func(func(context.Context) error) func(context.Context) error {
	return func(next func(context.Context) error) func(context.Context) error {
		return func(ctx context.Context) error { return g.Do(ctx, key(ctx), next) }
	}
}

// Begin begins a call under the breaker of key, as [Breaker.Begin] does. The group does
// not evict the breaker until done is called.
func (g *Group[K]) Begin(ctx context.Context, key K) (done func(error), err error) {
	if ctx.Err() != nil {
		return nil, ended.Error(ctx)
	}
	return g.members.Pin(key).Begin(func(b *Breaker) (func(error), error) { return b.Begin(ctx) })
}

// With calls f with the breaker of key, to inspect or to operate it, and makes the
// breaker if there is none. The group does not evict it while f runs, but may evict it
// after that. If the group is full and the key has no breaker of its own, With returns
// false and does not call f.
func (g *Group[K]) With(key K, f func(*Breaker)) bool {
	e := g.members.Pin(key)
	defer e.Unpin()
	if e.IsShared() {
		return false
	}
	f(&e.Value)
	return true
}

// All returns the breakers that the group holds, in no order, without the one that
// keys share. The group does not evict a breaker while it is yielded. Being yielded does
// not count as a call.
func (g *Group[K]) All() iter.Seq2[K, *Breaker] { return g.members.All() }

// Close calls [Breaker.Close] for each breaker of the group, present and future, to stop
// their pings. It does not change their states. It returns nil.
func (g *Group[K]) Close() error {
	g.done.Store(true)
	for _, b := range g.members.All() {
		_ = b.Close()
	}
	return g.members.Shared().Close()
}

// needed reports whether a breaker without a call under way must not be evicted, because
// more than counts would be lost.
func (b *Breaker) needed() bool {
	switch p := b.phase.Load(); p.state {
	case Closed:
		return false
	case ForcedOpen, Disabled:
		return true
	default: // half-open without traffic may last forever
		return b.now() < p.until || b.pingDue.Load() != 0
	}
}
