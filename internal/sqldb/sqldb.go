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

	"github.com/go-resilience/resilience/internal/behavior"
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

// Words are what statements have in braces, and what that means to a kind of database, in turns.
// What a word means may have words.
type Words []string

// Text returns a statement, or a schema, in the words of a database. {p} begins the names of its
// tables.
func (w Words) Text(prefix, text string) string {
	words := strings.NewReplacer(append([]string{"{p}", prefix}, w...)...)
	for strings.Contains(text, "{") {
		next := words.Replace(text)
		if next == text {
			break // another brace
		}
		text = next
	}
	return text
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

// Repeats is how often a transaction may be repeated that another was preferred to.
const Repeats = 10

// Transact makes fn one transaction, on a server that takes writes if there is one. It repeats, as often
// as that at most, what the database has rolled back in favor of another transaction.
func Transact(
	ctx context.Context, db *sql.DB, options *sql.TxOptions, repeats int,
	fn func(ctx context.Context, tx *sql.Tx) error,
) error {
	in := sqltx.Database(db, options)
	for tries := 0; ; tries++ {
		err := in.InTx(ctx, nil, func(ctx context.Context, tx sqltx.SQL) error { return fn(ctx, tx.Tx) })
		if end := behavior.Read(err); tries == repeats || end.Kind != behavior.Answered || !end.Retryable {
			return err
		}
	}
}

// Pooler adds to an error of PostgreSQL about prepared statements what to do.
func Pooler(err error) error {
	var state interface{ SQLState() string }
	// invalid_sql_statement_name and duplicate_prepared_statement: of another session
	if errors.As(err, &state) && (state.SQLState() == "26000" || state.SQLState() == "42P05") {
		return fmt.Errorf("a pooler such as PgBouncer has lent the connection to another client:"+
			" set what keeps the driver from preparing statements, with pgx default_query_exec_mode=exec: %w", err)
	}
	return err
}

// A Schema is the tables of a store.
type Schema struct {
	Create  string // statements that leave alone what is there; each ends with a semicolon
	Find    string // queries that fail unless the tables are there
	Table   string // has the version
	Version Version
	Kind    string // of the database: PostgreSQL, MySQL or SQLite
}

// String returns the statements that create the tables and the row of their version, which is last.
func (s Schema) String() string { return s.Create + s.Version.Table(s.Table, s.Kind == "MySQL") }

// Errors of a Schema.
var (
	// ErrVersion means that the tables are of a newer version, which this program cannot use.
	ErrVersion = errors.New("the tables are of a version that this program cannot use")
	// ErrMissing means that there is no row of a version, or an older one: Migrate makes what is missing.
	ErrMissing = errors.New("the tables are missing, or what their newest version has")
	// ErrOther means that the tables are not those that their version says.
	ErrOther = errors.New("the tables are not those of their version, or another program's (use Config.Prefix)")
)

// Check returns nil if the tables are there, and of a version that this program can use. Of the other
// errors, those that are none of ours say that it could not find out.
func (s Schema) Check(ctx context.Context, q Querier) error {
	err := s.Version.check(ctx, q, s.Table)
	if err != nil {
		return err
	}
	for query := range Statements(s.Find) {
		rows, err := q.QueryContext(ctx, query)
		if err == nil {
			err = rows.Close()
		}
		if err != nil {
			return answered(ctx, ErrOther, err)
		}
	}
	return nil
}

// answered adds to an error what it means if the database has answered.
func answered(ctx context.Context, means, err error) error {
	if behavior.Read(sqltx.Judge(ctx, err, nil)).Kind == behavior.Answered {
		return fmt.Errorf("%w: %w", means, err)
	}
	return err
}

// Migrate makes the tables, unless they are there, or were when their version was written. Several
// processes may do so at the same time.
func (s Schema) Migrate(ctx context.Context, db *sql.DB) error {
	err := s.Check(ctx, db)
	for try := 0; try < 3 && err != nil && !errors.Is(err, ErrVersion) && ctx.Err() == nil; try++ {
		if s.Version.check(ctx, db, s.Table) == nil {
			return err
		}
		made := s.make(ctx, db)
		if err = s.Check(ctx, db); err != nil && made != nil {
			err = fmt.Errorf("%w; they cannot be created, or are another program's (use Config.Prefix): %w", err, made)
		}
	}
	return err
}

// make creates what is missing. On PostgreSQL, statements that create the same beside each other would
// fail.
func (s Schema) make(ctx context.Context, db *sql.DB) error {
	run := func(ctx context.Context, q Querier) error {
		for statement := range Statements(s.String()) {
			_, err := q.ExecContext(ctx, statement)
			if err != nil && !strings.HasPrefix(err.Error(), "Error 1061 ") { // MySQL, of an index that is there
				return err
			}
		}
		return nil
	}
	if s.Kind != "PostgreSQL" {
		return Write(ctx, db, run)
	}
	return Transact(ctx, db, nil, Repeats, func(ctx context.Context, tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, "SELECT pg_advisory_xact_lock(7234061925530741)"); err != nil {
			return err
		}
		return run(ctx, tx)
	})
}

// A Version is of the tables that a program makes, and can use.
type Version struct {
	Is   int // their version
	From int // the oldest version of a program that can use them
}

// Accepts returns nil if a program that makes tables of version v can use those that it has found: a
// newer version says which programs can, so that an old one can be started again beside a new one. To what
// is older, Migrate adds what is missing.
func (v Version) Accepts(found Version) error {
	if found.Is == v.Is || found.Is > v.Is && found.From <= v.Is {
		return nil
	}
	if found.Is < v.Is {
		return fmt.Errorf("%w: they are of version %d, and this program is of version %d", ErrMissing, found.Is, v.Is)
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

// check returns nil if a program of version v can use the tables whose version is in the table of
// that name.
func (v Version) check(ctx context.Context, q Querier, name string) error {
	var found Version
	newest := "SELECT version, compatible FROM " + name + " ORDER BY version DESC LIMIT 1"
	err := q.QueryRowContext(ctx, newest).Scan(&found.Is, &found.From)
	if errors.Is(err, sql.ErrNoRows) { // another process is about to write it
		return ErrMissing
	}
	if err != nil {
		return answered(ctx, ErrMissing, err)
	}
	return v.Accepts(found)
}
