package console

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/registry"
)

const (
	kept    = 600              // samples of each figure
	second  = time.Second      // between two samples
	lingers = 10 * time.Minute // sampling goes on after the last look
	recent  = 10               // samples that a rate is the mean of
	asking  = 10 * time.Second // between two questions to the store of a Runner or a Candidate
)

// A sampler keeps the figures of the policies of a registry over the last ten minutes. On
// demand it has a goroutine only while somebody looks, and for ten minutes after.
type sampler struct {
	reg      *registry.Registry
	onDemand bool

	sampling sync.Mutex // held before mu

	mu      sync.RWMutex
	tracks  []*track // ordered as the registry is
	byPath  map[string]*track
	began   time.Time // of sample 0
	now     int       // the latest sample; -1 before the first; changed by who holds sampling too
	running bool
	closed  bool
	looked  time.Time
	ctx     context.Context // of the goroutine
	stop    context.CancelFunc
	ended   sync.WaitGroup

	buffer []registry.Figure // of who holds sampling
}

// A track is what is known of one policy.
type track struct {
	entry  registry.Entry
	path   string
	quoted []byte // path as JSON
	rules  *rules
	series []*series
	index  map[string]*series // by Name; nil until the order of figures changes
	born   int                // its first sample

	traffic traffic
	health  error // of the latest sample
	status  status
	well    bool      // in the latest sample
	ill     time.Time // since when it has not been well; zero if it is well, or if that is not known

	// Of a Runner or a Candidate, whose store is asked now and then.
	asked  time.Time
	asking bool
	answer error
	held   *lease.State // of a Candidate; nil if the store did not answer
}

// look notes that a page was asked for, which shows something even if there was no sample yet.
func (s *sampler) look() {
	if ctx := s.begin(); ctx != nil {
		s.sampling.Lock()
		defer s.sampling.Unlock()
		if s.now < 0 {
			s.sample(ctx)
		}
	}
}

// begin starts the goroutine, which takes the first sample after a second, unless there is
// one or the console is closed. It returns the ctx for the first sample if there is none yet.
func (s *sampler) begin() context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.looked = time.Now()
	if s.closed || s.running && s.now >= 0 {
		return nil
	}
	if !s.running {
		s.running = true
		s.ctx, s.stop = context.WithCancel(context.Background())
		s.tracks, s.byPath, s.began, s.now = nil, map[string]*track{}, time.Now(), -1
		ctx := s.ctx
		s.ended.Go(func() { s.run(ctx) })
	}
	return s.ctx
}

func (s *sampler) run(ctx context.Context) {
	tick := time.Tick(second)
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick:
		}
		if s.idle() {
			return
		}
		s.sampling.Lock()
		s.sample(ctx)
		s.sampling.Unlock()
	}
}

// idle reports whether nobody has looked for long, and drops what was sampled if so.
func (s *sampler) idle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.onDemand || time.Since(s.looked) < lingers {
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

// sample takes one sample of each policy. The lock of all others is not held while a policy is
// asked, and nobody sees the sample before it is whole.
func (s *sampler) sample(ctx context.Context) {
	at := time.Now()
	tracks := s.follow(at)
	ends := make([]int, len(tracks)) // of the figures of each in the buffer
	healths := make([]error, len(tracks))
	s.buffer = s.buffer[:0]
	for i, t := range tracks {
		if ctx.Err() != nil {
			return
		}
		s.buffer = append(s.buffer, t.entry.Figures()...)
		ends[i], healths[i] = len(s.buffer), s.health(ctx, t, at)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now = s.next(at)
	s.tracks = tracks
	clear(s.byPath)
	begin := 0
	for i, t := range tracks {
		s.byPath[t.path] = t
		t.store(s.buffer[begin:ends[i]], s.now)
		t.health = healths[i]
		t.status = t.judge(s.now)
		switch {
		case t.status.tone == well:
			t.ill = time.Time{}
		case t.ill.IsZero() && (t.well || !s.onDemand):
			t.ill = at
		}
		t.well = t.status.tone == well
		begin = ends[i]
	}
}

// next returns the number of the sample that was begun then. The caller holds the lock.
func (s *sampler) next(at time.Time) int { return max(s.now+1, int(at.Sub(s.began)/second)) }

// follow returns the tracks of the policies that are there, with a new one for each that is
// new.
func (s *sampler) follow(at time.Time) []*track {
	entries := slices.Collect(s.reg.All())
	s.mu.RLock()
	defer s.mu.RUnlock()
	tracks := make([]*track, 0, len(entries))
	for _, e := range entries {
		path := e.String()
		t := s.byPath[path]
		if t == nil || t.entry.Policy != e.Policy {
			t = &track{entry: e, path: path, quoted: encode(path), rules: rulesOf(e.Kind), born: s.next(at)}
		}
		tracks = append(tracks, t)
	}
	return tracks
}

// health returns what is wrong with a policy. A goroutine that ends with ctx asks a store, so
// that a slow one delays no sample.
func (s *sampler) health(ctx context.Context, t *track, at time.Time) error {
	if t.entry.Kind != sagaKind && t.entry.Kind != leaseKind {
		return t.entry.Health(ctx)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !t.asking && at.Sub(t.asked) >= asking {
		t.asking, t.asked = true, at
		ctx, cancel := context.WithTimeout(ctx, asking)
		go func() {
			defer cancel()
			held, answer := askStore(ctx, t.entry)
			s.mu.Lock()
			defer s.mu.Unlock()
			t.asking, t.answer, t.held = false, answer, held
		}()
		s.ended.Go(func() {
			<-ctx.Done()
			s.mu.Lock()
			defer s.mu.Unlock()
			if t.asking { // a store that is deaf to ctx is not waited for, and not asked again
				t.answer, t.held = lateStore, nil
			}
		})
	}
	return t.answer
}

// A storeDown says that the store of a Runner or a Candidate does not answer.
type storeDown struct{ error }

func (e storeDown) Unwrap() error     { return e.error }
func (storeDown) HealthState() string { return "store down" }
func (storeDown) Failed() bool        { return true }

var lateStore = storeDown{fmt.Errorf("the store has not answered for %v", asking)}

// askStore returns the health of a Runner or a Candidate, and of a Candidate who holds the
// lease. The store may panic, which must not end the program.
func askStore(ctx context.Context, e registry.Entry) (held *lease.State, err error) {
	defer func() {
		if v := recover(); v != nil {
			held, err = nil, storeDown{fmt.Errorf("the store panicked: %v", v)}
		}
	}()
	if c, ok := e.Policy.(interface {
		Look(context.Context) (lease.State, error)
	}); ok {
		if state, err := c.Look(ctx); err == nil {
			held = &state
		}
	}
	return held, e.Health(ctx)
}

// store notes the figures of sample now. The caller holds the lock.
func (t *track) store(figures []registry.Figure, now int) {
	for i, f := range figures {
		sr := t.find(i, f)
		if sr == nil {
			sr = newSeries(f, now)
			t.series = append(t.series, sr)
			t.traffic.add(t.rules, sr)
			if t.index != nil {
				t.index[f.Name] = sr
			}
			continue
		}
		sr.add(f.Value, now)
	}
	t.forget(now)
}

// forget drops the figures of which no sample is kept: a policy may show others each time.
func (t *track) forget(now int) {
	all := len(t.series)
	t.series = slices.DeleteFunc(t.series, func(sr *series) bool { return now-sr.seen >= kept })
	if len(t.series) == all {
		return
	}
	t.index, t.traffic = nil, traffic{}
	for _, sr := range t.series {
		t.traffic.add(t.rules, sr)
	}
}

// find returns the series of the figure at place i, or nil. A policy shows its figures in
// the same order each time, unless there are new ones.
func (t *track) find(i int, f registry.Figure) *series {
	if t.index == nil {
		if i < len(t.series) && t.series[i].Name == f.Name {
			return t.series[i]
		}
		if i == len(t.series) {
			return nil
		}
		t.index = map[string]*series{}
		for _, sr := range t.series {
			t.index[sr.Name] = sr
		}
	}
	if i < len(t.series) && t.series[i].Name == f.Name {
		return t.series[i]
	}
	return t.index[f.Name]
}
