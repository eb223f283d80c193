package settings_test

import (
	"cmp"
	"errors"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/settings"
)

type config struct {
	Name    string
	Slow    int // zero means 100
	Patient int // zero means 9/10 of Slow
	Levels  int // fixed; zero means 1
	Shares  []float64
	Plans   []plan
	Deep    *plan
	Lock    *lock
	Store   any // fixed
	Hook    func() int
}

type plan struct {
	Shares []float64
	Err    error
}

type lock struct{ held bool }

func (c config) Validate() error {
	if c.Slow < 0 || c.Levels < 0 {
		return errors.New("negative")
	}
	return nil
}

func (c config) withDefaults() config {
	c.Slow = cmp.Or(c.Slow, 100)
	c.Patient = cmp.Or(c.Patient, c.Slow*9/10)
	c.Levels = cmp.Or(len(make([]int, c.Levels)), 1) // a config that is not valid panics
	if c.Deep != nil {
		c.Deep.Shares = append(c.Deep.Shares, 1)
	}
	return c
}

func newSetting(c config) *settings.Setting[config] {
	s := &settings.Setting[config]{}
	s.Adopt(settings.New(c, config.withDefaults, "Levels", "Store"), nil)
	return s
}

func update(t *testing.T, s *settings.Setting[config], change func(*config)) config {
	t.Helper()
	preview, err := s.Preview(change)
	require.NoError(t, err)
	require.NoError(t, s.Update(change, nil, nil))
	is := s.Config()
	preview.Hook, is.Hook = nil, nil
	require.Equal(t, preview, is)
	return s.Config()
}

func TestDefaultFollowsTheFieldThatItDependsOn(t *testing.T) {
	s := newSetting(config{Name: "a"})
	is := update(t, s, func(c *config) {
		require.Equal(t, 90, c.Patient)
		c.Slow *= 2
	})
	require.Equal(t, config{Name: "a", Slow: 200, Patient: 180, Levels: 1}, is)
	require.Equal(t, config{Name: "a", Slow: 200}, s.Given())
	update(t, s, func(c *config) { c.Patient = 5 })
	is = update(t, s, func(c *config) { c.Slow = 0 })
	require.Equal(t, config{Name: "a", Slow: 100, Patient: 5, Levels: 1}, is)

	require.NoError(t, s.Set(func(given *config) { given.Patient = 90 }, nil, nil))
	require.Equal(t, 180, update(t, s, func(c *config) { c.Slow = 200; c.Patient = 180 }).Patient)
	require.Equal(t, 180, update(t, s, func(c *config) { c.Slow = 300 }).Patient, "it was set")
}

// No function is compared.
func TestFunctionsAreAsChangeLeavesThem(t *testing.T) {
	hook := func(n int) func() int { return func() int { return n } }
	s := newSetting(config{Hook: hook(1)})
	require.Equal(t, 2, update(t, s, func(c *config) { c.Hook = hook(2) }).Hook()) // the same code
	require.Equal(t, 2, update(t, s, func(c *config) { c.Slow = 7 }).Hook())
	require.Nil(t, update(t, s, func(c *config) { c.Hook = nil }).Hook)
}

func TestAConfigIsNotShared(t *testing.T) {
	shared := &lock{held: true}
	mine := config{Shares: []float64{1}, Plans: []plan{{Shares: []float64{1}}}, Deep: &plan{Shares: []float64{5}}, Lock: shared}
	s := newSetting(mine)
	mine.Shares[0], mine.Plans[0].Shares[0], mine.Deep.Shares[0] = 9, 9, 9
	want := config{Slow: 100, Patient: 90, Levels: 1, Shares: []float64{1}, Plans: []plan{{Shares: []float64{1}}}, Deep: &plan{Shares: []float64{5, 1}}, Lock: shared}
	is := s.Config()
	require.Equal(t, want, is)
	require.Same(t, shared, is.Lock, "a policy is not a configuration")
	is.Shares[0], is.Deep.Shares[0] = 9, 9
	require.Equal(t, want, s.Config())
	require.Equal(t, []float64{5}, s.Given().Deep.Shares, "not the one that got its defaults")

	replaced := []float64{3}
	require.Panics(t, func() {
		_ = s.Update(func(c *config) { c.Shares[0], c.Deep.Shares[0] = 7, 7; panic("no") }, nil, nil)
	})
	require.Equal(t, want, s.Config(), "nor is the lock held")
	update(t, s, func(c *config) { c.Shares, c.Deep = replaced, &plan{} })
	replaced[0] = 9
	require.Equal(t, []float64{3}, s.Config().Shares)
	require.Equal(t, []float64{3}, s.Given().Shares)
	require.Equal(t, &plan{Shares: []float64{1}}, s.Config().Deep)
	require.Equal(t, &plan{}, s.Given().Deep)

	deep := &plan{Shares: make([]float64, 1, 2)}
	s = newSetting(config{Deep: deep})
	update(t, s, func(c *config) { c.Deep.Err = errors.New("down") })
	require.Equal(t, []float64{0}, s.Given().Deep.Shares, "what change leaves alone stays as it was given")
}

func TestChangeInPlaceIsAChange(t *testing.T) {
	text := errors.New("down")
	s := newSetting(config{Shares: []float64{1, 2}, Plans: []plan{{Err: text}}})
	is := update(t, s, func(c *config) { c.Shares[0] = 5 })
	require.Equal(t, []float64{5, 2}, is.Shares)
	other := errors.New("down")
	require.Same(t, other, update(t, s, func(c *config) { c.Plans[0].Err = other }).Plans[0].Err, "with the same text")
}

// An incomparable is a store that cannot be compared.
type incomparable struct{ do func() }

func TestFixedFieldsCannotChange(t *testing.T) {
	s := newSetting(config{Name: "a", Levels: 3, Store: &lock{}})
	for want, change := range map[string]func(*config){
		`settings_test.config.Name is "b": must be "a" as before: it cannot change`:           func(c *config) { c.Name = "b" },
		`settings_test.config.Name is "": must be "a" as before: it cannot change`:            func(c *config) { c.Name = "" },
		`settings_test.config.Levels is 1: must be 3 as before: it cannot change`:             func(c *config) { c.Levels = 0 },
		`settings_test.config.Store is another: must be the same as before: it cannot change`: func(c *config) { c.Store = &lock{} },
		"settings_test.config.Levels is 2: must be 3 as before: it cannot change\nnegative":   func(c *config) { c.Levels, c.Slow = 2, -1 },
		"settings_test.config.Levels is -1: must be 3 as before: it cannot change\nnegative":  func(c *config) { c.Levels = -1 },
		"negative": func(c *config) { c.Slow = -1 },
	} {
		require.EqualError(t, s.Update(change, nil, nil), want)
		_, err := s.Preview(change)
		require.EqualError(t, err, want)
		require.Equal(t, 100, s.Config().Slow)
	}

	s = newSetting(config{})
	require.EqualError(t, s.Update(func(c *config) { c.Slow = -1 }, nil, nil), "negative")
	s = newSetting(config{Levels: 1})
	update(t, s, func(c *config) { c.Levels = 0 }) // the same in another form
	require.Equal(t, 1, s.Config().Levels)

	first := incomparable{func() {}}
	s = newSetting(config{Store: first})
	calls := 0
	require.NoError(t, s.Update(func(c *config) { c.Store = incomparable{func() { calls++ }} }, nil, nil))
	s.Config().Store.(incomparable).do()
	require.Zero(t, calls, "it may be another, so it stays as it was")
	require.Error(t, s.Update(func(c *config) { c.Store = nil }, nil, nil))
}

type group struct {
	Config config
	Max    int
}

func (g group) Validate() error { return g.Config.Validate() }

func TestAFixedFieldOfAPart(t *testing.T) {
	s := &settings.Setting[group]{}
	s.Adopt(settings.New(group{Config: config{Name: "a"}}, func(g group) group {
		g.Config = g.Config.withDefaults()
		return g
	}, "Max"), nil)
	require.EqualError(t, s.Update(func(g *group) { g.Config.Name, g.Max = "b", 7 }, nil, nil),
		"settings_test.group.Max is 7: must be 0 as before: it cannot change\n"+
			`settings_test.config.Name is "b": must be "a" as before: it cannot change`)
	require.NoError(t, s.Update(func(g *group) { g.Config.Slow = 200 }, nil, nil))
	require.Equal(t, 180, s.Config().Config.Patient)
	require.Zero(t, s.Given().Config.Patient)
}

func TestUpdateIsAdmittedBeforeItIsFollowed(t *testing.T) {
	s := newSetting(config{})
	refused := errors.New("refused")
	change := func(c *config) { c.Slow = 7 }
	require.Same(t, refused, s.Update(change, func(next *config) error {
		require.Equal(t, 7, next.Slow)
		return refused
	}, func(*config) { t.Error("followed") }))
	require.Equal(t, 100, s.Config().Slow)

	followed := 0
	require.NoError(t, s.Update(change, func(*config) error { require.Equal(t, 100, s.Load().Slow); return nil },
		func(next *config) {
			followed++
			require.Same(t, s.Load(), next)
		}))
	require.Equal(t, 1, followed)
	v := settings.New(config{Slow: 9}, config.withDefaults)
	s.Adopt(v, func(next *config) { require.Same(t, v.Filled(), next) })
	require.Same(t, v.Filled(), s.Load())
	require.PanicsWithError(t, "negative", func() { settings.New(config{Slow: -1}, config.withDefaults) })
}

func TestUpdatesTakeTurns(t *testing.T) {
	s := newSetting(config{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 100 {
				require.NoError(t, s.Update(func(c *config) {
					c.Slow++
					runtime.Gosched()
				}, nil, nil))
				require.GreaterOrEqual(t, s.Load().Slow, 101)
			}
		})
	}
	wg.Wait()
	require.Equal(t, 500, s.Config().Slow)
}
