// Package participant is what keeps a participant of sagas from applying a command twice, or
// after its undo: the ids of commands, and the barrier in the participant's own database.
package participant

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/internal/sqldb"
)

// Table and TableMySQL create the table of Apply: see saga.BarrierTable.
const Table = `CREATE TABLE IF NOT EXISTS saga_barrier (
	saga_id text NOT NULL,
	step text NOT NULL,
	op text NOT NULL,
	reason text NOT NULL,
	at timestamptz NOT NULL DEFAULT CURRENT_TIMESTAMP,
	PRIMARY KEY (saga_id, step, op)
)`

const TableMySQL = `CREATE TABLE IF NOT EXISTS saga_barrier (
	saga_id varbinary(200) NOT NULL,
	step varbinary(210) NOT NULL,
	op varbinary(20) NOT NULL,
	reason blob NOT NULL,
	at timestamp(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
	PRIMARY KEY (saga_id, step, op)
) ENGINE = InnoDB`

// A barrierSQL has the statements for one kind of database.
type barrierSQL struct {
	insert string // a row (saga, step, op, reason), unless it exists
	reason string // of the row (saga, step, op)
}

// standardBarrier is for PostgreSQL and SQLite.
var standardBarrier = barrierSQL{
	insert: `INSERT INTO saga_barrier (saga_id, step, op, reason) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING`,
	reason: `SELECT reason FROM saga_barrier WHERE saga_id = $1 AND step = $2 AND op = $3`,
}

var mysqlBarrier = barrierSQL{
	insert: `INSERT IGNORE INTO saga_barrier (saga_id, step, op, reason) VALUES (?, ?, ?, ?)`,
	reason: `SELECT reason FROM saga_barrier WHERE saga_id = ? AND step = ? AND op = ?`,
}

// version is of the table. One that has changed has a row that says so, whose op is "version": its
// reason is the version of the table and the oldest version of a program that can use it.
const version = 1

// barrierFor asks the database of which kind it is, since only MySQL reads the comment, and of which
// version the table.
func barrierFor(ctx context.Context, db *sql.DB) (*barrierSQL, error) {
	var n int
	var row sql.NullString
	err := db.QueryRowContext(ctx, "SELECT 1 /*! + 1 */, "+
		"(SELECT reason FROM saga_barrier WHERE saga_id = '' AND step = '' AND op = 'version')").Scan(&n, &row)
	if err == nil && row.Valid {
		var found, from int
		if _, err = fmt.Sscanf(row.String, "%d %d", &found, &from); err == nil {
			err = sqldb.Usable(found, from, version)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("saga: barrier: %w", err)
	}
	if n == 2 {
		return &mysqlBarrier, nil
	}
	return &standardBarrier, nil
}

// A Refused is the error of a Do that its participant has refused for good.
type Refused struct{ Err error }

func (e *Refused) Error() string { return e.Err.Error() }

// ErrUndone means that the undo of a command came before it.
var ErrUndone = errors.New("saga: command not applied: its undo came first")

// Apply applies the command with an id once, in a transaction of db: see saga.Apply. refusal
// returns the text of an error of fn, and whether it refuses the command for good. The error is
// a *Refused for a Do that was refused, or undone, before.
func Apply(
	ctx context.Context, db *sql.DB, id string,
	refusal func(error) (text string, final bool), fn func(*sql.Tx) error,
) error {
	saga, step, op, err := Split(id)
	if err != nil {
		return err
	}
	b, err := barrierFor(ctx, db)
	if err != nil {
		return err
	}
	var refusedBy error
	var why string
	err = within(ctx, db, func(tx *sql.Tx) error {
		refusedBy = nil
		c := command{b, tx, saga, step}
		if op == store.OpUndo {
			return c.undo(ctx, fn)
		}
		return c.do(ctx, string(store.OpDo), func(tx *sql.Tx) error {
			err := fn(tx)
			if err != nil {
				if text, final := refusal(err); final {
					refusedBy, why = err, text
				}
			}
			return err
		})
	})
	if refusedBy == nil {
		return err
	}
	// The transaction of fn is rolled back. An attempt beside this one may have been
	// applied since then, or refused.
	recorded := false
	err = within(ctx, db, func(tx *sql.Tx) error {
		c := command{b, tx, saga, step}
		return c.do(ctx, refused+why, func(*sql.Tx) error {
			recorded = true
			return nil
		})
	})
	if err == nil && recorded {
		return refusedBy
	}
	return err
}

// within calls fn in a transaction, and commits it if fn returns nil. It does so once more if the
// server takes no writes, or the driver has a stale statement.
func within(ctx context.Context, db *sql.DB, fn func(*sql.Tx) error) error {
	return sqldb.Write(ctx, db, func(ctx context.Context, on sqldb.Conn) error {
		tx, err := on.BeginTx(ctx, nil)
		if err != nil {
			return fmt.Errorf("saga: apply: %w", err)
		}
		defer tx.Rollback()
		if err := fn(tx); err != nil {
			return err
		}
		if err := tx.Commit(); err != nil {
			return fmt.Errorf("saga: apply: %w", err)
		}
		return nil
	})
}

// A command is what arrives at a participant, in a transaction.
type command struct {
	b          *barrierSQL
	tx         *sql.Tx
	saga, step string
}

// refused begins the reason of a Do that was refused, before the text of the refusal.
const refused = "refused: "

// do calls fn if the Do has no row yet, for which it inserts one with the reason. Else it
// returns what that row says.
func (c *command) do(ctx context.Context, reason string, fn func(*sql.Tx) error) error {
	first, err := c.pass(ctx, store.OpDo, reason)
	if err != nil {
		return err
	}
	if first {
		return fn(c.tx)
	}
	err = c.tx.QueryRowContext(ctx, c.b.reason, c.saga, c.step, string(store.OpDo)).Scan(&reason)
	if err != nil {
		return fmt.Errorf("saga: barrier: %w", err)
	}
	if reason == string(store.OpDo) {
		return nil
	}
	if why, ok := strings.CutPrefix(reason, refused); ok {
		return &Refused{errors.New(why)}
	}
	return &Refused{ErrUndone}
}

// undo calls fn if the Do has been applied. Else it keeps a late Do out.
func (c *command) undo(ctx context.Context, fn func(*sql.Tx) error) error {
	never := false
	err := c.do(ctx, string(store.OpUndo), func(*sql.Tx) error {
		never = true
		return nil
	})
	if _, refused := err.(*Refused); never || refused {
		return nil
	}
	if err != nil {
		return err
	}
	first, err := c.pass(ctx, store.OpUndo, string(store.OpUndo))
	if !first {
		return err
	}
	return fn(c.tx)
}

// pass inserts the row of a command, and reports whether it did not exist before.
func (c *command) pass(ctx context.Context, op store.Op, reason string) (first bool, err error) {
	res, err := c.tx.ExecContext(ctx, c.b.insert, c.saga, c.step, string(op), reason)
	if err != nil {
		return false, fmt.Errorf("saga: barrier: %w", err)
	}
	n, err := res.RowsAffected()
	if err != nil {
		return false, fmt.Errorf("saga: barrier: %w", err)
	}
	return n > 0, nil
}
