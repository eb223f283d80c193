// Package memory keeps sagas in the process.
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

	store "github.com/go-resilience/resilience/internal/sagastore"
)

// New returns an empty Store.
func New() *Store { return &Store{sagas: make(map[string]*kept)} }

// A Store is a [store.Store] without durability.
type Store struct {
	mu    sync.Mutex
	sagas map[string]*kept
	due   map[store.Definition]map[string]*kept // running and compensating
	kids  map[family]map[string]*kept
}

// A family is the children of a step.
type family struct{ parent, step string }

type kept struct {
	store.Record
	log     []store.Entry
	signals []store.Signal // by name
	woken   bool           // since it was claimed
}

// Start implements [store.Store].
func (m *Store) Start(ctx context.Context, req store.StartRequest) (store.Record, bool, error) {
	if ctx.Err() != nil {
		return store.Record{}, false, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if s, ok := m.sagas[req.ID]; ok {
		return s.read(), false, nil
	}
	now := time.Now()
	s := &kept{Record: store.Record{
		ID: req.ID, Saga: req.Saga, Version: req.Version, Status: req.Status,
		Data: slices.Clone(req.Data), Steps: slices.Clone(req.Steps), Parent: req.Parent, ParentStep: req.ParentStep, Nonce: req.Nonce,
		WakeAt: now, CreatedAt: now, UpdatedAt: now,
	}}
	if req.CompleteIn > 0 {
		s.CompleteBy = now.Add(req.CompleteIn)
	}
	if req.Owner != "" {
		s.Owner, s.Epoch, s.WakeAt = req.Owner, 1, now.Add(req.LeaseTTL)
	}
	s.append(req.Log, now)
	m.sagas[req.ID] = s
	m.index(s)
	if s.Parent != "" {
		f := family{s.Parent, s.ParentStep}
		if m.kids[f] == nil {
			if m.kids == nil {
				m.kids = make(map[family]map[string]*kept)
			}
			m.kids[f] = make(map[string]*kept)
		}
		m.kids[f][s.ID] = s
	}
	return s.read(), true, nil
}

// Claim implements [store.Store].
func (m *Store) Claim(ctx context.Context, req store.ClaimRequest) ([]store.Record, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	var due []*kept
	for _, d := range req.Definitions {
		for _, s := range m.due[d] {
			if !s.WakeAt.After(now) {
				due = append(due, s)
			}
		}
	}
	slices.SortFunc(due, func(a, b *kept) int {
		if (a.Owner != "") != (b.Owner != "") {
			return cmp.Compare(b.Owner, a.Owner)
		}
		return cmp.Or(a.WakeAt.Compare(b.WakeAt), strings.Compare(a.ID, b.ID))
	})
	due = due[:min(len(due), max(req.Limit, 0))]
	claimed := make([]store.Record, 0, len(due))
	for _, s := range due {
		previous := s.Owner
		if previous != "" && previous != req.Owner {
			s.Takeovers++
		}
		s.Epoch++
		s.Owner, s.WakeAt, s.woken = req.Owner, now.Add(req.LeaseTTL), false
		rec := s.read()
		rec.Previous = previous
		claimed = append(claimed, rec)
	}
	return claimed, nil
}

// Heartbeat implements [store.Store].
func (m *Store) Heartbeat(ctx context.Context, req store.HeartbeatRequest) ([]store.Renewed, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	renewed := make([]store.Renewed, 0, len(req.Held))
	for _, h := range req.Held {
		s, ok := m.sagas[h.ID]
		if !ok || s.Owner != req.Owner || s.Epoch != h.Epoch {
			continue
		}
		s.WakeAt = time.Now().Add(req.LeaseTTL)
		renewed = append(renewed, store.Renewed{ID: h.ID, Epoch: h.Epoch, CancelRequested: s.CancelRequested, CancelNote: s.CancelNote})
	}
	return renewed, nil
}

// Commit implements [store.Store].
func (m *Store) Commit(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
	if ctx.Err() != nil {
		return store.Receipt{}, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s, ok := m.sagas[req.ID]
	if !ok || s.Epoch != req.Epoch || s.Seq != req.Seq {
		return store.Receipt{}, store.ErrFenced
	}
	now := time.Now()
	s.Status, s.Steps = req.Status, slices.Clone(req.Steps)
	if req.Data != nil {
		s.Data = slices.Clone(req.Data)
	}
	s.Failures, s.Takeovers, s.LastError = req.Failures, req.Takeovers, req.LastError
	s.Nonce, s.UpdatedAt = req.Nonce, now
	rc := store.Receipt{CancelRequested: s.CancelRequested, CancelNote: s.CancelNote}
	if req.Release {
		if s.woken && req.WakeIn > 0 {
			rc.Woken, req.WakeIn = true, 0
		}
		s.Owner, s.WakeAt = "", now.Add(req.WakeIn)
	}
	s.append(req.Log, now)
	m.index(s)
	return rc, nil
}

// Cancel implements [store.Store].
func (m *Store) Cancel(ctx context.Context, id, note string) (store.Record, error) {
	if ctx.Err() != nil {
		return store.Record{}, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s, ok := m.sagas[id]
	if !ok {
		return store.Record{}, store.ErrNotFound
	}
	if s.Status == store.Running && !s.CancelRequested {
		now := time.Now()
		s.CancelRequested, s.CancelNote, s.UpdatedAt, s.woken = true, note, now, true
		if s.Owner == "" {
			s.WakeAt = now
		}
	}
	return s.read(), nil
}

// Load implements [store.Store].
func (m *Store) Load(ctx context.Context, id string) (store.Record, error) {
	if ctx.Err() != nil {
		return store.Record{}, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s, ok := m.sagas[id]
	if !ok {
		return store.Record{}, store.ErrNotFound
	}
	return s.read(), nil
}

// List implements [store.Store].
func (m *Store) List(ctx context.Context, f store.Filter) ([]store.Record, string, error) {
	if ctx.Err() != nil {
		return nil, "", ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	// The sign of the time is reversed, and that of the ids is not.
	key := func(s *kept) string { return fmt.Sprintf("%020d %s", math.MaxInt64-s.CreatedAt.UnixNano(), s.ID) }
	type keyed struct {
		key string
		*kept
	}
	var found []keyed
	for _, s := range m.sagas {
		if k := key(s); k > f.After && admits(&f, &s.Record) {
			found = append(found, keyed{k, s})
		}
	}
	slices.SortFunc(found, func(a, b keyed) int { return strings.Compare(a.key, b.key) })
	next := ""
	if limit := cmp.Or(max(f.Limit, 0), 100); len(found) > limit {
		found = found[:limit]
		next = found[limit-1].key
	}
	recs := make([]store.Record, len(found))
	for i, s := range found {
		recs[i] = s.read()
		if f.WithoutState {
			recs[i].Data = nil
		}
	}
	return recs, next, nil
}

// admits reports whether a record meets the conditions of the filter.
func admits(f *store.Filter, r *store.Record) bool {
	return (f.Saga == "" || r.Saga == f.Saga) &&
		(len(f.Status) == 0 || slices.Contains(f.Status, r.Status)) &&
		strings.HasPrefix(r.ID, f.ID) &&
		(f.CreatedBefore.IsZero() || r.CreatedAt.Before(f.CreatedBefore))
}

// Counts implements [store.Store].
func (m *Store) Counts(ctx context.Context) (store.Counts, error) {
	if ctx.Err() != nil {
		return store.Counts{}, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
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
		if (s.Status == store.Running || s.Status == store.Compensating) && !s.WakeAt.After(now) {
			c.Due = min(c.Due+1, store.CountLimit)
			if c.OldestDue.IsZero() || s.WakeAt.Before(c.OldestDue) {
				c.OldestDue = s.WakeAt
			}
		}
	}
	counts := store.Counts{Now: now}
	for _, c := range found {
		counts.Sagas = append(counts.Sagas, *c)
	}
	slices.SortFunc(counts.Sagas, func(a, b store.Count) int { return strings.Compare(a.Saga, b.Saga) })
	return counts, nil
}

// History implements [store.Store].
func (m *Store) History(ctx context.Context, id string, after int64, limit int) ([]store.Entry, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s, ok := m.sagas[id]
	if !ok {
		return nil, nil
	}
	log := s.log[min(max(after, 0), int64(len(s.log))):]
	if limit > 0 {
		log = log[:min(limit, len(log))]
	}
	return slices.Clone(log), nil
}

// DeleteEnded implements [store.Store].
func (m *Store) DeleteEnded(ctx context.Context, status store.Status, age time.Duration, limit int) (int, error) {
	if ctx.Err() != nil {
		return 0, ctx.Err()
	}
	if age < 0 || limit < 0 {
		return 0, fmt.Errorf("saga: delete: age is %v and limit %d: must not be negative", age, limit)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	before := time.Now().Add(-age)
	var old []*kept
	for _, s := range m.sagas {
		if s.Status == status && s.Status.Ended() && s.Parent == "" && !s.WakeAt.After(before) {
			old = append(old, s)
		}
	}
	slices.SortFunc(old, func(a, b *kept) int { return a.WakeAt.Compare(b.WakeAt) })
	old = old[:min(limit, len(old))]
	var generations [][]*kept
	for ; len(old) > 0; old = m.endedKids(old, limit) {
		generations = append(generations, old)
	}
	n, gone := 0, make(map[string]bool)
	for i := len(generations) - 1; i >= 0 && n < limit; i-- {
		for _, s := range generations[i] {
			delete(m.sagas, s.ID)
			delete(m.kids[family{s.Parent, s.ParentStep}], s.ID)
			gone[s.ID] = true
			n++
		}
	}
	maps.DeleteFunc(m.kids, func(f family, kids map[string]*kept) bool {
		if gone[f.parent] {
			for _, s := range kids {
				s.Parent, s.ParentStep = "", ""
			}
		}
		return gone[f.parent]
	})
	return n, nil
}

// endedKids returns up to limit children of some sagas that have ended.
func (m *Store) endedKids(of []*kept, limit int) (ended []*kept) {
	parents := make(map[string]bool, len(of))
	for _, s := range of {
		parents[s.ID] = true
	}
	for f, kids := range m.kids {
		for _, s := range kids {
			if parents[f.parent] && s.Status.Ended() && len(ended) < limit {
				ended = append(ended, s)
			}
		}
	}
	return ended
}

// Children implements [store.Store].
func (m *Store) Children(ctx context.Context, req store.ChildrenRequest) ([]store.ChildRecord, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var list []store.ChildRecord
	for _, s := range m.kids[family{req.Parent, req.Step}] {
		if len(req.Status) > 0 && !slices.Contains(req.Status, s.Status) {
			continue
		}
		list = append(list, store.ChildRecord{ID: s.ID, Status: s.Status, CancelRequested: s.CancelRequested})
		if len(list) == req.Limit {
			break
		}
	}
	return list, nil
}

// index adds the saga to the index of Claim if it can become due, and otherwise removes
// it.
func (m *Store) index(s *kept) {
	d := store.Definition{Saga: s.Saga, Version: s.Version}
	if s.Status != store.Running && s.Status != store.Compensating {
		delete(m.due[d], s.ID)
		return
	}
	if m.due == nil {
		m.due = make(map[store.Definition]map[string]*kept)
	}
	if m.due[d] == nil {
		m.due[d] = make(map[string]*kept)
	}
	m.due[d][s.ID] = s
}

// Signal implements [store.Store].
func (m *Store) Signal(ctx context.Context, req store.SignalRequest) (store.Record, error) {
	if ctx.Err() != nil {
		return store.Record{}, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s, ok := m.sagas[req.ID]
	if !ok {
		return store.Record{}, store.ErrNotFound
	}
	if s.Status == store.Running {
		s.hasten()
	}
	rec := s.read()
	at, kept := slices.BinarySearchFunc(s.signals, req.Name, func(sig store.Signal, name string) int { return strings.Compare(sig.Name, name) })
	if kept {
		return rec, nil
	}
	if req.Admit != nil {
		if err := req.Admit(&rec); err != nil {
			return rec, err
		}
	}
	s.signals = slices.Insert(s.signals, at, store.Signal{Name: req.Name, Payload: slices.Clone(req.Payload)})
	return rec, nil
}

// Signals implements [store.Store].
func (m *Store) Signals(ctx context.Context, id string) ([]store.Signal, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if s, ok := m.sagas[id]; ok {
		return slices.Clone(s.signals), nil
	}
	return nil, nil
}

// Hasten implements [store.Store].
func (m *Store) Hasten(ctx context.Context, id string) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if s, ok := m.sagas[id]; ok && (s.Status == store.Running || s.Status == store.Compensating) {
		s.hasten()
	}
	return nil
}

// hasten makes the saga due: if it has an owner, when that releases it.
func (s *kept) hasten() {
	s.woken = true
	if now := time.Now(); s.Owner == "" && s.WakeAt.After(now) {
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
func (s *kept) read() store.Record {
	rec := s.Record
	rec.Data, rec.Steps = slices.Clone(rec.Data), slices.Clone(rec.Steps)
	rec.Now = time.Now()
	return rec
}
