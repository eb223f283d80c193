package sqlstore

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-resilience/resilience/saga/store"
)

// readLimit is how many sagas List reads for a page at most, if the filter has conditions
// that no index has.
const readLimit = 2_000

// maxArms is the number of index ranges that one statement merges.
const maxArms = 48

// A listing is one call of List. It reads index ranges, which it calls arms: the sagas of a
// definition that have a status, in the order of the filter. An arm without a definition is
// the whole table by id.
type listing struct {
	s     *Store
	f     store.Filter
	limit int
	after *position // exclusive
	until *position // inclusive; nil if everything is read
}

type arm struct {
	name   string
	status store.Status
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
	l := &listing{s: s, f: f, limit: cmp.Or(max(f.Limit, 0), 100)}
	if err := l.begin(); err != nil {
		return nil, "", err
	}
	arms, err := l.arms(ctx)
	if err != nil {
		return nil, "", err
	}
	chunks := slices.Collect(slices.Chunk(arms, maxArms))
	if l.filters() {
		for _, chunk := range chunks {
			if err := l.bound(ctx, chunk); err != nil {
				return nil, "", err
			}
		}
	}
	var recs []store.Record
	for _, chunk := range chunks {
		found, err := l.read(ctx, chunk)
		if err != nil {
			return nil, "", err
		}
		recs = append(recs, found...)
	}
	slices.SortFunc(recs, func(a, b store.Record) int { return l.compare(l.positionOf(&a), l.positionOf(&b)) })
	if len(recs) > l.limit {
		recs = recs[:l.limit]
		return recs, l.cursor(l.positionOf(&recs[l.limit-1])), nil
	}
	if l.until != nil {
		return recs, l.cursor(*l.until), nil
	}
	return recs, "", nil
}

// begin checks the order, and reads the cursor.
func (l *listing) begin() error {
	switch l.f.Order {
	case "":
		l.f.Order = store.ByID
	case store.ByID, store.OldestFirst, store.NewestFirst:
	default:
		return fmt.Errorf("Filter.Order is %q: must be %q, %q or %q", l.f.Order, store.ByID, store.OldestFirst, store.NewestFirst)
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

func (l *listing) compare(a, b position) int {
	c := cmp.Or(a.at.Compare(b.at), strings.Compare(a.id, b.id))
	if l.f.Order == store.NewestFirst {
		return -c
	}
	return c
}

// filters reports whether the filter has conditions that no index has.
func (l *listing) filters() bool {
	f := &l.f
	return f.Text != "" || f.Failing || f.Unreported || !f.CreatedBefore.IsZero() && !l.byTime()
}

func (l *listing) arms(ctx context.Context) ([]arm, error) {
	f := &l.f
	if f.Saga == "" && len(f.Status) == 0 && !f.Failing && !l.byTime() {
		return []arm{{}}, nil
	}
	status := []store.Status{store.Running, store.Compensating, store.Stuck, store.Completed, store.Compensated, store.Abandoned}
	status = slices.DeleteFunc(status, func(st store.Status) bool {
		return len(f.Status) > 0 && !slices.Contains(f.Status, st) || f.Failing && st != store.Running && st != store.Compensating
	})
	names := []string{f.Saga}
	if f.Saga == "" {
		var err error
		if names, err = l.s.names(ctx); err != nil {
			return nil, err
		}
	}
	var arms []arm
	for _, name := range names {
		for _, st := range status {
			arms = append(arms, arm{name, st})
		}
	}
	return arms, nil
}

// names returns the names of all definitions that have sagas.
func (s *Store) names(ctx context.Context) ([]string, error) {
	rows, err := s.db.QueryContext(ctx, s.tables.sql("SELECT name FROM ("+s.d.groups("saga_name", "name", "status", "")+") AS g"))
	return collect(rows, err, func(rows *sql.Rows) (name string, err error) { return name, rows.Scan(&name) })
}

// bound sets until to the place at which readLimit sagas are read, if there are as many
// and it is not set to an earlier place.
func (l *listing) bound(ctx context.Context, arms []arm) error {
	columns := "id"
	if l.byTime() {
		columns = "created_at, id"
	}
	q := &query{d: l.s.d}
	q.text.WriteString("SELECT " + columns + " FROM (")
	l.merge(q, arms, func(a arm) {
		q.text.WriteString("SELECT " + columns + " FROM {p}saga")
		l.in(q, a)
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
	if p.at = at.Time; err == nil && (l.until == nil || l.compare(p, *l.until) < 0) {
		l.until = &p
	}
	return err
}

// read returns the first sagas that the filter admits, up to one more than the limit.
func (l *listing) read(ctx context.Context, arms []arm) ([]store.Record, error) {
	columns := l.s.d.columns()
	if l.f.WithoutState {
		columns = strings.Replace(columns, " data,", " '' AS data,", 1)
	}
	limit := " LIMIT " + strconv.Itoa(l.limit+1)
	q := &query{d: l.s.d}
	l.merge(q, arms, func(a arm) {
		if !l.filters() {
			q.text.WriteString("SELECT " + columns + " FROM {p}saga")
			l.in(q, a)
			q.text.WriteString(l.order() + limit)
			return
		}
		// The inner limit keeps planners from reading the sagas in another order.
		q.text.WriteString("SELECT " + columns + " FROM (SELECT * FROM {p}saga")
		l.in(q, a)
		q.text.WriteString(l.order() + " LIMIT " + strconv.Itoa(readLimit) + ") AS r WHERE 1 = 1")
		l.filter(q)
		q.text.WriteString(l.order() + limit)
	})
	if len(arms) > 1 {
		q.text.WriteString(l.order() + limit)
	}
	rows, err := l.s.db.QueryContext(ctx, l.s.tables.sql(q.text.String()), q.args...)
	return collect(rows, err, func(rows *sql.Rows) (store.Record, error) { return scan(rows) })
}

// merge writes a statement for each arm, and combines them.
func (l *listing) merge(q *query, arms []arm, one func(arm)) {
	for i, a := range arms {
		if i > 0 {
			q.text.WriteString(" UNION ALL ")
		}
		if len(arms) > 1 {
			q.text.WriteString("SELECT * FROM (")
		}
		one(a)
		if len(arms) > 1 {
			q.text.WriteString(") AS a" + strconv.Itoa(i))
		}
	}
}

func (l *listing) order() string {
	switch l.f.Order {
	case store.OldestFirst:
		return " ORDER BY created_at, id"
	case store.NewestFirst:
		return " ORDER BY created_at DESC, id DESC"
	}
	return " ORDER BY id"
}

// in writes the conditions that the index of an arm has.
func (l *listing) in(q *query, a arm) {
	q.text.WriteString(" WHERE 1 = 1")
	if a.name != "" {
		q.and("name = ", a.name)
		q.and("status = ", string(a.status))
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
	if !l.byTime() && !f.CreatedBefore.IsZero() {
		q.and("created_at < ", q.d.time(f.CreatedBefore))
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
