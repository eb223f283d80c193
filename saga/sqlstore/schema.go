package sqlstore

import (
	"context"
	"fmt"
	"strings"

	"github.com/go-resilience/resilience/saga/store"
)

// schemaVersion is the version of the tables. From 0.1.0 on, whatever changes them makes it
// one more, with a migration in Migrate and a test that upgrades a database of each
// released version in which sagas are half done.
const schemaVersion = 1

// tables is the prefix of the names of the tables.
type tables string

// sql inserts the prefix into a statement.
func (t tables) sql(text string) string { return strings.ReplaceAll(text, "{p}", string(t)) }

func (t tables) channel() string { return string(t) + "saga" }

func isPrefix(s string) bool {
	for i, c := range []byte(s) {
		if (c < 'a' || c > 'z') && c != '_' && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return len(s) <= 32
}

// Schema returns the statements that create the tables and indexes, each with a
// semicolon at its end. It is for programs with a migration tool of their own; Migrate
// then finds the tables and does nothing.
func (s *Store) Schema() string {
	return strings.TrimLeft(s.tables.sql(s.d.schema()+
		fmt.Sprintf("INSERT INTO {p}saga_schema (version) VALUES (%d);\n", schemaVersion)+
		s.d.barrier()+";\n"), "\n")
}

// Migrate creates the tables and indexes, including saga.BarrierTable, unless they
// exist. If they do, it needs no right to create tables. Several processes may call it at
// the same time. It returns an error if a table of one of these names, except
// saga_barrier, belongs to another program or has another version. On SQLite it also
// returns an error if the settings of the connection could lose a commit, or do not wait
// for a lock.
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
	for statement := range strings.SplitSeq(s.Schema(), ";") {
		if strings.TrimSpace(statement) == "" {
			continue
		}
		if _, err := tx.ExecContext(ctx, statement); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// Check implements [store.Checker]: it returns nil if the tables exist and have this
// version.
func (s *Store) Check(ctx context.Context) error {
	return wrap("check", s.find(ctx, s.db))
}

// errNoTables is returned by find if none of the tables exists.
var errNoTables = fmt.Errorf("%w: it has no tables", store.ErrNotMigrated)

// find returns nil if the tables exist and have this version.
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
	var version int
	err := q.QueryRowContext(ctx, s.tables.sql("SELECT coalesce(max(version), 0) FROM {p}saga_schema")).Scan(&version)
	if err != nil {
		return fmt.Errorf("version of the schema: %w", err)
	}
	if version != schemaVersion {
		return fmt.Errorf("%w: its schema is of another version of this library: %d, and this program's is %d", store.ErrNotMigrated, version, schemaVersion)
	}
	return nil
}
