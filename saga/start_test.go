package saga_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

// TestTenantIsStored checks the tenant in the request that starts a saga.
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
