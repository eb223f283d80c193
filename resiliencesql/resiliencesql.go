// Package resiliencesql classifies the errors of a database and runs transactions that can be retried. The policies of
// this module handle the classified errors correctly. The package supports PostgreSQL, MySQL, MariaDB and SQLite
// through database/sql. It imports no driver.
//
//	guard := resilience.Chain(circuit.Wrap, slots.Wrap)
//	err := resiliencesql.InTx(ctx, db, resiliencesql.Config{Retry: resilience.Chain(retries.Wrap, guard)},
//		func(ctx context.Context, tx *sql.Tx) error {
//			_, err := tx.ExecContext(ctx, "UPDATE account SET cents = cents - $1 WHERE id = $2", cents, id)
//			return err // if this is an error, the transaction is rolled back
//		})
//
//	// A single statement, outside a transaction:
//	name, err := resilience.Do(ctx, resilience.Chain(guard, resiliencesql.Middleware(resiliencesql.Config{})), load)
//
// # Classification of errors
//
// [InTx] and [Middleware] give each error of a database one of four verdicts. Policies read the verdict through the
// error's methods, which docs/protocol.md describes. Errors that are not from a database are returned unchanged. The
// error of a ctx that is done is also returned unchanged.
//
// For each verdict, the table shows whether a breaker counts the call as a success, whether a retrier makes another
// attempt, and which error codes have this verdict. An SQLSTATE of two characters is a class of codes.
//
//	                  breaker  retry  SQLSTATE                   MySQL, MariaDB                 SQLite
//	answered          success  no     all others; sql.ErrNoRows  all others                     CONSTRAINT, ERROR, ...
//	again             success  yes    40 except 40002, 40003;    1213, 1205, 1020, 3572, ...    BUSY, LOCKED
//	                                  55P03; stale statement
//	unavailable       failure  yes    08, 53, 57, 58, F0, XX;    1040, 1203, 1226, 1053, 1021,  FULL, IOERR, READONLY,
//	                                  25P03, 25P04; read-only    1114, ...; read-only           CANTOPEN, CORRUPT, ...
//	outcome unknown   failure  no     40003, 08007               2013, 1927, 1180, ...
//
//	stale statement                   26000, 0A000 of a plan
//	read-only server                  25006, 0A000 of BEGIN      1290, 1836, 1792, 1047
//
// The verdicts mean:
//
//   - answered: the database works and has rejected the statement.
//   - again: the transaction was rolled back in favor of another one, or its prepared statement was stale. The
//     transaction has had no effect and can be repeated.
//   - unavailable: the database could not execute the statement, which has had no effect.
//   - outcome unknown: the statement or the transaction may have taken effect. An error with the verdict "outcome
//     unknown" matches [ErrOutcomeUnknown].
//
// Some codes mean that a statement was interrupted: SQLSTATE 57014, MySQL's 1317, 1969 and 3024, and SQLite's
// INTERRUPT. If a statement was interrupted and ctx is done, the error is the error of ctx. If a timeout of the server
// has interrupted the statement, the verdict is "unavailable".
//
// If a connection is lost while a statement is in progress, the verdict depends on whether the statement is in a
// transaction. Outside a transaction, the statement may have taken effect, and the outcome is unknown. Inside a
// transaction, nothing has taken effect until COMMIT is sent.
//
// Errors of the following kinds mean that nothing was sent: an error from opening a connection, an error of pgx whose
// method SafeToRetry returns true, and driver.ErrBadConn. If the database has not answered a COMMIT, the outcome is
// unknown, even if the error means that nothing was sent.
//
// # Failover
//
// After a failover, connections of the pool may lead to a server that is no longer the primary. A connection to a
// former primary works, but every write through it fails. [InTx] closes such connections, finds a connection to the
// new primary, and runs the transaction there within the same attempt. If a prepared statement is stale, InTx runs the
// transaction once more within the same attempt.
//
// If the options make a transaction read-only, a rejected write is a mistake of fn. In such a transaction, the verdict
// of the codes 25006 and 1792 is "answered".
//
// Execute writes inside transactions. Outside a transaction, database/sql repeats a statement by itself if the driver
// reports that nothing was sent. If the connection is lost while the database executes a statement without arguments,
// pgx (v5.12) reports that nothing was sent. The statement may then take effect twice. A statement outside a
// transaction may also take effect twice if a Retrier with a timeout for each attempt runs it. After the timeout, the
// Retrier repeats the statement, because the error is the error of a ctx.
//
// # Drivers
//
// The driver github.com/go-sql-driver/mysql returns mysql.ErrInvalidConn for a lost connection. This package cannot
// recognize mysql.ErrInvalidConn, because it does not import the driver. If you execute statements outside of
// transactions, add a Code that recognizes mysql.ErrInvalidConn:
//
//	Config{Code: func(err error) string {
//		if errors.Is(err, mysql.ErrInvalidConn) {
//			return "08007"
//		}
//		return ""
//	}}
//
// The driver github.com/go-sql-driver/mysql ignores ctx during COMMIT. Limit the duration of a COMMIT with readTimeout
// in the DSN.
//
// If fn ignores an error of a statement, PostgreSQL rolls the transaction back at COMMIT. Through database/sql, pgx
// reports this rollback as pgx.ErrTxCommitRollback, which has no SQLSTATE. The outcome is then unknown, unless Code
// returns "25P02" for pgx.ErrTxCommitRollback.
//
// If fn ignores an error on MySQL, the transaction continues. Ignoring a deadlock (error 1213) is dangerous: MySQL has
// rolled back all earlier statements, and commits each later statement separately. So fn must return the error of a
// deadlock.
//
// # Connection pools
//
// A pool of connections limits the number of concurrent calls, as a bulkhead does. [Pool] makes a pool of connections
// visible in a registry.
//
// # Stability
//
// This package is unstable until version 1.0.0: a minor version may change it.
package resiliencesql

import (
	"context"
	"database/sql"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/sqltx"
)

// ErrOutcomeUnknown means that the answer to a COMMIT, or to a statement outside a transaction, was lost. The
// transaction or the statement may have taken effect, and is not retried.
var ErrOutcomeUnknown = sqltx.ErrOutcomeUnknown

// A Config configures a [Middleware] or a transaction. The zero Config is usable.
type Config struct {
	// Code returns the SQLSTATE of an error that this package does not recognize, or "". Code is called before this
	// package classifies the error. Nil means that only this package classifies errors.
	Code func(err error) string

	// Options are the options of the transaction. Nil means the driver's defaults.
	Options *sql.TxOptions
	// Retry wraps the transaction in policies. Retry is the Wrap method of a Retrier, or a Chain of that method and other
	// policies. The Retrier repeats a transaction only if the transaction has had no effect. Nil means one attempt.
	Retry func(next func(context.Context) error) func(context.Context) error
	// Check is called if the outcome of a COMMIT is unknown. Check reports whether the original transaction was
	// committed. To find out, Check can query tx, which is a new transaction that is always rolled back. If Check returns
	// false, the original transaction is retried. Nil means that the outcome remains unknown.
	//
	// The COMMIT may still be in transit when Check is called. A Check that only reads may therefore miss the COMMIT. A
	// Check that inserts the same unique row as the original transaction waits for the COMMIT, and then finds a
	// duplicate.
	//
	// Check is part of the attempt, so timeouts in Retry also apply to Check. If Check returns an error, or a timeout in
	// Retry expires, the outcome remains unknown.
	Check func(ctx context.Context, tx *sql.Tx) (committed bool, err error)
}

// Middleware returns a middleware that classifies each call's error, as the package documentation describes. The
// returned middleware must be the innermost one, directly around the call to the database. Middleware uses only
// cfg.Code.
func Middleware(cfg Config) func(next func(context.Context) error) func(context.Context) error {
	return func(next func(context.Context) error) func(context.Context) error {
		return func(ctx context.Context) error {
			if ctx.Err() != nil {
				return ended.Error(ctx)
			}
			return sqltx.Judge(ctx, next(ctx), cfg.Code)
		}
	}
}

// InTx runs fn in a transaction and commits it. InTx rolls the transaction back if fn returns an error, panics or ends
// its goroutine, or if ctx is done before COMMIT. fn may be called several times, each time with a new transaction, so
// fn must have no effects outside of tx. fn must not commit tx or roll it back.
//
// Errors of fn and of the database get their verdicts; see the package documentation. An error that occurs before
// COMMIT is sent never has the verdict "outcome unknown". If COMMIT fails without an answer of the database, the error
// matches [ErrOutcomeUnknown], unless Config.Check finds out the outcome.
func InTx(ctx context.Context, db *sql.DB, cfg Config, fn func(ctx context.Context, tx *sql.Tx) error) error {
	return cfg.in(db).InTx(ctx, cfg.Retry, func(ctx context.Context, t tx) error { return fn(ctx, t.Tx) })
}

// Value is like [InTx], but fn also returns a value. If Value returns an error, the value is the zero T.
func Value[T any](
	ctx context.Context, db *sql.DB, cfg Config, fn func(ctx context.Context, tx *sql.Tx) (T, error),
) (T, error) {
	return sqltx.Value(ctx, cfg.in(db), cfg.Retry, func(ctx context.Context, t tx) (T, error) { return fn(ctx, t.Tx) })
}

// in returns the configuration of transactions in db.
func (cfg Config) in(db *sql.DB) sqltx.Config[tx] {
	in := sqltx.Database(db, cfg.Options, cfg.Code)
	if cfg.Check != nil {
		in.Check = func(ctx context.Context, t tx) (bool, error) { return cfg.Check(ctx, t.Tx) }
	}
	return in
}

type tx = sqltx.SQL
