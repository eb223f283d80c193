package sqllease_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"strings"
	"sync"
	"time"
)

// A fake is a database that knows the statements of package sqllease by their first words. The statements themselves
// are tested on real databases, in internal/integration/lease.
type fake struct {
	mu      sync.Mutex
	tables  bool
	busy    int64
	rows    map[string]*row
	version [2]int64
	log     []string
	fail    func(statement string) error // nil: none fails
	locked  bool                         // a fenced transaction is open
	same    bool                         // an update reports no change
}

type row struct {
	token, holder           string
	epoch, expires, lastRun int64
}

// values are the columns that a query returns.
func (r *row) values(now int64) []driver.Value {
	return []driver.Value{r.token, r.holder, r.epoch, r.expires - now, r.lastRun}
}

func newFake() *fake { return &fake{busy: 1000, rows: make(map[string]*row)} }

func (f *fake) open() *sql.DB { return sql.OpenDB(f) }

func (f *fake) Connect(context.Context) (driver.Conn, error) { return fakeConn{f}, nil }
func (f *fake) Driver() driver.Driver                        { return nil }

type fakeConn struct{ f *fake }

func (fakeConn) Prepare(string) (driver.Stmt, error) { return nil, errors.New("not prepared") }
func (fakeConn) Close() error                        { return nil }
func (fakeConn) Begin() (driver.Tx, error)           { return fakeTx{}, nil }

type fakeTx struct{}

func (fakeTx) Commit() error   { return nil }
func (fakeTx) Rollback() error { return nil }

func (c fakeConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	changed, _, err := c.f.run(ctx, query, args)
	return driver.RowsAffected(changed), err
}

func (c fakeConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	_, values, err := c.f.run(ctx, query, args)
	return &fakeRows{values}, err
}

type fakeRows struct{ values []driver.Value }

func (r *fakeRows) Columns() []string { return make([]string, len(r.values)) }
func (r *fakeRows) Close() error      { return nil }
func (r *fakeRows) Next(dest []driver.Value) error {
	if r.values == nil {
		return io.EOF
	}
	copy(dest, r.values)
	r.values = nil
	return nil
}

var errNoTable = errors.New("no such table")

// run runs a statement. values are the columns of the row that it returns.
func (f *fake) run(
	ctx context.Context, query string, named []driver.NamedValue,
) (changed int64, values []driver.Value, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if ctx.Err() != nil {
		return 0, nil, ctx.Err()
	}
	query = strings.TrimSpace(query)
	f.log = append(f.log, query)
	if f.fail != nil {
		if err := f.fail(query); err != nil {
			return 0, nil, err
		}
	}
	text := func(i int) string { s, _ := named[i].Value.(string); return s }
	number := func(i int) int64 { n, _ := named[i].Value.(int64); return n }
	now := time.Now().UnixMicro()
	is := func(beginning string) bool { return strings.HasPrefix(query, beginning) }
	one := []driver.Value{int64(1)}
	switch {
	case is("CREATE TABLE"):
		f.tables = true
		return 0, nil, nil
	case is("SELECT pg_advisory_xact_lock"):
		return 0, nil, nil
	case is("PRAGMA busy_timeout"):
		return 0, []driver.Value{f.busy}, nil
	case !f.tables:
		return 0, nil, errNoTable
	case strings.Contains(query, "WHERE 1 = 0"):
		return 0, nil, nil
	case is("INSERT IGNORE INTO lease_fence"):
		return 0, nil, nil
	case is("INSERT INTO lease_schema"), is("INSERT IGNORE INTO lease_schema"):
		f.version = [2]int64{1, 1}
		return 1, nil, nil
	case is("SELECT version"):
		if f.version[0] == 0 {
			return 0, nil, nil
		}
		return 0, []driver.Value{f.version[0], f.version[1]}, nil
	case is("INSERT"):
		if f.rows[text(0)] == nil {
			f.rows[text(0)] = &row{}
		}
		return 1, nil, nil
	case is("SELECT token"): // load
		r := f.rows[text(0)]
		if r == nil {
			return 0, nil, nil
		}
		return 0, r.values(now), nil
	case is("SELECT epoch"): // fence or unlocked
		r := f.rows[text(0)]
		if f.locked && len(named) == 1 || len(named) == 2 && (r == nil || r.epoch != number(1)) {
			return 0, nil, nil
		}
		return 0, one, nil
	case is("UPDATE lease SET epoch = epoch WHERE"): // fence
		if r := f.rows[text(0)]; r == nil || r.epoch != number(1) {
			return 0, nil, nil
		}
		return 1, one, nil
	case strings.Contains(query, "token = ''"): // release
		r := f.rows[text(0)]
		if r == nil || r.token != text(1) {
			return 0, nil, nil
		}
		*r = row{epoch: r.epoch + 1, expires: now, lastRun: r.lastRun}
		return 1, nil, nil
	case len(named) == 5 && strings.Contains(query, "last_run = "): // run
		r := f.rows[text(2)]
		if r == nil || r.token != text(3) || r.lastRun >= number(4) {
			return 0, nil, nil
		}
		r.expires, r.lastRun = now+number(0), number(1)
		return 1, nil, nil
	case is("UPDATE lease SET expires"): // renew
		r := f.rows[text(1)]
		if r == nil || r.token != text(2) {
			return 0, nil, nil
		}
		r.expires = now + number(0)
		if f.same {
			return 0, nil, nil
		}
		return 1, nil, nil
	case is("UPDATE lease"): // acquire
		r := f.rows[text(3)]
		if r == nil || f.locked || r.epoch != number(4) || r.expires > now {
			return 0, nil, nil
		}
		*r = row{text(0), text(1), max(r.epoch+1, now), now + number(2), r.lastRun}
		return 1, r.values(now), nil
	}
	return 0, nil, errors.New("unknown statement: " + query)
}
