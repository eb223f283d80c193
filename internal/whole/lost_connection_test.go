package whole_test

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
)

// A host holds requests or streams back until its connections are cut, and is healthy after that.
type host struct {
	server  *httptest.Server
	holds   atomic.Bool
	arrived chan struct{}
	sent    atomic.Int64 // requests since the cut
	cut     chan struct{}
}

func newHost(t *testing.T, http2 bool) *host {
	h := &host{arrived: make(chan struct{}, 100), cut: make(chan struct{})}
	h.server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !h.holds.Load() {
			h.sent.Add(1)
			_, _ = io.WriteString(w, "ok")
			return
		}
		if r.URL.Path == "/stream" {
			_, _ = io.WriteString(w, "data: first\n\n")
			_ = http.NewResponseController(w).Flush()
		}
		h.arrived <- struct{}{}
		<-h.cut
	}))
	h.server.EnableHTTP2 = http2
	h.server.Config.ErrorLog = log.New(io.Discard, "", 0) // of connections that are cut
	h.server.StartTLS()
	t.Cleanup(h.server.Close)
	return h
}

// cutAll closes every connection once the requests have arrived.
func (h *host) cutAll(requests int) {
	for range requests {
		<-h.arrived
	}
	h.holds.Store(false)
	h.server.CloseClientConnections()
	close(h.cut)
}

// If all connections are lost once, every request is retried and every stream reconnects.
func TestLostConnectionRefusesNothing(t *testing.T) {
	const clients = 30
	for _, http2 := range []bool{true, false} {
		for _, path := range []string{"/", "/stream"} {
			for _, history := range []int{1, 500} {
				t.Run(fmt.Sprintf("http2 %v%s after %d", http2, path, history), func(t *testing.T) {
					h := newHost(t, http2)
					b := breaker.New(breaker.Config{
						ConsecutiveFailures: 10, FailureRate: 0.5, Window: 10 * time.Second, OpenFor: 900 * time.Millisecond,
					})
					retries := retry.New(retry.Config{Attempts: 4, Backoff: retry.Constant(time.Millisecond)})
					client := &http.Client{Transport: &resiliencehttp.Transport{
						Base:       h.server.Client().Transport,
						Middleware: resilience.Chain(retries.Wrap, b.Wrap),
					}}
					get := func() error {
						req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, h.server.URL+path, nil)
						if err != nil {
							return err
						}
						resp, err := client.Do(req)
						if err != nil {
							return err
						}
						_, err = io.Copy(io.Discard, resp.Body)
						return cmp.Or(err, resp.Body.Close())
					}
					for range history {
						require.NoError(t, get())
					}
					h.sent.Store(0)
					h.holds.Store(true)
					var wg sync.WaitGroup
					var failed atomic.Int64
					for range clients {
						wg.Go(func() {
							err := get()
							if path == "/stream" && err != nil {
								err = get() // reconnects
							}
							if err != nil {
								failed.Add(1)
							}
						})
					}
					h.cutAll(clients)
					wg.Wait()
					s := b.Stats()
					require.Zero(t, failed.Load())
					require.EqualValues(t, clients, h.sent.Load())
					require.Zero(t, s.Refused)
					require.Equal(t, breaker.Closed, s.State)
					require.LessOrEqual(t, s.Failed, int64(2*clients))
				})
			}
		}
	}
}
