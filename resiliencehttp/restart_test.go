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

// A streaming is a gateway that passes on streams of events of a replica to 30 clients.
type streaming struct {
	restart              func(time.Duration) // cuts the replica's connections and refuses new ones
	transport            *resiliencehttp.ClientTransport
	live, opened, failed atomic.Int64 // streams
	stop                 func()
}

// newStreaming starts the clients. A client reconnects 100ms after its stream has ended; a browser waits longer.
//
// ReverseProxy starts a timer of -1ns for each stream. In a bubble, one in 60,000 of them crashes the race detector of
// Go 1.26.
func newStreaming(t *testing.T, protocols *http.Protocols) *streaming {
	if testing.Short() {
		t.Skip("crashes the race detector")
	}
	s := new(streaming)
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
	}, protocols)
	s.restart = restartable(replica)
	s.transport = resiliencehttp.NewTransport(resiliencehttp.ClientConfig{Base: replica})
	gateway := serveMemory(t, (&httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "http", Host: "replica"})
		},
		Transport: s.transport, FlushInterval: -1, ErrorLog: log.New(io.Discard, "", 0),
	}).ServeHTTP, protocols, func(s *http.Server) { s.ErrorLog = log.New(io.Discard, "", 0) })

	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 30 {
		wg.Go(func() {
			for ctx.Err() == nil {
				readEvents(ctx, gateway, &s.live, &s.opened, &s.failed)
				time.Sleep(100 * time.Millisecond)
			}
		})
	}
	s.stop = func() {
		cancel()
		wg.Wait()
		time.Sleep(time.Minute)
	}
	return s
}

// The replica refuses connections for 50ms. Each client reconnects once after that, and no reconnect fails or is
// refused.
func TestGatewayStreamsSurviveARestart(t *testing.T) {
	for wire, protocols := range wires {
		t.Run(wire, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStreaming(t, protocols())
				defer s.stop()
				time.Sleep(10 * time.Second)
				require.EqualValues(t, 30, s.live.Load())
				s.restart(50 * time.Millisecond)
				time.Sleep(time.Second)
				require.EqualValues(t, 30, s.live.Load())
				require.EqualValues(t, 60, s.opened.Load())
				require.Zero(t, s.failed.Load())
				b, _ := s.transport.Breakers.Get("replica:80")
				require.Equal(t, breaker.Closed, b.State())
				require.Zero(t, b.Stats().Refused)
			})
		})
	}
}

// The replica refuses connections for 200ms, in which each client reconnects. The breaker opens for less than a second.
// It closes when the stream of a probe has continued for its OpenFor, and then the last clients reconnect.
func TestGatewayStreamsSurviveAnOutage(t *testing.T) {
	for wire, protocols := range wires {
		t.Run(wire, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStreaming(t, protocols())
				defer s.stop()
				time.Sleep(10 * time.Second)
				s.restart(200 * time.Millisecond)
				time.Sleep(2 * time.Second)
				b, _ := s.transport.Breakers.Get("replica:80")
				require.Equal(t, breaker.Closed, b.State())
				time.Sleep(time.Second)
				require.EqualValues(t, 30, s.live.Load())
			})
		})
	}
}

// 30 callers send a GET every 100ms. The server refuses connections for 200ms. A second after its return, the breaker
// is closed again.
func TestBreakerClosesSoonAfterAnOutage(t *testing.T) {
	for wire, protocols := range wires {
		t.Run(wire, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				base := serveMemory(t, func(http.ResponseWriter, *http.Request) {}, protocols())
				restart := restartable(base)
				transport := resiliencehttp.NewTransport(resiliencehttp.ClientConfig{Base: base})
				client := &http.Client{Transport: transport}
				ctx, cancel := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				for range 30 {
					wg.Go(func() {
						for ctx.Err() == nil {
							_ = fetch(ctx, client, "http://a/")
							time.Sleep(100 * time.Millisecond)
						}
					})
				}
				time.Sleep(10 * time.Second)
				restart(200 * time.Millisecond)
				time.Sleep(time.Second)
				b, _ := transport.Breakers.Get("a:80")
				require.Equal(t, breaker.Closed, b.State())
				require.NoError(t, fetch(t.Context(), client, "http://a/"))
				cancel()
				wg.Wait()
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
