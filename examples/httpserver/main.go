// Httpserver is a program with an HTTP server that has a rate limit for each tenant, a bulkhead around a slow handler,
// and a health endpoint. Without -addr, the program sends requests to its own server and prints the responses.
//
//	go run ./examples/httpserver
//	go run ./examples/httpserver -addr 127.0.0.1:8080   # stop it with Ctrl-C: it drains
//	curl -i -H 'Api-Key: key-of-a' http://127.0.0.1:8080/hello
package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/throttle"
)

// accounts has the tenants by their API keys.
var accounts = map[string]string{"key-of-a": "a", "key-of-b": "b"}

// tenant returns the key of the limit that applies to a request. The key is the account or, if the request has no valid
// Api-Key, the client's address. A client cannot choose this key to avoid its limit.
func tenant(r *http.Request) string {
	return cmp.Or(accounts[r.Header.Get("Api-Key")], address(r))
}

var address = resiliencehttp.ClientIP() // pass the addresses of your proxies, if there are any

// A server has the handlers of the HTTP server and their policies.
type server struct {
	tenants *throttle.Group[string]
	paying  *throttle.Group[string]
	reports *bulkhead.Bulkhead
	work    func(context.Context) error // creates a report
}

func newServer(work func(context.Context) error) *server {
	return &server{
		tenants: throttle.NewGroup(throttle.GroupConfig[string]{
			Config: throttle.Config{Rate: throttle.PerMinute(5), Burst: 5},
		}),
		paying: throttle.NewGroup(throttle.GroupConfig[string]{
			Config: throttle.Config{Rate: throttle.PerMinute(600), Burst: 100},
		}),
		reports: bulkhead.New(bulkhead.Config{Name: "reports", Limit: 2}),
		work:    work,
	}
}

// Admit takes a token from the tenant's limit. A paying tenant has a higher limit.
func (s *server) Admit(ctx context.Context, tenant string) (throttle.Decision, error) {
	if tenant == "b" { // a paying tenant
		return s.paying.Admit(ctx, tenant)
	}
	return s.tenants.Admit(ctx, tenant)
}

func (s *server) handler() http.Handler {
	limit := resiliencehttp.Server{LimitName: "tenant"}.ThrottleBy(s, tenant)
	mux := http.NewServeMux()
	mux.Handle("GET /hello", limit(http.HandlerFunc(s.hello)))
	mux.Handle("GET /report", limit(resiliencehttp.Server{}.Bulkhead(s.reports)(http.HandlerFunc(s.report))))
	// The health endpoint has no limit, because requests of the monitoring must always be admitted.
	reg := registry.New()
	reg.MustAdd(s.reports)
	mux.Handle("GET /health", resiliencehttp.Health(reg))
	return mux
}

func (s *server) hello(w http.ResponseWriter, r *http.Request) {
	fmt.Fprintln(w, "hello", tenant(r))
}

func (s *server) report(w http.ResponseWriter, r *http.Request) {
	if err := s.work(r.Context()); err != nil {
		http.Error(w, "canceled", http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "a long report")
}

func main() {
	addr := flag.String("addr", "", "the address to serve; empty means a demonstration")
	flag.Parse()
	if err := start(*addr); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func start(addr string) error {
	if addr == "" {
		return run(os.Stdout)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	slow := func(ctx context.Context) error {
		select {
		case <-time.After(3 * time.Second):
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return serve(ctx, l, newServer(slow).handler(), 5*time.Second)
}

// serve serves requests until ctx is done. Then it accepts no more requests, and waits for the requests in progress.
// After the time grace, it cancels the contexts of these requests. http.Server.Shutdown does not cancel them, so
// without this, a handler that waits in a queue or for a slow dependency would delay the exit.
func serve(ctx context.Context, l net.Listener, handler http.Handler, grace time.Duration) error {
	requests, cancel := context.WithCancel(context.Background())
	defer cancel()
	server := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 5 * time.Second,
		BaseContext:       func(net.Listener) context.Context { return requests },
	}
	server.RegisterOnShutdown(func() { time.AfterFunc(grace, cancel) })
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(l) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	deadline, cancelDeadline := context.WithTimeout(context.Background(), 2*grace+time.Second)
	defer cancelDeadline()
	return server.Shutdown(deadline)
}

func run(out io.Writer) error {
	started, finish := make(chan struct{}), make(chan struct{})
	s := newServer(func(context.Context) error {
		started <- struct{}{}
		<-finish
		return nil
	})
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

	fmt.Fprintln(out, "A tenant over its limit is refused, with Retry-After; the other tenant is not affected:")
	for range 6 {
		if err := get("/hello", "key-of-a"); err != nil {
			return err
		}
	}
	if err := get("/hello", "key-of-b"); err != nil {
		return err
	}

	fmt.Fprintln(out, "At most two reports run at the same time; other handlers stay fast:")
	var reports sync.WaitGroup
	for range 2 {
		reports.Go(func() {
			resp, err := ts.Client().Get(ts.URL + "/report")
			if err == nil {
				_ = resp.Body.Close()
			}
		})
		<-started
	}
	for _, path := range []string{"/report", "/hello", "/health"} {
		if err := get(path, "key-of-b"); err != nil {
			return err
		}
	}
	close(finish)
	reports.Wait()
	return get("/health", "")
}

// text returns the body of a response. If the body is a problem document (RFC 9457), text returns its title.
func text(resp *http.Response, body []byte) string {
	var problem struct{ Title string }
	if resp.Header.Get("Content-Type") == "application/problem+json" && json.Unmarshal(body, &problem) == nil {
		return problem.Title
	}
	return string(bytes.TrimSpace(body))
}
