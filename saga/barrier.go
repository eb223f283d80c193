package saga

import (
	"context"
	"database/sql"
	"fmt"
)

// BarrierTable is the statement that creates the table that [Barrier] writes
// to, for PostgreSQL and SQLite. It belongs into the participant's own database:
// run it there once, or with the participant's migrations. sqlstore's Migrate
// runs it too, for participants that share the store's database.
//
// A row may be deleted once its command can no longer arrive, which is when its
// saga has ended and no message of it is under way any more.
const BarrierTable = `CREATE TABLE IF NOT EXISTS saga_barrier (
	saga_id text NOT NULL,
	step text NOT NULL,
	op text NOT NULL,
	reason text NOT NULL,
	PRIMARY KEY (saga_id, step, op)
)`

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
// [BarrierTable].
func Barrier(ctx context.Context, tx *sql.Tx, fn func(*sql.Tx) error) error {
	saga, step, op, err := splitCommand(CommandFrom(ctx).ID)
	if err != nil {
		return err
	}
	if op == OpDo {
		first, err := pass(ctx, tx, saga, step, OpDo, OpDo)
		if err != nil {
			return err
		}
		if first {
			return fn(tx)
		}
		var reason string
		err = tx.QueryRowContext(ctx, `SELECT reason FROM saga_barrier WHERE saga_id = $1 AND step = $2 AND op = $3`,
			saga, step, string(OpDo)).Scan(&reason)
		if err != nil {
			return fmt.Errorf("saga: barrier: %w", err)
		}
		if reason != string(OpDo) {
			return NoEffect(ErrUndone)
		}
		return nil
	}
	// Taking the place of the Do keeps it out, and shows whether it has been.
	never, err := pass(ctx, tx, saga, step, OpDo, OpUndo)
	if err != nil {
		return err
	}
	first, err := pass(ctx, tx, saga, step, OpUndo, OpUndo)
	if err != nil || never || !first {
		return err
	}
	return fn(tx)
}

// pass writes the row of a command, unless it is there, which it reports.
func pass(ctx context.Context, tx *sql.Tx, saga, step string, op, reason Op) (first bool, err error) {
	res, err := tx.ExecContext(ctx,
		`INSERT INTO saga_barrier (saga_id, step, op, reason) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING`,
		saga, step, string(op), string(reason))
	if err != nil {
		return false, fmt.Errorf("saga: barrier: %w", err)
	}
	n, err := res.RowsAffected()
	if err != nil {
		return false, fmt.Errorf("saga: barrier: %w", err)
	}
	return n > 0, nil
}
