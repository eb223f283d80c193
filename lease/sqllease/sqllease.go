// Package sqllease keeps the leases of package lease in the user's own database,
// PostgreSQL, MySQL, MariaDB or SQLite, through database/sql and any driver.
//
//	db, err := sql.Open("pgx", os.Getenv("DATABASE_URL"))
//	...
//	store := sqllease.New(db, sqllease.PostgreSQL, sqllease.Config{})
//	err = store.Migrate(ctx) // at every start: it does nothing if the tables exist
//	...
//	err = lease.Run(ctx, store, lease.Config{Name: "billing"}, lead)
//
// All times are of the database's clock. Each statement is a transaction of its own: no
// session state, no advisory lock, so that a pooler such as PgBouncer may stand in between. The
// driver must then prepare no statements: with pgx, add default_query_exec_mode=exec to the DSN.
//
// A waiting candidate reads one row every Poll of [lease.Config]. A leader writes one row
// every third of the TTL.
//
// # Fence
//
// [lease.Term.Fence] locks a row in the user's transaction, which a new term has to change.
// Renewals and other fenced transactions go on meanwhile, but on SQLite, which has one writer.
//
// A process that is stopped or cut off in the middle of a fenced transaction keeps others
// from leading for as long as the server keeps its connection. Bound it on the server, at a few
// TTLs: idle_in_transaction_session_timeout and tcp_keepalives_idle on PostgreSQL,
// idle_transaction_timeout (MariaDB) or wait_timeout on MySQL.
//
// # Databases
//
// PostgreSQL 12 or later. The fence of a transaction that is not READ COMMITTED may fail with a
// serialization failure instead of [lease.ErrLost].
//
// MySQL 8.0 or MariaDB 10.6, or later. In a cluster of several nodes that take writes, such as Galera or Group
// Replication, each node has locks of its own: a fence holds only if all processes write to the same node.
//
// SQLite 3.35 or later, a database on a local disk, and a busy_timeout on every
// connection. A fenced transaction, as every transaction that writes, keeps the renewals
// of all leases in the file waiting: it must be much shorter than the TTL.
//
// # Failover of the database
//
// A database that loses commits when it fails over, such as one with asynchronous replication,
// may lose the beginning of a term. The next epoch is still higher, and fenced transactions are
// lost with the term. The store finds the new primary by itself: it closes the connections of the
// pool that lead to a server which takes no writes any more.
package sqllease

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/go-resilience/resilience/internal/sqldb"
	"github.com/go-resilience/resilience/lease"
)

// A Dialect is a kind of database.
type Dialect string

const (
	PostgreSQL Dialect = "PostgreSQL"
	MySQL      Dialect = "MySQL" // and MariaDB
	SQLite     Dialect = "SQLite"
)

// A Config configures a [Store]. The zero Config is usable.
type Config struct {
	// Prefix begins the names of the tables: up to 32 of a-z, 0-9 and _, not a digit first.
	Prefix string
}

// A Store is a [lease.Store] and a [lease.Fencer] in a database. It is safe for concurrent use,
// also by many processes on one database.
type Store struct {
	db      *sql.DB
	dialect Dialect
	d       *statements
	texts   *sqldb.Texts
	schema  sqldb.Schema
}

var _ lease.Fencer = (*Store)(nil)

// New returns a Store in db, which it does not use yet and never closes. It panics if db is nil,
// the dialect is unknown, or the Config is invalid.
func New(db *sql.DB, dialect Dialect, cfg Config) *Store {
	d, ok := dialects[dialect]
	switch {
	case db == nil:
		panic("sqllease: the *sql.DB is nil: must be set")
	case !ok:
		panic(fmt.Sprintf("sqllease: the dialect is %q: must be PostgreSQL, MySQL or SQLite", string(dialect)))
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

// version is of the tables. From 0.1.0 on, whatever changes them makes it one more, with a migration
// in Migrate, and says in the row of the version whether older programs can use them.
const version = 1

// Schema returns the statements that create the tables, each with a semicolon at its end, for a
// migration tool of your own. Migrate then finds the tables and does nothing.
func (s *Store) Schema() string { return s.schema.String() }

// Migrate creates the tables unless they exist, on PostgreSQL in the first schema of the
// search_path. If they exist, it needs no right to create tables. Several processes may call it at
// once. It returns an error if a table of one of these names belongs to another program, if a newer
// version of the tables says that this program cannot use them, or on SQLite if the busy_timeout is
// zero. With modernc.org/sqlite:
//
//	file:leases.db?_pragma=busy_timeout(1000)&_pragma=journal_mode(WAL)&_txlock=immediate
func (s *Store) Migrate(ctx context.Context) error {
	err := s.schema.Migrate(ctx, s.db)
	if err == nil && s.dialect == SQLite {
		err = sqldb.Waits(ctx, s.db)
	}
	return wrap("migrate", err)
}

func (s *Store) Acquire(ctx context.Context, req lease.Request) (lease.Record, error) {
	rec, err := s.look(ctx, req.Name)
	if errors.Is(err, sql.ErrNoRows) { // nobody has ever held it
		for statement := range sqldb.Statements(s.texts.Of(s.d.create)) {
			if _, err := sqldb.Exec(ctx, s.db, statement, req.Name); err != nil {
				return rec, wrap("acquire", err)
			}
		}
		rec, err = s.look(ctx, req.Name)
	}
	switch {
	case err != nil:
		return rec, wrap("acquire", err)
	case !rec.Held():
		rec, err = s.take(ctx, rec, req)
		return rec, wrap("acquire", err)
	case rec.Token == req.Token:
		rec.Until = rec.Now.Add(req.TTL)
		return rec, s.Renew(ctx, req)
	}
	return rec, nil
}

// take begins a term, unless another has begun since rec was read, or a fenced transaction is open.
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
	return s.look(ctx, req.Name)
}

func (s *Store) Renew(ctx context.Context, req lease.Request) error {
	run := 0
	if req.Run {
		run = 1
	}
	renewed, err := sqldb.Exec(ctx, s.db, s.texts.Of(s.d.renew), req.TTL.Microseconds(), run, req.Name, req.Token)
	if renewed || err != nil {
		return wrap("renew", err)
	}
	rec, err := s.Load(ctx, req.Name) // MySQL does not count a row that is as it was
	if err == nil && rec.Token != req.Token {
		err = lease.ErrLost
	}
	return err
}

func (s *Store) Release(ctx context.Context, name, token string) error {
	_, err := sqldb.Exec(ctx, s.db, s.texts.Of(s.d.release), name, token)
	return wrap("release", err)
}

func (s *Store) Load(ctx context.Context, name string) (lease.Record, error) {
	rec, err := s.look(ctx, name)
	if errors.Is(err, sql.ErrNoRows) { // nobody has ever held it
		var now int64
		err = s.db.QueryRowContext(ctx, "SELECT "+s.d.now).Scan(&now)
		rec.Now = sqldb.Moment(now)
	}
	return rec, wrap("load", err)
}

func (s *Store) Fence(ctx context.Context, tx *sql.Tx, name string, epoch int64) error {
	err := tx.QueryRowContext(ctx, s.texts.Of(s.d.fence), name, epoch).Scan(new(int64))
	if errors.Is(err, sql.ErrNoRows) {
		return lease.ErrLost
	}
	return wrap("fence", err)
}

// look reads a lease.
func (s *Store) look(ctx context.Context, name string) (lease.Record, error) {
	return scan(name, s.db.QueryRowContext(ctx, s.texts.Of(s.d.look), name))
}

func scan(name string, row *sql.Row) (rec lease.Record, err error) {
	var since, until, ran, now int64
	err = row.Scan(&rec.Token, &rec.Holder, &rec.Epoch, &since, &until, &ran, &now)
	rec.Name, rec.Since, rec.Until = name, sqldb.Moment(since), sqldb.Moment(until)
	rec.Ran, rec.Now = sqldb.Moment(ran), sqldb.Moment(now)
	return rec, err
}

// wrap says which method an error is from. The store's own answers stay as they are.
func wrap(what string, err error) error {
	if err == nil || err == lease.ErrLost {
		return err
	}
	return fmt.Errorf("sqllease: %s: %w", what, sqldb.Pooler(err))
}
