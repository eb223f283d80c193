package settings_test

import (
	"cmp"
	"errors"
	"maps"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

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

// given returns the config as Change shows it.
func given(t *testing.T, s *settings.Setting[config]) (was config) {
	t.Helper()
	require.NoError(t, s.Change(true, func(c any) error { was = *c.(*config); return nil }, nil, nil))
	return was
}

// shown returns the config as Update shows it.
func shown(t *testing.T, s *settings.Setting[config]) (is config) {
	t.Helper()
	require.NoError(t, s.Update(func(c *config) { is = *c }, nil, nil))
	return is
}

func update(t *testing.T, s *settings.Setting[config], change func(*config)) config {
	t.Helper()
	require.NoError(t, s.Update(change, nil, nil))
	return s.Config()
}

func TestUpdateShowsEffectiveValues(t *testing.T) {
	s := newSetting(config{Name: "a"})
	require.Equal(t, config{Name: "a", Slow: 100, Patient: 90}, s.Config())
	require.Equal(t, s.Config(), shown(t, s))
	require.Equal(t, config{Name: "a"}, given(t, s), "showing it changes nothing")

	is := update(t, s, func(c *config) { c.Slow += 100 })
	require.Equal(t, config{Name: "a", Slow: 200, Patient: 180}, is, "a field left as shown follows its default")
	require.Equal(t, config{Name: "a", Slow: 200}, given(t, s))

	update(t, s, func(c *config) { c.Patient = 180 }) // the value that is shown
	require.Equal(t, 270, update(t, s, func(c *config) { c.Slow = 300 }).Patient, "it is not pinned by that")
	update(t, s, func(c *config) { c.Patient++ })
	require.Equal(t, 271, update(t, s, func(c *config) { c.Slow = 500 }).Patient, "a changed field is kept")
	require.Equal(t, 90, update(t, s, func(c *config) { c.Slow, c.Patient = 100, 0 }).Patient, "zero restores the default")
}

// A mixed config has fields of each kind that is shown, compared or merged in a way of its own.
type mixed struct {
	Nested nested
	Hook   func() int // nil means one that returns 7
	Shares []float64
	By     map[string]int
	Since  time.Time // a struct whose fields cannot be set one by one
	Err    error
}

type nested struct {
	A, B int // zero means 1 and 2
	Hook func() int
}

func (mixed) Validate() error { return nil }

func (c mixed) filled() mixed {
	c.Nested.A, c.Nested.B = cmp.Or(c.Nested.A, 1), cmp.Or(c.Nested.B, 2)
	if c.Hook == nil {
		c.Hook = func() int { return 7 }
	}
	if c.Nested.Hook == nil {
		c.Nested.Hook = c.Hook
	}
	if c.Since.IsZero() {
		c.Since = time.Unix(0, 0)
	}
	for i := range c.Shares {
		c.Shares[i] += 0.5
	}
	return c
}

func (c *mixed) own() { c.Shares, c.By = slices.Clone(c.Shares), maps.Clone(c.By) }

func newMixed(c mixed) *settings.Setting[mixed] {
	s := &settings.Setting[mixed]{}
	s.Init(c, mixed.filled, (*mixed).own)
	return s
}

func TestUpdateMergesFieldByField(t *testing.T) {
	first, second := errors.Join(errors.New("down")), errors.Join(errors.New("down"))
	s := newMixed(mixed{Err: first, Nested: nested{A: 5}, Shares: []float64{1}, By: map[string]int{"a": 1}})
	updated := func(change func(*mixed)) (given, is mixed) {
		t.Helper()
		require.NoError(t, s.Update(change, nil, nil))
		require.NoError(t, s.Change(true, func(c any) error { given = *c.(*mixed); return nil }, nil, nil))
		return given, s.Config()
	}
	given, _ := updated(func(*mixed) {})
	require.Equal(t, mixed{Err: first, Nested: nested{A: 5}, Shares: []float64{1}, By: map[string]int{"a": 1}}, given)

	given, is := updated(func(c *mixed) { c.Nested.A++ })
	require.Equal(t, nested{A: 6}, given.Nested, "B was not given")
	require.Equal(t, 2, is.Nested.B)
	given, _ = updated(func(c *mixed) { c.Shares[0]++ })
	require.Equal(t, []float64{2.5}, given.Shares)
	given, _ = updated(func(c *mixed) { c.Shares = append(c.Shares, 1) })
	require.Equal(t, []float64{3, 1}, given.Shares)
	_, is = updated(func(c *mixed) { c.By["a"] = 2 })
	require.Equal(t, map[string]int{"a": 2}, is.By)
	_, is = updated(func(c *mixed) { c.By = map[string]int{"b": 2} })
	require.Equal(t, map[string]int{"b": 2}, is.By)
	_, is = updated(func(c *mixed) { c.Since = c.Since.Add(time.Hour) })
	require.Equal(t, time.Unix(3600, 0), is.Since)

	require.Same(t, first, is.Err)
	_, is = updated(func(c *mixed) { c.Err = second })
	require.Same(t, second, is.Err, "an error with the same text is another one")
}

func TestUpdateShowsFunctionsAsGiven(t *testing.T) {
	s := newMixed(mixed{})
	require.NoError(t, s.Update(func(c *mixed) {
		require.Nil(t, c.Hook)
		require.Nil(t, c.Nested.Hook)
		c.Hook = func() int { return 9 }
	}, nil, nil))
	require.Equal(t, 9, s.Config().Nested.Hook(), "it still follows its default")
	require.NoError(t, s.Update(func(c *mixed) {
		require.Equal(t, 9, c.Hook())
		require.Nil(t, c.Nested.Hook)
		c.Hook = nil
	}, nil, nil))
	require.Equal(t, 7, s.Config().Hook(), "nil restores the default")
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

func TestChangeUpdatesThroughAnyPointer(t *testing.T) {
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
