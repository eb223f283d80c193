package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/faults"
	"github.com/go-resilience/resilience/resiliencehttp"
)

// A phase is a period with the same faults.
type phase struct {
	Name    string
	Lasts   time.Duration
	Outage  bool          // the backend answers no request
	Workers int           // maximum number of concurrent requests; further requests wait
	Faults  []faults.Plan // faults for every request in the phase
}

// badHalfMinute has the phases of the backend: a bad half minute of a real service, compressed into ten seconds.
var badHalfMinute = []phase{
	{Name: "healthy", Lasts: 1500 * time.Millisecond, Workers: many, Faults: answersIn(5 * time.Millisecond)},
	{Name: "30% errors", Lasts: 1500 * time.Millisecond, Workers: many,
		Faults: append(answersIn(5*time.Millisecond), failing(0.3))},
	{Name: "overloaded", Lasts: 1500 * time.Millisecond, Workers: 6, Faults: answersIn(60 * time.Millisecond)},
	{Name: "hanging", Lasts: 1500 * time.Millisecond, Workers: many, Outage: true,
		Faults: []faults.Plan{{Kind: faults.Hang}}},
	{Name: "down", Lasts: 1500 * time.Millisecond, Workers: many, Outage: true,
		Faults: []faults.Plan{{Kind: faults.Refuse}}},
	{Name: "recovering", Lasts: 1500 * time.Millisecond, Workers: 10,
		Faults: append(answersIn(20*time.Millisecond), failing(0.2))},
	{Name: "healthy again", Lasts: 1500 * time.Millisecond, Workers: many, Faults: answersIn(5 * time.Millisecond)},
}

const many = 100_000 // more than the number of requests

func answersIn(d time.Duration) []faults.Plan {
	return []faults.Plan{{Kind: faults.Latency, Delay: d}}
}

// failing returns a fault: the backend responds to a share of the requests with 503.
func failing(share float64) faults.Plan { return faults.Plan{Kind: faults.Status, Share: share} }

// A backend is an HTTP server on loopback that serves products. It has different faults in each phase. Each client has
// its own backend, so the clients do not affect each other.
type backend struct {
	*httptest.Server
	script  *faults.Script
	workers *bulkhead.Bulkhead
	now     atomic.Int32 // the index of the phase
}

// newBackend starts a backend. It counts the requests of each phase in that phase's element of tallies.
func newBackend(seed uint64, tallies []*tally) *backend {
	b := &backend{
		script:  faults.New(faults.Config{Enabled: true, Seed: seed}),
		workers: bulkhead.New(bulkhead.Config{Limit: many, MaxWait: -1}),
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /products/{id}", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "product %s", r.PathValue("id"))
	})
	work := resiliencehttp.Server{}.Bulkhead(b.workers)(faults.Handler(b.script, mux))
	b.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tallies[b.now.Load()].reached.Add(1)
		work.ServeHTTP(w, r)
	}))
	return b
}

// enter starts phase i.
func (b *backend) enter(i int) error {
	if err := b.workers.Update(func(c *bulkhead.Config) { c.Limit = badHalfMinute[i].Workers }); err != nil {
		return err
	}
	b.now.Store(int32(i))
	return b.script.Update(func(c *faults.Config) { c.Plans = badHalfMinute[i].Faults })
}
