// Package failover_test has the roles of two database servers change behind one address, while
// everything of this library that writes to a database uses it.
package failover_test

import (
	"context"
	"database/sql"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/faultproxy"
	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/sqllease"
	"github.com/go-resilience/resilience/resiliencepgx"
	"github.com/go-resilience/resilience/resiliencesql"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

// A user writes to the database.
type user struct {
	name  string
	write func(ctx context.Context) error // one attempt
	read  func(ctx context.Context) error // keeps connections of its pool in use
}

// A world is what uses the database: each user has a pool of its own.
type world struct {
	t       *testing.T
	driver  string
	dsn     string // through the proxy
	dialect sqlstore.Dialect
	users   []user
	last    atomic.Int64 // id
	moved   atomic.Int64 // the last id when the address led to the new primary
}

// pool is how many connections a pool has.
const pool = 4

func (w *world) open() *sql.DB {
	db, err := sql.Open(w.driver, w.dsn)
	require.NoError(w.t, err)
	db.SetMaxOpenConns(pool)
	db.SetMaxIdleConns(pool)
	w.t.Cleanup(func() { _ = db.Close() })
	return db
}

func (w *world) id() string { return fmt.Sprint(w.last.Add(1)) }

func (w *world) add(name string, db *sql.DB, write func(context.Context) error) {
	w.users = append(w.users, user{name, write, func(ctx context.Context) error {
		return db.QueryRowContext(ctx, "SELECT count(*) FROM book").Scan(new(int))
	}})
}

func (w *world) insert() string {
	if w.dialect == sqlstore.PostgreSQL {
		return "INSERT INTO book (id) VALUES ($1)"
	}
	return "INSERT INTO book (id) VALUES (?)"
}

func (w *world) sqlTx(name string, options *sql.TxOptions) {
	db, insert := w.open(), w.insert()
	w.add(name, db, func(ctx context.Context) error {
		return resiliencesql.InTx(ctx, db, resiliencesql.Config{Options: options},
			func(ctx context.Context, tx *sql.Tx) error {
				_, err := tx.ExecContext(ctx, insert, w.id())
				return err
			})
	})
}

func (w *world) pgxTx() {
	config, err := pgxpool.ParseConfig(w.dsn)
	require.NoError(w.t, err)
	config.MaxConns = pool
	p, err := pgxpool.NewWithConfig(w.t.Context(), config)
	require.NoError(w.t, err)
	w.t.Cleanup(p.Close)
	w.users = append(w.users, user{"resiliencepgx.InTx", func(ctx context.Context) error {
		return resiliencepgx.InTx(ctx, p, resiliencepgx.Config{}, func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, w.insert(), w.id())
			return err
		})
	}, func(ctx context.Context) error {
		return p.QueryRow(ctx, "SELECT count(*) FROM book").Scan(new(int))
	}})
}

func (w *world) participant() {
	db, insert := w.open(), w.insert()
	w.add("saga.Apply", db, func(ctx context.Context) error {
		ctx = saga.WithCommand(ctx, saga.Command{ID: "saga-" + w.id() + "/step/step/do"})
		return saga.Apply(ctx, db, func(tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, insert, w.id())
			return err
		})
	})
}

func (w *world) leases() {
	db := w.open()
	store := sqllease.New(db, sqllease.Dialect(w.dialect), sqllease.Config{})
	w.add("sqllease", db, func(ctx context.Context) error {
		c := lease.New(store, lease.Config{Name: "lease-" + w.id(), TTL: 30 * time.Second})
		c.Observe(func(context.Context, lease.Event) {}) // no warnings
		term, err := c.TryCampaign(ctx)
		if err != nil {
			return err
		}
		return term.Resign(ctx)
	})
}

// order is the state of a saga.
type order struct{ ID string }

// sagas returns how many sagas have ended, of those that were started.
func (w *world) sagas() (ended, started *atomic.Int64) {
	ended, started = new(atomic.Int64), new(atomic.Int64)
	db, insert := w.open(), w.insert()
	def := &saga.Saga[order]{Name: "order", Steps: []saga.Step[order]{{
		Name: "book", Attempts: saga.Unlimited, // none is the last, however long the outage
		DoTx: func(ctx context.Context, tx *sql.Tx, s *order) error {
			_, err := tx.ExecContext(ctx, insert, "step-"+s.ID)
			return err
		},
		Undo: func(context.Context, *order) error { return nil },
	}, {
		Name: "ship",
		Do:   func(context.Context, *order) error { return nil },
		Undo: func(context.Context, *order) error { return nil },
	}}}
	runner := saga.NewRunner(sqlstore.New(db, w.dialect, sqlstore.Config{}), saga.RunnerConfig{
		Poll: 100 * time.Millisecond, LeaseTTL: 3 * time.Second,
	})
	runner.Observe(func(_ context.Context, e saga.Event) {
		id, _ := strconv.ParseInt(e.ID, 10, 64)
		if moved := w.moved.Load(); e.Kind == saga.EventStepDone && moved > 0 && id > moved && e.Attempt > 2 {
			w.t.Errorf("DoTx: %d attempts after the roles have changed", e.Attempt)
		}
		if e.Kind == saga.EventCompleted {
			ended.Add(1)
		}
	})
	sagas := saga.Register(runner, def)
	var work sync.WaitGroup
	ctx, stop := context.WithCancel(context.Background())
	work.Go(func() { _ = runner.Run(ctx) })
	w.t.Cleanup(func() { stop(); work.Wait() })
	w.add("saga.Start", db, func(ctx context.Context) error {
		id := w.id()
		_, err := sagas.Start(ctx, id, order{id})
		if err == nil {
			started.Add(1)
		}
		return err
	})
	return ended, started
}

// TestWritesAreBackWithinTwoAttempts: the servers change roles, while the address still leads to
// the old primary, which only reads now and fills the pools with connections that work. Then the
// address leads to the new one.
func TestWritesAreBackWithinTwoAttempts(t *testing.T) {
	_ = mysql.SetLogger(&mysql.NopLogger{})
	for _, dialect := range []sqlstore.Dialect{sqlstore.PostgreSQL, sqlstore.MySQL} {
		t.Run(string(dialect), func(t *testing.T) {
			w := &world{t: t, dialect: dialect, driver: "pgx"}
			var pair *services.Pair
			if dialect == sqlstore.PostgreSQL {
				pair = services.NewPostgresPair(t)
			} else {
				pair, w.driver = services.NewMariaDBPair(t), "mysql"
			}
			proxy := faultproxy.New(t, pair.Addrs[0])
			w.dsn = pair.DSN(proxy.Addr())
			db := w.open()
			_, err := db.Exec("CREATE TABLE book (id varchar(100) PRIMARY KEY)")
			require.NoError(t, err)
			require.NoError(t, sqlstore.New(db, dialect, sqlstore.Config{}).Migrate(t.Context()))
			require.NoError(t, sqllease.New(db, sqllease.Dialect(dialect), sqllease.Config{}).Migrate(t.Context()))

			w.sqlTx("resiliencesql.InTx", nil)
			w.sqlTx("resiliencesql.InTx, serializable", &sql.TxOptions{Isolation: sql.LevelSerializable})
			w.participant()
			w.leases()
			ended, started := w.sagas()
			if dialect == sqlstore.PostgreSQL {
				w.pgxTx()
			}
			term := make(chan lease.Term, 1000)
			leader := lease.New(sqllease.New(w.open(), sqllease.Dialect(dialect), sqllease.Config{}), lease.Config{
				Name: "leader", TTL: time.Second,
			})
			leader.Observe(func(context.Context, lease.Event) {}) // no warnings
			ctx, stop := context.WithCancel(context.Background())
			var work sync.WaitGroup
			defer work.Wait()
			defer stop()
			work.Go(func() {
				_ = leader.Run(ctx, func(ctx context.Context, won lease.Term) error {
					term <- won
					<-ctx.Done()
					return nil
				})
			})
			w.each(func(u user) { require.NoError(t, u.write(ctx), u.name) })
			first := (<-term).Epoch()

			pair.Swap()
			for _, u := range w.users { // who read keep the connections in use, to the end
				for range pool / 2 {
					work.Go(func() {
						for ctx.Err() == nil {
							_ = u.read(ctx)
							time.Sleep(time.Millisecond)
						}
					})
				}
			}
			w.each(func(u user) { // until its pool is full of connections that work, and do not write
				for deadline, refused := time.Now().Add(time.Minute), 0; refused < 2; {
					require.True(t, time.Now().Before(deadline), "%s: the standby is not reached", u.name)
					if err := u.write(ctx); err == nil {
						t.Errorf("%s: a write to a server that only reads has succeeded", u.name)
						return
					}
					if u.read(ctx) == nil {
						refused++
					}
				}
			})
			proxy.Point(pair.Addrs[1])
			w.moved.Store(w.last.Load())
			w.each(func(u user) {
				if err := u.write(ctx); err == nil {
					return
				}
				if err := u.write(ctx); err != nil {
					t.Errorf("%s: the second attempt: %v", u.name, err)
				}
			})
			moved := time.Now()
			newDB, err := sql.Open(w.driver, pair.DSN(pair.Addrs[1]))
			require.NoError(t, err)
			defer newDB.Close()
			leases := sqllease.New(newDB, sqllease.Dialect(dialect), sqllease.Config{})
			require.Eventually(t, func() bool { // renewed there, or won anew if it ended before
				rec, err := leases.Load(ctx, "leader")
				return err == nil && rec.Held() && rec.Epoch >= first && time.Since(moved) > 3*time.Second
			}, time.Minute, 10*time.Millisecond, "no process leads")
			require.Eventually(t, func() bool { return ended.Load() == started.Load() }, time.Minute, 10*time.Millisecond,
				"sagas are not completed")
		})
	}
}

// each calls f for each user, for as many at once as half of its pool.
func (w *world) each(f func(u user)) {
	w.t.Helper()
	var work sync.WaitGroup
	for _, u := range w.users {
		for range pool / 2 {
			work.Go(func() { f(u) })
		}
	}
	work.Wait()
	if w.t.Failed() {
		w.t.FailNow()
	}
}
