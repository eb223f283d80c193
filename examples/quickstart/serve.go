package main

import (
	"context"
	"embed"
	"encoding/json"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/console"
)

const (
	sliceTime = 200 * time.Millisecond
	remembers = 160 // number of slices, for about three runs
)

//go:embed page
var page embed.FS

// serve repeats the scenario until ctx is done, and serves web pages that show it.
func serve(ctx context.Context, address string, seed uint64) error {
	s := newScenario(seed)
	defer s.close()
	policies := console.New(s.policies, console.Config{
		Name:  "quickstart",
		Show:  console.Show{Errors: true},
		Allow: func(*http.Request, console.Operation) error { return nil }, // every visitor may act: this is a demonstration
	})
	defer policies.Close()
	r := newRecorder(s)
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: pages(r, policies), ReadHeaderTimeout: 5 * time.Second}
	go func() { _ = server.Serve(l) }()
	defer server.Close()
	fmt.Printf("http://%s/ shows both clients, http://%s/console/ the policies\n", l.Addr(), l.Addr())
	for ; ; seed++ {
		if err := s.run(ctx, seed, r.record); ctx.Err() != nil {
			return nil
		} else if err != nil {
			return err
		}
		r.conclude()
	}
}

// pages returns a handler for the page with both sides, and for the console of the policies.
func pages(r *recorder, policies http.Handler) http.Handler {
	files, err := fs.Sub(page, "page")
	if err != nil {
		panic(err) // cannot happen, because page is embedded
	}
	mux := http.NewServeMux()
	mux.Handle("/", http.FileServerFS(files))
	mux.Handle("/live", r)
	mux.Handle("/console/", http.StripPrefix("/console", policies))
	return mux
}

// A recorder stores the recent results of both sides, in slices of time.
type recorder struct {
	*scenario

	mu      sync.Mutex
	slices  []slice
	last    time.Time
	verdict string
	seen    map[*tally]int   // number of calls that are already in a slice
	reached map[*tally]int64 // number of requests that are already in a slice
}

func newRecorder(s *scenario) *recorder {
	return &recorder{scenario: s, last: time.Now(), seen: map[*tally]int{}, reached: map[*tally]int64{}}
}

// A slice has the results of both sides in about a fifth of a second.
type slice struct {
	Phase     int     `json:"phase"`
	Seconds   float64 `json:"seconds"`
	Plain     share   `json:"plain"`
	Resilient share   `json:"resilient"`
}

// A share has the results of one side in a slice. These are the numbers of calls that ended, by outcome, and the number
// of requests that the backend received. P99 is the 99th percentile of the durations of calls in the last second, in
// milliseconds.
type share struct {
	Answered int     `json:"answered"`
	Stale    int     `json:"stale"`
	Failed   int     `json:"failed"`
	P99      float64 `json:"p99"`
	Backend  int64   `json:"backend"`
	InFlight int64   `json:"in_flight"`

	took []time.Duration
}

// record adds a slice if the last slice is old enough.
func (r *recorder) record(phase int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	since := time.Since(r.last)
	if since < sliceTime*9/10 {
		return
	}
	r.last = time.Now()
	s := slice{Phase: phase, Seconds: since.Seconds()}
	for side, to := range map[*side]*share{r.plain: &s.Plain, r.resilient: &s.Resilient} {
		to.InFlight = side.inFlight.Load()
		for _, t := range side.tallies {
			r.take(t, to)
		}
		took := slices.Clone(to.took)
		for _, past := range r.slices[max(0, len(r.slices)-4):] {
			if side == r.plain {
				took = append(took, past.Plain.took...)
			} else {
				took = append(took, past.Resilient.took...)
			}
		}
		slices.Sort(took)
		to.P99 = quantile(took, 0.99)
	}
	r.slices = append(r.slices, s)
	r.slices = r.slices[max(0, len(r.slices)-remembers):]
}

// take adds those results of a tally that are in no slice yet to a share.
func (r *recorder) take(t *tally, to *share) {
	t.mu.Lock()
	defer t.mu.Unlock()
	reached := t.reached.Load()
	if len(t.calls) < r.seen[t] || reached < r.reached[t] { // another run has started
		r.seen[t], r.reached[t] = 0, 0
	}
	for _, c := range t.calls[r.seen[t]:] {
		switch {
		case c.stale:
			to.Stale++
		case c.answered:
			to.Answered++
		default:
			to.Failed++
		}
		to.took = append(to.took, c.took)
	}
	to.Backend += reached - r.reached[t]
	r.seen[t], r.reached[t] = len(t.calls), reached
}

// conclude records the verdict, which summarizes the run that has just ended.
func (r *recorder) conclude() {
	r.mu.Lock()
	defer r.mu.Unlock()
	plain, resilient := summarize(r.plain.tallies...), summarize(r.resilient.tallies...)
	r.verdict = verdict(plain, resilient, r.plain.outage(), r.resilient.outage())
}

// ServeHTTP responds with the data, as JSON, that the page draws.
func (r *recorder) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	now := r.report()
	r.mu.Lock()
	defer r.mu.Unlock()
	live := struct {
		report
		Slices  []slice `json:"slices"`
		Last    string  `json:"last"` // the verdict of the previous run
		Shown   int     `json:"shown"`
		Outages []bool  `json:"outages"`
	}{now, r.slices, r.verdict, remembers, nil}
	for _, p := range badHalfMinute {
		live.Outages = append(live.Outages, p.Outage)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_ = json.NewEncoder(w).Encode(live)
}
