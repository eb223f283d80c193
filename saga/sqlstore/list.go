package sqlstore

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	store "github.com/go-resilience/resilience/internal/sagastore"
)

// A position is a place in a list.
type position struct {
	at time.Time // the saga's CreatedAt
	id string
}

// List implements [store.Store]. It is one statement, which merges index ranges: the sagas that
// have a status, of all definitions or of one.
func (s *Store) List(ctx context.Context, f store.Filter) ([]store.Record, string, error) {
	recs, next, err := s.list(ctx, f)
	return recs, next, wrap("list", err)
}

func (s *Store) list(ctx context.Context, f store.Filter) ([]store.Record, string, error) {
	limit := min(cmp.Or(max(f.Limit, 0), 100), math.MaxInt-1) // one more is read
	after, err := positionOf(f.After)
	if err != nil || !isText(f.Saga) || !isText(f.ID) { // there is no such saga
		return nil, "", err
	}
	index := "saga_time"
	if f.Saga != "" {
		index = "saga_name"
	}
	columns := s.d.columns()
	if f.WithoutState {
		columns = strings.Replace(columns, " data,", " '' AS data,", 1)
	}
	const order = " ORDER BY created_at DESC, id DESC"
	q := &query{d: s.d}
	for _, st := range []store.Status{
		store.Running, store.Compensating, store.Stuck, store.Completed, store.Compensated, store.Abandoned,
	} {
		if len(f.Status) > 0 && !slices.Contains(f.Status, st) {
			continue
		}
		if len(q.args) > 0 {
			q.text.WriteString(" UNION ALL ")
		}
		q.text.WriteString("SELECT * FROM (SELECT " + columns + " FROM " + s.d.from(index) + " WHERE 1 = 1")
		q.and("status = ", string(st))
		if f.Saga != "" {
			q.and("name = ", f.Saga)
		}
		if !f.CreatedBefore.IsZero() {
			q.and("created_at < ", s.d.time(f.CreatedBefore))
		}
		if f.ID != "" {
			q.and("id >= ", f.ID)
			q.and("id < ", f.ID+endOfPrefix)
		}
		if after != nil {
			q.before(*after)
		}
		q.text.WriteString(order + " LIMIT " + strconv.Itoa(limit+1) + ") AS a" + strconv.Itoa(len(q.args)))
	}
	if len(q.args) == 0 {
		return nil, "", nil
	}
	q.text.WriteString(order + " LIMIT " + strconv.Itoa(limit+1))
	rows, err := s.db.QueryContext(ctx, s.tables.sql(q.text.String()), q.args...)
	recs, err := collect(rows, err, func(rows *sql.Rows) (store.Record, error) { return scan(rows) })
	if err != nil || len(recs) <= limit {
		return recs, "", err
	}
	last := &recs[limit-1]
	return recs[:limit], strconv.FormatInt(last.CreatedAt.UnixMicro(), 10) + " " + last.ID, nil
}

// endOfPrefix behind a prefix is after all texts that begin with it: the last rune of Unicode.
const endOfPrefix = "\U0010FFFF"

// positionOf reads a Filter.After.
func positionOf(after string) (*position, error) {
	if after == "" {
		return nil, nil
	}
	micro, id, ok := strings.Cut(after, " ")
	at, err := strconv.ParseInt(micro, 10, 64)
	if !ok || err != nil {
		return nil, fmt.Errorf("Filter.After is %q: must be the Next of a page", after)
	}
	return &position{time.UnixMicro(at), id}, nil
}

// A query is a statement under construction.
type query struct {
	d    dialect
	text strings.Builder
	args []any
}

func (q *query) bind(v any) string {
	q.args = append(q.args, v)
	return q.d.bind(len(q.args))
}

func (q *query) and(condition string, v any) {
	q.text.WriteString(" AND " + condition + q.bind(v))
}

// before adds the condition that a row comes after a position in a list: it was started before.
func (q *query) before(p position) {
	at := q.d.time(p.at)
	if q.d.comparesRows() {
		q.and("(created_at, id) < (", at)
		q.text.WriteString(", " + q.bind(p.id) + ")")
		return
	}
	q.and("created_at <= ", at)
	q.and("(created_at < ", at)
	q.text.WriteString(" OR id < " + q.bind(p.id) + ")")
}
