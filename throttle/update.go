package throttle

import "github.com/go-resilience/resilience/internal/invalid"

// Name returns the Name of the Config.
func (l *Limiter) Name() string { return l.setting.Load().Name }

// Config returns the present Config, with its defaults filled in.
func (l *Limiter) Config() Config { return l.setting.Config() }

// Update changes the configuration. It calls change with the present Config as it was given:
// a zero field means its default. If the result is invalid, Update returns the error and
// changes nothing. A Burst that is zero follows the Rate.
//
//   - Tokens that have been spent stay spent. If 7 of 10 tokens are gone, then 7 of 20 are
//     gone as well, which leaves 13, and they refill at the new rate. A debt that would
//     take longer than 54 years to refill is cut to that. What has been spent of a quota
//     stays spent if there is still a quota with the same window, whatever its N.
//   - A waiting call keeps its place, its level and its MaxWait, and waits as long as the
//     new rate and the new Reserve require. It is admitted even if it takes more than the
//     new Burst. If more calls wait than the new Queue allows, they stay.
//   - Calls under way end under the Config with which they began.
//   - Counters go on.
//   - Name and Levels cannot change: a waiting call has a level.
//
// Updates are made one after the other. change must not use the Limiter.
func (l *Limiter) Update(change func(*Config)) error {
	return l.setting.Update(change, (*Config).fixed, l.use)
}

// Change is Update for a program that does not know the type of the configuration: f gets a
// pointer to it, as Update's change does. If f returns an error, or dry is true, nothing
// changes; dry returns the error that the change would have.
func (l *Limiter) Change(dry bool, f func(cfg any) error) error {
	return l.setting.Change(dry, f, (*Config).fixed, l.use)
}

// use puts cfg, which has its defaults, into effect.
func (l *Limiter) use(cfg *Config) { l.account.use(newTerms(cfg)) }

// Name returns the Name of the Config.
func (g *Group[K]) Name() string { return g.members.Load().Config.Name }

// Config returns the present GroupConfig, with its defaults filled in.
func (g *Group[K]) Config() GroupConfig[K] { return g.members.Config() }

// Update changes the configuration as [Limiter.Update] does. All keys follow the new
// Config immediately, except that keys which have a limit by Set keep it.
//
//   - What [Limiter.Update] keeps is kept for each key.
//   - A new IdleAfter or MaxQueued decides about later calls.
//   - MaxKeys cannot fall below the number of keys that the group holds.
//   - The Name and the Levels of Config cannot change.
//
// change must not use the Group.
func (g *Group[K]) Update(change func(*GroupConfig[K])) error { return g.members.Update(change) }

// Change is Update for a program that does not know the type of the configuration: f gets a
// pointer to it, as Update's change does. If f returns an error, or dry is true, nothing
// changes; dry returns the error that the change would have.
func (g *Group[K]) Change(dry bool, f func(cfg any) error) error {
	return g.members.Change(dry, f)
}

// fixed returns an error if Name or Levels have changed.
func (c *Config) fixed(next *Config) error {
	f := invalid.Fields{Type: "throttle.Config"}
	f.Same("Name", c.Name, next.Name)
	f.Same("Levels", c.Levels, next.Levels)
	return f.Err()
}
