package console

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/registry"
)

const (
	kept          = 600              // number of samples of each metric
	second        = time.Second      // interval of samples
	recent        = 10               // number of samples over which a rate is averaged
	queryInterval = 10 * time.Second // interval of Health calls that query a store
	// queryTimeout ends a query shortly before the next query is due. If both were at the same time, the page would show
	// at random either the error of the query or that the store does not respond.
	queryTimeout = queryInterval - second/2
	// localTimeout limits the duration of a Health that does not query a store. If a Health function takes longer, the
	// console assumes that it queries a store, even if it ignores its ctx.
	localTimeout = second / 2
)

// A sampler holds the metrics of the policies of a registry over the last ten minutes.
type sampler struct {
	reg   *registry.Registry
	ctx   context.Context // done after Close
	stop  context.CancelFunc
	ended sync.WaitGroup

	sampling chan struct{} // used as a lock, which is held while a sample is taken; acquired before mu

	mu     sync.RWMutex // guards the fields below; a writer also holds sampling
	tracks []*track     // the tracks in the registry's order
	byPath map[string]*track
	began  time.Time // time of sample 0
	now    int       // number of the latest sample; -1 before the first
}

// A track holds the samples and the status of a policy.
type track struct {
	entry  registry.Entry
	path   string
	rules  *rules
	series []*series
	byName map[string]*series
	born   int // number of the first sample

	health    policy.Health // the health in the latest sample
	status    status
	unhealthy time.Time // the time at which the policy became unhealthy; zero if the policy is healthy

	// The following fields are for a policy whose health depends on a store.
	queried  time.Time     // start of the latest query; zero without a store
	querying bool          // the latest query has not returned
	answer   policy.Health // result of the latest query that has returned
}

func newTrack(e registry.Entry, born int) *track {
	return &track{entry: e, path: e.String(), rules: rulesOf(e.Kind), byName: map[string]*series{}, born: born}
}

func (s *sampler) begin(reg *registry.Registry) {
	s.reg, s.byPath, s.began, s.now = reg, map[string]*track{}, time.Now(), -1
	s.sampling = make(chan struct{}, 1)
	s.ctx, s.stop = context.WithCancel(context.Background())
	s.ended.Go(func() {
		for tick := time.Tick(second); ; {
			select {
			case <-s.ctx.Done():
				return
			case <-tick:
				s.sampling <- struct{}{}
				s.sample()
				<-s.sampling
			}
		}
	})
}

// ensure takes the first sample if no sample was taken yet. Pages call ensure because they need data.
func (s *sampler) ensure() {
	if s.sampled() {
		return
	}
	s.sampling <- struct{}{}
	defer func() { <-s.sampling }()
	if !s.sampled() {
		s.sample()
	}
}

// sampled reports whether a sample was taken.
func (s *sampler) sampled() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.now >= 0
}

// sample takes one sample of each policy. It does not hold mu while it calls policies. Then it makes the samples of all
// policies visible together. The caller holds sampling.
func (s *sampler) sample() {
	at := time.Now()
	tracks := s.follow(at)
	healths := s.healths(tracks, at)
	metrics := make([][]policy.Metric, len(tracks))
	for i, t := range tracks {
		if s.ctx.Err() != nil {
			return
		}
		metrics[i] = t.entry.Metrics()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now, s.tracks = s.next(at), tracks
	clear(s.byPath)
	for i, t := range tracks {
		s.byPath[t.path] = t
		t.add(metrics[i], s.now)
		t.health = healths[i]
		t.status = t.judge(s.now)
		switch {
		case t.status.tone == well:
			t.unhealthy = time.Time{}
		case t.unhealthy.IsZero():
			t.unhealthy = at
		}
	}
}

// next returns the number of the sample that started at the given time. The caller holds sampling.
func (s *sampler) next(at time.Time) int { return max(s.now+1, int(at.Sub(s.began)/second)) }

// follow returns the tracks of the registered policies. It creates tracks for new policies. The caller holds sampling.
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

// healths returns the health of each policy. If the health of a policy depends on a store, it is queried in the
// background, and only at intervals. So a slow store does not delay the samples, and a store that ignores its ctx does
// not delay Close.
func (s *sampler) healths(tracks []*track, at time.Time) []policy.Health {
	slow := make(chan struct{}) // closed when every Health without a store must have returned
	defer time.AfterFunc(localTimeout, func() { close(slow) }).Stop()
	all := make([]policy.Health, len(tracks))
	started := make([]*query, len(tracks))
	for i, t := range tracks {
		all[i], started[i] = s.query(t, at)
	}
	for i, q := range started {
		if q == nil {
			continue
		}
		if h, local := q.wait(slow); local {
			all[i] = h
			s.mu.Lock()
			tracks[i].queried = time.Time{} // call Health again for the next sample
			s.mu.Unlock()
		}
	}
	return all
}

// A query is a call to a policy's Health in the background.
type query struct {
	ctx      watchedContext
	returned chan policy.Health
}

// query returns the latest known health of a policy, and starts a query if one is due. The result of the query is
// stored in t.
func (s *sampler) query(t *track, at time.Time) (policy.Health, *query) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !t.queried.IsZero() && at.Sub(t.queried) < queryInterval:
		return t.answer, nil
	case t.querying:
		return storeTimedOut, nil
	}
	t.querying, t.queried = true, at
	ctx, cancel := context.WithTimeout(s.ctx, queryTimeout)
	q := &query{watchedContext{Context: ctx, used: make(chan struct{})}, make(chan policy.Health, 1)}
	go func() {
		defer cancel()
		h := t.entry.Health(&q.ctx)
		s.mu.Lock()
		defer s.mu.Unlock()
		t.querying, t.answer = false, h
		q.returned <- h
	}()
	return t.answer, q
}

// wait returns the result of a Health that does not query a store. It returns false as soon as Health uses its ctx,
// which a query of a store requires. It also returns false if Health has not returned when slow is closed.
func (q *query) wait(slow <-chan struct{}) (h policy.Health, local bool) {
	select {
	case <-q.ctx.used:
		return policy.Health{}, false
	case <-slow:
		return policy.Health{}, false
	case h = <-q.returned:
	}
	select {
	case <-q.ctx.used: // Health has queried a store that responded fast
		return policy.Health{}, false
	default:
		return h, true
	}
}

// A watchedContext closes used when one of its methods is called.
type watchedContext struct {
	context.Context
	once sync.Once
	used chan struct{}
}

func (c *watchedContext) use() context.Context {
	c.once.Do(func() { close(c.used) })
	return c.Context
}

func (c *watchedContext) Deadline() (time.Time, bool) { return c.use().Deadline() }
func (c *watchedContext) Done() <-chan struct{}       { return c.use().Done() }
func (c *watchedContext) Err() error                  { return c.use().Err() }
func (c *watchedContext) Value(key any) any           { return c.use().Value(key) }

// storeTimedOut is the health of a policy whose store does not respond.
var storeTimedOut = policy.Health{
	Status: policy.Fail, State: "store_down",
	Err: fmt.Errorf("store has not responded for %v", queryInterval),
}

// add adds the metrics of the sample with the number now. It also deletes series without a sample in the last ten
// minutes, because a policy may have different metrics in each sample. The caller holds the lock.
func (t *track) add(metrics []policy.Metric, now int) {
	for _, m := range metrics {
		if sr := t.byName[m.Name]; sr != nil {
			sr.add(m.Value, now)
			continue
		}
		sr := newSeries(m, now)
		t.series, t.byName[m.Name] = append(t.series, sr), sr
	}
	t.series = slices.DeleteFunc(t.series, func(sr *series) bool {
		old := now-sr.seen >= kept
		if old {
			delete(t.byName, sr.Name)
		}
		return old
	})
}
