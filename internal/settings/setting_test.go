package settings_test

import (
	"cmp"
	"errors"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/settings"
)

type config struct {
	Name    string
	Slow    int // zero means 100
	Patient int // zero means 9/10 of Slow
	Shares  []float64
	Lock    *lock
	Hook    func() int
}

type lock struct{ held bool }

var errNegative = errors.New("negative")

func (c config) Validate() error {
	if c.Slow < 0 {
		return errNegative
	}
	return nil
}

func (c config) filled() config {
	c.Slow = cmp.Or(c.Slow, 100)
	c.Patient = cmp.Or(c.Patient, c.Slow*9/10)
	for i := range c.Shares {
		c.Shares[i] += 0.5
	}
	return c
}

func (c *config) own() { c.Shares = slices.Clone(c.Shares) }

func newSetting(c config) *settings.Setting[config] {
	s := &settings.Setting[config]{}
	s.Init(c, config.filled, (*config).own)
	return s
}

// given returns the config as Update gets it.
func given(t *testing.T, s *settings.Setting[config]) (was config) {
	t.Helper()
	require.NoError(t, s.Update(func(c *config) { was = *c }, nil, nil))
	return was
}

func update(t *testing.T, s *settings.Setting[config], change func(*config)) config {
	t.Helper()
	require.NoError(t, s.Update(change, nil, nil))
	return s.Config()
}

func TestUpdateGetsTheConfigAsItWasGiven(t *testing.T) {
	s := newSetting(config{Name: "a"})
	require.Equal(t, config{Name: "a", Slow: 100, Patient: 90}, s.Config())
	is := update(t, s, func(c *config) {
		require.Equal(t, config{Name: "a"}, *c)
		c.Slow = 200
	})
	require.Equal(t, config{Name: "a", Slow: 200, Patient: 180}, is, "what was not given follows")
	require.Equal(t, config{Name: "a", Slow: 200}, given(t, s))

	update(t, s, func(c *config) { c.Patient = 180 }) // which is its default
	is = update(t, s, func(c *config) { c.Slow = 300 })
	require.Equal(t, 180, is.Patient, "what was given stays, also if it was the default")
	is = update(t, s, func(c *config) { c.Slow, c.Patient = 100, 0 })
	require.Equal(t, 90, is.Patient, "zero means the default again")
}

func TestUpdateThatFailsChangesNothing(t *testing.T) {
	s := newSetting(config{Slow: 7, Shares: []float64{1}})
	refused := errors.New("refused")
	follow := func(*config) { t.Error("followed") }
	require.Equal(t, errNegative, s.Update(func(c *config) { c.Shares[0], c.Slow = 2, -1 }, func(_, _ *config) error {
		t.Error("asked about what is not valid")
		return nil
	}, follow))
	require.Equal(t, refused, s.Update(func(c *config) { c.Shares[0], c.Slow = 2, 0 }, func(was, next *config) error {
		require.Equal(t, 7, was.Slow)
		require.Equal(t, 100, next.Slow, "with its defaults")
		return refused
	}, follow))
	require.PanicsWithValue(t, "no", func() {
		_ = s.Update(func(c *config) { c.Shares[0] = 2; panic("no") }, nil, follow)
	})
	require.Equal(t, config{Slow: 7, Patient: 6, Shares: []float64{1.5}}, s.Config())
	require.Equal(t, config{Slow: 7, Shares: []float64{1}}, given(t, s))
	require.PanicsWithValue(t, errNegative, func() { newSetting(config{Slow: -1}) })
}

func TestUpdateIsFollowedOnce(t *testing.T) {
	s := newSetting(config{})
	followed := 0
	require.NoError(t, s.Update(func(c *config) { c.Slow = 7 }, func(_, _ *config) error {
		require.Equal(t, 100, s.Load().Slow)
		return nil
	}, func(next *config) {
		followed++
		require.Same(t, s.Load(), next)
		require.Equal(t, 7, next.Slow)
	}))
	require.Equal(t, 1, followed)
}

func TestChangeIsAnUpdateByAPointerOfAnyType(t *testing.T) {
	s := newSetting(config{})
	followed := 0
	to := func(slow int, err error) func(any) error {
		return func(cfg any) error {
			cfg.(*config).Slow = slow
			return err
		}
	}
	refused := errors.New("refused")
	check := func(_, next *config) error {
		if next.Slow == 13 {
			return refused
		}
		return nil
	}
	follow := func(*config) { followed++ }
	for _, dry := range []bool{true, false} {
		require.Equal(t, errNegative, s.Change(dry, to(-1, nil), check, follow))
		require.Equal(t, refused, s.Change(dry, to(13, nil), check, follow))
		require.Equal(t, errNegative, s.Change(dry, to(7, errNegative), check, follow))
	}
	require.NoError(t, s.Change(true, to(7, nil), check, follow))
	require.Equal(t, 100, s.Config().Slow)
	require.Zero(t, followed)
	require.NoError(t, s.Change(false, to(7, nil), check, follow))
	require.Equal(t, 7, s.Config().Slow)
	require.Equal(t, 1, followed)
}

func TestConfigIsNotShared(t *testing.T) {
	shared := &lock{held: true}
	hook := func() int { return 7 }
	mine := config{Shares: []float64{1}, Lock: shared, Hook: hook}
	s := newSetting(mine)
	mine.Shares[0] = 9
	is := s.Config()
	require.Equal(t, 7, is.Hook())
	require.Same(t, shared, is.Lock, "a policy is no configuration")
	is.Shares[0] = 9
	require.Equal(t, []float64{1.5}, s.Config().Shares)
	require.Equal(t, []float64{1}, given(t, s).Shares, "not the slice that got its defaults")

	var kept *config
	update(t, s, func(c *config) { kept = c })
	kept.Shares[0] = 9
	require.Equal(t, []float64{1}, given(t, s).Shares)
	replaced := []float64{3}
	update(t, s, func(c *config) { c.Shares = replaced })
	replaced[0] = 9
	require.Equal(t, []float64{3.5}, s.Config().Shares)
	require.Equal(t, []float64{3}, given(t, s).Shares)
}

func TestUpdatesTakeTurns(t *testing.T) {
	s := newSetting(config{Slow: 1})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 100 {
				require.NoError(t, s.Update(func(c *config) {
					c.Slow++
					runtime.Gosched()
				}, nil, nil))
				require.GreaterOrEqual(t, s.Load().Slow, 2)
			}
		})
	}
	wg.Wait()
	require.Equal(t, 401, s.Config().Slow)
}

// The members of a Group are made alike.
func TestSettingsThatAreMadeAlikeShareTheirConfig(t *testing.T) {
	held := &lock{}
	given := config{Name: "a", Slow: 7, Lock: held}
	s := newSetting(given)
	require.Same(t, s.Load(), newSetting(given).Load())
	for name, other := range map[string]config{
		"another number":  {Name: "a", Slow: 8, Lock: held},
		"another name":    {Name: "b", Slow: 7, Lock: held},
		"another pointer": {Name: "a", Slow: 7, Lock: &lock{}},
		"with a function": {Name: "a", Slow: 7, Lock: held, Hook: func() int { return 1 }},
		"with a slice":    {Name: "a", Slow: 7, Lock: held, Shares: []float64{1}},
	} {
		newSetting(given)
		first := newSetting(other)
		require.NotSame(t, s.Load(), first.Load(), name)
		require.Equal(t, other.Slow, first.Config().Slow)
		if other.Hook != nil || other.Shares != nil {
			require.NotSame(t, first.Load(), newSetting(other).Load(), name)
		}
	}
	for range 20 { // what cannot be compared takes nobody's place
		newSetting(config{Shares: []float64{1}})
	}
	require.Same(t, s.Load(), newSetting(given).Load())
	same := newSetting(given)
	update(t, same, func(c *config) { c.Slow = 9 })
	require.Equal(t, 7, s.Config().Slow, "an Update is one's own")
	require.Equal(t, 7, newSetting(given).Config().Slow)
}
