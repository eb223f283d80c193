package sqlstore

import (
	"cmp"
	"context"
	"database/sql"
	"math"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/go-resilience/resilience/saga/store"
)

// A queue is the due sagas of one version of a definition, either those that have an owner,
// which has crashed, or those that have none. The index saga_live has it in the order of
// wake_at.
type queue struct {
	One     int       `json:"one"` // 1; see postgresBatch
	Name    string    `json:"name"`
	Version int       `json:"version"`
	Owned   int       `json:"owned"`
	Most    int       `json:"most"` // sagas that a round of a claim takes
	Took    int       `json:"-"`    // sagas of the definition that a claim has taken
	Left    int       `json:"-"`    // sagas of it that the claim may still take
	Count   int       `json:"-"`    // up to CountLimit; 0 unless asked for
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

// due returns the queues that a claim takes sagas from, in the order of their turns, and of
// each definition that of crashed owners first.
func (s *Store) due(ctx context.Context, req store.ClaimRequest) ([]queue, error) {
	known := make(map[store.Definition]int, len(req.Definitions))
	for i, d := range req.Definitions {
		known[d] = i + 1
	}
	list, err := s.queues(ctx, false)
	list = slices.DeleteFunc(list, func(d queue) bool { return known[d.definition()] == 0 })
	slices.SortFunc(list, func(a, b queue) int {
		return cmp.Or(known[a.definition()]-known[b.definition()], b.Owned-a.Owned)
	})
	for i, d := range list {
		list[i].Left = req.Limit
		if most, ok := req.Limits[d.definition()]; ok {
			list[i].Left = min(most, req.Limit)
		}
	}
	return list, err
}

// roundOf is from how many queues one round of a claim takes sagas, at most: a dialect may
// need a statement for each.
const roundOf = 8

// takeTurns returns the queues of the next round of a claim of up to limit sagas, one for
// each definition. With Most of each, all definitions have an equal part of the claim, rounded
// up, or what they have in earlier rounds if that is more, or all of Left if that is less; then
// the parts of the others are larger.
func takeTurns(queues []queue, limit int) (turn []queue) {
	turn = slices.CompactFunc(slices.Clone(queues), func(a, b queue) bool { return a.definition() == b.definition() })
	turn = turn[:min(len(turn), roundOf)]
	most := func(d *queue, part int) int { return min(d.Left, max(part-d.Took, 0)) }
	part := sort.Search(math.MaxInt32, func(part int) bool {
		sum := 0
		for i := range turn {
			sum += most(&turn[i], part)
		}
		return sum >= limit
	})
	for i := range turn {
		turn[i].Most = most(&turn[i], part)
	}
	return slices.DeleteFunc(turn, func(d queue) bool { return d.Most == 0 })
}

// stillFull returns the queues without those of a round that had fewer than Most sagas, and
// those of definitions that have nothing Left.
func stillFull(queues, turn []queue, claimed []store.Record) []queue {
	type key struct {
		store.Definition
		owned bool
	}
	lacks, took := make(map[key]int), make(map[store.Definition]int)
	for _, d := range turn {
		lacks[key{d.definition(), d.Owned == 1}] = d.Most
	}
	for _, rec := range claimed {
		d := store.Definition{Saga: rec.Saga, Version: rec.Version}
		lacks[key{d, rec.Previous != ""}]--
		took[d]++
	}
	for i := range queues {
		d := &queues[i]
		d.Took, d.Left = d.Took+took[d.definition()], d.Left-took[d.definition()]
	}
	return slices.DeleteFunc(queues, func(d queue) bool {
		return d.Left == 0 || lacks[key{d.definition(), d.Owned == 1}] > 0
	})
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
		" FROM ("+s.d.groups("saga_name", "name, status", "created_at", "")+") AS g ORDER BY g.name"))
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

// Unregistered implements [store.Store].
func (s *Store) Unregistered(ctx context.Context, registered []store.Definition) ([]store.Unregistered, error) {
	list, err := s.queues(ctx, true)
	slices.SortFunc(list, func(a, b queue) int { return cmp.Or(strings.Compare(a.Name, b.Name), a.Version-b.Version) })
	var found []store.Unregistered
	for _, d := range list {
		if slices.Contains(registered, d.definition()) {
			continue
		}
		if last := len(found) - 1; last >= 0 && found[last].Definition == d.definition() {
			u := &found[last] // with an owner, and without one
			u.Count = min(u.Count+d.Count, store.CountLimit)
			if d.Oldest.Before(u.Oldest) {
				u.Oldest = d.Oldest
			}
			continue
		}
		found = append(found, store.Unregistered{Definition: d.definition(), Count: d.Count, Oldest: d.Oldest, Now: d.Now})
	}
	return found, wrap("unregistered", err)
}
