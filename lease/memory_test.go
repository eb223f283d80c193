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

func TestRecordIsHeldWithTokenAndTime(t *testing.T) {
	require.False(t, lease.Record{Left: ttl}.Held())
	require.False(t, lease.Record{Token: "x"}.Held())
	require.True(t, lease.Record{Token: "x", Left: ttl}.Held())
}

// A program of one process may send epochs to a resource that outlives it.
func TestMemoryEpochsIncludeTime(t *testing.T) {
	before := time.Now().UnixMicro()
	rec, err := lease.NewMemory().Acquire(t.Context(), lease.Request{Name: "a", Token: "x", TTL: ttl})
	require.NoError(t, err)
	require.GreaterOrEqual(t, rec.Epoch, before)
}
