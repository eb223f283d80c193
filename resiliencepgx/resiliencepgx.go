// Package resiliencepgx runs retryable transactions in a pool of github.com/jackc/pgx/v5, and acquires the pool's
// connections under policies. The function [Listen] passes PostgreSQL's notifications to package sqlstore.
//
//	err := resiliencepgx.InTx(ctx, pool, resiliencepgx.Config{Retry: resilience.Chain(retries.Wrap, circuit.Wrap)},
//		func(ctx context.Context, tx pgx.Tx) error {
//			_, err := tx.Exec(ctx, "UPDATE account SET cents = cents - $1 WHERE id = $2", cents, id)
//			return err // if this is an error, the transaction is rolled back
//		})
//
//	db := stdlib.OpenDBFromPool(pool) // a *sql.DB on the same connections
//	store := sqlstore.New(db, sqlstore.PostgreSQL, sqlstore.Config{Listen: resiliencepgx.Listen(pool)})
//
// By default, a pool has 4 connections, or one for each CPU if there are more than 4 CPUs. A store of sagas may need
// more connections; see package sqlstore. To set the number of connections, use pool_max_conns in the DSN.
//
// Errors are classified as in package resiliencesql, and an error of InTx may match resiliencesql.ErrOutcomeUnknown.
// If fn ignores an error of a statement, PostgreSQL rolls the transaction back at COMMIT. InTx then returns an error
// that matches pgx.ErrTxCommitRollback. The error counts as an answer of the database, so the transaction is not
// retried.
//
// # PgBouncer
//
// InTx works with a pooler that assigns a connection to each transaction. With PgBouncer, set
// default_query_exec_mode=exec in the DSN, or max_prepared_statements in PgBouncer's configuration.
//
// Listen does not work with a pooler that assigns a connection to each transaction, because a notification arrives on
// the connection that has executed LISTEN. Call Listen with a pool that connects to the server directly, or to a
// pooler that assigns a connection to each session.
//
// # Stability
//
// This package is unstable until version 1.0.0: a minor version may change it.
package resiliencepgx

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/resiliencesql"
)

// A Config configures a transaction. The zero Config is usable. The fields are like the fields of resiliencesql.Config.
type Config struct {
	// Options are the options of the transaction. Zero means the server's defaults.
	Options pgx.TxOptions
	// Retry wraps the transaction in policies. Retry is the Wrap method of a Retrier, or a Chain of that method and other
	// policies. The Retrier repeats a transaction only if the transaction has had no effect. Nil means one attempt.
	Retry resilience.Middleware
	// Check is called if the outcome of a COMMIT is unknown. Check reports whether the original transaction was
	// committed. To find out, Check can query tx, which is a new transaction; see resiliencesql.Config. Nil means that
	// the outcome remains unknown.
	Check func(ctx context.Context, tx pgx.Tx) (committed bool, err error)
}

func (cfg Config) in(pool *pgxpool.Pool) resiliencesql.Transactions[tx] {
	in := resiliencesql.Transactions[tx]{Code: cfg.code, Begin: func(ctx context.Context) (tx, error) {
		t, err := pool.BeginTx(ctx, cfg.Options)
		return tx{Tx: t}, err
	}, Primary: func(ctx context.Context, probe string) (tx, error) {
		conn, err := primary(ctx, pool, probe)
		if err != nil {
			return tx{}, err
		}
		t, err := conn.BeginTx(ctx, cfg.Options)
		if err != nil {
			conn.Release()
		}
		return tx{t, conn}, err
	}}
	if cfg.Check != nil {
		in.Check = func(ctx context.Context, t tx) (bool, error) { return cfg.Check(ctx, t.Tx) }
	}
	return in
}

// A tx is a resiliencesql.Tx, which InTx commits or rolls back.
type tx struct {
	pgx.Tx
	conn *pgxpool.Conn // the connection to release when Tx has ended; nil if Tx releases it itself
}

func (t tx) Commit(ctx context.Context) error   { return t.end(t.Tx.Commit(ctx)) }
func (t tx) Rollback(ctx context.Context) error { return t.end(t.Tx.Rollback(ctx)) }

func (t tx) end(err error) error {
	if t.conn != nil {
		t.conn.Release()
	}
	return err
}

// primary returns a connection to a server that accepts writes, and closes the pool's connections to other servers; see
// resiliencesql.Transactions.
func primary(ctx context.Context, pool *pgxpool.Pool, probe string) (*pgxpool.Conn, error) {
	for most := pool.Stat().TotalConns(); ; most-- {
		s := pool.Stat()
		pooled := s.IdleConns() > 0 || s.TotalConns() >= s.MaxConns()
		conn, err := pool.Acquire(ctx)
		if err != nil {
			return nil, err
		}
		err = conn.QueryRow(ctx, probe).Scan(nil)
		if errors.Is(err, pgx.ErrNoRows) {
			return conn, nil
		}
		if err == nil {
			err = errors.New("resiliencepgx: server takes no writes")
		}
		if pooled {
			_ = conn.Conn().Close(ctx)
		}
		conn.Release()
		if !pooled || most <= 0 || ctx.Err() != nil {
			return nil, err
		}
	}
}

// code returns the SQLSTATE of an error of pgx that itself has none.
func code(err error) string {
	if errors.Is(err, pgx.ErrTxCommitRollback) {
		return "25P02" // SQLSTATE in_failed_sql_transaction
	}
	return ""
}

// code is like the function code. In a transaction that is read-only by Options, a rejected write is a mistake of fn
// and not a sign of a read-only server.
func (cfg Config) code(err error) string {
	if e, ok := errors.AsType[*pgconn.PgError](err); ok && e.Code == "25006" && cfg.Options.AccessMode == pgx.ReadOnly {
		return "25000" // invalid transaction state
	}
	return code(err)
}

// InTx runs fn in a transaction and commits it, by the rules of resiliencesql.InTx.
func InTx(ctx context.Context, pool *pgxpool.Pool, cfg Config, fn func(ctx context.Context, tx pgx.Tx) error) error {
	return cfg.in(pool).InTx(ctx, cfg.Retry, func(ctx context.Context, t tx) error { return fn(ctx, t.Tx) })
}

// Value is like [InTx], but fn also returns a value. If Value returns an error, the value is the zero T.
func Value[T any](
	ctx context.Context, pool *pgxpool.Pool, cfg Config, fn func(ctx context.Context, tx pgx.Tx) (T, error),
) (T, error) {
	return resilience.Do(ctx, cfg.Retry, func(ctx context.Context) (value T, err error) {
		err = cfg.in(pool).InTx(ctx, nil, func(ctx context.Context, t tx) (err error) {
			value, err = fn(ctx, t.Tx)
			return err
		})
		return value, err
	})
}

// Acquire acquires a connection of pool under policies, such as a breaker's Wrap. The policies observe only whether a
// connection was acquired, and not the queries on the connection. The caller must release the connection.
func Acquire(ctx context.Context, pool *pgxpool.Pool, policies resilience.Middleware) (*pgxpool.Conn, error) {
	return resilience.Do(ctx, policies, func(ctx context.Context) (*pgxpool.Conn, error) {
		conn, err := pool.Acquire(ctx)
		return conn, resiliencesql.Judge(ctx, err, code)
	})
}

// silence is the time without a notification after which Listen pings the server. It is also the timeout of the ping.
const silence = 10 * time.Second

// Listen returns a function for sqlstore.Config.Listen. The returned function executes LISTEN for the channel and
// calls notify once. After that, the function calls notify for each notification until ctx is done or the connection
// is lost.
//
// When the connection is lost, the function returns an error. The saga.Runner that uses the store then calls the
// function again. Each call to the function first calls notify once, because notifications may have been missed.
//
// The function takes a connection out of pool and uses it exclusively, so the connection does not count toward the
// pool's limit. If no notification arrives for 10 seconds, the function pings the server. If the server does not answer
// within another 10 seconds, the connection counts as lost.
//
// Listen panics if pool is nil.
func Listen(pool *pgxpool.Pool) func(ctx context.Context, channel string, notify func()) error {
	if pool == nil {
		panic("resiliencepgx: Listen: *pgxpool.Pool is nil: must be set")
	}
	return func(ctx context.Context, channel string, notify func()) error {
		pooled, err := pool.Acquire(ctx)
		if err != nil {
			return fmt.Errorf("resiliencepgx: channel %s: %w", channel, err)
		}
		conn := pooled.Hijack()
		defer func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			_ = conn.Close(ctx)
		}()
		if _, err := conn.Exec(ctx, "LISTEN "+pgx.Identifier{channel}.Sanitize()); err != nil {
			return fmt.Errorf("resiliencepgx: channel %s: %w", channel, err)
		}
		notify()
		for {
			wait, cancel := context.WithTimeout(ctx, silence)
			_, err := conn.WaitForNotification(wait)
			silent := wait.Err() != nil
			cancel()
			switch {
			case err == nil:
				notify()
				continue
			case ctx.Err() != nil:
				return context.Cause(ctx)
			case silent:
				alive, cancel := context.WithTimeout(ctx, silence)
				err = conn.Ping(alive)
				cancel()
			}
			if err != nil {
				return fmt.Errorf("resiliencepgx: channel %s: %w", channel, err)
			}
		}
	}
}
