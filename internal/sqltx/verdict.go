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
	"syscall"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
)

// A verdict classifies an error by its meaning for the statement or the transaction. Verdicts are in ascending order of
// severity.
type verdict uint8

const (
	none        verdict = iota // the error is not from a database
	answered                   // the database works and has rejected the statement
	again                      // the transaction was rolled back in favor of another one, and can be repeated
	unavailable                // the database could not execute the statement
	interrupted                // the caller's ctx, or a timeout of the server, has canceled the statement
	unknown                    // the transaction may have taken effect
)

// An outcome is an error from a database with its verdict.
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

// Answered reports whether the database works. If Answered returns true, a breaker counts the call as a success. The
// database also works if it rolls a transaction back in favor of another one.
func (e *outcome) Answered() bool { return e.verdict == answered || e.verdict == again }

// Retryable reports whether the transaction may be repeated because it has had no effect.
func (e *outcome) Retryable() bool { return e.verdict != answered && e.verdict != unknown }

// Timeout reports whether the database or the network was too slow.
func (e *outcome) Timeout() bool { return e.verdict == interrupted || behavior.IsTimeout(e.err) }

// ErrOutcomeUnknown is documented in package resiliencesql.
var ErrOutcomeUnknown = errors.New("resiliencesql: the outcome is unknown")

// Judge returns err with its verdict. It returns err unchanged if err already has a verdict or is not from a database.
// It also returns err unchanged if err has a method, such as Retryable, that already determines the caller's reaction.
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

// classify returns the verdict of an error or of an error that it wraps. An error code from the database takes
// precedence over an error of the connection.
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

// first returns the verdict of the outermost error that has a verdict. If errors are joined, it returns the most severe
// of their verdicts.
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

// codeVerdict returns the verdict of an error with a code. It imports no driver, so it recognizes drivers' errors by
// the package paths of their types. For an SQLSTATE, it does not check the package path, because only database errors
// have an SQLSTATE.
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

// stateOf returns the SQLSTATE of an error of pgx or lib/pq. It also returns routine, the function of PostgreSQL that
// has raised the error, because an SQLSTATE may have several meanings.
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
// path of the error's type, because errors of applications may also have a Number or a Code, such as an HTTP status.
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
		if e, ok := err.(interface{ Code() int }); ok { // the extended result code
			return isSQLite, e.Code()
		}
	}
	return 0, 0
}

// field returns the field of a struct by name. It does not return a field of an embedded struct, which may be a nil
// pointer.
func field(v reflect.Value, name string) reflect.Value {
	if f, ok := v.Type().FieldByName(name); ok && len(f.Index) == 1 {
		return v.Field(f.Index[0])
	}
	return reflect.Value{}
}

// connectionVerdict returns the verdict of an error of a connection.
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
		if reflect.TypeOf(err).PkgPath() != "syscall" || lost(err) {
			return unknown
		}
	}
	if v := reflect.TypeOf(err); v.Kind() == reflect.Pointer && v.Elem().Name() == "ConnectError" {
		return unavailable // a type of pgconn; recognized by its name, because it has no method for that
	}
	if err == io.EOF || err == io.ErrUnexpectedEOF || err == net.ErrClosed {
		return unknown
	}
	return none
}

// lost reports whether an error number of the operating system means that a connection was lost. Other numbers may come
// from an operation on a file, although they also implement net.Error.
func lost(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.ECONNABORTED) ||
		errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ETIMEDOUT)
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
		"26000": // the session does not have the prepared statement, or no longer has it
		return again
	case "0A000": // feature not supported, or the tables of a prepared statement have changed
		if routine == "RevalidateCachedQuery" {
			return again
		}
	case "57014": // query canceled: by the client, or by statement_timeout
		return interrupted
	case "25P03", "25P04": // the session was ended because it was idle in a transaction, or in a transaction, for too long
		return unavailable
	}
	switch state[:min(2, len(state))] {
	case "40": // transaction rollback
		return again
	case "08", "53", "57", "58", "F0", "XX":
		// connection exception, insufficient resources, operator intervention, system error, configuration file error,
		// internal error
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
		1020, // record has changed since last read, with MariaDB's snapshot isolation
		1614, // deadlock in an XA transaction
		3101, // transaction rolled back by group replication
		3572: // a lock was not available immediately, with NOWAIT
		return again
	case 1317, // query interrupted by the client or by KILL QUERY
		1969, // MariaDB's max_statement_time exceeded
		3024: // max_execution_time exceeded
		return interrupted
	case 1021, 1114, // disk or table full
		1037, 1038, 1041, // out of memory
		1040, 1203, 1226, // too many connections: in total, of a user, or of a quota
		1042, 1043, 1129, 1130, // no handshake, or the client's host is blocked
		1053, 1077, 1079, // server shutdown in progress
		1135, 1637, // too many threads, too many transactions
		1158, 1159, 1160, 1161, // network error inside the server
		2002, 2003, 2005, 2006, // error of a proxy: cannot connect to the server, or the server has gone away
		3032, 3168: // server is in offline mode
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
	case 5, 6: // BUSY with its extended codes, such as BUSY_SNAPSHOT; LOCKED
		return again
	case 9: // INTERRUPT
		return interrupted
	case 2, 7, 8, 10, 11, 13, 14, 15, 22, 26:
		// INTERNAL, NOMEM, READONLY, IOERR, CORRUPT, FULL, CANTOPEN, PROTOCOL, NOLFS, NOTADB
		return unavailable
	default:
		if primary < 1 || primary > 28 {
			return none // not a result code of SQLite
		}
	}
	return answered
}
