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
