package sqlstore_test

import (
	"database/sql"
	"fmt"
	"strings"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

// openDB opens the database of the examples. A real program calls sql.Open("pgx", os.Getenv("DATABASE_URL")).
func openDB() *sql.DB { return open(new(script)) }

// A runner keeps its sagas in PostgreSQL. Before it runs, the program calls store.Migrate(ctx).
func ExampleNew() {
	store := sqlstore.New(openDB(), sqlstore.PostgreSQL, sqlstore.Config{})
	runner := saga.NewRunner(store, saga.RunnerConfig{Name: "travel"})
	fmt.Println(runner.Config().Name)
	// Output: travel
}

// The statements that create the tables, for a separate migration tool.
func ExampleStore_Schema() {
	store := sqlstore.New(openDB(), sqlstore.SQLite, sqlstore.Config{Prefix: "app_"})
	table, _, _ := strings.Cut(store.Schema(), "\n")
	fmt.Println(table)
	// Output: CREATE TABLE IF NOT EXISTS app_saga (
}
