package saga_test

import (
	"database/sql"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/sqltx/standby"
	"github.com/go-resilience/resilience/saga"
)

// TestApplyFindsThePrimary: a participant's pool is full of connections to a server that was the
// primary once. fn may run twice, and is applied once.
func TestApplyFindsThePrimary(t *testing.T) {
	for name, servers := range map[string]*standby.Servers{
		"a statement": {}, "COMMIT": {OnCommit: true},
		"BEGIN": {OnBegin: true, Refuse: &standby.Error{Code: "0A000", Routine: "call_enum_check_hook"}},
	} {
		db := servers.Open(t, 3)
		servers.Swap()
		ctx := saga.WithCommand(t.Context(), saga.Command{ID: "1/book/book/do"})
		require.NoError(t, saga.Apply(ctx, db, func(tx *sql.Tx) error {
			_, err := tx.ExecContext(t.Context(), "UPDATE room")
			return err
		}), name)
		require.Equal(t, [2]int{0, 1}, servers.Conns(), name)
	}
	servers := &standby.Servers{}
	db := servers.Open(t, 3)
	servers.Swap()
	_, err := saga.PruneBarrier(t.Context(), db, time.Hour)
	require.NoError(t, err)
	require.Equal(t, [2]int{0, 1}, servers.Conns())
}
