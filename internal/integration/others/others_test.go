// Package others_test runs the HTTP clients and servers of other projects through the policies of
// resiliencehttp, on both sides. Those of grpc-go are in the package grpc beside it.
package others_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

// burst is how many requests a server takes for each path. There are no more within an hour.
const burst = 20

// limit returns the middleware of a server, whose slots must be free when the test ends.
func limit(t *testing.T) func(http.Handler) http.Handler {
	slots := bulkhead.New(bulkhead.Config{Limit: 10})
	limits := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Rate: 1.0 / 3600, Burst: burst}})
	server := resiliencehttp.Server{}
	throttled := server.ThrottleBy(limits, func(r *http.Request) string { return r.URL.Path })
	t.Cleanup(func() { requireFree(t, slots) })
	return func(next http.Handler) http.Handler {
		return throttled(server.Bulkhead(slots)(next))
	}
}

// A server counts its requests and answers some of them with 503.
type server struct {
	*httptest.Server
	mu   sync.Mutex
	seen map[string]int
	busy map[string]bool
}

// newServer starts a server of handler, which has the middleware that it needs already. It speaks
// HTTP/2 if secure.
func newServer(t *testing.T, handler http.Handler, secure bool) *server {
	s := &server{seen: map[string]int{}, busy: map[string]bool{}}
	s.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s.isBusy(r.Method + " " + r.URL.Path) {
			_, _ = io.Copy(io.Discard, r.Body)
			http.Error(w, "come back later", http.StatusServiceUnavailable)
			return
		}
		handler.ServeHTTP(w, r)
	}))
	if s.EnableHTTP2 = secure; secure {
		s.StartTLS()
	} else {
		s.Start()
	}
	t.Cleanup(s.Close)
	return s
}

// busyOnce has the next request for what, "GET /path", answered with 503.
func (s *server) busyOnce(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.busy[what], s.seen[what] = true, 0
}

func (s *server) isBusy(what string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen[what]++
	busy := s.busy[what]
	s.busy[what] = false
	return busy
}

// count returns how often what was asked for, since the last busyOnce.
func (s *server) count(what string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.seen[what]
}

// newClient returns a client of s, with the fields of a Transport, and the slots that its requests
// hold. These must be free when the test ends. Its times are so long that a slow machine does not
// meet them.
func (s *server) newClient(t *testing.T, of *resiliencehttp.Transport) (*http.Client, *bulkhead.Bulkhead) {
	slots := bulkhead.New(bulkhead.Config{Limit: 10})
	if of.Base == nil {
		of.Base = s.Client().Transport
	}
	client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{
		Timeout:               10 * time.Minute,
		AttemptTimeout:        5 * time.Minute,
		ResponseHeaderTimeout: time.Minute,
		Idle:                  time.Minute,
		Retry:                 retry.New(retry.Config{Attempts: 3, Backoff: retry.Constant(0)}).Wrap,
		Bulkhead:              slots.Wrap,
		Base:                  of.Base,
		Judge:                 of.Judge,
		Hedge:                 of.Hedge,
		Replayable:            of.Replayable,
		MaxBuffer:             of.MaxBuffer,
	})
	t.Cleanup(func() { requireFree(t, slots) })
	return client, slots
}

// requireFree requires that slots were in use, and are free again.
func requireFree(t *testing.T, slots *bulkhead.Bulkhead) {
	require.Positive(t, slots.Stats().Admitted)
	require.Eventually(t, func() bool { return slots.Stats().InFlight == 0 }, time.Minute, time.Millisecond)
}
