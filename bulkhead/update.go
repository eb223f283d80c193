package bulkhead

import "context"

// rules are a Config as a call reads it: once, at its start. They do not change: an
// Update makes new ones.
type rules struct {
	*Config            // with defaults
	simple   bool      // without Priority, Cost, Share and Adaptive
	above    []float64 // by level: the share of the limit that is kept for the levels above
	adaptive *adaptive // nil if the limit is fixed
}

// newRules returns the rules of a Config with defaults, without adaptive.
func newRules(cfg *Config) *rules {
	r := &rules{Config: cfg}
	r.simple = r.Priority == nil && r.Cost == nil && r.Share == nil && r.Adaptive == nil
	r.above = make([]float64, r.Levels)
	for level := 1; level < r.Levels; level++ {
		r.above[level] = r.above[level-1]
		if level <= len(r.Reserve) {
			r.above[level] += r.Reserve[level-1]
		}
	}
	return r
}

// kept returns how many slots of a limit a call of level must leave free.
func (r *rules) kept(limit, level int) int {
	if r.above[level] == 0 {
		return 0
	}
	const rounding = 1e-9 // a share of a whole number of slots may fall short of it
	return min(int(float64(limit)*r.above[level]+rounding), limit-1)
}

// most returns how many slots of a limit the calls of a level may use.
func (r *rules) most(limit, level int) int { return limit - r.kept(limit, level) }

// Name returns the Name of the Config.
func (b *Bulkhead) Name() string { return b.setting.Load().Name }

// Config returns the present Config, with its defaults filled in.
func (b *Bulkhead) Config() Config { return b.setting.Config() }

// Update changes the Config. It calls change with the present one, defaults filled in.
// What change leaves in it takes effect if it is valid. Otherwise Update returns an error
// that names the field, and nothing changes. A field that was not set, and that change
// leaves alone, keeps meaning its default, also if that depends on another field.
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
	if err := b.setting.Update(change, nil, b.adopt); err != nil {
		return err
	}
	b.announce(context.Background())
	return nil
}

// Preview returns what Config would return after the Update, or the error of Update, and
// changes nothing.
func (b *Bulkhead) Preview(change func(*Config)) (Config, error) { return b.setting.Preview(change) }

// adopt puts cfg into effect.
func (b *Bulkhead) adopt(cfg *Config) {
	next := newRules(cfg)
	limit := next.Limit
	if next.Adaptive != nil {
		a := b.rules.Load().adaptive
		if a == nil {
			a = &adaptive{controller: newController(*next.Adaptive)}
			a.controller.restart(b.unix(), int(b.limit.Load()))
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
	if int64(limit) == b.limit.Load() {
		b.serve(next)
		return
	}
	b.resize(next, Event{To: limit})
}

// Name returns the Name of the Config.
func (g *Group[K]) Name() string { return g.setting.Load().Config.Name }

// Config returns the present GroupConfig, with its defaults filled in.
func (g *Group[K]) Config() GroupConfig[K] { return g.setting.Config() }

// Update changes the GroupConfig as [Bulkhead.Update] changes a Config.
//
//   - Every bulkhead of the group follows a new Config, present ones too, as by
//     [Bulkhead.Update], which it overrides. A bulkhead whose Config came from ConfigFor
//     keeps it.
//   - A new ConfigFor holds for the bulkheads that are made from now on.
//   - MaxKeys cannot be less than the number of bulkheads that the group holds.
//   - The Name and the Levels of Config cannot change.
func (g *Group[K]) Update(change func(*GroupConfig[K])) error {
	var members []*Bulkhead
	err := g.setting.Update(change, g.admit, func(*GroupConfig[K]) { members = g.follow() })
	for _, b := range members {
		b.announce(context.Background())
	}
	return err
}

// Preview returns what Config would return after the Update, or the error of Update, and
// changes nothing. It does not compare MaxKeys with the bulkheads that the group holds.
func (g *Group[K]) Preview(change func(*GroupConfig[K])) (GroupConfig[K], error) {
	return g.setting.Preview(change)
}

func (g *Group[K]) admit(next *GroupConfig[K]) error {
	return g.members.SetBounds("bulkhead.GroupConfig", next.MaxKeys, next.IdleAfter)
}

// follow returns the bulkheads that have followed an Update.
func (g *Group[K]) follow() (members []*Bulkhead) {
	each := newVersion(g.setting.Given().Config)
	g.each.Store(each)
	members = append(members, g.shared)
	for _, b := range g.members.All() {
		if !b.own {
			members = append(members, b)
		}
	}
	for _, b := range members {
		b.setting.Adopt(each, b.adopt)
	}
	return members
}
