package resilience

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/keyed"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
	"github.com/go-resilience/resilience/policy"
)

// GroupConfig configures a [Group].
type GroupConfig struct {
	// MaxKeys limits the number of members. Zero means 10,000.
	MaxKeys int
	// IdleAfter is how long a member must have been unused before it may be evicted although there is room.
	// Zero means 10 minutes; [Unlimited] means that members are evicted only to make room.
	IdleAfter time.Duration
}

// Validate returns an error that names each invalid field, or nil.
func (c GroupConfig) Validate() error {
	f := invalid.Fields{Type: "resilience.GroupConfig"}
	f.Need(c.MaxKeys >= 0, "MaxKeys", c.MaxKeys, "0 (for 10000) or more")
	f.Need(c.IdleAfter >= 0 || c.IdleAfter == Unlimited, "IdleAfter", c.IdleAfter,
		"0 (for 10m), more, or Unlimited")
	return f.Err()
}

// A Group holds a policy for each key, such as a host or a tenant. It is safe for concurrent use.
//
//	shards := resilience.NewGroup(func(shard string) *breaker.Breaker {
//		return breaker.New(breaker.Config{Name: "shards", ConsecutiveFailures: 5})
//	}, resilience.GroupConfig{MaxKeys: 300})
//	err := shards.Do(ctx, "eu-1", query)
//
// The first call with a key creates its member. When a new key arrives, idle members are evicted, and if
// the group is full, the least recently used one. A member that is in use stays: one with a call or [Work]
// in progress, an open breaker, a bulkhead with taken slots, a budget that is not full. Uses within a
// millisecond may count in either order.
//
// If there is no room, new keys share one more member, the overflow, which is made with the zero key. A key
// that has shared the overflow stays with it while the overflow is in use, but for at most a minute, so that
// it does not take a second budget from a member of its own. A key that does not equal itself, such as NaN,
// always has the overflow.
//
// For limits by key, throttle.Group has the same shape and takes less memory.
type Group[K comparable, P interface {
	Do(context.Context, Func) error
}] struct {
	table *keyed.Table[K, member[P]]

	updating sync.Mutex // held by updates and Close, so that all members see them in one order

	// The fields below are written while the table is locked. A member that Table.Locked does not return is
	// created later and sees them.
	patch     *settings.Patch    // what updates have changed, for members that are created later
	observed  bool               // members are observed
	closed    bool               // Close was called; also written under updating
	evictions int64              // number of members that were evicted
	evicted   map[string]float64 // counters of evicted members, by name

	observers notify.Observers[policy.Event]
	observing sync.Mutex            // held while members start and stop being observed
	stops     map[*member[P]]func() // ends the observation of a member
	stopsMu   sync.Mutex            // guards stops; it is locked last
}

// A member is the policy of a key.
type member[P any] struct {
	policy P
	// inUse is the InUse of the policy's description, or nil. It is the only part that is kept, because it
	// is needed for up to 16 members of each new key while the table is locked: it takes 16 bytes for a
	// member, where a call to Describe for each question takes 150ns and six allocations.
	inUse func() bool
}

// NewGroup returns a Group that creates its members with newMember. newMember must be fast and must not use
// the group. It is called once for the overflow immediately. NewGroup panics if cfg is invalid.
func NewGroup[K comparable, P interface {
	Do(context.Context, Func) error
}](newMember func(key K) P, cfg GroupConfig) *Group[K, P] {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	g := &Group[K, P]{evicted: make(map[string]float64)}
	g.table = keyed.NewTable(keyed.Rule[K, member[P]]{
		Make: func(key K, m *member[P]) {
			m.policy = newMember(key)
			g.prepare(key, m)
		},
		InUse:      func(m *member[P]) bool { return m.inUse != nil && m.inUse() },
		Evict:      g.evict,
		Evicted:    func(m member[P]) { _ = closePolicy(m.policy) },
		MaxKeys:    cmp.Or(cfg.MaxKeys, 10_000),
		IdleAfter:  cmp.Or(cfg.IdleAfter, 10*time.Minute),
		KeepStrays: true,
	})
	return g
}

// prepare makes a new member follow updates, observers and Close as the others do. The table is locked.
func (g *Group[K, P]) prepare(key K, m *member[P]) {
	d := descriptionOf(m.policy)
	m.inUse = d.InUse
	if d.Update != nil {
		g.patch.ApplyBy(d.Update)
	}
	if g.observed {
		g.observeMember(keyed.Text(key), m)
	}
	if g.closed {
		_ = closePolicy(m.policy)
	}
}

func closePolicy(p any) error {
	if c, ok := p.(interface{ Close() error }); ok {
		return c.Close()
	}
	return nil
}

// evict adds the counters of a member to those of the group, before it is evicted. The table is locked.
func (g *Group[K, P]) evict(m *member[P]) {
	g.evictions++
	g.stopMember(m)
	if d := descriptionOf(m.policy); d.Metrics != nil {
		for _, metric := range d.Metrics() {
			if metric.Counter {
				g.evicted[metric.Name] += metric.Value
			}
		}
	}
}

// Do runs fn under the member for key.
func (g *Group[K, P]) Do(ctx context.Context, key K, fn Func) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	m := g.table.Pin(key)
	if !linger.Under(ctx) {
		defer g.table.Unpin(m)
		return m.Value.policy.Do(ctx, fn)
	}
	return linger.WorkOf(ctx).Observe(ctx, func(ctx context.Context) error {
		return m.Value.policy.Do(ctx, fn)
	}, func() { g.table.Unpin(m) })
}

// By returns a Middleware that takes the key of each call from its ctx.
func (g *Group[K, P]) By(key func(context.Context) K) Middleware {
	return func(next Func) Func {
		return func(ctx context.Context) error { return g.Do(ctx, key(ctx), next) }
	}
}

// Get returns the member for key, or false if there is none. It does not create one, and does not count as
// use: the member may be evicted while the caller has it.
func (g *Group[K, P]) Get(key K) (P, bool) {
	if m := g.table.Get(key); m != nil {
		return m.Value.policy, true
	}
	var zero P
	return zero, false
}

// All iterates over the members, in no particular order and without the overflow. Iterating does not count
// as use.
func (g *Group[K, P]) All() iter.Seq2[K, P] {
	return func(yield func(K, P) bool) {
		for m := range g.members() {
			if !yield(m.Key, m.Value.policy) {
				return
			}
		}
	}
}

func (g *Group[K, P]) members() iter.Seq[*keyed.Member[K, member[P]]] {
	return g.table.Each(g.table.Locked(func() {}))
}

// Close calls the Close() error method of every member, if there is one, including members that are created
// later. Calls continue as the closed members let them. Only the first call has an effect.
func (g *Group[K, P]) Close() error {
	g.updating.Lock()
	defer g.updating.Unlock()
	if g.closed {
		return nil
	}
	pinned := g.table.Locked(func() { g.closed = true })
	errs := []error{closePolicy(g.table.Overflow().Value.policy)}
	for m := range g.table.Each(pinned) {
		errs = append(errs, closePolicy(m.Value.policy))
	}
	return errors.Join(errs...)
}

// GroupStats are metrics of a [Group].
type GroupStats struct {
	Members int   `gauge:"keys"`        // number of members, without the overflow
	Evicted int64 `counter:"evictions"` // number of members that were evicted
}

// Stats returns metrics of the group itself.
func (g *Group[K, P]) Stats() (s GroupStats) {
	g.table.View(func(members int) { s = GroupStats{Members: members, Evicted: g.evictions} })
	return s
}
