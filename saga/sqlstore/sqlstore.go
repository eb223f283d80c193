// Package sqlstore provides a store for package saga in PostgreSQL, MySQL, MariaDB or SQLite. It uses database/sql
// and the program's driver:
//
//	db, err := sql.Open("pgx", os.Getenv("DATABASE_URL"))
//	store := sqlstore.New(db, sqlstore.PostgreSQL, sqlstore.Config{})
//	err = store.Migrate(ctx) // at every start: it does nothing if the tables exist
//	runner := saga.NewRunner(store, saga.RunnerConfig{})
//
// A saga is a row in the table saga. Its log is in saga_log, and its signals are in saga_signal. Times are
// microseconds since 1970, according to the database's clock. The number of sagas that have ended does not affect
// the duration of a call.
//
// If the database's clock is set back, a saga whose owner dies is taken over after at most two leases all the same.
// A saga without an owner is due when the clock has reached its time again.
//
// # Replication and failover
//
// A saga relies on commits that survive. With asynchronous replication, a failover loses the commits that the new
// primary does not have yet. In a test of a failover under load, 70 of 1151 starts were lost although Start had
// returned nil, and commands that participants had already applied were sent again, because the records of these
// steps were lost. Idempotent participants, such as those with saga.Apply, tolerate the repeated commands. Nothing
// brings back the lost starts, and a lost record of a compensation lets its saga go forward again. Replicate the
// saga's commits synchronously:
//
//   - PostgreSQL: synchronous_commit = on, its default, or remote_apply, together with synchronous_standby_names,
//     for example 'ANY 1 (a, b)'. If synchronous_standby_names is empty, its default, PostgreSQL replicates
//     asynchronously. With two standbys, the failure of one does not block commits. Only a synchronous standby may
//     become the primary. A cancellation of a COMMIT that waits for a standby does not roll it back.
//   - MySQL: semi-synchronous replication with rpl_semi_sync_source_wait_point = AFTER_SYNC, its default. After
//     rpl_semi_sync_source_timeout, 10 seconds by default, the source replicates asynchronously: set the timeout to
//     a high value. MariaDB has rpl_semi_sync_master_wait_point, whose default is AFTER_COMMIT, and
//     rpl_semi_sync_master_timeout. Only a replica that has acknowledged all commits may become the source.
//
// Managed databases differ: a standby in the same region is often synchronous, a read replica that is promoted is
// not.
//
// # PostgreSQL
//
// The store needs version 12 or later. It finds the tables through the search_path. A pool of 8 to 16 connections
// suffices for hundreds of concurrent sagas. Add one connection for each concurrent DoTx.
//
// If a process is stopped, or loses its connection to the server, between a DoTx and its COMMIT, the row of the saga
// stays locked until the server closes the connection, and no other runner can take the saga over. Set the server's
// idle_in_transaction_session_timeout and tcp_keepalives_idle to a few leases.
//
// After another process has started or signaled a saga, a runner finds it within RunnerConfig.Poll, or within
// milliseconds if Config.Listen is set.
//
// Behind a pooler that assigns connections to transactions, such as PgBouncer with pool_mode=transaction, the driver
// must not prepare statements. With pgx, add default_query_exec_mode=exec or simple_protocol to the DSN. The modes
// cache_describe and describe_exec may run the statement of another client. Config.Listen must connect to the server
// directly.
//
// # MySQL
//
// The store needs MySQL 8 or MariaDB 10.6, or later. The tables are in the connections' default database. In a
// cluster of several nodes that accept writes, such as Galera or Group Replication, each node has its own locks: all
// processes must write to the same node. Otherwise, two runners may run the same step. The server's
// innodb_flush_log_at_trx_commit must be 1, its default. With another value, a loss of power undoes steps that were
// recorded.
//
// go-sql-driver/mysql ignores the ctx during COMMIT. Set readTimeout in the DSN to the LeaseTTL. Without
// readTimeout, a connection that breaks silently in the COMMIT of a heartbeat stops all heartbeats of the process
// until TCP's timeout, about 15 minutes, and other runners take its sagas over. Each statement of a DoTx must take
// less than readTimeout.
//
// A process that stops inside a DoTx, without its connection breaking, keeps the locks of its rows. The DoTx of another
// runner that waits for them fails after readTimeout or innodb_lock_wait_timeout, which counts as an attempt, so that
// healthy sagas may turn back. On MariaDB, set idle_transaction_timeout in the DSN to the LeaseTTL in seconds.
// Otherwise, give such steps more Attempts.
//
// If a DoTx loses a deadlock and returns the error, the attempt has failed without effect and is repeated. If the
// DoTx ignores the error, its earlier writes are lost: the server has rolled the transaction back, and commits each
// statement that follows separately, including the record that the step is done.
//
// # SQLite
//
// The store needs SQLite 3.37 or later, and a database on a local disk, which the processes of one machine may
// share. SQLite has one writer at a time. The store's own writes wait in a queue in the process. Other write
// transactions wait in SQLite, which needs a busy_timeout. With modernc.org/sqlite:
//
//	file:trips.db?_pragma=busy_timeout(4000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate
//
// Migrate rejects a synchronous setting below FULL, which is the default of some drivers in WAL mode: after a loss
// of power, the record that a saga has turned back could be missing, and the saga would go forward again. If other
// parts of the program often write to the same database, db.SetMaxOpenConns(1) makes all writers wait in one fair
// queue. A DoTx must then use its tx and no other connection.
//
// A DoTx excludes all other writers while it runs, including heartbeats. A runner therefore ends it after a third of
// RunnerConfig.LeaseTTL, whatever its Timeout.
package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/sqldb"
	"github.com/go-resilience/resilience/internal/sqltx"
	"github.com/go-resilience/resilience/saga/internal/participant"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// A Dialect is a kind of database.
type Dialect string

const (
	PostgreSQL Dialect = "PostgreSQL" // version 12 or later
	MySQL      Dialect = "MySQL"      // MySQL 8 or MariaDB 10.6, or later
	SQLite     Dialect = "SQLite"     // version 3.37 or later
)

var dialects = map[Dialect]*dialect{PostgreSQL: &postgresql, MySQL: &mysql, SQLite: &sqlite}

// A Store is a saga.Store in a database. It is safe for concurrent use, by any number of processes on one database.
type Store struct {
	methods
	tables *tables
}

// methods are the methods that a Runner calls. Programs do not call them.
type methods interface {
	store.TxStore
	store.Notifier
}

type tables struct {
	db     *sql.DB
	kind   Dialect
	d      *dialect
	prefix string
	listen func(ctx context.Context, channel string, notify func()) error

	batches  *batcher // nil on MySQL, where a commit may wait for a row that another commit has locked
	texts    *sqldb.Texts
	prepared *prepared // nil on PostgreSQL, whose drivers prepare statements themselves
	turns    *turns    // the queue of SQLite's writers; nil on other databases
	rotation rotation

	leases    sync.Mutex
	limited   time.Time    // the time of the last limitLeases; guarded by leases
	isolation atomic.Value // the default isolation of PostgreSQL, a string; nil until it is known
}

// A Config configures a [Store]. The zero Config is usable.
type Config struct {
	// Prefix is the prefix of the names of the tables and indexes, except saga_barrier: at most 32 of a-z, 0-9 and _,
	// not starting with a digit. Empty means no prefix.
	Prefix string

	// Listen executes LISTEN for the channel on a separate connection. It calls notify once when it listens, and then
	// for each notification, until ctx is done or the connection fails. The connection must not use a pooler such as
	// PgBouncer, through which no notification arrives. Listen is for PostgreSQL only. With pgx, it is
	// resiliencepgx.Listen(pool). Nil means that runners only poll.
	//
	// A store with Listen also sends notifications, so every process that starts or signals sagas needs it. PostgreSQL
	// commits transactions with notifications one after the other: each StartTx, each Start whose runner has no free
	// place, and each write after which a saga without an owner is due immediately, such as a signal.
	Listen func(ctx context.Context, channel string, notify func()) error
}

// New returns a Store in db. It does not use db yet, and never closes it. It panics if db is nil, the dialect is
// unknown, or the Config is invalid for the dialect.
func New(db *sql.DB, dialect Dialect, cfg Config) *Store {
	d, ok := dialects[dialect]
	switch {
	case db == nil:
		panic("sqlstore: New needs a *sql.DB, not nil")
	case !ok:
		panic(fmt.Sprintf("sqlstore: the dialect is %q: must be PostgreSQL, MySQL or SQLite", string(dialect)))
	case !sqldb.IsPrefix(cfg.Prefix):
		panic(fmt.Sprintf("sqlstore: Config.Prefix is %q: must be up to 32 of a-z, 0-9 and _, not a digit first",
			cfg.Prefix))
	case cfg.Listen != nil && dialect != PostgreSQL:
		panic("sqlstore: Config.Listen is for PostgreSQL")
	}
	s := &tables{db: db, kind: dialect, d: d, prefix: cfg.Prefix, listen: cfg.Listen,
		texts: sqldb.NewTexts(cfg.Prefix, d.numbered, d.words...)}
	if dialect != PostgreSQL {
		s.prepared = newPrepared(db)
	}
	switch dialect {
	case PostgreSQL:
		s.batches = &batcher{lanes: 2, alone: s.commitAlone, send: s.sendTogether}
	case SQLite:
		s.turns = newTurns()
		s.batches = &batcher{lanes: 1, alone: s.commitAlone, send: s.sendInTurn}
	}
	return &Store{s, s}
}

// version is the version of the tables; testdata has the tables of each version. From 0.1.0 on, a change of the
// tables increments it, adds a migration to Migrate and a test that upgrades a database of each released version with
// unfinished sagas, and records in the row of the version whether older programs can use the tables.
const version = 1

func (s *tables) schema() sqldb.Schema {
	barrier := participant.Table
	if s.kind == MySQL {
		barrier = participant.TableMySQL
	}
	return sqldb.Schema{
		Create: strings.TrimLeft(s.sql(s.d.schema), "\n") + barrier + ";\n",
		Find:   s.sql(find), Table: s.prefix + "saga_schema", Version: version, Kind: string(s.kind),
	}
}

// Schema returns the statements that create the tables and indexes, each with a semicolon at its end, for a separate
// migration tool. Migrate then finds the tables and does nothing.
func (s *Store) Schema() string { return s.tables.schema().String() }

// Migrate creates the tables and indexes, including saga.BarrierTable, unless they exist. If nothing is missing, it
// needs no right to create tables. Several processes may call it concurrently. It returns an error if a table of one
// of these names, except saga_barrier, belongs to another program, if a newer version of the tables excludes this
// program, or if the server is not PostgreSQL, MySQL or MariaDB and executes the statements differently, such as TiDB
// or CockroachDB. On SQLite, it also returns an error if the settings of the connection could lose a commit, or if
// the busy_timeout is zero.
func (s *Store) Migrate(ctx context.Context) error {
	if s.tables.kind == SQLite {
		if err := s.tables.settings(ctx); err != nil {
			return wrap("migrate", err)
		}
	}
	return wrap("migrate", s.tables.schema().Migrate(ctx, s.tables.db))
}

// settings returns an error if the settings of a connection to SQLite could lose a commit, or do not wait for locks.
func (s *tables) settings(ctx context.Context) error {
	var synchronous int
	if err := s.db.QueryRowContext(ctx, "PRAGMA synchronous").Scan(&synchronous); err != nil {
		return err
	}
	if synchronous < 2 {
		return fmt.Errorf("PRAGMA synchronous is %d: must be 2 (FULL) or 3 (EXTRA) on every connection,"+
			" since a committed step must survive a loss of power", synchronous)
	}
	return sqldb.Waits(ctx, s.db)
}

// Check returns nil if the tables exist, this program can use them, and the server is supported; see Migrate.
func (s *Store) Check(ctx context.Context) error {
	err := s.tables.schema().Check(ctx, s.tables.db)
	for _, is := range []error{sqldb.ErrMissing, sqldb.ErrOther, sqldb.ErrVersion, sqldb.ErrServer} {
		if errors.Is(err, is) {
			err = fmt.Errorf("%w: %w", store.ErrNotMigrated, err)
			break
		}
	}
	return wrap("check", err)
}

// sql returns a statement in the database's dialect.
func (s *tables) sql(text string) string { return s.texts.Of(text) }

// among is like sql, for a statement whose last parameters are a list of ids. It appends the ids to args, and repeats
// the last one up to a power of two, so that there are few different statements.
func (s *tables) among(text string, ids []string, args ...any) (string, []any) {
	n := 1
	for n < len(ids) {
		n *= 2
	}
	for i := range n {
		args = append(args, ids[min(i, len(ids)-1)])
	}
	return s.sql(strings.ReplaceAll(text, "{ids}", strings.Repeat("?, ", n-1)+"?")), args
}

// write runs fn in a transaction, and repeats it if the database rolls it back in favor of another transaction. On
// SQLite, it first waits for its turn, unless it is urgent.
func (s *tables) write(ctx context.Context, urgent bool, fn func(context.Context, sqldb.Querier) error) error {
	repeats := sqldb.Repeats
	if s.turns != nil {
		repeats = 0 // SQLite has waited for its busy_timeout, whatever ctx says
		leave, err := s.turns.enter(ctx, urgent)
		if err != nil {
			return err
		}
		defer leave()
		// ctx limits only the wait: the transaction is short, and a ctx does not end a wait inside SQLite.
		ctx = context.WithoutCancel(ctx)
	}
	if s.prepared != nil {
		// prepare needs a connection, and the pool may have no other than the transaction's.
		if err := s.prepared.prepare(ctx); err != nil {
			return err
		}
	}
	return sqldb.Transact(ctx, s.db, s.options(), repeats, func(ctx context.Context, tx *sql.Tx) error {
		if s.prepared == nil {
			return fn(ctx, tx)
		}
		return fn(ctx, preparedTx{tx, s.prepared})
	})
}

// single is like write, for an fn that executes one statement on PostgreSQL. If the default isolation is READ
// COMMITTED, the statement needs no explicit transaction, which saves two round trips.
func (s *tables) single(ctx context.Context, fn func(context.Context, sqldb.Querier) error) error {
	if s.kind != PostgreSQL {
		return s.write(ctx, false, fn)
	}
	level, _ := s.isolation.Load().(string)
	if level == "" {
		if err := s.db.QueryRowContext(ctx, "SHOW default_transaction_isolation").Scan(&level); err != nil {
			return err
		}
		s.isolation.Store(level)
	}
	if level != "read committed" {
		return s.write(ctx, false, fn)
	}
	return sqldb.Write(ctx, s.db, func(ctx context.Context, on sqldb.Conn) error { return fn(ctx, on) })
}

// options returns the isolation under which an UPDATE sees the newest version of its row, whatever the database's
// default.
func (s *tables) options() *sql.TxOptions {
	if s.kind == SQLite {
		return nil
	}
	return &sql.TxOptions{Isolation: sql.LevelReadCommitted}
}

// lock acquires the write lock of SQLite. On other databases, it does nothing.
func (s *tables) lock(ctx context.Context, q sqldb.Querier) error {
	if s.d.lock == "" {
		return nil
	}
	_, err := q.ExecContext(ctx, s.sql(s.d.lock))
	return err
}

func (s *tables) Begin(ctx context.Context) (*sql.Tx, error) {
	if s.turns != nil {
		// The caller leaves when tx has the lock. From then on, other writers wait for tx inside SQLite.
		leave, err := s.turns.enter(ctx, false)
		if err != nil {
			return nil, wrap("begin", err)
		}
		defer leave()
	}
	tx, err := sqltx.Begin(ctx, s.db, string(s.kind), s.options())
	if err == nil {
		if err = s.lock(ctx, tx); err != nil {
			_ = tx.Rollback()
			return nil, wrap("begin", err)
		}
	}
	return tx, wrap("begin", err)
}

// Exclusive reports whether the database is SQLite, which has one writer at a time.
func (s *tables) Exclusive() bool { return s.turns != nil }

func (s *tables) channel() string { return s.prefix + "saga" }

// notify notifies the listeners that a saga is due. Callers send the notification after the write, so that writes are
// not committed one after the other. If the process dies in between, runners find the saga at their next poll.
func (s *tables) notify(ctx context.Context, q sqldb.Querier) error {
	if s.listen == nil {
		return nil
	}
	_, err := q.ExecContext(ctx, "SELECT pg_notify($1, '')", s.channel())
	return err
}

func (s *tables) Listen(ctx context.Context, notify func()) error {
	if s.listen == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	return wrap("listen", s.listen(ctx, s.channel(), notify))
}

// named adds the name of a method to the error that the method returns. It is for a defer.
func named(what string, err *error) { *err = wrap(what, *err) }

// wrap adds the name of a method to an error of the database. It returns ErrFenced and ErrNotFound unchanged.
func wrap(what string, err error) error {
	if err == nil || err == store.ErrFenced || err == store.ErrNotFound {
		return err
	}
	return fmt.Errorf("sqlstore: %s: %w", what, sqldb.Pooler(err))
}
