package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-resilience/resilience/saga"
)

// Counts implements [saga.Store]. It reads up to CountLimit index entries for each number.
func (s *Store) Counts(ctx context.Context) (saga.Counts, error) {
	counts, err := s.counts(ctx)
	return counts, wrap("counts", err)
}

func (s *Store) counts(ctx context.Context) (saga.Counts, error) {
	var counts saga.Counts
	names, err := s.names(ctx)
	if err != nil {
		return counts, err
	}
	// The order keeps planners from reading the table instead of an index.
	number := func(where, order string) string {
		return "(SELECT count(*) FROM (SELECT 1 FROM {p}saga WHERE " + where + " ORDER BY " + order + " LIMIT " + strconv.Itoa(saga.CountLimit) + ") AS c)"
	}
	byStatus := "SELECT " + s.d.now()
	for i := range 6 {
		byStatus += ", " + number("name = "+s.d.bind(2*i+1)+" AND status = "+s.d.bind(2*i+2), "id")
	}
	byStatus = s.tables.sql(byStatus)
	for _, name := range names {
		c := saga.Count{Saga: name}
		var now moment
		var args []any
		for _, status := range []saga.Status{saga.Running, saga.Compensating, saga.Stuck, saga.Completed, saga.Compensated, saga.Abandoned} {
			args = append(args, name, string(status))
		}
		if err := s.db.QueryRowContext(ctx, byStatus, args...).
			Scan(&now, &c.Running, &c.Compensating, &c.Stuck, &c.Completed, &c.Compensated, &c.Abandoned); err != nil {
			return counts, err
		}
		counts.Now = now.Time
		counts.Sagas = append(counts.Sagas, c)
	}
	if len(names) == 0 {
		var now moment
		err := s.db.QueryRowContext(ctx, "SELECT "+s.d.now()).Scan(&now)
		counts.Now = now.Time
		return counts, err
	}
	// The index has the due sagas of each version, with an owner and without, in order.
	live := func(owner string, first int) string {
		return s.d.live() + " AND name = " + s.d.bind(first) + " AND version = " + s.d.bind(first+1) +
			" AND owner " + owner + " AND wake_at <= " + s.d.now()
	}
	due := s.tables.sql("SELECT " + number(live("= ''", 1), "wake_at") + ", " + number(live("> ''", 3), "owner, wake_at") +
		", (SELECT min(wake_at) FROM {p}saga WHERE " + live("= ''", 5) + "), (SELECT min(wake_at) FROM {p}saga WHERE " + live("> ''", 7) + ")")
	err = s.definitions(ctx, func(d saga.Definition) error {
		i, ok := slices.BinarySearchFunc(counts.Sagas, d.Saga, func(c saga.Count, name string) int { return strings.Compare(c.Saga, name) })
		if !ok {
			return nil // it is new
		}
		c := &counts.Sagas[i]
		var waiting, crashed int
		var first, crash moment
		if err := s.db.QueryRowContext(ctx, due, d.Saga, d.Version, d.Saga, d.Version, d.Saga, d.Version, d.Saga, d.Version).
			Scan(&waiting, &crashed, &first, &crash); err != nil {
			return err
		}
		c.Due = min(c.Due+waiting+crashed, saga.CountLimit)
		for _, at := range []time.Time{first.Time, crash.Time} {
			if !at.IsZero() && (c.OldestDue.IsZero() || at.Before(c.OldestDue)) {
				c.OldestDue = at
			}
		}
		return nil
	})
	return counts, err
}

// definitions calls fn for each version of each definition that has live sagas.
func (s *Store) definitions(ctx context.Context, fn func(saga.Definition) error) error {
	next := "SELECT name, version FROM {p}saga WHERE " + s.d.live()
	if s.d.comparesRows() {
		next += " AND (name, version) > (" + s.d.bind(1) + ", " + s.d.bind(2) + ")"
	} else {
		next += " AND name >= " + s.d.bind(1) + " AND (version > " + s.d.bind(2) + " OR name > " + s.d.bind(3) + ")"
	}
	next = s.tables.sql(next + " ORDER BY name, version LIMIT 1")
	for d := (saga.Definition{Version: -1}); ; {
		args := []any{d.Saga, d.Version, d.Saga}
		if s.d.comparesRows() {
			args = args[:2]
		}
		err := s.db.QueryRowContext(ctx, next, args...).Scan(&d.Saga, &d.Version)
		if errors.Is(err, sql.ErrNoRows) {
			return nil
		}
		if err == nil {
			err = fn(d)
		}
		if err != nil {
			return err
		}
	}
}

// Unregistered implements [saga.Store].
func (s *Store) Unregistered(ctx context.Context, registered []saga.Definition) ([]saga.Unregistered, error) {
	count := s.tables.sql("SELECT count(*), min(wake_at), " + s.d.now() + " FROM {p}saga WHERE " + s.d.live() +
		" AND name = " + s.d.bind(1) + " AND version = " + s.d.bind(2) + " AND wake_at <= " + s.d.now())
	var found []saga.Unregistered
	err := s.definitions(ctx, func(d saga.Definition) error {
		if slices.Contains(registered, d) {
			return nil
		}
		var oldest, now moment
		u := saga.Unregistered{Definition: d}
		if err := s.db.QueryRowContext(ctx, count, d.Saga, d.Version).Scan(&u.Count, &oldest, &now); err != nil {
			return err
		}
		if u.Oldest, u.Now = oldest.Time, now.Time; u.Count > 0 {
			found = append(found, u)
		}
		return nil
	})
	return found, wrap("unregistered", err)
}
