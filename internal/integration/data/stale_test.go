package data_test

import (
	"context"
	"database/sql"
	"fmt"
	"testing"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/resiliencepgx"
	"github.com/go-resilience/resilience/resiliencesql"
)

// TestMigrationAbortsNothing: statements that the drivers have prepared are stale after it, on each
// connection. There is no Retry.
func TestMigrationAbortsNothing(t *testing.T) {
	d := postgres(t)
	db := d.open(t, d.addr)
	execute(t, db, "INSERT INTO book VALUES ('a', 1)")
	read := func(ctx context.Context) error {
		return resiliencesql.InTx(ctx, db, resiliencesql.Config{}, func(ctx context.Context, tx *sql.Tx) error {
			rows, err := tx.QueryContext(ctx, "SELECT * FROM book WHERE id = $1", "a")
			if err != nil {
				return err
			}
			defer rows.Close()
			for rows.Next() {
			}
			return rows.Err()
		})
	}
	pool := newPool(t, fmt.Sprintf(d.dsn, d.addr))
	readPgx := func(ctx context.Context) error {
		return resiliencepgx.InTx(ctx, pool, resiliencepgx.Config{}, func(ctx context.Context, tx pgx.Tx) error {
			rows, _ := tx.Query(ctx, "SELECT * FROM book WHERE id = $1", "a")
			defer rows.Close()
			for rows.Next() {
			}
			return rows.Err()
		})
	}
	for i := range 3 {
		for range 2 {
			require.NoError(t, read(t.Context()))
			require.NoError(t, readPgx(t.Context()))
		}
		execute(t, db, fmt.Sprintf("ALTER TABLE book ADD COLUMN more%d text", i))
		require.NoError(t, read(t.Context()))
		require.NoError(t, readPgx(t.Context()))
		for _, deallocate := range []func() error{
			func() error { _, err := db.Exec("DEALLOCATE ALL"); return err },
			func() error { _, err := pool.Exec(t.Context(), "DEALLOCATE ALL"); return err },
		} {
			require.NoError(t, deallocate())
			require.NoError(t, read(t.Context()))
			require.NoError(t, readPgx(t.Context()))
		}
	}
}

// TestNumbersOfMySQLAreRead: those of the driver's own type, and of no other.
func TestNumbersOfMySQLAreRead(t *testing.T) {
	guard := resiliencesql.Middleware(resiliencesql.Config{})
	of := func(number uint16) error {
		return guard(func(context.Context) error {
			return fmt.Errorf("write: %w",
				&mysql.MySQLError{Number: number})
		})(t.Context())
	}
	for _, number := range []uint16{1290, 1836, 1792, 1047, 1040} {
		requireUnavailable(t, of(number))
	}
	requireAgain(t, of(1213))
	requireAnswered(t, of(1062))
	require.ErrorIs(t, of(2013), resiliencesql.ErrOutcomeUnknown)
	db := sqlite(t).open(t, "")
	execute(t, db, "INSERT INTO book VALUES ('a', 1)")
	requireAnswered(t, judged(t.Context(), db, "INSERT INTO book VALUES ('a', 1)"))
	require.False(t, resilience.Retryable(judged(t.Context(), db, "INSERT INTO book VALUES ('a', 1)")))
}
