// Package resiliencepgx runs transactions of a github.com/jackc/pgx/v5 pool that may be tried
// again, acquires its connections under policies, and has the function by which sqlstore hears
// PostgreSQL's notifications.
//
//	err := resiliencepgx.InTx(ctx, pool, resiliencepgx.Config{Retry: resilience.Chain(retries.Wrap, circuit.Wrap)},
//		func(ctx context.Context, tx pgx.Tx) error {
//			_, err := tx.Exec(ctx, "UPDATE account SET cents = cents - $1 WHERE id = $2", cents, id)
//			return err // an error rolls back
//		})
//
//	db := stdlib.OpenDBFromPool(pool) // a *sql.DB on the same connections
//	store := sqlstore.New(db, sqlstore.PostgreSQL, sqlstore.Config{Listen: resiliencepgx.Listen(pool)})
//
// A pool has four connections, or one for each CPU if there are more, unless pool_max_conns
// of its DSN says otherwise: few for sagas, see package sqlstore.
//
// What an error means is what package resiliencesql says, whose ErrOutcomeUnknown is that of
// InTx too. A transaction that was rolled back at COMMIT, since fn has ignored an error of a
// statement, is answered: pgx.ErrTxCommitRollback.
//
// # PgBouncer
//
// InTx works through a pooler that lends a connection for each transaction, with
// default_query_exec_mode=exec in the DSN or max_prepared_statements in PgBouncer. Listen does
// not: a notification comes on the connection that has executed LISTEN. Give it a pool that
// goes to the server itself, or to a pooler that lends a connection for the session.
package resiliencepgx

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/resiliencesql"
)

// A Config configures a transaction. The zero Config is usable. The fields are those of
// resiliencesql.Config.
type Config struct {
	// Options are those of the transaction. Zero means the server's defaults.
	Options pgx.TxOptions
	// Retry runs the transaction, again where it has had no effect: the Wrap of a Retrier, or
	// a Chain of it and other policies. Nil means one attempt.
	Retry resilience.Middleware
	// Check settles a COMMIT whose outcome is unknown. Nil means that it stays so.
	Check func(ctx context.Context, tx pgx.Tx) (committed bool, err error)
}

func (cfg Config) in(pool *pgxpool.Pool) resiliencesql.Transactions[tx] {
	in := resiliencesql.Transactions[tx]{Code: code, Begin: func(ctx context.Context) (tx, error) {
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

// A tx is a resiliencesql.Tx.
type tx struct {
	pgx.Tx
	conn *pgxpool.Conn // released with the end of Tx; nil: Tx does so
}

func (t tx) Commit(ctx context.Context) error   { return t.end(t.Tx.Commit(ctx)) }
func (t tx) Rollback(ctx context.Context) error { return t.end(t.Tx.Rollback(ctx)) }

func (t tx) end(err error) error {
	if t.conn != nil {
		t.conn.Release()
	}
	return err
}

// primary returns a connection to a server that takes writes: see resiliencesql.Transactions.
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
			err = errors.New("the server takes no writes")
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

// code returns the SQLSTATE of an error that pgx has made of another.
func code(err error) string {
	if errors.Is(err, pgx.ErrTxCommitRollback) {
		return "25P02" // in failed transaction
	}
	return ""
}

// InTx runs fn in a transaction and commits it, by the rules of resiliencesql.InTx.
func InTx(ctx context.Context, pool *pgxpool.Pool, cfg Config, fn func(ctx context.Context, tx pgx.Tx) error) error {
	return cfg.in(pool).InTx(ctx, cfg.Retry, func(ctx context.Context, t tx) error { return fn(ctx, t.Tx) })
}

// Value is [InTx] for an fn that returns a value; on error, the zero T.
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

// Acquire returns a connection of pool. policies, such as a breaker's Wrap, see whether there
// was one; what is done with it is not theirs.
func Acquire(ctx context.Context, pool *pgxpool.Pool, policies resilience.Middleware) (*pgxpool.Conn, error) {
	return resilience.Do(ctx, policies, func(ctx context.Context) (*pgxpool.Conn, error) {
		conn, err := pool.Acquire(ctx)
		return conn, resiliencesql.Judge(ctx, err, code)
	})
}

// silence is after how long without a notification the server is asked for a sign of life,
// and how long that may take.
const silence = 10 * time.Second

// Listen returns the Listen of sqlstore: it executes LISTEN for the channel and
// calls notify once then and for each notification, until ctx ends or the connection is lost.
// Its caller calls it again then, and hears by the first notify that it may have missed some.
// The connection is made as those of pool are, and is not one of them while it listens. A
// server that is silent for ten seconds, and does not answer within another ten, is lost.
func Listen(pool *pgxpool.Pool) func(ctx context.Context, channel string, notify func()) error {
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
