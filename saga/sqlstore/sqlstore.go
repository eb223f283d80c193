// Package sqlstore provides a store for package saga in PostgreSQL, MySQL, MariaDB or SQLite. The store uses
// database/sql and the program's driver:
//
//	db, err := sql.Open("pgx", os.Getenv("DATABASE_URL"))
//	store := sqlstore.New(db, sqlstore.PostgreSQL, sqlstore.Config{})
//	err = store.Migrate(ctx) // at every start: it does nothing if the tables exist
//	runner := saga.NewRunner(store, saga.RunnerConfig{})
//
// A saga is a row in the table saga. A saga's log is in the table saga_log, and its signals are in saga_signal. Times
// are stored as microseconds since 1970, according to the database's clock. The calls that run sagas do not become
// slower as the number of ended sagas grows.
//
// If the owner of a saga dies, the saga is due again after at most RunnerConfig.LeaseTTL, or after about twice this
// time if the database's clock is set back. Another runner takes the saga over at its next poll. A saga without an
// owner is due at a fixed time of this clock. If the clock is set back, the saga waits until the clock reaches this
// time.
//
// # Replication and failover
//
// A commit that succeeded must survive a failover of the database. With asynchronous replication, a failover loses the
// commits that the new primary does not have yet. In a test of a failover under load, 70 of 1151 new sagas were lost
// although Start had returned nil. For other sagas, the records of steps were lost, so the sagas repeated commands that
// participants had already applied.
//
// Idempotent participants, such as participants that use saga.Apply, tolerate repeated commands. But a lost saga never
// continues. If the record of a compensation is lost, the saga goes forward again. Therefore replicate commits
// synchronously:
//
//   - PostgreSQL: set synchronous_standby_names, for example to 'ANY 1 (a, b)'. If synchronous_standby_names is empty
//     (the default), replication is asynchronous. Set synchronous_commit to on, the default, or to remote_apply. With
//     two standbys, the failure of one standby does not block commits. Only a synchronous standby may become the
//     primary. Canceling a COMMIT that waits for a standby does not roll back the transaction.
//   - MySQL: use semi-synchronous replication with rpl_semi_sync_source_wait_point = AFTER_SYNC, the default. Set
//     rpl_semi_sync_source_timeout to a high value, because the source continues asynchronously if no replica answers
//     within this timeout (10 seconds by default). On MariaDB, the settings are named rpl_semi_sync_master_wait_point
//     and rpl_semi_sync_master_timeout. MariaDB's default wait point is AFTER_COMMIT, so set AFTER_SYNC. Only a replica
//     that has acknowledged all commits may become the source.
//
// Managed databases differ: a standby in the same region is often synchronous. A read replica, which can be promoted to
// the primary, is not synchronous.
//
// # PostgreSQL
//
// The store needs PostgreSQL 12 or later. The store finds its tables through PostgreSQL's search_path. A pool of 8 to
// 16 connections suffices for hundreds of concurrent sagas. Add one connection to the pool for each concurrent DoTx.
//
// If a process stops or loses its connection between a DoTx and the COMMIT, the saga's row stays locked until the
// server closes the connection. While the row is locked, no other runner can take the saga over. To limit the time for
// which a row can stay locked, set the server's idle_in_transaction_session_timeout and tcp_keepalives_idle to a few
// times the LeaseTTL.
//
// When another process starts or signals a saga, a runner finds the saga within RunnerConfig.Poll. With Config.Listen,
// a runner finds the saga within milliseconds.
//
// Behind a pooler that assigns a connection to each transaction, such as PgBouncer with pool_mode=transaction, the
// driver must not prepare statements. With pgx, add default_query_exec_mode=exec or
// default_query_exec_mode=simple_protocol to the DSN. Do not use pgx's modes cache_describe and describe_exec, which
// may execute another client's statement. Config.Listen must connect to the server directly, not through a pooler.
//
// # MySQL
//
// The store needs MySQL 8 or MariaDB 10.6, or later. The store's tables are in the default database of the connections.
// In a cluster in which several nodes accept writes, such as Galera or Group Replication, each node has its own locks.
// All processes must write to the same node of a cluster; otherwise two runners may run the same step. The server's
// innodb_flush_log_at_trx_commit must be 1, the default. With a value other than 1, a loss of power may lose the
// records of steps.
//
// go-sql-driver/mysql ignores the ctx during COMMIT. Set readTimeout in the DSN to the LeaseTTL. Without readTimeout, a
// connection that breaks silently during a heartbeat's COMMIT blocks all heartbeats of the process for about 15
// minutes, until TCP's timeout. Other runners take over the sagas of a process without heartbeats. Each statement of a
// DoTx must take less than readTimeout.
//
// If a process stops inside a DoTx and its connection stays open, the rows of the transaction stay locked. Another
// runner's DoTx that waits for a locked row fails after readTimeout or innodb_lock_wait_timeout. A DoTx that fails
// because of a lock counts as a failed attempt, so healthy sagas may turn back. On MariaDB, set
// idle_transaction_timeout in the DSN to the LeaseTTL in seconds. The server then ends idle transactions. On MySQL,
// increase Attempts for steps whose DoTx changes rows that other sagas also change.
//
// If the server rolls back a DoTx because of a deadlock, the DoTx must return the error. An attempt that was rolled
// back has no effect, and the runner repeats the attempt. If the DoTx ignores the error of a deadlock, its earlier
// writes are lost, because the server has rolled them back. After the rollback, the server commits each later statement
// separately. One of these statements records that the step is done.
//
// # SQLite
//
// The store needs SQLite 3.37 or later, and a database on a local disk. Several processes of one machine may share the
// database. SQLite has one writer at a time. Within a process, writes of the store wait in a queue. Other write
// transactions wait inside SQLite for up to the busy_timeout, which must be set. With modernc.org/sqlite:
//
//	file:trips.db?_pragma=busy_timeout(4000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate
//
// Migrate returns an error if the setting synchronous is below FULL. Some drivers use a lower value by default in WAL
// mode. Below FULL, a loss of power could lose the record that a saga has turned back, and the saga would go forward
// again.
//
// If other parts of the program often write to the same database, call db.SetMaxOpenConns(1). All writers then wait in
// one fair queue. With SetMaxOpenConns(1), a DoTx must use only its tx and no other connection.
//
// While a DoTx runs on SQLite, no other transaction can write, so heartbeats wait. On SQLite, a runner therefore ends a
// DoTx after a third of RunnerConfig.LeaseTTL, even if the step's Timeout is longer.
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

// A Store is a sagastore.TxStore in a database. A Store is safe for concurrent use, by any number of processes on one
// database.
type Store struct {
	methods
	tables *tables
}

// methods has the methods that a Runner calls. Programs do not call them.
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

	batches  *batcher // nil on MySQL, where one commit may wait for a row that another commit has locked
	texts    *sqldb.Texts
	prepared *prepared // nil on PostgreSQL, whose drivers prepare statements themselves
	turns    *turns    // the queue of SQLite's writers; nil on other databases
	rotation rotation

	leases    sync.Mutex
	limited   time.Time    // the time of the last call to limitLeases; guarded by leases
	isolation atomic.Value // a string with PostgreSQL's default isolation level; nil until it is known
}

// A Config configures a [Store]. The zero Config is usable.
type Config struct {
	// Prefix is the prefix of the names of tables and indexes, except the table saga_barrier. Prefix has at most 32
	// characters from a-z, 0-9 and _, and does not start with a digit. An empty Prefix means no prefix.
	Prefix string

	// Listen executes LISTEN for the channel on a separate connection. Listen then calls notify once, and again for each
	// notification, until ctx is done or the connection fails. Listen's connection must not go through a pooler such as
	// PgBouncer, which does not forward notifications. Listen is for PostgreSQL only. With pgx, use
	// resiliencepgx.Listen(pool). If Listen is nil, runners only poll.
	//
	// Only a store with Listen sends notifications, so every process that starts or signals sagas needs Listen. PostgreSQL
	// commits transactions with notifications one after the other, not concurrently. A write sends a notification if,
	// after the write, the saga has no owner and is due immediately. Examples are StartTx, a signal, and a Start whose
	// runner has no capacity left.
	Listen func(ctx context.Context, channel string, notify func()) error
}

// New returns a Store in db. New does not use db, and the Store never closes db. New panics if db is nil, if the
// dialect is unknown, or if cfg is invalid for the dialect.
func New(db *sql.DB, dialect Dialect, cfg Config) *Store {
	d, ok := dialects[dialect]
	switch {
	case db == nil:
		panic("sqlstore: *sql.DB is nil: must be set")
	case !ok:
		panic(fmt.Sprintf("sqlstore: dialect is %q: must be PostgreSQL, MySQL or SQLite", string(dialect)))
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

// version is the version of the tables. testdata has the tables of each version. From release 0.1.0 on, a change of the
// tables must increment version and add a migration to Migrate. It must also add a test that upgrades a database with
// unfinished sagas from each released version. The row of the version records whether older programs can use the new
// tables.
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

// Schema returns the statements that create the tables and indexes, for a separate migration tool. Each statement ends
// with a semicolon. If a tool has executed these statements, Migrate finds the tables and does nothing.
func (s *Store) Schema() string { return s.tables.schema().String() }

// Migrate creates the tables and indexes, including saga.BarrierTable, unless they exist. If nothing is missing,
// Migrate needs no right to create tables. Several processes may call Migrate concurrently.
//
// Migrate returns an error in these cases:
//
//   - A table of another program has the same name as a table of the store. Migrate does not check the table
//     saga_barrier.
//   - The tables have a newer version, which this program cannot use.
//   - The server executes some statements differently from PostgreSQL or MySQL, as CockroachDB and TiDB do.
//   - The database is SQLite, and its busy_timeout is zero or its setting synchronous is below FULL. Below FULL, a loss
//     of power could lose a commit.
func (s *Store) Migrate(ctx context.Context) error {
	if s.tables.kind == SQLite {
		if err := s.tables.settings(ctx); err != nil {
			return wrap("migrate", err)
		}
	}
	return wrap("migrate", s.tables.schema().Migrate(ctx, s.tables.db))
}

// settings returns an error if a connection to SQLite could lose a commit or does not wait for locks.
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

// Check returns nil if the tables exist, this program can use their version, and the server is supported; see Migrate.
// Otherwise, the error matches sagastore.ErrNotMigrated. If Check cannot find this out, for example because the
// database does not answer, it returns another error.
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

// among is like sql, for a statement whose last parameters are a list of ids. It appends the ids to args. It repeats
// the last id until the number of ids is a power of two, to limit the number of different statements to cache.
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

// write runs fn in a transaction, and repeats the transaction if the database rolls it back in favor of another one. On
// SQLite, write first waits for its turn; an urgent call skips the queue.
func (s *tables) write(ctx context.Context, urgent bool, fn func(context.Context, sqldb.Querier) error) error {
	repeats := sqldb.Repeats
	if s.turns != nil {
		repeats = 0 // SQLite has already waited for its busy_timeout, even if ctx was done earlier
		leave, err := s.turns.enter(ctx, urgent)
		if err != nil {
			return err
		}
		defer leave()
		// ctx limits only the wait in the queue. The transaction is short, and ctx could not end a wait inside SQLite.
		ctx = context.WithoutCancel(ctx)
	}
	if s.prepared != nil {
		// prepare needs a connection. It must run before the transaction starts, because the pool may have only one
		// connection.
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

// single is like write, for an fn that executes only one statement on PostgreSQL. If PostgreSQL's default isolation is
// READ COMMITTED, single does not start an explicit transaction, which saves two round trips.
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

// options returns the transaction options under which an UPDATE sees the newest version of its row, regardless of the
// database's default isolation.
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
		// The turn ends as soon as tx has SQLite's lock. From then on, other writers wait for tx inside SQLite.
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

// notify notifies the listeners that a saga is due. It is called after the write unless the write is in a transaction
// of the caller, because PostgreSQL commits transactions with notifications one after the other. If the process dies
// before the notification is sent, runners find the saga at their next poll.
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

// named adds the name of a method to the method's error. It is called in a defer statement.
func named(what string, err *error) { *err = wrap(what, *err) }

// wrap adds the name of a method to an error of the database. It returns ErrFenced and ErrNotFound unchanged.
func wrap(what string, err error) error {
	if err == nil || err == store.ErrFenced || err == store.ErrNotFound {
		return err
	}
	return fmt.Errorf("sqlstore: %s: %w", what, sqldb.Pooler(err))
}
