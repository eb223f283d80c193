package registry_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/registry"
)

func TestFiguresNamesWhatThePoliciesHave(t *testing.T) {
	described := map[string]registry.Figure{}
	for f := range registry.Figures() {
		require.NotContains(t, described, f.Name, "each name once")
		require.Zero(t, f.Value, f.Name)
		require.Equal(t, !strings.HasSuffix(f.Help, " Not to be added up."), f.Additive, f.Name)
		described[f.Name] = f
	}
	h := newHouse()
	defer h.close()
	had := map[string]bool{}
	for e := range h.reg.All() {
		if e.Kind == "faults" {
			continue
		}
		for f := range e.Figures() {
			d, ok := described[f.Name]
			require.True(t, ok, "%s of %s", f.Name, e)
			require.Equal(t, []any{d.Unit, d.Help, d.Counter, d.Additive}, []any{f.Unit, f.Help, f.Counter, f.Additive}, f.Name)
			had[f.Name] = true
		}
	}
	for name := range described {
		if !strings.HasPrefix(name, "saga.stored") && !strings.HasPrefix(name, "saga.due") { // after the first look
			require.Contains(t, had, name, "no policy has it")
		}
	}
}

// The names are by the semantic conventions of OpenTelemetry: things are counted in the
// plural, time is a time and a share is a ratio; "count" and "total" are for what does not
// only grow, and for Prometheus.
func TestFiguresAreNamedByTheConventions(t *testing.T) {
	names := map[string]bool{}
	for f := range registry.Figures() {
		names[f.Name] = true
		require.Regexp(t, `^[a-z]+(\.[a-z]+(_[a-z]+)*)+$`, f.Name)
		require.Regexp(t, `^(s|1|\{[a-z]+\})$`, f.Unit, f.Name)
		last := f.Name[strings.LastIndex(f.Name, ".")+1:]
		require.NotContains(t, []string{"count", "total"}, last, f.Name)
		switch {
		case f.Unit == "1":
			require.Equal(t, "ratio", last, f.Name)
		case f.Counter && f.Unit == "s":
			require.Equal(t, "time", last, f.Name)
		case f.Counter:
			require.True(t, strings.HasSuffix(last, "s"), f.Name)
		}
		for _, a := range f.Attrs {
			require.Regexp(t, `^[a-z]+(_[a-z]+)*$`, a.Key, f.Name)
			require.NotContains(t, []string{"name", "key"}, a.Key, f.Name)
		}
	}
	for name := range names {
		require.False(t, names[strings.TrimSuffix(name, "s")] && strings.HasSuffix(name, "s"), "%s beside its singular", name)
	}
}

func TestMemberTellsItsFigures(t *testing.T) {
	h := newHouse()
	defer h.close()
	require.ErrorIs(t, h.circuits.Do(context.Background(), "a", func(context.Context) error { return errDown }), errDown)
	e, ok := h.reg.Get("breaker", "shards")
	require.True(t, ok)
	members := e.Members(10)
	require.Len(t, members, 1)
	var lines []string
	for f := range members[0].Figures() {
		lines = append(lines, f.String())
	}
	require.Contains(t, lines, "breaker.calls{outcome=failure} 1")

	require.NoError(t, h.tenants.Do(context.Background(), "a", func(context.Context) error { return nil }))
	e, _ = h.reg.Get("throttle", "tenants")
	require.Empty(t, slices.Collect(e.Members(1)[0].Figures()), "a key of a throttle.Group is no policy")
}
