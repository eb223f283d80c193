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
	// IdleAfter is the time after which the group may evict an unused member even if the group is not full.
	// Zero means 10 minutes. [Unlimited] means that the group evicts members only to make room for new keys.
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

// A Group holds a policy for each key, such as a host or a tenant. A Group is safe for concurrent use.
//
//	shards := resilience.NewGroup(func(shard string) *breaker.Breaker {
//		return breaker.New(breaker.Config{Name: "shards", ConsecutiveFailures: 5})
//	}, resilience.GroupConfig{MaxKeys: 300})
//	err := shards.Do(ctx, "eu-1", query)
//
// The policy of a key is called a member of the group. The first call with a key creates the key's member.
// When a new key arrives, the group evicts members that have been unused for [GroupConfig].IdleAfter, at most
// 16 of them at a time. If a full group has no such member, it evicts the least recently used member. If two
// members are used within 1ms of each other, the group may evict either of them first. If an evicted member has
// a method Close() error, the group calls the method.
//
// A member that is in use is not evicted. A member is in use if it has a call or [Work] in progress, or if an
// eviction would lose the state of its policy. For example, these policies are in use: an open breaker, a
// bulkhead with taken slots, and a retrier whose own budget holds fewer retries than a new budget.
//
// If a full group needs room for a new key, it checks at most 16 members. If all of them are in use, the key
// shares one extra member with other such keys. The extra member is called the overflow. The overflow is
// created with the zero value of K as its key. A key that has used the overflow keeps using it for at most 1
// minute, and only as long as the overflow is in use. If the key moved to its own member immediately, the key
// could exhaust the budgets of both members. A key that does not equal itself, such as NaN, always uses the
// overflow.
//
// To limit the rate of calls for each key, use throttle.Group instead: it is used in the same way but needs
// less memory.
type Group[K comparable, P interface {
	Do(context.Context, Func) error
}] struct {
	table *keyed.Table[K, member[P]]

	updating sync.Mutex // held during updates and Close, so all members receive these in the same order

	// The fields below are written only while the table is locked. Updates, observers and Close change them
	// with Table.Locked and then apply the change to the members that Locked returns. To a member that is
	// created later, prepare applies the change.
	patch     *settings.Patch    // the changes by past updates, for members that are created later
	observed  bool               // whether the members are observed
	closed    bool               // whether Close was called; updating must also be held to write
	evictions int64              // number of members that were evicted
	evicted   map[string]float64 // the sum of the counters of evicted members, by metric name

	observers notify.Observers[policy.Event]
	observing sync.Mutex            // held while the observation of members starts or stops
	stops     map[*member[P]]func() // the function that ends the observation of each member
	stopsMu   sync.Mutex            // guards stops; no other lock is acquired while it is held
}

// A member holds the policy of a key.
type member[P any] struct {
	policy P
	// inUse is the InUse function of the policy's description, or nil. To make room for a new key, the table
	// may call the inUse of up to 16 members while it is locked. Calling Describe there instead would take
	// 150ns and six allocations for each member. To save memory, a member stores no other field of the
	// description.
	inUse func() bool
	// unpin unpins the member when a call's work ends. It is created once per member, because otherwise each
	// call would allocate it.
	unpin func(error)
	// closed is set at the eviction if Close has already closed the policy.
	closed bool
}

// NewGroup returns a Group that creates its members with newMember. newMember must be fast and must not use
// the group. NewGroup itself calls newMember once, to create the overflow. NewGroup panics if cfg is invalid.
func NewGroup[K comparable, P interface {
	Do(context.Context, Func) error
}](newMember func(key K) P, cfg GroupConfig) *Group[K, P] {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	g := &Group[K, P]{evicted: make(map[string]float64)}
	g.table = keyed.NewTable(keyed.Rule[K, member[P]]{
		Make: func(m *keyed.Member[K, member[P]]) {
			m.Value.policy = newMember(m.Key)
			m.Value.unpin = func(error) { g.table.Unpin(m) }
			g.prepare(m.Key, &m.Value)
		},
		InUse: func(m *member[P]) bool { return m.inUse != nil && m.inUse() },
		Evict: g.evict,
		Evicted: func(m member[P]) {
			if !m.closed {
				_ = closePolicy(m.policy)
			}
		},
		MaxKeys:    cmp.Or(cfg.MaxKeys, 10_000),
		IdleAfter:  cmp.Or(cfg.IdleAfter, 10*time.Minute),
		KeepStrays: true,
	})
	return g
}

// prepare brings a new member up to date: it applies past updates to the member, observes it if the group is
// observed, and closes it if the group is closed. The caller has locked the table.
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

// descriptionOf returns the description of p, or an empty description if p has none.
func descriptionOf(p any) policy.Description {
	if d, ok := p.(policy.Describer); ok {
		return d.Describe()
	}
	return policy.Description{}
}

func closePolicy(p any) error {
	if c, ok := p.(interface{ Close() error }); ok {
		return c.Close()
	}
	return nil
}

// evict adds a member's counters to the group's counters and stops observing the member. The table calls
// evict before it evicts the member, and holds its lock during the call.
func (g *Group[K, P]) evict(m *member[P]) {
	g.evictions++
	m.closed = g.closed // Close pins the members until it has closed them
	g.stopMember(m)
	if d := descriptionOf(m.policy); d.Metrics != nil {
		for _, metric := range d.Metrics() {
			if metric.Counter {
				g.evicted[metric.Name] += metric.Value
			}
		}
	}
}

// observeMember forwards the events of a member to the group's observers.
func (g *Group[K, P]) observeMember(key string, m *member[P]) {
	d := descriptionOf(m.policy)
	if d.Observe == nil {
		return
	}
	stop := d.Observe(func(ctx context.Context, e policy.Event) {
		e.Key = key
		g.observers.Tell(ctx, e)
	})
	g.stopsMu.Lock()
	defer g.stopsMu.Unlock()
	if g.stops == nil {
		g.stops = make(map[*member[P]]func())
	}
	g.stops[m] = stop
}

// stopMember stops observing a member. It has no effect if the member is not observed.
func (g *Group[K, P]) stopMember(m *member[P]) {
	g.stopsMu.Lock()
	stop := g.stops[m]
	delete(g.stops, m)
	g.stopsMu.Unlock()
	if stop != nil {
		stop()
	}
}

// Do runs fn under the policy that belongs to key. If ctx is done, Do returns [ContextErr](ctx) and does not
// create a member.
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
	}, m.Value.unpin)
}

// By returns a Middleware that runs each call under the policy of the call's key. The function key receives the
// call's ctx and returns the call's key.
func (g *Group[K, P]) By(key func(context.Context) K) Middleware {
	return func(next Func) Func {
		return func(ctx context.Context) error { return g.Do(ctx, key(ctx), next) }
	}
}

// Get returns the member for key, or false if the key has no member. Get does not create a member. Calling
// Get does not count as a use of the member, so the group may evict the member while the caller still has a
// reference to it.
func (g *Group[K, P]) Get(key K) (P, bool) {
	if m := g.table.Get(key); m != nil {
		return m.Value.policy, true
	}
	var zero P
	return zero, false
}

// All iterates over the keys and members in no particular order. The iteration omits the overflow. Iterating
// over a member does not count as a use of the member.
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

// Close calls the method Close() error of each member that has this method. Close does the same for the
// overflow, and for members that are created later. Close returns the joined errors of these methods, except
// for members that are created later. After Close, calls still reach the closed members. The documentation of
// the members' type specifies how a closed member handles a call. Only the first call to Close has an effect.
// Later calls return nil.
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

// GroupStats holds metrics of a [Group].
type GroupStats struct {
	Members int   `gauge:"keys"`        // number of members, without the overflow
	Evicted int64 `counter:"evictions"` // number of members that were evicted
}

// Stats returns metrics of the group itself, without the metrics of its members.
func (g *Group[K, P]) Stats() (s GroupStats) {
	g.table.View(func(members int) { s = GroupStats{Members: members, Evicted: g.evictions} })
	return s
}
