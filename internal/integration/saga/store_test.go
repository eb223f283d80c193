package saga_test

import (
	"context"
	"database/sql"
	"fmt"
	mathrand "math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/sagacrash"
	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
	"github.com/go-resilience/resilience/saga/sqlstore"
	"github.com/go-resilience/resilience/saga/storetest"
)

// TestStore runs with a Prefix, which every statement must have; all other tests run without one.
func TestStore(t *testing.T) {
	for _, dialect := range databases {
		t.Run(string(dialect), func(t *testing.T) {
			runStore(t, dialect, func(t *testing.T) (*sqlstore.Store, *sql.DB) {
				d := newDatabase(t, dialect) // whose tables without the prefix must stay empty
				db := d.open(t)
				st := sqlstore.New(db, dialect, sqlstore.Config{Prefix: "trips_"})
				require.NoError(t, st.Migrate(t.Context()))
				t.Cleanup(func() {
					var n int
					require.NoError(t, db.QueryRow(`SELECT (SELECT count(*) FROM saga) + (SELECT count(*) FROM saga_log)`).Scan(&n))
					require.Zero(t, n)
				})
				return st, db
			})
		})
	}
}

// runStore runs the suite and its tests of transactions.
func runStore(t *testing.T, dialect sqlstore.Dialect, newStore func(t *testing.T) (*sqlstore.Store, *sql.DB)) {
	storetest.Run(t, func(t *testing.T) store.Store {
		st, _ := newStore(t)
		return st
	})
	storetest.RunTx(t, func(t *testing.T) storetest.Tx {
		st, db := newStore(t)
		return storetest.Tx{Store: st, DB: db, OneWriter: dialect == sqlstore.SQLite}
	})
}

// storeOn returns a store and its database.
func (d database) storeOn(t *testing.T) (*sqlstore.Store, *sql.DB) {
	db := d.open(t)
	return sqlstore.New(db, d.Dialect, sqlstore.Config{}), db
}

func TestCrashMatrix(t *testing.T) {
	t.Parallel()
	for _, dialect := range databases {
		t.Run(string(dialect), func(t *testing.T) {
			t.Parallel()
			sagacrash.Crashes(t, func(t *testing.T) store.Store { return newDatabase(t, dialect).store(t) })
		})
	}
}

// TestCommitsShareStatements: were every batch to fail, only the time that it
// takes would tell.
func TestCommitsShareStatements(t *testing.T) {
	d := newDatabase(t, sqlstore.PostgreSQL)
	config, err := pgx.ParseConfig(d.DSN)
	require.NoError(t, err)
	seen := new(statements)
	config.Tracer = seen
	db := stdlib.OpenDB(*config)
	defer db.Close()
	db.SetMaxOpenConns(8)
	st := sqlstore.New(db, d.Dialect, sqlstore.Config{})
	const sagas, commits = 32, 5
	for i := range sagas {
		_, _, err = st.Start(t.Context(),
			store.StartRequest{ID: fmt.Sprint(i), Saga: "trip", Status: saga.Running, Log: make([]store.Entry, 1)})
		require.NoError(t, err)
	}
	seen.reset()
	var wg sync.WaitGroup
	for i := range sagas {
		wg.Go(func() {
			for n := range int64(commits) {
				_, err := st.Commit(t.Context(), store.CommitRequest{
					ID: fmt.Sprint(i), Seq: 1 + 3*n, Status: saga.Running, State: []byte("data"), Log: make([]store.Entry,
						3), Release: i%2 == 0,
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	require.Empty(t, seen.errs)
	require.Less(t, seen.n, sagas*commits)
}

// statements counts them, and keeps their errors.
type statements struct {
	mu   sync.Mutex
	n    int
	errs []error
}

func (s *statements) reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n, s.errs = 0, nil
}

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (s *statements) TraceQueryEnd(_ context.Context, _ *pgx.Conn, end pgx.TraceQueryEndData) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.n++; end.Err != nil {
		s.errs = append(s.errs, end.Err)
	}
}

// TestLockedSagaDelaysNoOther: commits of others do not wait for a locked row, say that of an owner
// that was stopped in the middle of a DoTx. Only its own commit does.
func TestLockedSagaDelaysNoOther(t *testing.T) {
	d := newDatabase(t, sqlstore.PostgreSQL)
	st, ctx := d.store(t), t.Context()
	const sagas = 16
	for i := range sagas {
		_, _, err := st.Start(ctx, store.StartRequest{ID: fmt.Sprint(i), Saga: "trip", Status: saga.Running,
			Log: make([]store.Entry, 1)})
		require.NoError(t, err)
	}
	tx, err := d.open(t).Begin()
	require.NoError(t, err)
	defer tx.Rollback()
	_, err = tx.Exec(`SELECT FROM saga WHERE id IN ('3', '7') FOR UPDATE`)
	require.NoError(t, err)
	var locked, others sync.WaitGroup
	var failed atomic.Int64
	for i := range sagas {
		wg := &others
		if i == 3 || i == 7 {
			wg = &locked
		}
		wg.Go(func() {
			for n := range 5 {
				if _, err := st.Commit(ctx, store.CommitRequest{ID: fmt.Sprint(i), Seq: int64(1 + n), Status: saga.Running,
					Log: make([]store.Entry, 1)}); err != nil {
					failed.Add(1)
				}
			}
		})
	}
	others.Wait() // forever, if one of them waited for the lock
	for _, id := range []string{"3", "7"} {
		rec, err := st.Load(ctx, id)
		require.NoError(t, err)
		require.EqualValues(t, 1, rec.Seq)
	}
	require.NoError(t, tx.Rollback())
	locked.Wait()
	require.Zero(t, failed.Load())
	recs, _, err := st.List(ctx, store.Filter{})
	require.NoError(t, err)
	require.Len(t, recs, sagas)
	for _, rec := range recs {
		require.EqualValues(t, 6, rec.Seq, rec.ID)
	}
}

// TestStartThatWaitsHoldsUpNoOther: a transaction that has started a saga is still open,
// and other Starts have the same id. The rest are made all the same, and each says whether it has
// created its saga.
func TestStartThatWaitsHoldsUpNoOther(t *testing.T) {
	for _, dialect := range []sqlstore.Dialect{sqlstore.PostgreSQL, sqlstore.MySQL} {
		t.Run(string(dialect), func(t *testing.T) {
			d := newDatabase(t, dialect)
			if dialect == sqlstore.MySQL {
				d = d.with(t, "innodb_lock_wait_timeout", 3600)
			}
			st, ctx := d.store(t), t.Context()
			req := func(id string) store.StartRequest {
				return store.StartRequest{ID: id, Saga: "trip", Status: saga.Running, Nonce: mathrand.Int64(),
					Log: make([]store.Entry, 1)}
			}
			tx, err := st.Begin(ctx)
			require.NoError(t, err)
			defer tx.Rollback()
			_, created, err := st.StartTx(ctx, tx, req("taken"))
			require.NoError(t, err)
			require.True(t, created)
			var others, taken sync.WaitGroup
			var others200, again atomic.Int64
			start := func(wg *sync.WaitGroup, id string, count *atomic.Int64) {
				wg.Go(func() {
					rec, created, err := st.Start(ctx, req(id))
					if err != nil || rec.ID != id {
						t.Error(err)
					}
					if created {
						count.Add(1)
					}
				})
			}
			for i := range 200 {
				start(&others, fmt.Sprint(i), &others200)
				if i%20 == 0 {
					start(&taken, "taken", &again)
				}
			}
			others.Wait() // forever, if one of them waited for the transaction
			require.EqualValues(t, 200, others200.Load())
			require.NoError(t, tx.Commit())
			taken.Wait()
			require.Zero(t, again.Load())
		})
	}
}

// TestStartOfASagaThatIsBeingDeleted inserts nothing, since the saga is there, and then
// finds nothing, since it is gone: it begins anew.
func TestStartOfASagaThatIsBeingDeleted(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		other, ctx := d.store(t), t.Context()
		req := store.StartRequest{ID: "a", Saga: "trip", Status: saga.Running, Nonce: 1, Log: make([]store.Entry, 1)}
		_, _, err := other.Start(ctx, req)
		require.NoError(t, err)
		_, err = other.Commit(ctx, store.CommitRequest{ID: "a", Seq: 1, Status: saga.Completed, Release: true,
			Log: make([]store.Entry, 1)})
		require.NoError(t, err)
		seen := new(recorder)
		st := sqlstore.New(seen.open(t, d), d.Dialect, sqlstore.Config{})
		seen.before = func(text string) {
			if strings.Contains(text, "AS store_now") && d.Dialect == sqlstore.PostgreSQL { // on the others Start has locked it
				seen.before = nil
				n, err := other.DeleteEnded(ctx, saga.Completed, 0, 1)
				require.NoError(t, err)
				require.Equal(t, 1, n)
			}
		}
		req.Nonce = 2
		rec, created, err := st.Start(ctx, req)
		require.NoError(t, err)
		require.Equal(t, d.Dialect == sqlstore.PostgreSQL, created)
		require.Equal(t, created, rec.Nonce == 2)
	})
}

// TestHeartbeatWaitsForNoRow: otherwise a locked row would cost a
// process the leases of all that it holds.
func TestHeartbeatWaitsForNoRow(t *testing.T) {
	d := newDatabase(t, sqlstore.PostgreSQL)
	st, ctx := d.store(t), t.Context()
	var held []store.Held
	for _, id := range []string{"free", "locked", "taken"} {
		rec, _, err := st.Start(ctx, store.StartRequest{
			ID: id, Saga: "trip", Status: saga.Running, Owner: "me", LeaseTTL: time.Nanosecond, Log: make([]store.Entry, 1),
		})
		require.NoError(t, err)
		held = append(held, store.Held{ID: id, Epoch: rec.Epoch})
	}
	db := d.open(t)
	_, err := db.Exec(`UPDATE saga SET owner = 'thief', epoch = 2 WHERE id = 'taken'`)
	require.NoError(t, err)
	tx, err := db.Begin()
	require.NoError(t, err)
	defer tx.Rollback()
	_, err = tx.Exec(`SELECT FROM saga WHERE id IN ('locked', 'taken') FOR UPDATE`)
	require.NoError(t, err)
	before, err := st.Load(ctx, "locked")
	require.NoError(t, err)
	// Forever, if it waited.
	renewed, err := st.Heartbeat(ctx, store.HeartbeatRequest{Owner: "me", LeaseTTL: time.Hour, Held: held})
	require.NoError(t, err)
	require.ElementsMatch(t, []store.Renewed{{ID: "free", Epoch: 1}, {ID: "locked", Epoch: 1, Locked: true}}, renewed)
	after, err := st.Load(ctx, "locked")
	require.NoError(t, err)
	require.Equal(t, before.WakeAt, after.WakeAt)
}

// TestBatchLooksIdsUp: however old its plan is, for one that reads the whole
// table would be ever slower.
func TestBatchLooksIdsUp(t *testing.T) {
	d := newDatabase(t, sqlstore.PostgreSQL)
	db := d.open(t)
	db.SetMaxOpenConns(1) // whose plans are from when the table was empty
	var version int
	require.NoError(t, db.QueryRow(`SELECT current_setting('server_version_num')::int`).Scan(&version))
	if version < 150000 {
		t.Skip("PostgreSQL tells of its scans at once from version 15 on")
	}
	st := sqlstore.New(db, d.Dialect, sqlstore.Config{})
	ctx := t.Context()
	const sagas = 32
	commitAll := func() (written int64) {
		var n atomic.Int64
		var wg sync.WaitGroup
		for i := range sagas {
			wg.Go(func() {
				_, err := st.Commit(ctx, store.CommitRequest{ID: fmt.Sprint(i), Seq: 1, Status: saga.Running,
					Log: make([]store.Entry, 1)})
				if err == nil {
					n.Add(1)
				}
			})
		}
		wg.Wait()
		return n.Load()
	}
	for range 10 {
		require.Zero(t, commitAll())
	}
	for i := range sagas {
		_, _, err := st.Start(ctx, store.StartRequest{ID: fmt.Sprint(i), Saga: "trip", Status: saga.Running,
			Log: make([]store.Entry, 1)})
		require.NoError(t, err)
	}
	scans := func() (n int) {
		_, err := db.Exec(`SELECT pg_stat_force_next_flush()`)
		require.NoError(t, err)
		require.NoError(t, db.QueryRow(`SELECT seq_scan FROM pg_stat_user_tables
			WHERE relname = 'saga' AND schemaname = current_schema`).Scan(&n))
		return n
	}
	before := scans()
	require.EqualValues(t, sagas, commitAll())
	require.Equal(t, before, scans())
}

// TestBarrierIsCleared by the statements of its doc, which delete the old rows and nothing else.
func TestBarrierIsCleared(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		before := map[sqlstore.Dialect]string{
			sqlstore.PostgreSQL: `now() - interval '90 days'`,
			sqlstore.MySQL:      `now() - interval 90 day`,
			sqlstore.SQLite:     `datetime('now', '-90 days')`,
		}[d.Dialect]
		db, ctx := d.open(t), t.Context()
		apply := func(id string) (applied bool) {
			require.NoError(t, saga.Apply(saga.WithCommand(ctx, saga.Command{ID: id + "/step/step/do"}), db,
				func(*sql.Tx) error {
					applied = true
					return nil
				}))
			return applied
		}
		require.True(t, apply("old"))
		_, err := db.Exec(`UPDATE saga_barrier SET at = '2001-02-03 04:05:06'`)
		require.NoError(t, err)
		require.True(t, apply("new"))
		for _, want := range []int64{1, 0} {
			res, err := db.Exec(`DELETE FROM saga_barrier WHERE saga_id > '' AND at < ` + before)
			require.NoError(t, err)
			n, err := res.RowsAffected()
			require.NoError(t, err)
			require.Equal(t, want, n)
		}
		require.False(t, apply("new"))
		require.True(t, apply("old"))
	})
}
