package main

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestGatewayChargesTokensThatArrived checks only results that do not depend on the machine's speed.
func TestGatewayChargesTokensThatArrived(t *testing.T) {
	t.Parallel()
	phases, bills := run(t.Context(), 7, 500*time.Millisecond)
	require.Len(t, phases, 7)
	limited := int64(0)
	for _, p := range phases {
		seen := p.answered.Load() + p.cut.Load() + p.limited.Load() + p.failed.Load()
		require.Equal(t, p.requests.Load(), seen, p.name)
		require.Positive(t, p.answered.Load(), p.name)
		limited += p.limited.Load()
		switch p.fault {
		case truncating:
			require.Positive(t, p.cut.Load())
		case busy, failing, down:
			require.Positive(t, p.fallbacks.Load(), p.name)
		}
	}
	require.Positive(t, limited, "the flood")
	require.Len(t, bills, len(tenants))
	for _, b := range bills {
		require.Positive(t, b.arrived, b.tenant)
		require.Equal(t, b.arrived, b.charged, b.tenant)
		require.Less(t, b.charged, b.reserved, b.tenant)
	}
	var out strings.Builder
	report(&out, phases, bills)
	require.Contains(t, out.String(), "Each tenant pays exactly for the tokens that arrived.")
}
