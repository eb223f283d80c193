package benchmarks

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/failsafe-go/failsafe-go/failsafehttp"
	"github.com/hashicorp/go-retryablehttp"

	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
)

func BenchmarkHTTP(b *testing.B) { benchmark(b, httpCases) }

var httpCases = []comparison{
	{"get-ok", getters(resiliencehttp.ClientConfig{}, 200)},
	// Of three requests two fail, which no breaker and no budget would let pass for long.
	{"get-503-503-200", getters(resiliencehttp.ClientConfig{
		Retry:   retry.New(retry.Config{Backoff: retry.Constant(0)}).Wrap,
		Breaker: resiliencehttp.Disabled,
	}, 503, 503, 200)},
}

// getters are clients that GET from a server on loopback, each over a transport
// of its own, and read the answer. The server goes round the statuses, so that a
// client that retries at once has one success for each round of them. A failed
// answer has no body: failsafe would leave that open, and its connection with it,
// until the process has no descriptors left. No client is told to wait, though
// the others set a timer for it. Ours has the timeouts and the policies of NewClient
// besides, where cfg does not say otherwise.
func getters(cfg resiliencehttp.ClientConfig, statuses ...int) []impl {
	impls := []impl{
		{"resilience", func(b *testing.B) {
			get(b, statuses, func(base *http.Transport) func(string) (*http.Response, error) {
				cfg.Base = base
				return resiliencehttp.NewClient(cfg).Get
			})
		}},
		{"failsafe", func(b *testing.B) {
			get(b, statuses, func(base *http.Transport) func(string) (*http.Response, error) {
				policy := failsafehttp.NewRetryPolicyBuilder().WithMaxRetries(2).Build()
				return (&http.Client{Transport: failsafehttp.NewRoundTripper(base, policy)}).Get
			})
		}},
		{"retryablehttp", func(b *testing.B) {
			get(b, statuses, func(base *http.Transport) func(string) (*http.Response, error) {
				client := retryablehttp.NewClient()
				client.HTTPClient.Transport = base
				client.RetryMax = 2
				client.Backoff = func(_, _ time.Duration, _ int, _ *http.Response) time.Duration { return 0 }
				client.Logger = nil
				return client.Get
			})
		}},
	}
	if len(statuses) == 1 { // nothing to retry
		impls = append(impls, impl{"plain", func(b *testing.B) {
			get(b, statuses, func(base *http.Transport) func(string) (*http.Response, error) {
				return (&http.Client{Transport: base}).Get
			})
		}})
	}
	return impls
}

// get reports, besides the time, how many connections the calls have left open.
func get(b *testing.B, statuses []int, client func(*http.Transport) func(string) (*http.Response, error)) {
	var requests, open atomic.Int64
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		status := statuses[(requests.Add(1)-1)%int64(len(statuses))]
		w.WriteHeader(status)
		if status == 200 {
			_, _ = io.WriteString(w, "a short answer")
		}
	}))
	server.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		switch s {
		case http.StateNew:
			open.Add(1)
		case http.StateClosed, http.StateHijacked:
			open.Add(-1)
		}
	}
	server.Start()
	defer server.Close()
	base := &http.Transport{}
	defer base.CloseIdleConnections()
	call := client(base)
	for b.Loop() {
		resp, err := call(server.URL)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			b.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != 200 {
			b.Fatal(resp.Status)
		}
	}
	b.ReportMetric(float64(open.Load()), "open-conns")
}
