// Package resiliencesql classifies the errors of a database, so that every policy handles them correctly, and runs
// transactions that can be retried. It supports PostgreSQL, MySQL, MariaDB and SQLite through database/sql. It imports
// no driver.
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
// [InTx] and [Middleware] give each error of a database one of four verdicts. The error then has the methods that
// docs/protocol.md describes, from which a policy learns the verdict. Other errors, and the error of a ctx that is
// done, are returned unchanged.
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
//   - again: the transaction was rolled back in favor of another one, or its prepared statement was stale. It has had
//     no effect and can be repeated.
//   - unavailable: the database could not execute the statement, which has had no effect.
//   - outcome unknown: the statement or the transaction may have taken effect. The error matches [ErrOutcomeUnknown].
//
// Some codes mean that a statement was interrupted: SQLSTATE 57014, MySQL's 1317, 1969 and 3024, and SQLite's
// INTERRUPT. If ctx is done, the error is the error of ctx. Otherwise, a timeout of the server has interrupted the
// statement, and the verdict is unavailable.
//
// If a connection is lost while a statement is in progress, the verdict depends on the transaction. Outside a
// transaction, the statement may have taken effect, and the outcome is unknown. Inside a transaction, nothing has taken
// effect until COMMIT is sent.
//
// Some errors mean that nothing was sent: a connection that could not be opened, an error of pgx whose method
// SafeToRetry returns true, and driver.ErrBadConn. The error of a COMMIT is the exception: its outcome is known only if
// the database has answered.
//
// # Failover
//
// After a failover, connections of the pool may lead to a server that is no longer the primary. Such a connection
// works, but every write fails. [InTx] closes these connections, finds a connection to the primary, and immediately
// runs the transaction there, within the same attempt. If a prepared statement is stale, InTx also runs the transaction
// once more within the same attempt.
//
// In a transaction whose options make it read-only, a rejected write is a mistake of fn. The verdict of the codes 25006
// and 1792 is then answered.
//
// Write in transactions. Outside a transaction, database/sql repeats a statement by itself if the driver reports that
// nothing was sent. For a statement without arguments, pgx (v5.12) reports this even if the connection is lost while
// the database executes the statement, which may then take effect twice.
//
// # Drivers
//
// The driver github.com/go-sql-driver/mysql returns mysql.ErrInvalidConn for a lost connection. This package cannot
// recognize that error, because it does not import the driver. If you execute statements outside of transactions, add a
// Code that recognizes it:
//
//	Config{Code: func(err error) string {
//		if errors.Is(err, mysql.ErrInvalidConn) {
//			return "08007"
//		}
//		return ""
//	}}
//
// The same driver ignores ctx during COMMIT. Limit the duration of a COMMIT with readTimeout in the DSN.
//
// If fn ignores an error of a statement, PostgreSQL rolls the transaction back at COMMIT. Through database/sql, pgx
// reports this as pgx.ErrTxCommitRollback, without an SQLSTATE. The outcome is then unknown, unless Code returns
// "25P02" for that error.
//
// If fn ignores an error on MySQL, the transaction continues. This is dangerous after a deadlock (error 1213): MySQL
// has rolled back all earlier statements, and commits each later statement separately. So fn must return that error.
//
// # Connection pools
//
// A pool of connections limits the number of concurrent calls, as a bulkhead does. [Pool] makes it visible in a
// registry.
package resiliencesql

import (
	"context"
	"database/sql"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/sqltx"
)

// ErrOutcomeUnknown is matched by the error of a COMMIT, or of a statement outside a transaction, whose answer was
// lost. The transaction or the statement may have taken effect. It is not retried.
var ErrOutcomeUnknown = sqltx.ErrOutcomeUnknown

// A Config configures a [Middleware] and a transaction. The zero Config is usable.
type Config struct {
	// Code returns the SQLSTATE of an error that this package does not recognize, or "". Code is called before this
	// package classifies the error. Nil means that only this package classifies errors.
	Code func(err error) string

	// Options are the options of the transaction. Nil means the driver's defaults.
	Options *sql.TxOptions
	// Retry wraps the transaction in policies: it is the Wrap method of a Retrier, or a Chain of that and of other
	// policies. The Retrier repeats a transaction only if the transaction has had no effect. Nil means one attempt.
	Retry func(next func(context.Context) error) func(context.Context) error
	// Check is called if the outcome of a COMMIT is unknown. It reports whether the original transaction was committed. tx
	// is a new transaction, in which Check can find that out, and which is always rolled back. If Check returns false, the
	// original transaction is retried. Nil means that the outcome remains unknown.
	//
	// The COMMIT may still be in transit when Check is called. A Check that only reads may therefore miss it. A Check that
	// inserts the same unique row as the original transaction waits for the COMMIT, and then finds a duplicate.
	//
	// Check is part of the attempt, so timeouts in Retry also apply to Check. If Check returns an error, or such a timeout
	// expires, the outcome remains unknown.
	Check func(ctx context.Context, tx *sql.Tx) (committed bool, err error)
}

// Middleware returns a middleware that gives the errors of calls their verdicts; see the package documentation. Make it
// the innermost middleware, directly around the call to the database. It uses only cfg.Code.
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

// InTx runs fn in a transaction and commits it. It rolls the transaction back if fn returns an error, panics or ends
// its goroutine, or if ctx is done before COMMIT. fn may be called several times, each time with a new transaction, so
// fn must have no effects outside of tx. fn must not commit tx or roll it back.
//
// Errors of fn and of the database get their verdicts; see the package documentation. Before COMMIT is sent, no verdict
// is "outcome unknown". If COMMIT fails and the error is not an answer of the database, the error matches
// [ErrOutcomeUnknown], unless Config.Check finds out the outcome.
func InTx(ctx context.Context, db *sql.DB, cfg Config, fn func(ctx context.Context, tx *sql.Tx) error) error {
	return cfg.in(db).InTx(ctx, cfg.Retry, func(ctx context.Context, t tx) error { return fn(ctx, t.Tx) })
}

// Value is like [InTx], for an fn that returns a value. If Value returns an error, the value is the zero T.
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
