package console

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/registry"
)

const (
	kept    = 600              // samples of each figure
	second  = time.Second      // between two samples
	lingers = 10 * time.Minute // sampling goes on after the last look
	recent  = 10               // samples that a rate is the mean of
	asking  = 10 * time.Second // between two questions to the store of a saga's Runner
)

// A sampler keeps the figures of the policies of a registry over the last ten minutes. It
// has a goroutine while somebody looks, and for ten minutes after.
type sampler struct {
	reg  *registry.Registry
	tell func() // called after each sample, without a lock

	starting sync.Mutex // held before mu

	mu      sync.RWMutex
	tracks  []*track // ordered as the registry is
	byPath  map[string]*track
	began   time.Time // of sample 0
	now     int       // the latest sample; -1 before the first
	running bool
	closed  bool
	looked  time.Time
	viewers int
	stop    context.CancelFunc
	ended   sync.WaitGroup

	buffer []registry.Figure // of the goroutine
}

// A track is what is known of one policy.
type track struct {
	entry  registry.Entry
	path   string
	quoted []byte // path as JSON
	rules  *rules
	series []*series
	index  map[string]*series // by label; nil until the order of figures changes
	born   int                // its first sample

	traffic traffic
	health  error // of the latest sample
	status  status

	// Of a Runner, whose store is asked now and then.
	asked  time.Time
	asking bool
	answer error
}

// look notes that a page was asked for, and begins to sample if nobody looked before.
func (s *sampler) look() {
	s.starting.Lock()
	defer s.starting.Unlock()
	if ctx := s.start(); ctx != nil {
		s.sample(ctx) // the first look shows something
		go s.run(ctx)
	}
}

// start returns the ctx of the goroutine that look starts, or nil if there is one already or
// the console is closed.
func (s *sampler) start() context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.looked = time.Now()
	if s.running || s.closed {
		return nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.running, s.stop = true, cancel
	s.tracks, s.byPath, s.began, s.now = nil, map[string]*track{}, time.Now(), -1
	s.ended.Add(1)
	return ctx
}

func (s *sampler) run(ctx context.Context) {
	defer s.ended.Done()
	tick := time.NewTicker(second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if s.idle() {
			return
		}
		s.sample(ctx)
		s.tell()
	}
}

// watched notes that there are more or fewer viewers.
func (s *sampler) watched(change int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.viewers += change
	s.looked = time.Now()
}

// idle reports whether nobody has looked for long, and drops what was sampled if so.
func (s *sampler) idle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.viewers > 0 || time.Since(s.looked) < lingers {
		return false
	}
	s.running, s.tracks, s.byPath, s.buffer = false, nil, nil, nil
	s.stop()
	return true
}

func (s *sampler) close() {
	s.mu.Lock()
	s.closed = true
	if s.stop != nil {
		s.stop()
	}
	s.mu.Unlock()
	s.ended.Wait()
}

// sample takes one sample of each policy. No lock is held while a policy is asked.
func (s *sampler) sample(ctx context.Context) {
	at := time.Now()
	tracks := s.follow(at)
	for _, t := range tracks {
		s.buffer = figures(t.entry, s.buffer[:0])
		health := s.health(ctx, t, at)
		s.mu.Lock()
		t.store(s.buffer, s.now)
		t.health = health
		t.status = t.judge(s.now)
		s.mu.Unlock()
	}
	clear(s.buffer)
}

// follow begins a sample: it makes a track for each new policy and drops those of policies
// that were removed.
func (s *sampler) follow(at time.Time) []*track {
	entries := slices.Collect(s.reg.All())
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now = max(s.now+1, int(at.Sub(s.began)/second))
	tracks := make([]*track, 0, len(entries))
	for _, e := range entries {
		path := e.String()
		t := s.byPath[path]
		if t == nil || t.entry.Policy != e.Policy {
			t = &track{entry: e, path: path, quoted: encode(path), rules: rulesOf(e.Kind), born: s.now}
			s.byPath[path] = t
		}
		tracks = append(tracks, t)
	}
	if len(s.byPath) > len(tracks) {
		clear(s.byPath)
		for _, t := range tracks {
			s.byPath[t.path] = t
		}
	}
	s.tracks = tracks
	return tracks
}

// figures appends the figures of a policy. A policy of other origin may panic, which must
// not end the program.
func figures(e registry.Entry, to []registry.Figure) (all []registry.Figure) {
	all = to
	defer func() { _ = recover() }()
	for f := range e.Figures() {
		all = append(all, f)
	}
	return all
}

// health returns what is wrong with a policy. A goroutine that ends with ctx asks the store
// of a Runner, so that a slow store delays no sample.
func (s *sampler) health(ctx context.Context, t *track, at time.Time) error {
	if t.entry.Kind != sagaKind {
		return t.entry.Health(ctx)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !t.asking && at.Sub(t.asked) >= asking {
		t.asking, t.asked = true, at
		s.ended.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, asking)
			defer cancel()
			answer := askStore(ctx, t.entry)
			s.mu.Lock()
			defer s.mu.Unlock()
			t.asking, t.answer = false, answer
		})
	}
	return t.answer
}

// askStore returns the health of a Runner. Its store may panic, which must not end the
// program.
func askStore(ctx context.Context, e registry.Entry) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &registry.HealthError{State: "store down", Fails: true, Err: fmt.Errorf("the store panicked: %v", v)}
		}
	}()
	return e.Health(ctx)
}

// store notes the figures of sample now. The caller holds the lock.
func (t *track) store(figures []registry.Figure, now int) {
	for i, f := range figures {
		sr := t.find(i, f)
		if sr == nil {
			sr = &series{Figure: f, born: now, seen: now}
			if f.Kind == registry.Gauge {
				sr.flat = float32(f.Value)
			}
			t.series = append(t.series, sr)
			t.traffic.add(t.rules, sr)
			if t.index != nil {
				t.index[label(f)] = sr
			}
			continue
		}
		sr.add(f.Value, now)
	}
}

// find returns the series of the figure at place i, or nil. A policy shows its figures in
// the same order each time, unless there are new ones.
func (t *track) find(i int, f registry.Figure) *series {
	if t.index == nil {
		if i < len(t.series) && t.series[i].same(f) {
			return t.series[i]
		}
		if i == len(t.series) {
			return nil
		}
		t.index = map[string]*series{}
		for _, sr := range t.series {
			t.index[label(sr.Figure)] = sr
		}
	}
	if i < len(t.series) && t.series[i].same(f) {
		return t.series[i]
	}
	return t.index[label(f)]
}
