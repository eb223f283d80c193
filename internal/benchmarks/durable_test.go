package benchmarks

import (
	"context"
	"crypto/rand"
	"database/sql"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dbos-inc/dbos-transact-golang/dbos"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga/sqlstore"
)

func BenchmarkDurable(b *testing.B) { benchmark(b, durableCases) }

// durableCases are five steps that do nothing, each of which is durable in PostgreSQL before the next begins. One
// iteration is some of them, one after the other or 32 at once, on 16 connections. Their figures are for each
// saga: of CPU time, that of this process and that of the server's processes for the connections.
var durableCases = []comparison{
	{"alone", durableImpls(40, 1)},
	{"32-at-once", durableImpls(320, sagasInFlight)},
}

func durableImpls(sagas, inFlight int) []impl {
	return []impl{
		{"resilience", func(b *testing.B) { benchmarkDurable(b, openDurableSaga, sagas, inFlight) }},
		{"dbos", func(b *testing.B) { benchmarkDurable(b, openDBOS, sagas, inFlight) }},
		{"river", func(b *testing.B) { benchmarkDurable(b, openRiver, sagas, inFlight) }},
	}
}

// An engine runs sagas on a database of its own.
type engine struct {
	run  func(id string) error // a saga, to its end
	stop func()
	idle func() []idleConn // its connections that do nothing
}

type idleConn struct {
	exec    func(text string) error
	release func()
}

func benchmarkDurable(b *testing.B, open func(b *testing.B, config *pgxpool.Config) engine, sagas, inFlight int) {
	db := newServerDatabase(b)
	e := open(b, db.config)
	b.Cleanup(e.stop)
	round := func(name string, sagas int) {
		var next atomic.Int64
		var wg sync.WaitGroup
		for range inFlight {
			wg.Go(func() {
				for i := next.Add(1); i <= int64(sagas); i = next.Add(1) {
					if err := e.run(fmt.Sprint(name, "-", i)); err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
	}
	round("warm", sagas) // opens the connections, whose statements are planned anew for the first five times
	before := db.told(b, e)
	before.server, before.own = db.cpu(), cpu() // last, so that they are of the sagas alone
	b.ResetTimer()
	n := 0
	for b.Loop() {
		round(strconv.Itoa(n), sagas)
		n += sagas
	}
	b.StopTimer()
	own, server := cpu(), db.cpu()
	after := db.told(b, e)
	after.own, after.server = own, server
	each := func(unit string, of func(spent) float64) {
		b.ReportMetric((of(after)-of(before))/float64(n), unit+"/saga")
	}
	each("go-cpu-ms", func(s spent) float64 { return s.own.Seconds() * 1000 })
	each("statements", func(s spent) float64 { return s.statements })
	each("commits", func(s spent) float64 { return s.commits })
	each("wal-kB", func(s spent) float64 { return s.wal / 1000 })
	if after.server > 0 { // it is on this machine
		each("db-cpu-ms", func(s spent) float64 { return s.server.Seconds() * 1000 })
	}
	each("cpu-ms", func(s spent) float64 { return (s.own + s.server).Seconds() * 1000 })
}

// openDurableSaga also waits until the Runner has begun to run, and holds what it starts.
func openDurableSaga(b *testing.B, config *pgxpool.Config) engine {
	db := stdlib.OpenDB(*config.ConnConfig)
	db.SetMaxOpenConns(connections)
	db.SetMaxIdleConns(connections)
	store := sqlstore.New(db, sqlstore.PostgreSQL, sqlstore.Config{})
	succeeded(b, store.Migrate(context.Background()))
	run, stop := newRunner(b, store)
	return engine{
		run:  run,
		stop: func() { stop(); _ = db.Close() },
		idle: func() (list []idleConn) {
			for range db.Stats().Idle {
				conn, err := db.Conn(context.Background())
				succeeded(b, err)
				list = append(list, idleConn{
					func(text string) error { _, err := conn.ExecContext(context.Background(), text); return err },
					func() { _ = conn.Close() },
				})
			}
			return list
		},
	}
}

func openDBOS(b *testing.B, config *pgxpool.Config) engine {
	pool := openPool(b, config)
	ctx, err := dbos.NewContext(context.Background(), dbos.Config{
		AppName: "benchmarks", SystemDBPool: pool, Logger: slog.New(slog.DiscardHandler),
	})
	succeeded(b, err)
	dbos.RegisterWorkflow(ctx, dbosTrip)
	succeeded(b, dbos.Launch(ctx))
	return engine{
		run: func(id string) error {
			handle, err := dbos.RunWorkflow(ctx, dbosTrip, benchmarkTrip{ID: id}, dbos.WithWorkflowID(id))
			if err == nil {
				_, err = handle.GetResult()
			}
			return err
		},
		stop: func() { _ = dbos.Shutdown(ctx, 10*time.Second); pool.Close() },
		idle: func() []idleConn { return idleOf(pool) },
	}
}

func dbosTrip(ctx dbos.Context, s benchmarkTrip) (benchmarkTrip, error) {
	for _, st := range benchmarkSaga().Steps {
		next, err := dbos.RunAsStep(ctx, func(ctx context.Context) (benchmarkTrip, error) {
			next := s
			return next, st.Do(ctx, &next)
		}, dbos.WithStepName(st.Name))
		if err != nil {
			return s, err
		}
		s = next
	}
	return s, nil
}

// openRiver makes a saga one job, which records each step in a transaction, as River has it for steps that must be
// durable. The state is not recorded.
func openRiver(b *testing.B, config *pgxpool.Config) engine {
	pool := openPool(b, config)
	ctx := context.Background()
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), nil)
	succeeded(b, err)
	_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
	succeeded(b, err)
	workers := river.NewWorkers()
	river.AddWorker(workers, &riverWorker{pool: pool})
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		Logger: slog.New(slog.DiscardHandler), Workers: workers,
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: sagasInFlight}},
	})
	succeeded(b, err)
	completed, cancel := client.Subscribe(river.EventKindJobCompleted)
	var ended sync.Map
	var told sync.WaitGroup
	told.Go(func() {
		for e := range completed {
			done, _ := ended.LoadOrStore(e.Job.ID, make(chan struct{}))
			close(done.(chan struct{}))
		}
	})
	succeeded(b, client.Start(ctx))
	return engine{
		run: func(id string) error {
			job, err := client.Insert(ctx, riverTrip{benchmarkTrip{ID: id}}, nil)
			if err != nil {
				return err
			}
			done, _ := ended.LoadOrStore(job.Job.ID, make(chan struct{}))
			<-done.(chan struct{})
			ended.Delete(job.Job.ID)
			return nil
		},
		stop: func() { _ = client.Stop(ctx); cancel(); told.Wait(); pool.Close() },
		idle: func() []idleConn { return idleOf(pool) },
	}
}

type riverTrip struct{ benchmarkTrip }

func (riverTrip) Kind() string { return "trip" }

type riverWorker struct {
	river.WorkerDefaults[riverTrip]
	pool *pgxpool.Pool
}

func (w *riverWorker) Work(ctx context.Context, job *river.Job[riverTrip]) error {
	s := job.Args.benchmarkTrip
	for _, st := range benchmarkSaga().Steps {
		river.ResumableStep(ctx, st.Name, nil, func(ctx context.Context) error {
			if err := st.Do(ctx, &s); err != nil {
				return err
			}
			return pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
				_, err := river.ResumableSetStepTx[*riverpgxv5.Driver](ctx, tx, job)
				return err
			})
		})
	}
	return nil
}

func openPool(b *testing.B, config *pgxpool.Config) *pgxpool.Pool {
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	succeeded(b, err)
	return pool
}

func idleOf(pool *pgxpool.Pool) (list []idleConn) {
	for _, conn := range pool.AcquireAllIdle(context.Background()) {
		list = append(list, idleConn{
			func(text string) error { _, err := conn.Exec(context.Background(), text); return err },
			conn.Release,
		})
	}
	return list
}

// A serverDatabase is a database of its own on PostgreSQL.
type serverDatabase struct {
	name   string
	admin  *sql.DB
	config *pgxpool.Config
	sent   atomic.Int64 // statements
	asked  int          // of them, by told
}

func newServerDatabase(b *testing.B) *serverDatabase {
	dsn := postgresDSN()
	admin, err := sql.Open("pgx", dsn)
	succeeded(b, err)
	d := &serverDatabase{name: "bench_" + strings.ToLower(rand.Text()[:12]), admin: admin}
	if _, err := admin.Exec("CREATE DATABASE " + d.name); err != nil {
		skipWithoutPostgres(b, err)
	}
	b.Cleanup(func() {
		_, err := admin.Exec("DROP DATABASE " + d.name + " WITH (FORCE)")
		require.NoError(b, err)
		_ = admin.Close()
	})
	d.config, err = pgxpool.ParseConfig(dsn)
	succeeded(b, err)
	d.config.MaxConns = connections
	d.config.ConnConfig.Database = d.name
	d.config.ConnConfig.Tracer = d
	return d
}

// TraceQueryStart implements [pgx.QueryTracer].
func (d *serverDatabase) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	d.sent.Add(1)
	return ctx
}

// TraceQueryEnd implements [pgx.QueryTracer].
func (d *serverDatabase) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// TraceBatchStart implements [pgx.BatchTracer].
func (d *serverDatabase) TraceBatchStart(
	ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData,
) context.Context {
	d.sent.Add(int64(data.Batch.Len()))
	return ctx
}

// TraceBatchQuery implements [pgx.BatchTracer].
func (d *serverDatabase) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

// TraceBatchEnd implements [pgx.BatchTracer].
func (d *serverDatabase) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// spent is what a database and this process have spent so far.
type spent struct {
	own, server              time.Duration // of CPU
	statements, commits, wal float64
}

// told returns what the server has counted. Its processes tell it within ten seconds what they have done; this asks
// for it.
func (d *serverDatabase) told(b *testing.B, e engine) (s spent) {
	idle := e.idle()
	for _, conn := range idle {
		succeeded(b, conn.exec("SELECT pg_stat_force_next_flush()")) // from version 15 on
	}
	for _, conn := range idle {
		conn.release()
	}
	d.asked += len(idle)
	err := d.admin.QueryRow(`SELECT xact_commit, pg_current_wal_lsn() - '0/0' FROM pg_stat_database
		WHERE datname = $1`, d.name).Scan(&s.commits, &s.wal)
	succeeded(b, err)
	s.commits -= float64(d.asked)
	s.statements = float64(d.sent.Load()) - float64(d.asked)
	return s
}

// cpu returns the CPU time of the server's processes for this database, or zero if the server is elsewhere.
func (d *serverDatabase) cpu() (sum time.Duration) {
	stats, _ := filepath.Glob("/proc/[0-9]*/schedstat")
	for _, file := range stats {
		title, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "cmdline"))
		if strings.Contains(string(title), d.name) {
			b, _ := os.ReadFile(file)
			ran, _, _ := strings.Cut(string(b), " ")
			n, _ := strconv.Atoi(ran)
			sum += time.Duration(n)
		}
	}
	return sum
}
