package resiliencehttp_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/throttle"
)

// BenchmarkTransport measures what a Transport adds: its Base answers at once.
func BenchmarkTransport(b *testing.B) {
	base := roundTripper(func(r *http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: 200, Body: io.NopCloser(strings.NewReader("hello"))}, nil
	})
	for _, c := range []struct {
		name string
		mw   resilience.Middleware
	}{
		{"none", nil},
		{"empty", resilience.Chain()},
		{"retry", retries(3).Wrap},
		{"retry-timeout", resilience.Chain(retries(3).Wrap, resilience.Timeout(time.Minute))},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			transport := &resiliencehttp.Transport{Base: base, Middleware: c.mw}
			req := httptest.NewRequest("GET", "http://example.com", nil)
			for b.Loop() {
				resp, err := transport.RoundTrip(req)
				if err != nil {
					b.Fatal(err)
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
			}
		})
	}
}

func BenchmarkThrottle(b *testing.B) {
	b.ReportAllocs()
	limit := throttle.New(throttle.Config{Rate: 1e9, Burst: 1e9})
	h := resiliencehttp.Server{LimitName: "all"}.Throttle(limit)(hello)
	r := httptest.NewRequest("GET", "/", nil)
	for b.Loop() {
		h.ServeHTTP(httptest.NewRecorder(), r)
	}
}
