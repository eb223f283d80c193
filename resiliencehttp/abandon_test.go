package resiliencehttp_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/hedge"
	"github.com/go-resilience/resilience/resiliencehttp"
)

// A cutover is a name that moves to another server while connections to the old one stay open and silent.
type cutover struct {
	base     *http.Transport
	moved    atomic.Bool
	old, new atomic.Int64 // requests that each server has received
	release  chan struct{}
}

func newCutover(t *testing.T, protocols *http.Protocols) *cutover {
	c := &cutover{release: make(chan struct{})}
	c.base = serveMemory(t, func(w http.ResponseWriter, r *http.Request) {
		c.old.Add(1)
		switch {
		case r.URL.Path == "/stream":
			_ = http.NewResponseController(w).Flush()
			<-c.release
			_, _ = io.WriteString(w, "end")
		case c.moved.Load():
			<-r.Context().Done()
		}
	}, protocols)
	fresh := serveMemory(t, func(http.ResponseWriter, *http.Request) { c.new.Add(1) }, protocols)
	toOld := c.base.DialContext
	c.base.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if c.moved.Load() {
			return fresh.DialContext(ctx, network, addr)
		}
		return toOld(ctx, network, addr)
	}
	return c
}

// countDials returns the number of connections that base dials.
func countDials(base *http.Transport) *atomic.Int64 {
	dials, dial := new(atomic.Int64), base.DialContext
	base.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		dials.Add(1)
		return dial(ctx, network, addr)
	}
	return dials
}

func fetch(ctx context.Context, client *http.Client, url string) error {
	req, err := http.NewRequestWithContext(ctx, "GET", url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	return resp.Body.Close()
}

var wires = map[string]func() *http.Protocols{
	"HTTP/1.1": func() *http.Protocols { return nil },
	"HTTP/2": func() *http.Protocols {
		p := new(http.Protocols)
		p.SetUnencryptedHTTP2(true)
		return p
	},
	"HTTP/1.1 or HTTP/2": func() *http.Protocols { // net/http uses HTTP/1.1 without TLS
		p := new(http.Protocols)
		p.SetHTTP1(true)
		p.SetUnencryptedHTTP2(true)
		return p
	},
}

func TestSilentConnectionIsAbandoned(t *testing.T) {
	for wire, protocols := range wires {
		t.Run(wire, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCutover(t, protocols())
				client := &http.Client{Transport: &resiliencehttp.Transport{
					Base: c.base, ResponseHeaderTimeout: time.Second, Middleware: retries(2).Wrap,
				}}
				stream, err := client.Get("http://a/stream")
				require.NoError(t, err)
				waitForPool()
				require.NoError(t, fetch(t.Context(), client, "http://a/"))
				c.moved.Store(true)
				var wg sync.WaitGroup
				for range 10 { // they all use the silent connection, or have one each
					wg.Go(func() { require.NoError(t, fetch(t.Context(), client, "http://a/")) })
				}
				wg.Wait()
				require.EqualValues(t, 10, c.new.Load())
				close(c.release)
				require.Equal(t, "end", answer(t, stream, nil), "others on the connection finish")
			})
		})
	}
}

func TestDeadlineAbandonsASilentConnection(t *testing.T) {
	for wire, protocols := range wires {
		for _, patience := range []time.Duration{500 * time.Millisecond, 900 * time.Millisecond, 3 * time.Second} {
			t.Run(wire+" "+patience.String(), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					c := newCutover(t, protocols())
					client := &http.Client{Transport: &resiliencehttp.Transport{Base: c.base, Middleware: resilience.Chain()}}
					stream, err := client.Get("http://a/stream") // over HTTP/1.1, two connections become idle
					require.NoError(t, err)
					require.NoError(t, fetch(t.Context(), client, "http://a/"))
					close(c.release)
					require.Equal(t, "end", answer(t, stream, nil))
					waitForPool()
					c.moved.Store(true)
					again := func() error {
						ctx, cancel := context.WithTimeout(t.Context(), patience)
						defer cancel()
						return fetch(ctx, client, "http://a/")
					}
					require.ErrorIs(t, again(), context.DeadlineExceeded)
					if err := again(); patience < 900*time.Millisecond {
						require.ErrorIs(t, err, context.DeadlineExceeded, "the caller's patience says nothing")
					} else {
						require.NoError(t, err)
					}
				})
			})
		}
	}
}

// The connection has no stream left for the request that abandons it, and dials hang. Callers that time out meanwhile
// wait for that request. The test hangs if time stands still while they wait.
func TestCallersWaitForAnAbandonment(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCutover(t, wires["HTTP/2"]())
		dial := c.base.DialContext
		c.base.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
			if c.moved.Load() {
				time.Sleep(10 * time.Second)
			}
			return dial(ctx, network, addr)
		}
		client := &http.Client{Transport: &resiliencehttp.Transport{Base: c.base, Middleware: resilience.Chain()}}
		require.NoError(t, fetch(t.Context(), client, "http://a/"))
		waitForPool()
		c.moved.Store(true)
		start := time.Now()
		var wg sync.WaitGroup
		for n := range 300 { // more than the 250 streams that net/http's server allows
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second+time.Duration(n)*100*time.Microsecond)
				defer cancel()
				require.ErrorIs(t, fetch(ctx, client, "http://a/"), context.DeadlineExceeded)
			})
		}
		wg.Wait()
		require.Less(t, time.Since(start), 1200*time.Millisecond)
		time.Sleep(10 * time.Second) // for the dials
	})
}

// A connection that was dialed for the attempt is not abandoned: the server is slow, and not the connection stale.
func TestNewConnectionIsNotAbandoned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		base := serveMemory(t, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/slow" {
				time.Sleep(time.Minute)
			}
		}, wires["HTTP/2"]())
		dials := countDials(base)
		client := &http.Client{Transport: &resiliencehttp.Transport{Base: base, ResponseHeaderTimeout: time.Second}}
		require.Error(t, fetch(t.Context(), client, "http://a/slow"))
		require.NoError(t, fetch(t.Context(), client, "http://a/"))
		require.EqualValues(t, 1, dials.Load())
		time.Sleep(time.Minute)
	})
}

// A hedge leaves an HTTP/2 connection on which nothing has arrived since the first request was sent.
func TestHedgeLeavesASilentConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCutover(t, wires["HTTP/2"]())
		client := &http.Client{Transport: &resiliencehttp.Transport{
			Base: c.base, ResponseHeaderTimeout: 300 * time.Millisecond, Middleware: resilience.Chain(),
			Hedge: hedge.New[*http.Response](hedge.Config{Delay: 50 * time.Millisecond, Ratio: hedge.Unlimited}),
		}}
		require.NoError(t, fetch(t.Context(), client, "http://a/"))
		waitForPool()
		stream, err := client.Get("http://a/stream")
		require.NoError(t, err)
		time.Sleep(time.Second)
		c.moved.Store(true)
		start := time.Now()
		require.NoError(t, fetch(t.Context(), client, "http://a/"))
		require.Equal(t, 50*time.Millisecond, time.Since(start))
		require.EqualValues(t, 1, c.new.Load())
		close(c.release)
		require.Equal(t, "end", answer(t, stream, nil), "others on the connection finish")
	})
}

// A hedge of a slow request shares the connection if other requests are answered on it.
func TestHedgeStaysOnABusyConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var slow atomic.Int64
		base := serveMemory(t, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/slow" && slow.Add(1) == 1 {
				select {
				case <-r.Context().Done():
				case <-time.After(time.Minute):
				}
			}
		}, wires["HTTP/2"]())
		dials := countDials(base)
		client := &http.Client{Transport: &resiliencehttp.Transport{
			Base: base, Hedge: hedge.New[*http.Response](hedge.Config{Delay: 50 * time.Millisecond, Ratio: hedge.Unlimited}),
		}}
		require.NoError(t, fetch(t.Context(), client, "http://a/"))
		waitForPool()
		go func() {
			time.Sleep(20 * time.Millisecond)
			_ = fetch(t.Context(), client, "http://a/")
		}()
		require.NoError(t, fetch(t.Context(), client, "http://a/slow"))
		require.EqualValues(t, 2, slow.Load())
		require.EqualValues(t, 1, dials.Load())
		time.Sleep(time.Minute)
	})
}

// A foreign Base gets what can be had: its idle connections are closed, and the next attempt asks for a new one.
func TestForeignBaseIsAskedForANewConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCutover(t, nil)
		foreign := &foreignBase{RoundTripper: c.base}
		client := &http.Client{Transport: &resiliencehttp.Transport{
			Base: foreign, ResponseHeaderTimeout: time.Second, Middleware: retries(2).Wrap,
		}}
		require.NoError(t, fetch(t.Context(), client, "http://a/"))
		waitForPool()
		c.moved.Store(true)
		require.NoError(t, fetch(t.Context(), client, "http://a/"))
		require.Equal(t, []bool{false, false, true}, foreign.closes)
		require.Equal(t, 1, foreign.idleClosed)
	})
}

type foreignBase struct {
	http.RoundTripper
	closes     []bool
	idleClosed int
}

func (f *foreignBase) RoundTrip(r *http.Request) (*http.Response, error) {
	f.closes = append(f.closes, r.Close)
	return f.RoundTripper.RoundTrip(r)
}

func (f *foreignBase) CloseIdleConnections() { f.idleClosed++ }

func TestOwnBaseSendsPings(t *testing.T) {
	var base *http.Transport
	seen := resiliencehttp.NewTransport(resiliencehttp.ClientConfig{})
	base = resiliencehttp.BaseOf(seen).(*http.Transport)
	require.NotSame(t, http.DefaultTransport, base)
	require.Equal(t, []time.Duration{15 * time.Second, 5 * time.Second},
		[]time.Duration{base.HTTP2.SendPingTimeout, base.HTTP2.PingTimeout})
	own := &http.Transport{}
	require.Same(t, own, resiliencehttp.BaseOf(resiliencehttp.NewTransport(resiliencehttp.ClientConfig{Base: own})))
	require.Nil(t, own.HTTP2)
}

// A caller that cancels says nothing about the connection, however long it has been silent.
func TestCancelKeepsASilentConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCutover(t, wires["HTTP/2"]())
		client := &http.Client{Transport: &resiliencehttp.Transport{Base: c.base, Middleware: resilience.Chain()}}
		require.NoError(t, fetch(t.Context(), client, "http://a/"))
		waitForPool()
		c.moved.Store(true)
		for range 2 {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(3*time.Second, cancel)
			require.ErrorIs(t, fetch(ctx, client, "http://a/"), context.Canceled)
		}
		require.Zero(t, c.new.Load())
		require.EqualValues(t, 3, c.old.Load())
	})
}

// A hedge of a request that has dialed its connection shares the connection: the server is slow.
func TestHedgeStaysOnANewConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var dials, requests atomic.Int64
		base := serveMemory(t, func(_ http.ResponseWriter, r *http.Request) {
			if requests.Add(1) == 1 {
				<-r.Context().Done()
			}
		}, wires["HTTP/2"]())
		dial := base.DialContext
		base.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
			dials.Add(1)
			return dial(ctx, network, addr)
		}
		client := &http.Client{Transport: &resiliencehttp.Transport{
			Base: base, Hedge: hedge.New[*http.Response](hedge.Config{Delay: 50 * time.Millisecond, Ratio: hedge.Unlimited}),
		}}
		require.NoError(t, fetch(t.Context(), client, "http://a/"))
		waitForPool()
		require.NoError(t, fetch(t.Context(), client, "http://a/"))
		require.EqualValues(t, 1, dials.Load())
	})
}

// The body of a response is silent on a connection that earlier requests have used. The next request uses another one.
func TestIdleBodyAbandonsASilentConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCutover(t, wires["HTTP/2"]())
		defer close(c.release)
		client := &http.Client{Transport: &resiliencehttp.Transport{Base: c.base, Idle: time.Second}}
		require.NoError(t, fetch(t.Context(), client, "http://a/"))
		waitForPool()
		stream, err := client.Get("http://a/stream")
		require.NoError(t, err)
		c.moved.Store(true)
		_, err = io.ReadAll(stream.Body)
		var passed *resilience.TimeoutError
		require.ErrorAs(t, err, &passed)
		require.NoError(t, fetch(t.Context(), client, "http://a/"))
		require.EqualValues(t, 1, c.new.Load())
	})
}

// A hedge over a foreign Base cannot tell on which protocol the first request waits.
func TestHedgeOverAForeignBase(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var slow atomic.Int64
		base := serveMemory(t, func(_ http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/slow" && slow.Add(1) == 1 {
				<-r.Context().Done()
			}
		}, nil)
		client := &http.Client{Transport: &resiliencehttp.Transport{
			Base: roundTripper(base.RoundTrip), Middleware: resilience.Chain(),
			Hedge: hedge.New[*http.Response](hedge.Config{Delay: 50 * time.Millisecond, Ratio: hedge.Unlimited}),
		}}
		require.NoError(t, fetch(t.Context(), client, "http://a/"))
		waitForPool()
		require.NoError(t, fetch(t.Context(), client, "http://a/slow"))
		require.EqualValues(t, 2, slow.Load())
	})
}

func TestOwnBaseKeepsItsHTTP2Settings(t *testing.T) {
	first := http.DefaultTransport
	t.Cleanup(func() { http.DefaultTransport = first })
	http.DefaultTransport = &http.Transport{
		HTTP2: &http.HTTP2Config{PingTimeout: time.Second, StrictMaxConcurrentRequests: true},
	}
	base := resiliencehttp.BaseOf(resiliencehttp.NewTransport(resiliencehttp.ClientConfig{})).(*http.Transport)
	require.Equal(t, &http.HTTP2Config{
		SendPingTimeout: 15 * time.Second, PingTimeout: time.Second, StrictMaxConcurrentRequests: true,
	}, base.HTTP2)
}

func TestConnectionAfterASilentOneIsReused(t *testing.T) {
	for wire, protocols := range wires {
		t.Run(wire, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCutover(t, protocols())
				dial, dials := c.base.DialContext, 0
				c.base.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
					dials++
					return dial(ctx, network, addr)
				}
				client := &http.Client{Transport: &resiliencehttp.Transport{
					Base: c.base, ResponseHeaderTimeout: time.Second, Middleware: retries(2).Wrap,
				}}
				for range 4 {
					require.NoError(t, fetch(t.Context(), client, "http://a/"))
					waitForPool()
					c.moved.Store(true)
				}
				require.EqualValues(t, 3, c.new.Load())
				require.Equal(t, 2, dials)
			})
		})
	}
}

// Over HTTP/1.1, all idle connections are closed, because they may be dead too.
func TestIdleConnectionsAreAbandonedTogether(t *testing.T) {
	for _, wire := range []string{"HTTP/1.1", "HTTP/1.1 or HTTP/2"} {
		t.Run(wire, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCutover(t, wires[wire]())
				c.base.MaxIdleConnsPerHost = 3
				client := &http.Client{Transport: &resiliencehttp.Transport{
					Base: c.base, ResponseHeaderTimeout: time.Second, Middleware: retries(2).Wrap,
				}}
				var streams []*http.Response
				for range 3 {
					stream, err := client.Get("http://a/stream")
					require.NoError(t, err)
					streams = append(streams, stream)
				}
				close(c.release)
				for _, stream := range streams {
					require.Equal(t, "end", answer(t, stream, nil))
				}
				waitForPool()
				c.moved.Store(true)
				require.NoError(t, fetch(t.Context(), client, "http://a/"))
				require.EqualValues(t, 4, c.old.Load())
			})
		})
	}
}

// A connection on which the header of the response has arrived is not silent.
func TestDeadlineInABodyKeepsTheConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCutover(t, wires["HTTP/2"]())
		client := &http.Client{Transport: &resiliencehttp.Transport{
			Base: c.base, Idle: time.Minute, Middleware: resilience.Chain(),
		}}
		require.NoError(t, fetch(t.Context(), client, "http://a/"))
		waitForPool()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, "GET", "http://a/stream", nil)
		require.NoError(t, err)
		resp, err := client.Do(req)
		require.NoError(t, err)
		_, err = io.ReadAll(resp.Body)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NoError(t, resp.Body.Close())
		close(c.release)
		dial, dials := c.base.DialContext, 0
		c.base.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
			dials++
			return dial(ctx, network, addr)
		}
		require.NoError(t, fetch(t.Context(), client, "http://a/"))
		require.Zero(t, dials)
	})
}
