// Package sqlstore keeps the sagas of package saga in PostgreSQL, MySQL, MariaDB or SQLite,
// through database/sql and the driver of the program.
//
//	db, err := sql.Open("pgx", os.Getenv("DATABASE_URL"))
//	store := sqlstore.New(db, sqlstore.PostgreSQL, sqlstore.Config{})
//	err = store.Migrate(ctx) // at every start: it does nothing if the tables exist
//	runner := saga.NewRunner(store, saga.RunnerConfig{})
//
// A saga is a row of the table saga, its log is in saga_log, and its signals are in
// saga_signal. The table saga_schema has the version of all, and
// which programs can use it. Config.Prefix gives these
// tables other names. Migrate also creates saga_barrier, for saga.Apply.
// [Store.Schema] returns the statements for another migration tool. Sagas that have ended
// stay for as long as saga.RunnerConfig.Keep says. No call takes longer because many have
// ended.
//
// Each step is committed before the next one begins. Where many sagas run, their starts
// and commits share transactions: those that arrive while another is on its way to the
// database go together in the next transaction, up to 5 ms later than they could. Each
// commit has its own fence and its own outcome.
//
// # PostgreSQL
//
// Version 12 or later. The tables are found through the search_path. A start, a commit and a
// heartbeat are one statement and one round trip each. Where the default isolation is not
// READ COMMITTED, each is a transaction of three round trips. A commit that was to share a
// transaction, and whose row is locked or belongs to another owner, is repeated by itself.
// So are starts that wait for 1.5 seconds because another transaction starts one of the same
// sagas. A pool of 8 to 16 connections is enough for hundreds of concurrent sagas; add one
// for each concurrent DoTx.
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
// each, of some round trips; it is repeated after a deadlock. Ids are compared as bytes.
// Times have milliseconds. With go-sql-driver/mysql no parameter of the DSN is needed. The
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
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/internal/sqldb"
	"github.com/go-resilience/resilience/internal/sqltx"
	"github.com/go-resilience/resilience/resiliencesql"
)

// A Dialect is a kind of database.
type Dialect string

// The supported databases.
const (
	PostgreSQL Dialect = "PostgreSQL"
	MySQL      Dialect = "MySQL" // and MariaDB
	SQLite     Dialect = "SQLite"
)

// A Store is a [store.TxStore] in a database. It is safe for concurrent use, by many
// processes too.
type Store struct {
	db      *sql.DB
	d       dialect
	tables  tables
	listen  func(ctx context.Context, channel string, notify func()) error
	one     *writer // the only writer of SQLite; nil on others
	commits batcher[store.CommitRequest, store.Receipt]
	starts  batcher[store.StartRequest, started]

	prepared *prepared // the statements of MySQL; nil on others

	level atomic.Pointer[bool] // the result of dialect.isolated; nil before it was asked
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
	if db == nil {
		panic("sqlstore: New needs a *sql.DB, not nil")
	}
	if !sqldb.IsPrefix(cfg.Prefix) {
		panic(fmt.Sprintf("sqlstore: Config.Prefix is %q: must be up to 32 of a-z, 0-9 and _, not a digit first", cfg.Prefix))
	}
	if cfg.Listen != nil && (dialect == MySQL || dialect == SQLite) {
		panic("sqlstore: Config.Listen is for PostgreSQL")
	}
	t := tables(cfg.Prefix)
	switch dialect {
	case PostgreSQL:
		return newStore(db, newPostgres(t, cfg.Listen != nil), t, cfg.Listen, nil, 3)
	case MySQL:
		d := newMySQL(t)
		s := newStore(db, d, t, nil, nil, 3)
		s.prepared = newPrepared(db, d.hot())
		return s
	case SQLite:
		d := newSQLite(t)
		return newStore(db, d, t, nil, newWriter(db, d.hot()), 1)
	}
	panic(fmt.Sprintf("sqlstore: the dialect is %q: must be PostgreSQL, MySQL or SQLite", string(dialect)))
}

// newStore returns a Store whose batchers have so many lanes. SQLite has one writer. With
// more lanes the others write more and smaller batches, of which each costs a transaction.
func newStore(db *sql.DB, d dialect, t tables, listen func(context.Context, string, func()) error, one *writer, lanes int) *Store {
	s := &Store{db: db, d: d, tables: t, listen: listen, one: one}
	s.commits = batcher[store.CommitRequest, store.Receipt]{
		lanes: lanes, limit: maxHang,
		size: func(req store.CommitRequest) int { return len(req.Data) + len(req.Steps) },
		own: func(req store.CommitRequest) store.CommitRequest {
			req.Data, req.Steps, req.Log = slices.Clone(req.Data), slices.Clone(req.Steps), slices.Clone(req.Log)
			return req
		},
		alone: func(ctx context.Context, req store.CommitRequest) (rc store.Receipt, err error) {
			err = s.write(ctx, func(ctx context.Context, q querier) error {
				rc, err = d.commit(ctx, q, req)
				return err
			})
			return rc, err
		},
		send: func(ctx context.Context, batch []*pendingCommit) error {
			return s.write(ctx, func(ctx context.Context, q querier) error {
				forget(batch)
				return d.commitBatch(ctx, q, batch)
			})
		},
		settle: func(_ store.CommitRequest, rc store.Receipt, err, failed error) (store.Receipt, error) {
			if err == store.ErrFenced {
				err = failed // the batch itself may have moved the fence
			}
			return rc, err
		},
	}
	s.starts = batcher[store.StartRequest, started]{
		lanes: lanes, limit: maxHold,
		size: func(req store.StartRequest) int { return len(req.Data) + len(req.Steps) },
		own: func(req store.StartRequest) store.StartRequest {
			req.Data, req.Steps, req.Log = slices.Clone(req.Data), slices.Clone(req.Steps), slices.Clone(req.Log)
			return req
		},
		alone: func(ctx context.Context, req store.StartRequest) (st started, err error) {
			err = s.write(ctx, func(ctx context.Context, q querier) error {
				st, err = s.start(ctx, q, req)
				return err
			})
			return st, err
		},
		send: func(ctx context.Context, batch []*pendingStart) error {
			seen := make(map[string]bool, len(batch))
			batch = slices.DeleteFunc(slices.Clone(batch), func(p *pendingStart) bool {
				again := seen[p.req.ID]
				seen[p.req.ID] = true
				return again
			})
			return s.write(ctx, func(ctx context.Context, q querier) error {
				forget(batch)
				return d.startBatch(ctx, q, batch)
			})
		},
		settle: func(req store.StartRequest, st started, err, _ error) (started, error) {
			if err == nil && st.rec.Nonce == req.Nonce && st.rec.Owner == req.Owner && st.rec.Seq == int64(len(req.Log)) {
				st.created = true // by the batch
			}
			return st, err
		},
	}
	return s
}

// Start implements [store.Store].
func (s *Store) Start(ctx context.Context, req store.StartRequest) (rec store.Record, created bool, err error) {
	st, err := s.starts.write(ctx, req)
	return st.rec, st.created, wrap("start", err)
}

// StartTx implements [store.TxStore].
func (s *Store) StartTx(ctx context.Context, tx *sql.Tx, req store.StartRequest) (store.Record, bool, error) {
	st, err := s.start(ctx, tx, req)
	return st.rec, st.created, wrap("start", err)
}

func (s *Store) start(ctx context.Context, q querier, req store.StartRequest) (started, error) {
	for {
		p := &pendingStart{req: req}
		err := s.d.startBatch(ctx, q, []*pendingStart{p})
		if err == nil && !p.written {
			p.answer.rec, err = s.load(ctx, q, req.ID, s.d.readNewest())
		}
		if err != store.ErrNotFound { // deleted between the two statements
			return p.answer, err
		}
	}
}

// newRecord returns the record of a saga that was started at now.
func newRecord(req store.StartRequest, now time.Time) started {
	rec := store.Record{
		ID: req.ID, Saga: req.Saga, Version: req.Version, Status: req.Status,
		Data: slices.Clone(req.Data), Steps: slices.Clone(req.Steps), Parent: req.Parent, ParentStep: req.ParentStep, Seq: int64(len(req.Log)), Nonce: req.Nonce,
		WakeAt: now, CreatedAt: now, UpdatedAt: now, Now: now,
	}
	if req.Owner != "" {
		rec.Owner, rec.Epoch, rec.WakeAt = req.Owner, 1, now.Add(req.LeaseTTL)
	}
	if req.CompleteIn > 0 {
		rec.CompleteBy = now.Add(req.CompleteIn)
	}
	return started{rec, true}
}

// Commit implements [store.Store].
func (s *Store) Commit(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
	rc, err := s.commits.write(ctx, req)
	return rc, wrap("commit", err)
}

// Begin implements [store.TxStore].
func (s *Store) Begin(ctx context.Context) (*sql.Tx, error) {
	if s.one != nil {
		// Until tx has the lock. After that, other writers wait for it inside SQLite.
		leave, err := s.one.enter(ctx, false)
		if err != nil {
			return nil, wrap("begin", err)
		}
		defer leave()
	}
	_, isMySQL := s.d.(*mysql)
	tx, err := sqltx.Begin(ctx, s.db, isMySQL, s.d.txOptions())
	if err == nil {
		if err = s.d.lock(ctx, tx); err != nil {
			_ = tx.Rollback()
			return nil, wrap("begin", err)
		}
	}
	return tx, wrap("begin", err)
}

// Exclusive implements [store.TxStore]: SQLite has one writer.
func (s *Store) Exclusive() bool { return s.one != nil }

// CommitTx implements [store.TxStore].
func (s *Store) CommitTx(ctx context.Context, tx *sql.Tx, req store.CommitRequest) (store.Receipt, error) {
	rc, err := s.d.commit(ctx, tx, req)
	return rc, wrap("commit", err)
}

// Claim implements [store.Store].
func (s *Store) Claim(ctx context.Context, req store.ClaimRequest) (recs []store.Record, err error) {
	if req.Limit <= 0 || len(req.Definitions) == 0 {
		return nil, nil
	}
	queues, err := s.due(ctx, req)
	if err != nil || len(queues) == 0 {
		return nil, wrap("claim", err)
	}
	for len(queues) > 0 && len(recs) < req.Limit && err == nil {
		turn, rest, some := queues[:min(len(queues), atOnce)], req, []store.Record(nil)
		rest.Limit -= len(recs)
		err = s.write(ctx, func(ctx context.Context, q querier) error {
			some, err = s.d.claim(ctx, q, rest, turn)
			return err
		})
		if err == nil {
			recs, queues = append(recs, some...), queues[len(turn):]
		}
	}
	if len(recs) > 0 { // what an earlier statement has claimed counts
		return recs, nil
	}
	return nil, wrap("claim", err)
}

// Heartbeat implements [store.Store].
func (s *Store) Heartbeat(ctx context.Context, req store.HeartbeatRequest) (renewed []store.Renewed, err error) {
	if len(req.Held) == 0 {
		return nil, nil
	}
	beat := func(ctx context.Context, q querier) error {
		renewed, err = s.d.heartbeat(ctx, q, req)
		return err
	}
	if s.one != nil {
		err = s.one.write(ctx, true, beat)
	} else {
		err = s.write(ctx, beat)
	}
	return renewed, wrap("heartbeat", err)
}

// Cancel implements [store.Store].
func (s *Store) Cancel(ctx context.Context, id, note string) (rec store.Record, err error) {
	if !isText(id) {
		return rec, store.ErrNotFound
	}
	cancel := s.tables.sql("UPDATE {p}saga SET cancel_requested = true, cancel_note = " + s.d.bind(1) + ", updated_at = " + s.d.now() +
		", wake_at = CASE WHEN owner = '' THEN " + s.d.now() + " ELSE wake_at END WHERE id = " + s.d.bind(2) +
		" AND status = 'running' AND NOT cancel_requested")
	err = s.write(ctx, func(ctx context.Context, q querier) error {
		for {
			rec, err = s.d.changed(ctx, q, cancel, note, id)
			if errors.Is(err, sql.ErrNoRows) {
				rec, err = s.load(ctx, q, id, "")
			}
			if err != nil || rec.CancelRequested || rec.Status != store.Running {
				return err
			}
			// It has been started between the two statements: its cancellation is not recorded.
		}
	})
	return rec, wrap("cancel", err)
}

// Hasten implements [store.Store].
func (s *Store) Hasten(ctx context.Context, id string) error {
	due := s.tables.sql("UPDATE {p}saga SET wake_at = " + s.d.now() + " WHERE id = " + s.d.bind(1) +
		" AND owner = '' AND " + s.d.live() + " AND wake_at > " + s.d.now())
	return wrap("hasten", s.write(ctx, func(ctx context.Context, q querier) error {
		_, err := q.ExecContext(ctx, s.d.madeDue(due), id)
		return err
	}))
}

// Load implements [store.Store].
func (s *Store) Load(ctx context.Context, id string) (store.Record, error) {
	if !isText(id) {
		return store.Record{}, store.ErrNotFound
	}
	rec, err := s.load(ctx, s.db, id, "")
	return rec, wrap("load", err)
}

func (s *Store) load(ctx context.Context, q querier, id, lock string) (store.Record, error) {
	rec, err := scan(q.QueryRowContext(ctx, s.tables.sql("SELECT "+s.d.columns()+" FROM {p}saga WHERE id = "+s.d.bind(1)+lock), id))
	if errors.Is(err, sql.ErrNoRows) {
		return rec, store.ErrNotFound
	}
	return rec, err
}

// History implements [store.Store].
func (s *Store) History(ctx context.Context, id string, after int64, limit int) ([]store.Entry, error) {
	if !isText(id) {
		return nil, nil
	}
	text := "SELECT seq, step, op, event, attempt, epoch, error, at FROM {p}saga_log WHERE saga_id = " + s.d.bind(1) +
		" AND seq > " + s.d.bind(2) + " ORDER BY seq"
	args := []any{id, after}
	if limit > 0 {
		text += " LIMIT " + s.d.bind(3)
		args = append(args, limit)
	}
	rows, err := s.db.QueryContext(ctx, s.tables.sql(text), args...)
	log, err := collect(rows, err, func(rows *sql.Rows) (e store.Entry, err error) {
		var at moment
		err = rows.Scan(&e.Seq, &e.Step, &e.Op, &e.Kind, &e.Attempt, &e.Epoch, &e.Error, &at)
		e.At = at.Time
		return e, err
	})
	return log, wrap("history", err)
}

// The conditions of the partial indexes, and of a status.
const (
	// A list merges the sagas of each status: it would not show a saga that has another.
	isStatus = "status IN ('running', 'compensating', 'stuck', 'completed', 'compensated', 'abandoned')"

	isLive = "status IN ('running', 'compensating')"
	// The children of a saga that was not deleted are not among them: a sweep does not
	// read past what it must keep.
	isEnded     = "status IN ('completed', 'compensated', 'abandoned')"
	isDeletable = isEnded + " AND parent = ''"
	isChild     = "parent > ''"
)

// indexes serve Claim, DeleteEnded, Children, List and Counts. A saga changes them at its
// start, at its end, and each time that it is claimed, parked or renewed. A step changes no
// indexed column, so that PostgreSQL writes it without touching the indexes. The wake_at of
// an ended saga is when it ended: it was released then.
const indexes = `
CREATE INDEX {p}saga_live ON {p}saga (name, version, owned, wake_at) WHERE ` + isLive + `;
CREATE INDEX {p}saga_ended ON {p}saga (status, wake_at) WHERE ` + isDeletable + `;
CREATE INDEX {p}saga_child ON {p}saga (parent, parent_step, status) WHERE ` + isChild + `;
CREATE INDEX {p}saga_name ON {p}saga (name, status, created_at, id);
CREATE INDEX {p}saga_time ON {p}saga (status, created_at, id);`

// Listen implements [store.Notifier].
func (s *Store) Listen(ctx context.Context, notify func()) error {
	if s.listen == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	deaf := time.AfterFunc(math.MaxInt64, func() { stop(errDeaf) })
	defer deaf.Stop()
	calls := 0
	err := s.listen(ctx, s.tables.channel(), func() {
		switch calls++; calls {
		case 1:
			call, cancel := context.WithTimeout(ctx, hearsWithin)
			_, err := s.db.ExecContext(call, "SELECT pg_notify($1, '')", s.tables.channel())
			cancel()
			if err != nil {
				stop(err) // such as a pool that is used up
			}
			deaf.Reset(hearsWithin)
		case 2:
			deaf.Stop()
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

// DeleteEnded implements [store.Store]. Rows of the barrier stay (see saga.PruneBarrier).
func (s *Store) DeleteEnded(ctx context.Context, status store.Status, age time.Duration, limit int) (int, error) {
	if age < 0 || limit < 0 {
		// SQLite takes a negative limit for none.
		return 0, fmt.Errorf("sqlstore: delete: age is %v and limit %d: must not be negative", age, limit)
	}
	n := 0
	err := s.transact(ctx, func(ctx context.Context, q querier) error {
		if err := s.d.lock(ctx, q); err != nil {
			return err
		}
		var generations [][]string
		ids, err := s.d.ended(ctx, q, status, age, limit)
		for len(ids) > 0 && err == nil {
			generations = append(generations, ids)
			ids, err = s.endedChildren(ctx, q, ids, limit)
		}
		n = 0
		for i := len(generations) - 1; i >= 0 && n < limit && err == nil; i-- {
			err = s.remove(ctx, q, generations[i])
			n += len(generations[i])
		}
		return err
	})
	if err != nil {
		return 0, wrap("delete", err)
	}
	return n, nil
}

// endedChildren returns the ids of children that have ended, and locks them.
func (s *Store) endedChildren(ctx context.Context, q querier, parents []string, limit int) ([]string, error) {
	are, args := s.d.oneOf("parent", parents)
	rows, err := q.QueryContext(ctx, s.tables.sql("SELECT id FROM {p}saga WHERE "+isChild+" AND "+isEnded+" AND "+are+
		" LIMIT "+strconv.Itoa(limit)+s.d.forUpdate()), args...)
	return collect(rows, err, scanID)
}

// remove deletes sagas, and removes them from the children that they still have.
func (s *Store) remove(ctx context.Context, q querier, ids []string) error {
	for _, of := range []struct{ text, column string }{
		{"DELETE FROM {p}saga WHERE ", "id"},
		{"DELETE FROM {p}saga_log WHERE ", "saga_id"},
		{"DELETE FROM {p}saga_signal WHERE ", "saga_id"},
		{"UPDATE {p}saga SET parent = '', parent_step = '' WHERE " + isChild + " AND ", "parent"},
	} {
		are, args := s.d.oneOf(of.column, ids)
		if _, err := q.ExecContext(ctx, s.tables.sql(of.text+are), args...); err != nil {
			return err
		}
	}
	return nil
}

// Children implements [store.Store].
func (s *Store) Children(ctx context.Context, req store.ChildrenRequest) ([]store.ChildRecord, error) {
	var args []any
	bind := func(arg any) string {
		args = append(args, arg)
		return s.d.bind(len(args))
	}
	limit := ""
	if req.Limit > 0 {
		limit = " LIMIT " + strconv.Itoa(req.Limit)
	}
	find := func(status string) string {
		return "SELECT id, status, cancel_requested FROM {p}saga WHERE " + status + isChild +
			" AND parent = " + bind(req.Parent) + " AND parent_step = " + bind(req.Step) + limit
	}
	text := ""
	if len(req.Status) == 0 {
		text = find("")
	} else {
		// A plan of PostgreSQL for "status IN" may read all children.
		var list []string
		for i, status := range req.Status {
			list = append(list, "SELECT * FROM ("+find("status = "+bind(string(status))+" AND ")+") AS s"+strconv.Itoa(i))
		}
		text = strings.Join(list, " UNION ALL ") + limit
	}
	rows, err := s.db.QueryContext(ctx, s.tables.sql(text), args...)
	list, err := collect(rows, err, func(rows *sql.Rows) (c store.ChildRecord, err error) {
		return c, rows.Scan(&c.ID, &c.Status, &c.CancelRequested)
	})
	return list, wrap("children", err)
}

// write makes fn one transaction. Where a single statement has the isolation that it
// needs, fn runs outside of a transaction.
func (s *Store) write(ctx context.Context, fn func(context.Context, querier) error) error {
	if s.one != nil {
		return s.one.write(ctx, false, fn)
	}
	alone, err := s.isolated(ctx)
	if err != nil {
		return err
	}
	if alone {
		return sqldb.Write(ctx, s.db, fn)
	}
	return s.repeat(ctx, fn)
}

// transact makes fn one transaction, even where a single statement needs none.
func (s *Store) transact(ctx context.Context, fn func(context.Context, querier) error) error {
	if s.one != nil {
		return s.one.write(ctx, false, fn)
	}
	return s.repeat(ctx, fn)
}

// repeat makes fn one transaction, and repeats it where the database preferred another one.
func (s *Store) repeat(ctx context.Context, fn func(context.Context, querier) error) error {
	var stmts map[string]*sql.Stmt
	if s.prepared != nil {
		var err error
		// Before the transaction has a connection, since this needs one too.
		if stmts, err = s.prepared.all(ctx); err != nil {
			return err
		}
	}
	for tries := 0; ; tries++ {
		err := resiliencesql.InTx(ctx, s.db, resiliencesql.Config{Options: s.d.txOptions()}, func(ctx context.Context, tx *sql.Tx) error {
			if stmts != nil {
				return fn(ctx, preparedTx{tx, stmts})
			}
			return fn(ctx, tx)
		})
		if end := behavior.Read(err); tries == maxRepeats || end.Kind != behavior.Answered || !end.Retryable {
			return err
		}
	}
}

// maxRepeats is how often a transaction is repeated.
const maxRepeats = 10

// isolated caches the result of dialect.isolated. Where it is false, a write takes two
// more round trips.
func (s *Store) isolated(ctx context.Context) (bool, error) {
	if known := s.level.Load(); known != nil {
		return *known, nil
	}
	is, err := s.d.isolated(ctx, s.db)
	if err == nil {
		s.level.Store(&is)
	}
	return is, err
}

// wrap adds the method to an error of the database. ErrFenced and ErrNotFound stay as
// they are.
func wrap(what string, err error) error {
	if err == nil || err == store.ErrFenced || err == store.ErrNotFound {
		return err
	}
	var state interface{ SQLState() string }
	if errors.As(err, &state) && (state.SQLState() == noStatement || state.SQLState() == sameStatement) {
		return fmt.Errorf("sqlstore: %s: a pooler such as PgBouncer has lent the connection to another client:"+
			" set what keeps the driver from preparing statements, with pgx default_query_exec_mode=exec: %w", what, err)
	}
	return fmt.Errorf("sqlstore: %s: %w", what, err)
}

// What PostgreSQL says of prepared statements that another session has or had.
const (
	noStatement   = "26000" // invalid_sql_statement_name
	sameStatement = "42P05" // duplicate_prepared_statement
)
