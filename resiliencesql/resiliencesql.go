// Package resiliencesql says what the errors of a database mean, so that every policy reads
// them right, and runs transactions that may be tried again. It knows PostgreSQL, MySQL,
// MariaDB and SQLite through database/sql and links no driver.
//
//	guard := resilience.Chain(circuit.Wrap, slots.Wrap)
//	err := resiliencesql.InTx(ctx, db, resiliencesql.Config{Retry: resilience.Chain(retries.Wrap, guard)},
//		func(ctx context.Context, tx *sql.Tx) error {
//			_, err := tx.ExecContext(ctx, "UPDATE account SET cents = cents - $1 WHERE id = $2", cents, id)
//			return err // an error rolls back
//		})
//
//	// A statement of its own:
//	name, err := resilience.Do(ctx, resilience.Chain(guard, resiliencesql.Middleware(resiliencesql.Config{})), load)
//
// # What an error means
//
// An error of a database gets one of four verdicts, as methods of docs/protocol.md. Other
// errors, and the error of a ctx that has ended, pass unchanged.
//
//	                  breaker  retry  SQLSTATE                   MySQL, MariaDB                 SQLite
//	answered          success  ends   all others; sql.ErrNoRows  all others                     CONSTRAINT, ERROR, ...
//	again             success  yes    40 but those below; 55P03, 1213, 1205, 1020, 3572, ...    BUSY, LOCKED
//	                                  26000, 0A000 of a plan
//	unavailable       failure  yes    08, 53, 57, 58, F0, XX;    1040, 1203, 1226, 1053, 1021,  FULL, IOERR, READONLY,
//	                                  25P03, 25P04; read only    1114, ...; read only           CANTOPEN, CORRUPT, ...
//	read only                         25006, 0A000 of BEGIN      1290, 1836, 1792, 1047
//	outcome unknown   failure  ends   40003, 08007               2013, 1927, 1180, ...
//
// 57014, MySQL's 1317, 1969 and 3024, and SQLite's INTERRUPT are the end of the ctx if it has
// ended; otherwise the server has a timeout, and the database was unavailable. 40002 is
// answered.
//
// A connection that is lost while a statement is under way leaves the outcome unknown, and
// [ErrOutcomeUnknown] says so: outside a transaction the statement may have taken effect.
// Inside one, until COMMIT is sent, nothing has. A connection that could not be made, an error
// of pgx whose SafeToRetry is true and driver.ErrBadConn mean that nothing was sent, except at
// COMMIT: there only an answer of the database counts.
//
// # Failover
//
// After a failover, connections of the pool may lead to a server that is no primary any more:
// it works, and every write fails. [InTx] closes such connections, finds one to the primary
// and runs the transaction there at once, within the same attempt. So it does with a prepared
// statement that is stale.
//
// Write in transactions. database/sql repeats a statement by itself where the driver says that
// nothing was sent, and pgx (v5.12) says so of a statement without arguments whose connection
// is lost while the database works.
//
// The driver github.com/go-sql-driver/mysql reports a lost connection by a bare variable. Tell
// it apart, for statements outside of transactions:
//
//	Config{Code: func(err error) string {
//		if errors.Is(err, mysql.ErrInvalidConn) {
//			return "08007"
//		}
//		return ""
//	}}
//
// It also ignores ctx during COMMIT: bound that by readTimeout in the DSN.
//
// If fn ignores an error of a statement, PostgreSQL rolls back at COMMIT, which pgx reports by
// the bare pgx.ErrTxCommitRollback. Without a Code of "25P02" for it, the outcome is unknown.
// MySQL goes on. After a deadlock (1213) it has rolled back what came before, and commits what
// follows, each statement by itself: fn must return that error.
//
// A pool that is used up is the commonest bulkhead of a Go program: [Pool] shows it in a
// registry.
package resiliencesql

import (
	"context"
	"database/sql"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/sqltx"
)

// ErrOutcomeUnknown is matched by the error of a transaction whose COMMIT, or of a statement
// outside a transaction, may have taken effect: the answer was lost. It is not retried.
var ErrOutcomeUnknown = sqltx.ErrOutcomeUnknown

// A Config configures a [Middleware] and a transaction. The zero Config is usable.
type Config struct {
	// Code returns the SQLSTATE of an error that this package does not know, or "". It is
	// asked first. Optional.
	Code func(err error) string

	// Options are those of the transaction. Nil means the driver's defaults.
	Options *sql.TxOptions
	// Retry runs the transaction, again where it has had no effect: the Wrap of a Retrier, or
	// a Chain of it and other policies. Nil means one attempt.
	Retry func(next func(context.Context) error) func(context.Context) error
	// Check settles a COMMIT whose outcome is unknown. It reads in a new transaction tx whether
	// the other transaction was committed. If it was not, the other transaction is tried again.
	// tx is always rolled back. A COMMIT may still be on its way: a Check that inserts the same
	// unique row waits for it, and finds a duplicate if it was committed; one that only reads
	// may miss it. If Check fails, or a timeout in Retry ends it, the outcome stays unknown:
	// Check is part of the attempt. Nil means that it stays unknown.
	Check func(ctx context.Context, tx *sql.Tx) (committed bool, err error)
}

// Middleware gives the errors of the calls that it wraps their verdicts. Put it innermost,
// directly around the call to the database. It uses only cfg.Code.
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

// InTx runs fn in a transaction and commits it. It rolls back if fn returns an error, panics
// or ends its goroutine, or if ctx ends before COMMIT. fn may run several times, each in a
// transaction of its own, so that it has no other effects; it does not end tx.
//
// An error of fn or of the database has its verdict: until COMMIT is sent, none is an unknown
// outcome. An error of COMMIT that is not the database's answer is [ErrOutcomeUnknown], unless
// Check settles it.
func InTx(ctx context.Context, db *sql.DB, cfg Config, fn func(ctx context.Context, tx *sql.Tx) error) error {
	return cfg.in(db).InTx(ctx, cfg.Retry, func(ctx context.Context, t tx) error { return fn(ctx, t.Tx) })
}

// Value is [InTx] for an fn that returns a value; on error, the zero T.
func Value[T any](
	ctx context.Context, db *sql.DB, cfg Config, fn func(ctx context.Context, tx *sql.Tx) (T, error),
) (T, error) {
	return sqltx.Value(ctx, cfg.in(db), cfg.Retry, func(ctx context.Context, t tx) (T, error) { return fn(ctx, t.Tx) })
}

// in returns how a transaction is made in db.
func (cfg Config) in(db *sql.DB) sqltx.Config[tx] {
	in := sqltx.Database(db, cfg.Options)
	in.Code = cfg.Code
	if cfg.Check != nil {
		in.Check = func(ctx context.Context, t tx) (bool, error) { return cfg.Check(ctx, t.Tx) }
	}
	return in
}

type tx = sqltx.SQL
