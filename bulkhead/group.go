package bulkhead

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/keyed"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/internal/notify"
)

// DefaultMaxKeys is the MaxKeys of a [GroupConfig] that leaves it zero.
const DefaultMaxKeys = 10_000

const defaultIdleAfter = 10 * time.Minute

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

	// IdleAfter is how long a bulkhead must have had no call to be forgotten, with what
	// it has counted and the limit that it has found. Zero means 10 minutes. Negative
	// means that bulkheads are forgotten only to make room.
	IdleAfter time.Duration

	// Overflow says what happens to a call with a new key when MaxKeys bulkheads are held
	// and none of them can be forgotten, and to a key that is not equal to itself, such as
	// NaN. Zero means ShareOne.
	Overflow Overflow
}

func (c GroupConfig[K]) withDefaults() GroupConfig[K] {
	c.Config = c.Config.withDefaults()
	c.MaxKeys = cmp.Or(c.MaxKeys, DefaultMaxKeys)
	c.IdleAfter = cmp.Or(c.IdleAfter, defaultIdleAfter)
	return c
}

// Validate returns an error that names each invalid field, or nil.
func (c GroupConfig[K]) Validate() error {
	return errors.Join(c.validate(), c.Config.Validate())
}

// validate is Validate without Config.
func (c GroupConfig[K]) validate() error {
	f := invalid.Fields{Type: "bulkhead.GroupConfig"}
	f.Need(c.MaxKeys >= 0, "MaxKeys", c.MaxKeys, fmt.Sprintf("0 (for %d) or more", DefaultMaxKeys))
	f.Need(c.Overflow == ShareOne || c.Overflow == RefuseNew, "Overflow", int(c.Overflow), "ShareOne or RefuseNew")
	return f.Err()
}

// An Overflow says what a [Group] does with a call of a new key when it holds MaxKeys
// bulkheads and can forget none of them.
type Overflow int

const (
	// ShareOne lets all such calls share one bulkhead, made from Config, whose Key is
	// "(other keys)". So the number of running calls is bounded whatever keys arrive.
	ShareOne Overflow = iota

	// RefuseNew refuses the call: TooManyKeys.
	RefuseNew
)

var overflows = []string{"share one", "refuse new"}

// String returns "share one" or "refuse new".
func (o Overflow) String() string {
	if o < ShareOne || o > RefuseNew {
		return fmt.Sprintf("bulkhead.Overflow(%d)", int(o))
	}
	return overflows[o]
}

// MarshalText returns the text of String. It returns an error for any other value than
// the constants.
func (o Overflow) MarshalText() ([]byte, error) {
	if o < ShareOne || o > RefuseNew {
		return nil, fmt.Errorf("bulkhead.Overflow is %d: must be %q or %q", int(o), ShareOne, RefuseNew)
	}
	return []byte(o.String()), nil
}

// UnmarshalText accepts the texts of String.
func (o *Overflow) UnmarshalText(text []byte) error {
	i := slices.Index(overflows, string(text))
	if i < 0 {
		return fmt.Errorf("bulkhead.Overflow is %q: must be %q or %q", text, ShareOne, RefuseNew)
	}
	*o = Overflow(i)
	return nil
}

// A Group holds one [Bulkhead] for each tenant or dependency, so that none of them can
// take the slots of another. It is safe for concurrent use.
//
// The first call with a key makes its bulkhead. A bulkhead that is idle is forgotten,
// but never while it has a call, running or waiting. A new key in a full group takes
// the place of a bulkhead without calls; the group looks at a few of them, and if each
// has calls, Overflow says what happens. [NewGroup] makes a Group.
type Group[K comparable] struct {
	updates   sync.Mutex // held during an Update
	rules     atomic.Pointer[groupRules[K]]
	members   *keyed.Map[K, *Bulkhead]
	shared    *Bulkhead
	observers notify.Observers[Event]
	refused   atomic.Int64         // calls refused for their key
	forgotten [keyed.Shards]Totals // of the bulkheads dropped from a shard, whose lock guards it
}

// NewGroup returns a Group without bulkheads. It panics with the error of cfg.Validate, if
// there is one.
func NewGroup[K comparable](cfg GroupConfig[K]) *Group[K] {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	r := newGroupRules(cfg, 0)
	g := &Group[K]{}
	g.rules.Store(r)
	g.shared = g.newMember(r, keyed.Other)
	g.members = keyed.New(keyed.Config[K, *Bulkhead]{
		Make:  g.make,
		Max:   r.MaxKeys,
		Idle:  r.IdleAfter,
		Added: g.added,
		Drop:  func(shard int, b *Bulkhead) { g.forgotten[shard].add(b.Stats().Totals) },
	})
	return g
}

func (g *Group[K]) make(key K) *Bulkhead {
	r := g.rules.Load()
	if r.ConfigFor == nil {
		return g.newMember(r, keyed.Text(key))
	}
	cfg := r.ConfigFor(key)
	cfg.Name = r.Config.Name
	b := New(cfg)
	b.key, b.own = keyed.Text(key), true
	b.observers.In(&g.observers)
	return b
}

// newMember returns a bulkhead with the Config of the group.
func (g *Group[K]) newMember(r *groupRules[K], key string) *Bulkhead {
	of := newRules(r.given.Config)
	of.generation = r.generation
	b := newBulkhead(of, key)
	b.observers.In(&g.observers)
	return b
}

// added has a new member follow an Update that was made since it was made.
func (g *Group[K]) added(b *Bulkhead) {
	if !b.own {
		g.rules.Load().lead(b)
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
		return work.Hold(ctx, e.Value.Wrap(fn), e.Unpin)
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
	if ctx.Err() != nil {
		return nil, ended.Error(ctx)
	}
	e := g.members.Pin(key)
	if e == nil {
		shared, err := g.overflow(ctx, key)
		if err != nil {
			return nil, err
		}
		return shared.Begin(ctx)
	}
	begun := false // stays so if a hook panics
	defer func() {
		if !begun {
			e.Unpin()
		}
	}()
	end, err := e.Value.Begin(ctx)
	if err != nil {
		return nil, err
	}
	begun = true
	var over atomic.Bool
	return func(err error) {
		if over.CompareAndSwap(false, true) {
			defer e.Unpin()
			end(err)
		}
	}, nil
}

// overflow returns the shared bulkhead, or refuses the call.
func (g *Group[K]) overflow(ctx context.Context, key K) (shared *Bulkhead, err error) {
	r := g.rules.Load()
	if r.Overflow == ShareOne {
		return g.shared, nil
	}
	g.refused.Add(1)
	refusal := &FullError{Name: r.Config.Name, Key: keyed.Text(key), Reason: TooManyKeys}
	if f := r.Config.OnReject; f != nil {
		f(ctx, refusal)
	}
	if g.observers.Any() {
		g.observers.Tell(ctx, refusal.event())
	}
	return nil, refusal
}

// All returns the bulkheads that the group holds, in no order, without the shared one.
// Do not keep a bulkhead: after the loop, the group may forget it and make another for
// its key. Looking at a bulkhead does not keep it from being forgotten.
func (g *Group[K]) All() iter.Seq2[K, *Bulkhead] { return g.members.All() }
