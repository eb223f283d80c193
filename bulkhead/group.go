package bulkhead

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/keyed"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
)

// DefaultMaxKeys is the MaxKeys of a [GroupConfig] that leaves it zero.
const DefaultMaxKeys = 10_000

// GroupConfig says how a [Group] works.
type GroupConfig[K comparable] struct {
	// Config is that of every bulkhead in the group. Its Name is the group's.
	Config Config

	// ConfigFor, if not nil, returns the Config of the bulkhead of a key, instead of
	// Config. Its Name is ignored. It must be valid: a call for a key panics otherwise.
	// ConfigFor may be called more than once for a key, by several goroutines.
	ConfigFor func(K) Config

	// MaxKeys is how many bulkheads are held at once, at most. Zero means [DefaultMaxKeys].
	MaxKeys int

	// IdleAfter is how long a bulkhead must have had no call to be evicted, with what
	// it has counted and the limit that it has found. Zero means 10 minutes. Negative
	// means that bulkheads are evicted only to make room.
	IdleAfter time.Duration

	// Overflow says what happens to a call with a new key when MaxKeys bulkheads are held
	// and none of them can be evicted, and to a key that is not equal to itself, such as
	// NaN. Zero means ShareOne.
	Overflow Overflow
}

func (c GroupConfig[K]) withDefaults() GroupConfig[K] {
	c.Config = c.Config.withDefaults()
	c.MaxKeys = cmp.Or(c.MaxKeys, DefaultMaxKeys)
	c.IdleAfter = cmp.Or(c.IdleAfter, 10*time.Minute)
	c.Overflow = cmp.Or(c.Overflow, ShareOne)
	return c
}

// Validate returns an error that names each invalid field, or nil.
func (c GroupConfig[K]) Validate() error {
	f := invalid.Fields{Type: "bulkhead.GroupConfig"}
	f.Need(c.MaxKeys >= 0, "MaxKeys", c.MaxKeys, fmt.Sprintf("0 (for %d) or more", DefaultMaxKeys))
	f.Need(c.Overflow == "" || c.Overflow == ShareOne || c.Overflow == RefuseNew, "Overflow", strconv.Quote(string(c.Overflow)), `"share one" or "refuse new"`)
	return errors.Join(f.Err(), c.Config.Validate())
}

// An Overflow says what a [Group] does with a call of a new key when it holds MaxKeys
// bulkheads and can evict none of them.
type Overflow string

const (
	// ShareOne lets all such calls share one bulkhead, made from Config, whose Key is
	// "(other keys)". So the number of running calls is bounded whatever keys arrive.
	ShareOne Overflow = "share one"

	// RefuseNew refuses the call: [TooManyKeys].
	RefuseNew Overflow = "refuse new"
)

// A Group holds one [Bulkhead] for each tenant or dependency, so that none of them can
// take the slots of another. It is safe for concurrent use.
//
// The first call with a key makes its bulkhead. A bulkhead that is idle is evicted,
// but never while it has a call, running or waiting. A new key in a full group takes
// the place of a bulkhead without calls; the group looks at a few of them, and if each
// has calls, Overflow says what happens. [NewGroup] makes a Group.
type Group[K comparable] struct {
	setting   settings.Setting[GroupConfig[K]]
	each      atomic.Pointer[settings.Version[Config]] // of the bulkheads that Config is for
	members   *keyed.Map[K, *Bulkhead]
	shared    *Bulkhead
	observers notify.Observers[Event]
	refused   atomic.Int64         // calls refused for their key
	evicted   [keyed.Shards]Totals // of the bulkheads evicted from a shard, whose lock guards it
}

// NewGroup returns a Group without bulkheads. It panics with the error of cfg.Validate, if
// there is one.
func NewGroup[K comparable](cfg GroupConfig[K]) *Group[K] {
	g := &Group[K]{}
	g.setting.Adopt(settings.New(cfg, GroupConfig[K].withDefaults, "Levels"), nil)
	g.each.Store(newVersion(cfg.Config))
	cfg = g.Config()
	g.shared = g.join(newBulkhead(g.each.Load()), keyed.Other)
	g.members = keyed.New(keyed.Config[K, *Bulkhead]{
		Make:  g.newMember,
		Max:   cfg.MaxKeys,
		Idle:  cfg.IdleAfter,
		Added: g.added,
		Evict: func(shard int, b *Bulkhead) { g.evicted[shard].add(b.Stats().Totals) },
	})
	return g
}

func (g *Group[K]) newMember(key K) *Bulkhead {
	group := g.setting.Load()
	if group.ConfigFor == nil {
		return g.join(newBulkhead(g.each.Load()), keyed.Text(key))
	}
	cfg := group.ConfigFor(key)
	cfg.Name = group.Config.Name
	b := g.join(New(cfg), keyed.Text(key))
	b.own = true
	return b
}

// join makes b the bulkhead of a key of the group.
func (g *Group[K]) join(b *Bulkhead, key string) *Bulkhead {
	b.key = key
	b.observers.In(&g.observers)
	return b
}

// added has a new bulkhead follow an Update that was made since newMember.
func (g *Group[K]) added(b *Bulkhead) {
	if each := g.each.Load(); !b.own && b.setting.Load() != each.Filled() {
		b.setting.Adopt(each, b.adopt)
	}
}

// Do runs fn in the bulkhead of key, as [Bulkhead.Do] does.
func (g *Group[K]) Do(ctx context.Context, key K, fn func(context.Context) error) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	e := g.members.Pin(key)
	if e == nil {
		shared, err := g.overflow(ctx, key)
		if err != nil {
			return err
		}
		return shared.Do(ctx, fn)
	}
	if work := linger.Of(ctx); work != nil {
		return work.Hold(ctx, e.Value.Wrap(fn), e)
	}
	defer e.Unpin()
	return e.Value.Do(ctx, fn)
}

// Wrap returns a function that runs next under [Group.Do] with key.
func (g *Group[K]) Wrap(key K, next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return g.Do(ctx, key, next) }
}

// By returns middleware that runs a function under [Group.Do], for the key of its ctx.
func (g *Group[K]) By(key func(context.Context) K) func(func(context.Context) error) func(context.Context) error {
	return func(next func(context.Context) error) func(context.Context) error {
		return func(ctx context.Context) error { return g.Do(ctx, key(ctx), next) }
	}
}

// Begin takes a slot in the bulkhead of key, as [Bulkhead.Begin] does.
func (g *Group[K]) Begin(ctx context.Context, key K) (done func(error), err error) {
	return g.begin(ctx, key, func(b *Bulkhead) (func(error), error) { return b.Begin(ctx) })
}

// TryBegin takes a slot in the bulkhead of key without a wait, as [Bulkhead.TryBegin] does.
func (g *Group[K]) TryBegin(ctx context.Context, key K) (done func(error), err error) {
	return g.begin(ctx, key, func(b *Bulkhead) (func(error), error) { return b.TryBegin(ctx) })
}

func (g *Group[K]) begin(ctx context.Context, key K, begin func(*Bulkhead) (func(error), error)) (done func(error), err error) {
	if ctx.Err() != nil {
		return nil, ended.Error(ctx)
	}
	if e := g.members.Pin(key); e != nil {
		return e.Begin(begin)
	}
	shared, err := g.overflow(ctx, key)
	if err != nil {
		return nil, err
	}
	return begin(shared)
}

// overflow returns the shared bulkhead, or refuses the call.
func (g *Group[K]) overflow(ctx context.Context, key K) (shared *Bulkhead, err error) {
	r := g.setting.Load()
	if r.Overflow == ShareOne {
		return g.shared, nil
	}
	g.refused.Add(1)
	refusal := &FullError{Name: r.Config.Name, Key: keyed.Text(key), Reason: TooManyKeys}
	if f := r.Config.OnRefuse; f != nil {
		f(ctx, refusal)
	}
	if g.observers.Any() {
		g.observers.Tell(ctx, refusal.event())
	}
	return nil, refusal
}

// All returns the bulkheads that the group holds, in no order, without the shared one.
// Do not keep a bulkhead: after the loop, the group may evict it and make another for
// its key. Being yielded does not count as a call.
func (g *Group[K]) All() iter.Seq2[K, *Bulkhead] { return g.members.All() }
