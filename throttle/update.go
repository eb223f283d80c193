package throttle

import (
	"cmp"
	"slices"
	"strconv"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/settings"
)

// Name returns the Name of the Config.
func (l *Limiter) Name() string { return l.terms.Load().cfg.Name }

// Config returns the present Config, with its defaults filled in.
func (l *Limiter) Config() Config { return l.terms.Load().cfg.clone() }

func (c Config) clone() Config {
	c.Reserve, c.Quotas = slices.Clone(c.Reserve), slices.Clone(c.Quotas)
	return c
}

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
func (l *Limiter) Update(change func(*Config)) error {
	l.updating.Lock()
	defer l.updating.Unlock()
	return l.apply(settings.Change(l.given, l.Config(), change))
}

// SetLimit changes Rate, Burst and Quotas as [Limiter.Update] does.
func (l *Limiter) SetLimit(limit Limit) error {
	l.updating.Lock()
	defer l.updating.Unlock()
	next := l.given
	next.setLimit(limit)
	return l.apply(next)
}

// apply makes next the configuration, if it is valid. The caller holds updating.
func (l *Limiter) apply(next Config) error {
	f := invalid.Fields{Type: "throttle.Config"}
	checkFixed(&f, l.given.Name, next.Name, l.given.Levels, next.Levels)
	next.validate(&f)
	if err := f.Err(); err != nil {
		return err
	}
	l.given = next.clone()
	l.use(next.withDefaults())
	return nil
}

// use makes cfg, a valid configuration with its defaults filled in, the present one.
func (l *Limiter) use(cfg Config) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.begin(&cfg)
	l.serve()
}

// Name returns the Name of the Config.
func (g *Group[K]) Name() string { return g.cfg.Load().Config.Name }

// Config returns the present GroupConfig, with its defaults filled in.
func (g *Group[K]) Config() GroupConfig[K] {
	c := *g.cfg.Load()
	c.Config = c.Config.clone()
	return c
}

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
	g.updating.Lock()
	defer g.updating.Unlock()
	return g.apply(settings.Change(g.given, g.Config(), change))
}

// SetLimit changes Rate, Burst and Quotas of all keys as [Group.Update] does, except those
// that Set decides about.
func (g *Group[K]) SetLimit(limit Limit) error {
	g.updating.Lock()
	defer g.updating.Unlock()
	next := g.given
	next.Config.setLimit(limit)
	return g.apply(next)
}

// apply makes next the configuration, if it is valid. The caller holds updating.
func (g *Group[K]) apply(next GroupConfig[K]) error {
	f := invalid.Fields{Type: "throttle.Config"}
	checkFixed(&f, g.given.Config.Name, next.Config.Name, g.given.Config.Levels, next.Config.Levels)
	next.Config.validate(&f)
	f.Type = "throttle.GroupConfig"
	next.validate(&f)
	if err := f.Err(); err != nil {
		return err
	}
	cfg := next.withDefaults()
	if err := g.limitKeys(cfg.MaxKeys); err != nil {
		return err
	}
	next.Config = next.Config.clone()
	g.given = next
	g.waiters.max.Store(int64(cfg.MaxQueued))
	for i := range g.shards {
		g.shards[i].use(&cfg.Config)
	}
	g.overflow.use(cfg.Config)
	g.cfg.Store(&cfg)
	return nil
}

// limitKeys sets maxKeys, unless more keys are held.
func (g *Group[K]) limitKeys(most int) error {
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
		c := *cfg
		if o.set {
			c.setLimit(o.terms.Load().cfg.limit())
		}
		o.use(c)
	}
}

// Name returns the Name of the SharedConfig.
func (s *Shared) Name() string { return s.terms.Load().cfg.Name }

// Config returns the present SharedConfig, with its defaults filled in.
func (s *Shared) Config() SharedConfig { return s.terms.Load().cfg.clone() }

func (c SharedConfig) clone() SharedConfig {
	c.Reserve, c.Quotas = slices.Clone(c.Reserve), slices.Clone(c.Quotas)
	return c
}

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
	s.updating.Lock()
	defer s.updating.Unlock()
	return s.apply(settings.Change(s.given, s.Config(), change))
}

// SetLimit changes Rate, Burst and Quotas as [Shared.Update] does.
func (s *Shared) SetLimit(limit Limit) error {
	s.updating.Lock()
	defer s.updating.Unlock()
	next := s.given
	next.setLimit(limit)
	return s.apply(next)
}

// apply makes next the configuration, if it is valid. The caller holds updating.
func (s *Shared) apply(next SharedConfig) error {
	f := invalid.Fields{Type: "throttle.SharedConfig"}
	checkFixed(&f, s.given.Name, next.Name, s.given.Levels, next.Levels)
	prefix := s.terms.Load().cfg.Prefix
	f.Need(cmp.Or(next.Prefix, defaultPrefix) == prefix, "Prefix", strconv.Quote(next.Prefix), strconv.Quote(prefix)+" as before: it cannot change")
	next.validate(&f)
	if err := f.Err(); err != nil {
		return err
	}
	cfg := next.withDefaults()
	if err := s.alone.follow(&cfg); err != nil {
		return err
	}
	s.given = next.clone()
	s.setTerms(&cfg)
	return nil
}

// follow makes next the configuration of g.
func (g *Group[K]) follow(next GroupConfig[K]) error {
	g.updating.Lock()
	defer g.updating.Unlock()
	return g.apply(next)
}

// Name returns the Name of the AdaptiveConfig.
func (a *Adaptive) Name() string { return a.cfg.Load().Name }

// Config returns the present AdaptiveConfig, with its defaults filled in.
func (a *Adaptive) Config() AdaptiveConfig { return *a.cfg.Load() }

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
	a.updating.Lock()
	defer a.updating.Unlock()
	next := settings.Change(a.given, a.Config(), change)
	f := invalid.Fields{Type: "throttle.AdaptiveConfig"}
	checkFixed(&f, a.given.Name, next.Name, a.given.Levels, next.Levels)
	next.validate(&f)
	if err := f.Err(); err != nil {
		return err
	}
	a.given = next
	a.use(next.withDefaults())
	return nil
}

// checkFixed records a change of a name or a number of levels.
func checkFixed(f *invalid.Fields, wasName, isName string, wasLevels, isLevels int) {
	f.Need(isName == wasName, "Name", strconv.Quote(isName), strconv.Quote(wasName)+" as before: it cannot change")
	levels := max(wasLevels, 1)
	f.Need(max(isLevels, 1) == levels, "Levels", isLevels, strconv.Itoa(levels)+" as before: it cannot change while calls have levels")
}
