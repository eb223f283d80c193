package resilience

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/describe"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/keyed"
	"github.com/go-resilience/resilience/internal/linger"
)

// GroupConfig says how many members a [Group] holds.
type GroupConfig struct {
	// MaxKeys is how many members the group holds at once, at most. Zero means 10 000.
	MaxKeys int
	// Idle is for how long a member must have had no call to be evicted although there is
	// room. Zero means 10 minutes. Negative means that members are evicted only to make room.
	Idle time.Duration
}

// Validate returns an error that names each invalid field, or nil.
func (c GroupConfig) Validate() error {
	f := invalid.Fields{Type: "resilience.GroupConfig"}
	f.Need(c.MaxKeys >= 0, "MaxKeys", c.MaxKeys, "0 (for 10000) or more")
	return f.Err()
}

// A Group holds one policy for each key, such as a shard, a host or a tenant, so that a key
// that fails is refused and the others are not:
//
//	shards := resilience.NewGroup(func(shard string) *breaker.Breaker {
//		return breaker.New(breaker.Config{Name: "shards", Failures: 5})
//	}, resilience.GroupConfig{MaxKeys: 300})
//	err := shards.Do(ctx, "eu-1", query)
//
// The group makes a member at the first call for its key. It evicts members that have had no
// call for Idle, when calls for new keys come, and the least recently used one when it holds
// MaxKeys and needs room. It evicts no member that has a call under way, work of a call that
// goes on after its function (see [Work]), or a method Needed() bool that returns true: a
// breaker that is not closed, a bulkhead in use, a budget that is not full.
//
// While the group holds MaxKeys members and finds none, among a few, that it may evict, keys
// without a member share one more, the overflow, which was made with the zero key. So the
// memory is bounded, and each key that has a member keeps it. A MaxKeys well above the number
// of keys that fail at the same time keeps keys out of the overflow. A key that does not equal
// itself, such as NaN, always has the overflow.
//
// A Group describes itself by what its members say of themselves, so that package registry
// shows it as one policy. Its figures are those of its members added up, with the counters of
// those that were evicted. A Group is safe for concurrent use. [NewGroup] makes one.
type Group[K comparable, P interface {
	Do(context.Context, Func) error
}] struct {
	cfg   GroupConfig
	table *keyed.Table[K, P]

	changing sync.Mutex // held during Change and Close, so that members see changes in one order

	// What follows is written under the lock of table, by Locked or by the functions of its
	// Rule: each member that Locked does not return is made after that, and sees it.
	changes   []func(cfg any) error
	observed  bool
	closed    bool
	evicted   map[string]float64 // the counters of evicted members, by name
	evictions int64              // how many members were evicted

	mu        sync.Mutex
	observers []*func(context.Context, any)
}

// NewGroup returns an empty Group, whose members are what newMember returns. It makes the
// overflow at once, and panics with the error of cfg.Validate, if there is one.
//
// newMember is called under the lock of the group: it must be quick, and not use the group.
// If it panics, so does the call that needs the member.
func NewGroup[K comparable, P interface {
	Do(context.Context, Func) error
}](newMember func(key K) P, cfg GroupConfig) *Group[K, P] {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	cfg.MaxKeys = cmp.Or(cfg.MaxKeys, 10_000)
	cfg.Idle = cmp.Or(cfg.Idle, 10*time.Minute)
	g := &Group[K, P]{cfg: cfg, evicted: make(map[string]float64)}
	g.table = keyed.NewTable(keyed.Rule[K, P]{
		Make:    func(key K) P { return g.prepare(key, newMember(key)) },
		Needed:  func(p *P) bool { return needed(*p) },
		Evict:   func(p *P) { g.evict(*p) },
		Evicted: func(p P) { _ = closeMember(p) },
		MaxKeys: cfg.MaxKeys,
		Idle:    cfg.Idle,
	})
	return g
}

// prepare makes the changes on a new member that the others have seen, and observes it as they are
// observed. The lock of table is held.
func (g *Group[K, P]) prepare(key K, p P) P {
	if c, ok := any(p).(describe.Changer); ok {
		for _, change := range g.changes {
			_ = c.Change(false, change) // a member whose own Config does not allow it stays as it is
		}
	}
	if g.observed {
		g.observe(key, p)
	}
	if g.closed {
		_ = closeMember(p)
	}
	return p
}

func needed(p any) bool {
	n, ok := p.(interface{ Needed() bool })
	return ok && n.Needed()
}

func closeMember(p any) error {
	if c, ok := p.(interface{ Close() error }); ok {
		return c.Close()
	}
	return nil
}

// evict keeps the counters of a member that goes. The lock of table is held.
func (g *Group[K, P]) evict(p P) {
	g.evictions++
	if d, ok := any(p).(describe.Figurer); ok {
		for _, f := range d.Figures() {
			if f.Counter {
				g.evicted[f.Name] += f.Value
			}
		}
	}
}

// Do calls fn under the member of key. The member is kept until the work of the call has
// ended.
func (g *Group[K, P]) Do(ctx context.Context, key K, fn Func) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	m := g.table.Pin(key)
	work := linger.Of(ctx)
	if work == nil { // the usual case, without the allocations of the other
		defer g.table.Unpin(m)
		return m.Value.Do(ctx, fn)
	}
	pinned := false
	defer func() {
		if !pinned {
			g.table.Unpin(m)
		}
	}()
	err := m.Value.Do(ctx, fn)
	pinned = err == nil && work.OnEnd(func(error) { g.table.Unpin(m) })
	return err
}

// By returns a Middleware that calls a function under the member of the key of its ctx.
func (g *Group[K, P]) By(key func(context.Context) K) Middleware {
	return func(next Func) Func {
		return func(ctx context.Context) error { return g.Do(ctx, key(ctx), next) }
	}
}

// All returns the members that the group holds, in no order, without the overflow. The group
// does not evict a member while it is yielded. To be yielded does not count as a call.
func (g *Group[K, P]) All() iter.Seq2[K, P] {
	return func(yield func(K, P) bool) {
		for m := range g.table.Each(g.table.Locked(func() {})) {
			if !yield(m.Key, m.Value) {
				return
			}
		}
	}
}

// Len returns the number of members, without the overflow.
func (g *Group[K, P]) Len() int { return g.table.Len() }

// GroupStats are figures of a [Group].
type GroupStats struct {
	Members int   // that the group holds, without the overflow
	MaxKeys int   // how many it may hold
	Evicted int64 // members, since the group was made
}

// Stats returns the figures of the group. Those of its members are in [Group.Figures].
func (g *Group[K, P]) Stats() GroupStats {
	stats := GroupStats{MaxKeys: g.cfg.MaxKeys}
	g.table.Each(g.table.Locked(func() { stats.Evicted = g.evictions }))(func(*keyed.Member[K, P]) bool {
		stats.Members++
		return true
	})
	return stats
}

// Close calls the method Close() error of each member that has one, of the overflow, and of
// each member that is made later. It returns their errors, joined. Calls go on as these
// members let them. A second Close does nothing.
func (g *Group[K, P]) Close() error {
	g.changing.Lock()
	defer g.changing.Unlock()
	was := false
	pinned := g.table.Locked(func() { was, g.closed = g.closed, true })
	var errs []error
	for m := range g.table.Each(pinned) {
		if !was {
			errs = append(errs, closeMember(m.Value))
		}
	}
	if !was {
		errs = append(errs, closeMember(g.table.Overflow().Value))
	}
	return errors.Join(errs...)
}

// Name returns the name of the overflow, if it has one.
func (g *Group[K, P]) Name() string {
	if n, ok := any(g.table.Overflow().Value).(describe.Namer); ok {
		return n.Name()
	}
	return ""
}

// Kind returns the kind of the members, "breaker" for example, or "group".
func (g *Group[K, P]) Kind() string {
	if k, ok := any(g.table.Overflow().Value).(describe.Kinder); ok {
		return k.Kind()
	}
	return "group"
}

// Figures returns the figures of all members and the overflow, added up by name, in the order
// in which a member has them, and those of the group. No counter goes back when a member is
// evicted.
func (g *Group[K, P]) Figures() []describe.Figure {
	var sums []describe.Figure
	at := make(map[string]int) // in sums, by name
	add := func(f describe.Figure) {
		i, ok := at[f.Name]
		if !ok {
			i = len(sums)
			at[f.Name] = i
			sums = append(sums, describe.Figure{Name: f.Name, Counter: f.Counter})
		}
		sums[i].Value += f.Value
	}
	addAll := func(p P) {
		if d, ok := any(p).(describe.Figurer); ok {
			for _, f := range d.Figures() {
				add(f)
			}
		}
	}
	var evicted []describe.Figure
	var evictions int64
	// What was evicted by then, and the members of that moment, are the whole: none of these
	// is evicted before it has been added.
	pinned := g.table.Locked(func() {
		evictions = g.evictions
		for name, v := range g.evicted {
			evicted = append(evicted, describe.Figure{Name: name, Counter: true, Value: v})
		}
	})
	addAll(g.table.Overflow().Value)
	for m := range g.table.Each(pinned) {
		addAll(m.Value)
	}
	slices.SortFunc(evicted, func(a, b describe.Figure) int { return cmp.Compare(a.Name, b.Name) })
	for _, f := range evicted {
		add(f)
	}
	kind := g.Kind()
	return append(sums,
		describe.Figure{Name: kind + ".keys", Value: float64(len(pinned))},
		describe.Figure{Name: kind + ".evictions", Counter: true, Value: float64(evictions)})
}

// Health returns an error if the method Health() error of a member returns one: how many do,
// and one of them with its key, one that fails if there is one. Its methods HealthState() string
// and Failed() bool are those of that member's error, if it has them; but the group fails only if
// all of its members do, and is "partly open", say, if some do.
func (g *Group[K, P]) Health() error {
	ill := groupError{all: 1}
	ask := func(name string, p P) (fails bool) {
		h, ok := any(p).(describe.Healther)
		if !ok {
			return false
		}
		err := h.Health()
		if err == nil {
			return false
		}
		f, ok := err.(interface{ Failed() bool })
		fails = ok && f.Failed()
		ill.n++
		if ill.first == nil || fails && !ill.fails {
			ill.key, ill.first, ill.fails = name, err, fails
		}
		return fails
	}
	for key, p := range g.All() {
		ill.all++
		if ask(keyed.Text(key), p) {
			ill.failing++
		}
	}
	ask(keyed.Other, g.table.Overflow().Value)
	if ill.n == 0 {
		return nil
	}
	return &ill
}

// A groupError is what is wrong with the members of a Group.
type groupError struct {
	n, failing, all int // members that say something, that fail, without the overflow, and all
	key             string
	first           error
	fails           bool // first
}

func (e *groupError) Error() string {
	if state := e.HealthState(); state != "" {
		return state + ": " + e.HealthDetail()
	}
	return fmt.Sprintf("%d of %d members: %s: %v", e.n, e.all, e.key, e.first)
}

// Unwrap returns what is behind the error of the member.
func (e *groupError) Unwrap() error { return cmp.Or(errors.Unwrap(e.first), e.first) }

func (e *groupError) Failed() bool { return e.failing > 0 && e.failing == e.all-1 }

func (e *groupError) word() string {
	if h, ok := e.first.(interface{ HealthState() string }); ok {
		return h.HealthState()
	}
	return ""
}

func (e *groupError) HealthState() string {
	if e.fails && !e.Failed() {
		return "partly " + e.word()
	}
	return e.word()
}

func (e *groupError) HealthDetail() string {
	n := e.n
	if e.fails {
		n = e.failing
	}
	return fmt.Sprintf("%d of %d %s", n, e.all-1, e.word())
}

// Settings returns the settings of the overflow: a copy of its Config with the defaults,
// without functions. It returns nil if the members have none.
func (g *Group[K, P]) Settings() any {
	if s, ok := any(g.table.Overflow().Value).(describe.Setter); ok {
		return s.Settings()
	}
	return nil
}

// Change changes the settings of the overflow, of all members, and of each later member before
// it is used. f gets a pointer to the Config of each as it was given, in which a zero field
// means its default:
//
//	err := shards.Change(false, func(cfg any) error {
//		cfg.(*breaker.Config).Failures = 3
//		return nil
//	})
//
// It first makes a dry run: if f returns an error for one of them, or its Config would not be
// valid, nothing changes, and Change returns the error. If dry is true it ends there. A later
// member whose own Config does not allow the change stays as it was made. f is kept, and must
// be safe to call at any time, under the lock of the group.
func (g *Group[K, P]) Change(dry bool, f func(cfg any) error) error {
	g.changing.Lock()
	defer g.changing.Unlock()
	if err := g.changeAll(g.table.Locked(func() {}), true, f); err != nil || dry {
		return err
	}
	return g.changeAll(g.table.Locked(func() { g.changes = append(g.changes, f) }), false, f)
}

func (g *Group[K, P]) changeAll(pinned []*keyed.Member[K, P], dry bool, f func(cfg any) error) error {
	change := func(p P) error {
		c, ok := any(p).(describe.Changer)
		if !ok {
			return fmt.Errorf("resilience: a %T has no settings that can change", p)
		}
		return c.Change(dry, f)
	}
	err := change(g.table.Overflow().Value)
	for m := range g.table.Each(pinned) {
		if err != nil && dry {
			break
		}
		err = cmp.Or(err, change(m.Value))
	}
	return err
}

// ObserveAny calls f with each event of each member, present and future, until stop is called.
// An event of a member has its key as its last field.
func (g *Group[K, P]) ObserveAny(f func(context.Context, any)) (stop func()) {
	g.mu.Lock()
	g.observers = append(slices.Clone(g.observers), &f)
	g.mu.Unlock()
	was := false
	pinned := g.table.Locked(func() { was, g.observed = g.observed, true })
	if !was {
		g.observeOverflow()
	}
	for m := range g.table.Each(pinned) {
		if !was {
			g.observe(m.Key, m.Value)
		}
	}
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.observers = slices.DeleteFunc(slices.Clone(g.observers), func(o *func(context.Context, any)) bool {
			return o == &f
		})
	}
}

func (g *Group[K, P]) observe(key K, p P) { g.observeAs(keyed.Text(key), p) }

func (g *Group[K, P]) observeOverflow() { g.observeAs(keyed.Other, g.table.Overflow().Value) }

func (g *Group[K, P]) observeAs(key string, p P) {
	o, ok := any(p).(describe.Observer)
	if !ok {
		return
	}
	o.ObserveAny(func(ctx context.Context, e any) {
		g.mu.Lock()
		observers := g.observers
		g.mu.Unlock()
		if described, ok := e.(describe.Event); ok {
			e = memberEvent{described, key}
		}
		for _, f := range observers {
			(*f)(ctx, e)
		}
	})
}

// A memberEvent is an event of a member, with its key.
type memberEvent struct {
	describe.Event
	key string
}

func (e memberEvent) Fields(yield func(name string, value any)) {
	e.Event.Fields(yield)
	yield("key", e.key)
}
