package saga

import (
	"context"
	"database/sql"
	"fmt"
	"time"
)

// BarrierTable is the statement that creates the table that [Barrier] writes
// to, for PostgreSQL and SQLite. It belongs into the participant's own database:
// run it there once, or with the participant's migrations. sqlstore's Migrate
// runs it too, for participants that share the store's database.
const BarrierTable = `CREATE TABLE IF NOT EXISTS saga_barrier (
	saga_id text NOT NULL,
	step text NOT NULL,
	op text NOT NULL,
	reason text NOT NULL,
	at timestamptz NOT NULL DEFAULT CURRENT_TIMESTAMP,
	PRIMARY KEY (saga_id, step, op)
)`

// barrierSQL is what Barrier says to one kind of database.
type barrierSQL struct {
	insert string // a row (saga, step, op, reason), unless it is there
	reason string // of the row (saga, step, op)
	prune  string // what is older than a time in UTC
}

// standardBarrier is for PostgreSQL and SQLite.
var standardBarrier = barrierSQL{
	insert: `INSERT INTO saga_barrier (saga_id, step, op, reason) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING`,
	reason: `SELECT reason FROM saga_barrier WHERE saga_id = $1 AND step = $2 AND op = $3`,
	prune:  `DELETE FROM saga_barrier WHERE at < $1`,
}

// PruneBarrier deletes the rows of [BarrierTable] that are older than age, and
// returns how many. A command that comes after its row was deleted is applied
// again: age must be longer than the longest saga takes, with its retries, and
// than a message can be under way. It reads the whole table. The time is that of
// this process, and the rows have the database's.
func PruneBarrier(ctx context.Context, db *sql.DB, age time.Duration) (int64, error) {
	res, err := db.ExecContext(ctx, standardBarrier.prune, time.Now().Add(-age).UTC().Format("2006-01-02 15:04:05Z"))
	if err != nil {
		return 0, fmt.Errorf("saga: prune of the barrier: %w", err)
	}
	return res.RowsAffected()
}

// Barrier applies the command that ctx carries once. It is for the side of a
// participant with a database of its own: fn makes its changes in tx, and tx,
// which Barrier neither commits nor rolls back, also keeps a row that says so.
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
// What becomes of a command depends on what came before it:
//
//   - A Do that comes for the first time calls fn.
//   - A Do or an Undo that was applied already is not repeated: nil. What a
//     first answer held, such as a booking's number, is to be found by the
//     command's id.
//   - An Undo whose Do has never come does not call fn: there is nothing to
//     undo. It is remembered: nil.
//   - A Do that comes after its Undo is refused: [ErrUndone], as a [NoEffect].
//
// An error of fn is returned as it is, and tx must then be rolled back, so that
// the command may come again. ctx carries a command inside a Do or an Undo, and
// where [WithCommand] has put the one that came with a message. The table is
// [BarrierTable], which [PruneBarrier] keeps small.
func Barrier(ctx context.Context, tx *sql.Tx, fn func(*sql.Tx) error) error {
	saga, step, op, err := splitCommand(CommandFrom(ctx).ID)
	if err != nil {
		return err
	}
	b := &standardBarrier
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
	// Taking the place of the Do keeps it out, and shows whether it has been.
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

// pass writes the row of a command, unless it is there, which it reports.
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
