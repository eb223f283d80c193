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
			require.Equal(t, []any{d.Unit, d.Help, d.Kind, d.Additive}, []any{f.Unit, f.Help, f.Kind, f.Additive}, f.Name)
			had[f.Name] = true
		}
	}
	for name := range described {
		if !strings.HasPrefix(name, "saga.stored") && !strings.HasPrefix(name, "saga.due") { // after the first look
			require.Contains(t, had, name, "no policy has it")
		}
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
	require.Contains(t, lines, "breaker.call.count{outcome=failure} 1")

	require.NoError(t, h.tenants.Do(context.Background(), "a", func(context.Context) error { return nil }))
	e, _ = h.reg.Get("throttle", "tenants")
	require.Empty(t, slices.Collect(e.Members(1)[0].Figures()), "a key of a throttle.Group is no policy")
}
