package saga

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"
)

// BarrierTable is the statement that creates the table of [Apply], for PostgreSQL and
// SQLite; [BarrierTableMySQL] is for MySQL and MariaDB. The table belongs in the
// participant's own database: run the statement there once, or with the participant's
// migrations. The Migrate of sqlstore runs it too, for participants that share the store's
// database.
const BarrierTable = `CREATE TABLE IF NOT EXISTS saga_barrier (
	saga_id text NOT NULL,
	step text NOT NULL,
	op text NOT NULL,
	reason text NOT NULL,
	at timestamptz NOT NULL DEFAULT CURRENT_TIMESTAMP,
	PRIMARY KEY (saga_id, step, op)
)`

// BarrierTableMySQL is [BarrierTable] for MySQL and MariaDB.
const BarrierTableMySQL = `CREATE TABLE IF NOT EXISTS saga_barrier (
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
	prune  string // the rows that are older than before(age)
	before func(age time.Duration) any
}

// standardBarrier is for PostgreSQL and SQLite.
var standardBarrier = barrierSQL{
	insert: `INSERT INTO saga_barrier (saga_id, step, op, reason) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING`,
	reason: `SELECT reason FROM saga_barrier WHERE saga_id = $1 AND step = $2 AND op = $3`,
	prune:  `DELETE FROM saga_barrier WHERE at < $1`,
	// SQLite keeps whole seconds, so a row may be younger than it says.
	before: func(age time.Duration) any {
		return time.Now().Add(-age - time.Second).UTC().Format("2006-01-02 15:04:05.000000Z")
	},
}

// The clock is the database's.
var mysqlBarrier = barrierSQL{
	insert: `INSERT IGNORE INTO saga_barrier (saga_id, step, op, reason) VALUES (?, ?, ?, ?)`,
	reason: `SELECT reason FROM saga_barrier WHERE saga_id = ? AND step = ? AND op = ?`,
	prune:  `DELETE FROM saga_barrier WHERE at < NOW(6) - INTERVAL ? MICROSECOND`,
	before: func(age time.Duration) any { return age.Microseconds() + 1 },
}

// barrierFor asks the database of which kind it is: only MySQL reads the comment.
func barrierFor(ctx context.Context, db *sql.DB) (*barrierSQL, error) {
	var n int
	if err := db.QueryRowContext(ctx, "SELECT 1 /*! + 1 */").Scan(&n); err != nil {
		return nil, fmt.Errorf("saga: barrier: %w", err)
	}
	if n == 2 {
		return &mysqlBarrier, nil
	}
	return &standardBarrier, nil
}

// PruneBarrier deletes the rows of [BarrierTable] that are older than age, and returns
// how many. A command that arrives after its row was deleted is applied again, so age
// must be longer than the longest saga takes with its retries, and longer than a message
// can be under way. A row may stay for a second more. PruneBarrier reads the whole table.
// It compares the clock of this process with that of the database, except on MySQL, whose
// clock it asks. An age of zero or less is an error: it would delete the rows of commands
// that are under way.
func PruneBarrier(ctx context.Context, db *sql.DB, age time.Duration) (int64, error) {
	if age <= 0 {
		return 0, fmt.Errorf("saga: prune of the barrier: age is %v: must be more than 0", age)
	}
	b, err := barrierFor(ctx, db)
	if err != nil {
		return 0, err
	}
	res, err := db.ExecContext(ctx, b.prune, b.before(age))
	if err != nil {
		return 0, fmt.Errorf("saga: prune of the barrier: %w", err)
	}
	return res.RowsAffected()
}

// Apply applies the command of ctx once. It is for a participant with a database of its
// own: fn makes its changes in a transaction of db, to which Apply adds a row for the
// command.
//
//	err := saga.Apply(ctx, db, func(tx *sql.Tx) error {
//		res, err := tx.ExecContext(ctx, `UPDATE room SET free = free - 1 WHERE hotel = $1 AND free > 0`, hotel)
//		if err != nil {
//			return err
//		}
//		if n, err := res.RowsAffected(); n == 0 && err == nil {
//			return saga.Void(errFull) // for good, whatever becomes free later
//		}
//		return err
//	})
//
// What a command does depends on those before it:
//
//   - A Do that arrives for the first time calls fn.
//   - A Do or an Undo that was applied already does nothing and returns nil. Store the
//     result of the first one, such as the number of a booking, under the command's id.
//   - A Do for which fn returns a [Void] is refused for good: Apply records the text of the
//     error, and the same Do returns it, as a Void, whenever it arrives again.
//   - An Undo whose Do has never arrived, or was refused, does not call fn, since there is
//     nothing to undo. It leaves a row and returns nil.
//   - A Do that arrives after such an Undo returns [ErrUndone], as a Void.
//
// If fn returns an error, its changes are rolled back. Unless it is a Void of a Do, Apply
// returns it as it is, and the command can be applied later. An error of the commit leaves
// open whether the command was applied. It may be sent again too, since its id is known if
// it was.
//
// The ctx of a Do or an Undo carries a command, as does that of [WithCommand]. Apply asks
// the database whether it is PostgreSQL, SQLite, MySQL or MariaDB. The table is
// [BarrierTable]; [PruneBarrier] keeps it small.
func Apply(ctx context.Context, db *sql.DB, fn func(*sql.Tx) error) error {
	saga, step, op, err := splitCommand(CommandFrom(ctx).ID)
	if err != nil {
		return err
	}
	b, err := barrierFor(ctx, db)
	if err != nil {
		return err
	}
	var refusal error
	err = within(ctx, db, func(tx *sql.Tx) error {
		c := command{b, tx, saga, step}
		if op == OpUndo {
			return c.undo(ctx, fn)
		}
		return c.do(ctx, string(OpDo), func(tx *sql.Tx) error {
			err := fn(tx)
			if Voided(err) {
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
		c := command{b, tx, saga, step}
		return c.do(ctx, refused+text(refusal.Error()), func(*sql.Tx) error {
			recorded = true
			return nil
		})
	})
	if err == nil && recorded {
		return refusal
	}
	return err
}

// within calls fn in a transaction, and commits it if fn returns nil.
func within(ctx context.Context, db *sql.DB, fn func(*sql.Tx) error) error {
	tx, err := db.BeginTx(ctx, nil)
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
	first, err := c.pass(ctx, OpDo, reason)
	if err != nil {
		return err
	}
	if first {
		return fn(c.tx)
	}
	err = c.tx.QueryRowContext(ctx, c.b.reason, c.saga, c.step, string(OpDo)).Scan(&reason)
	if err != nil {
		return fmt.Errorf("saga: barrier: %w", err)
	}
	if reason == string(OpDo) {
		return nil
	}
	if why, ok := strings.CutPrefix(reason, refused); ok {
		return Void(errors.New(why))
	}
	return Void(ErrUndone)
}

// undo calls fn if the Do has been applied. Else it keeps a late Do out.
func (c *command) undo(ctx context.Context, fn func(*sql.Tx) error) error {
	never := false
	err := c.do(ctx, string(OpUndo), func(*sql.Tx) error {
		never = true
		return nil
	})
	if never || Voided(err) {
		return nil
	}
	if err != nil {
		return err
	}
	first, err := c.pass(ctx, OpUndo, string(OpUndo))
	if err != nil || !first {
		return err
	}
	return fn(c.tx)
}

// pass inserts the row of a command, and reports whether it did not exist before.
func (c *command) pass(ctx context.Context, op Op, reason string) (first bool, err error) {
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
