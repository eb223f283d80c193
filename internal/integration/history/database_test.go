package history_test

import (
	"crypto/rand"
	"database/sql"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/go-resilience/resilience/internal/integration/faultproxy"
	"github.com/go-resilience/resilience/internal/integration/services"
)

// A database is one that a history has for itself.
type database struct {
	*sql.DB
	driver string // pgx, mysql or sqlite
	dsn    string
}

// newDatabase makes a database. The connections of processes do not keep a transaction open
// that does nothing for longer than idle; those of the test itself do.
func newDatabase(r *run, driver string, idle time.Duration) *database {
	name := "history_" + strings.ToLower(rand.Text()[:12])
	d := &database{driver: driver}
	var patient string
	switch driver {
	case "pgx":
		u, err := url.Parse(services.Postgres(r))
		require.NoError(r, err)
		own(r, driver, u.String(), "CREATE SCHEMA "+name, "DROP SCHEMA "+name+" CASCADE",
			`SELECT pg_terminate_backend(pid)::text FROM pg_stat_activity WHERE application_name = '`+name+`'`)
		q := u.Query()
		q.Set("search_path", name)
		q.Set("application_name", name)
		u.RawQuery = q.Encode()
		patient = u.String()
		q.Set("idle_in_transaction_session_timeout", fmt.Sprint(idle.Milliseconds()))
		u.RawQuery = q.Encode()
		d.dsn = u.String()
	case "mysql":
		cfg, err := mysql.ParseDSN(services.MySQL(r))
		require.NoError(r, err)
		own(r, driver, cfg.FormatDSN(), "CREATE DATABASE "+name, "DROP DATABASE "+name,
			`SELECT concat('KILL ', id) FROM information_schema.processlist WHERE db = '`+name+`'`)
		cfg.DBName = name
		patient = cfg.FormatDSN()
		cfg.Params = map[string]string{"innodb_lock_wait_timeout": "1",
			"wait_timeout": fmt.Sprint(max(1, int(idle.Seconds())))}
		d.dsn = cfg.FormatDSN()
	default:
		patient = "file:" + filepath.Join(r.dir, name) +
			"?_pragma=busy_timeout(400)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate"
		d.dsn = patient
	}
	var err error
	d.DB, err = connect(driver, patient)
	require.NoError(r, err)
	r.Cleanup(func() { _ = d.Close() })
	return d
}

// own makes what goes with the history. A process that was killed may have left
// connections behind, which would keep the drop waiting.
func own(r *run, driver, dsn, made, dropped, ends string) {
	db, err := sql.Open(driver, dsn)
	require.NoError(r, err)
	_, err = db.Exec(made)
	require.NoError(r, err)
	r.Cleanup(func() {
		for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline) && end(db, ends) > 0; {
			time.Sleep(10 * time.Millisecond)
		}
		_, err := db.Exec(dropped)
		require.NoError(r, err)
		require.NoError(r, db.Close())
	})
}

// end ends connections, and returns how many there were.
func end(db *sql.DB, query string) (n int) {
	rows, err := db.Query(query)
	if err != nil {
		return 1
	}
	defer rows.Close()
	for ; rows.Next(); n++ {
		var kill string
		if rows.Scan(&kill) == nil && strings.HasPrefix(kill, "KILL") {
			_, _ = db.Exec(kill)
		}
	}
	return n
}

func connect(driver, dsn string) (*sql.DB, error) {
	db, err := sql.Open(driver, dsn)
	if err == nil {
		db.SetMaxOpenConns(5) // of the 100 that a server allows to all tests
		db.SetMaxIdleConns(5)
	}
	return db, err
}

// start starts n processes, each with a way of its own to the database, and returns the
// proxies on it.
func (d *database) start(r *run, n int) (proxies []*faultproxy.Proxy) {
	for range n {
		dsn := d.dsn
		switch d.driver {
		case "pgx":
			u, err := url.Parse(dsn)
			require.NoError(r, err)
			proxies = append(proxies, faultproxy.New(r, u.Host))
			u.Host = proxies[len(proxies)-1].Addr()
			dsn = u.String()
		case "mysql":
			cfg, err := mysql.ParseDSN(dsn)
			require.NoError(r, err)
			proxies = append(proxies, faultproxy.New(r, cfg.Addr))
			cfg.Addr = proxies[len(proxies)-1].Addr()
			dsn = cfg.FormatDSN()
		}
		r.start(dsn)
	}
	return proxies
}
