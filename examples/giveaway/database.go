package main

import (
	"database/sql"
	"fmt"
	"log"
	"os"
	"strings"

	_ "github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite"

	"github.com/go-resilience/resilience/saga/sqlstore"
)

// create creates an empty database: a SQLite file if dsn is empty, and otherwise a schema in PostgreSQL.
func create(dsn string) (source string, drop func()) {
	if dsn == "" {
		dir, err := os.MkdirTemp("", "giveaway")
		check(err)
		return "file:" + dir + "/db?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)" +
				"&_pragma=synchronous(FULL)&_txlock=immediate",
			func() { check(os.RemoveAll(dir)) }
	}
	db, _ := open(dsn)
	schema := fmt.Sprintf("giveaway_%d", os.Getpid())
	run(db, "CREATE SCHEMA "+schema)
	and := map[bool]string{true: "&", false: "?"}[strings.Contains(dsn, "?")]
	return dsn + and + "search_path=" + schema, func() { run(db, "DROP SCHEMA "+schema+" CASCADE"); _ = db.Close() }
}

func open(source string) (*sql.DB, *sqlstore.Store) {
	driver, dialect := "sqlite", sqlstore.SQLite
	if strings.HasPrefix(source, "postgres") {
		driver, dialect = "pgx", sqlstore.PostgreSQL
	}
	db, err := sql.Open(driver, source)
	check(err)
	db.SetMaxOpenConns(8)
	store := sqlstore.New(db, dialect, sqlstore.Config{})
	return db, store
}

func run(db *sql.DB, statement string, args ...any) {
	_, err := db.Exec(statement, args...)
	check(err)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
