// Package sqllease provides a [lease.Store] in the user's database: PostgreSQL, MySQL, MariaDB or SQLite, through
// database/sql and any driver.
//
//	db, err := sql.Open("pgx", os.Getenv("DATABASE_URL"))
//	...
//	store := sqllease.New(db, sqllease.PostgreSQL, sqllease.Config{})
//	err = store.Migrate(ctx) // at every start: it does nothing if the tables exist
//	...
//	err = lease.New(store, lease.Config{Name: "billing"}).Loop(ctx, lead)
//
// The TTL is measured with the database's clock. Each statement is a separate transaction. The store uses no session
// state and no advisory lock, so the connections may go through a pooler such as PgBouncer. With a pooler, the driver
// must not prepare statements. With pgx and a pooler, add default_query_exec_mode=exec to the DSN.
//
// A renewal needs a free connection of db. If the work uses all connections of the pool for longer than the TTL, the
// term is lost. If MaxOpenConns is 1, for example, a single fenced transaction uses all connections. To avoid the loss,
// open a separate db for the Store.
//
// A waiting candidate reads one row at each Poll of [lease.Config]. A leader writes one row three times per TTL.
//
// # Fence
//
// [lease.Term.Fence] locks a row in the user's transaction. To start a new term, another process has to change the
// locked row, so it has to wait until the transaction has ended. Renewals and other fenced transactions do not wait
// for the lock, except on SQLite, which has one writer.
//
// If a process is stopped or disconnected during a fenced transaction, no other process can lead until the server
// closes the connection. Therefore configure the server to close an idle connection after a few TTLs. The settings are
// idle_in_transaction_session_timeout and tcp_keepalives_idle on PostgreSQL, idle_transaction_timeout on MariaDB, and
// wait_timeout on MySQL.
//
// # Databases
//
// PostgreSQL must be version 12 or later. In a transaction that is not READ COMMITTED, Fence may return a serialization
// failure instead of [lease.ErrLost].
//
// The server must be MySQL 8.0 or later, or MariaDB 10.6 or later. In a cluster of several nodes that accept writes,
// such as Galera or Group Replication, each node has its own locks. In such a cluster, fences work only if all
// processes write to the same node.
//
// SQLite must be version 3.35 or later, with the database on a local disk and a busy_timeout on every connection. On
// SQLite, every transaction that writes, including a fenced transaction, delays the renewals of all leases in the
// file. Therefore, a transaction that writes to the file must be much shorter than the TTL.
//
// # Failover of the database
//
// A failover may lose commits, for example because the replication is asynchronous. A failover may even lose the record
// of a term that has just started, together with the term's fenced transactions. After a failover, the next term's
// epoch is still greater, unless the new primary's clock is behind by more than the duration of the outage. Epochs are
// based on the database's clock. To find the new primary automatically, the store closes the pool's connections to a
// server that no longer accepts writes.
package sqllease

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/internal/sqldb"
	"github.com/go-resilience/resilience/lease"
)

// A Dialect is a kind of database.
type Dialect string

const (
	PostgreSQL Dialect = "PostgreSQL" // version 12 or later
	MySQL      Dialect = "MySQL"      // MySQL 8.0 or MariaDB 10.6, or later
	SQLite     Dialect = "SQLite"     // version 3.35 or later
)

// A Config configures a [Store]. The zero Config is usable.
type Config struct {
	// Prefix is the prefix of the tables' names. Prefix has at most 32 characters from a-z, 0-9 and _, and does not
	// start with a digit. Empty means no prefix.
	Prefix string
}

// A Store is a [lease.Store] and a [lease.Fencer] in a database. It is safe for concurrent use, by any number of
// processes on one database.
type Store struct {
	db      *sql.DB
	dialect Dialect
	d       *statements
	texts   *sqldb.Texts
	schema  sqldb.Schema
}

var _ lease.Fencer = (*Store)(nil)

// New returns a Store in db. New does not use db, and the Store never closes it. New panics if db is nil, the dialect
// is unknown, or cfg is invalid.
func New(db *sql.DB, dialect Dialect, cfg Config) *Store {
	d, ok := dialects[dialect]
	switch {
	case db == nil:
		panic("sqllease: *sql.DB is nil: must be set")
	case !ok:
		panic(fmt.Sprintf("sqllease: dialect is %q: must be PostgreSQL, MySQL or SQLite", string(dialect)))
	case !sqldb.IsPrefix(cfg.Prefix):
		panic(fmt.Sprintf("sqllease: Config.Prefix is %.40q: must be up to 32 of a-z, 0-9 and _, not a digit first",
			cfg.Prefix))
	}
	texts := sqldb.NewTexts(cfg.Prefix, d.numbered, "{now}", d.now)
	return &Store{db: db, dialect: dialect, d: d, texts: texts, schema: sqldb.Schema{
		Create: texts.Of(d.schema), Find: texts.Of(d.find),
		Table: cfg.Prefix + "lease_schema", Version: version, Kind: string(dialect),
	}}
}

// version is the version of the tables. From release 0.1.0 on, a change of the tables must increment version and add a
// migration to Migrate. The row of the version records whether older programs can use the new tables.
const version = 1

// Schema returns the statements that create the tables, for a separate migration tool. Each statement ends with a
// semicolon. If a migration tool has executed the statements, Migrate finds the tables and does nothing.
func (s *Store) Schema() string { return s.schema.String() }

// Migrate creates the tables unless they exist. On PostgreSQL, Migrate creates the tables in the first schema of the
// search_path. If the tables exist, Migrate needs no right to create tables. Several processes may call Migrate
// concurrently.
//
// Migrate returns an error in these cases:
//
//   - A table of another program has the same name as a table of the Store.
//   - The tables have a newer version, which this program cannot use.
//   - The server is compatible with PostgreSQL or MySQL, but executes some statements differently. Examples are
//     CockroachDB and TiDB.
//   - The database is SQLite, and the busy_timeout is zero.
//
// With modernc.org/sqlite, set the busy_timeout in the name of the data source:
//
//	file:leases.db?_pragma=busy_timeout(1000)&_pragma=journal_mode(WAL)&_txlock=immediate
func (s *Store) Migrate(ctx context.Context) error {
	err := s.schema.Migrate(ctx, s.db)
	if err == nil && s.dialect == SQLite {
		err = sqldb.Waits(ctx, s.db)
	}
	return wrap("migrate", err)
}

// Acquire implements [lease.Store].
func (s *Store) Acquire(ctx context.Context, req lease.Request) (lease.Record, error) {
	rec, err := s.loadRecord(ctx, req.Name)
	if errors.Is(err, sql.ErrNoRows) { // the lease has never been held
		for statement := range sqldb.Statements(s.texts.Of(s.d.create)) {
			if _, err := sqldb.Exec(ctx, s.db, statement, req.Name); err != nil {
				return rec, wrap("acquire", err)
			}
		}
		rec, err = s.loadRecord(ctx, req.Name)
	}
	switch {
	case err != nil:
		return rec, wrap("acquire", err)
	case !rec.Held():
		rec, err = s.take(ctx, rec, req)
		return rec, wrap("acquire", err)
	case rec.Token == req.Token:
		rec.Left = req.TTL
		return rec, s.Renew(ctx, lease.Request{Name: req.Name, Token: req.Token, TTL: req.TTL})
	}
	return rec, nil
}

// take starts a term, unless another term has started since rec was read, or a fenced transaction is open.
func (s *Store) take(ctx context.Context, rec lease.Record, req lease.Request) (taken lease.Record, err error) {
	args := []any{req.Token, req.Holder, req.TTL.Microseconds(), req.Name, rec.Epoch}
	if s.d.unlocked == "" {
		err = sqldb.Write(ctx, s.db, func(ctx context.Context, on sqldb.Conn) (err error) {
			taken, err = scan(req.Name, on.QueryRowContext(ctx, s.texts.Of(s.d.acquire), args...))
			return err
		})
		if errors.Is(err, sql.ErrNoRows) {
			return rec, nil
		}
		return taken, err
	}
	err = sqldb.Write(ctx, s.db, func(ctx context.Context, on sqldb.Conn) error {
		return on.QueryRowContext(ctx, s.texts.Of(s.d.unlocked), req.Name).Scan(new(int64))
	})
	if errors.Is(err, sql.ErrNoRows) {
		return rec, nil
	}
	if err != nil {
		return rec, err
	}
	began, err := sqldb.Exec(ctx, s.db, s.texts.Of(s.d.acquire), args...)
	if err != nil || !began {
		return rec, err
	}
	return s.loadRecord(ctx, req.Name)
}

// Renew implements [lease.Store].
func (s *Store) Renew(ctx context.Context, req lease.Request) error {
	text, args := s.d.renew, []any{req.TTL.Microseconds(), req.Name, req.Token}
	if req.Run != 0 {
		text, args = s.d.run, []any{req.TTL.Microseconds(), req.Run, req.Name, req.Token, req.Run}
	}
	renewed, err := sqldb.Exec(ctx, s.db, s.texts.Of(text), args...)
	if renewed || err != nil {
		return wrap("renew", err)
	}
	rec, err := s.Load(ctx, req.Name)
	switch {
	case err != nil:
		return err
	case rec.Token != req.Token:
		return lease.ErrLost
	case req.Run != 0:
		return lease.ErrRunTaken
	}
	return nil // on MySQL, a row that matches but does not change counts as not affected
}

// Release implements [lease.Store].
func (s *Store) Release(ctx context.Context, name, token string) error {
	_, err := sqldb.Exec(ctx, s.db, s.texts.Of(s.d.release), name, token)
	return wrap("release", err)
}

// Load implements [lease.Store].
func (s *Store) Load(ctx context.Context, name string) (lease.Record, error) {
	rec, err := s.loadRecord(ctx, name)
	if errors.Is(err, sql.ErrNoRows) { // the lease has never been held
		err = nil
	}
	return rec, wrap("load", err)
}

// Fence implements [lease.Fencer].
func (s *Store) Fence(ctx context.Context, tx *sql.Tx, name string, epoch int64) error {
	err := tx.QueryRowContext(ctx, s.texts.Of(s.d.fence), name, epoch).Scan(new(int64))
	if errors.Is(err, sql.ErrNoRows) {
		return lease.ErrLost
	}
	return wrap("fence", err)
}

// loadRecord is like Load, but returns sql.ErrNoRows if the lease has never been held.
func (s *Store) loadRecord(ctx context.Context, name string) (lease.Record, error) {
	return scan(name, s.db.QueryRowContext(ctx, s.texts.Of(s.d.load), name))
}

func scan(name string, row *sql.Row) (lease.Record, error) {
	rec, left := lease.Record{Name: name}, int64(0)
	err := row.Scan(&rec.Token, &rec.Holder, &rec.Epoch, &left, &rec.LastRun)
	rec.Left = max(time.Duration(left)*time.Microsecond, 0)
	return rec, err
}

// wrap adds the name of the failed method to err. It returns nil and [lease.ErrLost] unchanged.
func wrap(method string, err error) error {
	if err == nil || err == lease.ErrLost {
		return err
	}
	return fmt.Errorf("sqllease: %s: %w", method, sqldb.Pooler(err))
}
