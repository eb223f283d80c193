package saga_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
	"github.com/go-resilience/resilience/saga/storetest"
)

func TestStore(t *testing.T) {
	for _, dialect := range databases {
		t.Run(dialect.String(), func(t *testing.T) {
			storetest.Run(t, func(t *testing.T) saga.Store { return newDatabase(t, dialect).store(t) })
		})
	}
}

func TestCrashMatrix(t *testing.T) {
	for _, dialect := range databases {
		t.Run(dialect.String(), func(t *testing.T) {
			if raced && dialect == sqlstore.SQLite {
				t.Skip("SQLite is too slow for its leases under the race detector")
			}
			t.Parallel()
			storetest.Crashes(t, func(t *testing.T) saga.Store { return newDatabase(t, dialect).store(t) })
		})
	}
}

// TestDeleteEnded deletes what has ended long enough ago, with its log, and
// nothing else.
func TestDeleteEnded(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		store, ctx := d.store(t), t.Context()
		for _, id := range []string{"a", "b", "c"} {
			_, _, err := store.Start(ctx, saga.StartRequest{ID: id, Saga: "trip", Status: saga.Running, Log: make([]saga.Entry, 1)})
			require.NoError(t, err)
		}
		for _, id := range []string{"a", "b"} {
			_, err := store.Commit(ctx, saga.CommitRequest{ID: id, Seq: 1, Status: saga.Completed, Release: true, Log: make([]saga.Entry, 2)})
			require.NoError(t, err)
		}
		for _, c := range []struct {
			age   time.Duration
			limit int
			want  int64
		}{{time.Hour, 10, 0}, {0, 1, 1}, {0, 10, 1}, {0, 10, 0}} {
			n, err := store.DeleteEnded(ctx, c.age, c.limit)
			require.NoError(t, err)
			require.Equal(t, c.want, n)
		}
		for id, entries := range map[string]int{"a": 0, "b": 0, "c": 1} {
			log, err := store.History(ctx, id)
			require.NoError(t, err)
			require.Len(t, log, entries)
		}
		_, err := store.Load(ctx, "c")
		require.NoError(t, err)
	})
}
