package saga_test

import (
	"bytes"
	"context"
	"fmt"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/faultproxy"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

// A bad network between the store and PostgreSQL: answers that are lost, COMMITs
// that arrive late, connections that are half open.

// proxied returns d as it is reached through a new proxy.
func proxied(t *testing.T, d database) (database, *faultproxy.Proxy) {
	t.Helper()
	if d.Dialect == sqlstore.MySQL {
		config, err := mysql.ParseDSN(d.DSN)
		require.NoError(t, err)
		p := faultproxy.New(t, config.Addr)
		config.Addr = p.Addr()
		d.DSN = config.FormatDSN()
		return d, p
	}
	u, err := url.Parse(d.DSN)
	require.NoError(t, err)
	p := faultproxy.New(t, u.Host)
	u.Host = p.Addr()
	d.DSN = u.String()
	return d.with(t, "sslmode", "disable"), p // so that the proxy can read along
}

// with returns d with one more parameter of its connections.
func (d database) with(t *testing.T, key string, value any) database {
	t.Helper()
	if d.Dialect == sqlstore.MySQL {
		config, err := mysql.ParseDSN(d.DSN)
		require.NoError(t, err)
		config.Params = map[string]string{key: fmt.Sprint(value)}
		d.DSN = config.FormatDSN()
		return d
	}
	u, err := url.Parse(d.DSN)
	require.NoError(t, err)
	q := u.Query()
	q.Set(key, fmt.Sprint(value))
	u.RawQuery = strings.ReplaceAll(q.Encode(), "+", "%20") // which is not a form's
	d.DSN = u.String()
	return d
}

// isCommit reports whether pgx or go-sql-driver sends a COMMIT with data.
func isCommit(data []byte) bool {
	return bytes.Contains(data, []byte("commit\x00")) || bytes.Contains(data, []byte("\x03COMMIT"))
}

// TestHalfOpenConnectionCostsNoLease has the next heartbeats find a connection
// that never answers.
func TestHalfOpenConnectionCostsNoLease(t *testing.T) {
	t.Parallel()
	far, proxy := proxied(t, newDatabase(t, sqlstore.PostgreSQL))
	db := far.open(t)
	db.SetMaxIdleConns(1) // the one that is cut
	store := sqlstore.New(db, far.Dialect, sqlstore.Config{})
	const lease = 4 * time.Second
	begun, ended := make(chan struct{}), make(chan error, 1)
	sg := &saga.Saga[nothing]{Name: "trip",
		Steps: []saga.Step[nothing]{{Name: "long", Undo: done, Do: func(ctx context.Context, _ *nothing) error {
			close(begun)
			select {
			case <-ctx.Done():
			case <-time.After(2 * lease):
			}
			ended <- ctx.Err()
			return nil
		}}}}
	r := saga.NewRunner(store, saga.RunnerConfig{LeaseTTL: lease, Poll: time.Hour})
	sagas := saga.Register(r, sg)
	run(t, r)
	_, err := sagas.Start(t.Context(), "a", nothing{})
	require.NoError(t, err)
	<-begun
	defer proxy.Cut(faultproxy.ToClient)()
	require.NoError(t, <-ended, "the saga was lost")
	require.NotZero(t, r.Stats().StoreErrors, "no heartbeat has found the connection")
}

// TestLateCommitIsNotTakenForAnother holds a DoTx's COMMIT back until its owner
// has given it up. The next record has the same length: the owner must not take
// the row that it finds then for the record that it wrote.
func TestLateCommitIsNotTakenForAnother(t *testing.T) {
	pay := func(name string, attempts int) saga.Step[nothing] {
		return saga.Step[nothing]{Name: name, DoTx: mark, UndoTx: mark, Timeout: 300 * time.Millisecond, Attempts: attempts}
	}
	book := saga.Step[nothing]{Name: "book", Do: done, UndoTx: mark}
	for name, steps := range map[string][]saga.Step[nothing]{
		"and its owner tries again": {pay("pay", 3), {Name: "send", Do: done, Undo: done}},
		"and its owner turns back":  {book, pay("pay", 1)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDatabase(t, sqlstore.PostgreSQL)
			db := d.open(t)
			_, err := db.Exec(markTable)
			require.NoError(t, err)
			far, proxy := proxied(t, d)
			var held atomic.Int64
			proxy.Delay(faultproxy.ToServer, func(data []byte) time.Duration {
				if isCommit(data) && held.Add(1) == 1 {
					return 900 * time.Millisecond
				}
				return 0
			})
			sg := &saga.Saga[nothing]{Name: "trip", Steps: steps}
			r := saga.NewRunner(far.store(t), saga.RunnerConfig{LeaseTTL: 3 * time.Second, Poll: 50 * time.Millisecond})
			sagas := saga.Register(r, sg)
			run(t, r)
			_, err = sagas.Start(t.Context(), "a", nothing{})
			require.NoError(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			_, err = result(ctx, r, "a")
			require.NoError(t, err)
			require.Equal(t, 1, marks(t, db), "it was applied once, and not undone")
			time.Sleep(time.Second) // for the late COMMIT
			require.Equal(t, 1, marks(t, db))
			in, err := r.Get(t.Context(), "a")
			require.NoError(t, err)
			require.Equal(t, saga.Completed, in.Status)
			log, err := r.History(t.Context(), "a", 0, 0)
			require.NoError(t, err)
			require.EqualValues(t, in.Seq, len(log))
			for i, e := range log {
				require.EqualValues(t, i+1, e.Seq, "log gap")
			}
		})
	}
}
