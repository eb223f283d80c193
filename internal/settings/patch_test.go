package settings_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/settings"
)

type patched struct {
	Limit  int
	Nested struct{ A, B int }
	Tags   []string
	Shares map[string][]int
	Func   func() int
	Any    any
	hidden int
}

// updater returns an Update of cfg as a policy's description has it. It refuses a Limit above 10.
func updater(cfg *patched) func(bool, func(any) error) error {
	return func(_ bool, change func(any) error) error {
		next := settings.Copy(cfg).(*patched)
		if err := change(next); err != nil {
			return err
		}
		if next.Limit > 10 {
			return errors.New("too many")
		}
		*cfg = *next
		return nil
	}
}

func change(f func(*patched)) func(any) error {
	return func(cfg any) error { f(cfg.(*patched)); return nil }
}

// record returns p with the fields that f alters in cfg, which it changes.
func record(t *testing.T, p *settings.Patch, cfg *patched, f func(*patched)) *settings.Patch {
	t.Helper()
	var d settings.Diff
	require.NoError(t, d.Record(cfg, change(f)))
	return p.With(&d, cfg)
}

func TestPatchHasOnlyAlteredFields(t *testing.T) {
	one, two := func() int { return 1 }, func() int { return 2 }
	funcs := func(n int) func() int { return func() int { return n } }
	for name, c := range map[string]struct{ change, want func(*patched) }{
		"nothing": {func(*patched) {}, func(*patched) {}},
		"a field to the same value": {
			func(c *patched) { c.Limit, c.Func, c.Any = 1, one, 1 }, func(*patched) {},
		},
		"to zero":        {func(c *patched) { c.Limit = 0 }, func(c *patched) { c.Limit = 0 }},
		"in a struct":    {func(c *patched) { c.Nested.B++ }, func(c *patched) { c.Nested.B = 3 }},
		"in a slice":     {func(c *patched) { c.Tags[1] = "x" }, func(c *patched) { c.Tags = []string{"a", "x"} }},
		"a slice to nil": {func(c *patched) { c.Tags = nil }, func(c *patched) { c.Tags = nil }},
		"an equal slice": {func(c *patched) { c.Tags = []string{"a", "b"} }, func(*patched) {}},
		"in a map": {
			func(c *patched) { c.Shares["a"][0] = 9 },
			func(c *patched) { c.Shares = map[string][]int{"a": {9}} },
		},
		"a key of a map":   {func(c *patched) { delete(c.Shares, "a") }, func(c *patched) { c.Shares = map[string][]int{} }},
		"a function":       {func(c *patched) { c.Func = two }, func(c *patched) { c.Func = two }},
		"an equal closure": {func(c *patched) { c.Func = funcs(4) }, func(c *patched) { c.Func = funcs(4) }},
		"function to nil":  {func(c *patched) { c.Func = nil }, func(c *patched) { c.Func = nil }},
		"an interface":     {func(c *patched) { c.Any = two }, func(c *patched) { c.Any = two }},
		"no comparable":    {func(c *patched) { c.Any = []int{1} }, func(c *patched) { c.Any = []int{1} }},
		"an unexported":    {func(c *patched) { c.hidden = 1 }, func(*patched) {}},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := &patched{Limit: 1, Tags: []string{"a", "b"}, Shares: map[string][]int{"a": {1}}, Func: one, Any: 1}
			cfg.Nested.A, cfg.Nested.B = 1, 2
			p := record(t, nil, cfg, c.change)
			later := func() *patched {
				l := &patched{Limit: 7, Tags: []string{"own"}, Shares: map[string][]int{"own": nil}, Func: funcs(3), Any: "own"}
				l.Nested.A, l.Nested.B = 8, 9
				return l
			}
			got, want := later(), later()
			p.ApplyBy(updater(got))
			c.want(want)
			require.Equal(t, want.Func == nil, got.Func == nil)
			if got.Func != nil {
				require.Equal(t, want.Func(), got.Func())
			}
			if f, ok := want.Any.(func() int); ok {
				require.Equal(t, f(), got.Any.(func() int)())
				want.Any, got.Any = nil, nil
			}
			want.Func, got.Func = nil, nil
			require.Equal(t, want, got)
		})
	}
}

func TestPatchSkipsUnchangedFunctions(t *testing.T) {
	cfg := &patched{Any: []int{1}, Func: func() int { return 1 }}
	require.Nil(t, record(t, nil, cfg, func(*patched) {}))
}

func TestPatchMergesChanges(t *testing.T) {
	cfg := &patched{}
	var p *settings.Patch
	for i := range 1000 {
		p = record(t, p, cfg, func(c *patched) { c.Limit, c.Nested.A, c.Tags = i%5, i, append(c.Tags[:0:0], "x") })
	}
	later, updates := &patched{Nested: struct{ A, B int }{1, 2}}, 0
	p.ApplyBy(func(dryRun bool, change func(any) error) error {
		updates++
		return updater(later)(dryRun, change)
	})
	require.Equal(t, 1, updates)
	require.Equal(t, &patched{Limit: 4, Nested: struct{ A, B int }{999, 2}, Tags: []string{"x"}}, later)
	later.Tags[0] = "y"
	other := &patched{}
	p.ApplyBy(updater(other))
	require.Equal(t, "x", other.Tags[0], "a slice is not shared")
}

func TestPatchAppliesWhatIsAllowed(t *testing.T) {
	p := record(t, nil, &patched{}, func(c *patched) { c.Limit, c.Nested.B = 11, 5 })
	later := &patched{Limit: 3}
	p.ApplyBy(updater(later))
	require.Equal(t, &patched{Limit: 3, Nested: struct{ A, B int }{0, 5}}, later)
}

func TestPatchOfAnotherType(t *testing.T) {
	p := record(t, nil, &patched{}, func(c *patched) { c.Limit = 5 })
	type other struct{ Limit int }
	cfg := &other{1}
	p.ApplyBy(func(_ bool, change func(any) error) error { return change(cfg) })
	require.Equal(t, 1, cfg.Limit)

	var d settings.Diff
	require.NoError(t, d.Record("no pointer", func(any) error { return nil }))
	require.Nil(t, settings.Copy("no pointer"))
	require.Same(t, p, p.With(&d, "no pointer"))
}
