package saga_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/resiliencepgx"
	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

// onEmpty runs test on a database of each kind that has no tables.
func onEmpty(t *testing.T, test func(t *testing.T, d database)) {
	for _, dialect := range databases {
		t.Run(string(dialect), func(t *testing.T) {
			test(t, emptyDatabase(t, dialect))
		})
	}
}

func TestMigrate(t *testing.T) {
	onEmpty(t, func(t *testing.T, d database) {
		st, db, ctx := d.store(t), d.open(t), t.Context()
		require.ErrorIs(t, st.Check(ctx), store.ErrNotMigrated)
		require.ErrorIs(t, saga.NewRunner(st, saga.RunnerConfig{}).Run(ctx), store.ErrNotMigrated)
		var wg sync.WaitGroup
		for range 4 { // processes that start together
			wg.Go(func() {
				if err := d.store(t).Migrate(ctx); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		require.NoError(t, st.Check(ctx))
		require.NoError(t, st.Migrate(ctx))

		_, err := db.Exec(`UPDATE saga_schema SET version = 99`)
		require.NoError(t, err)
		require.NoError(t, st.Migrate(ctx), "a newer version that this program can use")
		require.NoError(t, st.Check(ctx))
		_, err = db.Exec(`UPDATE saga_schema SET compatible = 98`)
		require.NoError(t, err)
		require.ErrorContains(t, st.Migrate(ctx),
			"they are of version 99, for programs from version 98 on, and this program is of version 1")
		require.ErrorIs(t, st.Check(ctx), store.ErrNotMigrated)
		_, err = db.Exec(`UPDATE saga_schema SET version = 1, compatible = 1`)
		require.NoError(t, err)
		_, err = db.Exec(`DROP TABLE saga_log`)
		require.NoError(t, err)
		require.ErrorContains(t, st.Migrate(ctx),
			"the tables are not those of their version, or another program's (use Config.Prefix)")
		require.ErrorIs(t, st.Check(ctx), store.ErrNotMigrated)
	})
}

// TestOldProgramStartsBesideANewSchema that says that it can be used, and runs a saga whose participant
// has a newer barrier.
func TestOldProgramStartsBesideANewSchema(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		db, ctx := d.open(t), t.Context()
		for _, statement := range []string{
			`ALTER TABLE saga ADD COLUMN color int NOT NULL DEFAULT 7`,
			`ALTER TABLE saga_log ADD COLUMN color int NOT NULL DEFAULT 7`,
			`INSERT INTO saga_schema (version, compatible) VALUES (2, 1)`,
			`ALTER TABLE saga_barrier ADD COLUMN color int NOT NULL DEFAULT 7`,
			`INSERT INTO saga_barrier (saga_id, step, op, reason) VALUES ('', '', 'version', '2 1')`,
		} {
			_, err := db.Exec(statement)
			require.NoError(t, err)
		}
		st := d.store(t)
		require.NoError(t, st.Migrate(ctx))
		applied, completed := 0, make(chan struct{})
		sg := &saga.Saga[nothing]{Name: "trip", Steps: []saga.Step[nothing]{{Name: "book",
			Do: func(ctx context.Context, _ *nothing) error {
				return saga.Apply(ctx, db, func(*sql.Tx) error { applied++; return nil })
			},
			Undo: done,
		}}}
		r := saga.NewRunner(st, saga.RunnerConfig{})
		r.Observe(func(_ context.Context, e saga.Event) {
			if e.Kind == saga.EventCompleted {
				close(completed)
			}
		})
		sagas := saga.Register(r, sg)
		run(t, r)
		_, err := sagas.Start(ctx, "trip-1", nothing{})
		require.NoError(t, err)
		<-completed
		require.Equal(t, 1, applied)

		_, err = db.Exec(`UPDATE saga_barrier SET reason = '3 2' WHERE op = 'version'`)
		require.NoError(t, err)
		err = saga.Apply(saga.WithCommand(ctx, saga.Command{ID: "trip-2/book/book/do"}), db,
			func(*sql.Tx) error { applied++; return nil })
		require.ErrorContains(t, err,
			"they are of version 3, for programs from version 2 on, and this program is of version 1")
		require.Equal(t, 1, applied)
	})
}

// TestMigrateBesideAnotherProcess: the tables are there when their version is. A process that ended
// before that leaves the rest to the next.
func TestMigrateBesideAnotherProcess(t *testing.T) {
	onEmpty(t, func(t *testing.T, d database) {
		st, db, ctx := d.store(t), d.open(t), t.Context()
		made := 0
		for statement := range strings.SplitSeq(st.Schema(), ";") {
			if strings.Contains(statement, "INTO saga_schema") {
				break
			}
			_, err := db.Exec(statement)
			require.NoError(t, err)
			require.ErrorIs(t, st.Check(ctx), store.ErrNotMigrated)
			made++
		}
		require.Greater(t, made, 3)
		require.NoError(t, st.Migrate(ctx))
		require.NoError(t, st.Check(ctx))
	})
}

func TestMigrateLeavesATableOfAnotherProgramAlone(t *testing.T) {
	onEmpty(t, func(t *testing.T, d database) {
		db := d.open(t)
		_, err := db.Exec(`CREATE TABLE saga (title text)`)
		require.NoError(t, err)
		require.ErrorContains(t, d.store(t).Migrate(t.Context()), "another program's (use Config.Prefix)")
		require.ErrorIs(t, d.store(t).Check(t.Context()), store.ErrNotMigrated)
		store := sqlstore.New(db, d.Dialect, sqlstore.Config{Prefix: "trips_"})
		require.NoError(t, store.Migrate(t.Context()))
		require.NoError(t, store.Check(t.Context()))
	})
}

// A Migrate that fails does not say that the tables are there: no later one would make them.
func TestMigrateAfterATableOfAnotherProgramHasGone(t *testing.T) {
	onEmpty(t, func(t *testing.T, d database) {
		db := d.open(t)
		_, err := db.Exec(`CREATE TABLE saga_log (line text)`)
		require.NoError(t, err)
		require.ErrorContains(t, d.store(t).Migrate(t.Context()), "another program's (use Config.Prefix)")
		_, err = db.Exec(`ALTER TABLE saga_log RENAME TO logbook`)
		require.NoError(t, err)
		require.NoError(t, d.store(t).Migrate(t.Context()))
	})
}

// TestSchemaOfAnotherTool: Migrate finds the tables and does nothing.
func TestSchemaOfAnotherTool(t *testing.T) {
	onEmpty(t, func(t *testing.T, d database) {
		store, db := d.store(t), d.open(t)
		for statement := range strings.SplitSeq(store.Schema(), ";") {
			if strings.TrimSpace(statement) != "" {
				_, err := db.Exec(statement)
				require.NoError(t, err, statement)
			}
		}
		require.NoError(t, store.Check(t.Context()))
		require.NoError(t, store.Migrate(t.Context()))
	})
}

// TestMigrateNeedsNoRightToCreate if the tables exist: the role of the program may have
// none.
func TestMigrateNeedsNoRightToCreate(t *testing.T) {
	d := newDatabase(t, sqlstore.PostgreSQL)
	db := d.open(t)
	role := "saga_" + strings.ToLower(rand.Text()[:12])
	for _, statement := range []string{
		`CREATE ROLE %s LOGIN`,
		`GRANT USAGE ON SCHEMA ` + d.Name + ` TO %s`,
		`GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA ` + d.Name + ` TO %s`,
	} {
		_, err := db.Exec(fmt.Sprintf(statement, role))
		require.NoError(t, err)
	}
	t.Cleanup(func() {
		_, err := db.Exec(fmt.Sprintf(`DROP OWNED BY %s; DROP ROLE %[1]s`, role))
		require.NoError(t, err)
	})
	config, err := pgx.ParseConfig(d.DSN)
	require.NoError(t, err)
	own := d.open(t)
	own.SetMaxOpenConns(1)
	_, err = own.Exec(`SET ROLE ` + role)
	require.NoError(t, err)
	_, err = own.Exec(`CREATE TABLE other (id text)`)
	require.ErrorContains(t, err, "permission denied", config.User)
	st := sqlstore.New(own, d.Dialect, sqlstore.Config{})
	require.NoError(t, st.Migrate(t.Context()))
	_, _, err = st.Start(t.Context(),
		store.StartRequest{ID: "a", Saga: "trip", Status: saga.Running, Log: make([]store.Entry, 1)})
	require.NoError(t, err)
}

// TestStoreUnderAnotherDefaultIsolation: PostgreSQL would refuse to serialize what the fence
// decides.
func TestStoreUnderAnotherDefaultIsolation(t *testing.T) {
	t.Parallel()
	runStore(t, sqlstore.PostgreSQL, func(t *testing.T) (*sqlstore.Store, *sql.DB) {
		return newDatabase(t, sqlstore.PostgreSQL).with(t, "default_transaction_isolation", "serializable").storeOn(t)
	})
}

// TestStoreOnMySQLHoweverItIsConnected: no rule depends on what counts as an affected row,
// on the isolation that is the default, or on the SQL mode.
func TestStoreOnMySQLHoweverItIsConnected(t *testing.T) {
	t.Parallel()
	runStore(t, sqlstore.MySQL, func(t *testing.T) (*sqlstore.Store, *sql.DB) {
		d := newDatabase(t, sqlstore.MySQL)
		var version, isolation string
		require.NoError(t, d.open(t).QueryRow(`SELECT version()`).Scan(&version))
		if isolation = "transaction_isolation"; strings.Contains(version, "MariaDB") {
			isolation = "tx_isolation"
		}
		d = d.with(t, isolation, "'SERIALIZABLE'")
		d.DSN += "&clientFoundRows=true&interpolateParams=true&sql_mode='ANSI,STRICT_ALL_TABLES'"
		return d.storeOn(t)
	})
}

// TestTransactionWithASnapshotSeesTheNewestRows: the user's own transactions on MySQL are
// under REPEATABLE READ, and may have read before a saga was started elsewhere.
func TestTransactionWithASnapshotSeesTheNewestRows(t *testing.T) {
	d := newDatabase(t, sqlstore.MySQL)
	st, db, ctx := d.store(t), d.open(t), t.Context()
	req := store.StartRequest{ID: "a", Saga: "trip", Status: saga.Running, Nonce: 1, Log: make([]store.Entry, 1)}
	tx, err := db.Begin()
	require.NoError(t, err)
	defer tx.Rollback()
	require.NoError(t, tx.QueryRow(`SELECT count(*) FROM saga`).Scan(new(int)))
	_, _, err = st.Start(ctx, req)
	require.NoError(t, err)
	rec, created, err := st.StartTx(ctx, tx, req)
	require.NoError(t, err)
	require.False(t, created)
	require.Equal(t, "a", rec.ID)
	require.NoError(t, tx.Commit())
}

// TestSignalInATransactionWaitsForNoOther: under REPEATABLE READ, MySQL would lock the gap of a signal that is
// looked for and not there, in which those of other sagas belong: they would wait, and two at once deadlock.
func TestSignalInATransactionWaitsForNoOther(t *testing.T) {
	d := newDatabase(t, sqlstore.MySQL).with(t, "innodb_lock_wait_timeout", 5)
	st, db, ctx := d.store(t), d.open(t), t.Context()
	for _, id := range []string{"a", "b"} {
		_, _, err := st.Start(ctx, store.StartRequest{ID: id, Saga: "trip", Status: saga.Running,
			Log: make([]store.Entry, 1)})
		require.NoError(t, err)
	}
	for _, id := range []string{"a", "b"} {
		tx, err := db.Begin()
		require.NoError(t, err)
		defer tx.Rollback()
		_, err = st.PostTx(ctx, tx, store.PostRequest{ID: id, Name: "paid"})
		require.NoError(t, err, id)
	}
}

func listen(t *testing.T, dsn string) func(context.Context, string, func()) error {
	pool, err := pgxpool.New(context.Background(), dsn)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return resiliencepgx.Listen(pool)
}

// TestRunnerHearsOfAStartElsewhere: the runner polls once an hour.
func TestRunnerHearsOfAStartElsewhere(t *testing.T) {
	d := newDatabase(t, sqlstore.PostgreSQL)
	store := func() *sqlstore.Store {
		return sqlstore.New(d.open(t), d.Dialect, sqlstore.Config{Listen: listen(t, d.DSN)})
	}
	begun := make(chan struct{}, 1)
	sg := func() *saga.Saga[nothing] {
		return &saga.Saga[nothing]{Name: "trip", Steps: []saga.Step[nothing]{{
			Name: "step", Undo: done, Do: func(context.Context, *nothing) error { begun <- struct{}{}; return nil },
		}}}
	}
	r := saga.NewRunner(store(), saga.RunnerConfig{Poll: time.Hour})
	saga.Register(r, sg())
	own := store()
	theres := saga.Register(saga.NewRunner(own, saga.RunnerConfig{}), sg())
	run(t, r)

	for name, start := range map[string]func(id string) error{
		"Start": func(id string) error {
			_, err := theres.Start(t.Context(), id, nothing{})
			return err
		},
		"StartTx": func(id string) error {
			tx, err := own.Begin(t.Context())
			if err == nil {
				err = theres.StartTx(t.Context(), tx, id, nothing{})
			}
			if err == nil {
				err = tx.Commit()
			}
			return err
		},
	} {
		require.NoError(t, start(name))
		<-begun
	}

	// Sagas that a runner hands over notify too.
	stopped := saga.NewRunner(own, saga.RunnerConfig{Drain: saga.None})
	var released sync.Once
	reached := make(chan struct{})
	slow := &saga.Saga[nothing]{Name: "slow", Steps: []saga.Step[nothing]{{
		Name: "step", Undo: done, Do: func(ctx context.Context, _ *nothing) error {
			first := false
			released.Do(func() { first = true; close(reached) })
			if first {
				<-ctx.Done()
			}
			return ctx.Err()
		},
	}}}
	slows := saga.Register(stopped, slow)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = stopped.Run(ctx) })
	_, err := slows.Start(t.Context(), "handed over", nothing{})
	require.NoError(t, err)
	stopped.Wake()
	<-reached
	saga.Register(r, slow)
	cancel()
	wg.Wait()
	for {
		in, err := r.Get(t.Context(), "handed over")
		require.NoError(t, err)
		if in.Status == saga.Completed {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

// TestRunnerHearsOfWhatMadeASagaDueElsewhere: of a signal, of a cancellation, and of the end
// of a child. The runner polls once an hour.
func TestRunnerHearsOfWhatMadeASagaDueElsewhere(t *testing.T) {
	d := newDatabase(t, sqlstore.PostgreSQL)
	store := func() *sqlstore.Store {
		return sqlstore.New(d.open(t), d.Dialect, sqlstore.Config{Listen: listen(t, d.DSN)})
	}
	child := &saga.Saga[nothing]{Name: "parcel", Steps: []saga.Step[nothing]{{Name: "packed", Await: "packed"}}}
	begin := func(*nothing) (nothing, error) { return nothing{}, nil }
	waits := &saga.Saga[nothing]{Name: "waits", Steps: []saga.Step[nothing]{{Name: "paid", Await: "paid"}}}
	parent := &saga.Saga[nothing]{Name: "order",
		Steps: []saga.Step[nothing]{{Name: "parcel", Child: saga.ChildOf(child, begin, nil)}}}
	r := saga.NewRunner(store(), saga.RunnerConfig{Poll: time.Hour})
	saga.Register(r, waits)
	saga.Register(r, parent)
	run(t, r)
	own := store()
	elsewhere := saga.NewRunner(own, saga.RunnerConfig{Poll: time.Hour}) // it does not run
	parked := func(id string) {
		for {
			in, err := r.Get(t.Context(), id)
			require.NoError(t, err)
			if in.Owner == "" && len(in.Steps) > 0 && !in.Steps[0].WaitingSince.IsZero() {
				return
			}
			time.Sleep(time.Millisecond)
		}
	}
	for name, c := range map[string]struct {
		sg   *saga.Saga[nothing]
		wake func(id string) error
		err  error
	}{
		"Signal": {sg: waits, wake: func(id string) error { return elsewhere.Signal(t.Context(), id, "paid", nil) }},
		"SignalTx": {sg: waits, wake: func(id string) error {
			tx, err := own.Begin(t.Context())
			if err == nil {
				err = elsewhere.SignalTx(t.Context(), tx, id, "paid", nil)
			}
			if err == nil {
				err = tx.Commit()
			}
			return err
		}},
		"Cancel": {sg: waits, wake: func(id string) error {
			return elsewhere.Operate(t.Context(), id, saga.Operation{Action: saga.ActionCancel, Note: "no"})
		}, err: saga.ErrCanceled},
		"Hasten": {sg: parent, wake: func(id string) error {
			parked(saga.ChildID(id, "parcel", 0))
			return elsewhere.Operate(t.Context(), saga.ChildID(id, "parcel", 0),
				saga.Operation{Action: saga.ActionAbandon, Note: "lost"})
		}, err: saga.ErrCompensated},
	} {
		_, err := saga.Register(r, c.sg).Start(t.Context(), name, nothing{})
		require.NoError(t, err, name)
		parked(name)
		since := time.Now()
		require.NoError(t, c.wake(name), name)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // of an hour
		_, err = saga.Register(r, c.sg).Result(ctx, name)
		cancel()
		if c.err == nil {
			require.NoError(t, err, name)
		} else {
			require.ErrorIs(t, err, c.err, name)
		}
		t.Logf("after %s: %v", name, time.Since(since))
	}
}
