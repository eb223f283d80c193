package sqlstore_test

import (
	"context"
	"database/sql/driver"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/sqltx"
	"github.com/go-resilience/resilience/internal/sqltx/standby"
	store "github.com/go-resilience/resilience/saga/sagastore"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

// TestFailoverLeavesNoConnectionToAReader: each write of the store finds the primary by itself, as
// one statement and as a transaction.
func TestFailoverLeavesNoConnectionToAReader(t *testing.T) {
	for name, write := range map[string]func(context.Context, *sqlstore.Store) error{
		"Start": func(ctx context.Context, s *sqlstore.Store) error {
			_, created, err := s.Start(ctx, store.StartRequest{ID: "a", Saga: "order", Status: store.Running})
			require.True(t, created)
			return err
		},
		"Post": func(ctx context.Context, s *sqlstore.Store) error {
			_, err := s.Post(ctx, store.PostRequest{ID: "a"})
			return err
		},
		"Heartbeat": func(ctx context.Context, s *sqlstore.Store) error {
			_, err := s.Heartbeat(ctx, store.HeartbeatRequest{Owner: "o", LeaseTTL: time.Second,
				Held: []store.Held{{ID: "a", Epoch: 1}}})
			return err
		},
	} {
		for _, level := range []string{"read committed", "serializable"} {
			servers := &standby.Servers{Answer: func(query string) [][]driver.Value {
				switch {
				case strings.HasPrefix(query, "SHOW"):
					return [][]driver.Value{{level}}
				case strings.Contains(query, "INSERT INTO saga "):
					return [][]driver.Value{{
						"a", "order", int64(0), "running", []byte{}, "{}",
						"", "", "", int64(0), int64(0), "", int64(0), int64(1), int64(0),
						int64(0), int64(0), "", false, "", int64(1), int64(1), int64(1),
					}}
				case strings.HasPrefix(query, "SELECT id, epoch"):
					return [][]driver.Value{{"a", int64(1), false, ""}}
				}
				return nil
			}}
			db := servers.Open(t, 3)
			servers.Swap()
			require.NoError(t, write(t.Context(), sqlstore.New(db, sqlstore.PostgreSQL, sqlstore.Config{})), "%s, %s",
				name, level)
			require.Equal(t, [2]int{0, 1}, servers.Conns(), "%s, %s", name, level)
			// a lock
			writes := slices.DeleteFunc(servers.Writes(), func(text string) bool { return strings.HasPrefix(text, "SELECT") })
			require.Len(t, writes, 1)
		}
	}
}

// TestSQLiteKeepsItsConnections: an attempt that follows another looks for no other server. A database in memory
// ends with its last connection, and what a PRAGMA has set with its own.
func TestSQLiteKeepsItsConnections(t *testing.T) {
	servers := &standby.Servers{OnCommit: true}
	db := servers.Open(t, 2)
	servers.Demote() // it answers the question as no primary would: SQLite fails it
	tx, err := sqlstore.New(db, sqlstore.SQLite, sqlstore.Config{}).Begin(sqltx.Anew(t.Context()))
	require.NoError(t, err)
	require.NoError(t, tx.Rollback())
	require.Equal(t, [2]int{2, 0}, servers.Conns())
}
