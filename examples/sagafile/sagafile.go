// Package sagafile is an example of a store of sagas. It stores sagas in a file of JSON lines, and uses only the
// standard library. The example shows how much work a [sagastore.Store] requires. It is suitable for programs of one
// process with a few thousand sagas, because all sagas are in memory, and each write appends a line to the file and
// syncs it.
package sagafile

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-resilience/resilience/saga/sagastore"
)

var _ sagastore.Store = (*Store)(nil)

// A Store is a [sagastore.Store] that stores sagas in a file. Only one process may have the file open at a time.
type Store struct {
	mu     sync.Mutex
	file   *os.File
	size   int64 // number of bytes of the complete lines in file
	broken error // set if a write failed: the file may end with a part of a line

	sagas  map[string]*saga    // all sagas by ID; a saga is replaced, never changed
	turns  int64               // sagas claimed so far
	served map[[2]string]int64 // the latest turn of each tenant, and of each definition of a tenant
}

// A saga has all data of a saga in the store.
type saga struct {
	Record   sagastore.Record
	Woken    bool
	Log      []entry           // new entries are appended; copies of the saga share the array
	Messages map[string][]byte // never modified: each new message replaces the map
}

// An entry is a [sagastore.Entry], and the fields that are not in the JSON of a sagastore.Entry.
type entry struct {
	sagastore.Entry
	Epoch int64
	At    time.Time
}

// A line is a line of the file: the changes of one write.
type line struct {
	Put    []*saga  `json:",omitempty"`
	Delete []string `json:",omitempty"`
}

// Open opens the store in a file, or creates it if the file does not exist. It rewrites the file without the data that
// later lines have replaced.
func Open(path string) (_ *Store, err error) {
	s := &Store{sagas: make(map[string]*saga), served: make(map[[2]string]int64)}
	if err := s.read(path); err != nil {
		return nil, fmt.Errorf("sagafile: open %s: %w", path, err)
	}
	if err := s.rewrite(path); err != nil {
		return nil, fmt.Errorf("sagafile: rewrite %s: %w", path, err)
	}
	return s, nil
}

func (s *Store) read(path string) error {
	file, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer file.Close()
	for r := bufio.NewReader(file); ; {
		data, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return nil // the last line has no newline if the process died during the write
		}
		if err != nil {
			return err
		}
		var l line
		if err := json.Unmarshal(data, &l); err != nil {
			return err
		}
		s.apply(&l)
	}
}

func (s *Store) apply(l *line) {
	for _, sg := range l.Put {
		s.sagas[sg.Record.ID] = sg
	}
	for _, id := range l.Delete {
		delete(s.sagas, id)
	}
}

// rewrite replaces the file by a file that contains each saga only once.
func (s *Store) rewrite(path string) (err error) {
	file, err := os.Create(path + ".new")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = file.Close()
		}
	}()
	s.file = file
	if err := s.write(&line{Put: slices.Collect(maps.Values(s.sagas))}); err != nil {
		return err
	}
	if err := os.Rename(path+".new", path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// write appends a line to the file. When the line is on the disk, write applies it to memory. The caller holds mu.
func (s *Store) write(l *line) error {
	if s.broken != nil {
		return s.broken
	}
	data, err := json.Marshal(l)
	if err == nil {
		_, err = s.file.WriteAt(append(data, '\n'), s.size)
	}
	if err == nil {
		err = s.file.Sync()
	}
	if err != nil {
		s.broken = fmt.Errorf("sagafile: an earlier write failed: %w", err)
		return fmt.Errorf("sagafile: write: %w", err)
	}
	s.size += int64(len(data)) + 1
	s.apply(l)
	return nil
}

// Close closes the file.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.broken = cmp.Or(s.broken, os.ErrClosed)
	return s.file.Close()
}

// begin locks the store and returns the current time. The caller must unlock the store. If ctx is done, begin returns
// an error and does not lock the store.
func (s *Store) begin(ctx context.Context) (now time.Time, err error) {
	s.mu.Lock()
	if err := ctx.Err(); err != nil {
		s.mu.Unlock()
		return now, err
	}
	return time.Now().UTC().Round(0), nil // has no monotonic reading, like a time read from the file
}

// next returns a copy of a saga. The copy may be changed; the saga itself must not.
func (sg *saga) next() *saga {
	c := *sg
	return &c
}

// shown returns the record of a saga for a caller of the store.
func (sg *saga) shown(now time.Time) sagastore.Record {
	rec := sg.Record
	rec.State, rec.Progress, rec.Now = bytes.Clone(rec.State), bytes.Clone(rec.Progress), now
	return rec
}

// log appends entries to the log of a saga.
func (sg *saga) log(entries []sagastore.Entry, now time.Time) {
	sg.Log = slices.Clip(sg.Log) // another copy of the saga may use the array's remaining capacity
	for _, e := range entries {
		sg.Record.Seq++
		e.Seq = sg.Record.Seq
		sg.Log = append(sg.Log, entry{e, sg.Record.Epoch, now})
	}
}

// wake records that a call to Store.Post has woken the saga. If the saga has no owner, wake also makes it due.
func (sg *saga) wake(now time.Time) {
	sg.Woken = true
	if sg.Record.Owner == "" && sg.Record.WakeAt.After(now) {
		sg.Record.WakeAt = now
	}
}

func (sg *saga) due(now time.Time) bool {
	rec := &sg.Record
	return (rec.Status == sagastore.Running || rec.Status == sagastore.Compensating) && !rec.WakeAt.After(now)
}

// Start implements [sagastore.Store].
func (s *Store) Start(ctx context.Context, req sagastore.StartRequest) (sagastore.Record, bool, error) {
	now, err := s.begin(ctx)
	if err != nil {
		return sagastore.Record{}, false, err
	}
	defer s.mu.Unlock()
	if sg := s.sagas[req.ID]; sg != nil {
		return sg.shown(now), false, nil
	}
	sg := &saga{Record: sagastore.Record{
		ID: req.ID, Saga: req.Saga, Version: req.Version, Status: req.Status, Tenant: req.Tenant,
		State: bytes.Clone(req.State), Progress: bytes.Clone(req.Progress),
		Parent: req.Parent, ParentStep: req.ParentStep, Nonce: req.Nonce,
		WakeAt: now, CreatedAt: now, UpdatedAt: now,
	}}
	if req.Owner != "" {
		sg.Record.Owner, sg.Record.Epoch, sg.Record.WakeAt = req.Owner, 1, now.Add(req.LeaseTTL)
	}
	if req.CompleteIn != 0 {
		sg.Record.CompleteBy = now.Add(req.CompleteIn)
	}
	sg.log(req.Log, now)
	if err := s.write(&line{Put: []*saga{sg}}); err != nil {
		return sagastore.Record{}, false, err
	}
	return sg.shown(now), true, nil
}

// Claim implements [sagastore.Store].
func (s *Store) Claim(ctx context.Context, req sagastore.ClaimRequest) ([]sagastore.Record, error) {
	now, err := s.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	var crashed, free []*saga
	for _, sg := range s.sagas {
		d := sagastore.Definition{Saga: sg.Record.Saga, Version: sg.Record.Version}
		switch {
		case !sg.due(now) || !slices.Contains(req.Definitions, d):
		case sg.Record.Owner != "":
			crashed = append(crashed, sg)
		default:
			free = append(free, sg)
		}
	}
	byWakeAt := func(a, b *saga) int { return a.Record.WakeAt.Compare(b.Record.WakeAt) }
	slices.SortFunc(crashed, byWakeAt)
	slices.SortFunc(free, byWakeAt)
	chosen := crashed[:min(len(crashed), max(req.Limit, 0))]
	for len(chosen) < req.Limit && len(free) > 0 {
		// Choose the tenant that has waited longest and, among its sagas, the definition that has waited longest.
		i := 0
		for j, sg := range free {
			if slices.Compare(s.latest(sg), s.latest(free[i])) < 0 {
				i = j
			}
		}
		s.turns++
		tenant, definition := turnsOf(free[i])
		s.served[tenant], s.served[definition] = s.turns, s.turns
		chosen = append(chosen, free[i])
		free = slices.Delete(free, i, i+1)
	}
	if len(chosen) == 0 {
		return nil, nil
	}
	var l line
	var recs []sagastore.Record
	for _, sg := range chosen {
		sg = sg.next()
		rec := &sg.Record
		previous := rec.Owner
		if previous != "" && previous != req.Owner {
			rec.Takeovers++
		}
		rec.Owner, rec.WakeAt, sg.Woken = req.Owner, now.Add(req.LeaseTTL), false
		rec.Epoch++
		l.Put = append(l.Put, sg)
		shown := sg.shown(now)
		shown.Previous = previous
		recs = append(recs, shown)
	}
	return recs, s.write(&l)
}

// turnsOf returns the keys of a saga's tenant and definition in Store.served.
func turnsOf(sg *saga) (tenant, definition [2]string) {
	return [2]string{sg.Record.Tenant}, [2]string{sg.Record.Tenant, fmt.Sprint(sg.Record.Saga, "/", sg.Record.Version)}
}

// latest returns the numbers of the latest turns of a saga's tenant and definition.
func (s *Store) latest(sg *saga) []int64 {
	tenant, definition := turnsOf(sg)
	return []int64{s.served[tenant], s.served[definition]}
}

// Heartbeat implements [sagastore.Store].
func (s *Store) Heartbeat(ctx context.Context, req sagastore.HeartbeatRequest) (list []sagastore.Renewed, err error) {
	now, err := s.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	var l line
	for _, h := range req.Held {
		sg := s.sagas[h.ID]
		if sg == nil || sg.Record.Owner != req.Owner || sg.Record.Epoch != h.Epoch {
			continue
		}
		sg = sg.next()
		sg.Record.WakeAt = now.Add(req.LeaseTTL)
		l.Put = append(l.Put, sg)
		list = append(list, sagastore.Renewed{
			ID: h.ID, Epoch: h.Epoch, CancelRequested: sg.Record.CancelRequested, CancelNote: sg.Record.CancelNote,
		})
	}
	if len(list) == 0 {
		return nil, nil
	}
	return list, s.write(&l)
}

// Commit implements [sagastore.Store].
func (s *Store) Commit(ctx context.Context, req sagastore.CommitRequest) (r sagastore.Receipt, err error) {
	now, err := s.begin(ctx)
	if err != nil {
		return r, err
	}
	defer s.mu.Unlock()
	sg := s.sagas[req.ID]
	if sg == nil || sg.Record.Epoch != req.Epoch || sg.Record.Seq != req.Seq {
		return r, sagastore.ErrFenced
	}
	sg = sg.next()
	rec := &sg.Record
	rec.Nonce, rec.Version, rec.Status = req.Nonce, cmp.Or(req.Version, rec.Version), req.Status
	rec.Progress, rec.UpdatedAt = bytes.Clone(req.Progress), now
	rec.Failures, rec.Takeovers, rec.LastError = req.Failures, req.Takeovers, req.LastError
	if req.State != nil {
		rec.State = bytes.Clone(req.State)
	}
	sg.log(req.Log, now)
	if req.Release {
		rec.Owner, rec.WakeAt = "", now.Add(req.WakeIn)
		if sg.Woken {
			rec.WakeAt = now
			r.Woken = req.WakeIn > 0
		}
	}
	r.CancelRequested, r.CancelNote = rec.CancelRequested, rec.CancelNote
	return r, s.write(&line{Put: []*saga{sg}})
}

// Post implements [sagastore.Store].
func (s *Store) Post(ctx context.Context, req sagastore.PostRequest) (rec sagastore.Record, err error) {
	now, err := s.begin(ctx)
	if err != nil {
		return rec, err
	}
	defer s.mu.Unlock()
	sg := s.sagas[req.ID]
	if sg == nil {
		if req.Name == "" && !req.Cancel {
			return rec, nil
		}
		return rec, sagastore.ErrNotFound
	}
	sg = sg.next()
	status := sg.Record.Status
	wakes := status == sagastore.Running
	_, known := sg.Messages[req.Name]
	switch {
	case req.Cancel:
		if wakes = wakes && !sg.Record.CancelRequested; wakes {
			sg.Record.CancelRequested, sg.Record.CancelNote, sg.Record.UpdatedAt = true, string(req.Payload), now
		}
	case req.Name == "":
		wakes = wakes || status == sagastore.Compensating
	case !known:
		if req.Admit != nil {
			shown := sg.shown(now)
			if err := req.Admit(&shown); err != nil {
				return sg.shown(now), err
			}
		}
		sg.Messages = maps.Clone(sg.Messages)
		if sg.Messages == nil {
			sg.Messages = make(map[string][]byte)
		}
		sg.Messages[req.Name] = bytes.Clone(req.Payload)
	}
	if wakes {
		sg.wake(now)
	}
	if err := s.write(&line{Put: []*saga{sg}}); err != nil {
		return rec, err
	}
	return sg.shown(now), nil
}

// Messages implements [sagastore.Store].
func (s *Store) Messages(ctx context.Context, id string) (list []sagastore.Message, err error) {
	if _, err := s.begin(ctx); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	if sg := s.sagas[id]; sg != nil {
		for _, name := range slices.Sorted(maps.Keys(sg.Messages)) {
			list = append(list, sagastore.Message{Name: name, Payload: bytes.Clone(sg.Messages[name])})
		}
	}
	return list, nil
}

// Load implements [sagastore.Store].
func (s *Store) Load(ctx context.Context, id string) (sagastore.Record, error) {
	now, err := s.begin(ctx)
	if err != nil {
		return sagastore.Record{}, err
	}
	defer s.mu.Unlock()
	sg := s.sagas[id]
	if sg == nil {
		return sagastore.Record{}, sagastore.ErrNotFound
	}
	return sg.shown(now), nil
}

// List implements [sagastore.Store]. Filter.After of a page is the creation time and the ID of the last saga on the
// previous page.
func (s *Store) List(ctx context.Context, f sagastore.Filter) (recs []sagastore.Record, next string, err error) {
	now, err := s.begin(ctx)
	if err != nil {
		return nil, "", err
	}
	defer s.mu.Unlock()
	for _, sg := range s.sagas {
		rec := &sg.Record
		if (f.Saga == "" || f.Saga == rec.Saga) && (len(f.Status) == 0 || slices.Contains(f.Status, rec.Status)) &&
			strings.HasPrefix(rec.ID, f.ID) && (f.CreatedBefore.IsZero() || rec.CreatedAt.Before(f.CreatedBefore)) &&
			(f.After == "" || place(rec) < f.After) {
			recs = append(recs, sg.shown(now))
		}
	}
	slices.SortFunc(recs, func(a, b sagastore.Record) int { return cmp.Compare(place(&b), place(&a)) })
	limit := f.Limit
	if limit <= 0 {
		limit = 100
	}
	if len(recs) > limit {
		recs = recs[:limit]
		next = place(&recs[limit-1])
	}
	for i := range recs {
		if f.WithoutState {
			recs[i].State = nil
		}
	}
	return recs, next, nil
}

// place returns a text by which sagas are sorted: by CreatedAt, then by ID.
func place(rec *sagastore.Record) string {
	return rec.CreatedAt.Format("2006-01-02T15:04:05.000000000") + " " + rec.ID
}

// Counts implements [sagastore.Store].
func (s *Store) Counts(ctx context.Context) (c sagastore.Counts, err error) {
	now, err := s.begin(ctx)
	if err != nil {
		return c, err
	}
	defer s.mu.Unlock()
	all := make(map[string]*sagastore.Count)
	add := func(n *int) { *n = min(*n+1, sagastore.CountLimit) }
	for _, sg := range s.sagas {
		if sg.Record.Status.Ended() {
			continue
		}
		count := all[sg.Record.Saga]
		if count == nil {
			count = &sagastore.Count{Saga: sg.Record.Saga}
			all[sg.Record.Saga] = count
		}
		add(count.Of(sg.Record.Status))
		if sg.due(now) {
			add(&count.Due)
			if at := sg.Record.WakeAt; count.OldestDue.IsZero() || at.Before(count.OldestDue) {
				count.OldestDue = at
			}
		}
	}
	c.Now = now
	for _, name := range slices.Sorted(maps.Keys(all)) {
		c.Sagas = append(c.Sagas, *all[name])
	}
	return c, nil
}

// History implements [sagastore.Store].
func (s *Store) History(ctx context.Context, id string, after int64, limit int) (log []sagastore.Entry, err error) {
	if _, err := s.begin(ctx); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	if sg := s.sagas[id]; sg != nil {
		for _, e := range sg.Log {
			if e.Seq > after && (limit <= 0 || len(log) < limit) {
				e.Entry.Epoch, e.Entry.At = e.Epoch, e.At
				log = append(log, e.Entry)
			}
		}
	}
	return log, nil
}

// Children implements [sagastore.Store].
func (s *Store) Children(ctx context.Context, req sagastore.ChildrenRequest) (list []sagastore.ChildRecord, err error) {
	if _, err := s.begin(ctx); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	for _, sg := range s.sagas {
		rec := &sg.Record
		if rec.Parent == req.Parent && rec.ParentStep == req.Step &&
			(len(req.Status) == 0 || slices.Contains(req.Status, rec.Status)) && (req.Limit <= 0 || len(list) < req.Limit) {
			list = append(list, sagastore.ChildRecord{ID: rec.ID, Status: rec.Status, CancelRequested: rec.CancelRequested})
		}
	}
	return list, nil
}

// DeleteEnded implements [sagastore.Store].
func (s *Store) DeleteEnded(ctx context.Context, status sagastore.Status, age time.Duration, limit int) (int, error) {
	now, err := s.begin(ctx)
	if err != nil {
		return 0, err
	}
	defer s.mu.Unlock()
	if age < 0 || limit < 0 {
		return 0, fmt.Errorf("sagafile: delete: age %v and limit %d must be 0 or more", age, limit)
	}
	generation := s.ended(limit, func(rec *sagastore.Record) bool {
		return rec.Parent == "" && rec.Status == status && now.Sub(rec.WakeAt) >= age
	})
	var generations [][]string
	for len(generation) > 0 {
		generations = append(generations, generation)
		parents := generation
		generation = s.ended(limit, func(rec *sagastore.Record) bool { return slices.Contains(parents, rec.Parent) })
	}
	var l line
	for _, g := range slices.Backward(generations) {
		if l.Delete = append(l.Delete, g...); len(l.Delete) >= limit {
			break
		}
	}
	if len(l.Delete) == 0 {
		return 0, nil
	}
	for id, sg := range s.sagas {
		if slices.Contains(l.Delete, sg.Record.Parent) && !slices.Contains(l.Delete, id) {
			sg = sg.next()
			sg.Record.Parent, sg.Record.ParentStep = "", ""
			l.Put = append(l.Put, sg)
		}
	}
	return len(l.Delete), s.write(&l)
}

// ended returns the IDs of at most limit sagas that have ended and for which match returns true, the oldest first.
func (s *Store) ended(limit int, match func(*sagastore.Record) bool) (ids []string) {
	for id, sg := range s.sagas {
		if sg.Record.Status.Ended() && match(&sg.Record) {
			ids = append(ids, id)
		}
	}
	slices.SortFunc(ids, func(a, b string) int {
		return s.sagas[a].Record.WakeAt.Compare(s.sagas[b].Record.WakeAt)
	})
	return ids[:min(len(ids), limit)]
}
