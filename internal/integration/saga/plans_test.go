package saga_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"flag"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	"modernc.org/sqlite"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

var plansSagas = flag.Int("plans.sagas", 20000, "how many sagas have ended in TestNothingReadsTheWholeTable")

// TestNothingReadsTheWholeTable asks the database how it goes about each statement
// of a store in which almost all sagas have ended. What has to read them all takes
// a second where there are a million.
func TestNothingReadsTheWholeTable(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		db := d.open(t)
		sagas := *plansSagas
		if raced && d.Dialect == sqlstore.SQLite {
			sagas /= 10
		}
		fill(t, d, db, map[saga.Status]int{saga.Completed: sagas, saga.Compensated: 500, saga.Abandoned: 5, saga.Running: 1000, saga.Stuck: 20})
		seen := new(recorder)
		store, err := sqlstore.New(seen.open(t, d), d.Dialect)
		require.NoError(t, err)
		ctx := t.Context()
		trip := []saga.Definition{{Saga: "trip"}}
		_, err = store.Load(ctx, "trip-1") // what a store asks once
		require.NoError(t, err)
		list := func(f saga.Filter) func() error {
			return func() error { _, err := store.List(ctx, f); return err }
		}
		for name, call := range map[string]func() error{
			"list all":                   list(saga.Filter{After: "trip-5"}),
			"list running":               list(saga.Filter{Status: []saga.Status{saga.Running}}),
			"list stuck, compensating":   list(saga.Filter{Status: []saga.Status{saga.Stuck, saga.Compensating}}),
			"list unreported":            list(saga.Filter{Status: []saga.Status{saga.Stuck}, Unreported: true}),
			"list abandoned":             list(saga.Filter{Status: []saga.Status{saga.Abandoned}}),
			"list compensated":           list(saga.Filter{Status: []saga.Status{saga.Compensated}, After: "trip-5"}),
			"list definition":            list(saga.Filter{Saga: "trip"}),
			"list definition without":    list(saga.Filter{Saga: "none"}),
			"list definition, abandoned": list(saga.Filter{Saga: "trip", Status: []saga.Status{saga.Abandoned}}),
			"list no definition, status": list(saga.Filter{Saga: "none", Status: []saga.Status{saga.Completed, saga.Stuck}}),
			"load":                       func() error { _, err := store.Load(ctx, "trip-7"); return err },
			"history":                    func() error { _, err := store.History(ctx, "trip-7"); return err },
			"unregistered, none":         func() error { _, err := store.Unregistered(ctx, trip); return err },
			"unregistered, all":          func() error { _, err := store.Unregistered(ctx, nil); return err },
			"delete":                     func() error { _, err := store.DeleteEnded(ctx, time.Hour, 100); return err },
			"reported":                   func() error { return store.Reported(ctx, "trip-7", 1) },
			"cancel":                     func() error { _, err := store.Cancel(ctx, "trip-7", ""); return err },
			"claim": func() error {
				_, err := store.Claim(ctx, saga.ClaimRequest{Owner: "me", Limit: 64, Definitions: trip})
				return err
			},
			"heartbeat": func() error {
				_, err := store.Heartbeat(ctx, saga.HeartbeatRequest{Owner: "me", Held: []saga.Held{{ID: "trip-7", Epoch: 1}, {ID: "trip-8", Epoch: 1}}})
				return err
			},
			"commit": func() error {
				_, err := store.Commit(ctx, saga.CommitRequest{ID: "trip-7", Log: make([]saga.Entry, 1)})
				if err == saga.ErrFenced {
					err = nil
				}
				return err
			},
		} {
			seen.take()
			begun := time.Now()
			require.NoError(t, call(), name)
			took := time.Since(begun)
			t.Logf("%v %s", took, name)
			asked := seen.take()
			require.NotEmpty(t, asked, name)
			for _, s := range asked {
				plan := explain(t, d, db, s)
				for _, line := range plan {
					require.NotRegexp(t, `Seq Scan on saga|^SCAN (saga|s)\b`, line, "%s: %s\n%s", name, s.text, strings.Join(plan, "\n"))
				}
			}
		}
	})
}

// TestABacklogMakesNoClaimExpensive: PostgreSQL compiles (JIT) what it expects to cost
// 100 000, which takes it many times as long as the claim itself.
func TestABacklogMakesNoClaimExpensive(t *testing.T) {
	d := newDatabase(t, sqlstore.PostgreSQL)
	db := d.open(t)
	fill(t, d, db, map[saga.Status]int{saga.Running: 5000})
	seen := new(recorder)
	store, err := sqlstore.New(seen.open(t, d), d.Dialect)
	require.NoError(t, err)
	_, err = store.Claim(t.Context(), saga.ClaimRequest{Owner: "me", Limit: 64, Definitions: []saga.Definition{{Saga: "trip"}}})
	require.NoError(t, err)
	for _, s := range seen.take() {
		var plan []struct {
			Plan struct {
				TotalCost float64 `json:"Total Cost"`
			}
		}
		var text string
		require.NoError(t, db.QueryRow("EXPLAIN (FORMAT JSON) "+s.text, s.args...).Scan(&text))
		require.NoError(t, json.Unmarshal([]byte(text), &plan))
		require.Less(t, plan[0].Plan.TotalCost, 1000.0)
		t.Log(plan[0].Plan.TotalCost)
	}
}

// fill puts sagas of each status into the tables, with the definition "trip", and
// lets the planner know.
func fill(t testing.TB, d database, db *sql.DB, n map[saga.Status]int) {
	t.Helper()
	first := 1
	now := "now()"
	numbers := `generate_series(%d, %d) AS g(i)`
	if d.Dialect == sqlstore.SQLite {
		now = "unixepoch() * 1000"
		numbers = `(WITH RECURSIVE g(i) AS (SELECT %d UNION ALL SELECT i + 1 FROM g WHERE i < %d) SELECT i FROM g)`
	}
	for _, status := range []saga.Status{saga.Completed, saga.Compensated, saga.Abandoned, saga.Running, saga.Compensating, saga.Stuck} {
		if n[status] == 0 {
			continue
		}
		last := first + n[status] - 1
		from := fmt.Sprintf(numbers, first, last)
		_, err := db.Exec(fmt.Sprintf(`INSERT INTO saga (id, name, version, status, data, steps, seq, nonce, owner, epoch, wake_at, created_at, updated_at)
			SELECT 'trip-' || i, 'trip', 0, '%s', '{}', '{"steps":[]}', 1, 1, '', 0, %s, %s, %s FROM `, status, now, now, now) + from)
		require.NoError(t, err)
		_, err = db.Exec(fmt.Sprintf(`INSERT INTO saga_log (saga_id, seq, step, op, event, attempt, epoch, error, at)
			SELECT 'trip-' || i, 1, '', '', 'created', 0, 0, '', %s FROM `, now) + from)
		require.NoError(t, err)
		first = last + 1
	}
	_, err := db.Exec(`ANALYZE`)
	require.NoError(t, err)
}

// A statement is one that a store has sent.
type statement struct {
	text string
	args []any
}

func explain(t *testing.T, d database, db *sql.DB, s statement) []string {
	t.Helper()
	explain := "EXPLAIN (COSTS OFF) "
	if d.Dialect == sqlstore.SQLite {
		explain = "EXPLAIN QUERY PLAN "
	}
	rows, err := db.Query(explain+s.text, s.args...)
	require.NoError(t, err, s.text)
	defer rows.Close()
	columns, err := rows.Columns()
	require.NoError(t, err)
	var plan []string
	for rows.Next() {
		var line string
		into := make([]any, len(columns))
		for i := range into {
			into[i] = new(any)
		}
		into[len(into)-1] = &line
		require.NoError(t, rows.Scan(into...))
		plan = append(plan, line)
	}
	require.NoError(t, rows.Err())
	return plan
}

// A recorder keeps the statements that go through the databases that it opens.
type recorder struct {
	mu   sync.Mutex
	seen []statement
}

func (r *recorder) add(text string, args []any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seen = append(r.seen, statement{text, args})
}

func (r *recorder) take() []statement {
	r.mu.Lock()
	defer r.mu.Unlock()
	seen := r.seen
	r.seen = nil
	return slices.DeleteFunc(seen, func(s statement) bool {
		return !strings.Contains(s.text, "saga") || strings.HasSuffix(s.text, "WHERE 0") // BEGIN, a lock
	})
}

func (r *recorder) open(t *testing.T, d database) *sql.DB {
	t.Helper()
	var db *sql.DB
	if d.Dialect == sqlstore.SQLite {
		db = sql.OpenDB(&recordedDB{r: r, dsn: d.DSN})
	} else {
		config, err := pgx.ParseConfig(d.DSN)
		require.NoError(t, err)
		config.Tracer = r
		db = stdlib.OpenDB(*config)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

func (r *recorder) TraceQueryStart(ctx context.Context, _ *pgx.Conn, start pgx.TraceQueryStartData) context.Context {
	r.add(start.SQL, start.Args)
	return ctx
}

func (r *recorder) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A recordedDB is a SQLite that a recorder listens to.
type recordedDB struct {
	driver sqlite.Driver
	r      *recorder
	dsn    string
}

func (d *recordedDB) Driver() driver.Driver { return &d.driver }

func (d *recordedDB) Connect(context.Context) (driver.Conn, error) {
	conn, err := d.driver.Open(d.dsn)
	return &recorded{conn, d.r}, err
}

// A recorded connection only prepares, so that database/sql does all by
// statements.
type recorded struct {
	driver.Conn
	r *recorder
}

func (c *recorded) Prepare(query string) (driver.Stmt, error) {
	stmt, err := c.Conn.Prepare(query)
	if err != nil {
		return nil, err
	}
	return &recordedStmt{stmt.(sqliteStmt), c.r, query}, nil
}

type sqliteStmt interface {
	driver.Stmt
	driver.StmtExecContext
	driver.StmtQueryContext
}

type recordedStmt struct {
	sqliteStmt
	r    *recorder
	text string
}

func (s *recordedStmt) record(args []driver.NamedValue) {
	list := make([]any, len(args))
	for i, a := range args {
		list[i] = a.Value
	}
	s.r.add(s.text, list)
}

func (s *recordedStmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	s.record(args)
	return s.sqliteStmt.ExecContext(ctx, args)
}

func (s *recordedStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	s.record(args)
	return s.sqliteStmt.QueryContext(ctx, args)
}
