package resilience_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

// A gate is a policy that describes itself in full, as a pattern does.
type gate struct {
	key       string
	setting   settings.Setting[gateConfig]
	observers notify.Observers[policy.Event]
	calls     atomic.Int64
	inUse     atomic.Bool
	closed    atomic.Int64
	events    atomic.Int64 // events that were built
	described atomic.Int64 // calls of Describe
}

type gateConfig struct {
	Shut  bool
	Limit int // must not exceed Max, unless that is zero
	Max   int
	Limits
	Quotas []quota
	Weight map[string]int
	Cost   func(context.Context) int
	Judge  any // may hold a function
	Until  time.Time
	Base   *gateConfig
}

type Limits struct{ Queue, Wait int }

type quota struct {
	N    int
	Days []string
}

func (c gateConfig) Validate() error {
	if c.Max > 0 && c.Limit > c.Max {
		return errTooMany
	}
	return nil
}

var (
	errTooMany = errors.New("limit exceeds Max")
	errShut    = errors.New("shut")
)

type gateStats struct {
	Calls   int64 `counter:"calls"`
	Running int   `gauge:"running"`
}

func newGate(key string, cfg gateConfig) *gate {
	g := &gate{key: key}
	g.setting.Init(cfg, func(c gateConfig) gateConfig { return c }, func(c *gateConfig) {
		c.Quotas = slices.Clone(c.Quotas)
	})
	return g
}

func (g *gate) Do(ctx context.Context, fn resilience.Func) error {
	g.calls.Add(1)
	if !g.config().Shut {
		return fn(ctx)
	}
	if g.observers.Any() {
		g.events.Add(1)
		g.observers.Tell(ctx, policy.Event{Kind: "gate", Name: "gates", What: "refused"})
	}
	return errShut
}

func (g *gate) config() gateConfig { return g.setting.Config() }
func (g *gate) Close() error       { g.closed.Add(1); return nil }

func (g *gate) Describe() policy.Description {
	g.described.Add(1)
	return policy.Description{
		Kind:    "gate",
		Name:    "gates",
		Metrics: func() []policy.Metric { return policy.Metrics("gate", gateStats{Calls: g.calls.Load()}) },
		Health: func(context.Context) policy.Health {
			if g.config().Shut {
				return policy.Health{Status: policy.Fail, State: "shut", Err: errShut}
			}
			return policy.Health{}
		},
		Config: func() any { return g.config() },
		Update: func(dryRun bool, change func(cfg any) error) error {
			return g.setting.Change(dryRun, change, nil, nil)
		},
		Observe: g.observers.Observe,
		InUse:   g.inUse.Load,
	}
}

type gates = resilience.Group[string, *gate]

func newGates(cfg resilience.GroupConfig) *gates {
	return resilience.NewGroup(func(key string) *gate { return newGate(key, gateConfig{}) }, cfg)
}

func doNothing(context.Context) error { return nil }

func shut(cfg any) error { cfg.(*gateConfig).Shut = true; return nil }

// call calls the member for each key.
func call[P interface {
	Do(context.Context, resilience.Func) error
}](t *testing.T, g *resilience.Group[string, P], keys ...string) {
	t.Helper()
	for _, key := range keys {
		_ = g.Do(t.Context(), key, doNothing)
	}
}

// get returns the member for a key, which must exist.
func get(t *testing.T, g *gates, key string) *gate {
	t.Helper()
	m, ok := g.Get(key)
	require.True(t, ok, key)
	return m
}

// update updates a group of gates.
func update(t *testing.T, g *gates, change func(*gateConfig)) {
	t.Helper()
	require.NoError(t, g.Describe().Update(false, func(cfg any) error { change(cfg.(*gateConfig)); return nil }))
}

func metrics(d policy.Describer) map[string]float64 {
	all := map[string]float64{}
	for _, m := range d.Describe().Metrics() {
		all[m.Name] = m.Value
	}
	return all
}

func health(d policy.Describer) policy.Health { return d.Describe().Health(context.Background()) }

func TestGroupHasAMemberForEachKey(t *testing.T) {
	g := newGates(resilience.GroupConfig{})
	ctx := context.WithValue(t.Context(), ctxKey{}, "b")
	require.NoError(t, g.Do(ctx, "a", doNothing))
	by := g.By(func(ctx context.Context) string { return ctx.Value(ctxKey{}).(string) })
	require.NoError(t, by(doNothing)(ctx))
	require.NoError(t, g.Do(ctx, "b", doNothing))
	calls := map[string]int64{}
	for key, m := range g.All() {
		require.Equal(t, key, m.key)
		require.Same(t, m, get(t, g, key))
		calls[key] = m.calls.Load()
	}
	require.Equal(t, map[string]int64{"a": 1, "b": 2}, calls)
	require.Equal(t, resilience.GroupStats{Members: 2}, g.Stats())

	ended, cancel := context.WithCancel(ctx)
	cancel()
	require.ErrorIs(t, g.Do(ended, "c", doNothing), context.Canceled)
	_, ok := g.Get("c")
	require.False(t, ok, "no member for a call that is not made")
	require.Equal(t, 2, g.Stats().Members)
}

type ctxKey struct{}

func TestGroupConfigValidate(t *testing.T) {
	for _, c := range []struct {
		cfg  resilience.GroupConfig
		want string
	}{
		{resilience.GroupConfig{}, ""},
		{resilience.GroupConfig{MaxKeys: 1, IdleAfter: 1}, ""},
		{resilience.GroupConfig{IdleAfter: resilience.Unlimited}, ""},
		{resilience.GroupConfig{MaxKeys: -1}, "resilience.GroupConfig.MaxKeys is -1: must be 0 (for 10000) or more"},
		{resilience.GroupConfig{IdleAfter: -time.Second},
			"resilience.GroupConfig.IdleAfter is -1s: must be 0 (for 10m), more, or Unlimited"},
	} {
		if c.want == "" {
			require.NoError(t, c.cfg.Validate())
			continue
		}
		require.EqualError(t, c.cfg.Validate(), c.want)
		require.PanicsWithError(t, c.want, func() { newGates(c.cfg) })
	}
}

func TestGroupGetIsNoUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGates(resilience.GroupConfig{IdleAfter: time.Minute})
		_, ok := g.Get("a")
		require.False(t, ok)
		require.Zero(t, g.Stats().Members)
		call(t, g, "a")
		time.Sleep(time.Minute)
		get(t, g, "a")
		call(t, g, "b")
		_, ok = g.Get("a")
		require.False(t, ok, "it was idle")
	})
	g := resilience.NewGroup(func(float64) silent { return silent{} }, resilience.GroupConfig{})
	require.NoError(t, g.Do(t.Context(), math.NaN(), doNothing))
	_, ok := g.Get(math.NaN())
	require.False(t, ok)
}

func TestGroupKeepsMemberUntilWorkEnds(t *testing.T) {
	g := newGates(resilience.GroupConfig{MaxKeys: 1})
	ctx, work := resilience.BeginWork(t.Context())
	require.NoError(t, g.Do(ctx, "stream", func(context.Context) error { work.Continue(); return nil }))
	call(t, g, "other")
	keys := func() (all []string) {
		for key := range g.All() {
			all = append(all, key)
		}
		return all
	}
	require.Equal(t, []string{"stream"}, keys(), "the other had the overflow")
	work.End(nil)
	call(t, g, "other")
	require.Equal(t, []string{"other"}, keys())
	for name, fn := range map[string]resilience.Func{
		"panic": func(context.Context) error { panic("no") },
		"exit":  func(context.Context) error { runtime.Goexit(); return nil },
		"error": func(context.Context) error { return errShut },
		"none":  doNothing,
	} {
		for _, within := range []bool{false, true} {
			ctx := t.Context()
			if within {
				ctx, _ = resilience.BeginWork(ctx)
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				defer func() { _ = recover() }()
				_ = g.Do(ctx, name, fn)
			}()
			<-done
			call(t, g, "after")
			require.Equal(t, []string{"after"}, keys(), name)
		}
	}
}

func TestGroupUpdateReachesEveryMember(t *testing.T) {
	g := newGates(resilience.GroupConfig{MaxKeys: 2})
	call(t, g, "a")
	require.NoError(t, g.Describe().Update(true, shut), "a dry run")
	require.NoError(t, g.Do(t.Context(), "a", doNothing))
	failed := errors.New("not so")
	require.Same(t, failed, g.Describe().Update(false, func(cfg any) error { _ = shut(cfg); return failed }))
	require.NoError(t, g.Do(t.Context(), "a", doNothing))
	require.Equal(t, policy.Health{}, health(g))

	require.NoError(t, g.Describe().Update(false, shut))
	require.Equal(t, gateConfig{Shut: true}, g.Describe().Config())
	get(t, g, "a").inUse.Store(true)
	for _, key := range []string{"a", "later"} {
		require.ErrorIs(t, g.Do(t.Context(), key, doNothing), errShut, key)
	}
	get(t, g, "later").inUse.Store(true)
	require.ErrorIs(t, g.Do(t.Context(), "overflow", doNothing), errShut)
	require.Equal(t, policy.Health{Status: policy.Fail, State: "shut", Detail: "2 of 2 shut", Err: errShut}, health(g))
}

// Later members get the merged result of all updates, and only what these have altered.
func TestGroupUpdatesAreMerged(t *testing.T) {
	cost, other := func(context.Context) int { return 1 }, func(context.Context) int { return 2 }
	given := gateConfig{Limit: 10, Quotas: []quota{{N: 1, Days: []string{"monday"}}}, Weight: map[string]int{"a": 1},
		Judge: cost, Cost: other, Until: time.Unix(1, 0)}
	given.Queue = 5
	special := given
	special.Limit, special.Queue, special.Wait, special.Until = 20, 6, 7, time.Unix(2, 0)
	g := resilience.NewGroup(func(key string) *gate {
		if key == "special" {
			return newGate(key, special)
		}
		return newGate(key, given)
	}, resilience.GroupConfig{})
	base := &gateConfig{Limit: 3}
	for range 3 {
		update(t, g, func(*gateConfig) {})
		update(t, g, func(c *gateConfig) { c.Queue = 0 })
		update(t, g, func(c *gateConfig) { c.Quotas[0].N++ })
		update(t, g, func(c *gateConfig) { c.Quotas[0].Days[0] = "sunday" })
		update(t, g, func(c *gateConfig) { c.Weight["b"] = 2 })
		update(t, g, func(c *gateConfig) { c.Base = base })
	}
	update(t, g, func(c *gateConfig) { c.Cost = nil })
	call(t, g, "special")
	got := get(t, g, "special").config()
	require.NotNil(t, got.Judge)
	got.Judge = nil
	want := gateConfig{Limit: 20, Limits: Limits{0, 7}, Until: time.Unix(2, 0),
		Quotas: []quota{{N: 4, Days: []string{"sunday"}}}, Weight: map[string]int{"a": 1, "b": 2}, Base: base}
	require.Equal(t, want, got)

	update(t, g, func(c *gateConfig) { c.Quotas, c.Weight, c.Base, c.Until = nil, nil, nil, time.Time{} })
	call(t, g, "later")
	got = get(t, g, "later").config()
	got.Judge = nil
	require.Equal(t, gateConfig{Limit: 10}, got)
	require.Equal(t, 20, get(t, g, "special").config().Limit)
}

// A change may calculate: each member has its own result, and a later one that of the overflow.
func TestGroupUpdateCalculates(t *testing.T) {
	g := resilience.NewGroup(func(key string) *gate {
		return newGate(key, gateConfig{Limit: 10 + 10*len(key)})
	}, resilience.GroupConfig{})
	call(t, g, "a")
	update(t, g, func(c *gateConfig) { c.Limit *= 2 })
	update(t, g, func(c *gateConfig) { c.Limit += 1 })
	call(t, g, "later")
	require.Equal(t, 41, get(t, g, "a").config().Limit)
	require.Equal(t, 21, get(t, g, "later").config().Limit)
}

// A field that the overflow has already, but a member does not, is altered too.
func TestGroupUpdateEqualToTheOverflow(t *testing.T) {
	g := resilience.NewGroup(func(key string) *gate {
		return newGate(key, gateConfig{Limit: 10 * len(key)})
	}, resilience.GroupConfig{})
	call(t, g, "a")
	update(t, g, func(c *gateConfig) { c.Limit = 0 })
	call(t, g, "b")
	require.Zero(t, get(t, g, "a").config().Limit)
	require.Zero(t, get(t, g, "b").config().Limit)
}

// A later member takes over the changes that its own configuration allows.
func TestGroupUpdateForbiddenByALaterMember(t *testing.T) {
	g := resilience.NewGroup(func(key string) *gate {
		if key == "small" {
			return newGate(key, gateConfig{Limit: 1, Max: 2})
		}
		return newGate(key, gateConfig{})
	}, resilience.GroupConfig{})
	update(t, g, func(c *gateConfig) { c.Queue, c.Limit, c.Wait = 3, 5, 4 })
	call(t, g, "small", "other")
	require.Equal(t, gateConfig{Limit: 1, Max: 2, Limits: Limits{3, 4}}, get(t, g, "small").config())
	require.Equal(t, gateConfig{Limit: 5, Limits: Limits{3, 4}}, get(t, g, "other").config())
	require.Equal(t, errTooMany, g.Describe().Update(false, func(cfg any) error {
		cfg.(*gateConfig).Limit = 7
		return nil
	}), "it is not new now")
	require.Equal(t, 5, get(t, g, "other").config().Limit)
}

// The memory and time that a new key takes do not grow with the number of updates.
func TestGroupUpdatesLeaveNoHistory(t *testing.T) {
	g := newGates(resilience.GroupConfig{MaxKeys: 100})
	for i := range 10_000 {
		update(t, g, func(c *gateConfig) { c.Limit, c.Queue = i, i })
	}
	changed := 0
	update(t, g, func(*gateConfig) { changed++ })
	call(t, g, "a")
	require.Equal(t, 2, changed, "a function is not kept")
	require.Equal(t, 9_999, get(t, g, "a").config().Limit)
	key := 0
	allocs := testing.AllocsPerRun(50, func() {
		key++
		call(t, g, fmt.Sprint(key))
	})
	require.Less(t, allocs, 100.0)
}

// Random updates, as a member that follows each of them.
func FuzzGroupUpdate(f *testing.F) {
	f.Add(uint64(1), uint8(10))
	f.Fuzz(func(t *testing.T, seed uint64, updates uint8) {
		r := rand.New(rand.NewPCG(seed, 4))
		g := newGates(resilience.GroupConfig{})
		call(t, g, "present")
		for range updates {
			n := r.IntN(3)
			change := [](func(*gateConfig)){
				func(c *gateConfig) { c.Shut = n == 0 },
				func(c *gateConfig) { c.Limit, c.Max = n, 0 },
				func(c *gateConfig) { c.Queue += n },
				func(c *gateConfig) { c.Limits = Limits{n, n} },
				func(c *gateConfig) { c.Quotas = append(c.Quotas, quota{N: n}) },
				func(c *gateConfig) {
					for i := range c.Quotas {
						c.Quotas[i].N += n
					}
				},
				func(c *gateConfig) { c.Quotas = slices.Delete(c.Quotas, 0, min(n, len(c.Quotas))) },
				func(c *gateConfig) { c.Weight = map[string]int{"a": n} },
				func(c *gateConfig) { c.Weight = nil },
				func(c *gateConfig) { c.Until = c.Until.Add(time.Duration(n)) },
				func(c *gateConfig) { c.Judge = n },
				func(c *gateConfig) { *c = gateConfig{Limit: n} },
			}[r.IntN(12)]
			update(t, g, change)
		}
		call(t, g, "later")
		present, later := get(t, g, "present").config(), get(t, g, "later").config()
		if !reflect.DeepEqual(present, later) {
			t.Errorf("the later member has %+v, the present one %+v", later, present)
		}
	})
}

// A change that panics, for example by a wrong type, keeps no member from being evicted.
func TestGroupUpdateUnpinsAfterPanic(t *testing.T) {
	g := newGates(resilience.GroupConfig{MaxKeys: 1})
	call(t, g, "a")
	require.Panics(t, func() {
		_ = g.Describe().Update(false, func(cfg any) error { return shut(cfg.(*breaker.Config)) })
	})
	call(t, g, "b")
	require.EqualValues(t, 1, g.Stats().Evicted)
	require.NoError(t, g.Describe().Update(false, shut), "no lock is held")
}

// Metrics that panic for the overflow keep no member from being evicted.
func TestGroupMetricsUnpinAfterPanic(t *testing.T) {
	g := resilience.NewGroup(func(key string) *unmeasured { return &unmeasured{newGate(key, gateConfig{})} },
		resilience.GroupConfig{MaxKeys: 1})
	call(t, g, "a")
	require.Panics(t, func() { metrics(g) })
	call(t, g, "b")
	require.EqualValues(t, 1, g.Stats().Evicted)
}

// An unmeasured gate has no metrics if it is the overflow.
type unmeasured struct{ *gate }

func (u *unmeasured) Describe() policy.Description {
	d := u.gate.Describe()
	if u.key == "" {
		d.Metrics = func() []policy.Metric { panic("no metrics") }
	}
	return d
}

func TestGroupOfSeveralTypes(t *testing.T) {
	g := resilience.NewGroup(func(key string) resilience.Policy {
		if key == "slots" {
			return bulkhead.New(bulkhead.Config{Limit: 1})
		}
		return breaker.New(breaker.Config{ConsecutiveFailures: 3})
	}, resilience.GroupConfig{})
	require.NoError(t, g.Describe().Update(false, func(cfg any) error {
		cfg.(*breaker.Config).ConsecutiveFailures = 4
		return nil
	}))
	call(t, g, "slots", "circuit")
	slots, _ := g.Get("slots")
	require.Equal(t, 1, slots.(*bulkhead.Bulkhead).Config().Limit)
	circuit, _ := g.Get("circuit")
	require.Equal(t, 4, circuit.(*breaker.Breaker).Config().ConsecutiveFailures)
}

func TestGroupHealth(t *testing.T) {
	warn := policy.Health{Status: policy.Warn, State: "disabled"}
	half := policy.Health{Status: policy.Warn, State: "half_open"}
	fail := policy.Health{Status: policy.Fail, State: "open", Err: errShut}
	ok := policy.Health{}
	for _, c := range []struct {
		members  []policy.Health
		overflow policy.Health
		want     policy.Health
	}{
		{nil, ok, ok},
		{[]policy.Health{ok, ok}, ok, ok},
		{[]policy.Health{ok, warn}, ok, policy.Health{Status: policy.Warn, State: "disabled", Detail: "1 of 2 disabled"}},
		{[]policy.Health{ok, half}, ok, policy.Health{Status: policy.Warn, State: "half_open", Detail: "1 of 2 half open"}},
		{[]policy.Health{warn, warn}, warn, policy.Health{Status: policy.Warn, State: "disabled", Detail: "2 of 2 disabled"}},
		{[]policy.Health{ok, warn, fail}, ok,
			policy.Health{Status: policy.Warn, State: "partly_open", Detail: "1 of 3 open", Err: errShut}},
		{[]policy.Health{fail, fail}, ok,
			policy.Health{Status: policy.Fail, State: "open", Detail: "2 of 2 open", Err: errShut}},
		{[]policy.Health{ok}, warn, policy.Health{Status: policy.Warn, State: "disabled", Detail: "(other keys) disabled"}},
		{nil, fail, policy.Health{Status: policy.Warn, State: "partly_open", Detail: "(other keys) open", Err: errShut}},
		{[]policy.Health{warn}, fail,
			policy.Health{Status: policy.Warn, State: "partly_open", Detail: "(other keys) open", Err: errShut}},
		{[]policy.Health{{Status: policy.Fail, Err: errShut}, ok}, ok,
			policy.Health{Status: policy.Warn, Detail: "1 of 2", Err: errShut}},
	} {
		g := resilience.NewGroup(func(key int) patient {
			if key == 0 {
				return patient{c.overflow}
			}
			return patient{c.members[key-1]}
		}, resilience.GroupConfig{})
		for i := range c.members {
			require.NoError(t, g.Do(t.Context(), i+1, doNothing))
		}
		require.Equal(t, c.want, health(g), "%+v", c)
	}
}

// A patient is a policy with a health and nothing else.
type patient struct{ health policy.Health }

func (patient) Do(ctx context.Context, fn resilience.Func) error { return fn(ctx) }

func (p patient) Describe() policy.Description {
	return policy.Description{Kind: "patient", Health: func(context.Context) policy.Health { return p.health }}
}

func TestGroupDescribesItsMembers(t *testing.T) {
	g := newGates(resilience.GroupConfig{})
	call(t, g, "a", "b")
	members := map[string]string{}
	for key, m := range g.Describe().Members() {
		members[key] = m.(*gate).key
	}
	require.Equal(t, map[string]string{"a": "a", "b": "b"}, members, "the overflow is not a member")
	for range g.Describe().Members() {
		break
	}
	require.Equal(t, "gate", g.Describe().Kind)
	require.Equal(t, "gates", g.Describe().Name)
}

// A silent policy does not describe itself.
type silent struct{}

func (silent) Do(ctx context.Context, fn resilience.Func) error { return fn(ctx) }

// A share of more than 1 is none, and the sum of the longest waits is none of them.
func TestGroupShowsTheLargestShareAndTime(t *testing.T) {
	g := resilience.NewGroup(func(key string) *gauge { return &gauge{float64(len(key))} }, resilience.GroupConfig{})
	call(t, g, "abc", "ab")
	require.Equal(t, map[string]float64{
		"gauge.full_ratio": 3, "gauge.wait_seconds{level=0}": 3, "gauge.time_seconds": 5, "gauge.limit": 5,
		"gauge.keys": 2, "gauge.evictions": 0,
	}, metrics(g))
}

type gauge struct{ value float64 }

func (*gauge) Do(ctx context.Context, fn resilience.Func) error { return fn(ctx) }

func (g *gauge) Describe() policy.Description {
	return policy.Description{Kind: "gauge", Metrics: func() []policy.Metric {
		return []policy.Metric{
			{Name: "gauge.full_ratio", Value: g.value}, {Name: "gauge.wait_seconds{level=0}", Value: g.value},
			{Name: "gauge.time_seconds", Counter: true, Value: g.value}, {Name: "gauge.limit", Value: g.value},
		}
	}}
}

// A throttle.Limiter has metrics with the names of the group's own metrics.
func TestGroupHasEachMetricOnce(t *testing.T) {
	g := resilience.NewGroup(func(string) *throttle.Limiter {
		return throttle.New(throttle.Config{Rate: 1})
	}, resilience.GroupConfig{})
	call(t, g, "a", "b")
	names := map[string]bool{}
	for _, m := range g.Describe().Metrics() {
		require.False(t, names[m.Name], m.Name)
		names[m.Name] = true
	}
	require.Equal(t, 2.0, metrics(g)["throttle.keys"])
}

func TestGroupOfSilentPolicies(t *testing.T) {
	g := resilience.NewGroup(func(int) silent { return silent{} }, resilience.GroupConfig{})
	require.NoError(t, g.Do(t.Context(), 1, doNothing))
	d := g.Describe()
	require.Equal(t, "group", d.Kind)
	require.Empty(t, d.Name)
	require.Nil(t, d.Config)
	require.Nil(t, d.Health)
	require.Nil(t, d.Update)
	require.Nil(t, d.Observe)
	for range d.Members() {
		t.Error("a member that does not describe itself")
	}
	require.NoError(t, g.Close())
	require.Equal(t, map[string]float64{"group.keys": 1, "group.evictions": 0}, metrics(g))
}

func TestGroupEventsHaveTheirKey(t *testing.T) {
	g := newGates(resilience.GroupConfig{MaxKeys: 1})
	call(t, g, "a")
	var seen []string
	observe := func(who string) func() {
		return g.Describe().Observe(func(_ context.Context, e policy.Event) {
			seen = append(seen, fmt.Sprint(who, " ", e.Kind, " ", e.Name, " ", e.What, " ", e.Key))
		})
	}
	stop := observe("first")
	observe("second")
	require.NoError(t, g.Describe().Update(false, shut))
	get(t, g, "a").inUse.Store(true)
	call(t, g, "a", "b")
	stop()
	stop()
	get(t, g, "a").inUse.Store(false)
	call(t, g, "c")
	require.Equal(t, []string{
		"first gate gates refused a", "second gate gates refused a",
		"first gate gates refused (other keys)", "second gate gates refused (other keys)",
		"second gate gates refused c",
	}, seen)
}

// Members build events only while the group has an observer.
func TestGroupStopsObservingItsMembers(t *testing.T) {
	g := newGates(resilience.GroupConfig{MaxKeys: 2})
	require.NoError(t, g.Describe().Update(false, shut))
	events := func(keys ...string) (built int64) {
		for _, key := range keys {
			call(t, g, key)
			m := get(t, g, key)
			built += m.events.Swap(0)
		}
		return built
	}
	require.Zero(t, events("a"))
	for range 3 {
		stop := g.Describe().Observe(func(context.Context, policy.Event) {})
		stopOther := g.Describe().Observe(func(context.Context, policy.Event) {})
		require.EqualValues(t, 2, events("a", "b"))
		stop()
		require.EqualValues(t, 2, events("a", "b"))
		evicted := get(t, g, "a")
		require.EqualValues(t, 1, events("c"))
		_ = evicted.Do(t.Context(), doNothing)
		require.Zero(t, evicted.events.Load(), "evicted")
		stopOther()
		require.Zero(t, events("b", "c", "d", "a"))
	}
	stopped := false
	var stop func()
	stop = g.Describe().Observe(func(context.Context, policy.Event) { stop(); stopped = true })
	call(t, g, "a", "a")
	require.True(t, stopped, "an observer may stop itself")
	require.LessOrEqual(t, get(t, g, "a").events.Load(), int64(1))
}

// While observers come and go, each refused call has as many events as there are observers, or none more.
func TestGroupObserversUnderStress(t *testing.T) {
	g := newGates(resilience.GroupConfig{MaxKeys: 4})
	require.NoError(t, g.Describe().Update(false, shut))
	var calls, seen atomic.Int64
	var callers, observers sync.WaitGroup
	always := g.Describe().Observe(func(context.Context, policy.Event) { seen.Add(1) })
	for w := range 4 {
		callers.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 5))
			for range 5000 {
				_ = g.Do(t.Context(), fmt.Sprint(r.IntN(12)), doNothing)
				calls.Add(1)
			}
		})
		observers.Go(func() {
			for range 300 {
				g.Describe().Observe(func(context.Context, policy.Event) {})()
			}
		})
	}
	callers.Wait()
	observers.Wait()
	require.Equal(t, calls.Load(), seen.Load(), "each call once")
	always()
	before := seen.Load()
	for key := range 12 {
		call(t, g, fmt.Sprint(key))
	}
	require.Equal(t, before, seen.Load())
	for _, m := range g.All() {
		require.False(t, m.observers.Any())
	}
}

// Eviction reads the metrics of a breaker whose open time is over while the group is locked.
func TestGroupObserversMayUseTheGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := resilience.NewGroup(func(string) *breaker.Breaker {
			return breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Second})
		}, resilience.GroupConfig{MaxKeys: 1})
		g.Describe().Observe(func(context.Context, policy.Event) { g.Stats() })
		require.Equal(t, errShut, g.Do(t.Context(), "a", func(context.Context) error { return errShut }))
		time.Sleep(2 * time.Second)
		call(t, g, "b")
		require.Equal(t, resilience.GroupStats{Members: 1, Evicted: 1}, g.Stats())
	})
}

// A key takes no more retries from the overflow and from its member than from one budget.
func TestGroupKeyHasOneBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := resilience.NewGroup(func(string) *retry.Retrier {
			return retry.New(retry.Config{
				Attempts: 2, Backoff: retry.Constant(time.Millisecond),
				Budget: retry.NewBudget(retry.BudgetConfig{Ratio: retry.None, PerSecond: 1}),
			})
		}, resilience.GroupConfig{MaxKeys: 1})
		retries := 0
		fail := func(ctx context.Context) error {
			if n, _ := retry.AttemptFrom(ctx); n == 2 {
				retries++
			}
			return errShut
		}
		require.NoError(t, g.Do(t.Context(), "first", func(context.Context) error {
			for range 15 {
				_ = g.Do(t.Context(), "second", fail)
			}
			return nil
		}))
		for range 15 {
			_ = g.Do(t.Context(), "second", fail)
		}
		require.Equal(t, 10, retries)
		time.Sleep(10 * time.Second)
		_ = g.Do(t.Context(), "second", fail)
		_, ok := g.Get("second")
		require.True(t, ok, "the budget of the overflow is full again")
	})
}

// A question whether a member is in use does not describe it anew.
func TestGroupDescribesAMemberOnce(t *testing.T) {
	g := newGates(resilience.GroupConfig{MaxKeys: 1})
	call(t, g, "a")
	a := get(t, g, "a")
	a.inUse.Store(true)
	for i := range 100 {
		call(t, g, fmt.Sprint(i))
	}
	require.EqualValues(t, 1, a.described.Load())
}

func TestGroupCloseIsFinal(t *testing.T) {
	g := newGates(resilience.GroupConfig{MaxKeys: 1})
	call(t, g, "a")
	a := get(t, g, "a")
	require.NoError(t, g.Close())
	require.NoError(t, g.Close())
	require.EqualValues(t, 1, a.closed.Load())
	call(t, g, "b")
	require.EqualValues(t, 1, a.closed.Load(), "not closed again when it was evicted")
	require.EqualValues(t, 1, get(t, g, "b").closed.Load(), "created after Close")
}

func TestGroupEvictsIdleMembers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGates(resilience.GroupConfig{})
		call(t, g, "a")
		time.Sleep(10 * time.Minute)
		call(t, g, "b")
		require.Equal(t, resilience.GroupStats{Members: 1, Evicted: 1}, g.Stats())
		require.Equal(t, 2.0, metrics(g)["gate.calls"])

		g = newGates(resilience.GroupConfig{IdleAfter: resilience.Unlimited})
		call(t, g, "a")
		time.Sleep(1000 * time.Hour)
		call(t, g, "b")
		require.Equal(t, resilience.GroupStats{Members: 2}, g.Stats())
	})
}

// While 100,000 keys pass through a full group with a member that must stay, an update and Close miss no
// member, and no counter decreases.
func TestGroupUnderStress(t *testing.T) {
	const keys, limit = 100_000, 50
	var made sync.Map
	g := resilience.NewGroup(func(key string) *gate {
		m := newGate(key, gateConfig{})
		made.Store(m, true)
		return m
	}, resilience.GroupConfig{MaxKeys: limit})
	require.NoError(t, g.Do(t.Context(), "open", doNothing))
	open := get(t, g, "open")
	open.inUse.Store(true)
	var left atomic.Int64
	left.Store(4)
	var wg sync.WaitGroup
	var changed, closed atomic.Bool
	for w := range 4 {
		wg.Go(func() {
			defer left.Add(-1)
			r := rand.New(rand.NewPCG(uint64(w), 3))
			for n := range keys / 4 {
				mustRefuse := changed.Load()
				err := g.Do(t.Context(), fmt.Sprint(w, " ", n), doNothing)
				if mustRefuse && err == nil {
					t.Error("an update missed a member")
					return
				}
				if r.IntN(100) == 0 {
					_ = g.Do(t.Context(), "open", doNothing)
				}
				if n == keys/8 && w == 0 {
					if err := g.Describe().Update(false, shut); err != nil {
						t.Error(err)
					}
					changed.Store(true)
				}
				if n == keys/6 && w == 1 {
					_ = g.Close()
					closed.Store(true)
				}
			}
		})
	}
	wg.Go(func() {
		for last := 0.0; left.Load() > 0; {
			calls := metrics(g)["gate.calls"]
			if calls < last {
				t.Errorf("%v calls after %v", calls, last)
			}
			last = calls
			if n := g.Stats().Members; n > limit {
				t.Errorf("%d members", n)
			}
		}
	})
	wg.Wait()
	var calls int64
	for m := range made.Range {
		m := m.(*gate)
		calls += m.calls.Load()
		if m.closed.Load() == 0 {
			t.Errorf("%s was not closed", m.key)
		}
	}
	require.EqualValues(t, calls, metrics(g)["gate.calls"])
	require.Same(t, open, get(t, g, "open"), "a member in use stays")
	require.EqualValues(t, limit, g.Stats().Members)
}
