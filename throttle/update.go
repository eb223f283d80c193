package throttle

import (
	"strconv"

	"github.com/go-resilience/resilience/internal/invalid"
)

// Name returns the Name of the Config.
func (l *Limiter) Name() string { return l.setting.Load().Name }

// Config returns the present Config, with its defaults filled in.
func (l *Limiter) Config() Config { return l.setting.Config() }

// Update changes the configuration. It calls change with the present Config, its defaults
// filled in, and validates the result. If that is invalid, Update returns the error and
// changes nothing. A field that change leaves alone and that was zero when it was given
// gets its default anew: a Burst that was left to the Rate follows the Rate.
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
func (l *Limiter) Update(change func(*Config)) error { return l.setting.Update(change, nil, l.use) }

// Preview returns what Config would return after the Update, or the error of Update, and
// changes nothing.
func (l *Limiter) Preview(change func(*Config)) (Config, error) { return l.setting.Preview(change) }

// SetLimit changes Rate, Burst and Quotas as [Limiter.Update] does.
func (l *Limiter) SetLimit(limit Limit) error {
	return l.setting.Set(func(given *Config) { given.setLimit(limit) }, nil, l.use)
}

// use puts cfg, which has its defaults, into effect.
func (l *Limiter) use(cfg *Config) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.begin(cfg)
	l.serve()
}

// Name returns the Name of the Config.
func (g *Group[K]) Name() string { return g.setting.Load().Config.Name }

// Config returns the present GroupConfig, with its defaults filled in.
func (g *Group[K]) Config() GroupConfig[K] { return g.setting.Config() }

// Update changes the configuration as [Limiter.Update] does. All keys follow the new
// Config immediately, except that keys which have a limit by Set keep it.
//
//   - What [Limiter.Update] keeps is kept for each key.
//   - A new IdleAfter, Overflow or MaxQueued decides about later calls.
//   - MaxKeys cannot fall below the number of keys that the group holds.
//   - The Name and the Levels of Config cannot change.
//
// The number of shards of the group goes by the first MaxKeys: a group that is to grow
// from few keys to many is faster if it is made with many. change must not use the Group.
func (g *Group[K]) Update(change func(*GroupConfig[K])) error {
	return g.setting.Update(change, g.limitKeys, g.use)
}

// Preview returns what Config would return after the Update, or the error of Update, and
// changes nothing. It does not compare MaxKeys with the keys that the group holds.
func (g *Group[K]) Preview(change func(*GroupConfig[K])) (GroupConfig[K], error) {
	return g.setting.Preview(change)
}

// SetLimit changes Rate, Burst and Quotas of all keys as [Group.Update] does, except those
// that Set decides about.
func (g *Group[K]) SetLimit(limit Limit) error {
	return g.setting.Set(func(given *GroupConfig[K]) { given.Config.setLimit(limit) }, g.limitKeys, g.use)
}

// use puts cfg, which has its defaults, into effect.
func (g *Group[K]) use(cfg *GroupConfig[K]) {
	g.waiters.max.Store(int64(cfg.MaxQueued))
	for i := range g.shards {
		g.shards[i].use(&cfg.Config)
	}
	g.overflow.use(&cfg.Config)
}

// limitKeys sets maxKeys, unless more keys are held.
func (g *Group[K]) limitKeys(next *GroupConfig[K]) error {
	most := next.MaxKeys
	was := g.maxKeys.Swap(int64(most)) // first, so that no key comes after the look at keys
	if held := g.keys.Load(); int64(most) < was && held > int64(most) {
		g.maxKeys.Store(was)
		f := invalid.Fields{Type: "throttle.GroupConfig"}
		f.Need(false, "MaxKeys", most, "at least "+strconv.FormatInt(held, 10)+": so many keys are held")
		return f.Err()
	}
	return nil
}

// use makes cfg the configuration of the keys of s.
func (s *shard[K]) use(cfg *Config) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.begin(newTerms(cfg))
	for _, o := range s.own {
		of := cfg
		if o.set {
			c := *cfg
			c.setLimit(o.terms.Load().cfg.limit())
			of = &c
		}
		o.use(of)
	}
}

// Name returns the Name of the SharedConfig.
func (s *Shared) Name() string { return s.setting.Load().Name }

// Config returns the present SharedConfig, with its defaults filled in.
func (s *Shared) Config() SharedConfig { return s.setting.Config() }

// Update changes the configuration of this instance, as [Limiter.Update] does. Each
// instance sends the limit with each call, so the instances may change it one after the
// other.
//
//   - Redis keeps the time until the burst is full again, which does not change with the
//     rate, and what has been spent of a quota. What this instance has admitted alone in
//     an outage stays spent, except by keys whose limit comes from LimitFor or Set.
//   - Outages go on. A new OnOutage decides about later calls, a new Timeout about later
//     round trips, a new RetryEvery after the next attempt.
//   - A new Eval makes later round trips.
//   - Counters go on.
//   - Name, Prefix and Levels cannot change.
//
// change must not use the Shared.
func (s *Shared) Update(change func(*SharedConfig)) error {
	return s.setting.Update(change, s.alone.follow, s.setTerms)
}

// Preview returns what Config would return after the Update, or the error of Update, and
// changes nothing. It allows more Instances than the limit has room for.
func (s *Shared) Preview(change func(*SharedConfig)) (SharedConfig, error) {
	return s.setting.Preview(change)
}

// SetLimit changes Rate, Burst and Quotas as [Shared.Update] does.
func (s *Shared) SetLimit(limit Limit) error {
	return s.setting.Set(func(given *SharedConfig) { given.setLimit(limit) }, s.alone.follow, s.setTerms)
}

// follow puts next into effect.
func (g *Group[K]) follow(next GroupConfig[K]) error {
	return g.setting.Set(func(given *GroupConfig[K]) { *given = next }, g.limitKeys, g.use)
}

// Name returns the Name of the AdaptiveConfig.
func (a *Adaptive) Name() string { return a.setting.Load().Name }

// Config returns the present AdaptiveConfig, with its defaults filled in.
func (a *Adaptive) Config() AdaptiveConfig { return a.setting.Config() }

// Update changes the configuration as [Limiter.Update] does.
//
//   - The calls of the window stay counted. If Window changes, all of them leave the
//     window together, one new Window later.
//   - Calls under way end under the configuration with which they began.
//   - Counters go on.
//   - Name and Levels cannot change.
//
// change must not use the Adaptive.
func (a *Adaptive) Update(change func(*AdaptiveConfig)) error {
	return a.setting.Update(change, nil, a.use)
}

// Preview returns what Config would return after the Update, or the error of Update, and
// changes nothing.
func (a *Adaptive) Preview(change func(*AdaptiveConfig)) (AdaptiveConfig, error) {
	return a.setting.Preview(change)
}
