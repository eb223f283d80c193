// Httpserver is a server that looks after itself: each tenant has a limit, a slow
// part of it has a bulkhead, and a health endpoint says how it does. It calls
// itself and shows what clients see.
package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/throttle"
)

// accounts are the tenants, by their API keys.
var accounts = map[string]string{"key-of-a": "a", "key-of-b": "b"}

// tenant returns the key that a request is limited by: its account or, without a
// valid Api-Key, the address of the client, which that cannot choose either.
func tenant(r *http.Request) string {
	return cmp.Or(accounts[r.Header.Get("Api-Key")], address(r))
}

var address = resiliencehttp.ClientIP() // name the proxies in front here, if there are any

// A server has the policies of its handlers.
type server struct {
	tenants *throttle.Group[string]
	paying  *throttle.Group[string]
	reports *bulkhead.Bulkhead
	begun   chan struct{} // gets a value for each report that is begun
	finish  chan struct{} // closed to let them end
}

func newServer() (*server, error) {
	s := &server{
		tenants: throttle.NewGroup(throttle.GroupConfig[string]{
			Config: throttle.Config{Rate: throttle.PerMinute(5), Burst: 5},
		}),
		paying: throttle.NewGroup(throttle.GroupConfig[string]{
			Config: throttle.Config{Rate: throttle.PerMinute(600), Burst: 100},
		}),
		reports: bulkhead.New(bulkhead.Config{Name: "reports", Limit: 2}),
		begun:   make(chan struct{}),
		finish:  make(chan struct{}),
	}
	return s, nil
}

// Admit takes from the limit of a tenant's plan.
func (s *server) Admit(ctx context.Context, tenant string) (throttle.Decision, error) {
	if tenant == "b" { // which pays for more
		return s.paying.Admit(ctx, tenant)
	}
	return s.tenants.Admit(ctx, tenant)
}

func (s *server) handler() http.Handler {
	limit := resiliencehttp.Server{LimitName: "tenant"}.ThrottleBy(s, tenant)
	mux := http.NewServeMux()
	mux.Handle("GET /hello", limit(http.HandlerFunc(s.hello)))
	mux.Handle("GET /report", limit(resiliencehttp.Server{}.Bulkhead(s.reports)(http.HandlerFunc(s.report))))
	// Not throttled: the monitoring must always get through.
	reg := registry.New()
	reg.MustAdd(s.reports)
	mux.Handle("GET /health", resiliencehttp.Health(reg))
	return mux
}

func (s *server) hello(w http.ResponseWriter, r *http.Request) {
	fmt.Fprintln(w, "hello", tenant(r))
}

func (s *server) report(w http.ResponseWriter, r *http.Request) {
	s.begun <- struct{}{}
	select {
	case <-s.finish:
		fmt.Fprintln(w, "a long report")
	case <-r.Context().Done():
	}
}

func main() {
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(out io.Writer) error {
	s, err := newServer()
	if err != nil {
		return err
	}
	ts := httptest.NewServer(s.handler())
	defer ts.Close()
	const row = "  %-8s  %-7s  %-6v  %-19s  %-11s  %s\n"
	fmt.Fprintf(out, row, "Api-Key", "path", "status", "RateLimit", "Retry-After", "answer")
	get := func(path, key string) error {
		req, err := http.NewRequest(http.MethodGet, ts.URL+path, nil)
		if err != nil {
			return err
		}
		req.Header.Set("Api-Key", key)
		resp, err := ts.Client().Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		fmt.Fprintf(out, row, key, path, resp.StatusCode,
			resp.Header.Get("RateLimit"), resp.Header.Get("Retry-After"), text(resp, body))
		return err
	}

	fmt.Fprintln(out, "A tenant that asks for too much is told when to come back; the other does not notice:")
	for range 6 {
		if err := get("/hello", "key-of-a"); err != nil {
			return err
		}
	}
	if err := get("/hello", "key-of-b"); err != nil {
		return err
	}

	fmt.Fprintln(out, "Two reports at once are enough; what is fast stays fast:")
	var reports sync.WaitGroup
	for range 2 {
		reports.Go(func() {
			resp, err := ts.Client().Get(ts.URL + "/report")
			if err == nil {
				_ = resp.Body.Close()
			}
		})
		<-s.begun
	}
	for _, path := range []string{"/report", "/hello", "/health"} {
		if err := get(path, "key-of-b"); err != nil {
			return err
		}
	}
	close(s.finish)
	reports.Wait()
	return get("/health", "")
}

// text returns what a response says; of a problem document, its title.
func text(resp *http.Response, body []byte) string {
	var problem struct{ Title string }
	if resp.Header.Get("Content-Type") == "application/problem+json" && json.Unmarshal(body, &problem) == nil {
		return problem.Title
	}
	return string(bytes.TrimSpace(body))
}
