package breaker

import "context"

// Config returns the present Config, with its defaults filled in.
func (b *Breaker) Config() Config { return b.setting.Config() }

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
	return b.setting.Update(change, nil, b.follow)
}

// Preview returns what Config would return after the Update, or the error of Update, and
// changes nothing.
func (b *Breaker) Preview(change func(*Config)) (Config, error) { return b.setting.Preview(change) }

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
	err := g.members.Update(change)
	for _, b := range g.members.All() {
		b.deliver(context.Background())
	}
	g.members.Shared().deliver(context.Background())
	return err
}

// Preview returns what Config would return after the Update, or the error of Update, and
// changes nothing. It does not compare MaxKeys with the breakers that the group holds.
func (g *Group[K]) Preview(change func(*GroupConfig[K])) (GroupConfig[K], error) {
	return g.members.Preview(change)
}
