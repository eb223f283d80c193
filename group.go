package resilience

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
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
	// MaxKeys bounds the members. Zero means 10 000.
	MaxKeys int
	// Idle is for how long a member must have had no call to be evicted although there is room.
	// Zero means 10 minutes, negative forever.
	Idle time.Duration
}

// Validate returns an error that names each invalid field, or nil.
func (c GroupConfig) Validate() error {
	f := invalid.Fields{Type: "resilience.GroupConfig"}
	f.Need(c.MaxKeys >= 0, "MaxKeys", c.MaxKeys, "0 (for 10000) or more")
	return f.Err()
}

// A Group holds one policy for each key, such as a host or a tenant. It is safe for concurrent use.
//
//	shards := resilience.NewGroup(func(shard string) *breaker.Breaker {
//		return breaker.New(breaker.Config{Name: "shards", Failures: 5})
//	}, resilience.GroupConfig{MaxKeys: 300})
//	err := shards.Do(ctx, "eu-1", query)
//
// The first call for a key makes its member. When calls for new keys come, members that are idle
// are evicted, and the least recently used one if MaxKeys are there; but none that has a call or
// [Work] under way, or whose method Needed() bool returns true: a breaker that is open, a bulkhead
// in use, a budget that is not full.
//
// If no room can be made, new keys share one more member, the overflow, made with the zero key. A
// MaxKeys well above the number of keys that fail at once keeps keys out of it. A key that does not
// equal itself, such as NaN, always has the overflow.
//
// A registry shows a Group as one policy, by what its members say of themselves.
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

// NewGroup returns a Group whose members are what newMember returns. newMember is called under the
// lock of the group, and for the overflow at once: it must be quick, and not use the group, as the
// methods Needed and Figures of members. NewGroup panics if cfg is not valid.
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
		Make:       func(key K, p *P) { *p = g.prepare(key, newMember(key)) },
		InUse:      func(p *P) bool { return needed(*p) },
		Evict:      func(p *P) { g.evict(*p) },
		Evicted:    func(p P) { _ = closeMember(p) },
		MaxKeys:    cfg.MaxKeys,
		IdleAfter:  cfg.Idle,
		KeepStrays: true,
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
		g.observe(keyed.Text(key), p)
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

// Do calls fn under the member of key.
func (g *Group[K, P]) Do(ctx context.Context, key K, fn Func) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	m := g.table.Pin(key)
	work := linger.WorkOf(ctx)
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

// By returns a Middleware whose calls have the key of their ctx.
func (g *Group[K, P]) By(key func(context.Context) K) Middleware {
	return func(next Func) Func {
		return func(ctx context.Context) error { return g.Do(ctx, key(ctx), next) }
	}
}

// All returns the members, in no order, without the overflow. To be yielded is no call.
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
	Members int // without the overflow
	MaxKeys int
	Evicted int64
}

// Stats returns figures of the group, without those of its members.
func (g *Group[K, P]) Stats() GroupStats {
	stats := GroupStats{MaxKeys: g.cfg.MaxKeys}
	for range g.table.Each(g.table.Locked(func() { stats.Evicted = g.evictions })) {
		stats.Members++
	}
	return stats
}

// Close calls the method Close() error of each member, of the overflow, and of each member that is
// made later, if it has one. Calls go on as these members let them. A second Close does nothing.
func (g *Group[K, P]) Close() error {
	g.changing.Lock()
	defer g.changing.Unlock()
	if g.closed { // nobody else writes it
		return nil
	}
	pinned := g.table.Locked(func() { g.closed = true })
	errs := []error{closeMember(g.table.Overflow().Value)}
	for m := range g.table.Each(pinned) {
		errs = append(errs, closeMember(m.Value))
	}
	return errors.Join(errs...)
}

// Name returns the name of the overflow.
func (g *Group[K, P]) Name() string {
	if n, ok := any(g.table.Overflow().Value).(describe.Namer); ok {
		return n.Name()
	}
	return ""
}

// Kind returns the kind of the members, or "group".
func (g *Group[K, P]) Kind() string {
	if k, ok := any(g.table.Overflow().Value).(describe.Kinder); ok {
		return k.Kind()
	}
	return "group"
}

// Figures returns the figures of all members and the overflow, added up by name, and those of the
// group. Of a share or a time that rises and falls it has the largest. The counters of a member that
// was evicted stay in them.
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
		what, _, _ := strings.Cut(f.Name, "{")
		if f.Counter || !strings.HasSuffix(what, "_ratio") && !strings.HasSuffix(what, "_seconds") {
			sums[i].Value += f.Value
		} else {
			sums[i].Value = max(sums[i].Value, f.Value)
		}
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

// Health returns an error if the method Health() error of a member returns one: how many do, and
// what is behind the error of one of them. The group is "open", say, if all members are, and "partly
// open" if some are.
func (g *Group[K, P]) Health() error {
	var worst error // of a member that fails, if there is one
	var worstKey string
	ailing, failing, all := 0, 0, 0 // members
	ask := func(key string, p P) (err error) {
		if h, ok := any(p).(describe.Healther); ok {
			err = h.Health()
		}
		if err != nil && (worst == nil || fails(err) && !fails(worst)) {
			worst, worstKey = err, key
		}
		return err
	}
	for key, p := range g.All() {
		all++
		if err := ask(keyed.Text(key), p); err != nil {
			ailing++
			if fails(err) {
				failing++
			}
		}
	}
	other := ask(keyed.Other, g.table.Overflow().Value)
	if worst == nil {
		return nil
	}
	named, ok := worst.(interface{ HealthState() string })
	if !ok {
		if other != nil {
			ailing++
		}
		return fmt.Errorf("%d of %d members: %s: %w", ailing, all+1, worstKey, worst)
	}
	e := &groupError{}
	e.State, e.Err = named.HealthState(), cmp.Or(errors.Unwrap(worst), worst)
	e.Fails = failing > 0 && failing == all
	if fails(worst) {
		ailing = failing
	}
	e.Detail = fmt.Sprintf("%d of %d %s", ailing, all, e.State)
	if ailing == 0 { // it is the overflow alone
		e.Detail = keyed.Other + " " + e.State
	}
	if fails(worst) && !e.Fails {
		e.State = "partly " + e.State
	}
	return e
}

// fails reports whether calls fail because of what an error of Health says.
func fails(health error) bool {
	f, ok := health.(interface{ Failed() bool })
	return ok && f.Failed()
}

// A groupError is what is wrong with members of a Group. Its text leaves out the error of one of them.
type groupError struct{ describe.Ailment }

func (e *groupError) Error() string { return e.State + ": " + e.Detail }

// Settings returns the Config of the overflow with its defaults, without functions, or nil.
func (g *Group[K, P]) Settings() any {
	if s, ok := any(g.table.Overflow().Value).(describe.Setter); ok {
		return s.Settings()
	}
	return nil
}

// Change changes the Config of the overflow, of all members, and of each later member. f gets a
// pointer to each as it was given: a zero field means its default.
//
//	err := shards.Change(false, func(cfg any) error {
//		cfg.(*breaker.Config).Failures = 3
//		return nil
//	})
//
// If f returns an error for one of them, or its Config would not be valid, nothing changes, and
// Change returns the error; nor does anything if dry is true. A later member whose Config does not
// allow the change stays as it was made. f is kept, and called under the lock of the group.
func (g *Group[K, P]) Change(dry bool, f func(cfg any) error) error {
	g.changing.Lock()
	defer g.changing.Unlock()
	if err := g.changeAll(func() {}, true, f); err != nil || dry {
		return err
	}
	return g.changeAll(func() { g.changes = append(g.changes, f) }, false, f)
}

func (g *Group[K, P]) changeAll(locked func(), dry bool, f func(cfg any) error) error {
	change := func(p P) error {
		c, ok := any(p).(describe.Changer)
		if !ok {
			return fmt.Errorf("resilience: a %T has no settings that can change", p)
		}
		return c.Change(dry, f)
	}
	err := change(g.table.Overflow().Value) // before any is pinned: f may panic
	for m := range g.table.Each(g.table.Locked(locked)) {
		if err != nil && dry {
			break
		}
		err = cmp.Or(err, change(m.Value))
	}
	return err
}

// ObserveAny calls f, which must not use Change or Close, with each event of each member until stop is
// called. The key is its last field.
func (g *Group[K, P]) ObserveAny(f func(context.Context, any)) (stop func()) {
	g.mu.Lock()
	g.observers = append(slices.Clone(g.observers), &f)
	g.mu.Unlock()
	was := false
	pinned := g.table.Locked(func() { was, g.observed = g.observed, true })
	if !was {
		g.observe(keyed.Other, g.table.Overflow().Value)
	}
	for m := range g.table.Each(pinned) {
		if !was {
			g.observe(keyed.Text(m.Key), m.Value)
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

func (g *Group[K, P]) observe(key string, p P) {
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
