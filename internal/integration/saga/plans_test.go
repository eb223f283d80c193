package saga_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	"modernc.org/sqlite"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

var plansSagas = flag.Int("plans.sagas", 10000, "how many sagas have ended in TestStatementsReadNoWholeTable")

// TestStatementsReadNoWholeTable asks the database how it goes about each statement
// of a store in which almost all sagas have ended. What has to read them all takes
// a second where there are a million.
func TestStatementsReadNoWholeTable(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		db := d.open(t)
		sagas := *plansSagas
		fill(t, d, db, map[saga.Status]int{saga.Completed: sagas, saga.Compensated: 500, saga.Abandoned: 5,
			saga.Running: 1000, saga.Stuck: 20})
		_, err := db.Exec(`UPDATE saga SET parent = 'order', parent_step = 'parcels'
			WHERE status IN ('completed', 'stuck') AND id LIKE '%3'`)
		require.NoError(t, err)
		seen := new(recorder)
		st := sqlstore.New(seen.open(t, d), d.Dialect, sqlstore.Config{})
		ctx := t.Context()
		trip := []store.Definition{{Saga: "trip"}}
		_, err = st.Load(ctx, "trip-1") // what a store asks once
		require.NoError(t, err)
		list := func(f store.Filter) func() error {
			return func() error { _, _, err := st.List(ctx, f); return err }
		}
		for name, call := range map[string]func() error{
			"list running":               list(store.Filter{Status: []saga.Status{saga.Running}}),
			"list stuck, compensating":   list(store.Filter{Status: []saga.Status{saga.Stuck, saga.Compensating}}),
			"list abandoned":             list(store.Filter{Status: []saga.Status{saga.Abandoned}}),
			"list definition":            list(store.Filter{Saga: "trip"}),
			"list definition without":    list(store.Filter{Saga: "none"}),
			"list definition, abandoned": list(store.Filter{Saga: "trip", Status: []saga.Status{saga.Abandoned}}),
			"list no definition, status": list(store.Filter{Saga: "none", Status: []saga.Status{saga.Completed, saga.Stuck}}),
			"list newest":                list(store.Filter{}),
			"list newest of definition":  list(store.Filter{Saga: "trip", WithoutState: true}),
			"list started":               list(store.Filter{CreatedBefore: time.Now().Add(-time.Hour)}),
			"counts":                     func() error { _, err := st.Counts(ctx); return err },
			"load":                       func() error { _, err := st.Load(ctx, "trip-7"); return err },
			"history":                    func() error { _, err := st.History(ctx, "trip-7", 0, 100); return err },
			"delete": func() error {
				_,
					err := st.DeleteEnded(ctx, saga.Completed, time.Hour, 100)
				return err
			},
			"children": func() error {
				_, err := st.Children(ctx, store.ChildrenRequest{Parent: "trip-7", Step: "parcels"})
				return err
			},
			"children, unfinished": func() error {
				unfinished := []saga.Status{saga.Running, saga.Compensating, saga.Stuck}
				_, err := st.Children(ctx, store.ChildrenRequest{Parent: "order", Step: "parcels", Status: unfinished, Limit: 1})
				return err
			},
			"cancel": func() error { _, err := st.Post(ctx, store.PostRequest{ID: "trip-7", Cancel: true}); return err },
			"claim": func() error {
				_, err := st.Claim(ctx, store.ClaimRequest{Owner: "me", Limit: 64, Definitions: trip})
				return err
			},
			"heartbeat": func() error {
				_, err := st.Heartbeat(ctx, store.HeartbeatRequest{Owner: "me",
					Held: []store.Held{{ID: "trip-7", Epoch: 1}, {ID: "trip-8", Epoch: 1}}})
				return err
			},
			"commit": func() error {
				_, err := st.Commit(ctx, store.CommitRequest{ID: "trip-7", Log: make([]store.Entry, 1)})
				if err == store.ErrFenced {
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
					require.NotRegexp(t, `Seq Scan on (saga|saga_log)( |$)|^SCAN (saga|saga_log|s)( |$)`, line, "%s: %s\n%s",
						name, s.text, strings.Join(plan, "\n"))
				}
			}
		}
	})
}

// TestSignalBesideTheStartOfItsSaga locks the row first of all, and then wakes the saga: otherwise
// one that is written back meanwhile to wait may not be told.
func TestSignalBesideTheStartOfItsSaga(t *testing.T) {
	d := newDatabase(t, sqlstore.PostgreSQL) // the others have a lock by then
	start := func() {}
	seen := &recorder{before: func(text string) {
		if strings.Contains(text, "AS store_now") {
			start()
			start = func() {}
		}
	}}
	st := sqlstore.New(seen.open(t, d), d.Dialect, sqlstore.Config{})
	_, err := st.Post(t.Context(), store.PostRequest{ID: "trip", Name: "paid"})
	require.ErrorIs(t, err, store.ErrNotFound)
	start = func() {
		_, _, err := d.store(t).Start(t.Context(),
			store.StartRequest{ID: "trip", Saga: "trip", Status: saga.Running, Log: make([]store.Entry, 1)})
		require.NoError(t, err)
	}
	seen.take()
	_, err = st.Post(t.Context(), store.PostRequest{ID: "trip", Name: "paid"})
	require.NoError(t, err)
	asked := seen.take()
	require.Contains(t, asked[0].text, "FOR UPDATE")
	require.Contains(t, asked[len(asked)-1].text, "UPDATE saga SET woken = true")
}

// TestClaimFromABacklogIsCheap: PostgreSQL compiles (JIT) what it expects to cost
// 100 000, which takes it many times as long as the claim itself.
func TestClaimFromABacklogIsCheap(t *testing.T) {
	d := newDatabase(t, sqlstore.PostgreSQL)
	db := d.open(t)
	fill(t, d, db, map[saga.Status]int{saga.Running: 5000})
	seen := new(recorder)
	st := sqlstore.New(seen.open(t, d), d.Dialect, sqlstore.Config{})
	_, err := st.Claim(t.Context(),
		store.ClaimRequest{Owner: "me", Limit: 64, Definitions: []store.Definition{{Saga: "trip"}}})
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

// TestClaimAsksForNoDefinitionByItself counts the rows that a database reads for what every
// runner asks of it all the time, with 500 definitions.
func TestClaimAsksForNoDefinitionByItself(t *testing.T) {
	const definitions = 500
	onEach(t, func(t *testing.T, d database) {
		sagas := *plansSagas
		name := `'trip-' || (i % 500)`
		if d.Dialect == sqlstore.MySQL {
			name = `CONCAT('trip-', i % 500)`
		}
		// They are not due from the start: what an UPDATE leaves behind has to be read until no
		// transaction of other tests can see it.
		fillNamed(t, d, nil, name, time.Hour, map[saga.Status]int{saga.Running: sagas, saga.Completed: sagas})
		p, ctx := newProbe(t, d), t.Context()
		st := p.store
		known := []store.Definition{{Saga: "none"}}
		for i := range definitions {
			known = append(known, store.Definition{Saga: fmt.Sprint("trip-", i)})
		}
		claim := func(want int, known ...store.Definition) func() error {
			return func() error {
				recs, err := st.Claim(ctx, store.ClaimRequest{Owner: "me", LeaseTTL: time.Hour, Limit: 64, Definitions: known})
				require.Len(t, recs, want)
				return err
			}
		}
		counts := func() error {
			c, err := st.Counts(ctx)
			require.Len(t, c.Sagas, definitions)
			require.Equal(t, sagas/definitions, c.Sagas[7].Running)
			return err
		}
		wake := func() error {
			_, err := p.db.Exec(`UPDATE saga SET wake_at = created_at WHERE status = 'running'`)
			return err
		}
		list := func(f store.Filter) func() error {
			return func() error { _, _, err := st.List(ctx, f); return err }
		}
		const page = 8 * 101 // of each status, and once more to put them in order
		for _, ask := range []struct {
			name       string
			call       func() error
			statements int
			rows       int
		}{
			{"claim, nothing is due", claim(0, known...), 1, 4 * definitions},
			{"counts, nothing is due", counts, 3, 5*sagas + 8*definitions},
			{"list", list(store.Filter{}), 1, page},
			{"list running", list(store.Filter{Status: []saga.Status{saga.Running}}), 1, page},
			{"list stuck", list(store.Filter{Status: []saga.Status{saga.Stuck}}), 1, 50},
			{"list of a definition", list(store.Filter{Saga: "trip-7"}), 1, page},
			{"", wake, 0, 0},
			{"claim", claim(64, known...), 70, 4*definitions + 1000},
			{"claim of another service", claim(0, store.Definition{Saga: "none"}), 1, 4 * definitions},
			{"claim of the oldest version", claim(0, store.Definition{Saga: "trip-7", Version: 1}), 1, 4 * definitions},
			{"counts", counts, 3, 8*sagas + 8*definitions},
			{"heartbeat", func() error {
				var held []store.Held
				for i := range 64 {
					held = append(held, store.Held{ID: fmt.Sprint("trip-", i+1), Epoch: 1})
				}
				_, err := st.Heartbeat(ctx, store.HeartbeatRequest{Owner: "me", LeaseTTL: time.Hour, Held: held})
				return err
			}, 3, 500},
		} {
			if ask.name == "" {
				require.NoError(t, ask.call())
				continue
			}
			require.NoError(t, ask.call(), ask.name) // what is asked once, and prepared
			rows, statements := p.cost(t, ask.name, ask.call)
			require.LessOrEqual(t, len(statements), ask.statements, "%s: %s", ask.name, statements)
			require.LessOrEqual(t, rows, ask.rows, ask.name)
		}
	})
}

// TestClaimPaysNothingForSagasOfOthers: those of a version that nobody here knows may wait
// for days.
func TestClaimPaysNothingForSagasOfOthers(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		fill(t, d, nil, map[saga.Status]int{saga.Running: *plansSagas})
		p := newProbe(t, d)
		_, err := p.db.Exec(`UPDATE saga SET version = 1 WHERE id LIKE '%7'`)
		require.NoError(t, err)
		for name, known := range map[string]store.Definition{
			"nothing due":      {Saga: "other"},
			"nothing due here": {Saga: "trip", Version: 2},
		} {
			claim := func() error {
				recs, err := p.store.Claim(t.Context(),
					store.ClaimRequest{Owner: "me", LeaseTTL: time.Hour, Limit: 64, Definitions: []store.Definition{known}})
				require.Empty(t, recs)
				return err
			}
			require.NoError(t, claim())
			rows, statements := p.cost(t, name, claim)
			require.Len(t, statements, 1)
			require.LessOrEqual(t, rows, 50, name)
		}
		claim := func() error {
			recs, err := p.store.Claim(t.Context(),
				store.ClaimRequest{Owner: "me", LeaseTTL: time.Hour, Limit: 10,
					Definitions: []store.Definition{{Saga: "trip", Version: 1}}})
			require.Len(t, recs, 10)
			return err
		}
		require.NoError(t, claim())
		rows, _ := p.cost(t, "ten", claim)
		require.LessOrEqual(t, rows, 150)
	})
}

// TestBacklogHidesNoSaga that a claim wants: neither that of others, nor one whose first rows are locked.
func TestBacklogHidesNoSaga(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		db, st := d.open(t), d.store(t)
		name := `'other-' || i`
		if d.Dialect == sqlstore.MySQL {
			name = `CONCAT('other-', i)`
		}
		fillNamed(t, d, db, name, 0, map[saga.Status]int{saga.Running: 400})
		set := func(what, which string) {
			_, err := db.Exec(`UPDATE saga SET ` + what + ` WHERE ` + which)
			require.NoError(t, err)
		}
		claim := func(limit int, known ...store.Definition) (ids []string) {
			recs, err := st.Claim(t.Context(),
				store.ClaimRequest{Owner: "me", LeaseTTL: time.Hour, Limit: limit, Definitions: known})
			require.NoError(t, err)
			for _, rec := range recs {
				ids = append(ids, rec.ID)
			}
			return ids
		}
		const some = `(id LIKE '%1' OR id LIKE '%4' OR id LIKE '%7')`
		set(`wake_at = 2`, `id <> ''`)
		set(`owner = 'dead'`, some)
		set(`name = 'trip', wake_at = 3`, `id IN ('trip-1', 'trip-2')`)
		set(`name = 'trip', wake_at = 1`, `id = 'trip-3'`)
		trip := store.Definition{Saga: "trip"}
		require.Equal(t, []string{"trip-1"}, claim(1, trip), "its owner has crashed")
		require.Equal(t, []string{"trip-3"}, claim(1, trip))
		require.Equal(t, []string{"trip-2"}, claim(1, trip))
		if d.Dialect == sqlstore.SQLite {
			return // it has no locks of rows
		}
		var others []store.Definition
		for i := range 400 {
			others = append(others, store.Definition{Saga: fmt.Sprint("other-", i+1)})
		}
		set(`owner = '', wake_at = 2`, `name <> 'trip'`)
		set(`wake_at = 1`, some+` AND name <> 'trip'`)
		tx, err := db.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelReadCommitted})
		require.NoError(t, err)
		defer tx.Rollback()
		for i := 1; i <= 400; i++ { // MariaDB would lock what else it reads
			if id := fmt.Sprint("trip-", i); strings.ContainsAny(id[len(id)-1:], "147") {
				_, err := tx.Exec(`SELECT id FROM saga WHERE id = '` + id + `' FOR UPDATE`)
				require.NoError(t, err)
			}
		}
		require.Len(t, claim(10, others...), 10)
	})
}

// TestClaimReadsTheNextTenantsOnly, if many tenants have a due saga.
func TestClaimReadsTheNextTenantsOnly(t *testing.T) {
	const tenants, limit = 1000, 16
	onEach(t, func(t *testing.T, d database) {
		db := d.open(t)
		fill(t, d, db, map[saga.Status]int{saga.Running: 2 * tenants})
		last3 := `substr(id, -3)`
		if d.Dialect == sqlstore.PostgreSQL {
			last3 = `right(id, 3)`
		}
		_, err := db.Exec(`UPDATE saga SET tenant = ` + last3)
		require.NoError(t, err)
		require.NoError(t, db.Close())
		p := newProbe(t, d)
		seen := make(map[string]int)
		claim := func() error {
			recs, err := p.store.Claim(t.Context(), store.ClaimRequest{
				Owner: "me", LeaseTTL: time.Hour, Limit: limit, Definitions: []store.Definition{{Saga: "trip"}},
			})
			require.Len(t, recs, limit)
			for _, rec := range recs {
				seen[rec.Tenant]++
			}
			return err
		}
		require.NoError(t, claim()) // it finds that there are many
		for range 3 {
			require.NoError(t, claim())
		}
		rows, asked := p.cost(t, "claim", claim)
		require.Less(t, rows, 40*limit)
		require.LessOrEqual(t, len(asked), 4, asked)
		for _, s := range asked {
			plan := explain(t, d, p.db, s)
			require.NotRegexp(t, `Seq Scan on saga( |$)|SCAN saga( |$)`, strings.Join(plan, "\n"), s.text)
		}
		require.Len(t, seen, 5*limit, "each had one turn")
	})
}

// A probe is a store with one connection, which tells what its calls cost the database. No
// other connection may be open: PostgreSQL counts up to 10 seconds later what it has read.
type probe struct {
	database
	store *sqlstore.Store
	db    *sql.DB
	seen  *recorder
}

func newProbe(t *testing.T, d database) *probe {
	t.Helper()
	p := &probe{database: d, seen: new(recorder)}
	p.db = p.seen.open(t, d)
	p.db.SetMaxOpenConns(1)
	p.store = sqlstore.New(p.db, d.Dialect, sqlstore.Config{})
	return p
}

// cost returns how many rows and index entries the database reads for a call, and the
// statements of the call.
func (p *probe) cost(t *testing.T, name string, call func() error) (rows int, asked []statement) {
	t.Helper()
	p.seen.take()
	before, begun := p.read(t), time.Now()
	require.NoError(t, call(), name)
	took := time.Since(begun)
	if asked = p.seen.take(); p.Dialect == sqlstore.SQLite {
		rows = steps(t, strings.TrimPrefix(strings.Split(p.DSN, "?")[0], "file:"), asked) / stepsOfARow
	} else {
		rows = p.read(t) - before
	}
	t.Logf("%v %s: %d rows, %d statements", took, name, rows, len(asked))
	return rows, asked
}

// read returns how many rows and index entries the connection has read so far.
func (p *probe) read(t *testing.T) (n int) {
	t.Helper()
	switch p.Dialect {
	case sqlstore.MySQL:
		require.NoError(t, p.db.QueryRow(`SELECT CAST(sum(variable_value) AS int)
			FROM information_schema.session_status WHERE variable_name LIKE 'HANDLER_READ%'`).Scan(&n))
	case sqlstore.PostgreSQL:
		_, err := p.db.Exec(`SELECT pg_stat_force_next_flush()`) // from version 15 on
		require.NoError(t, err)
		require.NoError(t, p.db.QueryRow(`SELECT (SELECT sum(seq_tup_read)
			FROM pg_stat_user_tables WHERE schemaname = current_schema)
			+ (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE schemaname = current_schema)`).Scan(&n))
	}
	return n
}

// fill puts sagas of each status into the tables, with the definition "trip", and
// lets the planner know. With nil for db, it uses a connection of its own.
func fill(t testing.TB, d database, db *sql.DB, n map[saga.Status]int) {
	t.Helper()
	fillNamed(t, d, db, `'trip'`, 0, n)
}

// fillNamed is fill with definitions whose names are this expression of the number i, and with
// sagas that are due in a while.
func fillNamed(t testing.TB, d database, db *sql.DB, name string, dueIn time.Duration, n map[saga.Status]int) {
	t.Helper()
	if db == nil {
		db = d.open(t)
		defer db.Close()
	}
	first := 1
	now := "(extract(epoch FROM now()) * 1000000)::bigint"
	numbers := `generate_series(%d, %d) AS g(i)`
	blob := func(json string) string { return "'" + json + "'" }
	id, analyze := `'trip-' || i`, `ANALYZE`
	switch d.Dialect {
	case sqlstore.SQLite:
		now, analyze = "unixepoch() * 1000000", "" // a SQLite that nobody has analyzed plans well, too
		blob = func(json string) string { return "CAST('" + json + "' AS BLOB)" }
		numbers = `(WITH RECURSIVE g(i) AS (SELECT %d UNION ALL SELECT i + 1 FROM g WHERE i < %d) SELECT i FROM g)`
	case sqlstore.MySQL:
		now = "UNIX_TIMESTAMP() * 1000000"
		id, analyze = `CONCAT('trip-', i)`, `ANALYZE TABLE saga, saga_log`
		digit := `(SELECT 0 d UNION SELECT 1 UNION SELECT 2 UNION SELECT 3 UNION SELECT 4
			UNION SELECT 5 UNION SELECT 6 UNION SELECT 7 UNION SELECT 8 UNION SELECT 9)`
		sum, tables := "0", ""
		for i := range 1 + int(math.Log10(float64(1+max(1000, 3**plansSagas)))) {
			sum += fmt.Sprintf(" + %d * d%d.d", int(math.Pow10(i)), i)
			tables += fmt.Sprintf(", %s d%d", digit, i)
		}
		numbers = `(SELECT ` + sum + ` AS i FROM ` + tables[1:] + ` HAVING i BETWEEN %d AND %d) AS g`
	}
	wake := fmt.Sprint(now, " + ", dueIn.Microseconds())
	for _, status := range []saga.Status{saga.Completed, saga.Compensated, saga.Abandoned, saga.Running,
		saga.Compensating, saga.Stuck} {
		if n[status] == 0 {
			continue
		}
		last := first + n[status] - 1
		from := fmt.Sprintf(numbers, first, last)
		_, err := db.Exec(fmt.Sprintf(`INSERT INTO saga (
			id, name, version, status, data, steps, seq, nonce, owner, epoch, wake_at,
			last_error, cancel_note, created_at, updated_at)
			SELECT %s, %s, 0, '%s', %s, '{"steps":[]}', 1, 1, '', 0, %s, '', '', %s, %s FROM `,
			id, name, status, blob(`{}`), wake, now, now) + from)
		require.NoError(t, err)
		_, err = db.Exec(fmt.Sprintf(`INSERT INTO saga_log (saga_id, seq, step, op, event, attempt, epoch, error, at)
			SELECT %s, 1, '', '', 'created', 0, 0, '', %s FROM `, id, now) + from)
		require.NoError(t, err)
		first = last + 1
	}
	_, err := db.Exec(analyze)
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
	switch d.Dialect {
	case sqlstore.SQLite:
		explain = "EXPLAIN QUERY PLAN "
	case sqlstore.MySQL:
		explain = "EXPLAIN "
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
		if d.Dialect == sqlstore.MySQL {
			row := make([]sql.NullString, len(columns))
			for i := range into {
				into[i] = &row[i]
			}
			require.NoError(t, rows.Scan(into...))
			for i, column := range columns {
				line += fmt.Sprintf(" %s=%s", column, row[i].String)
				if column == "type" && row[i].String == "ALL" && (row[i-1].String == "saga" || row[i-1].String == "s") {
					line = "SCAN saga" + line
				}
			}
			plan = append(plan, line)
			continue
		}
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
	before func(text string) // called before each statement; optional

	mu   sync.Mutex
	seen []statement
}

func (r *recorder) add(text string, args []any) {
	if r.before != nil {
		r.before(text)
	}
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
	switch d.Dialect {
	case sqlstore.SQLite:
		db = sql.OpenDB(&recordedDB{driver: new(sqlite.Driver), r: r, dsn: d.DSN})
	case sqlstore.MySQL:
		db = sql.OpenDB(&recordedDB{driver: mysql.MySQLDriver{}, r: r, dsn: d.DSN})
	default:
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

// A recordedDB is a SQLite or a MySQL that a recorder listens to.
type recordedDB struct {
	driver driver.Driver
	r      *recorder
	dsn    string
}

func (d *recordedDB) Driver() driver.Driver { return d.driver }

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

func (c *recorded) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	return c.Conn.(driver.ConnBeginTx).BeginTx(ctx, opts)
}

func (c *recorded) Prepare(query string) (driver.Stmt, error) {
	stmt, err := c.Conn.Prepare(query)
	if err != nil {
		return nil, err
	}
	return &recordedStmt{stmt.(fullStmt), c.r, query}, nil
}

type fullStmt interface {
	driver.Stmt
	driver.StmtExecContext
	driver.StmtQueryContext
}

type recordedStmt struct {
	fullStmt
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
	return s.fullStmt.ExecContext(ctx, args)
}

func (s *recordedStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	s.record(args)
	return s.fullStmt.QueryContext(ctx, args)
}
