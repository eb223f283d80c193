package retry

import (
	"context"
	"errors"
	"iter"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/keyed"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
)

const defaultMaxKeys = 10_000

// BudgetGroupConfig says how a [BudgetGroup] works.
type BudgetGroupConfig[K comparable] struct {
	// Config is that of every Budget in the group. Its Name is the group's.
	Config BudgetConfig

	// ConfigFor, if not nil, returns the BudgetConfig of the Budget of a key, instead of
	// Config. Its Name is ignored. It must be valid: a call for a key panics otherwise.
	// ConfigFor may be called more than once for a key, by several goroutines.
	ConfigFor func(K) BudgetConfig

	// MaxKeys is how many Budgets are held at once, at most. Zero means 10 000.
	MaxKeys int

	// IdleAfter is how long a Budget must have had no call to be evicted. Zero means 10
	// minutes. Negative means that Budgets are evicted only to make room.
	IdleAfter time.Duration
}

// Validate returns an error that names each invalid field, or nil.
func (c BudgetGroupConfig[K]) Validate() error {
	f := invalid.Fields{Type: "retry.BudgetGroupConfig"}
	c.bounds().Check(&f, defaultMaxKeys)
	return errors.Join(f.Err(), c.Config.Validate())
}

func (c BudgetGroupConfig[K]) withDefaults() BudgetGroupConfig[K] {
	c.Config = c.Config.withDefaults()
	c.MaxKeys, c.IdleAfter = c.bounds().Filled(defaultMaxKeys, 10*time.Minute)
	return c
}

func (c *BudgetGroupConfig[K]) bounds() keyed.Bounds {
	return keyed.Bounds{MaxKeys: c.MaxKeys, IdleAfter: c.IdleAfter}
}

// own returns the BudgetConfig of a key, if that is not the one of all keys.
func (c *BudgetGroupConfig[K]) own(key K) *settings.Version[BudgetConfig] {
	if c.ConfigFor == nil {
		return nil
	}
	cfg := c.ConfigFor(key)
	cfg.Name = c.Config.Name
	return newBudgetVersion(cfg)
}

// A BudgetGroup holds one [Budget] for each key, such as a host or a tenant, so that a key
// that fails does not use up the retries of the others. It is safe for concurrent use.
// [NewBudgetGroup] makes one.
//
//	budgets := retry.NewBudgetGroup(retry.BudgetGroupConfig[string]{})
//	retries := retry.New(retry.Config{BudgetFor: budgets.By(resiliencehttp.HostOf)})
//
// The first call with a key makes its Budget. A Budget that is idle is evicted, but never
// while retries of the last 10 seconds are charged to it: a key cannot get a new Budget by
// being evicted. A new key in a full group takes the place of another; the group looks at a
// few of them, and if none can be evicted, the new key has none: all such keys share one Budget,
// made from Config, whose Key is "(other keys)". So does a key that is not equal to itself,
// such as NaN.
type BudgetGroup[K comparable] struct {
	members   *keyed.Group[K, BudgetGroupConfig[K], settings.Version[BudgetConfig], Budget]
	observers notify.Observers[Event]
	did       budgetCounts
}

// NewBudgetGroup returns a BudgetGroup without Budgets. It panics if cfg is not valid: see
// [BudgetGroupConfig.Validate].
func NewBudgetGroup[K comparable](cfg BudgetGroupConfig[K]) *BudgetGroup[K] {
	g := &BudgetGroup[K]{}
	g.members = keyed.New(cfg, BudgetGroupConfig[K].withDefaults, keyed.Kind[K, BudgetGroupConfig[K], settings.Version[BudgetConfig], Budget]{
		Type:   "retry.BudgetGroupConfig",
		Fixed:  func(was, next *BudgetGroupConfig[K]) error { return was.Config.fixed(&next.Config) },
		Bounds: (*BudgetGroupConfig[K]).bounds,
		Each: func(s *settings.Setting[BudgetGroupConfig[K]]) *settings.Version[BudgetConfig] {
			return newBudgetVersion(s.Given().Config)
		},
		Own:  (*BudgetGroupConfig[K]).own,
		Make: g.make,
		Follow: func(b *Budget, each *settings.Version[BudgetConfig]) {
			b.setting.Adopt(each, BudgetConfig.withDefaults, nil)
		},
		Needed: (*Budget).needed,
	})
	return g
}

func (g *BudgetGroup[K]) make(b *Budget, key *K, each *settings.Version[BudgetConfig]) {
	b.make(each)
	b.key, b.group = keyed.TextOf(key), &g.did
	b.observers.In(&g.observers)
	if key != nil {
		b.present = func() *Budget { return g.of(*key) }
	}
}

// needed reports whether retries are charged to b: a new Budget in its place would allow them
// again.
func (b *Budget) needed() bool {
	_, charged := b.counts()
	return charged > 0
}

// By returns a function that returns the Budget of the key of a ctx, for BudgetFor of a
// [Config] or a [HedgeConfig].
func (g *BudgetGroup[K]) By(key func(context.Context) K) func(context.Context) *Budget {
	return func(ctx context.Context) *Budget { return g.of(key(ctx)) }
}

func (g *BudgetGroup[K]) of(key K) *Budget {
	e := g.members.Pin(key)
	defer e.Unpin()
	return &e.Value
}

// All returns the Budgets that the group holds, in no order, without the shared one. Do not
// keep a Budget: after the loop, the group may evict it and make another for its key.
// Being yielded does not count as a call.
func (g *BudgetGroup[K]) All() iter.Seq2[K, *Budget] { return g.members.All() }

// Observe calls f with an [EventOverBudget] for each retry and further call that a Budget of
// the group does not allow from now on, until stop is called, as [Budget.Observe] does and
// after the observers of that Budget.
func (g *BudgetGroup[K]) Observe(f func(context.Context, Event)) (stop func()) {
	return g.observers.Observe(f)
}

// Name returns the Name of the group's Config.
func (g *BudgetGroup[K]) Name() string { return g.members.Load().Config.Name }

// Config returns the present BudgetGroupConfig of g, with its defaults filled in.
func (g *BudgetGroup[K]) Config() BudgetGroupConfig[K] { return g.members.Config() }

// Update changes the BudgetGroupConfig of g as [Budget.Update] changes a BudgetConfig.
//
//   - Every Budget of the group follows a new Config, present ones too, and keeps its calls
//     and retries. It replaces what an Update of a single Budget has set. A Budget whose
//     BudgetConfig came from ConfigFor keeps that.
//   - A new ConfigFor holds for the Budgets that are made from now on.
//   - MaxKeys cannot be less than the number of Budgets that the group holds.
//   - The Name of Config cannot change.
func (g *BudgetGroup[K]) Update(change func(*BudgetGroupConfig[K])) error {
	return g.members.Update(change)
}

// Change is Update for a program that does not know the type of the configuration: f gets a
// pointer to it, as Update's change does. If f returns an error, or dry is true, nothing
// changes; dry returns the error that the change would have.
func (g *BudgetGroup[K]) Change(dry bool, f func(cfg any) error) error {
	return g.members.Change(dry, f)
}

// BudgetGroupStats is a snapshot of a [BudgetGroup].
type BudgetGroupStats struct {
	// BudgetTotals are the sums over all Budgets of the group, those that it has evicted
	// included.
	BudgetTotals

	Keys  int // Budgets that the group holds, without the shared one
	Empty int // of these, Budgets that would allow no retry now

	// The calls and retries of all keys in the last 10 seconds, as in BudgetStats.
	Called  int64
	Charged int64
}

// Stats returns a snapshot.
func (g *BudgetGroup[K]) Stats() BudgetGroupStats {
	s := BudgetGroupStats{BudgetTotals: g.did.totals()}
	shared := g.members.Shared().Stats()
	s.Called, s.Charged = shared.Called, shared.Charged
	s.Keys = g.members.Len() // others may come and go during the loop
	for _, b := range g.members.All() {
		of := b.Stats()
		s.Called += of.Called
		s.Charged += of.Charged
		if of.Left == 0 {
			s.Empty++
		}
	}
	s.Empty = min(s.Empty, s.Keys)
	return s
}
