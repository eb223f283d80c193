// Standard lives through the quickstart's bad half minute, compressed into ten seconds,
// with a client that is one line: a breaker, a bulkhead and a retry budget for the host,
// two time-outs, and the last answer known where there is no new one.
//
//	go run ./examples/standard
package main

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/faults"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resiliencehttp"
)

func main() {
	if _, err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "standard:", err)
		os.Exit(1)
	}
}

// A phase is a stretch of the backend's life, of a second and a half.
type phase struct {
	name    string
	workers int // requests that the backend works on at once; more wait their turn
	faults  []faults.Plan

	mu                     sync.Mutex
	calls, answered, stale int
	took                   []time.Duration
	requests               atomic.Int64 // that have reached the backend
}

const (
	lasts    = 1500 * time.Millisecond
	every    = 5 * time.Millisecond // a call begins
	products = 40
)

// badHalfMinute returns the phases of the quickstart.
func badHalfMinute() []*phase {
	answers := func(in time.Duration) faults.Plan { return faults.Plan{Kind: faults.Latency, Delay: in} }
	errors := func(share float64) faults.Plan { return faults.Plan{Kind: faults.Status, Share: share} }
	return []*phase{
		{name: "healthy", workers: 1000, faults: []faults.Plan{answers(5 * time.Millisecond)}},
		{name: "30% errors", workers: 1000, faults: []faults.Plan{answers(5 * time.Millisecond), errors(0.3)}},
		{name: "overloaded", workers: 6, faults: []faults.Plan{answers(60 * time.Millisecond)}},
		{name: "hanging", workers: 1000, faults: []faults.Plan{{Kind: faults.Hang}}},
		{name: "down", workers: 1000, faults: []faults.Plan{{Kind: faults.Refuse}}},
		{name: "recovering", workers: 10, faults: []faults.Plan{answers(20 * time.Millisecond), errors(0.2)}},
		{name: "healthy again", workers: 1000, faults: []faults.Plan{answers(5 * time.Millisecond)}},
	}
}

func run(out io.Writer) ([]*phase, error) {
	phases := badHalfMinute()
	var now atomic.Pointer[phase]
	now.Store(phases[0])
	script := faults.New(faults.Config{Name: "backend", Enabled: true, Seed: 7})
	workers := bulkhead.New(bulkhead.Config{Limit: 1000, MaxWait: -1})
	backend := resiliencehttp.Bulkhead(workers)(faults.Handler(script, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "product %s", r.URL.Path)
	})))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		now.Load().requests.Add(1)
		backend.ServeHTTP(w, r)
	}))
	defer server.Close()
	defer server.CloseClientConnections() // of requests that hang

	reg := registry.New()
	client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{Name: "products", Timeout: 750 * time.Millisecond, Register: reg.MustAdd})
	product := func(r *http.Request) string { return r.URL.String() } // the same for everybody
	client.Transport = resiliencehttp.LastKnown(client.Transport, 16<<20, time.Minute, product)
	defer client.CloseIdleConnections()

	for product := range products { // a service that has just started is not what this shows
		(&phase{}).call(client, server.URL, product)
	}
	phases[0].requests.Store(0)
	var calls sync.WaitGroup
	due := time.Now()
	for _, p := range phases {
		if err := workers.SetLimit(p.workers); err != nil {
			return nil, err
		}
		if err := script.Update(func(c *faults.Config) { c.Plans = p.faults }); err != nil {
			return nil, err
		}
		now.Store(p)
		for end := due.Add(lasts); due.Before(end); due = due.Add(every) {
			time.Sleep(time.Until(due))
			calls.Go(func() { p.call(client, server.URL, rand.IntN(products)) })
		}
	}
	calls.Wait()

	fmt.Fprintf(out, "%-14s %6s %8s %6s %6s %8s %9s\n", "phase", "calls", "answered", "stale", "failed", "p99", "requests")
	for _, p := range phases {
		slices.Sort(p.took)
		fmt.Fprintf(out, "%-14s %6d %8d %6d %6d %8v %9d\n", p.name, p.calls, p.answered, p.stale, p.calls-p.answered,
			p.took[len(p.took)*99/100].Round(time.Millisecond), p.requests.Load())
	}
	for e := range reg.All() {
		for f := range e.Figures() {
			switch f.Name {
			case "retry.calls", "breaker.transitions", "bulkhead.calls", "budget.retries":
				if f.Value > 0 {
					fmt.Fprintln(out, f)
				}
			}
		}
	}
	return phases, nil
}

// call asks for a product and counts what became of it.
func (p *phase) call(client *http.Client, url string, product int) {
	start := time.Now()
	answered, stale := false, false
	if res, err := client.Get(url + "/products/" + strconv.Itoa(product)); err == nil {
		_, err = io.Copy(io.Discard, res.Body)
		_ = res.Body.Close()
		answered = err == nil && res.StatusCode == http.StatusOK
		stale = answered && res.Header.Get("Cache-Status") != ""
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls++
	p.took = append(p.took, time.Since(start))
	if answered {
		p.answered++
	}
	if stale {
		p.stale++
	}
}
