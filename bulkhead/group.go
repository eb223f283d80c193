package bulkhead

import (
	"context"
	"errors"
	"iter"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/keyed"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
)

const defaultMaxKeys = 10_000

// GroupConfig says how a [Group] works.
type GroupConfig[K comparable] struct {
	// Config is that of every bulkhead in the group. Its Name is the group's.
	Config Config

	// ConfigFor, if not nil, returns the Config of the bulkhead of a key, instead of
	// Config. Its Name is ignored. It must be valid: a call for a key panics otherwise.
	// ConfigFor may be called more than once for a key, by several goroutines.
	ConfigFor func(K) Config

	// MaxKeys is how many bulkheads are held at once, at most. Zero means 10 000.
	MaxKeys int

	// IdleAfter is how long a bulkhead must have had no call to be evicted, with what
	// it has counted and the limit that it has found. Zero means 10 minutes. Negative
	// means that bulkheads are evicted only to make room.
	IdleAfter time.Duration
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

// Validate returns an error that names each invalid field, or nil.
func (c GroupConfig[K]) Validate() error {
	f := invalid.Fields{Type: "bulkhead.GroupConfig"}
	c.bounds().Check(&f, defaultMaxKeys)
	return errors.Join(f.Err(), c.Config.Validate())
}

// A Group holds one [Bulkhead] for each tenant or dependency, so that none of them can
// take the slots of another. It is safe for concurrent use.
//
// The first call with a key makes its bulkhead. A bulkhead that is idle is evicted,
// but never while it has a call, running or waiting. A new key in a full group takes
// the place of a bulkhead without calls; the group looks at a few of them, and if each
// has calls, the new key has no bulkhead: the calls of all such keys share one, made from
// Config, whose Key is "(other keys)". So the number of running calls is bounded whatever
// keys arrive. A key that is not equal to itself, such as NaN, shares it too. [NewGroup]
// makes a Group.
type Group[K comparable] struct {
	members   *keyed.Group[K, GroupConfig[K], settings.Version[Config], Bulkhead]
	observers notify.Observers[Event]
	evicted   [keyed.Shards]Totals // of the bulkheads evicted from a shard, whose lock guards it
}

// NewGroup returns a Group without bulkheads. It panics with the error of cfg.Validate, if
// there is one.
func NewGroup[K comparable](cfg GroupConfig[K]) *Group[K] {
	g := &Group[K]{}
	g.members = keyed.New(cfg, GroupConfig[K].withDefaults, keyed.Kind[K, GroupConfig[K], settings.Version[Config], Bulkhead]{
		Type:   "bulkhead.GroupConfig",
		Fixed:  func(was, next *GroupConfig[K]) error { return was.Config.fixed(&next.Config) },
		Bounds: (*GroupConfig[K]).bounds,
		Each: func(s *settings.Setting[GroupConfig[K]]) *settings.Version[Config] {
			return newVersion(s.Given().Config)
		},
		Own: (*GroupConfig[K]).own,
		Make: func(b *Bulkhead, key *K, each *settings.Version[Config]) {
			b.make(each)
			b.key = keyed.TextOf(key)
			b.observers.In(&g.observers)
		},
		Follow: func(b *Bulkhead, each *settings.Version[Config]) { b.setting.Adopt(each, Config.withDefaults, b.adopt) },
		Evict:  func(shard int, _ K, b *Bulkhead) { g.evicted[shard].add(b.Stats().Totals) },
	})
	return g
}

// Do runs fn in the bulkhead of key, as [Bulkhead.Do] does.
func (g *Group[K]) Do(ctx context.Context, key K, fn func(context.Context) error) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	e := g.members.Pin(key)
	if work := linger.Of(ctx); work != nil {
		return work.Hold(ctx, e.Value.Wrap(fn), e)
	}
	defer e.Unpin()
	return e.Value.Do(ctx, fn)
}

// By returns middleware that runs a function under [Group.Do], for the key of its ctx.
func (g *Group[K]) By(key func(context.Context) K) func(func(context.Context) error) func(context.Context) error {
	return func(next func(context.Context) error) func(context.Context) error {
		return func(ctx context.Context) error { return g.Do(ctx, key(ctx), next) }
	}
}

// Begin takes a slot in the bulkhead of key, as [Bulkhead.Begin] does.
func (g *Group[K]) Begin(ctx context.Context, key K) (done func(error), err error) {
	if ctx.Err() != nil {
		return nil, ended.Error(ctx)
	}
	return g.members.Pin(key).Begin(func(b *Bulkhead) (func(error), error) { return b.Begin(ctx) })
}

// All returns the bulkheads that the group holds, in no order, without the shared one.
// Do not keep a bulkhead: after the loop, the group may evict it and make another for
// its key. Being yielded does not count as a call.
func (g *Group[K]) All() iter.Seq2[K, *Bulkhead] { return g.members.All() }
