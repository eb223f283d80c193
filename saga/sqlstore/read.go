package sqlstore

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/go-resilience/resilience/internal/sqldb"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

func (s *tables) Load(ctx context.Context, id string) (store.Record, error) {
	if !isText(id) {
		return store.Record{}, store.ErrNotFound
	}
	rec, err := s.load(ctx, s.db, id, "")
	return rec, wrap("load", err)
}

func (s *tables) load(ctx context.Context, q sqldb.Querier, id, how string) (store.Record, error) {
	rec, err := scan(q.QueryRowContext(ctx, s.sql(load+how), id))
	if errors.Is(err, sql.ErrNoRows) {
		return rec, store.ErrNotFound
	}
	return rec, err
}

func (s *tables) Messages(ctx context.Context, id string) ([]store.Message, error) {
	if !isText(id) {
		return nil, nil
	}
	rows, err := s.db.QueryContext(ctx, s.sql(signals), id)
	list, err := collect(rows, err, func(rows *sql.Rows) (sig store.Message, err error) {
		return sig, rows.Scan(&sig.Name, &sig.Payload)
	})
	return list, wrap("messages", err)
}

func (s *tables) History(ctx context.Context, id string, after int64, limit int) ([]store.Entry, error) {
	if !isText(id) {
		return nil, nil
	}
	if limit <= 0 {
		limit = math.MaxInt32
	}
	rows, err := s.db.QueryContext(ctx, s.sql(history), id, after, limit)
	log, err := collect(rows, err, func(rows *sql.Rows) (e store.Entry, err error) {
		var at int64
		err = rows.Scan(&e.Seq, &e.Step, &e.Op, &e.Kind, &e.Attempt, &e.Epoch, &e.Error, &at)
		e.At = sqldb.Moment(at)
		return e, err
	})
	return log, wrap("history", err)
}

func (s *tables) Children(ctx context.Context, req store.ChildrenRequest) ([]store.ChildRecord, error) {
	if !isText(req.Parent) || !isText(req.Step) {
		return nil, nil
	}
	// The union reads one range of the index for each status. With "status IN", PostgreSQL may read all children.
	limit := math.MaxInt32
	if req.Limit > 0 {
		limit = req.Limit
	}
	var args []any
	text := ""
	if len(req.Status) == 0 {
		text, args = child, []any{req.Parent, req.Step}
	}
	for i, status := range req.Status {
		args = append(args, req.Parent, req.Step, string(status))
		text = union(text, child+" AND status = ?", i)
	}
	rows, err := s.db.QueryContext(ctx, s.sql(text+" LIMIT "+strconv.Itoa(limit)), args...)
	list, err := collect(rows, err, func(rows *sql.Rows) (c store.ChildRecord, err error) {
		return c, rows.Scan(&c.ID, &c.Status, &c.CancelRequested)
	})
	return list, wrap("children", err)
}

// union appends a query to text, which is a union of queries or empty. i is the number of the query, and part of its
// alias.
func union(text, query string, i int) string {
	query = "SELECT * FROM (" + query + ") AS q" + strconv.Itoa(i)
	if text == "" {
		return query
	}
	return text + " UNION ALL " + query
}

func (s *tables) List(ctx context.Context, f store.Filter) (recs []store.Record, next string, err error) {
	// The statement is a union that reads one range of an index for each status. The index is by name and status if the
	// filter selects one definition, and otherwise by status.
	defer named("list", &err)
	if !isText(f.Saga) || !isText(f.ID) {
		return nil, "", nil // no saga can match
	}
	limit := min(cmp.Or(max(f.Limit, 0), 100), math.MaxInt32)
	// The page has sagas that were created before at, and sagas that were created at that time and have a lesser id.
	at, id := int64(math.MaxInt64), ""
	if !f.CreatedBefore.IsZero() {
		at = f.CreatedBefore.Add(time.Microsecond - 1).UnixMicro()
	}
	if f.After != "" {
		micros, last, ok := strings.Cut(f.After, " ")
		at, err = strconv.ParseInt(micros, 10, 64)
		if id = last; !ok || err != nil {
			return nil, "", fmt.Errorf("Filter.After is %q: must be the next of a page", f.After)
		}
	}
	query, index := "", "time"
	var more []any
	if f.Saga != "" {
		query, index, more = query+" AND name = ?", "name", append(more, f.Saga)
	}
	if f.ID != "" {
		query, more = query+" AND id >= ? AND id < ?", append(more, f.ID, f.ID+endOfPrefix)
	}
	record := "{record}"
	if f.WithoutState {
		record = strings.Replace(columns, " data,", " '' AS data,", 1) + ", {now} AS store_now"
	}
	// {limit} is replaced after the call to s.sql, which caches each text.
	order := " ORDER BY created_at DESC, id DESC LIMIT {limit}"
	query = "SELECT " + record + " FROM {by " + index +
		"} WHERE status = ? AND created_at <= ? AND (created_at < ? OR id < ?)" + query + order
	text := ""
	var args []any
	for i, status := range statuses {
		if len(f.Status) == 0 || slices.Contains(f.Status, status) {
			text = union(text, query, i)
			args = append(append(args, string(status), at, at, id), more...)
		}
	}
	if text == "" {
		return nil, "", nil
	}
	text = strings.ReplaceAll(s.sql(text+order), "{limit}", strconv.Itoa(limit+1))
	rows, err := s.db.QueryContext(ctx, text, args...)
	recs, err = collect(rows, err, func(rows *sql.Rows) (store.Record, error) { return scan(rows) })
	if err != nil || len(recs) <= limit {
		return recs, "", err
	}
	last := &recs[limit-1]
	return recs[:limit], strconv.FormatInt(last.CreatedAt.UnixMicro(), 10) + " " + last.ID, nil
}

var statuses = []store.Status{
	store.Running, store.Compensating, store.Stuck, store.Completed, store.Compensated, store.Abandoned,
}

// endOfPrefix is the last rune of Unicode. A prefix followed by endOfPrefix is greater than all texts that start with
// the prefix.
const endOfPrefix = "\U0010FFFF"

// queues returns the queues that have a due saga, in any order. count is the SQL expression for the number of due sagas
// in a queue.
func (s *tables) queues(ctx context.Context, count string) ([]queue, error) {
	return s.readQueues(ctx, queuesFrom(s.d.queues, count, "owned >= 0", ""))
}

// queuesOfSome returns all queues that have a due saga of a crashed owner, and up to limit other queues that have a due
// saga: the first ones, sorted by tenant, of the tenants after the given tenant.
func (s *tables) queuesOfSome(ctx context.Context, after string, limit int) ([]queue, error) {
	crashed := queuesFrom(s.d.queues, "0", "owned >= 1", "")
	others := queuesFrom(s.d.queues, "0", "owned = 0 AND turn > ?", " AND owned = 0 LIMIT {int}")
	return s.readQueues(ctx, union(union("", crashed, 0), others, 1), after, limit)
}

func queuesFrom(text, count, from, first string) string {
	return strings.NewReplacer("{count}", count, "{from}", from, "{first}", first).Replace(text)
}

func (s *tables) readQueues(ctx context.Context, text string, args ...any) ([]queue, error) {
	rows, err := s.db.QueryContext(ctx, s.sql(text), args...)
	return collect(rows, err, func(rows *sql.Rows) (q queue, err error) {
		return q, rows.Scan(&q.Saga, &q.Version, &q.owned, &q.tenant, &q.oldest, &q.count)
	})
}

func (s *tables) Counts(ctx context.Context) (counts store.Counts, err error) {
	// The statements read up to CountLimit entries of an index to count the sagas of one definition with one status, or
	// the due sagas of one queue.
	defer named("counts", &err)
	var now int64
	if err := s.db.QueryRowContext(ctx, s.sql("SELECT {now}")).Scan(&now); err != nil {
		return counts, err
	}
	counts.Now = sqldb.Moment(now)
	rows, err := s.db.QueryContext(ctx, s.sql(s.d.statuses))
	_, err = collect(rows, err, func(rows *sql.Rows) (_ bool, err error) {
		var name string
		var status store.Status
		var n int
		if err = rows.Scan(&name, &status, &n); err != nil {
			return false, err
		}
		if last := len(counts.Sagas) - 1; last < 0 || counts.Sagas[last].Saga != name {
			counts.Sagas = append(counts.Sagas, store.Count{Saga: name})
		}
		if field := counts.Sagas[len(counts.Sagas)-1].Of(status); field != nil {
			*field = n
		}
		return true, nil
	})
	if err != nil || len(counts.Sagas) == 0 {
		return counts, err
	}
	queues, err := s.queues(ctx, s.d.dueOf)
	for _, q := range queues {
		i, ok := slices.BinarySearchFunc(counts.Sagas, q.Saga, func(c store.Count, name string) int {
			return strings.Compare(c.Saga, name)
		})
		if !ok {
			continue // the definition's first saga was started after the first statement
		}
		c := &counts.Sagas[i]
		c.Due = min(c.Due+q.count, store.CountLimit)
		if oldest := sqldb.Moment(q.oldest); c.OldestDue.IsZero() || oldest.Before(c.OldestDue) {
			c.OldestDue = oldest
		}
	}
	return counts, err
}

// scan returns the record that a row contains, whose columns are {record}.
func scan(row interface{ Scan(...any) error }) (r store.Record, err error) {
	var wakeAt, completeBy, createdAt, updatedAt, now int64
	err = row.Scan(&r.ID, &r.Saga, &r.Version, &r.Status, &r.State, &r.Progress, &r.Parent, &r.ParentStep, &r.Tenant,
		&r.Seq, &r.Nonce, &r.Owner, &r.Epoch, &wakeAt, &completeBy, &r.Failures, &r.Takeovers, &r.LastError,
		&r.CancelRequested, &r.CancelNote, &createdAt, &updatedAt, &now)
	r.WakeAt, r.CompleteBy, r.CreatedAt, r.UpdatedAt, r.Now =
		sqldb.Moment(wakeAt), sqldb.Moment(completeBy), sqldb.Moment(createdAt), sqldb.Moment(updatedAt), sqldb.Moment(now)
	return r, err
}

// isText reports whether s can be the value of a text column. On PostgreSQL, a statement with another string as a
// parameter, for example an ID from a client, fails and aborts its transaction. A saga with such an ID cannot exist.
func isText(s string) bool { return utf8.ValidString(s) && !strings.Contains(s, "\x00") }

func scanID(rows *sql.Rows) (id string, err error) { return id, rows.Scan(&id) }

// collect returns the values of all rows. err is the error of the query; if it is not nil, collect returns it.
func collect[T any](rows *sql.Rows, err error, scan func(*sql.Rows) (T, error)) ([]T, error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var list []T
	for rows.Next() {
		v, err := scan(rows)
		if err != nil {
			return nil, err
		}
		list = append(list, v)
	}
	return list, rows.Err()
}

// orNull returns b, or SQL's NULL if b is nil.
func orNull(b []byte) any {
	if b == nil {
		return nil
	}
	return b
}

// nonNil returns b, or an empty slice if b is nil, because the column is NOT NULL.
func nonNil(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}
