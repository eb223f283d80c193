package saga

import (
	"context"
	"database/sql"
	"time"

	"github.com/go-resilience/resilience/saga/internal/participant"
)

// BarrierTable is the statement that creates the table of [Apply], for PostgreSQL and
// SQLite; [BarrierTableMySQL] is for MySQL and MariaDB. The table belongs in the
// participant's own database: run the statement there once, or with the participant's
// migrations. The Migrate of sqlstore runs it too, for participants that share the store's
// database.
const BarrierTable = participant.Table

// BarrierTableMySQL is [BarrierTable] for MySQL and MariaDB.
const BarrierTableMySQL = participant.TableMySQL

// PruneBarrier deletes the rows of [BarrierTable] that are older than age, and returns
// how many. A command that arrives after its row was deleted is applied again, so age
// must be longer than the longest saga takes with its retries, and longer than a message
// can be under way. A row may stay for a second more. PruneBarrier reads the whole table.
// It compares the clock of this process with that of the database, except on MySQL, whose
// clock it asks. An age of zero or less is an error: it would delete the rows of commands
// that are under way.
func PruneBarrier(ctx context.Context, db *sql.DB, age time.Duration) (int64, error) {
	return participant.Prune(ctx, db, age)
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
//   - A Do that arrives after such an Undo returns a Void.
//
// If fn returns an error, its changes are rolled back. Unless it is a Void of a Do, Apply
// returns it as it is, and the command can be applied later. An error of the commit leaves
// open whether the command was applied. It may be sent again too, since its id is known if
// it was. If the database is no primary any more, Apply rolls back, finds a connection of db
// to the primary, and calls fn again.
//
// The ctx of a Do or an Undo carries a command, as does that of [WithCommand]. Apply asks
// the database whether it is PostgreSQL, SQLite, MySQL or MariaDB. The table is
// [BarrierTable]; [PruneBarrier] keeps it small.
func Apply(ctx context.Context, db *sql.DB, fn func(*sql.Tx) error) error {
	refusal := func(err error) (string, bool) { return storable(err.Error()), Voided(err) }
	err := participant.Apply(ctx, db, CommandFrom(ctx).ID, refusal, fn)
	if refused, ok := err.(*participant.Refused); ok {
		return Void(refused.Err)
	}
	return err
}
