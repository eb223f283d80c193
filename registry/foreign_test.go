package registry_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/throttle"
)

type guestConfig struct {
	N     int
	check func(n int) error
}

func (c guestConfig) Validate() error {
	if c.check == nil {
		return nil
	}
	return c.check(c.N)
}

// A guest is a policy of other origin, each method of which does what the test wants.
type guest struct {
	cfg                     guestConfig
	figures, config, update func()
}

func (g *guest) Kind() string { return "guest" } // after the breakers, before throttle
func (g *guest) Name() string { return "g" }

func (g *guest) Figures() iter.Seq[registry.Figure] {
	g.figures()
	return slices.Values([]registry.Figure{{Name: "guest.n", Value: 1}})
}

func (g *guest) Config() guestConfig { g.config(); return g.cfg }

func (g *guest) Update(change func(*guestConfig)) error {
	g.update()
	change(&g.cfg)
	return nil
}

func (g *guest) Preview(func(*guestConfig)) (guestConfig, error) { panic("not asked for") }

func (g *guest) Observe(func(context.Context, registry.Event)) func() { panic("no events") }

// Nothing that a policy of other origin does holds the registry for long, or ends the program.
func TestAPolicyOfOtherOriginHoldsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHouse()
		defer h.close()
		nothing := func() {}
		gate := make(chan struct{})
		release := sync.OnceFunc(func() { close(gate); synctest.Wait() })
		defer release()
		hang := func() { <-gate }
		g := &guest{cfg: guestConfig{N: 1}, figures: nothing, config: nothing, update: nothing}
		defer h.reg.Observe(func(context.Context, registry.Event) {})()
		h.reg.MustAdd(g)
		e, _ := h.reg.Get("guest", "g")
		figures := func() int { return len(slices.Collect(e.Figures())) }
		change := []byte(`{"bulkhead/users": {"Limit": 7}, "guest/g": {"N": 2}, "throttle/users": {"Rate": 5}}`)
		require.Equal(t, 1, figures())
		require.JSONEq(t, `{"N": 1}`, string(e.Settings()))

		g.figures = func() { panic("oh") }
		require.Equal(t, 0, figures())
		require.NotEmpty(t, h.reg.String())
		g.update = func() { panic("oh") }
		_, err := h.reg.Apply(change)
		require.EqualError(t, err, "guest/g: it has panicked: oh")
		require.Equal(t, 2, h.slots.Config().Limit, "it is changed back")
		require.Equal(t, 10.0, h.rate.Config().Rate)

		g.update, g.figures = nothing, nothing
		g.cfg.check = func(int) error { panic("oh") }
		_, err = h.reg.Preview(change)
		require.ErrorContains(t, err, "guest/g: it has panicked: oh")
		held := make(chan struct{})
		g.cfg.check = func(int) error { <-held; return nil }
		_, err = h.reg.Preview(change)
		require.ErrorContains(t, err, "guest/g: it has not answered for 5s")
		close(held)
		synctest.Wait()
		g.cfg.check = func(n int) error {
			if n > 2 {
				return errors.New("N is too large")
			}
			return nil
		}
		_, err = h.reg.Apply([]byte(`{"guest/g": {"N": 3}}`))
		require.ErrorContains(t, err, "N is too large")
		g.cfg.check = nil
		_, err = h.reg.Apply(change)
		require.NoError(t, err)
		require.JSONEq(t, `{"N": 2}`, string(e.Settings()))

		g.config = hang
		began := time.Now()
		require.JSONEq(t, `{"N": 2}`, string(e.Settings()), "the last that is known")
		require.Equal(t, 5*time.Second, time.Since(began))
		synctest.Wait()
		require.Equal(t, 0, figures(), "while it hangs it is not asked")
		require.Equal(t, 5*time.Second, time.Since(began))
		_, err = h.reg.Apply([]byte(`{"guest/g": {"N": 3}}`))
		require.EqualError(t, err, "guest/g: it does not answer")
		release()
		require.Equal(t, 1, figures(), "it answers again")

		h.reg.Remove(g)
		g.config = func() { panic("oh") }
		h.reg.MustAdd(g)
		e, _ = h.reg.Get("guest", "g")
		require.JSONEq(t, `{"N": 0}`, string(e.Settings()), "it has never said")
	})
}

// What an Apply that is rejected has named follows the other fields as before.
func TestARejectedApplyLeavesADefaultADefault(t *testing.T) {
	nothing := func() {}
	g := &guest{cfg: guestConfig{N: 1}, figures: nothing, config: nothing, update: func() { panic("oh") }}
	tenants := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Name: "tenants", Rate: 10}, MaxKeys: 100})
	for i := range 10 {
		require.True(t, tenants.Allow(fmt.Sprint(i)))
	}
	users := cacheaside.New(cacheaside.Config[string, int]{
		Name: "users", Store: struct{ cacheaside.Store }{}, Capacity: -1, Load: func(context.Context, string) (int, error) { return 1, nil },
	})
	for path, settings := range map[string]string{"guest/g": `{"N": 2}`, "throttle/tenants": `{"MaxKeys": 5}`, "cache/users": `{"Capacity": 9}`} {
		rate := throttle.New(throttle.Config{Name: "rate", Rate: 10})
		reg := registry.New()
		reg.MustAdd(rate, g, tenants, users)
		_, err := reg.Apply([]byte(`{"throttle/rate": {"Rate": 20, "Burst": 50}, "` + path + `": ` + settings + `}`))
		require.ErrorContains(t, err, path)
		require.Equal(t, 10.0, rate.Config().Rate)
		_, err = reg.Apply([]byte(`{"throttle/rate": {"Rate": 30}}`))
		require.NoError(t, err)
		require.Equal(t, 30, rate.Config().Burst, path)
	}
}

// A nameless policy of other origin has a method that panics, or does not return.
type nameless struct{ kind, name func() string }

func (n *nameless) Kind() string { return n.kind() }
func (n *nameless) Name() string { return n.name() }

func TestAddRefusesAPolicyThatDoesNotSayItsName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		held := make(chan struct{})
		defer close(held)
		fine, broken, hangs := func() string { return "x" }, func() string { panic("nil map") }, func() string { <-held; return "x" }
		for _, p := range []*nameless{{fine, broken}, {broken, fine}, {fine, hangs}, {hangs, fine}} {
			require.ErrorContains(t, registry.New().Add(p), "is not a policy of this module")
		}
		require.NoError(t, registry.New().Add(&nameless{fine, fine}))
	})
}

// A beacon is a policy of other origin that tells its state to whoever begins to observe it.
type beacon struct{ name string }

func (b *beacon) Kind() string { return "beacon" }
func (b *beacon) Name() string { return b.name }

func (b *beacon) Observe(f func(context.Context, registry.Event)) func() {
	f(context.Background(), registry.Event{What: "lit"})
	return func() { f(context.Background(), registry.Event{What: "dark"}) }
}

func TestAnObserverMayAskTheRegistryWhateverTellsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reg := registry.New()
		reg.MustAdd(&beacon{"a"})
		began := time.Now()
		var told []string
		stop := reg.Observe(func(_ context.Context, e registry.Event) {
			_, there := reg.Get(e.Kind, e.Name)
			told = append(told, fmt.Sprint(e.Name, " ", e.What, " ", there, " ", len(slices.Collect(reg.All()))))
		})
		reg.MustAdd(&beacon{"b"})
		stop()
		require.Equal(t, []string{"a lit true 1", "b lit true 2"}, told[:2])
		require.Zero(t, time.Since(began))
	})
}
