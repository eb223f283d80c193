// Package sqldb is what the stores of package saga and of package lease have in common: the texts of
// a kind of database, writes that find the primary, and the versions of tables.
package sqldb

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

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

// Texts are statements in the words of a kind of database. It is safe for concurrent use.
type Texts struct {
	words    *strings.Replacer
	numbered bool
	made     sync.Map // by the texts that they were made of
}

// NewTexts returns the Texts of a kind of database: what a statement may have in braces, and what that means,
// which may have words itself, in turns. {p} is the prefix of the names of tables. With numbered, placeholders
// are $1, $2 and so on in place of question marks.
func NewTexts(prefix string, numbered bool, words ...string) *Texts {
	return &Texts{words: strings.NewReplacer(append([]string{"{p}", prefix}, words...)...), numbered: numbered}
}

// Of returns a statement, or a schema, in the words of the database.
func (t *Texts) Of(text string) string {
	if made, ok := t.made.Load(text); ok {
		return made.(string)
	}
	made := text
	for next := t.words.Replace(made); next != made; next = t.words.Replace(made) {
		made = next
	}
	if t.numbered {
		made = number(made)
	}
	t.made.Store(text, made)
	return made
}

// number makes $1, $2 and so on of the question marks of a statement.
func number(text string) string {
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

// A Conn is a *sql.DB or a *sql.Conn.
type Conn interface {
	Querier
	BeginTx(ctx context.Context, options *sql.TxOptions) (*sql.Tx, error)
}

// Write calls fn, which makes one statement or one transaction, with db. If the server takes no
// writes (any more), it calls fn again with a connection to one that does, if there is one; if the
// driver has a stale statement, with db.
func Write(ctx context.Context, db *sql.DB, fn func(ctx context.Context, on Conn) error) error {
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
	err = Write(ctx, db, func(ctx context.Context, on Conn) error {
		res, err := on.ExecContext(ctx, text, args...)
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

// Moment returns a time of the tables, which are microseconds since 1970; 0 is none.
func Moment(micros int64) time.Time {
	if micros == 0 {
		return time.Time{}
	}
	return time.UnixMicro(micros)
}

// A Schema is the tables of a store.
type Schema struct {
	Create  string // statements that leave alone what is there; each ends with a semicolon
	Find    string // queries that fail unless the tables are there
	Table   string // has the version
	Version int
	Kind    string // of the database: PostgreSQL, MySQL or SQLite
}

// String returns the statements that create the tables and the row of their version, which is last: its table
// has the oldest version of a program that can use the tables, too.
func (s Schema) String() string {
	insert, end, engine := "INSERT INTO", " ON CONFLICT DO NOTHING", ""
	if s.Kind == "MySQL" {
		insert, end, engine = "INSERT IGNORE INTO", "", " ENGINE = InnoDB"
	}
	return s.Create + fmt.Sprintf(
		`CREATE TABLE IF NOT EXISTS %s (version bigint NOT NULL PRIMARY KEY, compatible bigint NOT NULL)%s;
%s %[1]s (version, compatible) VALUES (%[4]d, %[4]d)%[5]s;
`, s.Table, engine, insert, s.Version, end)
}

// Errors of a Schema.
var (
	// ErrVersion means that the tables are of a newer version, which this program cannot use.
	ErrVersion = errors.New("the tables are of a version that this program cannot use")
	// ErrMissing means that there is no row of this version or a newer one.
	ErrMissing = errors.New("the tables are missing, or what a newer version of them has")
	// ErrServer means that the server is another one than the statements are made for.
	ErrServer = errors.New("the server is not supported")
	// ErrOther means that the tables are not those that their version says.
	ErrOther = errors.New("the tables are not those of their version, or another program's (use Config.Prefix)")
)

// Check returns nil if the tables are there, and of a version that this program can use. Of the other
// errors, those that are none of ours say that it could not find out.
func (s Schema) Check(ctx context.Context, q Querier) error {
	if err := s.checkVersion(ctx, q); err != nil {
		return err
	}
	if err := s.find(ctx, q); err != nil {
		return answered(ctx, ErrOther, err)
	}
	return s.checkServer(ctx, q)
}

// others are servers with the protocol of PostgreSQL or MySQL that accept the statements of the stores and execute some
// of them differently: TiDB ignores SKIP LOCKED and gives a row to two transactions, others have another isolation than
// READ COMMITTED, or locks that hold on one of several nodes. The texts occur in their versions, in lower case.
var others = map[string][]string{
	"PostgreSQL": {
		"cockroach", "-yb-", "yugabyte", "redshift", "greenplum", "gaussdb", "opengauss", "materialize", "cratedb",
	},
	"MySQL": {
		"tidb", "vitess", "oceanbase", "polardb-x", "tddl", "singlestore", "memsql", "starrocks", "doris", "planetscale",
	},
}

// checkServer returns an error if the server says that it is one of the others.
func (s Schema) checkServer(ctx context.Context, q Querier) error {
	query := "SELECT version()"
	switch s.Kind {
	case "MySQL":
		query = "SELECT CONCAT(version(), ' ', @@version_comment)"
	case "SQLite":
		return nil
	}
	var version string
	if err := q.QueryRowContext(ctx, query).Scan(&version); err != nil {
		return nil // a server that is not there fails the other statements, too
	}
	return ServerOf(s.Kind, version)
}

// ServerOf returns an error if a server with this version executes the statements for a kind of database differently.
func ServerOf(kind, version string) error {
	for _, name := range others[kind] {
		if strings.Contains(strings.ToLower(version), name) {
			return fmt.Errorf("%w: its version is %q: must be %s", ErrServer, version, supported[kind])
		}
	}
	return nil
}

var supported = map[string]string{"PostgreSQL": "PostgreSQL", "MySQL": "MySQL or MariaDB"}

// find returns an error if one of the tables, or a column of it, is not there.
func (s Schema) find(ctx context.Context, q Querier) error {
	for query := range Statements(s.Find) {
		rows, err := q.QueryContext(ctx, query)
		if err == nil {
			err = rows.Close()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (s Schema) checkVersion(ctx context.Context, q Querier) error {
	var version, from int
	newest := "SELECT version, compatible FROM " + s.Table + " ORDER BY version DESC LIMIT 1"
	err := q.QueryRowContext(ctx, newest).Scan(&version, &from)
	if errors.Is(err, sql.ErrNoRows) { // another process is about to write it
		return ErrMissing
	}
	if err != nil {
		return answered(ctx, ErrMissing, err)
	}
	return Usable(version, from, s.Version)
}

// Usable returns nil if a program that makes tables of a version can use those that it has found: a newer
// version says from which version on programs can, so that an old one can be started again beside a new one.
// To what is older, Migrate adds what is missing.
func Usable(found, from, version int) error {
	switch {
	case found < version:
		return ErrMissing
	case from <= version:
		return nil
	}
	return fmt.Errorf("%w: they are of version %d, for programs from version %d on, and this program is of version %d",
		ErrVersion, found, from, version)
}

// answered adds to an error what it means if the database has answered, and not only that it is busy.
func answered(ctx context.Context, means, err error) error {
	if end := behavior.Read(sqltx.Judge(ctx, err, nil)); end.Kind == behavior.Answered && !end.Retryable {
		return fmt.Errorf("%w: %w", means, err)
	}
	return err
}

// Migrate makes the tables, unless they are there, or were when their version was written. Several
// processes may do so at the same time.
func (s Schema) Migrate(ctx context.Context, db *sql.DB) error {
	if err := s.checkServer(ctx, db); err != nil {
		return err
	}
	err := s.Check(ctx, db)
	for try := 0; try < 3 && err != nil && !errors.Is(err, ErrVersion) && ctx.Err() == nil; try++ {
		if s.checkVersion(ctx, db) == nil {
			return s.Check(ctx, db) // and not err: another process may have made them since
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
		statements := slices.Collect(Statements(s.String()))
		for i, statement := range statements {
			if i == len(statements)-1 { // it says that the tables are there
				if err := s.find(ctx, q); err != nil {
					return err
				}
			}
			if _, err := q.ExecContext(ctx, statement); err != nil {
				return err
			}
		}
		return nil
	}
	if s.Kind != "PostgreSQL" {
		return Write(ctx, db, func(ctx context.Context, on Conn) error { return run(ctx, on) })
	}
	return Transact(ctx, db, nil, Repeats, func(ctx context.Context, tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, "SELECT pg_advisory_xact_lock(7234061925530741)"); err != nil {
			return err
		}
		return run(ctx, tx)
	})
}

// Waits returns an error if a connection to SQLite does not wait for the lock of another.
func Waits(ctx context.Context, db *sql.DB) error {
	var busy int
	err := db.QueryRowContext(ctx, "PRAGMA busy_timeout").Scan(&busy)
	if err == nil && busy <= 0 {
		err = errors.New("PRAGMA busy_timeout is 0: must be some seconds on every connection," +
			" since a writer must wait for those of other processes")
	}
	return err
}
