// Package sqlstore keeps the sagas of package saga in PostgreSQL or SQLite, through
// database/sql and the driver of the program.
//
//	db, err := sql.Open("pgx", os.Getenv("DATABASE_URL"))
//	store, err := sqlstore.New(db, sqlstore.PostgreSQL)
//	err = store.Migrate(ctx) // at every start: it does nothing if the tables exist
//	runner := saga.NewRunner(store, saga.RunnerConfig{})
//
// A saga is a row of the table saga, and its log is in saga_log. The table saga_schema
// has the version of both. Config.Prefix gives the tables other names, and
// [Store.Schema] returns the statements for another migration tool. Sagas that have
// ended stay until [Store.DeleteEnded] removes them. No call takes longer because many
// have ended.
//
// Each step is committed before the next one begins. Where many sagas run, their commits
// share transactions: the commits that arrive while a few others are on their way to the
// database go together in the next transaction. No commit waits for others to arrive,
// and each has its own fence and its own outcome.
//
// # PostgreSQL
//
// Version 12 or later. The tables are found through the search_path. A write is one
// statement and one round trip. Where the default isolation is not READ COMMITTED, it is
// a transaction of three round trips. A commit that was to share a transaction, and whose
// row is locked or belongs to another owner, is repeated by itself. A pool of 8 to 16
// connections is enough for hundreds of concurrent sagas; add one for each concurrent
// DoTx.
//
// Consider a process that is stopped, or cut off from the server, in the middle of a
// DoTx. Its row stays locked for as long as the server keeps the connection, and no other
// runner can take the saga over. Set idle_in_transaction_session_timeout and
// tcp_keepalives_idle on the server to a few leases. Other sagas do not wait for the row.
//
// A runner finds a saga that another process has started after RunnerConfig.Poll, or
// within milliseconds with Config.Listen.
//
// # SQLite
//
// Version 3.35 or later, and a database on a local disk. The processes of one machine may
// share it. SQLite has one writer at a time. The store's own writes queue in the process.
// The write transactions of others wait inside SQLite, which needs a busy_timeout. With
// modernc.org/sqlite:
//
//	file:trips.db?_pragma=busy_timeout(4000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate
//
// Migrate refuses a synchronous setting below FULL. With less, a loss of power could take
// back the record that a saga has begun to undo, and the saga would go forward again. Some
// drivers have NORMAL as their default in WAL mode. If other parts of the program write
// much to the same database, db.SetMaxOpenConns(1) makes all of them queue fairly; a DoTx
// must then use its tx and no other connection.
//
// A DoTx excludes all other writers while it runs, including the heartbeats of every
// process. A runner therefore ends it after half of RunnerConfig.Lease, whatever its
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
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/saga"
)

// A Dialect is a kind of database.
type Dialect string

// The supported databases.
const (
	PostgreSQL Dialect = "PostgreSQL"
	SQLite     Dialect = "SQLite"
)

// A Store is a [saga.TxStore] in a database. It is safe for concurrent use, by many
// processes too.
type Store struct {
	db      *sql.DB
	d       dialect
	tables  tables
	listen  func(ctx context.Context, channel string, notify func()) error
	one     *writer // the only writer of SQLite; nil on PostgreSQL
	commits batcher

	level atomic.Pointer[bool] // the result of dialect.isolated; nil before it was asked
}

var _ saga.TxStore = (*Store)(nil)

// A Config configures a [Store]. The zero Config is usable.
type Config struct {
	// Prefix begins the names of the tables and indexes, for a database in which these
	// names are taken. It has up to 32 of a-z, 0-9 and _, and does not begin with a
	// digit.
	Prefix string

	// Listen executes LISTEN for the channel on a connection of its own. It calls notify
	// once when it has done so, and for each notification, until ctx ends or the
	// connection fails. With Listen, a runner finds a saga that was started elsewhere
	// within milliseconds instead of after RunnerConfig.Poll. It is for PostgreSQL only.
	// With pgx:
	//
	//	func(ctx context.Context, channel string, notify func()) error {
	//		conn, err := pgx.Connect(ctx, dsn)
	//		if err != nil {
	//			return err
	//		}
	//		defer conn.Close(context.Background())
	//		if _, err := conn.Exec(ctx, "LISTEN "+channel); err != nil {
	//			return err
	//		}
	//		for notify(); ; notify() {
	//			if _, err := conn.WaitForNotification(ctx); err != nil {
	//				return err
	//			}
	//		}
	//	}
	//
	// A store with Listen also sends notifications, so every process that starts sagas
	// needs it. PostgreSQL commits transactions with notifications one after the other.
	// These are that of each StartTx, and of each Start whose runner has no free place.
	Listen func(ctx context.Context, channel string, notify func()) error
}

// New is Config{}.New.
func New(db *sql.DB, dialect Dialect) (*Store, error) { return Config{}.New(db, dialect) }

// New returns a Store in db. It does not use db yet, and the Store never closes it. New
// returns an error if db is nil, the dialect is unknown, or the Config is invalid for
// the dialect.
func (c Config) New(db *sql.DB, dialect Dialect) (*Store, error) {
	if db == nil {
		return nil, errors.New("sqlstore: New needs a *sql.DB, not nil")
	}
	if !isPrefix(c.Prefix) {
		return nil, fmt.Errorf("sqlstore: Config.Prefix is %q: must be up to 32 of a-z, 0-9 and _, not a digit first", c.Prefix)
	}
	t := tables(c.Prefix)
	switch dialect {
	case PostgreSQL:
		return newStore(db, newPostgres(t, c.Listen != nil), t, c.Listen, nil, 8), nil
	case SQLite:
		if c.Listen != nil {
			return nil, errors.New("sqlstore: Config.Listen is for PostgreSQL")
		}
		d := newSQLite(t)
		return newStore(db, d, t, nil, newWriter(db, d.hot()), 1), nil
	}
	return nil, fmt.Errorf("sqlstore: the dialect is %q: must be PostgreSQL or SQLite", string(dialect))
}

// newStore returns a Store whose batcher has so many lanes. SQLite has one writer.
// PostgreSQL itself groups commits that wait for the disk. Fewer than 8 lanes keep it from
// that where the disk is slow, and more cost it work for each commit where it is fast.
func newStore(db *sql.DB, d dialect, t tables, listen func(context.Context, string, func()) error, one *writer, lanes int) *Store {
	s := &Store{db: db, d: d, tables: t, listen: listen, one: one}
	s.commits = batcher{
		lanes: lanes,
		alone: func(ctx context.Context, req saga.CommitRequest) (rc saga.Receipt, err error) {
			err = s.write(ctx, func(ctx context.Context, q querier) error {
				rc, err = d.commit(ctx, q, req)
				return err
			})
			return rc, err
		},
		send: func(ctx context.Context, batch []*pending) error {
			return s.write(ctx, func(ctx context.Context, q querier) error { return d.commitBatch(ctx, q, batch) })
		},
	}
	return s
}

// A dialect has the statements of one kind of database. The callers of methods that take
// a querier make their statements one transaction.
type dialect interface {
	schema() string
	check(ctx context.Context, q querier) error // the connection's settings
	hasTable(ctx context.Context, q querier, name string) (bool, error)
	lockSchema(ctx context.Context, q querier) error
	// isolated reports whether a statement outside of a transaction sees the newest
	// version of each row that it changes.
	isolated(ctx context.Context, q querier) (bool, error)
	txOptions() *sql.TxOptions
	lock(ctx context.Context, q querier) error

	start(ctx context.Context, q querier, req saga.StartRequest) (now time.Time, created bool, err error)
	commit(ctx context.Context, q querier, req saga.CommitRequest) (saga.Receipt, error)
	// commitBatch writes the commits that pass the fence and whose rows are not locked,
	// and marks them as written. An error leaves open whether any of them was.
	commitBatch(ctx context.Context, q querier, batch []*pending) error
	claim(ctx context.Context, q querier, req saga.ClaimRequest) ([]saga.Record, error)
	heartbeat(ctx context.Context, q querier, req saga.HeartbeatRequest) (*sql.Rows, error)
	cancel(ctx context.Context, q querier, id, note string) *sql.Row
	deleteEnded(ctx context.Context, q querier, age time.Duration, limit int) (int64, error)

	now() string
	columns() string // of a record, in the order of scan
	bind(i int) string
}

// A querier is a *sql.DB or a *sql.Tx.
type querier interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// Start implements [saga.Store].
func (s *Store) Start(ctx context.Context, req saga.StartRequest) (rec saga.Record, created bool, err error) {
	err = s.write(ctx, func(ctx context.Context, q querier) error {
		rec, created, err = s.start(ctx, q, req)
		return err
	})
	return rec, created, wrap("start", err)
}

// StartTx implements [saga.TxStore].
func (s *Store) StartTx(ctx context.Context, tx *sql.Tx, req saga.StartRequest) (saga.Record, bool, error) {
	rec, created, err := s.start(ctx, tx, req)
	return rec, created, wrap("start", err)
}

func (s *Store) start(ctx context.Context, q querier, req saga.StartRequest) (saga.Record, bool, error) {
	now, created, err := s.d.start(ctx, q, req)
	if err != nil {
		return saga.Record{}, false, err
	}
	if !created {
		rec, err := s.load(ctx, q, req.ID)
		return rec, false, err
	}
	rec := saga.Record{
		ID: req.ID, Saga: req.Saga, Version: req.Version, Status: req.Status,
		Data: slices.Clone(req.Data), Steps: slices.Clone(req.Steps), Seq: int64(len(req.Log)), Nonce: req.Nonce,
		WakeAt: now, CreatedAt: now, UpdatedAt: now, Now: now,
	}
	if req.Owner != "" {
		rec.Owner, rec.Epoch, rec.WakeAt = req.Owner, 1, now.Add(req.Lease)
	}
	if req.CompleteIn > 0 {
		rec.CompleteBy = now.Add(req.CompleteIn)
	}
	return rec, true, nil
}

// Commit implements [saga.Store].
func (s *Store) Commit(ctx context.Context, req saga.CommitRequest) (saga.Receipt, error) {
	rc, err := s.commits.commit(ctx, req)
	return rc, wrap("commit", err)
}

// Begin implements [saga.TxStore].
func (s *Store) Begin(ctx context.Context) (*sql.Tx, error) {
	if s.one != nil {
		// Until tx has the lock. After that, other writers wait for it inside SQLite.
		leave, err := s.one.enter(ctx, false)
		if err != nil {
			return nil, wrap("begin", err)
		}
		defer leave()
	}
	tx, err := s.db.BeginTx(ctx, s.d.txOptions())
	if err == nil {
		if err = s.d.lock(ctx, tx); err != nil {
			_ = tx.Rollback()
			return nil, wrap("begin", err)
		}
	}
	return tx, wrap("begin", err)
}

// Exclusive implements [saga.TxStore]: SQLite has one writer.
func (s *Store) Exclusive() bool { return s.one != nil }

// CommitTx implements [saga.TxStore].
func (s *Store) CommitTx(ctx context.Context, tx *sql.Tx, req saga.CommitRequest) (saga.Receipt, error) {
	rc, err := s.d.commit(ctx, tx, req)
	return rc, wrap("commit", err)
}

// Claim implements [saga.Store].
func (s *Store) Claim(ctx context.Context, req saga.ClaimRequest) (recs []saga.Record, err error) {
	if req.Limit <= 0 || len(req.Definitions) == 0 {
		return nil, nil
	}
	err = s.write(ctx, func(ctx context.Context, q querier) error {
		recs, err = s.d.claim(ctx, q, req)
		return err
	})
	return recs, wrap("claim", err)
}

// Heartbeat implements [saga.Store].
func (s *Store) Heartbeat(ctx context.Context, req saga.HeartbeatRequest) (renewed []saga.Renewed, err error) {
	if len(req.Held) == 0 {
		return nil, nil
	}
	beat := func(ctx context.Context, q querier) error {
		rows, err := s.d.heartbeat(ctx, q, req)
		renewed, err = collect(rows, err, func(rows *sql.Rows) (n saga.Renewed, err error) {
			return n, rows.Scan(&n.ID, &n.Epoch, &n.Locked, &n.CancelRequested, &n.CancelNote)
		})
		return err
	}
	if s.one != nil {
		err = s.one.write(ctx, true, beat)
	} else {
		err = s.write(ctx, beat)
	}
	return renewed, wrap("heartbeat", err)
}

// Cancel implements [saga.Store].
func (s *Store) Cancel(ctx context.Context, id, note string) (rec saga.Record, err error) {
	err = s.write(ctx, func(ctx context.Context, q querier) error {
		rec, err = scan(s.d.cancel(ctx, q, id, note))
		if errors.Is(err, sql.ErrNoRows) {
			rec, err = s.load(ctx, q, id)
		}
		return err
	})
	return rec, wrap("cancel", err)
}

// Load implements [saga.Store].
func (s *Store) Load(ctx context.Context, id string) (saga.Record, error) {
	rec, err := s.load(ctx, s.db, id)
	return rec, wrap("load", err)
}

func (s *Store) load(ctx context.Context, q querier, id string) (saga.Record, error) {
	rec, err := scan(q.QueryRowContext(ctx, s.tables.sql("SELECT "+s.d.columns()+" FROM {p}saga WHERE id = "+s.d.bind(1)), id))
	if errors.Is(err, sql.ErrNoRows) {
		return rec, saga.ErrNotFound
	}
	return rec, err
}

// List implements [saga.Store]. With Status and without Saga it reads one definition after
// the other, each at a time of its own: the index has the order for each definition and
// status.
func (s *Store) List(ctx context.Context, f saga.Filter) ([]saga.Record, error) {
	if f.Limit <= 0 {
		f.Limit = 100
	}
	if f.Saga != "" || len(f.Status) == 0 {
		recs, err := s.list(ctx, f)
		return recs, wrap("list", err)
	}
	names, err := s.names(ctx)
	var all []saga.Record
	for _, f.Saga = range names {
		var recs []saga.Record
		if recs, err = s.list(ctx, f); err != nil {
			break
		}
		all = append(all, recs...)
	}
	if err != nil {
		return nil, wrap("list", err)
	}
	slices.SortFunc(all, func(a, b saga.Record) int { return strings.Compare(a.ID, b.ID) })
	return all[:min(f.Limit, len(all))], nil
}

// names returns the names of all definitions that have sagas.
func (s *Store) names(ctx context.Context) (names []string, err error) {
	next := s.tables.sql("SELECT min(name) FROM {p}saga WHERE name > " + s.d.bind(1))
	for last := ""; ; {
		var name sql.NullString
		if err := s.db.QueryRowContext(ctx, next, last).Scan(&name); err != nil || !name.Valid {
			return names, err
		}
		last = name.String
		names = append(names, last)
	}
}

func (s *Store) list(ctx context.Context, f saga.Filter) ([]saga.Record, error) {
	query, args := s.listing(f)
	rows, err := s.db.QueryContext(ctx, query, args...)
	return collect(rows, err, func(rows *sql.Rows) (saga.Record, error) { return scan(rows) })
}

// listing returns a query that merges the first sagas of each status, for which the index
// has the order. It reads no saga that the filter does not admit.
func (s *Store) listing(f saga.Filter) (query string, args []any) {
	bind := func(v any) string {
		args = append(args, v)
		return s.d.bind(len(args))
	}
	status := f.Status
	if len(status) == 0 && f.Saga != "" {
		status = []saga.Status{saga.Running, saga.Compensating, saga.Stuck, saga.Completed, saga.Compensated, saga.Abandoned}
	}
	one := func(status ...saga.Status) string {
		var b strings.Builder
		fmt.Fprintf(&b, "SELECT %s FROM {p}saga WHERE id > %s", s.d.columns(), bind(f.After))
		if f.Saga != "" {
			fmt.Fprintf(&b, " AND name = %s", bind(f.Saga))
		}
		for _, st := range status {
			fmt.Fprintf(&b, " AND status = %s", bind(string(st)))
		}
		if f.Unreported {
			b.WriteString(" AND NOT reported")
		}
		fmt.Fprintf(&b, " ORDER BY id LIMIT %s", bind(f.Limit))
		return b.String()
	}
	if len(status) <= 1 {
		return s.tables.sql(one(status...)), args
	}
	var arms []string
	for i, st := range status {
		if !slices.Contains(status[:i], st) {
			arms = append(arms, fmt.Sprintf("SELECT * FROM (%s) AS s%d", one(st), i))
		}
	}
	return s.tables.sql(strings.Join(arms, " UNION ALL ") + " ORDER BY id LIMIT " + bind(f.Limit)), args
}

// The conditions of the partial indexes.
const (
	isLive  = "status IN ('running', 'compensating')"
	isEnded = "status IN ('completed', 'compensated', 'abandoned')"
)

// indexes serve Claim, DeleteEnded and List. One more, for lists by status alone, would
// cost each saga two more entries. A step changes no indexed column, so that PostgreSQL
// writes it without touching the indexes. The wake_at of an ended saga is when it ended:
// it was released then.
const indexes = `
CREATE INDEX {p}saga_live ON {p}saga (name, version, owner, wake_at) WHERE ` + isLive + `;
CREATE INDEX {p}saga_ended ON {p}saga (wake_at) WHERE ` + isEnded + `;
CREATE INDEX {p}saga_name ON {p}saga (name, status, id);`

// History implements [saga.Store].
func (s *Store) History(ctx context.Context, id string) ([]saga.Entry, error) {
	rows, err := s.db.QueryContext(ctx, s.tables.sql("SELECT seq, step, op, event, attempt, epoch, error, at FROM {p}saga_log"+
		" WHERE saga_id = "+s.d.bind(1)+" ORDER BY seq"), id)
	log, err := collect(rows, err, func(rows *sql.Rows) (e saga.Entry, err error) {
		var at moment
		err = rows.Scan(&e.Seq, &e.Step, &e.Op, &e.Kind, &e.Attempt, &e.Epoch, &e.Error, &at)
		e.At = at.Time
		return e, err
	})
	return log, wrap("history", err)
}

// Unregistered implements [saga.Store]. It steps through the definitions that have live
// sagas, and reads the sagas of those that are not registered.
func (s *Store) Unregistered(ctx context.Context, registered []saga.Definition) ([]saga.Unregistered, error) {
	found, err := s.unregistered(ctx, registered)
	return found, wrap("unregistered", err)
}

func (s *Store) unregistered(ctx context.Context, registered []saga.Definition) ([]saga.Unregistered, error) {
	next := s.tables.sql("SELECT name, version FROM {p}saga WHERE " + isLive +
		" AND (name, version) > (" + s.d.bind(1) + ", " + s.d.bind(2) + ") ORDER BY name, version LIMIT 1")
	count := s.tables.sql("SELECT count(*), min(wake_at), " + s.d.now() + " FROM {p}saga WHERE " + isLive +
		" AND name = " + s.d.bind(1) + " AND version = " + s.d.bind(2) + " AND wake_at <= " + s.d.now())
	var found []saga.Unregistered
	for d := (saga.Definition{Version: -1}); ; {
		err := s.db.QueryRowContext(ctx, next, d.Saga, d.Version).Scan(&d.Saga, &d.Version)
		if errors.Is(err, sql.ErrNoRows) {
			return found, nil
		}
		if err != nil {
			return nil, err
		}
		if slices.Contains(registered, d) {
			continue
		}
		var oldest, now moment
		u := saga.Unregistered{Definition: d}
		if err := s.db.QueryRowContext(ctx, count, d.Saga, d.Version).Scan(&u.Count, &oldest, &now); err != nil {
			return nil, err
		}
		if u.Oldest, u.Now = oldest.Time, now.Time; u.Count > 0 {
			found = append(found, u)
		}
	}
}

// Reported implements [saga.Store].
func (s *Store) Reported(ctx context.Context, id string, seq int64) error {
	text := s.tables.sql("UPDATE {p}saga SET reported = true WHERE id = " + s.d.bind(1) + " AND seq = " + s.d.bind(2) + " AND status = 'stuck'")
	return wrap("reported", s.write(ctx, func(ctx context.Context, q querier) error {
		_, err := q.ExecContext(ctx, text, id, seq)
		return err
	}))
}

// Listen implements [saga.Notifier].
func (s *Store) Listen(ctx context.Context, notify func()) error {
	if s.listen == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	return wrap("listen", s.listen(ctx, s.tables.channel(), notify))
}

// DeleteEnded deletes up to limit sagas that ended at least age ago, with their logs, and
// returns how many. Their ids are then free: a Start with one of them runs the saga
// again. Rows of the barrier stay (see [saga.PruneBarrier]). DeleteEnded returns an error
// if age or limit is negative.
func (s *Store) DeleteEnded(ctx context.Context, age time.Duration, limit int) (n int64, err error) {
	if age < 0 || limit < 0 {
		// SQLite takes a negative limit for none.
		return 0, fmt.Errorf("sqlstore: delete: age is %v and limit %d: must not be negative", age, limit)
	}
	err = s.write(ctx, func(ctx context.Context, q querier) error {
		n, err = s.d.deleteEnded(ctx, q, age, limit)
		return err
	})
	return n, wrap("delete", err)
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
		return fn(ctx, s.db)
	}
	tx, err := s.db.BeginTx(ctx, s.d.txOptions())
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := fn(ctx, tx); err != nil {
		return err
	}
	return tx.Commit()
}

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
	if err == nil || err == saga.ErrFenced || err == saga.ErrNotFound {
		return err
	}
	return fmt.Errorf("sqlstore: %s: %w", what, err)
}
