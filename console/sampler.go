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
	kept   = 600              // samples of each figure
	second = time.Second      // between two samples
	recent = 10               // samples that a rate is the mean of
	asking = 10 * time.Second // between two questions to the store of a policy
	// answering is how long a question may take. It ends before the next: at the same moment it would be by
	// chance whether the store failed or does not answer.
	answering = asking - second/2
)

// A sampler keeps the figures of the policies of a registry over the last ten minutes.
type sampler struct {
	reg   *registry.Registry
	ctx   context.Context // of the goroutine
	stop  context.CancelFunc
	ended sync.WaitGroup

	first    sync.Once  // somebody looks
	sampling sync.Mutex // held before mu, while a sample is taken

	mu     sync.RWMutex // what it guards is changed by who holds sampling, too
	tracks []*track     // ordered as the registry is
	byPath map[string]*track
	began  time.Time // of sample 0
	now    int       // the latest sample; -1 before the first
}

// A track is what is known of one policy.
type track struct {
	entry  registry.Entry
	path   string
	rules  *rules
	series []*series
	byName map[string]*series
	born   int // its first sample

	health error // of the latest sample
	status status
	ill    time.Time // since when it has not been well; zero if it is well

	// Of a policy that asks a store for its health.
	asked  time.Time
	asking bool
	answer error
}

func newTrack(e registry.Entry, born int) *track {
	return &track{entry: e, path: e.String(), rules: rulesOf(e.Kind), byName: map[string]*series{}, born: born}
}

func (s *sampler) begin(reg *registry.Registry) {
	s.reg, s.byPath, s.began, s.now = reg, map[string]*track{}, time.Now(), -1
	s.ctx, s.stop = context.WithCancel(context.Background())
	s.ended.Go(func() {
		for tick := time.Tick(second); ; {
			select {
			case <-s.ctx.Done():
				return
			case <-tick:
				s.sampling.Lock()
				s.sample()
				s.sampling.Unlock()
			}
		}
	})
}

// look takes the first sample for a page that was asked for before there is one.
func (s *sampler) look() {
	s.first.Do(func() {
		s.sampling.Lock()
		defer s.sampling.Unlock()
		if s.now < 0 {
			s.sample()
		}
	})
}

// sample takes one sample of each policy. mu is not held while a policy is asked, and nobody sees
// the sample before it is whole. The caller holds sampling.
func (s *sampler) sample() {
	at := time.Now()
	tracks := s.follow(at)
	figures := make([][]registry.Figure, len(tracks))
	healths := make([]error, len(tracks))
	for i, t := range tracks {
		if s.ctx.Err() != nil {
			return
		}
		figures[i], healths[i] = t.entry.Figures(), s.health(t, at)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now, s.tracks = s.next(at), tracks
	clear(s.byPath)
	for i, t := range tracks {
		s.byPath[t.path] = t
		t.add(figures[i], s.now)
		t.health = healths[i]
		t.status = t.judge(s.now)
		switch {
		case t.status.tone == well:
			t.ill = time.Time{}
		case t.ill.IsZero():
			t.ill = at
		}
	}
}

// next returns the number of the sample that was begun then. The caller holds sampling.
func (s *sampler) next(at time.Time) int { return max(s.now+1, int(at.Sub(s.began)/second)) }

// follow returns the tracks of the policies that are there, with a new one for each that is new. The
// caller holds sampling.
func (s *sampler) follow(at time.Time) (tracks []*track) {
	for e := range s.reg.All() {
		t := s.byPath[e.String()]
		if t == nil || t.entry.Policy != e.Policy {
			t = newTrack(e, s.next(at))
		}
		tracks = append(tracks, t)
	}
	return tracks
}

// health returns what is wrong with a policy. One that asks a store for it is asked now and then, by
// a goroutine of its own: a slow store delays no sample, and one that does not heed its ctx does not
// delay Close.
func (s *sampler) health(t *track, at time.Time) error {
	if _, asks := t.entry.Policy.(interface{ Health(context.Context) error }); !asks {
		return t.entry.Health(s.ctx)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case at.Sub(t.asked) < asking:
	case t.asking:
		return lateStore
	default:
		t.asking, t.asked = true, at
		go func() {
			ctx, cancel := context.WithTimeout(s.ctx, answering)
			defer cancel()
			err := t.entry.Health(ctx)
			s.mu.Lock()
			defer s.mu.Unlock()
			t.asking, t.answer = false, err
		}()
	}
	return t.answer
}

// A storeDown says that the store of a policy does not answer.
type storeDown struct{ error }

func (e storeDown) Unwrap() error     { return e.error }
func (storeDown) HealthState() string { return "store down" }
func (storeDown) Failed() bool        { return true }

var lateStore = storeDown{fmt.Errorf("the store has not answered for %v", asking)}

// add notes the figures of sample now, and drops those of which no sample is kept: a policy may show
// others each time. The caller holds the lock.
func (t *track) add(figures []registry.Figure, now int) {
	for _, f := range figures {
		if sr := t.byName[f.Name]; sr != nil {
			sr.add(f.Value, now)
			continue
		}
		sr := newSeries(f, now)
		t.series, t.byName[f.Name] = append(t.series, sr), sr
	}
	t.series = slices.DeleteFunc(t.series, func(sr *series) bool {
		old := now-sr.seen >= kept
		if old {
			delete(t.byName, sr.Name)
		}
		return old
	})
}
