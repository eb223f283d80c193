package saga_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

func TestStateThatJSONDoesNotKeepIsRefused(t *testing.T) {
	type base struct{ ID string }
	type shadowed struct {
		base
		ID string
	}
	type twice struct {
		A string `json:"B"`
		B string
	}
	type left struct{ N int }
	type right struct{ N int }
	type ambiguous struct {
		left
		right
	}
	type nested struct{ List []map[string]twice }
	type anything struct{ Any any }
	r := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
	require.PanicsWithError(t, notKept("shadowed", ".ID"), func() { registerState[shadowed](r, "shadowed") })
	require.PanicsWithError(t, notKept("twice", ".B"), func() { registerState[twice](r, "twice") })
	require.PanicsWithError(t, notKept("ambiguous", ".N"), func() { registerState[ambiguous](r, "ambiguous") })
	require.PanicsWithError(t, notKept("nested", ".List.B"), func() { registerState[nested](r, "nested") })
	require.PanicsWithError(t, notKept("twice", ".B"), func() {
		saga.Register(undemanding{r}, &saga.Saga[twice]{Name: "twice", Steps: []saga.Step[twice]{
			{Name: "a", Do: noCall[twice], Undo: noCall[twice]},
		}})
	}, "on another engine")
	_, err := registerState[anything](r, "anything").Start(t.Context(), "1", anything{int64(1)<<53 + 1})
	require.ErrorContains(t, err, "the state does not come back as it was")
	_, err = r.Get(t.Context(), "1")
	require.ErrorIs(t, err, saga.ErrNotFound)
}

func notKept(saga, field string) string {
	return "saga: " + saga + ": s" + field + " is not kept by JSON and would be lost when a saga is taken over: " +
		`export it without the tag "-" and with a name of its own in JSON, or set Codec`
}

func registerState[S any](r *saga.Runner, name string) *saga.Handle[S] {
	return saga.Register(r, &saga.Saga[S]{Name: name, Steps: []saga.Step[S]{
		{Name: "a", Do: noCall[S], Undo: noCall[S]},
	}})
}

// An undemanding engine registers every definition.
type undemanding struct{ saga.Engine }

func (undemanding) Register(*saga.Definition) error { return nil }
