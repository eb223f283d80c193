package data_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/internal/integration/faultproxy"
	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/resiliencesql"
	"github.com/go-resilience/resilience/retry"
)

// A database belongs to one test, and has the table book of ids and amounts.
type database struct {
	driver, dsn string // the DSN has an address in the place of %s
	addr        string
}

func (d database) open(t testing.TB, addr string) *sql.DB {
	dsn := d.dsn
	if d.driver != "sqlite" {
		dsn = fmt.Sprintf(d.dsn, addr)
	}
	db, err := sql.Open(d.driver, dsn)
	require.NoError(t, err)
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// bind writes the placeholders of a statement for the database.
func (d database) bind(statement string) string {
	if d.driver == "pgx" {
		for n := 1; strings.Contains(statement, "?"); n++ {
			statement = strings.Replace(statement, "?", fmt.Sprintf("$%d", n), 1)
		}
	}
	return statement
}

func postgres(t testing.TB) database {
	u, err := url.Parse(services.Postgres(t))
	require.NoError(t, err)
	schema := "data_" + strings.ToLower(rand.Text()[:12])
	q := u.Query()
	q.Set("search_path", schema)
	q.Set("sslmode", "disable")
	addr := u.Host
	u.Host, u.RawQuery = "ADDR", q.Encode()
	d := database{driver: "pgx", dsn: strings.Replace(strings.ReplaceAll(u.String(), "%", "%%"), "ADDR", "%s", 1),
		addr: addr}
	db := d.open(t, addr)
	execute(t, db, "CREATE SCHEMA "+schema)
	t.Cleanup(func() { execute(t, d.open(t, addr), "DROP SCHEMA "+schema+" CASCADE") })
	execute(t, db, "CREATE TABLE book (id text PRIMARY KEY, n integer CHECK (n < 1000))")
	return d
}

func mariadb(t testing.TB) database {
	config, err := mysql.ParseDSN(services.MySQL(t))
	require.NoError(t, err)
	server, err := sql.Open("mysql", config.FormatDSN())
	require.NoError(t, err)
	name := "data_" + strings.ToLower(rand.Text()[:12])
	execute(t, server, "CREATE DATABASE "+name)
	t.Cleanup(func() { execute(t, server, "DROP DATABASE "+name); _ = server.Close() })
	config.DBName, config.ReadTimeout = name, 5*time.Second
	config.InterpolateParams, config.Logger = true, &mysql.NopLogger{}
	addr := config.Addr
	config.Addr = "ADDR"
	d := database{driver: "mysql", dsn: strings.Replace(strings.ReplaceAll(config.FormatDSN(), "%", "%%"), "ADDR",
		"%s", 1), addr: addr}
	execute(t, d.open(t, addr),
		"CREATE TABLE book (id varchar(100) PRIMARY KEY, n integer CHECK (n < 1000)) ENGINE = InnoDB")
	return d
}

func sqlite(t testing.TB) database {
	d := database{driver: "sqlite",
		dsn: "file:" + filepath.Join(t.TempDir(), "db") + "?_pragma=busy_timeout(50)&_pragma=journal_mode(WAL)"}
	execute(t, d.open(t, ""), "CREATE TABLE book (id text PRIMARY KEY, n integer CHECK (n < 1000))")
	return d
}

func execute(t testing.TB, db *sql.DB, statement string, args ...any) {
	t.Helper()
	_, err := db.Exec(statement, args...)
	require.NoError(t, err)
}

// judged runs one statement behind the Middleware.
func judged(ctx context.Context, db *sql.DB, statement string, args ...any) error {
	return resiliencesql.Middleware(resiliencesql.Config{})(func(ctx context.Context) error {
		_, err := db.ExecContext(ctx, statement, args...)
		return err
	})(ctx)
}

func requireAnswered(t *testing.T, err error) {
	t.Helper()
	require.Error(t, err)
	require.True(t, resilience.Answered(err) && !resilience.Retryable(err), err)
}

func requireAgain(t *testing.T, err error) {
	t.Helper()
	require.Error(t, err)
	require.True(t, resilience.Answered(err) && resilience.Retryable(err), err)
}

func requireUnavailable(t *testing.T, err error) {
	t.Helper()
	require.Error(t, err)
	require.True(t, !resilience.Answered(err) && resilience.Retryable(err), "%T %v", err, err)
	require.NotErrorIs(t, err, resiliencesql.ErrOutcomeUnknown)
}

func onEach(t *testing.T, test func(t *testing.T, d database, db *sql.DB)) {
	for name, open := range map[string]func(testing.TB) database{"PostgreSQL": postgres, "MariaDB": mariadb,
		"SQLite": sqlite} {
		t.Run(name, func(t *testing.T) {
			d := open(t)
			test(t, d, d.open(t, d.addr))
		})
	}
}

func TestAnswers(t *testing.T) {
	onEach(t, func(t *testing.T, d database, db *sql.DB) {
		execute(t, db, "INSERT INTO book VALUES ('a', 1)")
		for _, statement := range []string{
			"INSERT INTO book VALUES ('a', 2)", "INSERT INTO book VALUES ('b', 1000)", "SELEC 1", "SELECT * FROM nowhere",
		} {
			requireAnswered(t, judged(t.Context(), db, statement))
			requireAnswered(t, resiliencesql.InTx(t.Context(), db, resiliencesql.Config{},
				func(ctx context.Context, tx *sql.Tx) error {
					_, err := tx.ExecContext(ctx, statement)
					return err
				}))
		}
		requireAnswered(t, resiliencesql.InTx(t.Context(), db, resiliencesql.Config{},
			func(ctx context.Context, tx *sql.Tx) error {
				return tx.QueryRowContext(ctx, "SELECT n FROM book WHERE id = 'none'").Scan(new(int))
			}))
	})
}

// TestTransfersThatCollide: deadlocks, serialization failures and busy files end as if the
// transactions had run one after the other, and nothing is lost or done twice.
func TestTransfersThatCollide(t *testing.T) {
	onEach(t, func(t *testing.T, d database, db *sql.DB) {
		execute(t, db, "INSERT INTO book VALUES ('a', 500), ('b', 500)")
		met := make(chan struct{}, 2)
		again := 0
		var mu sync.Mutex
		retries := retry.New(retry.Config{Attempts: 10_000, Backoff: retry.Constant(time.Millisecond)})
		retries.Observe(func(_ context.Context, e retry.Event) {
			if e.Kind == retry.EventRetried {
				requireAgain(t, e.Err)
				mu.Lock()
				defer mu.Unlock()
				again++
			}
		})
		cfg := resiliencesql.Config{Retry: retries.Wrap, Options: &sql.TxOptions{Isolation: sql.LevelSerializable}}
		move := func(from, to string, first bool) error {
			return resiliencesql.InTx(t.Context(), db, cfg, func(ctx context.Context, tx *sql.Tx) error {
				var n int
				if err := tx.QueryRowContext(ctx, d.bind("SELECT n FROM book WHERE id = ?"), from).Scan(&n); err != nil {
					return err
				}
				if first { // both have read before one writes
					first = false
					met <- struct{}{}
					for len(met) < 2 {
						time.Sleep(time.Millisecond)
					}
				}
				if _, err := tx.ExecContext(ctx, d.bind("UPDATE book SET n = ? WHERE id = ?"), n-1, from); err != nil {
					return err
				}
				_, err := tx.ExecContext(ctx, d.bind("UPDATE book SET n = n + 1 WHERE id = ?"), to)
				return err
			})
		}
		var work sync.WaitGroup
		for _, way := range [][]string{{"a", "b"}, {"b", "a"}} {
			work.Go(func() {
				for i := range 20 {
					if err := move(way[0], way[1], i == 0); err != nil {
						t.Error(err)
					}
				}
			})
		}
		work.Wait()
		var a, b int
		require.NoError(t, db.QueryRow("SELECT min(n), max(n) FROM book").Scan(&a, &b))
		require.Equal(t, []int{500, 500}, []int{a, b})
		require.Positive(t, again, "no transactions have collided")
	})
}

func TestLockThatIsNotGranted(t *testing.T) {
	onEach(t, func(t *testing.T, d database, db *sql.DB) {
		execute(t, db, "INSERT INTO book VALUES ('a', 1)")
		holder, err := db.Begin()
		require.NoError(t, err)
		defer holder.Rollback()
		_, err = holder.Exec("UPDATE book SET n = 2")
		require.NoError(t, err)
		requireAgain(t, resiliencesql.InTx(t.Context(), db, resiliencesql.Config{},
			func(ctx context.Context, tx *sql.Tx) error {
				if bound := map[string]string{"pgx": "SET LOCAL lock_timeout = 10",
					"mysql": "SET innodb_lock_wait_timeout = 0"}[d.driver]; bound != "" {
					_, err := tx.ExecContext(ctx, bound)
					require.NoError(t, err)
				}
				_, err := tx.ExecContext(ctx, "UPDATE book SET n = 3")
				return err
			}))
	})
}

// TestTimeOutOfAStatement: the server's is a failure that may be retried, the caller's is his.
func TestTimeOutOfAStatement(t *testing.T) {
	onEach(t, func(t *testing.T, d database, db *sql.DB) {
		slow := map[string]string{"pgx": "SELECT pg_sleep(30)", "mysql": "SELECT sleep(30)",
			"sqlite": "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT max(n) FROM c"}[d.driver]
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		err := resiliencesql.InTx(ctx, db, resiliencesql.Config{}, func(ctx context.Context, tx *sql.Tx) error {
			return tx.QueryRowContext(ctx, slow).Scan(new(int))
		})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		bound := map[string]string{"pgx": "SET statement_timeout = 50", "mysql": "SET max_statement_time = 0.05"}[d.driver]
		if bound == "" {
			return // SQLite has none
		}
		conn, err := db.Conn(t.Context())
		require.NoError(t, err)
		defer conn.Close()
		_, err = conn.ExecContext(t.Context(), bound)
		require.NoError(t, err)
		err = resiliencesql.Middleware(resiliencesql.Config{})(func(ctx context.Context) error {
			_, err := conn.ExecContext(ctx, strings.Replace(slow, "30", "3", 1))
			return err
		})(t.Context())
		requireUnavailable(t, err)
		late, ok := errors.AsType[interface {
			error
			Timeout() bool
		}](err)
		require.True(t, ok && late.Timeout(), err)
	})
}

// TestReadOnly is a primary that has become a replica, or a file that may not be written.
func TestReadOnly(t *testing.T) {
	onEach(t, func(t *testing.T, d database, _ *sql.DB) {
		db := d.open(t, d.addr)
		db.SetMaxOpenConns(1)
		switch d.driver {
		case "pgx":
			execute(t, db, "SET default_transaction_read_only = on")
		case "mysql":
			t.Skip("that of MariaDB is for the whole server, and not for root")
		default:
			execute(t, db, "PRAGMA query_only = on")
		}
		requireUnavailable(t, judged(t.Context(), db, "INSERT INTO book VALUES ('a', 1)"))
	})
}

// TestWriteInReadOnlyTx runs fn once, because a write in a read-only transaction is a mistake of fn.
func TestWriteInReadOnlyTx(t *testing.T) {
	onEach(t, func(t *testing.T, d database, db *sql.DB) {
		if d.driver != "pgx" && d.driver != "mysql" {
			t.Skip("SQLite's drivers ignore the option")
		}
		runs := 0
		err := resiliencesql.InTx(t.Context(), db,
			resiliencesql.Config{Options: &sql.TxOptions{ReadOnly: true}, Retry: often},
			func(ctx context.Context, tx *sql.Tx) error {
				runs++
				_, err := tx.ExecContext(ctx, "INSERT INTO book VALUES ('a', 1)")
				return err
			})
		requireAnswered(t, err)
		require.Equal(t, 1, runs)
	})
}

func TestTooManyConnections(t *testing.T) {
	t.Run("PostgreSQL", func(t *testing.T) {
		d := postgres(t)
		admin := d.open(t, d.addr)
		role := "data_" + strings.ToLower(rand.Text()[:12])
		execute(t, admin, "CREATE ROLE "+role+" LOGIN CONNECTION LIMIT 0")
		t.Cleanup(func() { execute(t, admin, "DROP ROLE "+role) })
		u, err := url.Parse(fmt.Sprintf(d.dsn, d.addr))
		require.NoError(t, err)
		u.User = url.User(role)
		db, err := sql.Open("pgx", u.String())
		require.NoError(t, err)
		defer db.Close()
		requireUnavailable(t, judged(t.Context(), db, "SELECT 1"))
		requireUnavailable(t, resiliencesql.InTx(t.Context(), db, resiliencesql.Config{},
			func(context.Context, *sql.Tx) error { return nil }))
	})
	t.Run("MariaDB", func(t *testing.T) {
		d := mariadb(t)
		admin := d.open(t, d.addr)
		user := "data_" + strings.ToLower(rand.Text()[:12])
		execute(t, admin, "CREATE USER "+user+"@'%' WITH MAX_USER_CONNECTIONS 1")
		t.Cleanup(func() { execute(t, admin, "DROP USER "+user+"@'%'") })
		config, err := mysql.ParseDSN(fmt.Sprintf(d.dsn, d.addr))
		require.NoError(t, err)
		config.User, config.DBName = user, ""
		db, err := sql.Open("mysql", config.FormatDSN())
		require.NoError(t, err)
		defer db.Close()
		one, err := db.Conn(t.Context())
		require.NoError(t, err)
		defer one.Close()
		requireUnavailable(t, judged(t.Context(), db, "SELECT 1"))
	})
}

func TestDiskThatIsFull(t *testing.T) {
	d := sqlite(t)
	db := d.open(t, "")
	db.SetMaxOpenConns(1)
	execute(t, db, "PRAGMA max_page_count = 4")
	full := func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "INSERT INTO book VALUES (?, 1)", strings.Repeat("x", 100_000))
		return err
	}
	requireUnavailable(t, resiliencesql.InTx(t.Context(), db, resiliencesql.Config{}, full))
}

// TestSQLiteThatIsBusyAtCommit keeps no transaction in the pool.
func TestSQLiteThatIsBusyAtCommit(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	d := database{driver: "sqlite", dsn: "file:" + path + "?_pragma=busy_timeout(0)&_pragma=journal_mode(DELETE)"}
	db, other := d.open(t, ""), d.open(t, "")
	db.SetMaxOpenConns(1)
	execute(t, db, "CREATE TABLE book (id text PRIMARY KEY, n integer); INSERT INTO book VALUES ('a', 1)")
	reader, err := other.Begin()
	require.NoError(t, err)
	defer reader.Rollback()
	require.NoError(t, reader.QueryRow("SELECT n FROM book").Scan(new(int)))
	write := func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "UPDATE book SET n = n + 1")
		return err
	}
	requireAgain(t, resiliencesql.InTx(t.Context(), db, resiliencesql.Config{}, write))
	require.NoError(t, reader.Rollback())
	require.NoError(t, resiliencesql.InTx(t.Context(), db, resiliencesql.Config{}, write))
	var n int
	require.NoError(t, db.QueryRow("SELECT n FROM book").Scan(&n))
	require.Equal(t, 2, n)
}

// kill ends the other connections to the database, on the server.
func kill(t testing.TB, d database, db *sql.DB, id int) {
	execute(t, db, fmt.Sprintf(map[string]string{"pgx": "SELECT pg_terminate_backend(%d)",
		"mysql": "KILL %d"}[d.driver], id))
}

var ownID = map[string]string{"pgx": "SELECT pg_backend_pid()", "mysql": "SELECT connection_id()"}

func onServers(t *testing.T, test func(t *testing.T, d database, db *sql.DB)) {
	onEach(t, func(t *testing.T, d database, db *sql.DB) {
		if d.driver == "sqlite" {
			t.Skip("it is no server")
		}
		test(t, d, db)
	})
}

// TestBackendThatIsKilled in the middle of a transaction: it is tried again.
func TestBackendThatIsKilled(t *testing.T) {
	onServers(t, func(t *testing.T, d database, db *sql.DB) {
		runs := 0
		cfg := resiliencesql.Config{Retry: retry.New(retry.Config{Backoff: retry.Constant(time.Millisecond)}).Wrap}
		require.NoError(t, resiliencesql.InTx(t.Context(), db, cfg, func(ctx context.Context, tx *sql.Tx) error {
			runs++
			var id int
			if err := tx.QueryRowContext(ctx, ownID[d.driver]).Scan(&id); err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, d.bind("INSERT INTO book VALUES ('a', ?)"), runs); err != nil {
				return err
			}
			if runs == 1 {
				kill(t, d, db, id)
			}
			_, err := tx.ExecContext(ctx, d.bind("UPDATE book SET n = n + ?"), 10)
			return err
		}))
		var n int
		require.NoError(t, db.QueryRow("SELECT n FROM book").Scan(&n))
		require.Equal(t, []int{2, 12}, []int{runs, n})
	})
}

// TestCommitWhoseAnswerIsLost is unknown, whether the database has committed or not, is not
// repeated, and is settled by Check.
func TestCommitWhoseAnswerIsLost(t *testing.T) {
	onServers(t, func(t *testing.T, d database, db *sql.DB) {
		for name, lost := range map[string]struct {
			way       faultproxy.Direction
			committed bool
		}{"the answer": {faultproxy.ToClient, true}, "COMMIT itself": {faultproxy.ToServer, false}} {
			for _, checked := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, checked: %t", name, checked), func(t *testing.T) {
					proxy := faultproxy.New(t, d.addr)
					far := d.open(t, proxy.Addr())
					id := rand.Text()
					cfg := resiliencesql.Config{Retry: retry.New(retry.Config{Backoff: retry.Constant(time.Millisecond)}).Wrap}
					if checked {
						cfg.Check = func(ctx context.Context, tx *sql.Tx) (bool, error) {
							_, err := tx.ExecContext(ctx, d.bind("INSERT INTO book VALUES (?, 0)"), id)
							judged := resiliencesql.Middleware(resiliencesql.Config{})(func(context.Context) error { return err })(ctx)
							if resilience.Answered(judged) && !resilience.Retryable(judged) {
								return true, nil // a duplicate
							}
							return false, err
						}
					}
					runs := 0
					err := resiliencesql.InTx(t.Context(), far, cfg, func(ctx context.Context, tx *sql.Tx) error {
						var backend int
						if err := tx.QueryRowContext(ctx, ownID[d.driver]).Scan(&backend); err != nil {
							return err
						}
						_, err := tx.ExecContext(ctx, d.bind("INSERT INTO book VALUES (?, 1)"), id)
						if runs++; err != nil || runs > 1 {
							return err
						}
						proxy.Hold(lost.way)
						go func() { // what is on its way takes effect, or the server learns that its client is gone
							if lost.committed {
								for n := 0; n == 0; time.Sleep(time.Millisecond) {
									_ = db.QueryRow(d.bind("SELECT count(*) FROM book WHERE id = ?"), id).Scan(&n)
								}
							} else {
								time.Sleep(20 * time.Millisecond) // COMMIT may come before or after it
							}
							proxy.Reset()
							proxy.Heal()
						}()
						return nil
					})
					var n int
					require.NoError(t, db.QueryRow(d.bind("SELECT count(*) FROM book WHERE id = ?"), id).Scan(&n))
					if checked {
						require.NoError(t, err)
						require.Equal(t, 1, n)
						require.Equal(t, map[bool]int{true: 1, false: 2}[lost.committed], runs)
						return
					}
					require.ErrorIs(t, err, resiliencesql.ErrOutcomeUnknown)
					require.False(t, resilience.Answered(err))
					require.Equal(t, map[bool]int{true: 1, false: 0}[lost.committed], n)
					require.Equal(t, 1, runs)
				})
			}
		}
	})
}

// TestStatementWhoseAnswerIsLost, outside a transaction.
func TestStatementWhoseAnswerIsLost(t *testing.T) {
	onServers(t, func(t *testing.T, d database, db *sql.DB) {
		proxy := faultproxy.New(t, d.addr)
		far := d.open(t, proxy.Addr())
		conn, err := far.Conn(t.Context())
		require.NoError(t, err)
		defer conn.Close()
		insert := d.bind("INSERT INTO book VALUES (?, 1)")
		_, err = conn.ExecContext(t.Context(), insert, "before") // pgx has prepared it
		require.NoError(t, err)
		proxy.Hold(faultproxy.ToClient)
		go func() {
			for n := 0; n < 2; time.Sleep(time.Millisecond) {
				_ = db.QueryRow("SELECT count(*) FROM book").Scan(&n)
			}
			proxy.Reset()
		}()
		code := func(err error) string {
			if errors.Is(err, mysql.ErrInvalidConn) {
				return "08007"
			}
			return ""
		}
		err = resiliencesql.Middleware(resiliencesql.Config{Code: code})(func(ctx context.Context) error {
			_, err := conn.ExecContext(ctx, insert, "a")
			return err
		})(t.Context())
		require.ErrorIs(t, err, resiliencesql.ErrOutcomeUnknown)
		require.False(t, resilience.Retryable(err))

		proxy.Refuse() // nothing is sent
		requireUnavailable(t, judged(t.Context(), far, "INSERT INTO book VALUES ('b', 1)"))
	})
}
