package sqltx

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"reflect"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
)

// A verdict is what an error means for the statement or the transaction. The worst verdict is the last one.
type verdict uint8

const (
	none        verdict = iota // the error is not a database's
	answered                   // the database works and has rejected the statement
	again                      // the transaction was rolled back in favor of another one, and can be repeated
	unavailable                // the database could not execute the statement
	interrupted                // the caller's ctx, or a timeout of the server, has canceled the statement
	unknown                    // the transaction may have taken effect
)

// An outcome is a database's error with its verdict.
type outcome struct {
	err     error
	verdict verdict
}

func (e *outcome) Error() string {
	if e.verdict == unknown {
		return ErrOutcomeUnknown.Error() + ": " + e.err.Error()
	}
	return e.err.Error()
}

func (e *outcome) Unwrap() error        { return e.err }
func (e *outcome) Is(target error) bool { return e.verdict == unknown && target == ErrOutcomeUnknown }

// Answered reports whether the database works. A rollback in favor of another transaction is not a failure.
func (e *outcome) Answered() bool { return e.verdict == answered || e.verdict == again }

// Retryable reports whether the transaction may be repeated, because it has had no effect.
func (e *outcome) Retryable() bool { return e.verdict != answered && e.verdict != unknown }

// Timeout reports whether the database or the network was too slow.
func (e *outcome) Timeout() bool { return e.verdict == interrupted || behavior.IsTimeout(e.err) }

// ErrOutcomeUnknown is documented in package resiliencesql.
var ErrOutcomeUnknown = errors.New("resiliencesql: the outcome is unknown")

// Judge returns err with its verdict. It returns err unchanged if it has a verdict, is not a database's error, or
// tells by a mark, such as Retryable, what fn's caller shall do.
func Judge(ctx context.Context, err error, code func(error) string) error {
	if err == nil {
		return nil
	}
	if _, judged := errors.AsType[*outcome](err); judged {
		return err
	}
	if end := behavior.Read(err); end.Kind != behavior.Failed || !end.Retryable {
		return err
	}
	v := classify(err, code)
	if ctx.Err() != nil && (v == interrupted || errors.Is(err, sql.ErrTxDone)) {
		return fmt.Errorf("%w: %w", ended.Error(ctx), err)
	}
	if v == none {
		return err
	}
	return &outcome{err, v}
}

// classify returns the verdict of an error or of one in its chain. A code of the database takes precedence over an
// error of the connection.
func classify(err error, code func(error) string) verdict {
	if code != nil {
		if state := code(err); state != "" {
			return stateVerdict(state, "")
		}
	}
	if v := first(err, codeVerdict); v != none {
		return v
	}
	if errors.Is(err, sql.ErrNoRows) {
		return answered
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return none // every policy recognizes the errors of a ctx
	}
	if errors.Is(err, driver.ErrBadConn) {
		return unavailable
	}
	return first(err, connectionVerdict)
}

// first returns the verdict of the outermost error that has one. If errors are joined, it returns the worst verdict.
func first(err error, judge func(error) verdict) verdict {
	if err == nil {
		return none
	}
	if v := judge(err); v != none {
		return v
	}
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		return first(e.Unwrap(), judge)
	case interface{ Unwrap() []error }:
		worst := none
		for _, part := range e.Unwrap() {
			worst = max(worst, first(part, judge))
		}
		return worst
	}
	return none
}

// codeVerdict recognizes the errors of drivers by the packages of their types, because it imports no driver. For an
// SQLSTATE, it does not check the package: only databases have one.
func codeVerdict(err error) verdict {
	if state, routine := stateOf(err); state != "" {
		return stateVerdict(state, routine)
	}
	kind, number := numberOf(err)
	switch kind {
	case isMySQL:
		return mysqlVerdict(number)
	case isSQLite:
		return sqliteVerdict(number)
	}
	return none
}

// stateOf returns the SQLSTATE of an error of pgx or lib/pq, and the function of PostgreSQL that has raised the error,
// because an SQLSTATE may have several meanings.
func stateOf(err error) (state, routine string) {
	e, ok := err.(interface{ SQLState() string })
	if !ok || e.SQLState() == "" {
		return "", ""
	}
	if v := reflect.Indirect(reflect.ValueOf(err)); v.Kind() == reflect.Struct {
		if f := field(v, "Routine"); f.Kind() == reflect.String {
			routine = f.String()
		}
	}
	return e.SQLState(), routine
}

// A numbered is a kind of database that numbers its errors.
type numbered uint8

const (
	isMySQL numbered = iota + 1
	isSQLite
)

// numberOf returns the number of an error of MySQL, MariaDB or SQLite, or 0 for other errors. It checks the package
// of the error's type, because errors of applications also have a Number or a Code, for example an HTTP status.
func numberOf(err error) (numbered, int) {
	v := reflect.Indirect(reflect.ValueOf(err))
	if v.Kind() != reflect.Struct {
		return 0, 0
	}
	return numberIn(v.Type().PkgPath(), err, v)
}

func numberIn(pkg string, err error, v reflect.Value) (numbered, int) {
	switch pkg {
	case "github.com/go-sql-driver/mysql":
		if n := field(v, "Number"); n.CanUint() {
			return isMySQL, int(n.Uint())
		}
	case "github.com/mattn/go-sqlite3":
		if n := field(v, "ExtendedCode"); n.CanInt() {
			return isSQLite, int(n.Int())
		}
	case "modernc.org/sqlite", "github.com/glebarez/go-sqlite":
		if e, ok := err.(interface{ Code() int }); ok { // the extended code
			return isSQLite, e.Code()
		}
	}
	return 0, 0
}

// field returns a field of a struct, except a field of an embedded struct, which may be a nil pointer.
func field(v reflect.Value, name string) reflect.Value {
	if f, ok := v.Type().FieldByName(name); ok && len(f.Index) == 1 {
		return v.Field(f.Index[0])
	}
	return reflect.Value{}
}

// connectionVerdict returns the verdict of a connection's error.
func connectionVerdict(err error) verdict {
	switch e := err.(type) {
	case interface{ SafeToRetry() bool }: // pgconn
		if e.SafeToRetry() {
			return unavailable
		}
	case *net.DNSError:
		return unavailable
	case *net.OpError:
		if e.Op == "dial" {
			return unavailable
		}
		return unknown
	case net.Error:
		return unknown
	}
	if v := reflect.TypeOf(err); v.Kind() == reflect.Pointer && v.Elem().Name() == "ConnectError" {
		return unavailable // pgconn's, which has no method to recognize it, whatever it wraps
	}
	if err == io.EOF || err == io.ErrUnexpectedEOF || err == net.ErrClosed {
		return unknown
	}
	return none
}

// stateVerdict returns the verdict of an SQLSTATE, whose first two characters are its class. routine is the function
// of PostgreSQL that has raised the error.
func stateVerdict(state, routine string) verdict {
	if readerState(state, routine) {
		return unavailable
	}
	switch state {
	case "40003", "08007": // statement completion unknown, transaction resolution unknown
		return unknown
	case "40002": // integrity constraint violation
		return answered
	case "40P01", "55P03", // deadlock detected, lock not available
		"26000": // a prepared statement that the session does not have (any more)
		return again
	case "0A000": // not supported, or the tables of a prepared statement have changed
		if routine == "RevalidateCachedQuery" {
			return again
		}
	case "57014": // query canceled: by the client, or by statement_timeout
		return interrupted
	case "25P03", "25P04": // idle in a transaction, or in one for too long: the session was ended
		return unavailable
	}
	switch state[:min(2, len(state))] {
	case "40": // transaction rollback
		return again
	case "08", "53", "57", "58", "F0", "XX":
		// connection, too few resources, an operator's intervention, the system, the
		// configuration, the database itself
		return unavailable
	}
	return answered
}

// mysqlVerdict returns the verdict of an error number of MySQL or MariaDB.
func mysqlVerdict(number int) verdict {
	if readerNumber(number) {
		return unavailable
	}
	switch number {
	case 1213, // deadlock
		1205, // lock wait timeout
		1020, // record has changed since it was read: MariaDB's snapshot isolation
		1614, // deadlock, XA
		3101, // rolled back by group replication
		3572: // NOWAIT
		return again
	case 1317, // interrupted: by the client, or KILL QUERY
		1969, // max_statement_time, MariaDB
		3024: // max_execution_time
		return interrupted
	case 1021, 1114, // disk or table full
		1037, 1038, 1041, // memory
		1040, 1203, 1226, // too many connections, of a user, of a quota
		1042, 1043, 1129, 1130, // no handshake, a host that is blocked
		1053, 1077, 1079, // shutdown
		1135, 1637, // too many threads, too many transactions
		1158, 1159, 1160, 1161, // network, inside the server
		2002, 2003, 2005, 2006, // a proxy's: cannot connect, gone away
		3032, 3168: // offline
		return unavailable
	case 1180, // error during COMMIT
		1927, 3169, // connection or session killed
		2013, 2055: // lost connection during query
		return unknown
	}
	return answered
}

// sqliteVerdict returns the verdict of a result code of SQLite, whose low byte is the primary code.
func sqliteVerdict(code int) verdict {
	switch primary := code & 0xff; primary {
	case 5, 6: // BUSY, BUSY_SNAPSHOT and their like; LOCKED
		return again
	case 9: // INTERRUPT
		return interrupted
	case 2, 7, 8, 10, 11, 13, 14, 15, 22, 26:
		// INTERNAL, NOMEM, READONLY, IOERR, CORRUPT, FULL, CANTOPEN, PROTOCOL, NOLFS, NOTADB
		return unavailable
	default:
		if primary < 1 || primary > 28 {
			return none // no code of SQLite
		}
	}
	return answered
}
