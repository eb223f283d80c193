// Package standby provides a fake database with two servers, for tests of connection pools after a failover.
package standby

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"
)

// An Error is an error of PostgreSQL, with the method SQLState and the field Routine that errors of pgx and lib/pq
// have.
type Error struct{ Code, Routine string }

func (e *Error) Error() string    { return "SQLSTATE " + e.Code }
func (e *Error) SQLState() string { return e.Code }

// ReadOnly is the error with which a standby rejects a write.
var ReadOnly = &Error{"25006", "PreventCommandIfReadOnly"}

// Servers are two servers behind one address. The first server is the primary until Swap is called.
type Servers struct {
	// Refuse is the error of a server that accepts no writes. Nil means ReadOnly.
	Refuse error
	// OnBegin and OnCommit report whether BEGIN and COMMIT also fail with Refuse on such a server. With OnCommit, the
	// writes before COMMIT succeed.
	OnBegin, OnCommit bool
	// Answer returns the rows of a query. Nil means that every query returns one row with the value 1.
	Answer func(query string) [][]driver.Value

	mu      sync.Mutex
	primary int
	open    [2]int // the number of open connections to each server
	writes  []string
}

// Open returns a pool with n open connections to the current primary.
func (s *Servers) Open(t testing.TB, n int) *sql.DB {
	db := sql.OpenDB(s)
	db.SetMaxIdleConns(n)
	t.Cleanup(func() { _ = db.Close() })
	var conns []*sql.Conn
	for range n {
		conn, err := db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
	}
	for _, conn := range conns {
		_ = conn.Close()
	}
	return db
}

// Swap makes the other server the primary.
func (s *Servers) Swap() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.primary = 1
}

// Demote makes both servers read-only. New connections then lead to the first server.
func (s *Servers) Demote() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.primary = -1
}

// Conns returns the number of open connections to each server.
func (s *Servers) Conns() [2]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open
}

// Writes returns the write statements that were executed.
func (s *Servers) Writes() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.writes
}

// Connect opens a new connection to the primary.
func (s *Servers) Connect(context.Context) (driver.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	server := max(s.primary, 0)
	s.open[server]++
	return &conn{s, server}, nil
}

func (s *Servers) Driver() driver.Driver { return nil }

type conn struct {
	s      *Servers
	server int
}

// refused returns the error with which the server rejects writes, or nil if the server is the primary.
func (c *conn) refused() error {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	switch {
	case c.server == c.s.primary:
		return nil
	case c.s.Refuse != nil:
		return c.s.Refuse
	}
	return ReadOnly
}

func (c *conn) Prepare(string) (driver.Stmt, error) { return nil, errors.New("no statements") }

func (c *conn) Close() error {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.s.open[c.server]--
	return nil
}

func (c *conn) Begin() (driver.Tx, error) { return nil, errors.New("no isolation") }

func (c *conn) BeginTx(context.Context, driver.TxOptions) (driver.Tx, error) {
	if c.s.OnBegin {
		return c, c.refused()
	}
	return c, nil
}

func (c *conn) Commit() error {
	if c.s.OnCommit {
		return c.refused()
	}
	return nil
}

func (c *conn) Rollback() error { return nil }

func (c *conn) ExecContext(_ context.Context, query string, _ []driver.NamedValue) (driver.Result, error) {
	if err := c.refused(); err != nil && !c.s.OnCommit {
		return nil, err
	}
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.s.writes = append(c.s.writes, query)
	return driver.RowsAffected(1), nil
}

// QueryContext treats a query as a write if it contains INSERT, UPDATE or DELETE, as PostgreSQL's CTEs may do.
func (c *conn) QueryContext(_ context.Context, query string, _ []driver.NamedValue) (driver.Rows, error) {
	refused := c.refused()
	if strings.Contains(query, "read_only") { // the probe
		if refused == nil {
			return &rows{}, nil
		}
		return &rows{[][]driver.Value{{int64(1)}}}, nil
	}
	for _, verb := range []string{"INSERT ", "UPDATE ", "DELETE "} {
		if strings.Contains(query, verb) {
			if refused != nil {
				return nil, refused
			}
			c.s.mu.Lock()
			c.s.writes = append(c.s.writes, query)
			c.s.mu.Unlock()
			break
		}
	}
	if c.s.Answer == nil {
		return &rows{[][]driver.Value{{int64(1)}}}, nil
	}
	return &rows{c.s.Answer(query)}, nil
}

type rows struct{ left [][]driver.Value }

func (r *rows) Columns() []string {
	if len(r.left) == 0 {
		return []string{"none"}
	}
	return make([]string, len(r.left[0]))
}

func (r *rows) Close() error { return nil }

func (r *rows) Next(to []driver.Value) error {
	if len(r.left) == 0 {
		return io.EOF
	}
	copy(to, r.left[0])
	r.left = r.left[1:]
	return nil
}
