package sqltx

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
)

// A probe is a query that finds out whether a connection's server accepts writes. If the query returns a row or an
// error, the server does not accept writes.
const (
	probePostgreSQL = "SELECT 1 WHERE current_setting('transaction_read_only') = 'on'"
	probeMySQL      = "SHOW SESSION VARIABLES WHERE Variable_name IN ('read_only', 'super_read_only', " +
		"'innodb_read_only', 'transaction_read_only', 'tx_read_only') AND Value <> 'OFF'"
	probeGalera = "SELECT 1 FROM DUAL WHERE 1 = 0" // fails, like every statement, if the node accepts no writes
)

// readerState reports whether an SQLSTATE means that the PostgreSQL server is read-only, because it is not a primary or
// no longer one. routine is the function of PostgreSQL that has raised the error.
func readerState(state, routine string) bool {
	switch state {
	case "25006": // read-only transaction: the server is a standby, or default_transaction_read_only is on
		return true
	case "0A000": // BEGIN of a SERIALIZABLE or READ WRITE transaction on a standby
		return routine == "call_enum_check_hook" || routine == "call_bool_check_hook" ||
			routine == "GetSerializableTransactionSnapshot"
	case "XX000": // creation of a large object on a standby
		return routine == "GetNewObjectId"
	}
	return false
}

// readerNumber is like readerState, for an error number of MySQL or MariaDB.
func readerNumber(number int) bool {
	switch number {
	case 1290, 1836, // read_only, super_read_only; innodb_read_only
		1792, // transaction_read_only
		1047: // a node of Galera outside of the primary component
		return true
	}
	return false
}

// Reader returns a probe if err means that the server is read-only, and otherwise "". [Primary] uses the probe to find
// a server that accepts writes. This is necessary because connections to a read-only server work, so they remain in the
// pool, and each write would fail until the process restarts. code is Config.Code.
func Reader(err error, code func(error) string) (probe string) {
	if err == nil {
		return ""
	}
	if code != nil {
		if state := code(err); state != "" {
			if readerState(state, "") {
				probe = probePostgreSQL // Primary returns an error if the database is not PostgreSQL, because the probe fails
			}
			return probe
		}
	}
	first(err, func(err error) verdict {
		if state, routine := stateOf(err); state != "" {
			if readerState(state, routine) {
				probe = probePostgreSQL
			}
			return unavailable // this is the database's error, so end the search; any verdict does that
		}
		switch kind, number := numberOf(err); {
		case kind != isMySQL:
			return none
		case number == 1047:
			probe = probeGalera
		case readerNumber(number):
			probe = probeMySQL
		}
		return unavailable
	})
	return probe
}

// ReadOnly returns a Config.Code for transactions with the option to be read-only. It is like code, which may be nil,
// but a rejected write is an answer: fn has made a mistake, and the server may well be a primary.
func ReadOnly(code func(error) string) func(error) string {
	const readOnly, invalidState = "25006", "25000"
	return func(err error) string {
		if code != nil {
			switch state := code(err); state {
			case "":
			case readOnly:
				return invalidState
			default:
				return state
			}
		}
		rejected, other := false, false
		first(err, func(err error) verdict {
			state, _ := stateOf(err)
			kind, number := numberOf(err)
			switch {
			case state == readOnly, kind == isMySQL && number == 1792:
				rejected = true
			case state != "", kind != 0:
				other = true
			default:
				return none
			}
			return answered
		})
		if rejected && !other {
			return invalidState
		}
		return ""
	}
}

// errNoPrimary is the error of Primary if all servers are read-only.
var errNoPrimary = errors.New("no server takes writes")

// Primary returns a connection of db to a server that accepts writes. probe is the result of Reader. Primary closes the
// pool's connections to read-only servers. The caller must close the returned connection.
func Primary(ctx context.Context, db *sql.DB, probe string) (*sql.Conn, error) {
	for most := db.Stats().OpenConnections; ; most-- {
		s := db.Stats()
		pooled := s.Idle > 0 || s.MaxOpenConnections > 0 && s.OpenConnections >= s.MaxOpenConnections
		conn, err := db.Conn(ctx)
		if err != nil {
			return nil, err
		}
		rows, err := conn.QueryContext(ctx, probe)
		if err == nil {
			if rows.Next() {
				err = errNoPrimary
			}
			err = errors.Join(err, rows.Close(), rows.Err())
		}
		if err == nil {
			return conn, nil
		}
		if pooled { // a connection that is new leads to the server that db finds now; it may remain in the pool, for reads
			_ = conn.Raw(func(any) error { return driver.ErrBadConn })
		}
		_ = conn.Close()
		if !pooled || most <= 0 || ctx.Err() != nil {
			return nil, err
		}
	}
}

// Database returns the Config for transactions in db. code is Config.Code.
func Database(db *sql.DB, options *sql.TxOptions, code func(error) string) Config[SQL] {
	if options != nil && options.ReadOnly {
		code = ReadOnly(code)
	}
	return Config[SQL]{Code: code, Begin: func(ctx context.Context) (SQL, error) {
		t, err := db.BeginTx(ctx, options)
		return SQL{Tx: t}, err
	}, Primary: func(ctx context.Context, probe string) (SQL, error) {
		conn, err := Primary(ctx, db, probe)
		if err != nil {
			return SQL{}, err
		}
		t, err := conn.BeginTx(ctx, options)
		if err != nil {
			_ = conn.Close()
		}
		return SQL{t, conn}, err
	}}
}

// A SQL is a [Tx] in package database/sql.
type SQL struct {
	*sql.Tx
	conn *sql.Conn // the connection to return to the pool when Tx has ended; nil if Tx returns it itself
}

func (t SQL) Commit(context.Context) error   { return t.end(t.Tx.Commit()) }
func (t SQL) Rollback(context.Context) error { return t.end(t.Tx.Rollback()) }

func (t SQL) end(err error) error {
	if t.conn != nil {
		_ = t.conn.Close()
	}
	return err
}

type anew struct{}

// Anew returns a ctx for [Begin] that makes it look for a server that accepts writes. It is for the repetition of a
// transaction that may have failed because the server is read-only.
func Anew(ctx context.Context) context.Context { return context.WithValue(ctx, anew{}, true) }

// Begin starts a transaction. If ctx is from [Anew], it uses a connection to a server that accepts writes, if there is
// such a server. kind is "PostgreSQL", "MySQL" or "SQLite". For SQLite there is no probe, because Primary could close
// all connections of the pool, which would delete an in-memory database.
func Begin(ctx context.Context, db *sql.DB, kind string, options *sql.TxOptions) (*sql.Tx, error) {
	probe := map[string]string{"PostgreSQL": probePostgreSQL, "MySQL": probeMySQL}[kind]
	if ctx.Value(anew{}) == nil || probe == "" {
		return db.BeginTx(ctx, options)
	}
	conn, err := Primary(ctx, db, probe)
	if err != nil {
		return db.BeginTx(ctx, options) // the error of BeginTx is more precise
	}
	tx, err := conn.BeginTx(ctx, options)
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	go conn.Close() // Close waits until tx has ended
	return tx, nil
}

// A Querier is a *sql.DB, a *sql.Conn or a *sql.Tx.
type Querier interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// Stale reports whether err means that a prepared statement no longer exists, or that its tables have changed. For the
// next call, the driver prepares the statement again, so the caller can repeat the call immediately.
func Stale(err error, code func(error) string) (stale bool) {
	if err == nil || code != nil && code(err) != "" {
		return false
	}
	first(err, func(err error) verdict {
		state, routine := stateOf(err)
		if state == "" {
			return none
		}
		stale = state == "26000" || state == "0A000" && routine == "RevalidateCachedQuery"
		return unavailable
	})
	return stale
}
