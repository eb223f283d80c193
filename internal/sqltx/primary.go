package sqltx

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
)

// A probe asks the server of a connection whether it takes writes: a row or an error says that it
// does not.
const (
	probePostgreSQL = "SELECT 1 WHERE current_setting('transaction_read_only') = 'on'"
	probeMySQL      = "SHOW SESSION VARIABLES WHERE Variable_name IN ('read_only', 'super_read_only', " +
		"'innodb_read_only', 'transaction_read_only', 'tx_read_only') AND Value <> 'OFF'"
	probeGalera = "SELECT 1 FROM DUAL WHERE 1 = 0" // fails as every statement does
)

// readerState reports whether an SQLSTATE is what PostgreSQL says that is no primary (any more).
func readerState(state, routine string) bool {
	switch state {
	case "25006": // read-only transaction: a standby, or default_transaction_read_only
		return true
	case "0A000": // BEGIN of a transaction that is SERIALIZABLE or READ WRITE on a standby
		return routine == "call_enum_check_hook" || routine == "call_bool_check_hook" ||
			routine == "GetSerializableTransactionSnapshot"
	case "XX000": // a large object on a standby
		return routine == "GetNewObjectId"
	}
	return false
}

// readerNumber is readerState for an error number of MySQL or MariaDB.
func readerNumber(number int) bool {
	switch number {
	case 1290, 1836, // read_only, super_read_only; innodb_read_only
		1792, // transaction_read_only
		1047: // a node of Galera that is not of the primary component
		return true
	}
	return false
}

// Reader returns how to find a server that takes writes, if err says that the one asked does
// not, and otherwise "". A pool keeps connections to such a server, which works, so that each
// write would fail until the process restarts. code is that of a Config.
func Reader(err error, code func(error) string) (probe string) {
	if err == nil {
		return ""
	}
	if code != nil {
		if state := code(err); state != "" {
			if readerState(state, "") {
				probe = probePostgreSQL // fails on others, which is as good
			}
			return probe
		}
	}
	first(err, func(err error) verdict {
		if state, routine := stateOf(err); state != "" {
			if readerState(state, routine) {
				probe = probePostgreSQL
			}
			return unavailable // no matter which: this is the error of the database
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

// errNoPrimary is returned by Primary if all connections are to servers that take no writes.
var errNoPrimary = errors.New("no server takes writes")

// Primary returns a connection of db to a server that takes writes, after an err of which Reader
// has returned the probe. It closes those that the pool has to others. The caller closes it.
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
		if pooled { // a new one shows how things are now: it stays for those who read
			_ = conn.Raw(func(any) error { return driver.ErrBadConn })
		}
		_ = conn.Close()
		if !pooled || most <= 0 || ctx.Err() != nil {
			return nil, err
		}
	}
}

// Database returns how transactions are made in db.
func Database(db *sql.DB, options *sql.TxOptions) Config[SQL] {
	return Config[SQL]{Begin: func(ctx context.Context) (SQL, error) {
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

// A SQL is a Tx of package database/sql.
type SQL struct {
	*sql.Tx
	conn *sql.Conn // returned to the pool with the end of Tx; nil: Tx does so
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

// Anew returns a ctx that tells the Begin of a store that the transaction was tried before, and may
// have failed because the server takes no writes.
func Anew(ctx context.Context) context.Context { return context.WithValue(ctx, anew{}, true) }

// Begin begins a transaction, under the ctx of Anew on a connection to a server that takes writes, if
// there is one. kind is of the database. SQLite knows neither probe: Primary would close all of the pool,
// and with it a database in memory.
func Begin(ctx context.Context, db *sql.DB, kind string, options *sql.TxOptions) (*sql.Tx, error) {
	probe := map[string]string{"PostgreSQL": probePostgreSQL, "MySQL": probeMySQL}[kind]
	if ctx.Value(anew{}) == nil || probe == "" {
		return db.BeginTx(ctx, options)
	}
	conn, err := Primary(ctx, db, probe)
	if err != nil {
		return db.BeginTx(ctx, options) // which says why
	}
	tx, err := conn.BeginTx(ctx, options)
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	go conn.Close() // waits for the end of tx
	return tx, nil
}

// A Querier is a *sql.DB, a *sql.Conn or a *sql.Tx.
type Querier interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// Stale reports whether err says that a prepared statement is not there, or that its tables have
// changed. The driver prepares it anew the next time, which is no reason to wait.
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
