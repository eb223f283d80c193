package resilience_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/internal/describe"
)

// A gate is a policy that describes itself by every optional method, as a pattern does.
type gate struct {
	key     string
	mu      sync.Mutex
	cfg     gateConfig
	calls   float64
	needed  bool
	closed  int
	told    []func(context.Context, any)
	running int
}

type gateConfig struct{ Shut bool }

type gateEvent struct{ what string }

func (gateEvent) Level() int                       { return 4 }
func (e gateEvent) Fields(yield func(string, any)) { yield("event", e.what) }

func (g *gate) Do(ctx context.Context, fn resilience.Func) error {
	g.mu.Lock()
	g.calls++
	shut, told := g.cfg.Shut, g.told
	g.mu.Unlock()
	if shut {
		for _, f := range told {
			f(ctx, gateEvent{"refused"})
		}
		return errShut
	}
	return fn(ctx)
}

var errShut = errors.New("shut")

func (g *gate) Name() string { return "gates" }
func (g *gate) Kind() string { return "gate" }
func (g *gate) Needed() bool { return locked(g, func() bool { return g.needed }) }
func (g *gate) Close() error { return locked(g, func() error { g.closed++; return nil }) }
func (g *gate) Settings() any {
	return locked(g, func() any { return g.cfg })
}

func (g *gate) Health() error {
	if locked(g, func() bool { return g.cfg.Shut }) {
		return errShut
	}
	return nil
}

func (g *gate) Figures() []describe.Figure {
	return locked(g, func() []describe.Figure {
		return []describe.Figure{{Name: "gate.calls", Counter: true, Value: g.calls}, {Name: "gate.running", Value: float64(g.running)}}
	})
}

func (g *gate) Change(dry bool, f func(any) error) error {
	return locked(g, func() error {
		next := g.cfg
		err := f(&next)
		if err == nil && !dry {
			g.cfg = next
		}
		return err
	})
}

func (g *gate) ObserveAny(f func(context.Context, any)) func() {
	return locked(g, func() func() { g.told = append(slices.Clone(g.told), f); return func() {} })
}

func locked[T any](g *gate, f func() T) T {
	g.mu.Lock()
	defer g.mu.Unlock()
	return f()
}

func newGates(cfg resilience.GroupConfig) *resilience.Group[string, *gate] {
	return resilience.NewGroup(func(key string) *gate { return &gate{key: key} }, cfg)
}

func doNothing(context.Context) error { return nil }

func shut(cfg any) error { cfg.(*gateConfig).Shut = true; return nil }

func figures(p describe.Figurer) map[string]float64 {
	all := map[string]float64{}
	for _, f := range p.Figures() {
		all[f.Name] = f.Value
	}
	return all
}

func TestGroupHasAMemberForEachKey(t *testing.T) {
	g := newGates(resilience.GroupConfig{})
	ctx := context.WithValue(t.Context(), ctxKey{}, "b")
	require.NoError(t, g.Do(ctx, "a", doNothing))
	by := g.By(func(ctx context.Context) string { return ctx.Value(ctxKey{}).(string) })
	require.NoError(t, by(doNothing)(ctx))
	require.NoError(t, g.Do(ctx, "b", doNothing))
	calls := map[string]float64{}
	for key, m := range g.All() {
		require.Equal(t, key, m.key)
		calls[key] = m.calls
	}
	require.Equal(t, map[string]float64{"a": 1, "b": 2}, calls)
	require.Equal(t, 2, g.Len())
	require.Equal(t, resilience.GroupStats{Members: 2, MaxKeys: 10_000}, g.Stats())

	ended, cancel := context.WithCancel(ctx)
	cancel()
	require.ErrorIs(t, g.Do(ended, "c", doNothing), context.Canceled)
	require.Equal(t, 2, g.Len(), "no member for a call that is not made")
	require.PanicsWithError(t, "resilience.GroupConfig.MaxKeys is -1: must be 0 (for 10000) or more",
		func() { newGates(resilience.GroupConfig{MaxKeys: -1}) })
}

type ctxKey struct{}

func TestGroupPinsAMemberUntilTheWorkOfItsCallEnds(t *testing.T) {
	g := newGates(resilience.GroupConfig{MaxKeys: 1})
	ctx, work := resilience.BeginWork(t.Context())
	require.NoError(t, g.Do(ctx, "stream", func(context.Context) error { work.Continue(); return nil }))
	require.NoError(t, g.Do(t.Context(), "other", doNothing))
	keys := func() (all []string) {
		for key := range g.All() {
			all = append(all, key)
		}
		return all
	}
	require.Equal(t, []string{"stream"}, keys(), "the other had the overflow")
	work.End(nil)
	require.NoError(t, g.Do(t.Context(), "other", doNothing))
	require.Equal(t, []string{"other"}, keys())
	require.Panics(t, func() { _ = g.Do(t.Context(), "other", func(context.Context) error { panic("no") }) })
	require.NoError(t, g.Do(t.Context(), "third", doNothing))
	require.Equal(t, []string{"third"}, keys(), "a panic unpins, too")
}

func TestGroupChangeReachesEveryMember(t *testing.T) {
	g := newGates(resilience.GroupConfig{MaxKeys: 2})
	require.NoError(t, g.Do(t.Context(), "a", doNothing))
	require.NoError(t, g.Change(true, shut), "a dry run")
	require.NoError(t, g.Do(t.Context(), "a", doNothing))
	failed := errors.New("not so")
	require.Same(t, failed, g.Change(false, func(cfg any) error { _ = shut(cfg); return failed }))
	require.NoError(t, g.Do(t.Context(), "a", doNothing))
	require.NoError(t, g.Health())

	require.NoError(t, g.Change(false, shut))
	require.Equal(t, gateConfig{Shut: true}, g.Settings())
	for key, m := range g.All() {
		require.True(t, m.cfg.Shut, key)
		m.needed = true
	}
	for _, key := range []string{"a", "later"} {
		require.ErrorIs(t, g.Do(t.Context(), key, doNothing), errShut, key)
	}
	for _, m := range g.All() {
		m.needed = true
	}
	require.ErrorIs(t, g.Do(t.Context(), "overflow", doNothing), errShut)
	require.ErrorIs(t, g.Health(), errShut)
	require.ErrorContains(t, g.Health(), "3 of 3 members: ")
}

// A change that panics, as by a wrong type, keeps no member from being evicted.
func TestGroupChangeThatPanicsPinsNoMember(t *testing.T) {
	g := newGates(resilience.GroupConfig{MaxKeys: 1})
	require.NoError(t, g.Do(t.Context(), "a", doNothing))
	require.Panics(t, func() { _ = g.Change(false, func(cfg any) error { return shut(cfg.(*breaker.Config)) }) })
	require.NoError(t, g.Do(t.Context(), "b", doNothing))
	require.EqualValues(t, 1, g.Stats().Evicted)
}

// Of a group in which some members fail, those count that do.
func TestGroupHealthCountsTheMembersThatFail(t *testing.T) {
	g := resilience.NewGroup(func(string) *breaker.Breaker { return breaker.New(breaker.Config{}) }, resilience.GroupConfig{})
	for _, key := range []string{"a", "b", "c"} {
		require.NoError(t, g.Do(t.Context(), key, doNothing))
	}
	var all []*breaker.Breaker
	for _, b := range g.All() {
		all = append(all, b)
	}
	all[0].Disable() // which lets calls pass
	require.EqualError(t, g.Health(), "disabled: 1 of 3 disabled")
	all[1].ForceOpen(errShut)
	require.EqualError(t, g.Health(), "partly forced open: 1 of 3 forced open")
	require.ErrorIs(t, g.Health(), errShut)
	all[0].ForceOpen(errShut)
	all[2].ForceOpen(errShut)
	require.EqualError(t, g.Health(), "forced open: 3 of 3 forced open")
}

// The member of the keys without room is none that counts, but is named if it alone fails.
func TestGroupHealthNamesTheOverflow(t *testing.T) {
	var overflow *breaker.Breaker
	g := resilience.NewGroup(func(key string) *breaker.Breaker {
		b := breaker.New(breaker.Config{})
		if key == "" {
			overflow = b
		}
		return b
	}, resilience.GroupConfig{})
	require.NoError(t, g.Do(t.Context(), "a", doNothing))
	overflow.Disable()
	require.EqualError(t, g.Health(), "disabled: (other keys) disabled")
	overflow.ForceOpen(errShut)
	require.EqualError(t, g.Health(), "partly forced open: (other keys) forced open")
	for _, b := range g.All() {
		b.Disable()
	}
	require.EqualError(t, g.Health(), "partly forced open: (other keys) forced open")
}

// A policy that says nothing of itself, and has no settings.
type silent struct{}

func (silent) Do(ctx context.Context, fn resilience.Func) error { return fn(ctx) }

// A share of more than 1 is none, and the sum of the longest waits is none of them.
func TestGroupShowsTheLargestShareAndTime(t *testing.T) {
	g := resilience.NewGroup(func(key string) *gauge { return &gauge{float64(len(key))} }, resilience.GroupConfig{})
	for _, key := range []string{"abc", "ab"} {
		require.NoError(t, g.Do(t.Context(), key, doNothing))
	}
	require.Equal(t, map[string]float64{
		"gauge.full_ratio": 3, "gauge.wait_seconds{level=0}": 3, "gauge.time_seconds": 5, "gauge.limit": 5,
		"group.keys": 2, "group.evictions": 0,
	}, figures(g))
}

type gauge struct{ value float64 }

func (*gauge) Do(ctx context.Context, fn resilience.Func) error { return fn(ctx) }
func (g *gauge) Figures() []describe.Figure {
	return []describe.Figure{
		{Name: "gauge.full_ratio", Value: g.value}, {Name: "gauge.wait_seconds{level=0}", Value: g.value},
		{Name: "gauge.time_seconds", Counter: true, Value: g.value}, {Name: "gauge.limit", Value: g.value},
	}
}

func TestGroupOfPoliciesThatSayNothing(t *testing.T) {
	g := resilience.NewGroup(func(int) silent { return silent{} }, resilience.GroupConfig{})
	require.NoError(t, g.Do(t.Context(), 1, doNothing))
	require.Equal(t, "group", g.Kind())
	require.Empty(t, g.Name())
	require.Nil(t, g.Settings())
	require.NoError(t, g.Health())
	require.NoError(t, g.Close())
	require.Equal(t, map[string]float64{"group.keys": 1, "group.evictions": 0}, figures(g))
	require.EqualError(t, g.Change(true, shut), "resilience: a resilience_test.silent has no settings that can change")
}

func TestGroupTellsOfEventsWithTheirKey(t *testing.T) {
	g := newGates(resilience.GroupConfig{MaxKeys: 1})
	require.NoError(t, g.Do(t.Context(), "a", doNothing))
	var told []string
	observe := func(who string) func() {
		return g.ObserveAny(func(_ context.Context, e any) {
			text := who
			e.(describe.Event).Fields(func(name string, v any) { text += fmt.Sprintf(" %s=%v", name, v) })
			told = append(told, text)
		})
	}
	stop := observe("first")
	observe("second")
	require.NoError(t, g.Change(false, shut))
	for _, m := range g.All() {
		m.needed = true
	}
	_ = g.Do(t.Context(), "a", doNothing)
	_ = g.Do(t.Context(), "b", doNothing)
	stop()
	for _, m := range g.All() {
		m.needed = false
	}
	_ = g.Do(t.Context(), "c", doNothing)
	require.Equal(t, []string{
		"first event=refused key=a", "second event=refused key=a",
		"first event=refused key=(other keys)", "second event=refused key=(other keys)",
		"second event=refused key=c",
	}, told)
}

// Eviction asks a breaker whose open time is over for its figures, under the lock of the group.
func TestGroupObserversMayUseTheGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := resilience.NewGroup(func(string) *breaker.Breaker {
			return breaker.New(breaker.Config{Failures: 1, OpenFor: time.Second})
		}, resilience.GroupConfig{MaxKeys: 1})
		g.ObserveAny(func(context.Context, any) { g.Stats() })
		require.Equal(t, errShut, g.Do(t.Context(), "a", func(context.Context) error { return errShut }))
		time.Sleep(2 * time.Second)
		require.NoError(t, g.Do(t.Context(), "b", doNothing))
		require.Equal(t, resilience.GroupStats{Members: 1, MaxKeys: 1, Evicted: 1}, g.Stats())
	})
}

func TestGroupCloseIsFinal(t *testing.T) {
	g := newGates(resilience.GroupConfig{MaxKeys: 1})
	require.NoError(t, g.Do(t.Context(), "a", doNothing))
	var members []*gate
	for _, m := range g.All() {
		members = append(members, m)
	}
	require.NoError(t, g.Close())
	require.NoError(t, g.Close())
	require.Equal(t, 1, members[0].closed)
	require.NoError(t, g.Do(t.Context(), "b", doNothing))
	require.Equal(t, 2, members[0].closed, "closed again as it was evicted")
	for _, m := range g.All() {
		require.Equal(t, 1, m.closed, "made after Close")
	}
}

func TestGroupEvictsIdleMembers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGates(resilience.GroupConfig{})
		require.NoError(t, g.Do(t.Context(), "a", doNothing))
		time.Sleep(10 * time.Minute)
		require.NoError(t, g.Do(t.Context(), "b", doNothing))
		require.Equal(t, resilience.GroupStats{Members: 1, MaxKeys: 10_000, Evicted: 1}, g.Stats())
		require.Equal(t, 2.0, figures(g)["gate.calls"])
	})
}

// While 100 000 keys pass through a full group, with a member among them that must stay, no
// member is missed by a Change or by Close, and no figure goes back.
func TestGroupUnderStress(t *testing.T) {
	const keys, limit = 100_000, 50
	var made sync.Map
	g := resilience.NewGroup(func(key string) *gate {
		m := &gate{key: key}
		made.Store(m, true)
		return m
	}, resilience.GroupConfig{MaxKeys: limit})
	require.NoError(t, g.Do(t.Context(), "open", doNothing))
	var open *gate
	for _, m := range g.All() {
		m.needed, open = true, m
	}
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
					t.Error("a member was missed by Change")
					return
				}
				if r.IntN(100) == 0 {
					_ = g.Do(t.Context(), "open", doNothing)
				}
				if n == keys/8 && w == 0 {
					if err := g.Change(false, shut); err != nil {
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
			calls := figures(g)["gate.calls"]
			if calls < last {
				t.Errorf("%v calls after %v", calls, last)
			}
			last = calls
			if n := g.Len(); n > limit {
				t.Errorf("%d members", n)
			}
		}
	})
	wg.Wait()
	var calls float64
	for m := range made.Range {
		m := m.(*gate)
		calls += m.calls
		if m.closed == 0 {
			t.Errorf("%s was missed by Close", m.key)
		}
	}
	require.Equal(t, calls, figures(g)["gate.calls"])
	found := false
	for _, m := range g.All() {
		found = found || m == open
	}
	require.True(t, found, "the member that is needed stayed")
	require.EqualValues(t, limit, g.Len())
}
