package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/internal/sqldb"
)

// version is of the tables. From 0.1.0 on, whatever changes them makes it one more, with a migration
// in Migrate and a test that upgrades a database of each released version in which sagas are half
// done. From stays while older programs can use the tables.
var version = sqldb.Version{Is: 1, From: 1}

// tables is the prefix of the names of the tables.
type tables string

// sql inserts the prefix into a statement.
func (t tables) sql(text string) string { return strings.ReplaceAll(text, "{p}", string(t)) }

func (t tables) channel() string { return string(t) + "saga" }

// Schema returns the statements that create the tables and indexes, each with a
// semicolon at its end. It is for programs with a migration tool of their own; Migrate
// then finds the tables and does nothing.
func (s *Store) Schema() string {
	_, isMySQL := s.d.(*mysql)
	return strings.TrimLeft(s.tables.sql(s.d.schema()+version.Table("{p}saga_schema", isMySQL)+s.d.barrier()+";\n"), "\n")
}

// Migrate creates the tables and indexes, including saga.BarrierTable, unless they
// exist. If they do, it needs no right to create tables. Several processes may call it at
// the same time. It returns an error if a table of one of these names, except
// saga_barrier, belongs to another program, or if the tables are of a version that this
// program cannot use: a newer one says which programs can. On SQLite it also returns an error
// if the settings of the connection could lose a commit, or do not wait for a lock.
func (s *Store) Migrate(ctx context.Context) error {
	return wrap("migrate", s.migrate(ctx))
}

func (s *Store) migrate(ctx context.Context) error {
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := s.d.check(ctx, conn); err != nil {
		return err
	}
	if s.find(ctx, conn) == nil {
		return nil
	}
	tx, err := conn.BeginTx(ctx, s.d.txOptions())
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := s.d.lockSchema(ctx, tx); err != nil {
		return err
	}
	defer s.d.unlockSchema(context.WithoutCancel(ctx), conn)
	// Without the lock, MySQL shows the part that another process has created so far.
	if err := s.find(ctx, tx); err != errNoTables {
		return err // nil if another process has created them
	}
	for statement := range sqldb.Statements(s.Schema()) {
		if _, err := tx.ExecContext(ctx, statement); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// Check implements [store.Checker]: it returns nil if the tables exist and this program can
// use them.
func (s *Store) Check(ctx context.Context) error {
	return wrap("check", s.find(ctx, s.db))
}

// errNoTables is returned by find if none of the tables exists.
var errNoTables = fmt.Errorf("%w: it has no tables", store.ErrNotMigrated)

// find returns nil if the tables exist and this program can use them.
func (s *Store) find(ctx context.Context, q querier) error {
	var found, missing []string
	for _, name := range []string{"saga", "saga_log", "saga_signal", "saga_schema"} {
		name = string(s.tables) + name
		has, err := s.d.hasTable(ctx, q, name)
		if err != nil {
			return err
		}
		if has {
			found = append(found, name)
		} else {
			missing = append(missing, name)
		}
	}
	if len(found) == 0 {
		return errNoTables
	}
	if len(missing) > 0 {
		whose := "another program's (use Config.Prefix)"
		if len(found) > 1 {
			whose = "an older schema of this library, from before 0.1.0 (drop its tables, or use Config.Prefix)"
		}
		return fmt.Errorf("%w: there is a table %s and no table %s: %s, or part of the schema is missing",
			store.ErrNotMigrated, found[0], missing[0], whose)
	}
	if err := version.Check(ctx, q, string(s.tables)+"saga_schema"); err != nil {
		if errors.Is(err, sqldb.ErrVersion) || errors.Is(err, sql.ErrNoRows) { // another process is about to write it
			err = fmt.Errorf("%w: %w", store.ErrNotMigrated, err)
		}
		return err
	}
	return nil
}
