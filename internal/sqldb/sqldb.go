// Package sqldb implements the common parts of the SQL stores of packages saga and lease: statements for several kinds
// of databases, writes that find the primary, and tables with versions.
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

// IsPrefix reports whether s is valid as the prefix of tables' names.
func IsPrefix(s string) bool {
	for i, c := range []byte(s) {
		if (c < 'a' || c > 'z') && c != '_' && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return len(s) <= 32
}

// Texts translates statements into the dialect of a kind of database, and caches them. It is safe for concurrent use.
type Texts struct {
	words    *strings.Replacer
	numbered bool
	made     sync.Map // maps the text of a statement to its translation
}

// NewTexts returns the Texts of a kind of database. words are pairs of a word in braces and its replacement, which may
// contain other words in braces. {p} is replaced by prefix, the prefix of the tables' names. If numbered is true,
// question marks are replaced by the placeholders $1, $2 and so on.
func NewTexts(prefix string, numbered bool, words ...string) *Texts {
	return &Texts{words: strings.NewReplacer(append([]string{"{p}", prefix}, words...)...), numbered: numbered}
}

// Of returns the translation of a statement or a schema.
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

// number replaces the question marks of a statement by $1, $2 and so on.
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

// Statements returns the statements of a schema. In the schema, each statement ends with a semicolon.
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

// Write calls fn with db. fn executes one statement or one transaction. If the server is read-only, for example after a
// failover, Write calls fn again with a connection to a server that accepts writes, if there is such a server. If the
// driver's prepared statement is stale, Write calls fn again with db.
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

// Exec executes one statement as [Write] does, and reports whether the statement has changed a row.
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

// Repeats is the usual maximum number of repetitions of a transaction that is rolled back in favor of other
// transactions.
const Repeats = 10

// Transact runs fn in a transaction. If the server is read-only, Transact uses a server that accepts writes, if there
// is such a server. If the database rolls the transaction back in favor of another one, Transact repeats it, up to
// repeats times.
func Transact(
	ctx context.Context, db *sql.DB, options *sql.TxOptions, repeats int,
	fn func(ctx context.Context, tx *sql.Tx) error,
) error {
	in := sqltx.Database(db, options, nil)
	for tries := 0; ; tries++ {
		err := in.InTx(ctx, nil, func(ctx context.Context, tx sqltx.SQL) error { return fn(ctx, tx.Tx) })
		if end := behavior.Read(err); tries == repeats || end.Kind != behavior.Answered || !end.Retryable {
			return err
		}
	}
}

// Pooler adds advice to an error of PostgreSQL that is caused by prepared statements behind a pooler. It returns other
// errors unchanged.
func Pooler(err error) error {
	var state interface{ SQLState() string }
	// These codes mean invalid_sql_statement_name and duplicate_prepared_statement: the statement is in another session.
	if errors.As(err, &state) && (state.SQLState() == "26000" || state.SQLState() == "42P05") {
		return fmt.Errorf("a pooler such as PgBouncer has lent the connection to another client:"+
			" set what keeps the driver from preparing statements, with pgx default_query_exec_mode=exec: %w", err)
	}
	return err
}

// Moment converts microseconds since 1970 to a time. For 0, it returns the zero time.
func Moment(micros int64) time.Time {
	if micros == 0 {
		return time.Time{}
	}
	return time.UnixMicro(micros)
}

// A Schema describes the tables of a store.
type Schema struct {
	Create  string // the statements that create the tables unless they exist; each ends with a semicolon
	Find    string // the queries that fail unless the tables and their columns exist
	Table   string // the name of the table with the version
	Version int    // the version of the tables
	Kind    string // the kind of database: PostgreSQL, MySQL or SQLite
}

// String returns the statements that create the tables. The last statement inserts the row with the version of the
// tables. That row also has the oldest version of a program that can use the tables.
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

// The errors of a Schema.
var (
	// ErrVersion means that the tables have a newer version, which this program cannot use.
	ErrVersion = errors.New("the tables are of a version that this program cannot use")
	// ErrMissing means that the tables do not exist, or are older than this version.
	ErrMissing = errors.New("the tables are missing, or what a newer version of them has")
	// ErrServer means that the server executes some of the statements differently.
	ErrServer = errors.New("the server is not supported")
	// ErrOther means that the version of the tables is recorded, but a table or a column of that version is missing.
	ErrOther = errors.New("the tables are not those of their version, or another program's (use Config.Prefix)")
)

// Check returns nil if the tables exist and have a version that this program can use. An error that matches none of the
// errors of a Schema means that the state of the tables is unknown.
func (s Schema) Check(ctx context.Context, q Querier) error {
	if err := s.checkVersion(ctx, q); err != nil {
		return err
	}
	if err := s.find(ctx, q); err != nil {
		return answered(ctx, ErrOther, err)
	}
	return s.checkServer(ctx, q)
}

// others are servers that use the protocol of PostgreSQL or MySQL and accept the stores' statements, but execute some
// of them differently. For example, TiDB ignores SKIP LOCKED, and so gives a row to two transactions. Other servers do
// not have the isolation READ COMMITTED, or their locks are only effective on one of several nodes. Each text occurs in
// the version of such a server, in lower case.
var others = map[string][]string{
	"PostgreSQL": {
		"cockroach", "-yb-", "yugabyte", "redshift", "greenplum", "gaussdb", "opengauss", "materialize", "cratedb",
	},
	"MySQL": {
		"tidb", "vitess", "oceanbase", "polardb-x", "tddl", "singlestore", "memsql", "starrocks", "doris", "planetscale",
	},
}

// checkServer returns an error if the server is one of the others, according to its version.
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
		return nil // ignore this error, because the other statements then also fail
	}
	return ServerOf(s.Kind, version)
}

// ServerOf returns an error if a server with this version is not supported as this kind of database.
func ServerOf(kind, version string) error {
	for _, name := range others[kind] {
		if strings.Contains(strings.ToLower(version), name) {
			return fmt.Errorf("%w: its version is %q: must be %s", ErrServer, version, supported[kind])
		}
	}
	return nil
}

var supported = map[string]string{"PostgreSQL": "PostgreSQL", "MySQL": "MySQL or MariaDB"}

// find returns an error if a table or a column is missing.
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
	if errors.Is(err, sql.ErrNoRows) { // the table is empty, because another process is creating the tables
		return ErrMissing
	}
	if err != nil {
		return answered(ctx, ErrMissing, err)
	}
	return Usable(version, from, s.Version)
}

// Usable returns nil if a program can use the existing tables. version is the version of the program's tables, found is
// the version of the existing tables, and from is the oldest version that can use the existing tables. If found is
// newer than version, from allows an old program to run at the same time as a newer one. If found is older, Usable
// returns ErrMissing, and Migrate adds the missing tables and columns.
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

// answered adds the error means to err if err is an answer of the database that should not be retried.
func answered(ctx context.Context, means, err error) error {
	if end := behavior.Read(sqltx.Judge(ctx, err, nil)); end.Kind == behavior.Answered && !end.Retryable {
		return fmt.Errorf("%w: %w", means, err)
	}
	return err
}

// Migrate creates the tables unless the row with their version exists. Several processes may call it concurrently.
func (s Schema) Migrate(ctx context.Context, db *sql.DB) error {
	if err := s.checkServer(ctx, db); err != nil {
		return err
	}
	err := s.Check(ctx, db)
	for try := 0; try < 3 && err != nil && !errors.Is(err, ErrVersion) && ctx.Err() == nil; try++ {
		if s.checkVersion(ctx, db) == nil {
			return s.Check(ctx, db) // do not return err, because another process may have created the tables since
		}
		made := s.make(ctx, db)
		if err = s.Check(ctx, db); err != nil && made != nil {
			err = fmt.Errorf("%w; they cannot be created, or are another program's (use Config.Prefix): %w", err, made)
		}
	}
	return err
}

// make creates the tables that are missing. On PostgreSQL, it holds a lock, because concurrent statements that create
// the same table would fail.
func (s Schema) make(ctx context.Context, db *sql.DB) error {
	run := func(ctx context.Context, q Querier) error {
		statements := slices.Collect(Statements(s.String()))
		for i, statement := range statements {
			if i == len(statements)-1 { // insert the row with the version only if all tables exist
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

// Waits returns an error if connections to SQLite do not wait for the locks of other connections.
func Waits(ctx context.Context, db *sql.DB) error {
	var busy int
	err := db.QueryRowContext(ctx, "PRAGMA busy_timeout").Scan(&busy)
	if err == nil && busy <= 0 {
		err = errors.New("PRAGMA busy_timeout is 0: must be some seconds on every connection," +
			" since a writer must wait for those of other processes")
	}
	return err
}
