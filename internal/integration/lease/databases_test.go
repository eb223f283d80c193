// Package lease_test tests package lease and its stores on real servers.
package lease_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	"database/sql/driver"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/internal/integration/services/etcd"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/sqllease"
	"github.com/go-resilience/resilience/lease/storetest"
)

func TestMain(m *testing.M) {
	etcd.Main()
	os.Exit(m.Run())
}

// quiet returns a Candidate whose store may fail without a warning.
func quiet(store lease.Store, cfg lease.Config) *lease.Candidate {
	c := lease.New(store, cfg)
	c.Observe(func(context.Context, lease.Event) {})
	return c
}

// A database belongs to one test.
type database struct {
	Driver string // pgx, mysql or sqlite
	DSN    string
}

var (
	drivers  = []string{"pgx", "mysql", "sqlite"}
	dialects = map[string]sqllease.Dialect{
		"pgx": sqllease.PostgreSQL, "mysql": sqllease.MySQL, "sqlite": sqllease.SQLite,
	}
)

// onEach runs test on a database of each kind.
func onEach(t *testing.T, test func(t *testing.T, d database)) {
	for _, driver := range drivers {
		t.Run(driver, func(t *testing.T) { test(t, newDatabase(t, driver)) })
	}
}

func newDatabase(t testing.TB, driver string) database {
	t.Helper()
	name := "lease_" + strings.ToLower(rand.Text()[:12])
	switch driver {
	case "pgx":
		u, err := url.Parse(services.Postgres(t))
		require.NoError(t, err)
		create(t, driver, u.String(), "CREATE SCHEMA "+name, "DROP SCHEMA "+name+" CASCADE")
		return database{Driver: driver, DSN: u.String()}.with(t, "search_path", name)
	case "mysql":
		dsn := services.MySQL(t)
		create(t, driver, dsn, "CREATE DATABASE "+name, "DROP DATABASE "+name)
		cfg, err := mysql.ParseDSN(dsn)
		require.NoError(t, err)
		cfg.DBName = name
		return database{Driver: driver, DSN: cfg.FormatDSN()}
	}
	return database{Driver: driver, DSN: "file:" + filepath.Join(t.TempDir(), name) +
		"?_pragma=busy_timeout(400)&_pragma=journal_mode(WAL)&_pragma=synchronous(NORMAL)&_txlock=immediate"}
}

// create creates a schema for a test, and drops it at the end.
func create(t testing.TB, driver, dsn, made, dropped string) {
	db, err := sql.Open(driver, dsn)
	require.NoError(t, err)
	_, err = db.Exec(made)
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := db.Exec(dropped)
		require.NoError(t, err)
		require.NoError(t, db.Close())
	})
}

// with returns d with one more parameter of its connections.
func (d database) with(t testing.TB, key, value string) database {
	t.Helper()
	switch d.Driver {
	case "pgx":
		u, err := url.Parse(d.DSN)
		require.NoError(t, err)
		q := u.Query()
		q.Set(key, value)
		u.RawQuery = strings.ReplaceAll(q.Encode(), "+", "%20") // which is not a form's
		d.DSN = u.String()
	case "mysql":
		cfg, err := mysql.ParseDSN(d.DSN)
		require.NoError(t, err)
		if cfg.Params == nil {
			cfg.Params = make(map[string]string)
		}
		cfg.Params[key] = value
		d.DSN = cfg.FormatDSN()
	}
	return d
}

// open opens the database for a test.
func (d database) open(t testing.TB) *sql.DB {
	t.Helper()
	db, err := sql.Open(d.Driver, d.DSN)
	require.NoError(t, err)
	db.SetMaxOpenConns(16) // of the 100 that the server allows to all tests
	db.SetMaxIdleConns(16)
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// store returns the store in a database that was opened.
func (d database) store(ctx context.Context, db *sql.DB) (*sqllease.Store, error) {
	s := sqllease.New(db, dialects[d.Driver], sqllease.Config{})
	return s, s.Migrate(ctx)
}

// newStore opens the database once more, as a store.
func (d database) newStore(t testing.TB) *sqllease.Store {
	t.Helper()
	s, err := d.store(t.Context(), d.open(t))
	require.NoError(t, err)
	return s
}

func TestStore(t *testing.T) {
	t.Parallel()
	for _, driver := range drivers {
		t.Run(driver, func(t *testing.T) {
			t.Parallel()
			storetest.Run(t, func(t *testing.T) lease.Store {
				return newDatabase(t, driver).newStore(t)
			})
		})
	}
}

func TestFencer(t *testing.T) {
	t.Parallel()
	for _, driver := range drivers {
		t.Run(driver, func(t *testing.T) {
			t.Parallel()
			storetest.RunFencer(t, func(t *testing.T) storetest.Fenced {
				d := newDatabase(t, driver)
				d.DSN = strings.ReplaceAll(d.DSN, "&_txlock=immediate", "") // so that it is the fence that excludes
				return storetest.Fenced{Store: d.newStore(t), DB: d.open(t), OneWriter: driver == "sqlite"}
			})
		})
	}
}

// The clocks of connections are hours apart.
func TestTimeZonesOfConnectionsDoNotMatter(t *testing.T) {
	for _, driver := range []string{"pgx", "mysql"} {
		t.Run(driver, func(t *testing.T) {
			d, request := newDatabase(t, driver), lease.Request{Name: "a", Token: "x", TTL: time.Minute}
			setting, zones := "TimeZone", []string{"Pacific/Kiritimati", "Etc/GMT+12"}
			if driver == "mysql" {
				setting, zones = "time_zone", []string{"'+13:00'", "'-12:00'"}
			}
			_, err := d.with(t, setting, zones[0]).newStore(t).Acquire(t.Context(), request)
			require.NoError(t, err)
			rec, err := d.with(t, setting, zones[1]).newStore(t).Load(t.Context(), "a")
			require.NoError(t, err)
			require.InDelta(t, time.Minute, rec.Left, float64(10*time.Second))
		})
	}
}

// TestLateRenewalBeforeATermBegins: a candidate finds that the lease has ended, and the holder renews
// it before the candidate takes it.
func TestLateRenewalBeforeATermBegins(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		store, ctx := d.newStore(t), t.Context()
		request := func(token string, ttl time.Duration) lease.Request {
			return lease.Request{Name: "a", Token: token, Holder: token, TTL: ttl}
		}
		_, err := store.Acquire(ctx, request("x", time.Hour))
		require.NoError(t, err)
		require.NoError(t, store.Renew(ctx, request("x", time.Microsecond)))
		time.Sleep(5 * time.Millisecond)

		late := 0
		db := sql.OpenDB(&watched{d, d.open(t).Driver(), func(query string) {
			if strings.Contains(query, "UPDATE lease") {
				late++
				require.NoError(t, store.Renew(ctx, request("x", time.Hour)))
			}
		}})
		defer db.Close()
		other, err := d.store(ctx, db)
		require.NoError(t, err)
		rec, err := other.Acquire(ctx, request("y", time.Hour))
		require.NoError(t, err)
		require.Equal(t, 1, late)
		require.Equal(t, "x", rec.Token)
	})
}

// A watched database calls before with each statement.
type watched struct {
	database
	driver driver.Driver
	before func(query string)
}

func (w *watched) Driver() driver.Driver { return w.driver }

func (w *watched) Connect(context.Context) (driver.Conn, error) {
	conn, err := w.driver.Open(w.DSN)
	return watchedConn{conn, w}, err
}

type watchedConn struct {
	driver.Conn
	w *watched
}

func (c watchedConn) Prepare(query string) (driver.Stmt, error) {
	c.w.before(query)
	return c.Conn.Prepare(query)
}

// TestOldProgramStartsBesideANewSchema that says that it can be used.
func TestOldProgramStartsBesideANewSchema(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		db := d.open(t)
		store, err := d.store(t.Context(), db)
		require.NoError(t, err)
		_, err = db.Exec("ALTER TABLE lease ADD COLUMN color varchar(10) NOT NULL DEFAULT 'red'")
		require.NoError(t, err)
		_, err = db.Exec("INSERT INTO lease_schema (version, compatible) VALUES (2, 1)")
		require.NoError(t, err)
		_, err = d.store(t.Context(), db)
		require.NoError(t, err)
		term, err := lease.New(store, lease.Config{Name: "a"}).Campaign(t.Context())
		require.NoError(t, err)
		require.NoError(t, term.Resign(t.Context()))
		_, err = db.Exec("INSERT INTO lease_schema (version, compatible) VALUES (3, 2)")
		require.NoError(t, err)
		_, err = d.store(t.Context(), db)
		require.ErrorContains(t, err,
			"they are of version 3, for programs from version 2 on, and this program is of version 1")
	})
}

// Five leaders after each other, over one instant of a schedule: one of them makes the run.
func TestEveryRunsOnceAmongFiveLeaders(t *testing.T) {
	test := func(t *testing.T, newStore func() lease.Store) {
		runs, ran, due := 0, make(chan struct{}, 5), time.Time{}
		once := schedule(func(t time.Time) time.Time {
			if due.IsZero() { // however long the first leader has taken to be elected
				due = t.Add(time.Second)
			}
			if t.Before(due) {
				return due
			}
			return time.Time{}
		})
		var last int64
		for i := range 5 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			store, ended := newStore(), make(chan error, 1)
			c := lease.New(store, lease.Config{Name: "a", Poll: 100 * time.Millisecond})
			go func() {
				ended <- c.Every(ctx, once, func(context.Context, lease.Term) error { runs++; ran <- struct{}{}; return nil })
			}()
			require.Eventually(t, func() bool {
				rec, err := store.Load(ctx, "a")
				if err != nil || !rec.Held() || rec.Epoch <= last {
					return false
				}
				last = rec.Epoch
				return true
			}, time.Minute, 5*time.Millisecond, "leader %d", i)
			if i == 0 {
				<-ran
			} else {
				time.Sleep(100 * time.Millisecond) // in which another run would be made
			}
			cancel()
			require.NoError(t, <-ended)
		}
		require.Equal(t, 1, runs)
	}
	onEach(t, func(t *testing.T, d database) { test(t, func() lease.Store { return d.newStore(t) }) })
	t.Run("redis", func(t *testing.T) {
		store := newRedisStore(t)
		test(t, func() lease.Store { return store })
	})
	t.Run("etcd", func(t *testing.T) {
		store := etcdStore(etcd.Client(t, etcd.New(t, 1).Addrs...))
		test(t, func() lease.Store { return store })
	})
}

type schedule func(time.Time) time.Time

func (s schedule) Next(t time.Time) time.Time { return s(t) }

// Epochs include the time: a row that was deleted does not set them back.
func TestEpochsGrowAfterRowIsDeleted(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		store, db := d.newStore(t), d.open(t)
		var last int64
		for i := range 3 {
			req := lease.Request{Name: "a", Token: strings.Repeat("x", i+1), TTL: time.Hour}
			rec, err := store.Acquire(t.Context(), req)
			require.NoError(t, err)
			require.Greater(t, rec.Epoch, last)
			last = rec.Epoch
			_, err = db.Exec("DELETE FROM lease")
			require.NoError(t, err)
			if d.Driver == "mysql" {
				_, err = db.Exec("DELETE FROM lease_fence")
				require.NoError(t, err)
			}
			time.Sleep(2 * time.Millisecond) // the clock of SQLite has milliseconds
		}
	})
}
