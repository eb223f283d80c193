package sqlstore

import (
	"cmp"
	"context"
	"database/sql"
	"slices"
	"strings"
	"time"

	store "github.com/go-resilience/resilience/internal/sagastore"
)

// A queue is the due sagas of one version of a definition, either those that have an owner,
// which has crashed, or those that have none. The index saga_live has it in the order of
// wake_at.
type queue struct {
	One     int       `json:"one"` // 1; see postgresBatch
	Name    string    `json:"name"`
	Version int       `json:"version"`
	Owned   int       `json:"owned"`
	Count   int       `json:"-"` // up to CountLimit; 0 unless asked for
	Oldest  time.Time `json:"-"`
	Now     time.Time `json:"-"`
}

func (d *queue) definition() store.Definition {
	return store.Definition{Saga: d.Name, Version: d.Version}
}

// queues returns the queues that have a saga, in any order. It looks each up in the index.
func (s *Store) queues(ctx context.Context, counted bool) ([]queue, error) {
	count := "0"
	if counted {
		count = s.d.count("saga_live", s.d.live()+
			" AND name = d.name AND version = d.version AND owned = d.owned AND wake_at <= "+s.d.now(), "wake_at")
	}
	rows, err := s.db.QueryContext(ctx, s.tables.sql("SELECT d.name, d.version, d.owned, d.wake_at, "+s.d.now()+", "+count+
		" FROM ("+s.d.groups("saga_live", "name, version, owned", "wake_at", s.d.live())+") AS d WHERE d.wake_at <= "+s.d.now()))
	return collect(rows, err, func(rows *sql.Rows) (d queue, err error) {
		var oldest, now moment
		err = rows.Scan(&d.Name, &d.Version, &d.Owned, &oldest, &now, &d.Count)
		d.One, d.Oldest, d.Now = 1, oldest.Time, now.Time
		return d, err
	})
}

// atOnce is from how many queues one transaction of a claim takes sagas, at most: a dialect may
// need a statement for each.
const atOnce = 64

// due returns the queues that a claim takes sagas from: those of crashed owners first, then that
// whose first saga was due first.
func (s *Store) due(ctx context.Context, req store.ClaimRequest) ([]queue, error) {
	known := make(map[store.Definition]bool, len(req.Definitions))
	for _, d := range req.Definitions {
		known[d] = true
	}
	list, err := s.queues(ctx, false)
	list = slices.DeleteFunc(list, func(d queue) bool { return !known[d.definition()] })
	slices.SortFunc(list, func(a, b queue) int { return cmp.Or(b.Owned-a.Owned, a.Oldest.Compare(b.Oldest)) })
	return list, err
}

// Counts implements [store.Store]. It reads up to CountLimit index entries for each number.
func (s *Store) Counts(ctx context.Context) (store.Counts, error) {
	counts, err := s.counts(ctx)
	return counts, wrap("counts", err)
}

func (s *Store) counts(ctx context.Context) (counts store.Counts, err error) {
	var now moment
	if err := s.db.QueryRowContext(ctx, "SELECT "+s.d.now()).Scan(&now); err != nil {
		return counts, err
	}
	counts.Now = now.Time
	rows, err := s.db.QueryContext(ctx, s.tables.sql("SELECT g.name, g.status, "+
		s.d.count("saga_name", "name = g.name AND status = g.status", "created_at")+
		" FROM ("+s.d.groups("saga_name", "name, status", "created_at", "")+") AS g WHERE g.status NOT IN "+
		"('completed', 'compensated', 'abandoned') ORDER BY g.name"))
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
		if of := counts.Sagas[len(counts.Sagas)-1].Of(status); of != nil {
			*of = n
		}
		return true, nil
	})
	if err != nil || len(counts.Sagas) == 0 {
		return counts, err
	}
	queues, err := s.queues(ctx, true)
	for _, d := range queues {
		i, ok := slices.BinarySearchFunc(counts.Sagas, d.Name, func(c store.Count, name string) int { return strings.Compare(c.Saga, name) })
		if !ok {
			continue // it is new
		}
		c := &counts.Sagas[i]
		c.Due = min(c.Due+d.Count, store.CountLimit)
		if c.OldestDue.IsZero() || d.Oldest.Before(c.OldestDue) {
			c.OldestDue = d.Oldest
		}
	}
	return counts, err
}
