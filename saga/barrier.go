package saga

import (
	"context"
	"database/sql"

	"github.com/go-resilience/resilience/saga/internal/participant"
)

// BarrierTable is the statement that creates the table of [Apply], for PostgreSQL and
// SQLite; [BarrierTableMySQL] is for MySQL and MariaDB. The table belongs in the
// participant's own database: run the statement there once, or with the participant's
// migrations. The Migrate of sqlstore runs it too, for participants that share the store's
// database.
//
// Its rows stay until you delete them:
//
//	DELETE FROM saga_barrier WHERE saga_id > '' AND at < now() - interval '90 days'    -- PostgreSQL
//	DELETE FROM saga_barrier WHERE saga_id > '' AND at < now() - interval 90 day       -- MySQL
//	DELETE FROM saga_barrier WHERE saga_id > '' AND at < datetime('now', '-90 days')   -- SQLite
//
// A command that arrives after its row was deleted is applied again, so this must be longer than the
// longest saga takes, and longer than a message can be under way. The row without a saga_id is the
// version of the table.
const BarrierTable = participant.Table

// BarrierTableMySQL is [BarrierTable] for MySQL and MariaDB.
const BarrierTableMySQL = participant.TableMySQL

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
// A Do or an Undo that was applied already does nothing and returns nil: store its result, such as
// the number of a booking, under the command's id. A Do for which fn returns a [Void] is refused for
// good, and returns the same Void whenever it arrives again. An Undo whose Do has never arrived, or
// was refused, does not call fn; a Do that arrives after it returns a Void.
//
// Any other error of fn rolls back and is returned as it is: the command can be applied later. An
// error of the commit leaves open whether it was applied; it may be sent again, since its id is known
// if it was. If the database is no primary any more, Apply finds a connection of db to the primary,
// and calls fn again.
//
// The ctx of a Do or an Undo carries a command, as does that of [WithCommand]. db is PostgreSQL,
// SQLite, MySQL or MariaDB, with a [BarrierTable].
func Apply(ctx context.Context, db *sql.DB, fn func(*sql.Tx) error) error {
	refusal := func(err error) (string, bool) { return storable(err.Error()), Voided(err) }
	err := participant.Apply(ctx, db, CommandFrom(ctx).ID, refusal, fn)
	if refused, ok := err.(*participant.Refused); ok {
		return Void(refused.Err)
	}
	return err
}
