package sqlstore_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	store "github.com/go-resilience/resilience/saga/sagastore"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

// The statements themselves are tested on real databases, in
// internal/integration/saga. The tests here need none.

func TestNewPanicsForInvalidArguments(t *testing.T) {
	panics := func(want string, c sqlstore.Config, db *sql.DB, dialect sqlstore.Dialect) {
		t.Helper()
		require.PanicsWithValue(t, want, func() { sqlstore.New(db, dialect, c) })
	}
	db := open(new(script))
	require.PanicsWithValue(t, "sqlstore: *sql.DB is nil: must be set",
		func() { sqlstore.New(nil, sqlstore.SQLite, sqlstore.Config{}) })
	panics("sqlstore: dialect is \"Oracle\": must be PostgreSQL, MySQL or SQLite", sqlstore.Config{}, db, "Oracle")
	for _, prefix := range []string{"9a", "A", "a-b", "saga;", strings.Repeat("x", 33)} {
		panics(fmt.Sprintf("sqlstore: Config.Prefix is %q: must be up to 32 of a-z, 0-9 and _, not a digit first", prefix),
			sqlstore.Config{Prefix: prefix}, db, sqlstore.SQLite)
	}
	listen := func(context.Context, string, func()) error { return nil }
	for _, dialect := range []sqlstore.Dialect{sqlstore.MySQL, sqlstore.SQLite} {
		panics("sqlstore: Config.Listen is for PostgreSQL", sqlstore.Config{Prefix: "a_9", Listen: listen}, db, dialect)
	}
	require.Equal(t, "PostgreSQL MySQL SQLite", fmt.Sprint(sqlstore.PostgreSQL, " ", sqlstore.MySQL, " ", sqlstore.SQLite))
}

// TestMigrateRefusesUnsafeSettings: durability is never traded by default.
func TestMigrateRefusesUnsafeSettings(t *testing.T) {
	for _, c := range []struct {
		synchronous, busy int64
		want              string
	}{
		{1, 5000, "PRAGMA synchronous is 1: must be 2 (FULL) or 3 (EXTRA)"},
		{0, 5000, "PRAGMA synchronous is 0"},
		{2, 0, "PRAGMA busy_timeout is 0"},
		{2, 5000, ""},
		{3, 1, ""},
	} {
		s := &script{answers: map[string][]driver.Value{
			"PRAGMA synchronous": {c.synchronous}, "PRAGMA busy_timeout": {c.busy},
		}}
		s.onExec = func(text string) {
			if strings.Contains(text, "INTO saga_schema") {
				s.answers["SELECT version, compatible"] = []driver.Value{int64(1), int64(1)}
			}
		}
		store := newStore(t, s, sqlstore.SQLite)
		err := store.Migrate(t.Context())
		if c.want == "" {
			require.NoError(t, err)
			require.Contains(t, strings.Join(s.log, "\n"), "CREATE TABLE IF NOT EXISTS saga_log")
			require.Contains(t, strings.Join(s.log, "\n"), "CREATE TABLE IF NOT EXISTS saga_barrier")
		} else {
			require.ErrorContains(t, err, "sqlstore: migrate: "+c.want)
			require.NotContains(t, strings.Join(s.log, "\n"), "CREATE")
		}
	}
}

// TestMigrateRefusesOtherServers: TiDB accepts FOR UPDATE SKIP LOCKED and locks nothing.
func TestMigrateRefusesOtherServers(t *testing.T) {
	s := &script{answers: map[string][]driver.Value{"SELECT CONCAT(version()": {"8.0.11-TiDB-v7.5.1 TiDB Server"}}}
	st := newStore(t, s, sqlstore.MySQL)
	err := st.Migrate(t.Context())
	require.ErrorContains(t, err, `sqlstore: migrate: the server is not supported: its version is "8.0.11-TiDB-v7.5.1`)
	require.NotContains(t, strings.Join(s.log, "\n"), "CREATE")
	s.answers["SELECT version, compatible"] = []driver.Value{int64(1), int64(1)}
	require.ErrorIs(t, st.Check(t.Context()), store.ErrNotMigrated)
}

// TestSchemaMatchesTestdata: testdata has the tables of each version, from which a program of a later one
// must be able to go on. A change of them is a new version, with a file of its own.
func TestSchemaMatchesTestdata(t *testing.T) {
	for _, dialect := range []sqlstore.Dialect{sqlstore.PostgreSQL, sqlstore.MySQL, sqlstore.SQLite} {
		want, err := os.ReadFile("testdata/1." + strings.ToLower(string(dialect)) + ".sql")
		require.NoError(t, err)
		require.Equal(t, string(want), newStore(t, new(script), dialect).Schema())
	}
}

// TestPostgreSQLCommitsInOneRoundTrip counts the round trips.
func TestPostgreSQLCommitsInOneRoundTrip(t *testing.T) {
	s := &script{answers: map[string][]driver.Value{"SHOW": {"read committed"}}}
	st := newStore(t, s, sqlstore.PostgreSQL)
	_, err := st.Commit(t.Context(), store.CommitRequest{ID: "a", Log: make([]store.Entry, 1)})
	require.ErrorIs(t, err, store.ErrFenced)
	require.Len(t, s.log, 2, "it asks for the isolation once")
	for entries := range 9 {
		s.log = nil
		_, err := st.Commit(t.Context(),
			store.CommitRequest{ID: "a", Epoch: 1, Seq: 1, Log: make([]store.Entry, entries+1), Release: entries%2 == 0})
		require.ErrorIs(t, err, store.ErrFenced, "no row was updated")
		require.Len(t, s.log, 1)
		require.NotContains(t, s.log[0], "BEGIN")
	}
}

// TestSQLiteLocksBeforeItReads: a transaction that has read, while another process has
// written, cannot become the writer any more.
func TestSQLiteLocksBeforeItReads(t *testing.T) {
	for name, call := range map[string]func(*sqlstore.Store) error{
		"claim": func(st *sqlstore.Store) error {
			_, err := st.Claim(t.Context(),
				store.ClaimRequest{Limit: 1, Definitions: []store.Definition{{Saga: "trip", Version: 1}}})
			return err
		},
		"delete": func(st *sqlstore.Store) error {
			_, err := st.DeleteEnded(t.Context(), store.Completed, 0, 1)
			return err
		},
	} {
		// is due
		s := &script{answers: map[string][]driver.Value{"SELECT d.name, d.version": {"trip", int64(1), int64(0), "",
			int64(1), int64(0)}}}
		require.NoError(t, call(newStore(t, s, sqlstore.SQLite)), name)
		i := slices.Index(s.log, "BEGIN")
		require.Equal(t, "UPDATE saga SET seq = seq WHERE 0", s.log[i+1], name)
	}
}

// TestDeadlockIsRepeated: MySQL has rolled the transaction back.
func TestDeadlockIsRepeated(t *testing.T) {
	commits, state := 0, "40001"
	s := &script{
		answers: map[string][]driver.Value{"UPDATE saga SET status": {},
			"SELECT cancel_requested": {int64(1), "note", int64(0)}},
		onCommit: func() error {
			if commits++; commits < 3 {
				return sqlState(state)
			}
			return nil
		},
	}
	st := newStore(t, s, sqlstore.MySQL)
	rc, err := st.Commit(t.Context(), store.CommitRequest{ID: "a", Log: make([]store.Entry, 1)})
	require.NoError(t, err)
	require.Equal(t, store.Receipt{CancelRequested: true, CancelNote: "note"}, rc)
	require.Equal(t, 3, commits)
	commits, state = 0, "23000" // an answer
	_, err = st.Commit(t.Context(), store.CommitRequest{ID: "a", Log: make([]store.Entry, 1)})
	require.ErrorIs(t, err, sqlState("23000"))
	require.Equal(t, 1, commits)
}

// TestRepeatedHeartbeatReturnsEachSagaOnce: MySQL has rolled the first try back.
func TestRepeatedHeartbeatReturnsEachSagaOnce(t *testing.T) {
	commits := 0
	s := &script{
		answers: map[string][]driver.Value{"SELECT id, epoch": {"a", int64(1), int64(0), ""}},
		onCommit: func() error {
			if commits++; commits == 1 {
				return sqlState("40001")
			}
			return nil
		},
	}
	held := store.HeartbeatRequest{Owner: "me", Held: []store.Held{{ID: "a", Epoch: 1}}}
	renewed, err := newStore(t, s, sqlstore.MySQL).Heartbeat(t.Context(), held)
	require.NoError(t, err)
	require.Equal(t, []store.Renewed{{ID: "a", Epoch: 1}}, renewed)
	require.Equal(t, 2, commits)
}

// TestBusySQLiteIsNotRetried: it has waited for its busy_timeout, which no ctx ends. Ten repeats would keep
// the caller for ten times that.
func TestBusySQLiteIsNotRetried(t *testing.T) {
	commits := 0
	s := &script{
		answers: map[string][]driver.Value{"UPDATE saga SET status": {},
			"SELECT cancel_requested": {int64(0), "", int64(0)}},
		onCommit: func() error { commits++; return sqlState("40001") },
	}
	st := newStore(t, s, sqlstore.SQLite)
	_, err := st.Commit(t.Context(), store.CommitRequest{ID: "a", Log: make([]store.Entry, 1)})
	require.ErrorIs(t, err, sqlState("40001"))
	require.Equal(t, 1, commits)
}

type sqlState string

func (e sqlState) Error() string    { return "SQLSTATE " + string(e) }
func (e sqlState) SQLState() string { return string(e) }

// TestRolledBackBatchHasNoReceipts: what a try has written that was rolled back is not reported as
// written.
func TestRolledBackBatchHasNoReceipts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &script{answers: map[string][]driver.Value{
			"UPDATE saga SET status": {}, "SELECT cancel_requested": {int64(0), "", int64(0)},
		}}
		commits := 0
		s.onCommit = func() error {
			time.Sleep(time.Second)
			if commits++; commits == 2 { // of the batch
				delete(s.answers, "UPDATE saga SET status") // another owner has them all
				return sqlState("40001")
			}
			return nil
		}
		st := newStore(t, s, sqlstore.SQLite)
		errs := make(chan error, 3)
		for _, id := range []string{"first", "a", "b"} {
			go func() {
				_, err := st.Commit(t.Context(), store.CommitRequest{ID: id, Log: make([]store.Entry, 1)})
				errs <- err
			}()
			synctest.Wait()
		}
		require.NoError(t, <-errs, "the first")
		require.ErrorIs(t, <-errs, sqlState("40001"), "not fenced, as far as it knows")
		require.ErrorIs(t, <-errs, sqlState("40001"), "not fenced, as far as it knows")
	})
}

// TestWaitingWriterReturnsWithItsContext: neither next in turn nor behind that,
// and the turn of the others comes all the same.
func TestWaitingWriterReturnsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &script{
			// is due
			answers: map[string][]driver.Value{"SELECT d.name, d.version": {"trip", int64(1), int64(0), "", int64(1),
				int64(0)}},
			onCommit: func() error { time.Sleep(time.Minute); return nil },
		}
		st := newStore(t, s, sqlstore.SQLite)
		definitions := []store.Definition{{Saga: "trip", Version: 1}}
		calls := []func(context.Context) error{
			func(ctx context.Context) error { _, err := st.DeleteEnded(ctx, store.Completed, 0, 1); return err }, // has its turn
			func(ctx context.Context) error { _, err := st.DeleteEnded(ctx, store.Completed, 0, 1); return err }, // is next
			func(ctx context.Context) error { _, err := st.Begin(ctx); return err },
			func(ctx context.Context) error {
				_, err := st.Claim(ctx, store.ClaimRequest{Limit: 1, Definitions: definitions})
				return err
			},
			func(ctx context.Context) error {
				_, err := st.Heartbeat(ctx, store.HeartbeatRequest{Held: make([]store.Held, 1)})
				return err
			},
		}
		begun := time.Now()
		errs := make(chan error, len(calls))
		for i, call := range calls {
			go func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(len(calls)-i)*time.Second)
				defer cancel()
				errs <- call(ctx)
			}()
			synctest.Wait()
		}
		for i := range calls[1:] {
			require.ErrorIs(t, <-errs, context.DeadlineExceeded)
			require.Equal(t, time.Duration(i+1)*time.Second, time.Since(begun))
		}
		require.NoError(t, <-errs, "what is being written is written")
		_, err := st.Heartbeat(t.Context(), store.HeartbeatRequest{Held: make([]store.Held, 1)})
		require.NoError(t, err)
		require.Equal(t, 2*time.Minute, time.Since(begun))
	})
}

// TestHeartbeatSkipsTheQueue: it comes after one other at most, so that no lease
// is lost over how much there is to write.
func TestHeartbeatSkipsTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &script{onCommit: func() error { time.Sleep(time.Minute); return nil }}
		st := newStore(t, s, sqlstore.SQLite)
		for range 5 {
			go func() { _, _ = st.DeleteEnded(t.Context(), store.Completed, 0, 1) }()
			synctest.Wait()
		}
		begun := time.Now()
		_, err := st.Heartbeat(t.Context(), store.HeartbeatRequest{Held: make([]store.Held, 1)})
		require.NoError(t, err)
		require.Equal(t, 3*time.Minute, time.Since(begun), "what is written, what is next, itself")
		time.Sleep(time.Hour)
		synctest.Wait()
	})
}

// TestErrorsOfPoolersHaveAdvice by what PostgreSQL says of statements of another session.
func TestErrorsOfPoolersHaveAdvice(t *testing.T) {
	for state, want := range map[sqlState]bool{"26000": true, "42P05": true, "42P01": false} {
		_, err := newStore(t, &script{err: state}, sqlstore.PostgreSQL).Load(t.Context(), "a")
		require.ErrorIs(t, err, state)
		require.Equal(t, want, strings.Contains(err.Error(), "default_query_exec_mode=exec"), "%v", err)
	}
}

// TestCheckOfBusyDatabaseIsUndecided: a runner would end for good that begins while another process
// has them locked.
func TestCheckOfBusyDatabaseIsUndecided(t *testing.T) {
	for state, missing := range map[sqlState]bool{"42P01": true, "55P03": false, "40001": false} {
		err := newStore(t, &script{err: state}, sqlstore.PostgreSQL).Check(t.Context())
		require.ErrorIs(t, err, state)
		require.Equal(t, missing, errors.Is(err, store.ErrNotMigrated), "%v", err)
	}
}

// TestConcurrentMigrate: another process has made the tables just after this one has missed them.
func TestConcurrentMigrate(t *testing.T) {
	looks := 0
	s := &script{answers: map[string][]driver.Value{"SELECT version, compatible": {int64(1), int64(1)}}}
	s.onPrepare = func(_ context.Context, query string) error {
		if strings.HasPrefix(query, "SELECT version, compatible") {
			if looks++; looks == 1 {
				return sqlState("42P01")
			}
		}
		return nil
	}
	require.NoError(t, newStore(t, s, sqlstore.PostgreSQL).Migrate(t.Context()))
}

// TestCallsDoNotWaitForOtherStatements: while a MySQL hangs, a write takes no longer than
// its ctx, although another that came before it prepares the statements.
func TestCallsDoNotWaitForOtherStatements(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &script{onPrepare: func(ctx context.Context, _ string) error { <-ctx.Done(); return ctx.Err() }}
		st := newStore(t, s, sqlstore.MySQL)
		begun := time.Now()
		took := make(chan time.Duration, 2)
		for _, timeout := range []time.Duration{time.Hour, time.Second} {
			go func() {
				ctx, cancel := context.WithTimeout(t.Context(), timeout)
				defer cancel()
				if _, err := st.Post(ctx, store.PostRequest{ID: "a", Cancel: true}); !errors.Is(err, context.DeadlineExceeded) {
					t.Error(err)
				}
				took <- time.Since(begun)
			}()
			synctest.Wait()
		}
		require.Equal(t, time.Second, <-took)
		require.Equal(t, time.Hour, <-took)
	})
}

// TestPreparedStatementsAreReused: far from a MySQL, no single write has the time to
// prepare them all.
func TestPreparedStatementsAreReused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &script{
			answers: map[string][]driver.Value{"UPDATE saga SET status": {},
				"SELECT cancel_requested": {int64(0), "", int64(0)}},
			onPrepare: func(context.Context, string) error { time.Sleep(100 * time.Millisecond); return nil },
		}
		st := newStore(t, s, sqlstore.MySQL)
		for tries := 1; ; tries++ {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			_, err := st.Commit(ctx, store.CommitRequest{ID: "a", Log: make([]store.Entry, 1)})
			cancel()
			if err == nil {
				break
			}
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.Less(t, tries, 10)
		}
	})
}

func TestEmptyRequestsSendNothing(t *testing.T) {
	for _, dialect := range []sqlstore.Dialect{sqlstore.PostgreSQL, sqlstore.MySQL, sqlstore.SQLite} {
		s := new(script)
		st := newStore(t, s, dialect)
		recs, err := st.Claim(t.Context(), store.ClaimRequest{Limit: 10})
		require.NoError(t, err)
		require.Empty(t, recs)
		renewed, err := st.Heartbeat(t.Context(), store.HeartbeatRequest{Owner: "me"})
		require.NoError(t, err)
		require.Empty(t, renewed)
		require.Empty(t, s.log)
	}
}

func newStore(t *testing.T, s *script, dialect sqlstore.Dialect) *sqlstore.Store {
	t.Helper()
	db := open(s)
	t.Cleanup(func() { _ = db.Close() })
	store := sqlstore.New(db, dialect, sqlstore.Config{})
	return store
}

// A script is a database that returns the rows that a test has set, or
// always fails, and keeps the statements.
type script struct {
	answers  map[string][]driver.Value // one row, to what begins so, which changes one
	err      error
	onCommit func() error
	log      []string

	onPrepare func(ctx context.Context, query string) error // optional
	onExec    func(query string)                            // optional
}

func open(s *script) *sql.DB { return sql.OpenDB(s) }

func (s *script) Connect(context.Context) (driver.Conn, error) { return s, nil }
func (s *script) Driver() driver.Driver                        { return nil }
func (s *script) Close() error                                 { return nil }
func (s *script) Prepare(query string) (driver.Stmt, error)    { return &statement{s, query}, s.err }

func (s *script) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	if s.onPrepare != nil {
		if err := s.onPrepare(ctx, query); err != nil {
			return nil, err
		}
	}
	return s.Prepare(query)
}

func (s *script) Begin() (driver.Tx, error) { return s, s.asked("BEGIN") }
func (s *script) Commit() error {
	if err := s.asked("COMMIT"); err != nil || s.onCommit == nil {
		return err
	}
	return s.onCommit()
}
func (s *script) Rollback() error { return s.asked("ROLLBACK") }
func (s *script) BeginTx(context.Context, driver.TxOptions) (driver.Tx, error) {
	return s, s.asked("BEGIN")
}

func (s *script) asked(what string) error {
	s.log = append(s.log, what)
	return s.err
}

type statement struct {
	s     *script
	query string
}

func (st *statement) Close() error  { return nil }
func (st *statement) NumInput() int { return -1 }
func (st *statement) Exec([]driver.Value) (driver.Result, error) {
	if st.s.onExec != nil {
		st.s.onExec(st.query)
	}
	for begin := range st.s.answers {
		if strings.HasPrefix(st.query, begin) {
			return driver.RowsAffected(1), st.s.asked(st.query)
		}
	}
	return driver.RowsAffected(0), st.s.asked(st.query)
}

func (st *statement) Query([]driver.Value) (driver.Rows, error) {
	for begin, row := range st.s.answers {
		if strings.HasPrefix(st.query, begin) {
			return &rows{row, true}, st.s.asked(st.query)
		}
	}
	return new(rows), st.s.asked(st.query)
}

type rows struct {
	row  []driver.Value
	left bool
}

func (r *rows) Columns() []string { return make([]string, len(r.row)) }
func (r *rows) Close() error      { return nil }
func (r *rows) Next(dest []driver.Value) error {
	if !r.left {
		return io.EOF
	}
	r.left = false
	copy(dest, r.row)
	return nil
}
