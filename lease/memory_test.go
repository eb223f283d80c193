package lease_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/storetest"
)

func TestMemory(t *testing.T) {
	storetest.Run(t, func(*testing.T) lease.Store { return lease.NewMemory() })
}

// The clock may be set back after a lease was given up.
func TestRecordWithoutATokenIsNotHeld(t *testing.T) {
	now := time.Now()
	require.False(t, lease.Record{Now: now, Until: now.Add(ttl)}.Held())
	require.True(t, lease.Record{Token: "x", Now: now, Until: now.Add(ttl)}.Held())
}
