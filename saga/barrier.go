package saga

import (
	"context"
	"database/sql"
	"fmt"
	"time"
)

// BarrierTable is the statement that creates the table of [Barrier], for PostgreSQL and
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
	reason varbinary(20) NOT NULL,
	at timestamp NOT NULL DEFAULT CURRENT_TIMESTAMP,
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
	before: func(age time.Duration) any { return time.Now().Add(-age).UTC().Format("2006-01-02 15:04:05Z") },
}

// The reason is read from the newest row, although tx may have a snapshot from before. The
// clock is the database's.
var mysqlBarrier = barrierSQL{
	insert: `INSERT IGNORE INTO saga_barrier (saga_id, step, op, reason) VALUES (?, ?, ?, ?)`,
	reason: `SELECT reason FROM saga_barrier WHERE saga_id = ? AND step = ? AND op = ? LOCK IN SHARE MODE`,
	prune:  `DELETE FROM saga_barrier WHERE at < NOW() - INTERVAL ? SECOND`,
	before: func(age time.Duration) any { return int64(age.Round(time.Second) / time.Second) },
}

// barrierFor asks the database of which kind it is: only MySQL reads the comment.
func barrierFor(ctx context.Context, q interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}) (*barrierSQL, error) {
	var n int
	if err := q.QueryRowContext(ctx, "SELECT 1 /*! + 1 */").Scan(&n); err != nil {
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
// can be under way. PruneBarrier reads the whole table. It compares the clock of this
// process with that of the database, except on MySQL, whose clock it asks. An age of zero
// or less is an error: it would delete the rows of commands that are under way.
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

// Apply is [Barrier] in a transaction of its own: it begins one in db, and commits it if fn
// returns nil or is not called. An error of the commit leaves open whether the command was
// applied. The command may then be applied again, since its id is known if it was.
func Apply(ctx context.Context, db *sql.DB, fn func(*sql.Tx) error) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("saga: apply: %w", err)
	}
	defer tx.Rollback()
	if err := Barrier(ctx, tx, fn); err != nil {
		return err
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("saga: apply: %w", err)
	}
	return nil
}

// Barrier applies the command of ctx once. It is for a participant with a database of its
// own: fn makes its changes in tx, to which Barrier adds a row for the command. Barrier
// neither commits tx nor rolls it back.
//
//	tx, err := db.BeginTx(ctx, nil)
//	if err != nil {
//		return err
//	}
//	defer tx.Rollback()
//	err = saga.Barrier(ctx, tx, func(tx *sql.Tx) error {
//		_, err := tx.ExecContext(ctx, `UPDATE room SET free = free - 1 WHERE hotel = $1`, hotel)
//		return err
//	})
//	if err != nil {
//		return err
//	}
//	return tx.Commit()
//
// The effect of a command depends on the commands before it:
//
//   - A Do that arrives for the first time calls fn.
//   - A Do or an Undo that was applied already does nothing and returns nil. Store the
//     result of the first one, such as the number of a booking, under the command's id.
//   - An Undo whose Do has never arrived does not call fn, since there is nothing to
//     undo. It leaves its row and returns nil.
//   - A Do that arrives after its Undo returns [ErrUndone], as a [NoEffect].
//
// Barrier returns an error of fn as it is. The caller must then roll back tx, so that
// the command can be applied later. The ctx of a Do or an Undo carries a command, as does
// that of [WithCommand]. Barrier asks the database of tx whether it is PostgreSQL, SQLite,
// MySQL or MariaDB. The table is [BarrierTable]; [PruneBarrier] keeps it small.
func Barrier(ctx context.Context, tx *sql.Tx, fn func(*sql.Tx) error) error {
	saga, step, op, err := splitCommand(CommandFrom(ctx).ID)
	if err != nil {
		return err
	}
	b, err := barrierFor(ctx, tx)
	if err != nil {
		return err
	}
	if op == OpDo {
		first, err := b.pass(ctx, tx, saga, step, OpDo, OpDo)
		if err != nil {
			return err
		}
		if first {
			return fn(tx)
		}
		var reason string
		err = tx.QueryRowContext(ctx, b.reason, saga, step, string(OpDo)).Scan(&reason)
		if err != nil {
			return fmt.Errorf("saga: barrier: %w", err)
		}
		if reason != string(OpDo) {
			return NoEffect(ErrUndone)
		}
		return nil
	}
	// The row of the Do keeps a late Do out, and shows whether the Do has been applied.
	never, err := b.pass(ctx, tx, saga, step, OpDo, OpUndo)
	if err != nil {
		return err
	}
	first, err := b.pass(ctx, tx, saga, step, OpUndo, OpUndo)
	if err != nil || never || !first {
		return err
	}
	return fn(tx)
}

// pass inserts the row of a command, and reports whether it did not exist before.
func (b *barrierSQL) pass(ctx context.Context, tx *sql.Tx, saga, step string, op, reason Op) (first bool, err error) {
	res, err := tx.ExecContext(ctx, b.insert, saga, step, string(op), string(reason))
	if err != nil {
		return false, fmt.Errorf("saga: barrier: %w", err)
	}
	n, err := res.RowsAffected()
	if err != nil {
		return false, fmt.Errorf("saga: barrier: %w", err)
	}
	return n > 0, nil
}
