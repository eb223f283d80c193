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

// BarrierTable creates the table of [Apply] in a participant's PostgreSQL or SQLite, as the Migrate of sqlstore does.
// Delete rows when no saga and no message can be as old: a command that arrives later is applied again.
//
//	DELETE FROM saga_barrier WHERE saga_id > '' AND at < now() - interval '90 days'
const BarrierTable = participant.Table

// BarrierTableMySQL is [BarrierTable] for MySQL and MariaDB.
const BarrierTableMySQL = participant.TableMySQL

// Apply applies the command of ctx once: fn makes its changes in a transaction of db, in which Apply also records the
// command in the [BarrierTable].
//
//	err := saga.Apply(ctx, db, func(tx *sql.Tx) error {
//		return book(ctx, tx, room) // or saga.Declined(err): there is no room, and that is remembered
//	})
//
// A command that was applied before does nothing and returns nil: store its result under its id. A command that was
// declined is declined again. An Undo whose Do never arrived, or was declined, does not call fn, and a Do that arrives
// after that Undo is declined. After any other error, the command can be sent again. fn must return a deadlock error of
// MySQL unchanged, since MySQL has rolled the command's row back: otherwise the command would be applied twice.
func Apply(ctx context.Context, db *sql.DB, fn func(*sql.Tx) error) error {
	id, step, op, err := participant.Split(CommandFrom(ctx).ID)
	if err != nil {
		return err
	}
	b, err := barrierFor(ctx, db)
	if err != nil {
		return err
	}
	var refusal error
	err = within(ctx, db, func(tx *sql.Tx) error {
		refusal = nil
		a := arrival{b, tx, id, step}
		if op == OpUndo {
			return a.undo(ctx, fn)
		}
		return a.do(ctx, string(OpDo), func(tx *sql.Tx) error {
			err := fn(tx)
			if IsDeclined(err) {
				refusal = err
			}
			return err
		})
	})
	if refusal == nil {
		return err
	}
	// The transaction of fn is rolled back. An attempt beside this one may have been
	// applied since then, or refused.
	recorded := false
	err = within(ctx, db, func(tx *sql.Tx) error {
		recorded = false
		a := arrival{b, tx, id, step}
		return a.do(ctx, refused+storable(refusal.Error()), func(*sql.Tx) error {
			recorded = true
			return nil
		})
	})
	if err == nil && recorded {
		return refusal
	}
	return err
}

// A barrier has the statements for one kind of database.
type barrier struct {
	insert string // a row (saga, step, op, reason), unless it exists
	reason string // of the row (saga, step, op)

	insertPrint string // as insert, with the fingerprint of the request
	printed     string // the reason and the fingerprint of the row (saga, step, op)
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

// barrierVersion is of the table. One that has changed has a row that says so, whose op is "version":
// its reason is the version of the table and the oldest version of a program that can use it.
const barrierVersion = 1

// barrierFor asks the database of which kind it is, since only MySQL reads the comment, and of which
// version the table.
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

// An arrival is a command at its participant, in a transaction.
type arrival struct {
	b        *barrier
	tx       *sql.Tx
	id, step string
}

// refused begins the reason of a Do that was refused, before the text of the refusal.
const refused = "refused: "

// do calls fn if the Do has no row yet, for which it inserts one with the reason. Else it returns what
// that row says: nil, or a Declined error.
func (a *arrival) do(ctx context.Context, reason string, fn func(*sql.Tx) error) error {
	first, err := a.pass(ctx, OpDo, reason)
	if err != nil {
		return err
	}
	if first {
		return fn(a.tx)
	}
	arrived := OpDo
	if reason == string(OpUndo) {
		arrived = OpUndo
	}
	if reason, err = a.recorded(ctx, OpDo, arrived); err != nil {
		return err
	}
	if reason == string(OpDo) {
		return nil
	}
	if why, ok := strings.CutPrefix(reason, refused); ok {
		return Declined(errors.New(why))
	}
	return Declined(participant.ErrUndone)
}

// undo calls fn if the Do has been applied. Else it keeps a late Do out.
func (a *arrival) undo(ctx context.Context, fn func(*sql.Tx) error) error {
	never := false
	err := a.do(ctx, string(OpUndo), func(*sql.Tx) error {
		never = true
		return nil
	})
	if never || IsDeclined(err) {
		return nil
	}
	if err != nil {
		return err
	}
	first, err := a.pass(ctx, OpUndo, string(OpUndo))
	if err == nil && !first {
		_, err = a.recorded(ctx, OpUndo, OpUndo)
	}
	if !first {
		return err
	}
	return fn(a.tx)
}

// pass inserts the row of a command, and reports whether it did not exist before.
func (a *arrival) pass(ctx context.Context, op Op, reason string) (first bool, err error) {
	text, args := a.b.insert, []any{a.id, a.step, string(op), reason}
	if fingerprint := participant.Fingerprint(ctx); fingerprint != "" {
		text, args = a.b.insertPrint, append(args, fingerprint)
	}
	res, err := a.tx.ExecContext(ctx, text, args...)
	if err != nil {
		return false, fmt.Errorf("saga: barrier: %w", err)
	}
	n, err := res.RowsAffected()
	if err != nil {
		return false, fmt.Errorf("saga: barrier: %w", err)
	}
	return n > 0, nil
}

// recorded returns the reason of a command's row. If the row is of a request with the same command as the one that has
// arrived, and both have a fingerprint, it returns an error unless they are equal.
func (a *arrival) recorded(ctx context.Context, op, arrived Op) (reason string, err error) {
	fingerprint, before := participant.Fingerprint(ctx), ""
	if fingerprint == "" {
		err = a.tx.QueryRowContext(ctx, a.b.reason, a.id, a.step, string(op)).Scan(&reason)
	} else {
		err = a.tx.QueryRowContext(ctx, a.b.printed, a.id, a.step, string(op)).Scan(&reason, &before)
	}
	if err != nil {
		return "", fmt.Errorf("saga: barrier: %w", err)
	}
	written := op // the Undo whose Do has never arrived writes the row of the Do
	if reason == string(OpUndo) {
		written = OpUndo
	}
	if written == arrived && before != "" && before != fingerprint {
		return "", Permanent(participant.ErrOtherRequest)
	}
	return reason, nil
}
