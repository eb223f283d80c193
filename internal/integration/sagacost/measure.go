package main

import (
	"context"
	"database/sql"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	_ "github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

type nothing struct{}

// A server is a database that is created for the measurement, with the counters of its database server.
type server struct {
	dialect  sqlstore.Dialect
	driver   string
	dsn      string
	drop     func()
	process  string // part of the command line of the server's processes; "" if the database runs in this process
	counters func(context.Context, *sql.DB) (figures, error)
}

func newServer(ctx context.Context, kind string) (*server, error) {
	name := fmt.Sprint("sagacost_", rand.Uint32())
	admin := func(driver, dsn string) (*sql.DB, error) {
		db, err := sql.Open(driver, dsn)
		if err == nil {
			_, err = db.ExecContext(ctx, "CREATE DATABASE "+name)
		}
		return db, err
	}
	switch kind {
	case "postgres":
		db, err := admin("pgx", "postgres://postgres@127.0.0.1:5432/postgres")
		drop := func() { _, _ = db.Exec("DROP DATABASE " + name + " WITH (FORCE)") }
		dsn := "postgres://postgres@127.0.0.1:5432/" + name
		return &server{sqlstore.PostgreSQL, "pgx", dsn, drop, name, postgresCounters}, err
	case "mysql":
		db, err := admin("mysql", "root@tcp(127.0.0.1:3306)/")
		drop := func() { _, _ = db.Exec("DROP DATABASE " + name) }
		return &server{sqlstore.MySQL, "mysql", "root@tcp(127.0.0.1:3306)/" + name, drop, "mariadbd", mysqlCounters}, err
	case "sqlite":
		dir, err := os.MkdirTemp("", name)
		dsn := "file:" + filepath.Join(dir, "saga.db") + "?_txlock=immediate&_pragma=journal_mode(WAL)" +
			"&_pragma=busy_timeout(10000)&_pragma=synchronous(FULL)"
		none := func(context.Context, *sql.DB) (figures, error) { return nil, nil }
		return &server{sqlstore.SQLite, "sqlite", dsn, func() { _ = os.RemoveAll(dir) }, "", none}, err
	}
	return nil, fmt.Errorf("no such database: %q", kind)
}

func postgresCounters(ctx context.Context, db *sql.DB) (figures, error) {
	// The statistics of other connections are at most a second late.
	time.Sleep(1500 * time.Millisecond)
	var commits, wal float64
	const query = `SELECT xact_commit, pg_current_wal_insert_lsn() - '0/0' FROM pg_stat_database
WHERE datname = current_database()`
	err := db.QueryRowContext(ctx, query).Scan(&commits, &wal)
	return figures{"commits": commits, "WAL, bytes": wal}, err
}

func mysqlCounters(ctx context.Context, db *sql.DB) (figures, error) {
	rows, err := db.QueryContext(ctx, `SHOW GLOBAL STATUS
WHERE Variable_name IN ('Com_commit', 'Questions', 'Innodb_os_log_written')`)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	names := map[string]string{"com_commit": "commits", "questions": "statements", "innodb_os_log_written": "WAL, bytes"}
	got := figures{}
	for rows.Next() {
		var name string
		var v float64
		if err := rows.Scan(&name, &v); err != nil {
			return nil, err
		}
		got[names[strings.ToLower(name)]] = v
	}
	return got, rows.Err()
}

// ownCPU returns the CPU time of this process.
func ownCPU() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// cpu returns the CPU time of the server's processes that work for the database. MariaDB has one process for all
// databases. cpu itself takes a few milliseconds of this process's CPU time.
func (s *server) cpu() (servers time.Duration) {
	stats, _ := filepath.Glob("/proc/[0-9]*/task/*/schedstat")
	for _, file := range stats {
		title, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "../../cmdline"))
		if s.process == "" || !strings.Contains(string(title), s.process) {
			continue
		}
		b, _ := os.ReadFile(file)
		ran, _, _ := strings.Cut(string(b), " ")
		n, _ := strconv.Atoi(ran)
		servers += time.Duration(n)
	}
	return servers
}

// newStore calls sqlstore.New. In older commits, sqlstore.New has no Config parameter.
func newStore(db *sql.DB, dialect sqlstore.Dialect) *sqlstore.Store {
	create := reflect.ValueOf(sqlstore.New)
	args := []reflect.Value{reflect.ValueOf(db), reflect.ValueOf(dialect)}
	for i := len(args); i < create.Type().NumIn(); i++ {
		args = append(args, reflect.Zero(create.Type().In(i)))
	}
	return create.Call(args)[0].Interface().(*sqlstore.Store)
}

func define(what string, n int) (all []*saga.Saga[nothing]) {
	done := func(context.Context, *nothing) error { return nil }
	for i := range n {
		sg := &saga.Saga[nothing]{Name: fmt.Sprint("trip-", i)}
		for j := range 5 {
			step := saga.Step[nothing]{Name: fmt.Sprint("s", j), Do: done, Undo: done}
			shared := reflect.ValueOf(&step).Elem().FieldByName("Idempotent")
			if strings.HasSuffix(what, "idempotent") && shared.IsValid() {
				shared.SetBool(true)
				step.Undo = nil
			}
			sg.Steps = append(sg.Steps, step)
		}
		all = append(all, sg)
	}
	return all
}

func measure(ctx context.Context, s setup) (got figures, err error) {
	srv, err := newServer(ctx, s.Database)
	if err != nil {
		return nil, err
	}
	defer srv.drop()
	db, err := sql.Open(srv.driver, srv.dsn)
	if err != nil {
		return nil, err
	}
	defer db.Close()
	db.SetMaxOpenConns(16)
	db.SetMaxIdleConns(16)
	if err := newStore(db, srv.dialect).Migrate(ctx); err != nil {
		return nil, err
	}
	defined := define(s.What, s.Definitions)
	if *waiting > 0 {
		if err := fill(ctx, srv, db, defined, *waiting, 1000); err != nil {
			return nil, err
		}
	}
	if s.What == "claims" {
		return claims(ctx, srv, db, defined)
	}

	var stores []*sqlstore.Store
	for range *processes {
		pool, err := sql.Open(srv.driver, srv.dsn)
		if err != nil {
			return nil, err
		}
		defer pool.Close()
		pool.SetMaxOpenConns(16)
		pool.SetMaxIdleConns(16)
		stores = append(stores, newStore(pool, srv.dialect))
	}
	var completed atomic.Int64
	drained := make(chan struct{})
	count := func(_ context.Context, e saga.Event) {
		if e.Kind == saga.EventCompleted && completed.Add(1) == int64(*sagas) {
			close(drained)
		}
	}
	run := func(config saga.RunnerConfig, hear func(context.Context, saga.Event)) (runners []*saga.Runner, stop func()) {
		config.Retention.Completed = *keep
		ctx, cancel := context.WithCancel(ctx)
		var running sync.WaitGroup
		for _, st := range stores {
			r := saga.NewRunner(st, config)
			if hear != nil {
				r.Observe(hear)
			}
			for _, sg := range defined {
				saga.Register(r, sg)
			}
			running.Go(func() { _ = r.Run(ctx) })
			runners = append(runners, r)
		}
		return runners, func() { cancel(); running.Wait() }
	}
	runners, stop := run(saga.RunnerConfig{}, nil)
	defer func() { stop() }()
	if err := complete(ctx, runners, defined, "warm", min(*sagas/10+1, 1000)); err != nil {
		return nil, err
	}
	drain := strings.HasPrefix(s.What, "drain")
	if drain {
		stop()
		if err := fill(ctx, srv, db, defined, *sagas, 0); err != nil {
			return nil, err
		}
	}
	before, err := srv.counters(ctx, db)
	if err != nil {
		return nil, err
	}
	servers, own := srv.cpu(), ownCPU()
	begun := time.Now()
	switch {
	case s.What == "idle":
		time.Sleep(time.Minute)
	case drain:
		_, stop = run(saga.RunnerConfig{}, count)
		<-drained
	default:
		err = complete(ctx, runners, defined, "trip", *sagas)
	}
	if err != nil {
		return nil, err
	}
	took := time.Since(begun)
	ownAfter, serversAfter := ownCPU(), srv.cpu()
	after, err := srv.counters(ctx, db)
	if err != nil {
		return nil, err
	}
	n, each := float64(*sagas), " a saga"
	got = figures{}
	if s.What == "idle" {
		n, each = 60, " a second"
	} else {
		got["sagas a second"] = n / took.Seconds()
	}
	got["CPU, us"+each] = float64((ownAfter - own + serversAfter - servers).Microseconds()) / n
	if srv.process != "" {
		got["CPU of Go, us"+each] = float64((ownAfter - own).Microseconds()) / n
		got["CPU of the database, us"+each] = float64((serversAfter - servers).Microseconds()) / n
	}
	for name := range after {
		got[name+each] = (after[name] - before[name]) / n
	}
	return got, nil
}

// complete runs n sagas. Each runner runs 64 sagas at the same time.
func complete(
	ctx context.Context, runners []*saga.Runner, defined []*saga.Saga[nothing], prefix string, n int,
) (err error) {
	var wg sync.WaitGroup
	var once sync.Once
	next := make(chan int)
	for _, r := range runners {
		for range 64 {
			wg.Go(func() {
				for i := range next {
					sg, id := defined[i%len(defined)], fmt.Sprint(prefix, "-", i)
					_, failed := saga.Register(r, sg).Start(ctx, id, nothing{})
					if failed == nil {
						_, failed = saga.Register(r, sg).Result(ctx, id)
					}
					if failed != nil {
						once.Do(func() { err = failed })
					}
				}
			})
		}
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
	return err
}

// fill creates n sagas of the definitions, which are due after the given number of hours. It starts one saga of each
// definition and copies the rows.
func fill(ctx context.Context, srv *server, db *sql.DB, defined []*saga.Saga[nothing], n, hours int) error {
	r := saga.NewRunner(newStore(db, srv.dialect), saga.RunnerConfig{})
	for i, sg := range defined[:min(len(defined), n)] {
		if _, err := saga.Register(r, sg).Start(ctx, fmt.Sprint("wait-", hours, "-", i), nothing{}); err != nil {
			return err
		}
	}
	later, ours := fmt.Sprint(hours*3600_000_000), fmt.Sprintf(" WHERE id LIKE 'wait-%d-%%'", hours)
	if _, err := db.ExecContext(ctx, "UPDATE saga SET wake_at = created_at + "+later+ours); err != nil {
		return err
	}
	rows, err := db.QueryContext(ctx, "SELECT * FROM saga WHERE id = ''")
	if err != nil {
		return err
	}
	columns, err := rows.Columns()
	rows.Close()
	if err != nil {
		return err
	}
	columns = slices.DeleteFunc(columns, func(c string) bool {
		return c == "id" || c == "live" || c == "owned" || c == "ended_at"
	})
	list := strings.Join(columns, ", ")
	for have := min(len(defined), n); have < n; have = min(2*have, n) {
		text := fmt.Sprintf("INSERT INTO saga (id, %s) SELECT CONCAT(id, '-%d'), %s FROM saga%s LIMIT %d",
			list, have, list, ours, min(have, n-have))
		if _, err := db.ExecContext(ctx, text); err != nil {
			return err
		}
	}
	switch srv.dialect { // each database does this by itself, within a minute or within ten seconds
	case sqlstore.PostgreSQL:
		_, err = db.ExecContext(ctx, "VACUUM ANALYZE saga")
	case sqlstore.MySQL:
		_, err = db.ExecContext(ctx, "ANALYZE TABLE saga")
	}
	return err
}

// claims measures the duration of Claim when no saga is due, of Counts, and of the Heartbeat of 64 sagas. Each
// duration is the shortest of nine calls. claims uses reflection, because the request types are in another package in
// older commits.
func claims(ctx context.Context, srv *server, db *sql.DB, defined []*saga.Saga[nothing]) (figures, error) {
	got, st := figures{}, reflect.ValueOf(newStore(db, srv.dialect))
	call := func(name string, set func(req reflect.Value)) error {
		method := st.MethodByName(name)
		args := []reflect.Value{reflect.ValueOf(ctx)}
		if set != nil {
			req := reflect.New(method.Type().In(1)).Elem()
			set(req)
			args = append(args, req)
		}
		least, all := time.Duration(math.MaxInt64), time.Now()
		for i := 0; i < 9 && time.Since(all) < 10*time.Second; i++ {
			begun := time.Now()
			if err, failed := method.Call(args)[1].Interface().(error); failed {
				return err
			}
			least = min(least, time.Since(begun))
		}
		got[name+", ms"] = float64(least.Microseconds()) / 1000
		return nil
	}
	owned := func(req reflect.Value) {
		req.FieldByName("Owner").SetString("sagacost")
		req.FieldByName("LeaseTTL").SetInt(int64(15 * time.Second))
	}
	add := func(list reflect.Value, set func(reflect.Value)) {
		e := reflect.New(list.Type().Elem()).Elem()
		set(e)
		list.Set(reflect.Append(list, e))
	}
	if err := call("Claim", func(req reflect.Value) {
		owned(req)
		req.FieldByName("Limit").SetInt(64)
		for _, sg := range defined {
			add(req.FieldByName("Definitions"), func(d reflect.Value) { d.FieldByName("Saga").SetString(sg.Name) })
		}
	}); err != nil {
		return nil, err
	}
	if err := call("Counts", nil); err != nil {
		return nil, err
	}
	if *waiting == 0 {
		if err := fill(ctx, srv, db, defined[:1], 64, 1000); err != nil {
			return nil, err
		}
	}
	rows, err := db.QueryContext(ctx, "SELECT id FROM saga LIMIT 64")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var held []string
	for rows.Next() {
		var id string
		if err := rows.Scan(&id); err != nil {
			return nil, err
		}
		held = append(held, id)
	}
	rows.Close()
	ids := "'" + strings.Join(held, "', '") + "'"
	if _, err := db.ExecContext(ctx, "UPDATE saga SET owner = 'sagacost', epoch = 1 WHERE id IN ("+ids+")"); err != nil {
		return nil, err
	}
	return got, call("Heartbeat", func(req reflect.Value) {
		owned(req)
		for _, id := range held {
			add(req.FieldByName("Held"), func(h reflect.Value) {
				h.FieldByName("ID").SetString(id)
				h.FieldByName("Epoch").SetInt(1)
			})
		}
	})
}
