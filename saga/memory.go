package saga

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync"
	"time"
)

// NewMemory returns a [Store] that keeps sagas in the process. It is for tests, and for
// sagas that need not survive the process. Sagas that have ended stay in it.
func NewMemory() *Memory { return &Memory{sagas: make(map[string]*memorySaga)} }

// A Memory is a Store without durability. It is safe for concurrent use.
type Memory struct {
	mu    sync.Mutex
	sagas map[string]*memorySaga
	due   map[Definition]map[string]*memorySaga // running and compensating
}

type memorySaga struct {
	Record
	log []Entry
}

// Start implements [Store].
func (m *Memory) Start(ctx context.Context, req StartRequest) (Record, bool, error) {
	if ctx.Err() != nil {
		return Record{}, false, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if s, ok := m.sagas[req.ID]; ok {
		return s.read(), false, nil
	}
	now := time.Now()
	s := &memorySaga{Record: Record{
		ID: req.ID, Saga: req.Saga, Version: req.Version, Status: req.Status,
		Data: slices.Clone(req.Data), Steps: slices.Clone(req.Steps), Nonce: req.Nonce,
		WakeAt: now, CreatedAt: now, UpdatedAt: now,
	}}
	if req.CompleteIn > 0 {
		s.CompleteBy = now.Add(req.CompleteIn)
	}
	if req.Owner != "" {
		s.Owner, s.Epoch, s.WakeAt = req.Owner, 1, now.Add(req.Lease)
	}
	s.append(req.Log, now)
	m.sagas[req.ID] = s
	m.index(s)
	return s.read(), true, nil
}

// Claim implements [Store].
func (m *Memory) Claim(ctx context.Context, req ClaimRequest) ([]Record, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	var due []*memorySaga
	for _, d := range req.Definitions {
		for _, s := range m.due[d] {
			if !s.WakeAt.After(now) {
				due = append(due, s)
			}
		}
	}
	slices.SortFunc(due, func(a, b *memorySaga) int {
		if (a.Owner != "") != (b.Owner != "") {
			return cmp.Compare(b.Owner, a.Owner)
		}
		return cmp.Or(a.WakeAt.Compare(b.WakeAt), strings.Compare(a.ID, b.ID))
	})
	due = due[:min(len(due), max(req.Limit, 0))]
	claimed := make([]Record, 0, len(due))
	for _, s := range due {
		previous := s.Owner
		if previous != "" && previous != req.Owner {
			s.Takeovers++
		}
		s.Epoch++
		s.Owner, s.WakeAt = req.Owner, now.Add(req.Lease)
		rec := s.read()
		rec.Previous = previous
		claimed = append(claimed, rec)
	}
	return claimed, nil
}

// Heartbeat implements [Store].
func (m *Memory) Heartbeat(ctx context.Context, req HeartbeatRequest) ([]Renewed, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	renewed := make([]Renewed, 0, len(req.Held))
	for _, h := range req.Held {
		s, ok := m.sagas[h.ID]
		if !ok || s.Owner != req.Owner || s.Epoch != h.Epoch {
			continue
		}
		s.WakeAt = time.Now().Add(req.Lease)
		renewed = append(renewed, Renewed{h.ID, h.Epoch, false, s.CancelRequested, s.CancelNote})
	}
	return renewed, nil
}

// Commit implements [Store].
func (m *Memory) Commit(ctx context.Context, req CommitRequest) (Receipt, error) {
	if ctx.Err() != nil {
		return Receipt{}, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s, ok := m.sagas[req.ID]
	if !ok || s.Epoch != req.Epoch || s.Seq != req.Seq {
		return Receipt{}, ErrFenced
	}
	now := time.Now()
	s.Status, s.Data, s.Steps = req.Status, slices.Clone(req.Data), slices.Clone(req.Steps)
	s.Failures, s.Takeovers, s.LastError = req.Failures, req.Takeovers, req.LastError
	s.Nonce, s.Reported, s.UpdatedAt = req.Nonce, false, now
	if req.Release {
		s.Owner, s.WakeAt = "", now.Add(req.WakeIn)
	}
	s.append(req.Log, now)
	m.index(s)
	return Receipt{s.CancelRequested, s.CancelNote}, nil
}

// Cancel implements [Store].
func (m *Memory) Cancel(ctx context.Context, id, note string) (Record, error) {
	if ctx.Err() != nil {
		return Record{}, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s, ok := m.sagas[id]
	if !ok {
		return Record{}, ErrNotFound
	}
	if s.Status == Running && !s.CancelRequested {
		now := time.Now()
		s.CancelRequested, s.CancelNote, s.UpdatedAt = true, note, now
		if s.Owner == "" {
			s.WakeAt = now
		}
	}
	return s.read(), nil
}

// Load implements [Store].
func (m *Memory) Load(ctx context.Context, id string) (Record, error) {
	if ctx.Err() != nil {
		return Record{}, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s, ok := m.sagas[id]
	if !ok {
		return Record{}, ErrNotFound
	}
	return s.read(), nil
}

// List implements [Store].
func (m *Memory) List(ctx context.Context, f Filter) ([]Record, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var found []*memorySaga
	for _, s := range m.sagas {
		if (f.Saga == "" || s.Saga == f.Saga) && s.ID > f.After &&
			(len(f.Status) == 0 || slices.Contains(f.Status, s.Status)) && !(f.Unreported && s.Reported) {
			found = append(found, s)
		}
	}
	slices.SortFunc(found, func(a, b *memorySaga) int { return strings.Compare(a.ID, b.ID) })
	limit := f.Limit
	if limit <= 0 {
		limit = 100
	}
	recs := make([]Record, 0, min(limit, len(found)))
	for _, s := range found[:min(limit, len(found))] {
		recs = append(recs, s.read())
	}
	return recs, nil
}

// History implements [Store].
func (m *Memory) History(ctx context.Context, id string) ([]Entry, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if s, ok := m.sagas[id]; ok {
		return slices.Clone(s.log), nil
	}
	return nil, nil
}

// Reported implements [Store].
func (m *Memory) Reported(ctx context.Context, id string, seq int64) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if s, ok := m.sagas[id]; ok && s.Status == Stuck && s.Seq == seq {
		s.Reported = true
	}
	return nil
}

// Unregistered implements [Store].
func (m *Memory) Unregistered(ctx context.Context, registered []Definition) ([]Unregistered, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	var found []Unregistered
	for d, sagas := range m.due {
		if slices.Contains(registered, d) {
			continue
		}
		u := Unregistered{Definition: d, Now: now}
		for _, s := range sagas {
			if s.WakeAt.After(now) {
				continue
			}
			u.Count++
			if u.Oldest.IsZero() || s.WakeAt.Before(u.Oldest) {
				u.Oldest = s.WakeAt
			}
		}
		if u.Count > 0 {
			found = append(found, u)
		}
	}
	slices.SortFunc(found, func(a, b Unregistered) int {
		return cmp.Or(strings.Compare(a.Saga, b.Saga), cmp.Compare(a.Version, b.Version))
	})
	return found, nil
}

// index adds the saga to the index of Claim if it can become due, and otherwise removes
// it.
func (m *Memory) index(s *memorySaga) {
	d := Definition{s.Saga, s.Version}
	if s.Status != Running && s.Status != Compensating {
		delete(m.due[d], s.ID)
		return
	}
	if m.due == nil {
		m.due = make(map[Definition]map[string]*memorySaga)
	}
	if m.due[d] == nil {
		m.due[d] = make(map[string]*memorySaga)
	}
	m.due[d][s.ID] = s
}

func (s *memorySaga) append(log []Entry, now time.Time) {
	for _, e := range log {
		s.Seq++
		e.Seq, e.Epoch, e.At = s.Seq, s.Epoch, now
		s.log = append(s.log, e)
	}
}

// read returns a copy of the record.
func (s *memorySaga) read() Record {
	rec := s.Record
	rec.Data, rec.Steps = slices.Clone(rec.Data), slices.Clone(rec.Steps)
	rec.Now = time.Now()
	return rec
}
