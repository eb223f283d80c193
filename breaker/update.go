package breaker

import (
	"context"
	"errors"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/settings"
)

// rules are a Config with its defaults filled in, and as it was given. They do not change:
// an Update makes new ones.
type rules struct {
	Config
	given Config
}

func newRules(given Config) *rules { return &rules{given.withDefaults(), given} }

// checkFixed returns an error if c changes what cannot change.
func (c Config) checkFixed(was Config) error {
	f := invalid.Fields{Type: "breaker.Config"}
	f.NeedSame("Name", was.Name, c.Name)
	return f.Err()
}

// Config returns the present Config, with its defaults filled in.
func (b *Breaker) Config() Config { return b.phase.Load().rules.Config }

// Update changes the Config of a breaker in use. It calls change with the present Config,
// with its defaults filled in. If the result is not valid, Update returns the error of
// Validate and nothing changes. A field that has its default, and that change does not
// set, gets its default anew: after a change of SlowAfter, for example, Patience follows.
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
	b.updating.Lock()
	defer b.updating.Unlock()
	was := b.phase.Load().rules
	given := settings.Change(was.given, was.Config, change)
	if err := errors.Join(given.checkFixed(was.Config), given.Validate()); err != nil {
		return err
	}
	b.follow(newRules(given))
	return nil
}

// follow puts r into effect; b.updating is held.
func (b *Breaker) follow(r *rules) {
	b.mu.Lock()
	defer b.mu.Unlock()
	next := *b.catchUp()
	if next.circuit != nil {
		next.circuit.follow(r, b.now())
	}
	next.rules = r
	b.phase.Store(&next)
	if r.Ping == nil {
		b.stopPinging()
	} else if b.stopPing == nil && (next.state == Open || next.state == HalfOpen) {
		b.startPinging(&next)
	}
}

// groupRules are a GroupConfig with its defaults filled in, and as it was given. They do
// not change.
type groupRules[K comparable] struct {
	GroupConfig[K]
	given GroupConfig[K]
	rules *rules // of the breakers
}

func newGroupRules[K comparable](given GroupConfig[K]) *groupRules[K] {
	return &groupRules[K]{given.withDefaults(), given, newRules(given.Config)}
}

// Config returns the present GroupConfig, with its defaults filled in.
func (g *Group[K]) Config() GroupConfig[K] { return g.rules.Load().GroupConfig }

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
	members, err := g.update(change)
	for _, b := range members {
		b.deliver(context.Background())
	}
	return err
}

// update returns the breakers that have followed a change.
func (g *Group[K]) update(change func(*GroupConfig[K])) (members []*Breaker, err error) {
	g.updating.Lock()
	defer g.updating.Unlock()
	was := g.rules.Load()
	given := settings.Change(was.given, was.GroupConfig, change)
	if err := errors.Join(given.Config.checkFixed(was.Config), given.Validate()); err != nil {
		return nil, err
	}
	next := newGroupRules(given)
	if err := g.members.SetBounds("breaker.GroupConfig", next.MaxKeys, next.IdleAfter); err != nil {
		return nil, err
	}
	g.rules.Store(next)
	members = append(members, g.shared)
	for _, b := range g.members.All() {
		if !b.own {
			members = append(members, b)
		}
	}
	for _, b := range members {
		b.update(next.rules)
	}
	return members, nil
}

// update puts the rules of a group into effect.
func (b *Breaker) update(r *rules) {
	b.updating.Lock()
	defer b.updating.Unlock()
	b.follow(r)
}
