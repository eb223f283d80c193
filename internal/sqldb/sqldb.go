// Package sqldb is what the stores of package saga and of package lease have in common: the texts of
// a kind of database, writes that find the primary, and the versions of tables.
package sqldb

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"iter"
	"strconv"
	"strings"

	"github.com/go-resilience/resilience/internal/sqltx"
)

// A Querier is a *sql.DB, a *sql.Conn or a *sql.Tx.
type Querier = sqltx.Querier

// IsPrefix reports whether the names of tables may begin with s.
func IsPrefix(s string) bool {
	for i, c := range []byte(s) {
		if (c < 'a' || c > 'z') && c != '_' && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return len(s) <= 32
}

// Number makes $1, $2 and so on of the question marks of a statement.
func Number(text string) string {
	parts := strings.Split(text, "?")
	var b strings.Builder
	b.WriteString(parts[0])
	for i, part := range parts[1:] {
		b.WriteString("$" + strconv.Itoa(i+1))
		b.WriteString(part)
	}
	return b.String()
}

// Statements returns the statements of a schema, each of which ends with a semicolon.
func Statements(schema string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for statement := range strings.SplitSeq(schema, ";") {
			if strings.TrimSpace(statement) != "" && !yield(statement) {
				return
			}
		}
	}
}

// Write calls fn, which makes one statement that is a transaction of its own, with db. If the
// server takes no writes (any more), it calls fn again with a connection to one that does, if there
// is one; if the driver has a stale statement, with db.
func Write(ctx context.Context, db *sql.DB, fn func(ctx context.Context, q Querier) error) error {
	err := fn(ctx, db)
	if sqltx.Stale(err, nil) {
		return fn(ctx, db)
	}
	probe := sqltx.Reader(err, nil)
	if probe == "" {
		return err
	}
	conn, failed := sqltx.Primary(ctx, db, probe)
	if failed != nil {
		return err
	}
	defer conn.Close()
	return fn(ctx, conn)
}

// Exec is [Write] of one statement, and reports whether it has changed a row.
func Exec(ctx context.Context, db *sql.DB, text string, args ...any) (changed bool, err error) {
	err = Write(ctx, db, func(ctx context.Context, q Querier) error {
		res, err := q.ExecContext(ctx, text, args...)
		if err != nil {
			return err
		}
		n, err := res.RowsAffected()
		changed = n > 0
		return err
	})
	return changed, err
}

// A Version is of the tables that a program makes, and can use.
type Version struct {
	Is   int // their version
	From int // the oldest version of a program that can use them
}

// ErrVersion is matched by the errors of Accepts.
var ErrVersion = errors.New("the tables are of a version that this program cannot use")

// Accepts returns nil if a program that makes tables of version v can use those that it has found: a
// newer version says which programs can, so that an old one can be started again beside a new one.
func (v Version) Accepts(found Version) error {
	if found.Is == v.Is || found.Is > v.Is && found.From <= v.Is {
		return nil
	}
	return fmt.Errorf("%w: they are of version %d, for programs from version %d on, and this program is of version %d",
		ErrVersion, found.Is, found.From, v.Is)
}

// Table returns the statements that make the row of a version in a table of its own.
func (v Version) Table(name string, mysql bool) string {
	insert, end, engine := "INSERT INTO", " ON CONFLICT DO NOTHING", ""
	if mysql {
		insert, end, engine = "INSERT IGNORE INTO", "", " ENGINE = InnoDB"
	}
	return fmt.Sprintf(`CREATE TABLE IF NOT EXISTS %s (version bigint NOT NULL PRIMARY KEY, compatible bigint NOT NULL)%s;
%s %s (version, compatible) VALUES (%d, %d)%s;
`, name, engine, insert, name, v.Is, v.From, end)
}

// Check returns nil if a program of version v can use the tables whose version is in the table of
// that name.
func (v Version) Check(ctx context.Context, q Querier, name string) error {
	var found Version
	newest := "SELECT version, compatible FROM " + name + " ORDER BY version DESC LIMIT 1"
	err := q.QueryRowContext(ctx, newest).Scan(&found.Is, &found.From)
	if err != nil {
		return fmt.Errorf("version of the tables: %w", err)
	}
	return v.Accepts(found)
}
