package saga_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// TestClockGoesBackAndOwnerDies moves all times of the tables ahead by an hour, which is the same
// as to set the clock of
// the database back.
func TestClockGoesBackAndOwnerDies(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		ctx, st, other := t.Context(), d.store(t), d.store(t)
		start := func(id, owner string, lease time.Duration) {
			_, _, err := st.Start(ctx, store.StartRequest{
				ID: id, Saga: "trip", Status: saga.Running, Owner: owner, LeaseTTL: lease, Log: make([]store.Entry, 1),
			})
			require.NoError(t, err)
		}
		start("started by dead", "dead", time.Second)
		start("claimed by dead", "", 0)
		start("renewed by dead", "dead", time.Hour)
		claim := func(st store.Store, owner string, lease time.Duration) (ids []string) {
			recs, err := st.Claim(ctx, store.ClaimRequest{
				Owner: owner, LeaseTTL: lease, Limit: 10, Definitions: []store.Definition{{Saga: "trip"}},
			})
			require.NoError(t, err)
			for _, rec := range recs {
				ids = append(ids, rec.ID)
			}
			return ids
		}
		require.Equal(t, []string{"claimed by dead"}, claim(st, "dead", time.Second))
		held := []store.Held{{ID: "renewed by dead", Epoch: 1}}
		_, err := st.Heartbeat(ctx, store.HeartbeatRequest{Owner: "dead", LeaseTTL: time.Second, Held: held})
		require.NoError(t, err)
		start("long", "alive", 30*time.Minute)
		_, err = d.open(t).Exec(`UPDATE saga SET wake_at = wake_at + 3600000000`)
		require.NoError(t, err)

		var taken []string
		for begun := time.Now(); len(taken) < 3; time.Sleep(10 * time.Millisecond) {
			taken = append(taken, claim(other, "other", 5*time.Second)...)
			require.Less(t, time.Since(begun), 10*time.Minute)
		}
		require.ElementsMatch(t, []string{"started by dead", "claimed by dead", "renewed by dead"}, taken)
		rec, err := st.Load(ctx, "long")
		require.NoError(t, err)
		require.Equal(t, "alive", rec.Owner, "a lease may be longer than those of the runner that claims")
		require.Greater(t, rec.WakeAt.Sub(rec.Now), 10*time.Minute)
	})
}
