package resilience

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"

	"github.com/go-resilience/resilience/internal/keyed"
	"github.com/go-resilience/resilience/internal/settings"
	"github.com/go-resilience/resilience/policy"
)

// Describe describes the group as one policy, which has the kind and the name of the group's overflow. The
// documentation of [Group] defines the terms member and overflow. In the description:
//
//   - Each metric is the sum of the values of the overflow and all members. For a gauge that is a ratio or a
//     duration, the value is instead the maximum of these values. The counts of evicted members remain in
//     the group's counters. The metrics also include those of [GroupStats].
//   - The health status is Fail if there are members and every member's status is Fail. Otherwise the status
//     is Warn if any member's status or the overflow's status is not Pass.
//   - The Config is the overflow's Config.
//   - Update changes the overflow, all existing members and members that are created later. Update calls its
//     function argument twice for the overflow and twice for each existing member. The first call only validates
//     the change, and the second call applies it. A dry run omits the second call. If the overflow or an existing
//     member rejects the change, no policy is changed. A member that is created later takes the overflow's values
//     for all modified fields. If a value is invalid in combination with the member's own configuration, the
//     member does not take this value. A field that holds a function counts as modified unless it still holds the
//     same function value.
//   - The Key of an event is the text of the key of the member that caused the event, cut after at most 100
//     bytes. For the overflow, Key is "(other keys)". The group observes its members only while the group itself
//     has an observer. An observer must not call Update or the group's Close. Otherwise the observer would deadlock
//     if an Update caused the event, for example if the Update makes an open breaker half-open.
//
// A function in a member's own description, such as its Health, must not call methods of the group.
func (g *Group[K, P]) Describe() policy.Description {
	of := descriptionOf(g.table.Overflow().Value.policy)
	d := policy.Description{
		Kind:    cmp.Or(of.Kind, "group"),
		Name:    of.Name,
		Metrics: g.metrics,
		Config:  of.Config,
		Members: g.describers,
	}
	if of.Health != nil {
		d.Health = g.health
	}
	if of.Update != nil {
		d.Update = g.update
	}
	if of.Observe != nil {
		d.Observe = g.observe
	}
	return d
}

// describers yields the members that implement Describer, by key. It does not yield the overflow.
func (g *Group[K, P]) describers() iter.Seq2[string, policy.Describer] {
	return func(yield func(string, policy.Describer) bool) {
		for m := range g.members() {
			if d, ok := any(m.Value.policy).(policy.Describer); ok && !yield(keyed.Text(m.Key), d) {
				return
			}
		}
	}
}

// metrics returns the metrics of all members and of the group.
func (g *Group[K, P]) metrics() []policy.Metric {
	var stats GroupStats
	var evicted []policy.Metric
	var total sums
	overflow := descriptionOf(g.table.Overflow().Value.policy)
	total.addAll(overflow) // before Locked: if it panicked after Locked, the members would stay pinned
	// Locked pins the members, so none of them is evicted before its metrics are added. If a member was
	// evicted in between, its counts would be missing from both sums, and a counter could decrease.
	pinned := g.table.Locked(func() {
		stats.Evicted = g.evictions
		for name, v := range g.evicted {
			evicted = append(evicted, policy.Metric{Name: name, Counter: true, Value: v})
		}
	})
	stats.Members = len(pinned)
	for m := range g.table.Each(pinned) {
		d := descriptionOf(m.Value.policy)
		total.addAll(d)
	}
	slices.SortFunc(evicted, func(a, b policy.Metric) int { return cmp.Compare(a.Name, b.Name) })
	// The members of a Group of throttle.Limiters have metrics with the names of the stats. Without add, the result
	// would have two metrics with the same name.
	for _, metric := range append(evicted, policy.Metrics(cmp.Or(overflow.Kind, "group"), stats)...) {
		total.add(metric)
	}
	return total.metrics
}

// sums adds up metrics by name.
type sums struct {
	metrics []policy.Metric
	index   map[string]int // maps the name of a metric to its index in metrics
}

func (s *sums) addAll(d policy.Description) {
	if d.Metrics != nil {
		for _, m := range d.Metrics() {
			s.add(m)
		}
	}
}

// add adds a metric to the sum of the same name. For a ratio, or a time that can decrease, a sum would have
// no meaning, so add stores the larger value instead.
func (s *sums) add(m policy.Metric) {
	i, ok := s.index[m.Name]
	what, _, _ := strings.Cut(m.Name, "{")
	switch {
	case !ok:
		if s.index == nil {
			s.index = make(map[string]int)
		}
		s.index[m.Name] = len(s.metrics)
		s.metrics = append(s.metrics, m)
	case !m.Counter && (strings.HasSuffix(what, "_ratio") || strings.HasSuffix(what, "_seconds")):
		s.metrics[i].Value = max(s.metrics[i].Value, m.Value)
	default:
		s.metrics[i].Value += m.Value
	}
}

// health summarizes the health of all members; see [groupHealth.result].
func (g *Group[K, P]) health(ctx context.Context) policy.Health {
	var all groupHealth
	for m := range g.members() {
		d := descriptionOf(m.Value.policy)
		all.add(healthOf(ctx, d))
	}
	overflow := descriptionOf(g.table.Overflow().Value.policy)
	return all.result(healthOf(ctx, overflow))
}

func healthOf(ctx context.Context, d policy.Description) policy.Health {
	if d.Health == nil {
		return policy.Health{}
	}
	return d.Health(ctx)
}

// A groupHealth summarizes the health of members.
type groupHealth struct {
	worst   policy.Health // the first health that has the highest status
	members int           // number of members
	equal   int           // number of members that have the status of worst
}

// add adds the health of a member.
func (g *groupHealth) add(h policy.Health) {
	g.members++
	switch {
	case h.Status > g.worst.Status:
		g.worst, g.equal = h, 1
	case h.Status == g.worst.Status:
		g.equal++
	}
}

// result returns the health of a group: the worst health of its members, with the number of members that have
// this status in the Detail. The overflow's health replaces it only if the overflow's status is worse than
// every member's. If only some members fail, or only the overflow fails, the group's status is Warn.
func (g *groupHealth) result(overflow policy.Health) policy.Health {
	h := g.worst
	switch {
	case overflow.Status > h.Status:
		h, g.equal = overflow, 0
		h.Detail = keyed.Other + " " + h.State
	case h.Status == policy.Pass:
		return policy.Health{}
	default:
		h.Detail = fmt.Sprintf("%d of %d %s", g.equal, g.members, h.State)
	}
	h.Detail = strings.ReplaceAll(strings.TrimSpace(h.Detail), "_", " ")
	if h.Status == policy.Fail && (g.equal == 0 || g.equal < g.members) {
		h.Status = policy.Warn
		if h.State != "" {
			h.State = "partly_" + h.State
		}
	}
	return h
}

// update is the Update function of the group's description. [Group.Describe] documents its effects.
func (g *Group[K, P]) update(dryRun bool, change func(cfg any) error) error {
	g.updating.Lock()
	defer g.updating.Unlock()
	var diff settings.Diff
	record := func(cfg any) error { return diff.Record(cfg, change) }
	overflow := g.table.Overflow().Value.policy
	err := updatePolicy(overflow, true, record)
	for m := range g.members() {
		if err != nil {
			break
		}
		err = updatePolicy(m.Value.policy, true, record)
	}
	if err != nil || dryRun {
		return err
	}
	var given any
	if err := updatePolicy(overflow, false, func(cfg any) error {
		err := record(cfg)
		given = settings.Copy(cfg)
		return err
	}); err != nil {
		return err
	}
	pinned := g.table.Locked(func() { g.patch = g.patch.With(&diff, given) })
	for m := range g.table.Each(pinned) {
		err = cmp.Or(err, updatePolicy(m.Value.policy, false, change))
	}
	return err
}

func updatePolicy(p any, dryRun bool, change func(cfg any) error) error {
	d := descriptionOf(p)
	if d.Update == nil {
		return fmt.Errorf("resilience: %T cannot be updated", p)
	}
	return d.Update(dryRun, change)
}

// observe is the Observe function of the group's description. The group starts to observe its members when
// its first observer is added, and stops when its last observer is removed. Members that are not observed
// need not create events.
func (g *Group[K, P]) observe(f func(context.Context, policy.Event)) (stop func()) {
	g.observing.Lock()
	defer g.observing.Unlock()
	first := !g.observers.Any()
	remove := g.observers.Observe(f)
	if first {
		pinned := g.table.Locked(func() { g.observed = true })
		g.observeMember(keyed.Other, &g.table.Overflow().Value)
		for m := range g.table.Each(pinned) {
			g.observeMember(keyed.Text(m.Key), &m.Value)
		}
	}
	return sync.OnceFunc(func() {
		g.observing.Lock()
		defer g.observing.Unlock()
		remove()
		if !g.observers.Any() {
			pinned := g.table.Locked(func() { g.observed = false })
			g.stopMember(&g.table.Overflow().Value)
			for m := range g.table.Each(pinned) {
				g.stopMember(&m.Value)
			}
		}
	})
}
