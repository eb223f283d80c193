package lease_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/storetest"
)

func TestMemory(t *testing.T) {
	storetest.Run(t, func(*testing.T) lease.Store { return lease.NewMemory() })
}

// A free lease waits for the first in line, and for the Grace of who asks at the most.
func TestMemoryGivesTheLeaseToAnyoneAfterGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := lease.NewMemory()
		ask := func(token string, once bool) lease.Record {
			rec, err := store.Acquire(t.Context(), lease.Request{Name: "a", Token: token, TTL: ttl, Grace: time.Minute, Once: once})
			require.NoError(t, err)
			return rec
		}
		ask("x", false)
		require.False(t, ask("once", true).Ahead, "nobody waits")
		ask("dead", false)
		require.NoError(t, store.Release(t.Context(), "a", "x"))
		time.Sleep(time.Minute - 1)
		require.True(t, ask("y", true).Ahead)
		time.Sleep(time.Nanosecond)
		require.Equal(t, "y", ask("y", true).Token)
		require.NoError(t, store.Release(t.Context(), "a", "y"))
		require.Equal(t, "z", ask("z", true).Token, "the dead have left the line")
	})
}

func TestMemoryNotifiesFromTheBeginningToTheEndOfListen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, heard := lease.NewMemory(), 0
		release := func() {
			_, err := store.Acquire(t.Context(), lease.Request{Name: "a", Token: "x", TTL: ttl})
			require.NoError(t, err)
			require.NoError(t, store.Release(t.Context(), "a", "x"))
		}
		ctx, cancel := context.WithCancel(t.Context())
		go func() { _ = store.(lease.Notifier).Listen(ctx, "a", func() { heard++ }) }()
		synctest.Wait()
		require.Equal(t, 1, heard, "it listens")
		release()
		require.Equal(t, 2, heard)
		cancel()
		synctest.Wait()
		release()
		require.Equal(t, 2, heard, "after the end of ctx")
	})
}

// The clock may be set back after a lease was given up.
func TestARecordWithoutATokenIsNotHeld(t *testing.T) {
	now := time.Now()
	require.False(t, lease.Record{Now: now, Until: now.Add(ttl)}.Held())
	require.True(t, lease.Record{Token: "x", Now: now, Until: now.Add(ttl)}.Held())
}
