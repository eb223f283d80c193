package lease_test

import (
	"context"
	"database/sql"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/lease"
)

// A clocked store is one whose clock a test sets, for all leases: what is left of them, and how far
// their epochs are from it, changes.
type clocked struct {
	lease.Store
	db     *sql.DB // nil: Redis
	expire func(t *testing.T, forward time.Duration)
	epochs func(t *testing.T, ahead time.Duration) // of leases that nobody holds
}

// onEachClock runs test on a store of each kind.
func onEachClock(t *testing.T, test func(t *testing.T, store clocked)) {
	onEach(t, func(t *testing.T, d database) {
		t.Parallel()
		db := d.open(t)
		update := func(t *testing.T, table, column string, by time.Duration) {
			_, err := db.Exec(fmt.Sprintf("UPDATE %s SET %s = %[2]s + (%d)", table, column, by.Microseconds()))
			require.NoError(t, err)
		}
		test(t, clocked{d.newStore(t), db,
			func(t *testing.T, forward time.Duration) { update(t, "lease", "expires", -forward) },
			func(t *testing.T, ahead time.Duration) {
				update(t, "lease", "epoch", ahead)
				if d.Driver == "mysql" {
					update(t, "lease_fence", "epoch", ahead)
				}
			},
		})
	})
	t.Run("redis", func(t *testing.T) {
		t.Parallel()
		client := redisClient(t, services.NewRedis(t).Addr)
		add := func(t *testing.T, field string, by time.Duration) {
			require.NoError(t, client.HIncrBy(t.Context(), "lease:a", field, by.Microseconds()).Err())
		}
		test(t, clocked{redisStore(client, ""), nil,
			func(t *testing.T, forward time.Duration) { add(t, "till", -forward) },
			func(t *testing.T, ahead time.Duration) { add(t, "epoch", ahead) },
		})
	})
}

// TestClockOfTheStoreIsSetForward ends a lease early, while its leader still leads.
func TestClockOfTheStoreIsSetForward(t *testing.T) {
	onEachClock(t, func(t *testing.T, store clocked) {
		cfg := lease.Config{Name: "a", TTL: 3 * time.Second}
		one, err := lease.New(store.Store, cfg).Campaign(t.Context())
		require.NoError(t, err)
		store.expire(t, 2*time.Hour)
		two, err := lease.New(store.Store, cfg).TryCampaign(t.Context())
		require.NoError(t, err)
		require.Greater(t, two.Epoch(), one.Epoch())

		if store.db != nil { // the fence holds, though the first leader knows nothing yet
			tx, err := store.db.BeginTx(t.Context(), nil)
			require.NoError(t, err)
			require.ErrorIs(t, store.Store.(lease.Fencer).Fence(t.Context(), tx, "a", one.Epoch()), lease.ErrLost)
			require.NoError(t, tx.Rollback())
		}
		<-one.Context().Done()
		require.ErrorIs(t, context.Cause(one.Context()), lease.ErrLost)
		require.NoError(t, one.Resign(t.Context()))
		require.NoError(t, two.Err())
		require.NoError(t, two.Resign(t.Context()))
	})
}

// TestClockOfTheStoreIsSetBack makes a lease last for hours, until its next renewal, and epochs be
// ahead of the time.
func TestClockOfTheStoreIsSetBack(t *testing.T) {
	onEachClock(t, func(t *testing.T, store clocked) {
		c := lease.New(store.Store, lease.Config{Name: "a", TTL: 15 * time.Second})
		term, err := c.Campaign(t.Context())
		require.NoError(t, err)
		store.expire(t, -2*time.Hour)
		require.Eventually(t, func() bool {
			rec, err := store.Load(t.Context(), "a")
			return err == nil && rec.Left <= 15*time.Second
		}, time.Minute, 50*time.Millisecond)
		require.NoError(t, term.Err())
		require.NoError(t, term.Resign(t.Context()))

		store.epochs(t, 2*time.Hour)
		last, err := c.Status(t.Context())
		require.NoError(t, err)
		term, err = c.Campaign(t.Context())
		require.NoError(t, err)
		require.Greater(t, term.Epoch(), last.Epoch)
		require.NoError(t, term.Resign(t.Context()))
	})
}
