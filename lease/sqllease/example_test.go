package sqllease_test

import (
	"context"
	"database/sql"
	"fmt"
	"strings"

	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/sqllease"
)

// openDB opens the database of the examples. A real program calls sql.Open("pgx", os.Getenv("DATABASE_URL")).
func openDB() *sql.DB { return newFake().open() }

// A leader writes in a transaction that a former leader cannot commit.
func ExampleNew() {
	ctx := context.Background()
	db := openDB()
	store := sqllease.New(db, sqllease.PostgreSQL, sqllease.Config{})
	if err := store.Migrate(ctx); err != nil {
		fmt.Println(err)
		return
	}
	bill := func(ctx context.Context, term lease.Term) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := term.Fence(ctx, tx); err != nil {
			return err
		}
		fmt.Println(term.Holder(), "writes a bill") // with tx.ExecContext
		return tx.Commit()
	}
	billing := lease.New(store, lease.Config{Name: "billing", Holder: "process 1"})
	fmt.Println(billing.Run(ctx, bill))

	former, _ := billing.Campaign(ctx)
	_ = former.Resign(ctx)
	fmt.Println(bill(ctx, former) != nil)
	// Output:
	// process 1 writes a bill
	// <nil>
	// true
}

// The statements that create the tables, for a separate migration tool.
func ExampleStore_Schema() {
	store := sqllease.New(openDB(), sqllease.SQLite, sqllease.Config{Prefix: "app_"})
	table, _, _ := strings.Cut(store.Schema(), "\n")
	fmt.Println(table, "...")
	// Output: CREATE TABLE IF NOT EXISTS app_lease ( ...
}
