package main

import (
	"context"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/breaker"
)

const (
	callsPerSecond = 200
	products       = 40
)

// A side is one of the two clients, with its backend and its results.
type side struct {
	name     string
	client   *http.Client
	backend  *backend
	tallies  []*tally // one for each phase
	inFlight atomic.Int64

	mu      sync.Mutex
	changes []breaker.Event // events of the client's breaker
}

// A tally has the results of one side in one phase.
type tally struct {
	running      atomic.Int64 // calls in flight
	reached      atomic.Int64 // requests that reached the backend
	maxInFlight  atomic.Int64
	maxGoroutine atomic.Int64

	mu    sync.Mutex
	calls []call
}

// A call is the result of one call by a user, including its retries.
type call struct {
	answered, stale bool
	took            time.Duration
}

// newSide returns a side whose client newClient creates on a separate transport.
func newSide(name string, seed uint64, newClient func(http.RoundTripper) *http.Client) *side {
	s := &side{name: name}
	for range badHalfMinute {
		s.tallies = append(s.tallies, &tally{})
	}
	s.backend = newBackend(seed, s.tallies)
	s.client = newClient(wire{&http.Transport{MaxIdleConnsPerHost: 200}, s})
	return s
}

func (s *side) close() {
	s.client.CloseIdleConnections()
	s.backend.CloseClientConnections() // otherwise Close would wait for requests that hang
	s.backend.Close()
}

// wire is the innermost transport of a client. It counts the client's requests in flight.
type wire struct {
	base http.RoundTripper
	side *side
}

func (w wire) RoundTrip(req *http.Request) (*http.Response, error) {
	raise(&w.side.tallies[w.side.backend.now.Load()].maxInFlight, w.side.inFlight.Add(1))
	defer w.side.inFlight.Add(-1)
	return w.base.RoundTrip(req)
}

// load starts callsPerSecond calls per second in every phase, and waits until all calls have ended. The seed determines
// which products are requested. Calls start on time even if earlier calls have not ended, because users do not wait for
// each other. If ctx is done, load stops early.
func (s *side) load(ctx context.Context, seed uint64, start time.Time) {
	luck := rand.New(rand.NewPCG(seed, 0))
	var wg sync.WaitGroup
	defer wg.Wait()
	due := start
	for i, p := range badHalfMinute {
		for end := due.Add(p.Lasts); due.Before(end); due = due.Add(time.Second / callsPerSecond) {
			product := luck.IntN(products)
			if !sleepUntil(ctx, due) {
				return
			}
			t := s.tallies[i]
			t.running.Add(1)
			wg.Go(func() { t.add(s.call(product)) })
		}
	}
}

// warmUp requests each product once before the measurement, because a service usually does not start
// with an empty cache.
func (s *side) warmUp() {
	for product := range products {
		s.call(product)
	}
	s.forget()
}

func (s *side) call(product int) (c call) {
	start := time.Now()
	defer func() { c.took = time.Since(start) }()
	res, err := s.client.Get(s.backend.URL + "/products/" + strconv.Itoa(product))
	if err != nil {
		return c
	}
	defer res.Body.Close()
	_, err = io.Copy(io.Discard, res.Body)
	c.answered = err == nil && res.StatusCode == http.StatusOK
	c.stale = c.answered && res.Header.Get("Cache-Status") != ""
	return c
}

// forget removes the results of a side, before the next run.
func (s *side) forget() {
	s.mu.Lock()
	s.changes = nil
	s.mu.Unlock()
	for _, t := range s.tallies {
		t.mu.Lock()
		t.calls = nil
		t.mu.Unlock()
		t.reached.Store(0)
		t.maxInFlight.Store(0)
		t.maxGoroutine.Store(0)
	}
}

func (t *tally) add(c call) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.calls = append(t.calls, c)
	t.running.Add(-1)
}

func raise(most *atomic.Int64, n int64) {
	for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
	}
}

// A summary has the results of one phase or of all phases, as -json prints them.
type summary struct {
	Calls           int     `json:"calls"`
	Answered        int     `json:"answered"` // includes stale answers
	Stale           int     `json:"stale"`
	Failed          int     `json:"failed"`
	P50             float64 `json:"p50_ms"`
	P99             float64 `json:"p99_ms"`
	BackendRequests int64   `json:"backend_requests"`
	MaxInFlight     int64   `json:"max_in_flight"`
	MaxGoroutines   int64   `json:"max_goroutines"`
}

func summarize(tallies ...*tally) summary {
	var s summary
	var took []time.Duration
	for _, t := range tallies {
		t.mu.Lock()
		for _, c := range t.calls {
			s.Calls++
			switch {
			case c.stale:
				s.Answered, s.Stale = s.Answered+1, s.Stale+1
			case c.answered:
				s.Answered++
			default:
				s.Failed++
			}
			took = append(took, c.took)
		}
		t.mu.Unlock()
		s.BackendRequests += t.reached.Load()
		s.MaxInFlight = max(s.MaxInFlight, t.maxInFlight.Load())
		s.MaxGoroutines = max(s.MaxGoroutines, t.maxGoroutine.Load())
	}
	slices.Sort(took)
	s.P50, s.P99 = quantile(took, 0.5), quantile(took, 0.99)
	return s
}

func quantile(sorted []time.Duration, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	d := sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
	return float64(d.Microseconds()) / 1000
}
