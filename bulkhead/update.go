package bulkhead

import (
	"context"

	"github.com/go-resilience/resilience/internal/invalid"
)

// Name returns the Name of the Config.
func (b *Bulkhead) Name() string { return b.setting.Load().Name }

// Config returns the present Config, with its defaults filled in.
func (b *Bulkhead) Config() Config { return b.setting.Config() }

// Update changes the Config. It calls change with the present one as it was given: a zero
// field means its default, which may depend on another field. What change leaves in it takes
// effect if it is valid. Otherwise Update returns an error that names the field, and nothing
// changes.
//
//   - Slots in flight, the queue, and all counts are kept. Calls under way end under the
//     Config that they began with.
//   - A new Limit takes effect as by [Bulkhead.SetLimit].
//   - Waiting calls keep their place, level and cost, and their MaxWait, even if no other
//     call may wait from now on. If Queue becomes less than the number of waiting calls,
//     they stay, and new calls find the queue full.
//   - A new Order or Reserve says which waiting call gets the next slot. A call that
//     costs more than its level may use now is refused.
//   - If Adaptive is set, the limit begins at the present one, or the nearest within Min
//     and Max. If Adaptive changes, the limit keeps what it has learned; a probe under
//     way ends. If Adaptive becomes nil, Limit must be set.
//   - A new Priority, Cost, Share, Weight or hook is called from now on. Calls that run or
//     wait keep their share.
//   - Name and Levels cannot change: a waiting call has a level.
//
// Updates are made one after the other. change must not use the bulkhead or its group.
func (b *Bulkhead) Update(change func(*Config)) error {
	defer b.announce(context.Background())
	return b.setting.Update(change, (*Config).fixed, b.adopt)
}

// Change is Update for a program that does not know the type of the configuration: f gets a
// pointer to it, as Update's change does. If f returns an error, or dry is true, nothing
// changes; dry returns the error that the change would have.
func (b *Bulkhead) Change(dry bool, f func(cfg any) error) error {
	defer b.announce(context.Background())
	return b.setting.Change(dry, f, (*Config).fixed, b.adopt)
}

// adopt puts cfg into effect.
func (b *Bulkhead) adopt(cfg *Config) {
	next := newRules(cfg)
	limit := next.Limit
	if next.Adaptive != nil {
		a := b.rules.Load().adaptive
		if a == nil {
			a = &adaptive{controller: newController(*next.Adaptive)}
			a.controller.restart(b.unix(), int(b.queue.limit.Load()))
		}
		next.adaptive = a
		a.mu.Lock()
		defer a.mu.Unlock()
		a.controller.reform(b.unix(), *next.Adaptive)
		limit = a.controller.Limit()
	}
	b.mu.Lock()
	defer b.unlock()
	b.rules.Store(next)
	if int64(limit) == b.queue.limit.Load() {
		b.serve(next)
		return
	}
	b.resize(next, Event{To: limit})
}

// Name returns the Name of the Config.
func (g *Group[K]) Name() string { return g.members.Load().Config.Name }

// Config returns the present GroupConfig, with its defaults filled in.
func (g *Group[K]) Config() GroupConfig[K] { return g.members.Config() }

// Update changes the GroupConfig as [Bulkhead.Update] changes a Config.
//
//   - Every bulkhead of the group follows a new Config, present ones too, as by
//     [Bulkhead.Update], which it overrides. A bulkhead whose Config came from ConfigFor
//     keeps it.
//   - A new ConfigFor holds for the bulkheads that are made from now on.
//   - MaxKeys cannot be less than the number of bulkheads that the group holds.
//   - The Name and the Levels of Config cannot change.
func (g *Group[K]) Update(change func(*GroupConfig[K])) error {
	defer g.announce()
	return g.members.Update(change)
}

// Change is Update for a program that does not know the type of the configuration: f gets a
// pointer to it, as Update's change does. If f returns an error, or dry is true, nothing
// changes; dry returns the error that the change would have.
func (g *Group[K]) Change(dry bool, f func(cfg any) error) error {
	defer g.announce()
	return g.members.Change(dry, f)
}

func (g *Group[K]) announce() {
	for _, b := range g.members.All() {
		b.announce(context.Background())
	}
	g.members.Shared().announce(context.Background())
}

// fixed returns an error if Name or Levels have changed.
func (c *Config) fixed(next *Config) error {
	f := invalid.Fields{Type: "bulkhead.Config"}
	f.Same("Name", c.Name, next.Name)
	f.Same("Levels", c.Levels, next.Levels)
	return f.Err()
}
