package saga_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

// TestTenantIsStored when a saga starts.
func TestTenantIsStored(t *testing.T) {
	sg := sequence(step("flight"))
	sg.Tenant = func(s trip) string { return strings.Join(s.Calls, "") }
	st := saga.NewMemory()
	r := saga.NewRunner(st, saga.RunnerConfig{})
	sagas := saga.Register(r, sg)
	_, err := sagas.Start(t.Context(), "trip-1", trip{Calls: []string{"acme"}})
	require.NoError(t, err)
	rec, err := st.Load(t.Context(), "trip-1")
	require.NoError(t, err)
	require.Equal(t, "acme", rec.Tenant)
	for _, invalid := range []string{strings.Repeat("x", 101), "\x00"} {
		_, err = sagas.Start(t.Context(), "trip-2", trip{Calls: []string{invalid}})
		require.ErrorContains(t, err, "the tenant is ")
	}
}

// TestOperationWithStateIsNotAllowed until it has an effect.
func TestOperationWithStateIsNotAllowed(t *testing.T) {
	sg := sequence(step("flight"))
	r := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
	sagas := saga.Register(r, sg)
	_, err := sagas.Start(t.Context(), "trip-1", trip{})
	require.NoError(t, err)
	for _, op := range []saga.Operation{{State: []byte("{}")}, {Version: 2}} {
		op.Action = saga.ActionRetry
		require.ErrorIs(t, r.Operate(t.Context(), "trip-1", op), saga.ErrNotAllowed)
	}
}
