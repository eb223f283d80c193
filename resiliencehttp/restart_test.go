package resiliencehttp_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/resiliencehttp"
)

// A gateway passes on 30 streams of events. The replica behind it restarts: it cuts all of them, and refuses
// connections for 50ms. Each client reconnects once after that, and no reconnect fails or is refused.
func TestGatewayStreamsSurviveARestart(t *testing.T) {
	for wire, protocols := range wires {
		t.Run(wire, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				replica := serveMemory(t, func(w http.ResponseWriter, r *http.Request) {
					w.Header().Set("Content-Type", "text/event-stream")
					for n := 0; r.Context().Err() == nil; n++ {
						_, _ = fmt.Fprintf(w, "data: %d\n\n", n)
						_ = http.NewResponseController(w).Flush()
						select {
						case <-time.After(time.Second):
						case <-r.Context().Done():
						}
					}
				}, protocols())
				restart := restartable(replica)
				transport := resiliencehttp.NewTransport(resiliencehttp.ClientConfig{Base: replica})
				gateway := serveMemory(t, (&httputil.ReverseProxy{
					Rewrite: func(r *httputil.ProxyRequest) {
						r.SetURL(&url.URL{Scheme: "http", Host: "replica"})
					},
					Transport: transport, FlushInterval: -1, ErrorLog: log.New(io.Discard, "", 0),
				}).ServeHTTP, protocols(), func(s *http.Server) { s.ErrorLog = log.New(io.Discard, "", 0) })

				ctx, cancel := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				var live, opened, failed atomic.Int64
				for range 30 {
					wg.Go(func() {
						for ctx.Err() == nil {
							readEvents(ctx, gateway, &live, &opened, &failed)
							time.Sleep(100 * time.Millisecond) // a browser waits longer
						}
					})
				}
				time.Sleep(10 * time.Second)
				require.EqualValues(t, 30, live.Load())
				restart(50 * time.Millisecond)
				time.Sleep(time.Second)
				require.EqualValues(t, 30, live.Load())
				require.EqualValues(t, 60, opened.Load())
				require.Zero(t, failed.Load())
				b, _ := transport.Breakers.Get("replica:80")
				require.Equal(t, breaker.Closed, b.State())
				require.Zero(t, b.Stats().Refused)
				cancel()
				wg.Wait()
				time.Sleep(time.Minute)
			})
		})
	}
}

// restartable returns a function that cuts the connections of base and refuses new ones for d.
func restartable(base *http.Transport) func(d time.Duration) {
	var mu sync.Mutex
	var down bool
	var conns []net.Conn
	dial := base.DialContext
	base.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		mu.Lock()
		refused := down
		mu.Unlock()
		if refused {
			return nil, &net.OpError{Op: "dial", Net: network, Err: syscall.ECONNREFUSED}
		}
		c, err := dial(ctx, network, addr)
		if err == nil {
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
		}
		return c, err
	}
	return func(d time.Duration) {
		mu.Lock()
		down = true
		for _, c := range conns {
			_ = c.Close()
		}
		mu.Unlock()
		time.Sleep(d)
		mu.Lock()
		down = false
		mu.Unlock()
	}
}

// readEvents reads a stream of events until it ends.
func readEvents(ctx context.Context, base http.RoundTripper, live, opened, failed *atomic.Int64) {
	req, err := http.NewRequestWithContext(ctx, "GET", "http://gateway/", nil)
	if err != nil {
		return
	}
	resp, err := base.RoundTrip(req)
	if err != nil {
		if ctx.Err() == nil {
			failed.Add(1)
		}
		return
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		failed.Add(1)
		return
	}
	opened.Add(1)
	live.Add(1)
	defer live.Add(-1)
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
	}
}
