package breaker

import (
	"context"

	"github.com/go-resilience/resilience/internal/invalid"
)

// Config returns the present Config, with its defaults filled in.
func (b *Breaker) Config() Config { return b.setting.Config() }

// Update changes the Config of a breaker in use. It calls change with the Config as it was
// given: a zero field means its default. If the result is not valid, Update returns the error
// of Validate and nothing changes. A default that depends on another field follows it: after a
// change of SlowAfter, for example, a Patience that was not given does.
//
//   - The state is kept. An open breaker stays open until its time. A breaker that is open
//     or half-open closes after the Successes that it opened with. ForceOpen and Disable
//     stay in effect.
//   - The window and its counts are kept, unless Window or WindowCalls changes, perhaps
//     because its default does. Then the window is counted anew; the failures in a row are
//     kept. If the counts are over a new limit, the breaker opens at the next failure.
//   - The Config with which a call began decides what its result is: SlowAfter, Patience
//     and Classify, and MaxHalfOpen for a probe. The new Config decides whether the result
//     opens the breaker, and for how long.
//   - A Ping takes effect immediately, even if the breaker is half-open, but for a Ping
//     under way. Calls are the probes as soon as there is none.
//   - Name cannot change: Update returns an error.
//
// Updates run one at a time. change must not use the breaker or its group.
func (b *Breaker) Update(change func(*Config)) error {
	defer b.deliver(context.Background())
	return b.setting.Update(change, (*Config).fixed, b.follow)
}

// Change is Update for a program that does not know the type of the configuration: f gets a
// pointer to it, as Update's change does. If f returns an error, or dry is true, nothing
// changes; dry returns the error that the change would have.
func (b *Breaker) Change(dry bool, f func(cfg any) error) error {
	defer b.deliver(context.Background())
	return b.setting.Change(dry, f, (*Config).fixed, b.follow)
}

func (b *Breaker) follow(cfg *Config) {
	b.mu.Lock()
	defer b.mu.Unlock()
	next := *b.catchUp()
	if next.circuit != nil {
		next.circuit.follow(cfg, b.now())
	}
	next.cfg = cfg
	b.phase.Store(&next)
	if cfg.Ping == nil {
		b.stopPinging()
	} else if b.stopPing == nil && (next.state == Open || next.state == HalfOpen) {
		b.startPinging(&next)
	}
}

// Config returns the present GroupConfig, with its defaults filled in.
func (g *Group[K]) Config() GroupConfig[K] { return g.members.Config() }

// Update changes the GroupConfig of a group in use, as [Breaker.Update] changes a Config.
//
//   - All breakers of the group get the new Config, as if by [Breaker.Update]. It replaces
//     the Config that an Update of a single breaker has set. A breaker whose Config came
//     from ConfigFor keeps that.
//   - A new ConfigFor applies to breakers that are made after the Update.
//   - MaxKeys cannot be less than the number of breakers that the group holds, and the Name
//     of Config cannot change: Update returns an error.
//
// Updates run one at a time. change must not use the group or its breakers.
func (g *Group[K]) Update(change func(*GroupConfig[K])) error {
	defer g.deliver()
	return g.members.Update(change)
}

// Change is Update for a program that does not know the type of the configuration: f gets a
// pointer to it, as Update's change does. If f returns an error, or dry is true, nothing
// changes; dry returns the error that the change would have.
func (g *Group[K]) Change(dry bool, f func(cfg any) error) error {
	defer g.deliver()
	return g.members.Change(dry, f)
}

func (g *Group[K]) deliver() {
	for _, b := range g.members.All() {
		b.deliver(context.Background())
	}
	g.members.Shared().deliver(context.Background())
}

// fixed returns an error if Name has changed.
func (c *Config) fixed(next *Config) error {
	f := invalid.Fields{Type: "breaker.Config"}
	f.Same("Name", c.Name, next.Name)
	return f.Err()
}
