// Package sqllease keeps the leases of package lease in the user's own database,
// PostgreSQL, MySQL, MariaDB or SQLite, through database/sql and whatever driver the
// program has.
//
//	db, err := sql.Open("pgx", os.Getenv("DATABASE_URL"))
//	...
//	store := sqllease.New(db, sqllease.PostgreSQL, sqllease.Config{})
//	err = store.Migrate(ctx) // at every start: it does nothing if the tables exist
//	...
//	err = lease.Run(ctx, store, lease.Config{Name: "billing"}, lead)
//
// All times are of the database's clock. Each statement is a transaction of its own: no
// session state, no advisory lock, no connection that is kept, so that a pooler such as
// PgBouncer may stand in between, except for [Config.Listen]. The driver must then prepare
// no statements: with pgx, add default_query_exec_mode=exec to the DSN.
//
// A waiting candidate reads one row every Poll of [lease.Config]. A leader writes one row
// every third of the TTL. The candidates get the lease in the order in which they have come;
// one that has waited for a day may go to the end.
//
// # Fence
//
// [lease.Term.Fence] locks a row in the user's transaction. A new term has to change that
// row, and so cannot begin until the transaction has ended. Renewals go on meanwhile, and
// so do other fenced transactions (not on SQLite, which has one writer).
//
// A process that is stopped or cut off in the middle of a fenced transaction keeps others
// from leading for as long as the server keeps its connection. Bound it on the server:
// idle_in_transaction_session_timeout and tcp_keepalives_idle on PostgreSQL,
// idle_transaction_timeout (MariaDB) or wait_timeout on MySQL, at a few TTLs.
//
// # PostgreSQL
//
// Version 12 or later. A lease that is given up is announced with NOTIFY. With
// [Config.Listen] a waiting candidate then leads within milliseconds, without it within
// its Poll. The fence of a transaction that is not READ COMMITTED may fail with a
// serialization failure instead of [lease.ErrLost].
//
// # MySQL and MariaDB
//
// MySQL 8.0 or MariaDB 10.6, or later. A waiting candidate finds a lease that was given
// up within its Poll.
//
// # SQLite
//
// Version 3.24 or later, a database on a local disk, and a busy_timeout on every
// connection. A fenced transaction, as every transaction that writes, keeps the renewals
// of all leases in the file waiting: it must be much shorter than the TTL.
//
// # Failover of the database
//
// A database that loses commits when it fails over, such as one with asynchronous
// replication, may lose the beginning of a term. The next epoch is still higher, as it
// includes the time, and fenced transactions are lost with the term.
package sqllease

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/go-resilience/resilience/internal/sqltx"
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
	// Prefix begins the names of the tables, for a database that has others of these
	// names: up to 32 of a-z, 0-9 and _, not a digit first.
	Prefix string

	// Listen lets a waiting candidate hear of a lease that is given up. It is for
	// PostgreSQL only. It executes LISTEN for the channel on a connection of its own, and
	// calls notify once then and for each notification, until ctx ends or the connection
	// fails. With pgx it is resiliencepgx.Listen(pool).
	//
	// Each waiting call of Run or Campaign has one such connection.
	Listen func(ctx context.Context, channel string, notify func()) error
}

// New returns a Store in db. It does not use db yet, and the Store never closes it. Call
// [Store.Migrate] before its first use. New panics if db is nil, the dialect is unknown,
// or the Config is invalid for the dialect.
func New(db *sql.DB, dialect Dialect, cfg Config) *Store {
	text, ok := dialects[dialect]
	switch {
	case db == nil:
		panic("sqllease: the *sql.DB is nil: must be set")
	case !ok:
		panic(fmt.Sprintf("sqllease: the dialect is %q: must be PostgreSQL, MySQL or SQLite", string(dialect)))
	case !isPrefix(cfg.Prefix):
		panic(fmt.Sprintf("sqllease: Config.Prefix is %.40q: must be up to 32 of a-z, 0-9 and _, not a digit first", cfg.Prefix))
	case cfg.Listen != nil && dialect != PostgreSQL:
		panic("sqllease: Config.Listen is set: must be nil, except for PostgreSQL")
	}
	return &Store{db: db, dialect: dialect, text: text.with(cfg.Prefix), prefix: cfg.Prefix, listen: cfg.Listen}
}

func isPrefix(s string) bool {
	for i, c := range []byte(s) {
		if (c < 'a' || c > 'z') && c != '_' && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return len(s) <= 32
}

// A Store is a [lease.Store], [lease.Fencer] and [lease.Notifier] in a database. It is
// safe for concurrent use, also by many processes on one database.
type Store struct {
	db      *sql.DB
	dialect Dialect
	text    *statements // with the names of the tables, and the placeholders of the database
	prefix  string
	listen  func(ctx context.Context, channel string, notify func()) error
}

var (
	_ lease.Fencer   = (*Store)(nil)
	_ lease.Notifier = (*Store)(nil)
)

// Schema returns the statements that create the tables, each with a semicolon at its end.
// It is for programs with a migration tool of their own; Migrate then finds the tables and
// does nothing.
func (s *Store) Schema() string { return s.text.schema }

// Migrate creates the tables unless they exist, on PostgreSQL in the first schema of the
// search_path. If they exist, it needs no right to create tables. Several processes may
// call it at the same time. It returns an error if a table of one of these names belongs
// to another program. On SQLite it also returns an error if the busy_timeout is zero.
// With modernc.org/sqlite:
//
//	file:leases.db?_pragma=busy_timeout(1000)&_pragma=journal_mode(WAL)&_txlock=immediate
func (s *Store) Migrate(ctx context.Context) error {
	err := s.migrate(ctx)
	if err == nil && s.dialect == SQLite {
		err = s.checkTimeout(ctx)
	}
	return wrap("migrate", err)
}

// migrate creates the tables if they are missing. Several processes may do so at the same
// time, of which PostgreSQL lets some fail.
func (s *Store) migrate(ctx context.Context) error {
	var created error
	for range 3 {
		found := s.find(ctx)
		if found == nil || ctx.Err() != nil {
			return found
		}
		if created != nil {
			created = fmt.Errorf("%w; %w", found, created)
		} else {
			created = found
		}
		for statement := range strings.SplitSeq(s.text.schema, ";") {
			if strings.TrimSpace(statement) == "" {
				continue
			}
			if _, err := s.db.ExecContext(ctx, statement); err != nil {
				created = fmt.Errorf("create the tables: %w", err)
			}
		}
	}
	if found := s.find(ctx); found != nil {
		return fmt.Errorf("the tables cannot be created, or are another program's (use Config.Prefix): %w", errors.Join(found, created))
	}
	return nil
}

// checkTimeout returns an error if SQLite does not wait for the writer of another process.
func (s *Store) checkTimeout(ctx context.Context) error {
	var busy int
	if err := s.db.QueryRowContext(ctx, "PRAGMA busy_timeout").Scan(&busy); err != nil {
		return err
	}
	if busy <= 0 {
		return errors.New("PRAGMA busy_timeout is 0: must be some seconds on every connection, so that a writer waits for another process's")
	}
	return nil
}

// find returns nil if the tables are there.
func (s *Store) find(ctx context.Context) error {
	for query := range strings.SplitSeq(s.text.find, ";") {
		rows, err := s.db.QueryContext(ctx, query)
		if err != nil {
			return err
		}
		if err := rows.Close(); err != nil {
			return err
		}
	}
	return nil
}

// Acquire implements [lease.Store].
func (s *Store) Acquire(ctx context.Context, req lease.Request) (lease.Record, error) {
	rec, err := s.acquire(ctx, req)
	return rec, wrap("acquire", err)
}

func (s *Store) acquire(ctx context.Context, req lease.Request) (lease.Record, error) {
	rec, line, err := s.look(ctx, req.Name, req.Token)
	if errors.Is(err, sql.ErrNoRows) {
		if err := s.create(ctx, req.Name); err != nil {
			return rec, err
		}
		rec, line, err = s.look(ctx, req.Name, req.Token)
	}
	if err != nil {
		return rec, err
	}
	mine := line.first == "" || line.first == req.Token
	switch waited := rec.Now.Sub(rec.Until); {
	case rec.Held() && rec.Token == req.Token:
		if err := s.Renew(ctx, req.Name, req.Token, req.TTL); err != nil {
			return rec, err
		}
		rec.Until = rec.Now.Add(req.TTL)
		return rec, nil
	case rec.Held(), !mine && waited < req.Grace:
		if !line.joined && !req.Once {
			mine = line.first == ""
			err = s.join(ctx, rec, req)
		}
		rec.Ahead = !mine
		return rec, err
	}
	before := int64(-1)
	if !mine { // the candidates ahead did not come within Grace
		before = rec.Until.UnixMicro()
	}
	return s.take(ctx, rec, req, before)
}

// placeLasts is how long a place in the line lasts at least. A candidate that has died
// does not leave. One that still waits joins again, at the end.
const placeLasts = 24 * time.Hour

// join puts a token at the end of the line, after the places that are too old have left.
func (s *Store) join(ctx context.Context, rec lease.Record, req lease.Request) error {
	old := rec.Now.Add(-placeLasts).UnixMicro()
	if _, err := s.exec(ctx, s.text.leave, req.Name, req.Token, old); err != nil {
		return err
	}
	_, err := s.exec(ctx, s.text.join, req.Name, req.Token)
	return err
}

// take begins a term, unless another has begun since rec was read, or a fenced transaction
// is open. Candidates that have joined the line until before leave it.
func (s *Store) take(ctx context.Context, rec lease.Record, req lease.Request, before int64) (lease.Record, error) {
	ttl := req.TTL.Microseconds()
	if s.text.take != "" {
		var taken lease.Record
		err := sqltx.Write(ctx, s.db, func(ctx context.Context, q sqltx.Querier) (err error) {
			taken, _, err = scan(req.Name, q.QueryRowContext(ctx, s.text.take,
				req.Name, rec.Epoch, req.Token, req.Holder, ttl, req.Name, req.Token, before))
			return err
		})
		if errors.Is(err, sql.ErrNoRows) {
			return rec, nil
		}
		return taken, err
	}
	if s.text.unlocked != "" {
		err := s.value(ctx, new(int64), s.text.unlocked, req.Name)
		if errors.Is(err, sql.ErrNoRows) {
			return rec, nil
		}
		if err != nil {
			return rec, err
		}
	}
	began, err := changed(s.exec(ctx, s.text.acquire, req.Token, req.Holder, ttl, req.Name, rec.Epoch))
	if err != nil || !began {
		return rec, err
	}
	// If this fails, a later term waits for Grace once.
	_, _ = s.exec(ctx, s.text.leave, req.Name, req.Token, before)
	rec, _, err = s.look(ctx, req.Name, req.Token)
	return rec, err
}

// Renew implements [lease.Store].
func (s *Store) Renew(ctx context.Context, name, token string, ttl time.Duration) error {
	ok, err := changed(s.exec(ctx, s.text.renew, ttl.Microseconds(), name, token))
	if ok || err != nil {
		return wrap("renew", err)
	}
	// MySQL does not count a row that is as it was.
	rec, err := s.Load(ctx, name)
	if err != nil {
		return err
	}
	if rec.Token != token {
		return lease.ErrLost
	}
	return nil
}

// Release implements [lease.Store].
func (s *Store) Release(ctx context.Context, name, token string) error {
	had, err := s.release(ctx, name, token)
	if err == nil && !had {
		_, err = s.exec(ctx, s.text.leave, name, token, -1)
	}
	return wrap("release", err)
}

func (s *Store) release(ctx context.Context, name, token string) (had bool, err error) {
	if !s.text.notifies {
		return changed(s.exec(ctx, s.text.release, name, token))
	}
	err = s.value(ctx, new(string), s.text.release, name, token, s.channel(name))
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	return err == nil, err
}

// Load implements [lease.Store].
func (s *Store) Load(ctx context.Context, name string) (lease.Record, error) {
	rec, _, err := s.look(ctx, name, "")
	if errors.Is(err, sql.ErrNoRows) { // nobody has ever held it
		var now int64
		err = s.db.QueryRowContext(ctx, "SELECT "+s.text.now).Scan(&now)
		rec.Now = moment(now)
	}
	return rec, wrap("load", err)
}

// Fence implements [lease.Fencer].
func (s *Store) Fence(ctx context.Context, tx *sql.Tx, name string, epoch int64) error {
	if s.text.fenceWrites {
		ok, err := changed(tx.ExecContext(ctx, s.text.fence, name, epoch))
		if err == nil && !ok {
			return lease.ErrLost
		}
		return wrap("fence", err)
	}
	err := tx.QueryRowContext(ctx, s.text.fence, name, epoch).Scan(new(int64))
	if errors.Is(err, sql.ErrNoRows) {
		return lease.ErrLost
	}
	return wrap("fence", err)
}

// Listen implements [lease.Notifier]. Without [Config.Listen] it waits for the end of ctx.
func (s *Store) Listen(ctx context.Context, name string, notify func()) error {
	if s.listen == nil {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	return wrap("listen", s.listen(ctx, s.channel(name), notify))
}

// exec executes a statement that writes.
func (s *Store) exec(ctx context.Context, text string, args ...any) (res sql.Result, err error) {
	err = sqltx.Write(ctx, s.db, func(ctx context.Context, q sqltx.Querier) (err error) {
		res, err = q.ExecContext(ctx, text, args...)
		return err
	})
	return res, err
}

// value executes a statement that writes or locks, and returns one value.
func (s *Store) value(ctx context.Context, to any, text string, args ...any) error {
	return sqltx.Write(ctx, s.db, func(ctx context.Context, q sqltx.Querier) error {
		return q.QueryRowContext(ctx, text, args...).Scan(to)
	})
}

// create inserts the row of a lease that nobody has ever held.
func (s *Store) create(ctx context.Context, name string) error {
	for statement := range strings.SplitSeq(s.text.create, ";") {
		if _, err := s.exec(ctx, statement, name); err != nil {
			return err
		}
	}
	return nil
}

// A line says how the waiting candidates stand.
type line struct {
	first  string // token; empty: nobody waits
	joined bool   // the token that looks is in the line
}

// look reads a lease and its line, in one statement.
func (s *Store) look(ctx context.Context, name, token string) (lease.Record, line, error) {
	return scan(name, s.db.QueryRowContext(ctx, s.text.look, token, name))
}

func scan(name string, row *sql.Row) (rec lease.Record, l line, err error) {
	var since, until, now int64
	err = row.Scan(&rec.Token, &rec.Holder, &rec.Epoch, &since, &until, &now, &l.first, &l.joined)
	rec.Name, rec.Since, rec.Until, rec.Now = name, moment(since), moment(until), moment(now)
	return rec, l, err
}

// moment returns a time of the tables, which hold microseconds since 1970.
func moment(micros int64) time.Time {
	if micros == 0 {
		return time.Time{}
	}
	return time.UnixMicro(micros)
}

// changed reports whether a statement has changed a row.
func changed(res sql.Result, err error) (bool, error) {
	if err != nil {
		return false, err
	}
	n, err := res.RowsAffected()
	return n > 0, err
}

// wrap says which method an error is from. The store's own answers stay as they are.
func wrap(what string, err error) error {
	if err == nil || err == lease.ErrLost {
		return err
	}
	return fmt.Errorf("sqllease: %s: %w", what, err)
}
