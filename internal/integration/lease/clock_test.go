package lease_test

import (
	"context"
	"database/sql"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/lease"
)

// setClock sets the clock of the database, for a lease: what is left of it changes.
func setClock(t *testing.T, db *sql.DB, forward time.Duration) {
	_, err := db.Exec(fmt.Sprintf("UPDATE lease SET expires = expires - (%d)", forward.Microseconds()))
	require.NoError(t, err)
}

// TestTheClockOfTheDatabaseIsSetForward ends a lease early, while its leader still leads.
func TestTheClockOfTheDatabaseIsSetForward(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		t.Parallel()
		db, store := d.open(t), d.newStore(t)
		cfg := lease.Config{Name: "a", TTL: 3 * time.Second}
		one, err := lease.New(store, cfg).Campaign(t.Context())
		require.NoError(t, err)
		setClock(t, db, 2*time.Hour)
		two, err := lease.New(store, cfg).TryCampaign(t.Context())
		require.NoError(t, err)
		require.Greater(t, two.Epoch(), one.Epoch())

		// The fence holds, though the first leader knows nothing yet.
		tx, err := db.BeginTx(t.Context(), nil)
		require.NoError(t, err)
		require.ErrorIs(t, store.Fence(t.Context(), tx, "a", one.Epoch()), lease.ErrLost)
		require.NoError(t, tx.Rollback())
		<-one.Context().Done()
		require.ErrorIs(t, context.Cause(one.Context()), lease.ErrLost)
		require.NoError(t, one.Resign(t.Context()))
		require.NoError(t, two.Err())
		require.NoError(t, two.Resign(t.Context()))
	})
}

// TestTheClockOfTheDatabaseIsSetBack makes a lease last for hours, until its next renewal.
func TestTheClockOfTheDatabaseIsSetBack(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		t.Parallel()
		db, store := d.open(t), d.newStore(t)
		term, err := lease.New(store, lease.Config{Name: "a", TTL: 15 * time.Second}).Campaign(t.Context())
		require.NoError(t, err)
		setClock(t, db, -2*time.Hour)
		require.Eventually(t, func() bool {
			rec, err := store.Load(t.Context(), "a")
			return err == nil && rec.Until.Sub(rec.Now) <= 15*time.Second
		}, time.Minute, 50*time.Millisecond)
		require.NoError(t, term.Err())
		require.NoError(t, term.Resign(t.Context()))
	})
}
