package main

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"net/http"
	"regexp"
	"runtime/pprof"
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

// A side is one client with the backend that it talks to, and what came of it.
type side struct {
	name     string
	client   *http.Client
	backend  *backend
	tallies  []*tally // by phase
	inFlight atomic.Int64

	mu      sync.Mutex
	changes []change // of its breaker
}

type change struct {
	At time.Time
	breaker.Change
}

// A tally counts what happened in one phase.
type tally struct {
	running      atomic.Int64 // calls that have begun and not ended
	reached      atomic.Int64 // requests that reached the backend
	maxInFlight  atomic.Int64
	maxGoroutine atomic.Int64

	mu    sync.Mutex
	calls []call
}

// A call is what became of one call, whatever it took to make it.
type call struct {
	answered, stale bool
	took            time.Duration
}

func newSide(name string, seed uint64) (*side, error) {
	s := &side{name: name}
	for range badHalfMinute {
		s.tallies = append(s.tallies, &tally{})
	}
	b, err := newBackend(seed, s.tallies)
	if err != nil {
		return nil, err
	}
	s.backend = b
	base := wire{&http.Transport{MaxIdleConnsPerHost: 200}, s}
	if name == "plain" {
		s.client = newPlain(base)
	} else {
		s.client = newResilient(base, func(c breaker.Change) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.changes = append(s.changes, change{time.Now(), c})
		})
	}
	return s, nil
}

func (s *side) close() error {
	s.client.CloseIdleConnections()
	return s.backend.close()
}

// load makes the calls of every phase, callsPerSecond of them, for products
// that the seed chooses, and waits until all have ended. It does not wait for
// one call before the next is due: users do not, either.
func (s *side) load(seed uint64, start time.Time) {
	luck := rand.New(rand.NewPCG(seed, 0))
	var wg sync.WaitGroup
	due := start
	for i, p := range badHalfMinute {
		for end := due.Add(p.Lasts); due.Before(end); due = due.Add(time.Second / callsPerSecond) {
			product, n := luck.IntN(products), luck.Uint32()
			time.Sleep(time.Until(due))
			t := s.tallies[i]
			t.running.Add(1)
			wg.Go(func() { t.add(s.call(product, n)) })
		}
	}
	wg.Wait()
}

// warmUp asks for each product once, before anything is counted: a service that
// has just started is not what this shows.
func (s *side) warmUp() {
	for product := range products {
		s.call(product, 0)
	}
	s.tallies[0].reached.Store(0)
}

func (s *side) call(product int, n uint32) (c call) {
	start := time.Now()
	defer func() { c.took = time.Since(start) }()
	res, err := s.client.Get(s.backend.URL + "/products/" + strconv.Itoa(product) + "?call=" + strconv.Itoa(int(n)))
	if err != nil {
		return c
	}
	defer res.Body.Close()
	_, err = io.Copy(io.Discard, res.Body)
	c.answered = err == nil && res.StatusCode == http.StatusOK
	c.stale = c.answered && res.Header.Get("Cache-Status") != ""
	return c
}

func (s *side) enterFlight() {
	raise(&s.tallies[s.backend.now.Load()].maxInFlight, s.inFlight.Add(1))
}

func (s *side) leaveFlight() { s.inFlight.Add(-1) }

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

// A summary is a tally in figures: what -json prints for a phase or for all.
type summary struct {
	Calls           int     `json:"calls"`
	Answered        int     `json:"answered"` // fresh or stale
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

// run lets the sides live through the bad half minute at the same time. Each
// goroutine carries the name of its side, so that those of the clients can be
// told apart in the goroutine profile.
func run(sides []*side, seed uint64, each func(phase int)) {
	for _, s := range sides {
		s.backend.enter(0)
		s.warmUp()
	}
	start := time.Now()
	var loads sync.WaitGroup
	for _, s := range sides {
		loads.Go(func() {
			pprof.Do(context.Background(), pprof.Labels("side", s.name), func(context.Context) { s.load(seed, start) })
		})
	}
	watched, over := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		countGoroutines(sides, over)
	}()
	end := start
	for i, p := range badHalfMinute {
		for _, s := range sides {
			s.backend.enter(i)
		}
		end = end.Add(p.Lasts)
		for time.Until(end) > 0 {
			time.Sleep(min(time.Until(end), 100*time.Millisecond))
			each(i)
		}
	}
	loads.Wait()
	close(over)
	<-watched
}

var labeled = regexp.MustCompile(`(?m)^(\d+) @.*\n# labels: \{"side":"(\w+)"\}`)

// countGoroutines keeps the most goroutines of each side, until over is closed.
func countGoroutines(sides []*side, over <-chan struct{}) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	var profile bytes.Buffer
	for {
		select {
		case <-over:
			return
		case <-tick.C:
		}
		profile.Reset()
		_ = pprof.Lookup("goroutine").WriteTo(&profile, 1)
		counts := map[string]int64{}
		for _, m := range labeled.FindAllStringSubmatch(profile.String(), -1) {
			n, _ := strconv.ParseInt(m[1], 10, 64)
			counts[m[2]] += n
		}
		for _, s := range sides {
			raise(&s.tallies[s.backend.now.Load()].maxGoroutine, counts[s.name])
		}
	}
}
