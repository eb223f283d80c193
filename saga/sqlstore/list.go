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

	"github.com/go-resilience/resilience/saga/store"
)

// readLimit is how many sagas List reads for a page, if the filter has conditions that no
// index has.
const readLimit = 2_000

// A listing is one call of List. By the time of the start it merges index ranges: the sagas
// that have a status, of all definitions or of one. By id there is one range, the table.
type listing struct {
	s      *Store
	f      store.Filter
	limit  int
	index  string         // "" is the primary key
	status []store.Status // of the ranges
	after  *position      // exclusive
	until  *position      // inclusive; nil if everything is read
}

// A position is a place in the order of a list.
type position struct {
	at time.Time // the saga's CreatedAt; zero if the order is by id
	id string
}

// List implements [store.Store]. Each page is one statement or, if the filter has
// conditions that no index has, two: the first finds the end of what the second reads.
func (s *Store) List(ctx context.Context, f store.Filter) ([]store.Record, string, error) {
	recs, next, err := s.list(ctx, f)
	return recs, next, wrap("list", err)
}

func (s *Store) list(ctx context.Context, f store.Filter) ([]store.Record, string, error) {
	l := &listing{s: s, f: f, limit: min(cmp.Or(max(f.Limit, 0), 100), math.MaxInt-1)} // one more is read
	if err := l.begin(); err != nil {
		return nil, "", err
	}
	if len(l.status) == 0 {
		return nil, "", nil
	}
	if l.filters() {
		if err := l.bound(ctx); err != nil {
			return nil, "", err
		}
	}
	recs, err := l.read(ctx)
	if err != nil {
		return nil, "", err
	}
	if len(recs) > l.limit {
		recs = recs[:l.limit]
		return recs, l.cursor(l.positionOf(&recs[l.limit-1])), nil
	}
	if l.until != nil {
		return recs, l.cursor(*l.until), nil
	}
	return recs, "", nil
}

// begin checks the order, finds the ranges, and reads the cursor.
func (l *listing) begin() error {
	f := &l.f
	switch f.Order {
	case "", store.ByID, store.OldestFirst, store.NewestFirst:
	default:
		return fmt.Errorf("Filter.Order is %q: must be %q, %q or %q", f.Order, store.ByID, store.OldestFirst, store.NewestFirst)
	}
	if !isText(f.Saga) || !isText(f.Text) {
		return nil // there is no such saga, so no range
	}
	status := []store.Status{store.Running, store.Compensating, store.Stuck, store.Completed, store.Compensated, store.Abandoned}
	l.status = slices.DeleteFunc(status, func(st store.Status) bool {
		return len(f.Status) > 0 && !slices.Contains(f.Status, st) || f.Failing && st != store.Running && st != store.Compensating
	})
	switch {
	case l.byTime() && f.Saga != "":
		l.index = "saga_name"
	case l.byTime():
		l.index = "saga_time"
	}
	if l.f.After == "" {
		return nil
	}
	if !l.byTime() {
		l.after = &position{id: l.f.After}
		return nil
	}
	micro, id, ok := strings.Cut(l.f.After, " ")
	at, err := strconv.ParseInt(micro, 10, 64)
	if !ok || err != nil {
		return fmt.Errorf("Filter.After is %q: must be the Next of a page in the same order", l.f.After)
	}
	l.after = &position{time.UnixMicro(at), id}
	return nil
}

func (l *listing) byTime() bool { return l.f.Order != store.ByID }

func (l *listing) cursor(p position) string {
	if l.byTime() {
		return strconv.FormatInt(p.at.UnixMicro(), 10) + " " + p.id
	}
	return p.id
}

func (l *listing) positionOf(r *store.Record) position {
	if l.byTime() {
		return position{r.CreatedAt, r.ID}
	}
	return position{id: r.ID}
}

// filters reports whether the filter has conditions that no index has.
func (l *listing) filters() bool {
	f := &l.f
	some := f.Saga != "" || len(f.Status) > 0 || !f.CreatedBefore.IsZero()
	return f.Text != "" || f.Failing || f.Unreported || some && !l.byTime()
}

// bound sets until to the place at which readLimit sagas are read, if there are as many.
func (l *listing) bound(ctx context.Context) error {
	columns := "id"
	if l.byTime() {
		columns = "created_at, id"
	}
	q := &query{d: l.s.d}
	q.text.WriteString("SELECT " + columns + " FROM (")
	l.merge(q, func(st store.Status) {
		q.text.WriteString("SELECT " + columns + " FROM " + l.s.d.from(l.index))
		l.in(q, st)
		q.text.WriteString(l.order() + " LIMIT " + strconv.Itoa(readLimit))
	})
	q.text.WriteString(") AS c" + l.order() + " LIMIT 1 OFFSET " + strconv.Itoa(readLimit-1))
	var p position
	var at moment
	into := []any{&at, &p.id}
	if !l.byTime() {
		into = into[1:]
	}
	err := l.s.db.QueryRowContext(ctx, l.s.tables.sql(q.text.String()), q.args...).Scan(into...)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	p.at = at.Time
	l.until = &p
	return err
}

// read returns the first sagas that the filter admits, up to one more than the limit.
func (l *listing) read(ctx context.Context) ([]store.Record, error) {
	columns := l.s.d.columns()
	if l.f.WithoutState {
		columns = strings.Replace(columns, " data,", " '' AS data,", 1)
	}
	limit := " LIMIT " + strconv.Itoa(l.limit+1)
	q := &query{d: l.s.d}
	l.merge(q, func(st store.Status) {
		if !l.filters() {
			q.text.WriteString("SELECT " + columns + " FROM " + l.s.d.from(l.index))
			l.in(q, st)
			q.text.WriteString(l.order() + limit)
			return
		}
		// The inner limit keeps planners from reading the sagas in another order. It has
		// room for sagas that come between the two statements: otherwise each would push
		// another out of this page, and no other page has that one.
		q.text.WriteString("SELECT " + columns + " FROM (SELECT * FROM " + l.s.d.from(l.index))
		l.in(q, st)
		q.text.WriteString(l.order() + " LIMIT " + strconv.Itoa(2*readLimit) + ") AS r WHERE 1 = 1")
		l.filter(q)
		q.text.WriteString(l.order() + limit)
	})
	q.text.WriteString(l.order() + limit)
	rows, err := l.s.db.QueryContext(ctx, l.s.tables.sql(q.text.String()), q.args...)
	return collect(rows, err, func(rows *sql.Rows) (store.Record, error) { return scan(rows) })
}

// merge writes a statement for each range, and combines them.
func (l *listing) merge(q *query, one func(store.Status)) {
	ranges := l.status
	if !l.byTime() {
		ranges = ranges[:1]
	}
	for i, st := range ranges {
		if i > 0 {
			q.text.WriteString(" UNION ALL ")
		}
		q.text.WriteString("SELECT * FROM (")
		one(st)
		q.text.WriteString(") AS a" + strconv.Itoa(i))
	}
}

func (l *listing) order() string {
	switch l.f.Order {
	case store.ByID:
		return " ORDER BY id"
	case store.NewestFirst:
		return " ORDER BY created_at DESC, id DESC"
	}
	return " ORDER BY created_at, id"
}

// in writes the conditions that the index has.
func (l *listing) in(q *query, st store.Status) {
	q.text.WriteString(" WHERE 1 = 1")
	if l.byTime() {
		q.and("status = ", string(st))
		if l.f.Saga != "" {
			q.and("name = ", l.f.Saga)
		}
	}
	gt, lt := ">", "<"
	if l.f.Order == store.NewestFirst {
		gt, lt = lt, gt
	}
	if l.after == nil && !l.byTime() {
		q.text.WriteString(" AND id > ''")
	}
	for _, end := range []struct {
		*position
		op, id string
	}{{l.after, gt, gt}, {l.until, lt, lt + "="}} {
		switch {
		case end.position == nil:
		case l.byTime():
			at, id := l.s.d.time(end.at), end.position.id
			if l.s.d.comparesRows() {
				q.and("(created_at, id) "+end.id+" (", at)
				q.text.WriteString(", " + q.bind(id) + ")")
				continue
			}
			q.and("created_at "+end.op+"= ", at)
			q.and("(created_at "+end.op+" ", at)
			q.text.WriteString(" OR id " + end.id + " " + q.bind(id) + ")")
		default:
			q.and("id "+end.id+" ", end.position.id)
		}
	}
	if before := l.f.CreatedBefore; l.byTime() && !before.IsZero() {
		q.and("created_at < ", q.d.time(before))
	}
}

// filter writes the conditions that no index has.
func (l *listing) filter(q *query) {
	f := &l.f
	if f.Text != "" {
		q.text.WriteString(" AND (" + q.d.contains("id", q.bind(f.Text)))
		if !f.TextInID {
			q.text.WriteString(" OR " + q.d.contains("last_error", q.bind(f.Text)))
		}
		q.text.WriteString(")")
	}
	if f.Failing {
		q.text.WriteString(" AND failures > 0")
	}
	if f.Unreported {
		q.text.WriteString(" AND NOT reported")
	}
	if !l.byTime() {
		if !f.CreatedBefore.IsZero() {
			q.and("created_at < ", q.d.time(f.CreatedBefore))
		}
		if f.Saga != "" {
			q.and("name = ", f.Saga)
		}
		var among []string
		for _, st := range l.status {
			among = append(among, q.bind(string(st)))
		}
		q.text.WriteString(" AND status IN (" + strings.Join(among, ", ") + ")")
	}
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
