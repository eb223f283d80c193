package clients_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync/atomic"

	"github.com/digitalocean/godo"
	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"golang.org/x/oauth2"
	"golang.org/x/oauth2/clientcredentials"

	"github.com/go-resilience/resilience/resiliencehttp"
)

// The token is fetched, and the requests that have it are sent, through the transport.
func Example_oauth2() {
	var tokens atomic.Int64
	mux := http.NewServeMux()
	mux.HandleFunc("POST /token", func(w http.ResponseWriter, _ *http.Request) {
		tokens.Add(1)
		w.Header().Set("Content-Type", "application/json")
		_, _ = fmt.Fprint(w, `{"access_token": "abc", "token_type": "Bearer", "expires_in": 3600}`)
	})
	mux.HandleFunc("GET /orders", func(w http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprint(w, r.Header.Get("Authorization"))
	})
	server := httptest.NewServer(mux)
	defer server.Close()

	transport := resiliencehttp.NewTransport(resiliencehttp.ClientConfig{Name: "orders"})
	cfg := clientcredentials.Config{ClientID: "shop", ClientSecret: "secret", TokenURL: server.URL + "/token"}
	ctx := context.WithValue(context.Background(), oauth2.HTTPClient, &http.Client{Transport: transport})
	client := cfg.Client(ctx)

	for range 2 {
		resp, err := client.Get(server.URL + "/orders")
		if err != nil {
			fmt.Println(err)
			return
		}
		_ = resp.Body.Close()
		fmt.Println(resp.Status)
	}
	fmt.Println(tokens.Load(), "token")
	// Output:
	// 200 OK
	// 200 OK
	// 1 token
}

// otelhttp around the transport makes a span of a request with all its attempts. As the Base of the transport, it makes
// a span of each attempt.
func Example_otelhttp() {
	var requests atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if requests.Add(1) == 1 {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer server.Close()

	spans := tracetest.NewInMemoryExporter()
	provider := trace.NewTracerProvider(trace.WithSyncer(spans))
	traced := func(base http.RoundTripper, name string) http.RoundTripper {
		return otelhttp.NewTransport(base, otelhttp.WithTracerProvider(provider),
			otelhttp.WithSpanNameFormatter(func(string, *http.Request) string { return name }))
	}
	transport := resiliencehttp.NewTransport(resiliencehttp.ClientConfig{
		Name: "users", Base: traced(http.DefaultTransport, "attempt"),
	})
	client := &http.Client{Transport: traced(transport, "request")}

	resp, err := client.Get(server.URL)
	if err != nil {
		fmt.Println(err)
		return
	}
	_ = resp.Body.Close()
	for _, span := range spans.GetSpans() {
		fmt.Println(span.Name, span.Status.Code)
	}
	// Unordered output:
	// attempt Error
	// attempt Unset
	// request Unset
}

// An SDK takes an http.Client. The transport retries the request whose first response is 503. The SDK must not retry
// too; godo does so only with godo.WithRetryAndBackoffs.
func Example_sdk() {
	var requests atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if requests.Add(1) == 1 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		_, _ = fmt.Fprintf(w, `{"droplet": {"id": 7, "name": %q}}`, r.URL.Path)
	}))
	defer server.Close()

	transport := resiliencehttp.NewTransport(resiliencehttp.ClientConfig{Name: "droplets"})
	client, err := godo.New(&http.Client{Transport: transport}, godo.SetBaseURL(server.URL))
	if err != nil {
		fmt.Println(err)
		return
	}
	droplet, resp, err := client.Droplets.Get(context.Background(), 7)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(resp.Status, droplet.Name)
	fmt.Println(requests.Load(), "requests")
	// Output:
	// 200 OK /v2/droplets/7
	// 2 requests
}
