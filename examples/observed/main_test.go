package main

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A page is a strings.Builder that is safe for concurrent use.
type page struct {
	mu   sync.Mutex
	text strings.Builder
}

func (p *page) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.text.Write(b)
}

func TestObserved(t *testing.T) {
	var sent page
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		_, _ = sent.Write(append([]byte(r.URL.Path), body...))
	}))
	defer collector.Close()
	*addr, *otlp, *lasts = "127.0.0.1:0", collector.URL, time.Second

	var out page
	require.NoError(t, run(t.Context(), &out))
	text := out.text.String()
	for metric, outcome := range map[string]string{"breaker_calls_total": "failure", "call_duration_seconds_count": "ok"} {
		require.Regexp(t, `resilience_`+metric+`\{.*resilience_name="users".*resilience_outcome="`+outcome+`"\} [1-9]`, text)
	}
	require.Regexp(t, `msg="breaker changed" .*to=open.* trace_id=[0-9a-f]{32} span_id=[0-9a-f]{16}`, text)
	require.Contains(t, sent.text.String(), "/v1/traces")
	require.Contains(t, sent.text.String(), "users attempt")
	require.Contains(t, sent.text.String(), "/v1/metrics")
	require.Contains(t, sent.text.String(), "resilience.breaker.state")
}

// An interrupt ends ctx.
func TestObservedEndsWithItsContext(t *testing.T) {
	var sent page
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		_, _ = sent.Write(append([]byte(r.URL.Path), body...))
	}))
	defer collector.Close()
	*addr, *otlp, *lasts = "127.0.0.1:0", collector.URL, time.Hour
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	require.NoError(t, run(ctx, io.Discard))
	require.True(t, strings.Contains(sent.text.String(), "resilience.breaker.state"), "the last metrics are sent")
}
