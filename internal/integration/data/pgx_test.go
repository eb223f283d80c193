package data_test

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/internal/integration/faultproxy"
	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/resiliencepgx"
	"github.com/go-resilience/resilience/resiliencesql"
	"github.com/go-resilience/resilience/retry"
)

func newPool(t *testing.T, dsn string) *pgxpool.Pool {
	pool, err := pgxpool.New(t.Context(), dsn)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

var often = retry.New(retry.Config{Attempts: 20, Backoff: retry.Constant(time.Millisecond)}).Wrap

// TestPgxWriteInReadOnlyTx runs fn once, because a write in a read-only transaction is a mistake of fn.
func TestPgxWriteInReadOnlyTx(t *testing.T) {
	d, runs := postgres(t), 0
	err := resiliencepgx.InTx(t.Context(), newPool(t, fmt.Sprintf(d.dsn, d.addr)),
		resiliencepgx.Config{Options: pgx.TxOptions{AccessMode: pgx.ReadOnly}, Retry: often},
		func(ctx context.Context, tx pgx.Tx) error {
			runs++
			_, err := tx.Exec(ctx, "INSERT INTO book VALUES ('a', 1)")
			return err
		})
	requireAnswered(t, err)
	require.Equal(t, 1, runs)
}

// TestPgxInTx: a serialization failure and a backend that is killed are tried again, a
// duplicate and a transaction that had failed before its COMMIT are not.
func TestPgxInTx(t *testing.T) {
	d := postgres(t)
	pool, db := newPool(t, fmt.Sprintf(d.dsn, d.addr)), d.open(t, d.addr)
	execute(t, db, "INSERT INTO book VALUES ('x', 1)")
	runs := 0
	n, err := resiliencepgx.Value(t.Context(), pool,
		resiliencepgx.Config{Retry: often, Options: pgx.TxOptions{IsoLevel: pgx.Serializable}},
		func(ctx context.Context, tx pgx.Tx) (n int, err error) {
			var id int
			if err := tx.QueryRow(ctx, "SELECT pg_backend_pid(), count(*) FROM book").Scan(&id, &n); err != nil {
				return 0, err
			}
			switch runs++; runs {
			case 1:
				kill(t, d, db, id)
			case 2:
				execute(t, db, "UPDATE book SET n = 2")
			}
			_, err = tx.Exec(ctx, "UPDATE book SET n = n + 1")
			if err == nil {
				_, err = tx.Exec(ctx, "INSERT INTO book VALUES ('a', $1)", n)
			}
			return n, err
		})
	require.NoError(t, err)
	require.Equal(t, []int{1, 3}, []int{n, runs})

	fallback := resilience.Fallback(func(context.Context, error) error { return nil })
	n, err = resiliencepgx.Value(t.Context(), pool, resiliencepgx.Config{Retry: fallback},
		func(ctx context.Context, tx pgx.Tx) (int, error) {
			_, _ = tx.Exec(ctx, "INSERT INTO book VALUES ('a', 1)")
			return 7, nil // and COMMIT rolls back
		})
	require.NoError(t, err)
	require.Zero(t, n, "a value of a transaction that failed")

	duplicate := func(ctx context.Context, tx pgx.Tx) error {
		runs++
		_, err := tx.Exec(ctx, "INSERT INTO book VALUES ('a', 1)")
		return err
	}
	circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
	runs = 0
	requireAnswered(t, resiliencepgx.InTx(t.Context(), pool, resiliencepgx.Config{Retry: circuit.Wrap}, duplicate))
	err = resiliencepgx.InTx(t.Context(), pool, resiliencepgx.Config{Retry: often},
		func(ctx context.Context, tx pgx.Tx) error {
			_ = duplicate(ctx, tx)
			return nil
		})
	requireAnswered(t, err)
	require.ErrorIs(t, err, pgx.ErrTxCommitRollback)
	requireAnswered(t, resiliencepgx.InTx(t.Context(), pool, resiliencepgx.Config{Retry: often},
		func(ctx context.Context, tx pgx.Tx) error {
			return tx.QueryRow(ctx, "SELECT n FROM book WHERE id = 'none'").Scan(new(int))
		}))
	require.Equal(t, 2, runs)
	require.Equal(t, breaker.Closed, circuit.State())
	require.Zero(t, pool.Stat().AcquiredConns())
}

// TestPgxCommitWhoseAnswerIsLost: pgx says that nothing was sent, and it was.
func TestPgxCommitWhoseAnswerIsLost(t *testing.T) {
	d := postgres(t)
	db, proxy := d.open(t, d.addr), faultproxy.New(t, d.addr)
	pool := newPool(t, fmt.Sprintf(d.dsn, proxy.Addr()))
	runs := 0
	err := resiliencepgx.InTx(t.Context(), pool, resiliencepgx.Config{Retry: often},
		func(ctx context.Context, tx pgx.Tx) error {
			runs++
			_, err := tx.Exec(ctx, "INSERT INTO book VALUES ('a', 1)")
			proxy.Hold(faultproxy.ToClient)
			go func() {
				for n := 0; n == 0; time.Sleep(time.Millisecond) {
					_ = db.QueryRow("SELECT count(*) FROM book").Scan(&n)
				}
				proxy.Reset()
				proxy.Heal()
			}()
			return err
		})
	require.ErrorIs(t, err, resiliencesql.ErrOutcomeUnknown)
	require.Equal(t, 1, runs)
}

// TestPgxListenTellsThatItWasAway by its error, and by the first call of notify after it.
func TestPgxListenTellsThatItWasAway(t *testing.T) {
	d := postgres(t)
	db, proxy := d.open(t, d.addr), faultproxy.New(t, d.addr)
	pool := newPool(t, fmt.Sprintf(d.dsn, proxy.Addr())+"&pool_max_conns=1")
	heard := make(chan struct{}, 100)
	listen := func(ctx context.Context) chan error {
		done := make(chan error, 1)
		for {
			go func() { done <- resiliencepgx.Listen(pool)(ctx, "Orders", func() { heard <- struct{}{} }) }()
			select {
			case <-heard:
				return done
			case <-done: // the pool has lost its connection too: as the runner of sagas does, again
			}
		}
	}
	done := listen(t.Context())
	require.NoError(t, pool.Ping(t.Context()), "the pool's only connection is free")
	execute(t, db, `NOTIFY "Orders"`)
	<-heard
	proxy.Reset()
	require.Error(t, <-done)
	ctx, cancel := context.WithCancel(t.Context())
	done = listen(ctx)
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
}

// TestPgxThroughPgBouncer: transactions work, also when it is restarted in the middle of one.
func TestPgxThroughPgBouncer(t *testing.T) {
	d := postgres(t)
	u, err := url.Parse(fmt.Sprintf(d.dsn, d.addr))
	require.NoError(t, err)
	schema, name := u.Query().Get("search_path"), strings.TrimPrefix(u.Path, "/")
	pooler := services.NewPgBouncer(t, name)
	pool := newPool(t, "postgres://postgres@"+pooler.Addr+"/"+name+"?sslmode=disable&default_query_exec_mode=exec")
	runs := 0
	for i := range 20 {
		require.NoError(t, resiliencepgx.InTx(t.Context(), pool, resiliencepgx.Config{Retry: often},
			func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "INSERT INTO "+schema+".book VALUES ($1, $2)", fmt.Sprint(i), i)
				if runs++; runs == 10 {
					pooler.Kill()
					pooler.Start()
				}
				if err == nil {
					_, err = tx.Exec(ctx, "UPDATE "+schema+".book SET n = n + 1 WHERE id = $1", fmt.Sprint(i))
				}
				return err
			}))
	}
	var sum int
	require.NoError(t, d.open(t, d.addr).QueryRow("SELECT sum(n) FROM book").Scan(&sum))
	require.Equal(t, 20*19/2+20, sum)
	require.Equal(t, 21, runs)
}
