package harm_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/faultproxy"
	"github.com/go-resilience/resilience/internal/integration/harm"
	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/sqllease"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

// newStore creates a store with the tables of leases and sagas. It returns how the test connects to it, and how a
// worker does: through a proxy, which is nil for SQLite.
func newStore(t *testing.T, driver string) (here, there workerConfig, proxy *faultproxy.Proxy) {
	here.Driver = driver
	switch driver {
	case "redis":
		here.DSN = services.NewRedis(t).Addr
		proxy = faultproxy.New(t, here.DSN)
		there = workerConfig{Driver: driver, DSN: proxy.Addr()}
		return here, there, proxy
	case "sqlite":
		here.DSN = "file:" + filepath.Join(t.TempDir(), "harm.db") +
			"?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate"
		there = here
	case "pgx":
		schema := "harm_" + strings.ToLower(rand.Text()[:12])
		u, err := url.Parse(services.Postgres(t))
		require.NoError(t, err)
		create(t, u.String(), schema)
		q := u.Query()
		q.Set("search_path", schema)
		q.Set("application_name", schema)
		u.RawQuery = q.Encode()
		here.DSN = u.String()
		proxy = faultproxy.New(t, u.Host)
		u.Host = proxy.Addr()
		there = workerConfig{Driver: driver, DSN: u.String()}
	}
	db := open(here)
	t.Cleanup(func() { _ = db.Close() })
	require.NoError(t, sqllease.New(db, sqllease.Dialect(dialects[driver]), sqllease.Config{}).Migrate(t.Context()))
	require.NoError(t, sqlstore.New(db, dialects[driver], sqlstore.Config{}).Migrate(t.Context()))
	return here, there, proxy
}

// create creates a schema of PostgreSQL until the end of the test. A worker that was killed or cut off may have left
// a transaction open, so the connections to the schema are terminated first.
func create(t *testing.T, dsn, schema string) {
	db, err := sql.Open("pgx", dsn)
	require.NoError(t, err)
	_, err = db.Exec("CREATE SCHEMA " + schema)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.True(t, eventually(time.Minute, func() bool {
			var left int
			err := db.QueryRow("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = $1",
				schema).Scan(&left)
			return err == nil && left == 0
		}))
		_, err := db.Exec("DROP SCHEMA " + schema + " CASCADE")
		require.NoError(t, err)
		require.NoError(t, db.Close())
	})
}

// tookOver returns the result of a takeover. If took is 0 there was none.
func tookOver(took time.Duration) (r harm.Result) {
	cell := "never"
	if took > 0 {
		cell = fmt.Sprintf("%.1fs", took.Seconds())
	}
	r.Cells = []string{cell, fmt.Sprintf("%.1fs", documented.Seconds())}
	r.Break(took > 0, "no takeover within %v, documented is %v", 2*documented, documented)
	return r
}

// leads returns a row in which the leader is in trouble and another candidate has to lead.
func leads(driver string, what trouble) func(t *testing.T) harm.Result {
	return func(t *testing.T) harm.Result {
		here, there, proxy := newStore(t, driver)
		leader := startWorker(t, there)
		time.Sleep(ttl / 2) // for a renewal
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		elected := make(chan lease.Term, 1)
		go func() {
			if term, err := lease.New(leaseStore(here), leaseConfig).Campaign(ctx); err == nil {
				elected <- term
			}
		}()
		what(leader, proxy)
		began := time.Now()
		select {
		case <-elected:
			return tookOver(time.Since(began))
		case <-time.After(2 * documented):
			return tookOver(0)
		}
	}
}

// continues is continuesAfter for a trouble that leaves the store alone.
func continues(driver string, what trouble) func(t *testing.T) harm.Result {
	return continuesAfter(driver, func(_ *testing.T, w worker, p *faultproxy.Proxy, _ workerConfig) { what(w, p) })
}

// clockBack kills the owner and adds an hour to the times in the store. That is how they look after its clock was set
// back by an hour.
func clockBack(t *testing.T, w worker, _ *faultproxy.Proxy, store workerConfig) {
	w.kill()
	db := open(store)
	defer db.Close()
	const hour = "3600000000" // microseconds
	moved, err := db.Exec("UPDATE saga SET wake_at = wake_at + " + hour + ", created_at = created_at + " + hour +
		", updated_at = updated_at + " + hour + " WHERE owner > ''")
	require.NoError(t, err)
	n, err := moved.RowsAffected()
	require.NoError(t, err)
	require.EqualValues(t, 1, n)
}

// continuesAfter returns a row in which a runner is in trouble and another one has to complete its saga.
func continuesAfter(
	driver string, what func(*testing.T, worker, *faultproxy.Proxy, workerConfig),
) func(t *testing.T) harm.Result {
	return func(t *testing.T) harm.Result {
		here, there, proxy := newStore(t, driver)
		there.Saga = true
		runner := saga.NewRunner(sqlstore.New(open(here), dialects[driver], sqlstore.Config{}), runnerConfig)
		def := trip(func(context.Context) {})
		sagas := saga.Register(runner, def)
		_, err := sagas.Start(t.Context(), "1", struct{}{})
		require.NoError(t, err)
		owner := startWorker(t, there)
		ctx, cancel := context.WithCancel(context.Background())
		stopped := make(chan error, 1)
		go func() { stopped <- runner.Run(ctx) }()
		defer func() { cancel(); <-stopped }()
		what(t, owner, proxy, here)
		began := time.Now()
		limit, stop := context.WithTimeout(t.Context(), 2*documented)
		defer stop()
		_, err = sagas.Result(limit, "1")
		if errors.Is(err, context.DeadlineExceeded) {
			return tookOver(0)
		}
		require.NoError(t, err)
		return tookOver(time.Since(began))
	}
}

// hungStep is a row in which an attempt ignores its ctx. After its Timeout and one LeaseTTL, Health must name the step.
func hungStep(t *testing.T) (r harm.Result) {
	here, _, _ := newStore(t, "sqlite")
	db := open(here)
	defer db.Close()
	config := runnerConfig
	config.Drain = saga.None
	runner := saga.NewRunner(sqlstore.New(db, sqlstore.SQLite, sqlstore.Config{}), config)
	begun, end := make(chan struct{}), make(chan struct{})
	def := trip(func(context.Context) { close(begun); <-end })
	def.Steps[0].Timeout = time.Second
	sagas := saga.Register(runner, def)
	_, err := sagas.Start(t.Context(), "1", struct{}{})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan error, 1)
	go func() { stopped <- runner.Run(ctx) }()
	defer func() { cancel(); close(end); <-stopped }()
	<-begun
	began := time.Now()
	limit := def.Steps[0].Timeout + ttl
	seen := eventually(2*limit, func() bool {
		return strings.Contains(runner.Describe().Health(t.Context()).Detail, def.Steps[0].Name)
	})
	cell := "never"
	if seen {
		cell = fmt.Sprintf("%.1fs", time.Since(began).Seconds())
	}
	r.Cells = []string{cell, fmt.Sprintf("%.1fs", limit.Seconds())}
	r.Break(seen, "Health does not name the step %v after the attempt has begun", 2*limit)
	return r
}

func leaseTable() *harm.Table {
	return takeovers("lease", "TTL 3s, Poll 500ms", leads, []string{"redis", "pgx", "sqlite"})
}

func sagaTable() *harm.Table {
	table := takeovers("saga", "LeaseTTL 3s, Poll 500ms", continues, []string{"pgx", "sqlite"})
	table.Rows = append(table.Rows, harm.Row{
		Name: "SQLite clock", Trouble: "the clock of the store is set back by an hour and the process is killed",
		Run: continuesAfter("sqlite", clockBack),
	}, harm.Row{
		Name: "SQLite hung", Trouble: "an attempt ignores the end of its ctx; the time until Health names the step",
		Run: hungStep,
	})
	return table
}

// takeovers returns a table of takeovers on some stores.
func takeovers(
	name, config string, row func(driver string, what trouble) func(t *testing.T) harm.Result, drivers []string,
) *harm.Table {
	table := &harm.Table{
		Name: name,
		Title: config + ". The time from the trouble to the takeover by another process, and the documented time. The " +
			"test allows twice as long.",
		Head: []string{"takeover", "documented"},
	}
	for _, driver := range drivers {
		for _, fault := range []struct {
			name, trouble string
			proxied       bool
			what          trouble
		}{
			{"killed", "the process is killed", false, killed},
			{"paused", "the process is paused", false, paused},
			{"hangs", "the store does not answer the process", true, cutOff},
			{"refused", "the store refuses the process", true, refused},
		} {
			if fault.proxied && driver == "sqlite" {
				continue // SQLite has no network
			}
			store := map[string]string{"redis": "Redis", "pgx": "PostgreSQL", "sqlite": "SQLite"}[driver]
			table.Rows = append(table.Rows, harm.Row{
				Name: store + " " + fault.name, Trouble: fault.trouble, Run: row(driver, fault.what),
			})
		}
	}
	return table
}
