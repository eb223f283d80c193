// Package sqlstore keeps the sagas of package saga in PostgreSQL, MySQL, MariaDB or SQLite,
// through database/sql and the driver of the program.
//
//	db, err := sql.Open("pgx", os.Getenv("DATABASE_URL"))
//	store := sqlstore.New(db, sqlstore.PostgreSQL, sqlstore.Config{})
//	err = store.Migrate(ctx) // at every start: it does nothing if the tables exist
//	runner := saga.NewRunner(store, saga.RunnerConfig{})
//
// A saga is a row of the table saga, its log is in saga_log, and its signals are in
// saga_signal. Times are microseconds since 1970, by the clock of the database. The table
// saga_schema has the version of all, and which programs can use it. Config.Prefix gives these
// tables other names. Migrate also creates saga_barrier, for saga.Apply.
// [Store.Schema] returns the statements for another migration tool. Sagas that have ended
// stay for as long as saga.RunnerConfig.Keep says. No call takes longer because many have
// ended.
//
// Each step is committed before the next one begins. On PostgreSQL and SQLite, commits of several
// sagas that wait for each other go to the database together. Each has its own fence and its own
// outcome.
//
// # PostgreSQL
//
// Version 12 or later. The tables are found through the search_path. A start and a commit are one
// statement and one round trip each. Where the default isolation is not READ COMMITTED, each is
// a transaction of three round trips. A commit that was to go with others, and whose row is locked or
// belongs to another owner, is repeated by itself. A pool of 8 to 16 connections is enough for hundreds of
// concurrent sagas; add one for each concurrent DoTx.
//
// Consider a process that is stopped, or cut off from the server, between a DoTx and its
// COMMIT. The row of its saga stays locked for as long as the server keeps the connection, and
// no other runner can take the saga over. Set idle_in_transaction_session_timeout and
// tcp_keepalives_idle on the server to a few leases. Other sagas do not wait for the row.
//
// A runner finds a saga that another process has started or signaled after
// RunnerConfig.Poll, or within milliseconds with Config.Listen.
//
// Behind a pooler that lends a connection for each transaction, such as PgBouncer with
// pool_mode=transaction, the driver must prepare no statement. With pgx, add
// default_query_exec_mode=exec to the DSN (or simple_protocol; the other three modes fail,
// and cache_describe and describe_exec may run the statement of another client). Config.Listen
// must connect to the server itself.
//
// # MySQL
//
// MySQL 8 and MariaDB 10.6, or later. Tables are in the default database of the
// connections. A write is a transaction under READ COMMITTED, which the store sets for
// each, of some round trips; it is repeated after a deadlock. Ids are compared as bytes. With
// go-sql-driver/mysql no parameter of the DSN is needed. The
// server's innodb_flush_log_at_trx_commit must be 1, which is its default: with less, a
// loss of power takes back steps that were recorded.
//
// A DoTx that loses a deadlock has failed without effect, and is attempted again.
//
// # SQLite
//
// Version 3.37 or later, and a database on a local disk. The processes of one machine may
// share it. SQLite has one writer at a time. The store's own writes queue in the process.
// The write transactions of others wait inside SQLite, which needs a busy_timeout. With
// modernc.org/sqlite:
//
//	file:trips.db?_pragma=busy_timeout(4000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate
//
// Migrate rejects a synchronous setting below FULL. With less, a loss of power could take
// back the record that a saga has begun to undo, and the saga would go forward again. Some
// drivers have NORMAL as their default in WAL mode. If other parts of the program write
// much to the same database, db.SetMaxOpenConns(1) makes all of them queue fairly; a DoTx
// must then use its tx and no other connection.
//
// A DoTx excludes all other writers while it runs, including the heartbeats of every
// process. A runner therefore ends it after half of RunnerConfig.LeaseTTL, whatever its
// Timeout.
//
// Patterns: Scheduler Agent Supervisor, and Leader Election for its leases, in
// Cloud Design Patterns
// (https://learn.microsoft.com/azure/architecture/patterns/scheduler-agent-supervisor).
package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/internal/sqldb"
	"github.com/go-resilience/resilience/internal/sqltx"
	"github.com/go-resilience/resilience/saga/internal/participant"
)

// A Dialect is a kind of database.
type Dialect string

// The supported databases.
const (
	PostgreSQL Dialect = "PostgreSQL"
	MySQL      Dialect = "MySQL" // and MariaDB
	SQLite     Dialect = "SQLite"
)

var dialects = map[Dialect]*dialect{PostgreSQL: &postgresql, MySQL: &mysql, SQLite: &sqlite}

// A Store is a [store.TxStore] in a database. It is safe for concurrent use, by many
// processes too.
type Store struct {
	db     *sql.DB
	kind   Dialect
	d      *dialect
	prefix string
	listen func(ctx context.Context, channel string, notify func()) error

	batches  *batcher     // of commits; nil on MySQL, where one may wait for the row of another
	texts    sync.Map     // statements by what they were made of
	prepared *prepared    // nil on PostgreSQL, whose drivers prepare by themselves
	turns    *turns       // of the writers of SQLite; nil on others
	alone    atomic.Int32 // whether a statement need be no transaction: 0 if that is unknown, -1 or 1
}

var _ store.TxStore = (*Store)(nil)

// A Config configures a [Store]. The zero Config is usable.
type Config struct {
	// Prefix begins the names of the tables and indexes, except saga_barrier, for a
	// database in which these names are taken. It has up to 32 of a-z, 0-9 and _, and
	// does not begin with a digit.
	Prefix string

	// Listen executes LISTEN for the channel on a connection of its own. It calls notify
	// once when it has done so, and for each notification, until ctx ends or the
	// connection fails. With Listen, a runner finds a saga that was started or signaled
	// elsewhere within milliseconds instead of after RunnerConfig.Poll. It is for PostgreSQL only.
	// With pgx it is resiliencepgx.Listen(pool).
	//
	// A store with Listen also sends notifications, so every process that starts or signals
	// sagas needs it. PostgreSQL commits transactions with notifications one after the other.
	// These are that of each StartTx, of each Start whose runner has no free place, and of
	// each write after which a saga without an owner is due immediately: when a runner
	// stops, after an operator's action, a signal or the end of the last child. A saga that
	// another runner holds while it waits, since other steps are at work or the wait is
	// shorter than a third of RunnerConfig.LeaseTTL, sees its signal after that runner's Poll.
	Listen func(ctx context.Context, channel string, notify func()) error
}

// New returns a Store in db. It does not use db yet, and the Store never closes it. New
// panics if db is nil, the dialect is unknown, or the Config is invalid for the dialect.
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
	s := &Store{db: db, kind: dialect, d: d, prefix: cfg.Prefix, listen: cfg.Listen}
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
	return s
}

// version is of the tables, which testdata has as they were in each. From 0.1.0 on, whatever changes
// them makes it one more, with a migration in Migrate and a test that upgrades a database of each
// released version in which sagas are half done. From stays while older programs can use the tables.
var version = sqldb.Version{Is: 2, From: 1}

func (s *Store) schema() sqldb.Schema {
	barrier := participant.Table
	if s.kind == MySQL {
		barrier = participant.TableMySQL
	}
	return sqldb.Schema{
		Create: strings.TrimLeft(s.d.words.Text(s.prefix, s.d.schema), "\n") + barrier + ";\n",
		Find:   s.d.words.Text(s.prefix, find), Table: s.prefix + "saga_schema", Version: version, Kind: string(s.kind),
	}
}

// Schema returns the statements that create the tables and indexes, each with a
// semicolon at its end. It is for programs with a migration tool of their own; Migrate
// then finds the tables and does nothing.
func (s *Store) Schema() string { return s.schema().String() }

// Migrate creates the tables and indexes, including saga.BarrierTable, unless they
// exist, and adds what those of an older version lack. If nothing is missing, it needs no right
// to create tables. Several processes may call it at the same time. It returns an error if a
// table of one of these names, except saga_barrier, belongs to another program, or if the
// tables are of a version that this program cannot use: a newer one says which programs can. On
// SQLite it also returns an error if the settings of the connection could lose a commit, or do not
// wait for a lock.
func (s *Store) Migrate(ctx context.Context) error {
	if s.kind == SQLite {
		if err := s.settings(ctx); err != nil {
			return wrap("migrate", err)
		}
	}
	return wrap("migrate", s.schema().Migrate(ctx, s.db))
}

// settings returns an error if those of a connection to SQLite could lose a commit, or do not wait for
// a lock.
func (s *Store) settings(ctx context.Context) error {
	var synchronous, busy int
	for text, value := range map[string]*int{"PRAGMA synchronous": &synchronous, "PRAGMA busy_timeout": &busy} {
		if err := s.db.QueryRowContext(ctx, text).Scan(value); err != nil {
			return err
		}
	}
	if synchronous < 2 {
		return fmt.Errorf("PRAGMA synchronous is %d: must be 2 (FULL) or 3 (EXTRA) on every connection,"+
			" since a committed step must survive a loss of power", synchronous)
	}
	if busy <= 0 {
		return errors.New("PRAGMA busy_timeout is 0: must be some seconds on every connection," +
			" since a writer must wait for those of other processes")
	}
	return nil
}

// Check implements [store.Checker]: it returns nil if the tables exist and this program can
// use them.
func (s *Store) Check(ctx context.Context) error {
	err := s.schema().Check(ctx, s.db)
	for _, is := range []error{sqldb.ErrMissing, sqldb.ErrOther, sqldb.ErrVersion} {
		if errors.Is(err, is) {
			err = fmt.Errorf("%w: %w", store.ErrNotMigrated, err)
			break
		}
	}
	return wrap("check", err)
}

// sql returns a statement in the words of the database.
func (s *Store) sql(text string) string {
	if made, ok := s.texts.Load(text); ok {
		return made.(string)
	}
	made := s.d.words.Text(s.prefix, text)
	if s.d.numbered {
		made = sqldb.Number(made)
	}
	s.texts.Store(text, made)
	return made
}

// among is sql for a statement whose last parameters are a list of ids, which it appends to args. The
// list is filled up to a power of two, so that there are few different statements.
func (s *Store) among(text string, ids []string, args ...any) (string, []any) {
	n := 1
	for n < len(ids) {
		n *= 2
	}
	for i := range n {
		args = append(args, ids[min(i, len(ids)-1)])
	}
	return s.sql(strings.ReplaceAll(text, "{ids}", strings.Repeat("?, ", n-1)+"?")), args
}

// write makes fn one transaction, and repeats it where the database preferred another one. On SQLite
// it waits for its turn, unless it is urgent.
func (s *Store) write(ctx context.Context, urgent bool, fn func(context.Context, sqldb.Querier) error) error {
	repeats := sqldb.Repeats
	if s.turns != nil {
		repeats = 0 // SQLite has waited for its busy_timeout, whatever ctx says
		leave, err := s.turns.enter(ctx, urgent)
		if err != nil {
			return err
		}
		defer leave()
		// The end of ctx ends the wait, and not the transaction: it is short, and no ctx ends a wait inside
		// SQLite.
		ctx = context.WithoutCancel(ctx)
	}
	if s.prepared == nil {
		return sqldb.Transact(ctx, s.db, s.options(), repeats, func(ctx context.Context, tx *sql.Tx) error {
			return fn(ctx, tx)
		})
	}
	// Before the transaction has a connection, since this needs one too.
	if err := s.prepared.prepare(ctx); err != nil {
		return err
	}
	return sqldb.Transact(ctx, s.db, s.options(), repeats, func(ctx context.Context, tx *sql.Tx) error {
		return fn(ctx, preparedTx{tx, s.prepared})
	})
}

// single is write for an fn that makes one statement on PostgreSQL, which need be no transaction if the
// default isolation is READ COMMITTED.
func (s *Store) single(ctx context.Context, fn func(context.Context, sqldb.Querier) error) error {
	if s.kind != PostgreSQL {
		return s.write(ctx, false, fn)
	}
	if s.alone.Load() == 0 {
		var level string
		if err := s.db.QueryRowContext(ctx, "SHOW default_transaction_isolation").Scan(&level); err != nil {
			return err
		}
		if level == "read committed" {
			s.alone.Store(1)
		} else {
			s.alone.Store(-1)
		}
	}
	if s.alone.Load() > 0 {
		return sqldb.Write(ctx, s.db, fn)
	}
	return s.write(ctx, false, fn)
}

// options returns the isolation under which an UPDATE sees the newest version of its row, whatever the
// default of the database.
func (s *Store) options() *sql.TxOptions {
	if s.kind == SQLite {
		return nil
	}
	return &sql.TxOptions{Isolation: sql.LevelReadCommitted}
}

// lock makes a transaction the writer, where there is only one.
func (s *Store) lock(ctx context.Context, q sqldb.Querier) error {
	if s.d.lock == "" {
		return nil
	}
	_, err := q.ExecContext(ctx, s.sql(s.d.lock))
	return err
}

// Begin implements [store.TxStore].
func (s *Store) Begin(ctx context.Context) (*sql.Tx, error) {
	if s.turns != nil {
		// Until tx has the lock. After that, other writers wait for it inside SQLite.
		leave, err := s.turns.enter(ctx, false)
		if err != nil {
			return nil, wrap("begin", err)
		}
		defer leave()
	}
	tx, err := sqltx.Begin(ctx, s.db, s.kind == MySQL, s.options())
	if err == nil {
		if err = s.lock(ctx, tx); err != nil {
			_ = tx.Rollback()
			return nil, wrap("begin", err)
		}
	}
	return tx, wrap("begin", err)
}

// Exclusive implements [store.TxStore]: SQLite has one writer.
func (s *Store) Exclusive() bool { return s.turns != nil }

func (s *Store) channel() string { return s.prefix + "saga" }

// tell tells the listeners that a saga is due. It is sent after the write, so that writes do not wait
// for each other to be committed; if the process dies in between, they find the saga by their Poll.
func (s *Store) tell(ctx context.Context, q sqldb.Querier) error {
	if s.listen == nil {
		return nil
	}
	_, err := q.ExecContext(ctx, "SELECT pg_notify($1, '')", s.channel())
	return err
}

// Listen implements [store.Notifier].
func (s *Store) Listen(ctx context.Context, notify func()) error {
	if s.listen == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	silence := time.AfterFunc(math.MaxInt64, func() { stop(errDeaf) })
	defer silence.Stop()
	calls := 0
	err := s.listen(ctx, s.channel(), func() {
		switch calls++; calls {
		case 1:
			call, cancel := context.WithTimeout(ctx, hearsWithin)
			err := s.tell(call, s.db)
			cancel()
			if err != nil {
				stop(err) // such as a pool that is used up
			}
			silence.Reset(hearsWithin)
		case 2:
			silence.Stop()
		}
		notify()
	})
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return wrap("listen", err)
}

// hearsWithin is how long Listen waits for a notification of its own.
const hearsWithin = 10 * time.Second

var errDeaf = errors.New("LISTEN has succeeded, and a notification did not arrive:" +
	" it needs a connection of its own to the server, past any pooler such as PgBouncer")

// wrap adds the method to an error of the database. ErrFenced and ErrNotFound stay as
// they are.
func wrap(what string, err error) error {
	if err == nil || err == store.ErrFenced || err == store.ErrNotFound {
		return err
	}
	return fmt.Errorf("sqlstore: %s: %w", what, sqldb.Pooler(err))
}
