// Package memory provides a store of sagas in the process's memory.
package memory

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	store "github.com/go-resilience/resilience/saga/sagastore"
)

// New returns an empty Store.
func New() *Store {
	return &Store{
		sagas: make(map[string]*kept), going: make(map[string]*kept), children: make(map[string]map[string]*kept),
	}
}

// A Store is a [store.Store] that does not survive the process.
type Store struct {
	mu       sync.Mutex
	sagas    map[string]*kept
	going    map[string]*kept            // the sagas that are running or compensating; Claim considers only these
	children map[string]map[string]*kept // the children by the ID of their parent and their own ID

	turnsBegun bool   // whether any Claim has returned a saga
	lastTurn   string // the tenant of the last saga that Claim has returned
}

type kept struct {
	store.Record
	log      []store.Entry
	messages []store.Message // sorted by name
	woken    bool            // whether the saga was woken since it was last claimed
	turn     int             // the number of the saga's turn; only used by inTurn
}

func (s *kept) definition() store.Definition {
	return store.Definition{Saga: s.Saga, Version: s.Version}
}

// do calls f with the store locked, unless ctx is done.
func (m *Store) do(ctx context.Context, f func(now time.Time) error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return f(time.Now())
}

// one calls f for a saga with the store locked, and returns the saga's record after the call.
func (m *Store) one(
	ctx context.Context, id string, f func(s *kept, now time.Time) error,
) (rec store.Record, err error) {
	err = m.do(ctx, func(now time.Time) error {
		s := m.sagas[id]
		if s == nil {
			return store.ErrNotFound
		}
		err := f(s, now)
		rec = s.read(now)
		return err
	})
	return rec, err
}

func (m *Store) Start(ctx context.Context, req store.StartRequest) (rec store.Record, created bool, err error) {
	err = m.do(ctx, func(now time.Time) error {
		if s := m.sagas[req.ID]; s != nil {
			rec = s.read(now)
			return nil
		}
		s := &kept{Record: store.Record{
			ID: req.ID, Saga: req.Saga, Version: req.Version, Status: req.Status,
			State: slices.Clone(req.State), Progress: slices.Clone(req.Progress),
			Parent: req.Parent, ParentStep: req.ParentStep, Tenant: req.Tenant, Nonce: req.Nonce,
			WakeAt: now, CreatedAt: now, UpdatedAt: now,
		}}
		if req.CompleteIn > 0 {
			s.CompleteBy = now.Add(req.CompleteIn)
		}
		if req.Owner != "" {
			s.Owner, s.Epoch, s.WakeAt = req.Owner, 1, now.Add(req.LeaseTTL)
		}
		s.append(req.Log, now)
		m.sagas[s.ID] = s
		m.index(s)
		if s.Parent != "" {
			if m.children[s.Parent] == nil {
				m.children[s.Parent] = make(map[string]*kept)
			}
			m.children[s.Parent][s.ID] = s
		}
		rec, created = s.read(now), true
		return nil
	})
	return rec, created, err
}

func (m *Store) Claim(ctx context.Context, req store.ClaimRequest) (claimed []store.Record, err error) {
	err = m.do(ctx, func(now time.Time) error {
		known := make(map[store.Definition]bool)
		for _, d := range req.Definitions {
			known[d] = true
		}
		var crashed, free []*kept
		for _, s := range m.going {
			switch {
			case s.WakeAt.After(now) || !known[s.definition()]:
			case s.Owner != "":
				crashed = append(crashed, s)
			default:
				free = append(free, s)
			}
		}
		limit := max(req.Limit, 0)
		due := m.inTurn(crashed, limit)
		due = append(due, m.inTurn(free, limit-len(due))...)
		for _, s := range due {
			previous := s.Owner
			if previous != "" && previous != req.Owner {
				s.Takeovers++
			}
			s.Epoch++
			s.Owner, s.WakeAt, s.woken = req.Owner, now.Add(req.LeaseTTL), false
			rec := s.read(now)
			rec.Previous = previous
			claimed = append(claimed, rec)
		}
		return nil
	})
	return claimed, err
}

// inTurn returns the first n of the due sagas in the order of their turns. The tenants take turns, and the definitions
// of each tenant also take turns. The turns start after the tenant that had the last turn. In the first claim, they
// start with the tenant whose saga has waited longest.
func (m *Store) inTurn(due []*kept, n int) []*kept {
	if n = min(n, len(due)); n == 0 {
		return nil
	}
	slices.SortFunc(due, func(a, b *kept) int {
		return cmp.Or(a.WakeAt.Compare(b.WakeAt), strings.Compare(a.ID, b.ID))
	})
	first := due[0].Tenant
	comesLater := func(tenant string) int {
		if m.turnsBegun && tenant <= m.lastTurn || !m.turnsBegun && tenant < first {
			return 1
		}
		return 0
	}
	type definition struct {
		store.Definition
		tenant string
	}
	giveTurns(due, func(s *kept) definition { return definition{s.definition(), s.Tenant} })
	slices.SortStableFunc(due, func(a, b *kept) int { return cmp.Compare(a.turn, b.turn) })
	giveTurns(due, func(s *kept) string { return s.Tenant })
	slices.SortFunc(due, func(a, b *kept) int {
		return cmp.Or(cmp.Compare(a.turn, b.turn), cmp.Compare(comesLater(a.Tenant), comesLater(b.Tenant)),
			strings.Compare(a.Tenant, b.Tenant))
	})
	m.turnsBegun, m.lastTurn = true, due[n-1].Tenant
	return due[:n]
}

// giveTurns sets the turn of each saga: it numbers the sagas that have the same key, in their order.
func giveTurns[K comparable](due []*kept, key func(*kept) K) {
	turns := make(map[K]int)
	for _, s := range due {
		k := key(s)
		s.turn = turns[k]
		turns[k]++
	}
}

func (m *Store) Heartbeat(ctx context.Context, req store.HeartbeatRequest) (renewed []store.Renewed, err error) {
	err = m.do(ctx, func(now time.Time) error {
		for _, h := range req.Held {
			if s := m.sagas[h.ID]; s != nil && s.Owner == req.Owner && s.Epoch == h.Epoch {
				s.WakeAt = now.Add(req.LeaseTTL)
				renewed = append(renewed, store.Renewed{
					ID: h.ID, Epoch: h.Epoch, CancelRequested: s.CancelRequested, CancelNote: s.CancelNote,
				})
			}
		}
		return nil
	})
	return renewed, err
}

func (m *Store) Commit(ctx context.Context, req store.CommitRequest) (rc store.Receipt, err error) {
	err = m.do(ctx, func(now time.Time) error {
		s := m.sagas[req.ID]
		if s == nil || s.Epoch != req.Epoch || s.Seq != req.Seq {
			return store.ErrFenced
		}
		s.Status, s.Progress = req.Status, slices.Clone(req.Progress)
		if req.State != nil {
			s.State = slices.Clone(req.State)
		}
		s.Version = cmp.Or(req.Version, s.Version)
		s.Failures, s.Takeovers, s.LastError = req.Failures, req.Takeovers, req.LastError
		s.Nonce, s.UpdatedAt = req.Nonce, now
		rc = store.Receipt{CancelRequested: s.CancelRequested, CancelNote: s.CancelNote}
		if req.Release {
			if s.woken && req.WakeIn > 0 {
				rc.Woken, req.WakeIn = true, 0
			}
			s.Owner, s.WakeAt = "", now.Add(req.WakeIn)
		}
		s.append(req.Log, now)
		m.index(s)
		return nil
	})
	return rc, err
}

func (m *Store) Load(ctx context.Context, id string) (store.Record, error) {
	return m.one(ctx, id, func(*kept, time.Time) error { return nil })
}

func (m *Store) List(ctx context.Context, f store.Filter) (recs []store.Record, next string, err error) {
	// Keys sort by descending time, and then by ascending id.
	key := func(s *kept) string { return fmt.Sprintf("%020d %s", math.MaxInt64-s.CreatedAt.UnixNano(), s.ID) }
	err = m.do(ctx, func(now time.Time) error {
		found := make(map[string]*kept)
		for _, s := range m.sagas {
			if k := key(s); k > f.After && admits(&f, &s.Record) {
				found[k] = s
			}
		}
		keys := slices.Sorted(maps.Keys(found))
		if limit := cmp.Or(max(f.Limit, 0), 100); len(keys) > limit {
			keys = keys[:limit]
			next = keys[limit-1]
		}
		for _, k := range keys {
			rec := found[k].read(now)
			if f.WithoutState {
				rec.State = nil
			}
			recs = append(recs, rec)
		}
		return nil
	})
	return recs, next, err
}

// admits reports whether a record meets all conditions of the filter.
func admits(f *store.Filter, r *store.Record) bool {
	return (f.Saga == "" || r.Saga == f.Saga) &&
		(len(f.Status) == 0 || slices.Contains(f.Status, r.Status)) &&
		strings.HasPrefix(r.ID, f.ID) &&
		(f.CreatedBefore.IsZero() || r.CreatedAt.Before(f.CreatedBefore))
}

func (m *Store) Counts(ctx context.Context) (counts store.Counts, err error) {
	err = m.do(ctx, func(now time.Time) error {
		found := make(map[string]*store.Count)
		for _, s := range m.sagas {
			if s.Status.Ended() {
				continue
			}
			c := found[s.Saga]
			if c == nil {
				c = &store.Count{Saga: s.Saga}
				found[s.Saga] = c
			}
			n := c.Of(s.Status)
			*n = min(*n+1, store.CountLimit)
			if s.Status != store.Stuck && !s.WakeAt.After(now) {
				c.Due = min(c.Due+1, store.CountLimit)
				if c.OldestDue.IsZero() || s.WakeAt.Before(c.OldestDue) {
					c.OldestDue = s.WakeAt
				}
			}
		}
		counts.Now = now
		for _, name := range slices.Sorted(maps.Keys(found)) {
			counts.Sagas = append(counts.Sagas, *found[name])
		}
		return nil
	})
	return counts, err
}

func (m *Store) History(ctx context.Context, id string, after int64, limit int) (log []store.Entry, err error) {
	err = m.do(ctx, func(time.Time) error {
		if s := m.sagas[id]; s != nil {
			log = s.log[min(max(after, 0), int64(len(s.log))):]
			if limit > 0 {
				log = log[:min(limit, len(log))]
			}
			log = slices.Clone(log)
		}
		return nil
	})
	return log, err
}

func (m *Store) DeleteEnded(ctx context.Context, status store.Status, age time.Duration, limit int) (n int, err error) {
	if age < 0 || limit < 0 {
		return 0, fmt.Errorf("saga: delete: age is %v and limit %d: must not be negative", age, limit)
	}
	err = m.do(ctx, func(now time.Time) error {
		var old []*kept
		for _, s := range m.sagas {
			if s.Status == status && s.Status.Ended() && s.Parent == "" && !s.WakeAt.After(now.Add(-age)) {
				old = append(old, s)
			}
		}
		slices.SortFunc(old, func(a, b *kept) int { return a.WakeAt.Compare(b.WakeAt) })
		generations := [][]*kept{old[:min(limit, len(old))]}
		for last := generations[0]; len(last) > 0; generations = append(generations, last) {
			last = m.endedChildren(last, limit)
		}
		for _, generation := range slices.Backward(generations) {
			if n >= limit {
				return nil // a later call continues with the parents
			}
			for _, s := range generation {
				m.delete(s)
			}
			n += len(generation)
		}
		return nil
	})
	return n, err
}

// endedChildren returns up to limit children of the parents. It returns only children that have ended.
func (m *Store) endedChildren(parents []*kept, limit int) (ended []*kept) {
	for _, parent := range parents {
		for _, s := range m.children[parent.ID] {
			if s.Status.Ended() && len(ended) < limit {
				ended = append(ended, s)
			}
		}
	}
	return ended
}

// delete deletes a saga. Its remaining children then have no parent.
func (m *Store) delete(s *kept) {
	delete(m.sagas, s.ID)
	delete(m.children[s.Parent], s.ID)
	for _, child := range m.children[s.ID] {
		child.Parent, child.ParentStep = "", ""
	}
	delete(m.children, s.ID)
}

func (m *Store) Children(ctx context.Context, req store.ChildrenRequest) (list []store.ChildRecord, err error) {
	err = m.do(ctx, func(time.Time) error {
		for _, s := range m.children[req.Parent] {
			if s.ParentStep != req.Step || len(req.Status) > 0 && !slices.Contains(req.Status, s.Status) {
				continue
			}
			list = append(list, store.ChildRecord{ID: s.ID, Status: s.Status, CancelRequested: s.CancelRequested})
			if len(list) == req.Limit {
				break
			}
		}
		return nil
	})
	return list, err
}

func (m *Store) Post(ctx context.Context, req store.PostRequest) (store.Record, error) {
	rec, err := m.one(ctx, req.ID, func(s *kept, now time.Time) error {
		switch {
		case req.Cancel:
			if s.Status == store.Running && !s.CancelRequested {
				s.CancelRequested, s.CancelNote, s.UpdatedAt = true, string(req.Payload), now
				s.wake(now)
			}
			return nil
		case req.Name == "":
			if m.going[req.ID] != nil {
				s.wake(now)
			}
			return nil
		}
		if s.Status == store.Running {
			s.wake(now)
		}
		byName := func(sig store.Message, name string) int { return strings.Compare(sig.Name, name) }
		at, known := slices.BinarySearchFunc(s.messages, req.Name, byName)
		if known {
			return nil
		}
		if req.Admit != nil {
			rec := s.read(now)
			if err := req.Admit(&rec); err != nil {
				return err
			}
		}
		s.messages = slices.Insert(s.messages, at, store.Message{Name: req.Name, Payload: slices.Clone(req.Payload)})
		return nil
	})
	if err == store.ErrNotFound && req.Name == "" && !req.Cancel {
		err = nil
	}
	return rec, err
}

func (m *Store) Messages(ctx context.Context, id string) (list []store.Message, err error) {
	err = m.do(ctx, func(time.Time) error {
		if s := m.sagas[id]; s != nil {
			list = slices.Clone(s.messages)
		}
		return nil
	})
	return list, err
}

// index updates the map going after a change of the saga's status.
func (m *Store) index(s *kept) {
	if s.Status == store.Running || s.Status == store.Compensating {
		m.going[s.ID] = s
	} else {
		delete(m.going, s.ID)
	}
}

// wake makes the saga due. If the saga has an owner, it becomes due when the owner releases it.
func (s *kept) wake(now time.Time) {
	s.woken = true
	if s.Owner == "" && s.WakeAt.After(now) {
		s.WakeAt = now
	}
}

func (s *kept) append(log []store.Entry, now time.Time) {
	for _, e := range log {
		s.Seq++
		e.Seq, e.Epoch, e.At = s.Seq, s.Epoch, now
		s.log = append(s.log, e)
	}
}

// read returns a copy of the record.
func (s *kept) read(now time.Time) store.Record {
	rec := s.Record
	rec.State, rec.Progress, rec.Now = slices.Clone(rec.State), slices.Clone(rec.Progress), now
	return rec
}
