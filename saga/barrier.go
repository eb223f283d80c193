package saga

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	"github.com/go-resilience/resilience/internal/sqldb"
	"github.com/go-resilience/resilience/saga/internal/participant"
)

// BarrierTable is the SQL that creates the table of [Apply] in a participant's PostgreSQL or SQLite database. The
// Migrate method of package sqlstore also creates the table. The table has a row for each command. Delete a row only if
// it is older than every saga and message that still exists. If a command arrives after its row was deleted, the
// command is applied again.
//
//	DELETE FROM saga_barrier WHERE saga_id > '' AND at < now() - interval '90 days'      -- PostgreSQL
//	DELETE FROM saga_barrier WHERE saga_id > '' AND at < datetime('now', '-90 days')     -- SQLite
const BarrierTable = participant.Table

// BarrierTableMySQL is [BarrierTable] for MySQL and MariaDB.
const BarrierTableMySQL = participant.TableMySQL

// Apply applies the command of ctx (see [CommandFrom]) only once. If ctx has no command, Apply returns an error. In one
// transaction of db, fn makes its changes and Apply records the command in the [BarrierTable].
//
//	err := saga.Apply(ctx, db, func(tx *sql.Tx) error {
//		return book(ctx, tx, room) // or saga.Declined(err) if there is no room; Apply records that
//	})
//
// If the command was applied before, Apply returns nil and does not call fn. If Do needs a result of fn, fn must store
// the result in its transaction, with the command ID as the key. Do must then read the result from db. If the command
// was declined before, Apply returns a [Declined] error again. For an Undo whose Do never arrived or was declined,
// Apply returns nil and does not call fn. If a Do arrives after its Undo, Apply declines the Do. If Apply returns an
// error that is not Declined, the command can be resent.
//
// On MySQL, fn must return a deadlock error unchanged. After a deadlock, MySQL has rolled back the row that records the
// command. So if fn continued and returned nil, the command could be applied twice.
func Apply(ctx context.Context, db *sql.DB, fn func(*sql.Tx) error) error {
	id, step, op, err := participant.Split(CommandFrom(ctx).ID)
	if err != nil {
		return err
	}
	b, err := barrierFor(ctx, db)
	if err != nil {
		return err
	}
	var decline error
	err = inTx(ctx, db, func(tx *sql.Tx) error {
		decline = nil
		d := delivery{b, tx, id, step}
		if op == OpUndo {
			return d.undo(ctx, fn)
		}
		return d.do(ctx, string(OpDo), func(tx *sql.Tx) error {
			err := fn(tx)
			if IsDeclined(err) {
				decline = err
			}
			return err
		})
	})
	if decline == nil {
		return err
	}
	// The transaction of fn was rolled back. A concurrent attempt may have been applied or declined since.
	recorded := false
	err = inTx(ctx, db, func(tx *sql.Tx) error {
		recorded = false
		d := delivery{b, tx, id, step}
		return d.do(ctx, declinedPrefix+storable(decline.Error()), func(*sql.Tx) error {
			recorded = true
			return nil
		})
	})
	if err == nil && recorded {
		return decline
	}
	return err
}

// A barrier has the SQL statements of Apply for one kind of database.
type barrier struct {
	insert string // inserts a row (saga, step, op, reason) unless it exists
	reason string // selects the reason of a row (saga, step, op)

	insertPrint string // like insert, with the fingerprint of the request
	printed     string // selects the reason and the fingerprint of a row (saga, step, op)
}

// standardBarrier is for PostgreSQL and SQLite.
var standardBarrier = barrier{
	insert: `INSERT INTO saga_barrier (saga_id, step, op, reason) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING`,
	reason: `SELECT reason FROM saga_barrier WHERE saga_id = $1 AND step = $2 AND op = $3`,
	insertPrint: `INSERT INTO saga_barrier (saga_id, step, op, reason, fingerprint) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT DO NOTHING`,
	printed: `SELECT reason, fingerprint FROM saga_barrier WHERE saga_id = $1 AND step = $2 AND op = $3`,
}

var mysqlBarrier = barrier{
	insert:      `INSERT IGNORE INTO saga_barrier (saga_id, step, op, reason) VALUES (?, ?, ?, ?)`,
	reason:      `SELECT reason FROM saga_barrier WHERE saga_id = ? AND step = ? AND op = ?`,
	insertPrint: `INSERT IGNORE INTO saga_barrier (saga_id, step, op, reason, fingerprint) VALUES (?, ?, ?, ?, ?)`,
	printed:     `SELECT reason, fingerprint FROM saga_barrier WHERE saga_id = ? AND step = ? AND op = ?`,
}

// barrierVersion is the version of the table that this version of the package creates. If a later version changes the
// table, the table has a row with the op "version". The reason of that row has two numbers: the version of the table,
// and the oldest version of a program that can use it.
const barrierVersion = 1

// barrierFor queries the kind of the database and the version of the table. Only MySQL executes the text in the SQL
// comment, so only there the first number is 2.
func barrierFor(ctx context.Context, db *sql.DB) (*barrier, error) {
	var n int
	var row sql.NullString
	err := db.QueryRowContext(ctx, "SELECT 1 /*! + 1 */, "+
		"(SELECT reason FROM saga_barrier WHERE saga_id = '' AND step = '' AND op = 'version')").Scan(&n, &row)
	if err == nil && row.Valid {
		var found, from int
		if _, err = fmt.Sscanf(row.String, "%d %d", &found, &from); err == nil {
			err = sqldb.Usable(found, from, barrierVersion)
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

// inTx calls fn in a transaction, and commits if fn returns nil. It tries once more if the server rejects writes, or if
// a prepared statement of the driver is stale.
func inTx(ctx context.Context, db *sql.DB, fn func(*sql.Tx) error) error {
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

// A delivery is a command that has arrived at its participant, with the transaction in which the participant applies
// it.
type delivery struct {
	b        *barrier
	tx       *sql.Tx
	id, step string
}

// declinedPrefix starts the reason of a declined Do. The text of the error follows.
const declinedPrefix = "refused: "

// do inserts a row for the Do with the reason, and calls fn. If the Do has a row already, do returns the result in
// that row: nil or a Declined error.
func (d *delivery) do(ctx context.Context, reason string, fn func(*sql.Tx) error) error {
	first, err := d.insertRow(ctx, OpDo, reason)
	if err != nil {
		return err
	}
	if first {
		return fn(d.tx)
	}
	arrived := OpDo
	if reason == string(OpUndo) {
		arrived = OpUndo
	}
	if reason, err = d.recorded(ctx, OpDo, arrived); err != nil {
		return err
	}
	if reason == string(OpDo) {
		return nil
	}
	if why, ok := strings.CutPrefix(reason, declinedPrefix); ok {
		return Declined(errors.New(why))
	}
	return Declined(participant.ErrUndone)
}

// undo calls fn if the Do was applied. Otherwise it inserts the row of the Do. A Do that arrives late is then declined.
func (d *delivery) undo(ctx context.Context, fn func(*sql.Tx) error) error {
	never := false
	err := d.do(ctx, string(OpUndo), func(*sql.Tx) error {
		never = true
		return nil
	})
	if never || IsDeclined(err) {
		return nil
	}
	if err != nil {
		return err
	}
	first, err := d.insertRow(ctx, OpUndo, string(OpUndo))
	if err == nil && !first {
		_, err = d.recorded(ctx, OpUndo, OpUndo)
	}
	if !first {
		return err
	}
	return fn(d.tx)
}

// insertRow inserts the row of a command, and reports whether the row is new.
func (d *delivery) insertRow(ctx context.Context, op Op, reason string) (first bool, err error) {
	text, args := d.b.insert, []any{d.id, d.step, string(op), reason}
	if fingerprint := participant.Fingerprint(ctx); fingerprint != "" {
		text, args = d.b.insertPrint, append(args, fingerprint)
	}
	res, err := d.tx.ExecContext(ctx, text, args...)
	if err != nil {
		return false, fmt.Errorf("saga: barrier: %w", err)
	}
	n, err := res.RowsAffected()
	if err != nil {
		return false, fmt.Errorf("saga: barrier: %w", err)
	}
	return n > 0, nil
}

// recorded returns the reason in a command's row. arrived is the operation that has arrived. If the request that
// inserted the row had the same command as this request, the two requests must be equal: recorded returns an error if
// both have a fingerprint and the fingerprints are of different requests.
func (d *delivery) recorded(ctx context.Context, op, arrived Op) (reason string, err error) {
	fingerprint, before := participant.Fingerprint(ctx), ""
	if fingerprint == "" {
		err = d.tx.QueryRowContext(ctx, d.b.reason, d.id, d.step, string(op)).Scan(&reason)
	} else {
		err = d.tx.QueryRowContext(ctx, d.b.printed, d.id, d.step, string(op)).Scan(&reason, &before)
	}
	if err != nil {
		return "", fmt.Errorf("saga: barrier: %w", err)
	}
	written := op // an Undo whose Do has never arrived writes the row of the Do
	if reason == string(OpUndo) {
		written = OpUndo
	}
	if written == arrived && before != "" && !participant.SameRequest(before, fingerprint) {
		return "", Permanent(participant.ErrOtherRequest)
	}
	return reason, nil
}
