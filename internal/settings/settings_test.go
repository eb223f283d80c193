package settings_test

import (
	"cmp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/settings"
)

type config struct {
	Name    string
	Slow    int
	Patient int // zero means 9/10 of Slow
	Shares  []float64
	Hook    func() int
}

func (c config) withDefaults() config {
	c.Slow = cmp.Or(c.Slow, 100)
	c.Patient = cmp.Or(c.Patient, c.Slow*9/10)
	return c
}

func TestDefaultFollowsTheFieldThatItDependsOn(t *testing.T) {
	given := config{Name: "a"}
	given = settings.Change(given, given.withDefaults(), func(c *config) {
		require.Equal(t, 90, c.Patient)
		c.Slow *= 2
	})
	require.Equal(t, config{Name: "a", Slow: 200}, given)
	require.Equal(t, 180, given.withDefaults().Patient)

	given = settings.Change(given, given.withDefaults(), func(c *config) { c.Patient, c.Shares = 5, []float64{1} })
	given = settings.Change(given, given.withDefaults(), func(c *config) { c.Slow = 0 })
	require.Equal(t, config{Name: "a", Patient: 5, Shares: []float64{1}}, given)
}

func TestFunctionsAreAsChangeLeavesThem(t *testing.T) {
	hook := func(n int) func() int { return func() int { return n } }
	given := config{Hook: hook(1)}
	given = settings.Change(given, given, func(c *config) { c.Hook = hook(2) }) // the same code
	require.Equal(t, 2, given.Hook())
	given = settings.Change(given, given, func(c *config) { c.Hook = nil })
	require.Nil(t, given.Hook)
}

type group struct {
	Config config
	Deep   *deep
	Behind *config
	Lock   *lock
}

type deep struct{ Shares []float64 }

type lock struct{ held bool }

func TestChangeReachesIntoNestedStructs(t *testing.T) {
	shared := &lock{held: true}
	given := group{Config: config{Name: "a", Hook: func() int { return 1 }}, Deep: &deep{Shares: []float64{1}}, Lock: shared}
	filled := given
	filled.Config = filled.Config.withDefaults()
	changed := settings.Change(given, filled, func(c *group) {
		c.Config.Slow = 200
		c.Deep.Shares[0] = 2
		require.True(t, c.Lock.held)
		require.Same(t, shared, c.Lock, "a policy is not a configuration")
	})
	require.Equal(t, 200, changed.Config.Slow)
	require.Zero(t, changed.Config.Patient, "the default is computed anew")
	require.Equal(t, []float64{2}, changed.Deep.Shares)
	require.Equal(t, []float64{1}, given.Deep.Shares, "the configuration in use is not written to")
}

func TestChangeReachesBehindPointers(t *testing.T) {
	given := group{Behind: &config{Name: "a"}}
	fill := func(g group) group {
		filled := g.Behind.withDefaults()
		g.Behind = &filled
		return g
	}
	changed := settings.Change(given, fill(given), func(c *group) { c.Behind.Slow = 200 })
	require.Equal(t, &config{Name: "a", Slow: 200}, changed.Behind)
	require.Equal(t, &config{Name: "a"}, given.Behind, "the configuration in use is not written to")
	changed = settings.Change(changed, fill(changed), func(c *group) { c.Behind = &config{Patient: 7} })
	require.Equal(t, &config{Patient: 7}, changed.Behind)
	changed = settings.Change(changed, fill(changed), func(c *group) { c.Behind = nil })
	require.Nil(t, changed.Behind)
	changed = settings.Change(changed, changed, func(c *group) { c.Behind = &config{Slow: 1} })
	require.Equal(t, &config{Slow: 1}, changed.Behind)
}

func TestChangeInPlaceOfASliceIsAChange(t *testing.T) {
	given := config{Shares: []float64{1, 2}}
	changed := settings.Change(given, given, func(c *config) { c.Shares[0] = 5 })
	require.Equal(t, []float64{5, 2}, changed.Shares)
	require.Equal(t, []float64{1, 2}, given.Shares)
}

func TestTryTellsTheResultAndChangesNothing(t *testing.T) {
	given := config{Name: "a"}
	updated := false
	update := func(change func(*config)) {
		given = settings.Change(given, given.withDefaults(), change)
		updated = true
	}
	var c *config
	result := settings.Try(func(stop func()) {
		update(func(changing *config) { c = changing; stop() })
	}, func() { c.Slow = 200 })
	require.Equal(t, config{Name: "a", Slow: 200}, result)
	require.Equal(t, config{Name: "a"}, given)
	require.False(t, updated)

	require.PanicsWithValue(t, "other", func() {
		settings.Try(func(func()) { update(func(*config) { panic("other") }) }, func() {})
	})
	require.Nil(t, settings.Try(func(func()) {}, func() {}))
}
