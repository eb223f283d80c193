package saga_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/sqltx"
	"github.com/go-resilience/resilience/internal/sqltx/standby"
	"github.com/go-resilience/resilience/saga"
)

// kind is the result of the first query of Apply: a database other than MySQL, with a barrier of version 1.
func kind(string) [][]driver.Value { return [][]driver.Value{{int64(1), nil}} }

// TestApplyFindsThePrimary: all connections in a participant's pool lead to a server that was the primary before. fn
// may run twice, and takes effect once.
func TestApplyFindsThePrimary(t *testing.T) {
	for name, servers := range map[string]*standby.Servers{
		"a statement": {}, "COMMIT": {OnCommit: true},
		"BEGIN": {OnBegin: true, Refuse: &standby.Error{Code: "0A000", Routine: "call_enum_check_hook"}},
	} {
		servers.Answer = kind
		db := servers.Open(t, 3)
		servers.Swap()
		ctx := saga.WithCommand(t.Context(), saga.Command{ID: "1/book/book/do"})
		require.NoError(t, saga.Apply(ctx, db, func(tx *sql.Tx) error {
			_, err := tx.ExecContext(t.Context(), "UPDATE room")
			return err
		}), name)
		require.Equal(t, [2]int{0, 1}, servers.Conns(), name)
	}
}

// A failedOver database is a pool of connections to a former primary.
type failedOver struct {
	*txMemory
	pool *sql.DB
}

func (m *failedOver) Begin(ctx context.Context) (*sql.Tx, error) {
	tx, err := sqltx.Begin(ctx, m.pool, "PostgreSQL", nil)
	if err != nil {
		return nil, err
	}
	_ = tx.Rollback()
	return m.txMemory.Begin(ctx)
}

// TestDoTxFindsThePrimary, even if the former primary rejects BEGIN, as it does with lib/pq. That is no attempt, and
// the next one finds the primary.
func TestDoTxFindsThePrimary(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		servers := &standby.Servers{OnBegin: true, Answer: func(string) [][]driver.Value { return nil }}
		store := &failedOver{newTxMemory(t), servers.Open(t, 3)}
		servers.Swap()
		sg := sequence(inTx("flight"))
		r, _ := observed[trip](t, store, saga.RunnerConfig{}, silent, sg)
		mustStart(t, r, sg)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, err := result[trip](ctx, r, "trip-1")
		require.NoError(t, err)
		require.Equal(t, 1, total(r, "outcome=refused"), "the first does not look")
	})
}

// TestApplyChecksBarrierVersion: a newer table states which programs can use it.
func TestApplyChecksBarrierVersion(t *testing.T) {
	for row, ok := range map[string]bool{"1 1": true, "2 1": true, "9 1": true, "2 2": false, "9 8": false,
		"none": false} {
		servers := &standby.Servers{Answer: func(string) [][]driver.Value { return [][]driver.Value{{int64(1), row}} }}
		ctx := saga.WithCommand(t.Context(), saga.Command{ID: "1/book/book/do"})
		calls := 0
		err := saga.Apply(ctx, servers.Open(t, 1), func(*sql.Tx) error { calls++; return nil })
		require.Equal(t, ok, err == nil, "%s: %v", row, err)
		require.Equal(t, ok, calls == 1)
	}
}
