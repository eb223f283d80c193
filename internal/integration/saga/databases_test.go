package saga_test

import (
	"crypto/rand"
	"database/sql"
	"fmt"
	"net/url"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

// A database belongs to one test and is empty except for the store's tables. Other
// processes can open it too.
type database struct {
	Dialect sqlstore.Dialect
	DSN     string
	Name    string // of its connections
}

// databases are the dialects that each test runs on.
var databases = []sqlstore.Dialect{sqlstore.PostgreSQL, sqlstore.MySQL, sqlstore.SQLite}

// onEach runs test on a database of each kind.
func onEach(t *testing.T, test func(t *testing.T, d database)) {
	for _, dialect := range databases {
		t.Run(string(dialect), func(t *testing.T) { test(t, newDatabase(t, dialect)) })
	}
}

func newDatabase(t testing.TB, dialect sqlstore.Dialect) database {
	t.Helper()
	d := emptyDatabase(t, dialect)
	db := d.open(t)
	store := sqlstore.New(db, dialect, sqlstore.Config{})
	require.NoError(t, store.Migrate(t.Context()))
	return d
}

// emptyDatabase returns a database that has no tables.
func emptyDatabase(t testing.TB, dialect sqlstore.Dialect) database {
	t.Helper()
	d := database{Dialect: dialect}
	switch dialect {
	case sqlstore.SQLite:
		d.DSN = sqliteDSN(filepath.Join(t.TempDir(), "saga.db"))
	case sqlstore.MySQL:
		d.DSN, d.Name = newMySQL(t)
	default:
		d.DSN, d.Name = newSchema(t)
	}
	return d
}

// newMySQL returns the DSN of a new database, which goes with the test, and its name.
func newMySQL(t testing.TB) (dsn, name string) {
	t.Helper()
	config, err := mysql.ParseDSN(services.MySQL(t))
	require.NoError(t, err)
	db, err := sql.Open("mysql", config.FormatDSN())
	require.NoError(t, err)
	name = "saga_" + strings.ToLower(rand.Text()[:12])
	_, err = db.Exec("CREATE DATABASE " + name)
	require.NoError(t, err)
	t.Cleanup(func() {
		// A process that was killed may have left a transaction behind.
		_ = killConnections(db, name)
		_, err := db.Exec("DROP DATABASE " + name)
		require.NoError(t, err)
		require.NoError(t, db.Close())
	})
	config.DBName = name
	return config.FormatDSN(), name
}

// killConnections ends the connections to a database of MySQL.
func killConnections(db *sql.DB, name string) error {
	rows, err := db.Query(`SELECT id FROM information_schema.processlist WHERE db = ? AND id <> connection_id()`, name)
	if err != nil {
		return err
	}
	defer rows.Close()
	var ids []int64
	for rows.Next() {
		var id int64
		if err := rows.Scan(&id); err != nil {
			return err
		}
		ids = append(ids, id)
	}
	for _, id := range ids {
		_, _ = db.Exec(fmt.Sprintf("KILL %d", id)) // it may have ended
	}
	return rows.Err()
}

func sqliteDSN(path string) string {
	return "file:" + path +
		"?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate"
}

// newSchema returns the DSN of a new schema, which goes with the test, and its
// name.
func newSchema(t testing.TB) (dsn, schema string) {
	t.Helper()
	dsn = services.Postgres(t)
	schema = "saga_" + strings.ToLower(rand.Text()[:12])
	db, err := sql.Open("pgx", dsn)
	require.NoError(t, err)
	_, err = db.Exec("CREATE SCHEMA " + schema)
	require.NoError(t, err)
	t.Cleanup(func() {
		// A process that was killed may have left a transaction behind, which would
		// deadlock with the dropping of its tables.
		require.Eventually(t, func() bool {
			var left int
			err := db.QueryRow(`SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = $1`,
				schema).Scan(&left)
			return err == nil && left == 0
		}, time.Minute, 10*time.Millisecond)
		_, err := db.Exec("DROP SCHEMA " + schema + " CASCADE")
		require.NoError(t, err)
		require.NoError(t, db.Close())
	})
	u, err := url.Parse(dsn)
	if err != nil || u.Scheme == "" {
		return dsn + " search_path=" + schema + " application_name=" + schema, schema
	}
	q := u.Query()
	q.Set("search_path", schema)
	q.Set("application_name", schema)
	u.RawQuery = q.Encode()
	return u.String(), schema
}

// sql returns a statement for PostgreSQL in the words of the database. Its parameters must
// be in order.
func (d database) sql(text string) string {
	if d.Dialect != sqlstore.MySQL {
		return text
	}
	if before, ok := strings.CutSuffix(text, " ON CONFLICT DO NOTHING"); ok {
		text = strings.Replace(before, "INSERT", "INSERT IGNORE", 1)
	}
	return parameter.ReplaceAllString(text, "?")
}

var parameter = regexp.MustCompile(`\$\d`)

// open opens the database once more; it is closed with the test.
func (d database) open(t testing.TB) *sql.DB {
	t.Helper()
	db, err := d.connect()
	require.NoError(t, err)
	t.Cleanup(func() { _ = db.Close() })
	return db
}

func (d database) connect() (*sql.DB, error) {
	if d.Dialect == sqlstore.SQLite {
		return sql.Open("sqlite", d.DSN)
	}
	driver := "pgx"
	if d.Dialect == sqlstore.MySQL {
		driver = "mysql"
	}
	db, err := sql.Open(driver, d.DSN)
	if err == nil {
		db.SetMaxOpenConns(16) // of the 100 that the server allows to all tests
		db.SetMaxIdleConns(16)
	}
	return db, err
}

// store opens the database once more, as a store.
func (d database) store(t testing.TB) *sqlstore.Store {
	t.Helper()
	store := sqlstore.New(d.open(t), d.Dialect, sqlstore.Config{})
	return store
}
