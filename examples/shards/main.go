// Shards reads a store of eight shards over HTTP while one of them hangs: without
// a breaker, with one breaker for the whole store, and with a breaker per shard.
// The catalogue calls the last "resource differentiation": what fails on its own
// is guarded on its own.
package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/faults"
)

const (
	shards   = 8
	sick     = 3
	clients  = 4
	reads    = 240 // of each client; the sick shard is well for the last third
	patience = 50 * time.Millisecond
)

// A shard answers immediately or, while its script is on, not at all.
type shard struct {
	url    string
	script *faults.Script
}

func newShard() (*shard, *httptest.Server) {
	script := faults.New(faults.Config{Plans: []faults.Plan{{Kind: faults.Hang}}})
	server := httptest.NewServer(faults.Handler(script, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintln(w, "value")
	})))
	return &shard{server.URL, script}, server
}

func (s *shard) sick() bool { return s.script.Config().Enabled }

// get reads from s and does not wait for longer than its patience. The limit is
// inside the breaker, so that running out of it counts as a failure of the shard.
func (s *shard) get(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	req, _ := http.NewRequestWithContext(ctx, http.MethodGet, s.url, nil) // of a listener: it parses
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// A reader runs get, which reads from shard i, under its policy.
type reader func(ctx context.Context, i int, get func(context.Context) error) error

// circuit opens when a tenth of the last 40 calls have failed.
var circuit = breaker.Config{Name: "store", FailureRate: 0.1, WindowCalls: 40, MinCalls: 20, OpenFor: 100 * time.Millisecond}

func none(ctx context.Context, _ int, get func(context.Context) error) error { return get(ctx) }

func oneBreaker() reader {
	store := breaker.New(circuit)
	return func(ctx context.Context, _ int, get func(context.Context) error) error { return store.Do(ctx, get) }
}

func breakerPerShard() reader {
	return breaker.NewGroup(breaker.GroupConfig[int]{Config: circuit}).Do
}

// An outcome says what became of the reads.
type outcome struct {
	answered int64
	shutOut  int64 // refused, though their shard was well
	spared   int64 // refused, and rightly
	failed   int64 // waited in vain
	reached  int64 // came to the sick shard while it was sick
	took     time.Duration
}

// run serves a new store and lets all clients read from all of its shards.
func run(read reader) outcome {
	var store [shards]*shard
	for i := range store {
		var server *httptest.Server
		store[i], server = newShard()
		defer server.Close()
	}
	store[sick].script.Enable()

	var o outcome
	var wg sync.WaitGroup
	began := time.Now()
	for range clients {
		wg.Go(func() {
			for n := range reads {
				if n == reads*2/3 {
					store[sick].script.Disable()
				}
				s := store[n%shards]
				err := read(context.Background(), n%shards, s.get)
				switch {
				case err == nil:
					atomic.AddInt64(&o.answered, 1)
				case !errors.Is(err, breaker.ErrOpen):
					atomic.AddInt64(&o.failed, 1)
				case s.sick():
					atomic.AddInt64(&o.spared, 1)
				default:
					atomic.AddInt64(&o.shutOut, 1)
				}
				time.Sleep(2 * time.Millisecond)
			}
		})
	}
	wg.Wait()
	o.took = time.Since(began)
	o.reached = store[sick].script.Stats().Injected[faults.Hang]
	return o
}

func main() {
	fmt.Printf("%d clients read from %d shards, of which shard %d hangs for two thirds of the time.\n\n", clients, shards, sick)
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "guarded by\tanswered\trefused, shard well\trefused, shard sick\twaited in vain\treached the sick shard\ttook\t")
	for _, way := range []struct {
		name string
		read reader
	}{{"nothing", none}, {"one breaker", oneBreaker()}, {"a breaker per shard", breakerPerShard()}} {
		o := run(way.read)
		fmt.Fprintf(table, "%s\t%d\t%d\t%d\t%d\t%d\t%v\t\n", way.name, o.answered, o.shutOut, o.spared, o.failed, o.reached, o.took.Round(10*time.Millisecond))
	}
	table.Flush()
}
