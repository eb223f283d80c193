package resiliencehttp_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

// A client whose every request goes through the policies.
func ExampleTransport() {
	requests := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if requests++; requests < 3 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		_, _ = io.WriteString(w, "at last")
	}))
	defer server.Close()

	retries := retry.New(retry.Config{Backoff: retry.Constant(time.Millisecond)})
	retries.Observe(func(ctx context.Context, e retry.Event) {
		slog.DebugContext(ctx, "retry", "event", e.Kind, "attempts", e.Attempts, "in", e.Delay, "err", e.Err)
	})
	circuit := breaker.New(breaker.Config{Name: "api"})
	slots := bulkhead.New(bulkhead.Config{Name: "api", Limit: 16, Queue: 32, MaxWait: 100 * time.Millisecond})
	client := &http.Client{Transport: &resiliencehttp.Transport{
		Middleware: resilience.Chain(retries.Wrap, circuit.Wrap, slots.Wrap, resilience.Timeout(2*time.Second)),
	}}

	resp, err := client.Get(server.URL)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	fmt.Printf("%s after %d requests: %s\n", resp.Status, requests, body)
	// Output: 200 OK after 3 requests: at last
}

// A client whose requests to each host have retries, a breaker, a bulkhead and limits of time.
func ExampleNewClient() {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "hello")
	}))
	defer server.Close()

	client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{Name: "greetings"})
	resp, err := client.Get(server.URL)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close() // releases the request's slot
	body, _ := io.ReadAll(resp.Body)
	fmt.Printf("%s: %s\n", resp.Status, body)
	// Output: 200 OK: hello
}

// An SDK uses the transport. The groups of the transport give access to the policies of each host.
func ExampleNewTransport() {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusNotFound)
	}))
	defer server.Close()

	transport := resiliencehttp.NewTransport(resiliencehttp.ClientConfig{Name: "users"})
	sdk := &http.Client{Transport: transport}
	resp, err := sdk.Get(server.URL)
	if err != nil {
		fmt.Println(err)
		return
	}
	_ = resp.Body.Close()
	b, _ := transport.Breakers.Get(server.Listener.Addr().String())
	fmt.Println(resp.Status, b.State(), b.Stats().Succeeded)
	// Output: 404 Not Found closed 1
}

// A request without an http.Client, whose redirects are not followed.
func ExampleClientTransport_RoundTrip() {
	server := httptest.NewServer(http.RedirectHandler("/new", http.StatusFound))
	defer server.Close()

	transport := resiliencehttp.NewTransport(resiliencehttp.ClientConfig{Name: "pages"})
	req, err := http.NewRequest(http.MethodGet, server.URL, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		fmt.Println(err)
		return
	}
	_ = resp.Body.Close()
	fmt.Println(resp.Status, resp.Header.Get("Location"))
	// Output: 302 Found /new
}

// A Transport without policies returns the response to the request that Prepare has signed.
func ExampleTransport_RoundTrip() {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.Header.Get("Signature"))
	}))
	defer server.Close()

	transport := &resiliencehttp.Transport{Prepare: func(r *http.Request) error {
		r.Header.Set("Signature", "signed "+r.URL.Path)
		return nil
	}}
	req, err := http.NewRequest(http.MethodGet, server.URL+"/orders", nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	fmt.Println(string(body))
	// Output: signed /orders
}

// A GET goes to the second server if the first one fails.
func ExampleFailover() {
	down := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusBadGateway)
	}))
	defer down.Close()
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "from the second")
	}))
	defer up.Close()

	to := func(server *httptest.Server) http.RoundTripper {
		return &resiliencehttp.Transport{Prepare: func(r *http.Request) error {
			r.URL.Host, r.Host = server.Listener.Addr().String(), ""
			return nil
		}}
	}
	client := &http.Client{Transport: resiliencehttp.Failover(to(down), to(up))}
	resp, err := client.Get("http://orders.example/")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	fmt.Println(string(body))
	// Output: from the second
}

// A request that finds no slot is refused.
func ExampleServer_Bulkhead() {
	slots := bulkhead.New(bulkhead.Config{Name: "reports", Limit: 1})
	server := resiliencehttp.Server{BodyIdle: 10 * time.Second}
	handler := server.Bulkhead(slots)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "a report")
	}))
	get := func() int {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
		return w.Code
	}
	fmt.Println(get())
	done, _ := slots.Begin(context.Background())
	fmt.Println(get())
	done(nil)
	// Output:
	// 200
	// 503
}

// Each client of a server has a limit of its own, by its address.
func ExampleServer_ThrottleBy() {
	clients := throttle.NewGroup(throttle.GroupConfig[string]{
		Config: throttle.Config{Rate: throttle.PerMinute(1), Burst: 2},
	})
	behind := netip.MustParsePrefix("10.0.0.0/8") // the load balancer
	limit := resiliencehttp.Server{LimitName: "address"}.ThrottleBy(clients, resiliencehttp.ClientIP(behind))
	handler := limit(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, "hello") }))

	for range 3 {
		r := httptest.NewRequest("GET", "/", nil)
		r.RemoteAddr = "10.0.0.1:4711"
		r.Header.Set("X-Forwarded-For", "192.0.2.7")
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		fmt.Println(w.Code, w.Header().Get("RateLimit-Policy"), w.Header().Get("RateLimit"))
	}
	// Output:
	// 200 "address";q=2;w=120 "address";r=1;t=60
	// 200 "address";q=2;w=120 "address";r=0;t=60
	// 429 "address";q=2;w=120 "address";r=0;t=60
}

// A handler makes calls under its own policies. Refuse writes the response if a policy has refused a call.
func ExampleServer_Refuse() {
	var server resiliencehttp.Server
	db := bulkhead.New(bulkhead.Config{Name: "db", Limit: 1})
	handler := func(w http.ResponseWriter, r *http.Request) {
		err := db.Do(r.Context(), func(context.Context) error { return nil })
		if err != nil && !server.Refuse(w, r, err) {
			http.Error(w, "internal error", http.StatusInternalServerError)
		}
	}
	done, _ := db.Begin(context.Background())
	defer done(nil)
	w := httptest.NewRecorder()
	handler(w, httptest.NewRequest("GET", "/", nil))
	fmt.Println(w.Code, "Retry-After:", w.Header().Get("Retry-After"), w.Header().Get("Content-Type"))
	// Output: 503 Retry-After: 1 application/problem+json
}

// The handler reports the health of a registry's policies.
func ExampleHealth() {
	reg := registry.New()
	circuit := breaker.New(breaker.Config{Name: "users"})
	reg.MustAdd(circuit)
	http.Handle("GET /health", resiliencehttp.Health(reg))
	circuit.ForceOpen(nil)
	w := httptest.NewRecorder()
	http.DefaultServeMux.ServeHTTP(w, httptest.NewRequest("GET", "/health", nil))
	fmt.Print(w.Body)
	// Output: {"status":"warn","checks":[{"name":"breaker/users","status":"fail","state":"forced_open"}]}
}
