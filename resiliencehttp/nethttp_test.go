package resiliencehttp_test

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencehttp"
)

// checkedWith names the versions of Go whose net/http nethttp.go was checked with. To add a version, run the tests of
// this package with it and read the comments of nethttp.go beside the source of its net/http.
var checkedWith = []string{"go1.26", "go1.27"}

func TestGoVersionIsChecked(t *testing.T) {
	version := runtime.Version()
	if strings.HasPrefix(version, "devel") {
		t.Skip("not a release")
	}
	require.True(t, slices.ContainsFunc(checkedWith, func(v string) bool {
		return version == v || strings.HasPrefix(version, v+".") || strings.HasPrefix(version, v+"rc")
	}), "nethttp.go was not checked with %s", version)
}

// A memoryListener accepts connections in memory, so that time can be virtual.
type memoryListener struct {
	conns  chan net.Conn
	closed chan struct{}
}

func (l *memoryListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *memoryListener) Close() error   { return nil }
func (l *memoryListener) Addr() net.Addr { return &net.TCPAddr{} }

func (l *memoryListener) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	near, far := net.Pipe()
	select {
	case l.conns <- far:
		return near, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// net/http gives a new HTTP/2 connection to the request that dialed it, and puts it into the pool afterwards. A request
// between the two would dial again.
func waitForPool() { synctest.Wait() }

// serveMemory returns a transport of net/http whose connections lead to h. Call it in a bubble.
func serveMemory(
	t *testing.T, h http.HandlerFunc, protocols *http.Protocols, options ...func(*http.Server),
) *http.Transport {
	l := &memoryListener{make(chan net.Conn), make(chan struct{})}
	server := &http.Server{Handler: h, Protocols: protocols}
	for _, option := range options {
		option(server)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(l)
	}()
	base := &http.Transport{DialContext: l.dial, Protocols: protocols}
	t.Cleanup(func() {
		base.CloseIdleConnections()
		close(l.closed)
		<-done
		_ = server.Close()
		time.Sleep(time.Second) // the server may close a connection with a delay
	})
	return base
}

// A slowUpload is a body of n bytes, each of which takes a second.
type slowUpload struct{ n int }

func (u *slowUpload) Read(p []byte) (int, error) {
	if u.n == 0 {
		return 0, io.EOF
	}
	time.Sleep(time.Second)
	u.n--
	p[0] = 'x'
	return 1, nil
}

func TestHeaderTimeoutStartsAfterTheUpload(t *testing.T) {
	for name, foreign := range map[string]func(http.RoundTripper) http.RoundTripper{
		"net/http": func(base http.RoundTripper) http.RoundTripper { return base },
		"traced":   func(base http.RoundTripper) http.RoundTripper { return roundTripper(base.RoundTrip) },
		"untraced": func(base http.RoundTripper) http.RoundTripper {
			return roundTripper(func(r *http.Request) (*http.Response, error) {
				b, err := io.ReadAll(r.Body)
				require.NoError(t, err)
				require.NoError(t, r.Body.Close())
				if strings.HasPrefix(r.URL.Path, "/hang") {
					<-r.Context().Done()
					return nil, context.Cause(r.Context())
				}
				return reply(r, 200, string(b)), nil
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				base := serveMemory(t, func(w http.ResponseWriter, r *http.Request) {
					b, _ := io.ReadAll(r.Body)
					if r.URL.Path == "/hang" {
						<-r.Context().Done()
						return
					}
					_, _ = w.Write(b)
				}, nil)
				circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
				client := &http.Client{Transport: &resiliencehttp.Transport{
					Base: foreign(base), ResponseHeaderTimeout: 2 * time.Second, Middleware: circuit.Wrap,
				}}
				start := time.Now()
				resp, err := client.Post("http://a/", "text/plain", &slowUpload{10})
				require.NoError(t, err)
				require.Equal(t, strings.Repeat("x", 10), answer(t, resp, nil))
				require.Equal(t, 10*time.Second, time.Since(start))

				start = time.Now()
				_, err = client.Post("http://a/hang", "text/plain", &slowUpload{10})
				passed, ok := errors.AsType[*resilience.TimeoutError](err)
				require.True(t, ok, "%v", err)
				require.Equal(t, 2*time.Second, passed.After)
				require.Equal(t, 12*time.Second, time.Since(start))
				require.Equal(t, breaker.Open, circuit.State())
			})
		})
	}
}

func TestTransportReturnsAtTheHeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		base := serveMemory(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
			_ = http.NewResponseController(w).Flush()
			time.Sleep(15 * time.Second)
			_, _ = io.WriteString(w, "data: 1\n\n")
		}, nil)
		client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{Base: base})
		start := time.Now()
		resp, err := client.Get("http://a/")
		require.NoError(t, err)
		require.Zero(t, time.Since(start))
		require.Equal(t, "data: 1\n\n", answer(t, resp, nil))
		require.Equal(t, 15*time.Second, time.Since(start))

		held := &http.Client{Transport: &resiliencehttp.Transport{Base: base, HoldBody: true}}
		start = time.Now()
		resp, err = held.Get("http://a/")
		require.NoError(t, err)
		require.Equal(t, 15*time.Second, time.Since(start))
		require.Equal(t, "data: 1\n\n", answer(t, resp, nil))
	})
}

func TestIdleHasNoDefaultForStreamsThatPause(t *testing.T) {
	for kind, pauses := range map[string]bool{
		"text/event-stream": true, "Text/Event-Stream; charset=utf-8": true, "multipart/x-mixed-replace; boundary=x": true,
		"text/plain": false, "application/x-ndjson": false, "": false,
	} {
		for _, idle := range []time.Duration{0, 10 * time.Second} {
			synctest.Test(t, func(t *testing.T) {
				client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{Idle: idle,
					Base: roundTripper(func(r *http.Request) (*http.Response, error) {
						resp := response(200, nil, "Content-Type", kind)
						resp.Body = &streamed{ctx: r.Context(), parts: []part{{time.Second, "a"}, {time.Minute, "b"}}, end: io.EOF}
						resp.ContentLength = -1
						return resp, nil
					})})
				resp, err := client.Get("http://a/")
				require.NoError(t, err)
				defer resp.Body.Close()
				b, err := io.ReadAll(resp.Body)
				if pauses && idle == 0 {
					require.NoError(t, err)
					require.Equal(t, "ab", string(b))
				} else {
					require.ErrorIs(t, err, context.DeadlineExceeded)
				}
			})
		}
	}
}

// A dial is limited, and a failure of the server.
func TestHeaderTimeoutLimitsADial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
		base := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			select {
			case <-ctx.Done(): // net/http continues to dial for later requests
				return nil, ctx.Err()
			case <-t.Context().Done():
				return nil, t.Context().Err()
			}
		}}
		client := &http.Client{Transport: &resiliencehttp.Transport{
			Base: base, ResponseHeaderTimeout: 2 * time.Second, Middleware: circuit.Wrap,
		}}
		start := time.Now()
		_, err := client.Get("http://a/")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 2*time.Second, time.Since(start))
		require.Equal(t, breaker.Open, circuit.State())
	})
}

// A wait for a connection of this process does not count against the server.
func TestHeaderTimeoutSkipsWaitForOwnConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		base := serveMemory(t, func(http.ResponseWriter, *http.Request) { time.Sleep(100 * time.Millisecond) }, nil)
		base.MaxConnsPerHost = 2
		transport := resiliencehttp.NewTransport(resiliencehttp.ClientConfig{
			Base: base, ResponseHeaderTimeout: 300 * time.Millisecond,
		})
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				resp, err := (&http.Client{Transport: transport}).Get("http://a/")
				require.NoError(t, err)
				require.NoError(t, resp.Body.Close())
			})
		}
		wg.Wait()
		circuit, ok := transport.Breakers.Get("a:80")
		require.True(t, ok)
		require.Equal(t, []int64{20, 0, 0, 0}, outcomes(circuit.Stats()))
	})
}

// The end of such a wait is no result for a breaker, whatever ends it.
func TestEndOfWaitForOwnConnectionIsNoFailure(t *testing.T) {
	for name, c := range map[string]struct {
		foreign func(http.RoundTripper) http.RoundTripper
		policy  resilience.Middleware
		caller  time.Duration
	}{
		"caller": {
			func(base http.RoundTripper) http.RoundTripper { return base },
			resilience.Chain(), 5 * time.Second,
		},
		"timeout": {
			func(base http.RoundTripper) http.RoundTripper { return base },
			resilience.Timeout(5 * time.Second), time.Minute,
		},
		"traced": {
			func(base http.RoundTripper) http.RoundTripper { return roundTripper(base.RoundTrip) },
			resilience.Timeout(5 * time.Second), time.Minute,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				release := make(chan struct{})
				base := serveMemory(t, func(http.ResponseWriter, *http.Request) { <-release }, nil)
				base.MaxConnsPerHost = 2
				var wg sync.WaitGroup
				for range 2 {
					wg.Go(func() {
						resp, err := (&http.Client{Transport: base}).Get("http://a/")
						require.NoError(t, err)
						require.NoError(t, resp.Body.Close())
					})
				}
				synctest.Wait()
				circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
				client := &http.Client{Transport: &resiliencehttp.Transport{
					Base: c.foreign(base), Middleware: resilience.Chain(circuit.Wrap, c.policy), ResponseHeaderTimeout: time.Second,
				}}
				for range 3 {
					ctx, cancel := context.WithTimeout(t.Context(), c.caller)
					req, err := http.NewRequestWithContext(ctx, "GET", "http://a/", nil)
					require.NoError(t, err)
					start := time.Now()
					_, err = client.Do(req)
					cancel()
					require.ErrorIs(t, err, context.DeadlineExceeded)
					require.True(t, resilience.Refused(err))
					require.Equal(t, 5*time.Second, time.Since(start))
				}
				require.Equal(t, []int64{0, 0, 3, 0}, outcomes(circuit.Stats()))
				close(release)
				wg.Wait()
			})
		})
	}
}

func TestShortageOfThisProcessIsNoFailure(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.EMFILE, syscall.ENFILE, syscall.EADDRNOTAVAIL, syscall.ECONNREFUSED} {
		base := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
			return nil, &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("socket", errno)}
		}}
		circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
		client := &http.Client{Transport: &resiliencehttp.Transport{Base: base, Middleware: circuit.Wrap}}
		_, err := client.Post("http://a/", "text/plain", strings.NewReader("x"))
		require.ErrorIs(t, err, errno)
		require.Equal(t, errno == syscall.ECONNREFUSED, circuit.State() == breaker.Open, "%v", errno)
		require.Equal(t, errno != syscall.ECONNREFUSED, resilience.Refused(err))
	}
}

// A wait for an HTTP/2 stream is no result for a breaker, and the connection is not silent.
func TestEndOfWaitForAStreamIsNoFailure(t *testing.T) {
	for name, foreign := range map[string]func(http.RoundTripper) http.RoundTripper{
		"net/http": func(base http.RoundTripper) http.RoundTripper { return base },
		"traced":   func(base http.RoundTripper) http.RoundTripper { return roundTripper(base.RoundTrip) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				release := make(chan struct{})
				base := serveMemory(t, func(w http.ResponseWriter, r *http.Request) {
					if r.URL.Path == "/stream" {
						_ = http.NewResponseController(w).Flush()
						<-release
					}
				}, wires["HTTP/2"](), func(s *http.Server) { s.HTTP2 = &http.HTTP2Config{MaxConcurrentStreams: 1} })
				base.HTTP2 = &http.HTTP2Config{StrictMaxConcurrentRequests: true}
				dials := countDials(base)
				circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
				client := &http.Client{Transport: &resiliencehttp.Transport{
					Base: foreign(base), Middleware: resilience.Chain(circuit.Wrap, resilience.Timeout(time.Hour)),
					ResponseHeaderTimeout: time.Second,
				}}
				require.NoError(t, fetch(t.Context(), client, "http://a/"))
				waitForPool()
				stream, err := client.Get("http://a/stream")
				require.NoError(t, err)
				for range 3 {
					ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
					start := time.Now()
					err := fetch(ctx, client, "http://a/")
					cancel()
					require.ErrorIs(t, err, context.DeadlineExceeded)
					require.True(t, resilience.Refused(err), "%v", err)
					require.Equal(t, 5*time.Second, time.Since(start))
				}
				require.Equal(t, []int64{2, 0, 3, 0}, outcomes(circuit.Stats()))
				close(release)
				answer(t, stream, nil)
				require.NoError(t, fetch(t.Context(), client, "http://a/"))
				require.EqualValues(t, 1, dials.Load())
			})
		})
	}
}

// A POST without GetBody that a GOAWAY does not cover is sent again from the copy of its body.
func TestBodyIsSentAgainAfterAGoAway(t *testing.T) {
	for name, body := range map[string]func(*testing.T) io.Reader{
		"reader": func(*testing.T) io.Reader { return struct{ io.Reader }{strings.NewReader("hello")} },
		"pipe":   func(t *testing.T) io.Reader { return pausingBody(t, time.Second, "hel", "lo") },
	} {
		for _, buffer := range []int64{0, 1 << 10} {
			t.Run(name+" "+strconv.FormatInt(buffer, 10), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var got []string
					base := serveMemory(t, func(w http.ResponseWriter, r *http.Request) {
						b, _ := io.ReadAll(r.Body)
						got = append(got, string(b))
					}, wires["HTTP/2"]())
					toServer := base.DialContext
					var dials atomic.Int64
					base.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
						if dials.Add(1) > 1 {
							return toServer(ctx, network, addr)
						}
						near, far := net.Pipe()
						go goAway(far)
						return near, nil
					}
					circuit := breaker.New(breaker.Config{ConsecutiveFailures: 2})
					client := &http.Client{Transport: &resiliencehttp.Transport{
						Base: base, MaxBuffer: buffer, Middleware: resilience.Chain(retries(2).Wrap, circuit.Wrap),
					}}
					resp, err := client.Post("http://a/", "text/plain", body(t))
					if buffer == 0 {
						require.Error(t, err)
						require.Empty(t, got)
						time.Sleep(time.Minute)
						return
					}
					require.NoError(t, err)
					require.NoError(t, resp.Body.Close())
					require.Equal(t, []string{"hello"}, got)
				})
			})
		}
	}
}

// goAway is an HTTP/2 server that answers the first bytes of a body by a GOAWAY that covers no stream.
func goAway(conn net.Conn) {
	defer conn.Close()
	if _, err := io.ReadFull(conn, make([]byte, len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))); err != nil {
		return
	}
	const data, settings = 0, 4
	body := make(chan struct{}, 1)
	defer close(body)
	go func() { // net.Pipe buffers nothing: who reads must not wait for a write
		_, _ = conn.Write([]byte{0, 0, 0, settings, 0, 0, 0, 0, 0})
		if _, ok := <-body; ok {
			_, _ = conn.Write([]byte{0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
		}
	}()
	for sent := false; ; {
		head := make([]byte, 9)
		if _, err := io.ReadFull(conn, head); err != nil {
			return
		}
		length := int64(head[0])<<16 | int64(head[1])<<8 | int64(head[2])
		if _, err := io.CopyN(io.Discard, conn, length); err != nil {
			return
		}
		if head[3] == data && !sent {
			sent = true
			body <- struct{}{}
		}
	}
}

// Requests that wait for a connection, dial, write and give up at the same time leave no slot taken.
func TestRoutesUnderStress(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		time.Sleep(rand.N(2 * time.Millisecond))
		_, _ = io.WriteString(w, "ok")
	}))
	defer server.Close()
	for _, most := range []int{0, 2} {
		base := &http.Transport{MaxConnsPerHost: most}
		slots := bulkhead.New(bulkhead.Config{Limit: 100})
		client := &http.Client{Transport: &resiliencehttp.Transport{
			Base: base, ResponseHeaderTimeout: time.Millisecond, Middleware: resilience.Chain(retries(2).Wrap, slots.Wrap),
		}}
		var calls sync.WaitGroup
		for range 20 {
			calls.Go(func() {
				for range 20 {
					ctx, cancel := context.WithTimeout(t.Context(), rand.N(4*time.Millisecond))
					req, _ := http.NewRequestWithContext(ctx, "PUT", server.URL, strings.NewReader("body"))
					if resp, err := client.Do(req); err == nil {
						_, _ = io.Copy(io.Discard, resp.Body)
						_ = resp.Body.Close()
					}
					cancel()
				}
			})
		}
		calls.Wait()
		require.Eventually(t, func() bool { return slots.Stats().InFlight == 0 }, time.Minute, time.Millisecond)
		base.CloseIdleConnections()
	}
}

// A hooked base calls hooks of httptrace in any order, and then waits until the request's ctx is done.
type hooked struct {
	calls      func(*httptrace.ClientTrace)
	idleClosed int
	err        error // returned instead of the error of ctx if it is set
}

func (h *hooked) RoundTrip(r *http.Request) (*http.Response, error) {
	h.calls(httptrace.ContextClientTrace(r.Context()))
	if h.err != nil {
		return nil, h.err
	}
	<-r.Context().Done()
	return nil, r.Context().Err()
}

func (h *hooked) CloseIdleConnections() { h.idleClosed++ }

var hooks = map[string]func(*httptrace.ClientTrace){
	"GetConn":      func(c *httptrace.ClientTrace) { c.GetConn("a:80") },
	"DNSStart":     func(c *httptrace.ClientTrace) { c.DNSStart(httptrace.DNSStartInfo{}) },
	"ConnectStart": func(c *httptrace.ClientTrace) { c.ConnectStart("tcp", "a:80") },
	"GotConn":      func(c *httptrace.ClientTrace) { c.GotConn(httptrace.GotConnInfo{}) },
	"WroteHeaders": func(c *httptrace.ClientTrace) { c.WroteHeaders() },
	"WroteRequest": func(c *httptrace.ClientTrace) { c.WroteRequest(httptrace.WroteRequestInfo{}) },
}

// While a request waits for a connection or a stream of this process, its time does not count against the server.
func TestHooksDecideWhatARequestWaitsFor(t *testing.T) {
	const forProcess, forServer, forUpload = "process", "server", "upload"
	for calls, want := range map[string]string{
		"GetConn":                                   forProcess,
		"GetConn DNSStart":                          forServer,
		"GetConn ConnectStart":                      forServer,
		"GetConn GotConn":                           forProcess,
		"GetConn WroteHeaders":                      forProcess, // of an earlier connection
		"GetConn WroteRequest":                      forProcess,
		"GetConn GotConn WroteHeaders":              forUpload,
		"GetConn GotConn WroteHeaders WroteRequest": forServer,
		"GetConn GotConn ConnectStart":              forProcess, // the dial is for another request
		"GetConn GotConn WroteHeaders ConnectStart": forUpload,
		"GetConn ConnectStart GotConn":              forProcess,
		"GetConn GotConn WroteHeaders WroteRequest GetConn WroteRequest": forProcess,
		"GetConn GotConn WroteHeaders WroteRequest GetConn ConnectStart": forServer,
	} {
		t.Run(calls, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				base := &hooked{calls: func(trace *httptrace.ClientTrace) {
					for _, name := range strings.Fields(calls) {
						hooks[name](trace)
					}
				}}
				client := &http.Client{Transport: &resiliencehttp.Transport{
					Base: base, Middleware: resilience.Chain(), ResponseHeaderTimeout: time.Second,
				}}
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				defer cancel()
				req, err := http.NewRequestWithContext(ctx, "GET", "http://a/", nil)
				require.NoError(t, err)
				start := time.Now()
				_, err = client.Do(req)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.Equal(t, want == forProcess, resilience.Refused(err))
				require.Equal(t, want == forServer, time.Since(start) == time.Second, time.Since(start))
			})
		})
	}
}

// incomparable is a connection that cannot be the key of a map.
type incomparable struct {
	net.Conn
	_ []int
}

// A connection counts as silent from the time at which the request got a stream on it.
func TestSilenceCountsFromTheStream(t *testing.T) {
	conn, _ := net.Pipe()
	for name, c := range map[string]struct {
		info      httptrace.GotConnInfo
		waits     time.Duration
		abandoned int
	}{
		"at once":               {httptrace.GotConnInfo{Conn: conn, Reused: true}, 0, 1},
		"soon":                  {httptrace.GotConnInfo{Conn: conn, Reused: true}, 4100 * time.Millisecond, 1},
		"late":                  {httptrace.GotConnInfo{Conn: conn, Reused: true}, 4101 * time.Millisecond, 0},
		"new":                   {httptrace.GotConnInfo{Conn: conn}, 0, 0},
		"cannot be compared":    {httptrace.GotConnInfo{Conn: incomparable{Conn: conn}, Reused: true}, 0, 1},
		"foreign and not known": {httptrace.GotConnInfo{Reused: true}, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				base := &hooked{calls: func(trace *httptrace.ClientTrace) {
					trace.GetConn("a:80")
					trace.GotConn(c.info)
					time.Sleep(c.waits)
					trace.WroteHeaders()
				}}
				client := &http.Client{Transport: &resiliencehttp.Transport{Base: base, Middleware: resilience.Chain()}}
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				defer cancel()
				require.ErrorIs(t, fetch(ctx, client, "http://a/"), context.DeadlineExceeded)
				require.Equal(t, c.abandoned, base.idleClosed)
				time.Sleep(time.Minute) // the Transport forgets the connection
			})
		})
	}
}

// net/http may return the error of a read that its own failure to write the request has interrupted.
func TestRequestThatCannotBeWrittenIsNotRetried(t *testing.T) {
	for text, attempts := range map[string]int{"http: ContentLength=3 with Body length 2": 1, "broken pipe": 3} {
		sent := 0
		base := &hooked{err: errors.New("use of closed network connection"), calls: func(trace *httptrace.ClientTrace) {
			sent++
			trace.GetConn("a:80")
			trace.GotConn(httptrace.GotConnInfo{})
			trace.WroteRequest(httptrace.WroteRequestInfo{Err: errors.New(text)})
		}}
		client := &http.Client{Transport: &resiliencehttp.Transport{Base: base, Middleware: retries(3).Wrap}}
		require.Error(t, fetch(t.Context(), client, "http://a/"))
		require.Equal(t, attempts, sent, text)
	}
}

// net/http calls hooks on other goroutines, and even after RoundTrip has returned.
func TestHooksBesideTheEndOfAttempts(t *testing.T) {
	conn, _ := net.Pipe()
	stop := make(chan struct{})
	var late sync.WaitGroup
	base := &hooked{err: errors.New("reset"), calls: func(trace *httptrace.ClientTrace) {
		trace.GetConn("a:80")
		late.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				trace.GetConn("a:80")
				trace.ConnectStart("tcp", "a:80")
				trace.GotConn(httptrace.GotConnInfo{Conn: conn, Reused: true})
				trace.WroteHeaders()
				trace.WroteRequest(httptrace.WroteRequestInfo{Err: errors.New("broken pipe")})
				trace.WroteRequest(httptrace.WroteRequestInfo{})
				runtime.Gosched()
			}
		})
		time.Sleep(100 * time.Microsecond)
	}}
	client := &http.Client{Transport: &resiliencehttp.Transport{
		Base: base, Middleware: resilience.Chain(retries(3).Wrap, resilience.Timeout(5*time.Millisecond)),
	}}
	for _, err := range []error{errors.New("reset"), nil, &net.OpError{Op: "dial", Err: io.EOF}} {
		base.err = err
		require.Error(t, fetch(t.Context(), client, "http://a/"))
		_, err := client.Post("http://a/", "text/plain", strings.NewReader("x"))
		require.Error(t, err)
	}
	close(stop)
	late.Wait()
}

// A server may answer before it has received the whole request.
func TestEarlyHeaderStartsTheWaitForTheBody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		transport := &resiliencehttp.Transport{
			HoldBody: true, ResponseHeaderTimeout: time.Second, Middleware: resilience.Chain(),
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				for _, name := range []string{"GetConn", "GotConn", "WroteHeaders"} {
					hooks[name](httptrace.ContextClientTrace(r.Context()))
				}
				time.Sleep(10 * time.Second) // the upload
				resp := response(200, nil)
				resp.Body = &streamed{ctx: r.Context(), parts: []part{{time.Minute, "late"}}, end: io.EOF}
				return resp, nil
			}),
		}
		start := time.Now()
		_, err := transport.RoundTrip(request(t, "POST", "http://a/"))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 11*time.Second, time.Since(start))
	})
}

// A Base that calls no hooks has sent the request when it has read its body to the end, or closed it.
func TestHeaderTimeoutWithoutHooks(t *testing.T) {
	for name, upload := range map[string]func(io.ReadCloser) error{
		"read to its end": func(b io.ReadCloser) error { _, err := io.Copy(io.Discard, b); return err },
		"closed": func(b io.ReadCloser) error {
			_, err := io.ReadFull(b, make([]byte, 2))
			return errors.Join(err, b.Close())
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				transport := &resiliencehttp.Transport{
					ResponseHeaderTimeout: 2 * time.Second, Middleware: resilience.Chain(),
					Base: roundTripper(func(r *http.Request) (*http.Response, error) {
						require.NoError(t, upload(r.Body))
						select {
						case <-r.Context().Done():
						case <-time.After(time.Minute):
						}
						return nil, context.Cause(r.Context())
					}),
				}
				req, err := http.NewRequest("POST", "http://a/", pausingBody(t, 5*time.Second, "a", "b"))
				require.NoError(t, err)
				start := time.Now()
				_, err = transport.RoundTrip(req)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.Equal(t, 7*time.Second, time.Since(start))
			})
		})
	}
}

// The race detector checks the timer of a limit that no longer applies, which fires while the policies hold a
// response.
func TestLimitPassesWhileAResponseIsHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		waits := func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error {
				err := next(ctx)
				time.Sleep(2 * time.Second)
				return err
			}
		}
		transport := &resiliencehttp.Transport{
			ResponseHeaderTimeout: time.Second, Middleware: resilience.Chain(waits, resilience.Timeout(time.Minute)),
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				for _, name := range []string{"GetConn", "GotConn", "WroteHeaders", "WroteRequest"} {
					hooks[name](httptrace.ContextClientTrace(r.Context()))
				}
				return response(200, strings.NewReader("ok")), nil
			}),
		}
		resp, err := transport.RoundTrip(request(t, "GET", "http://a/"))
		require.Equal(t, "ok", answer(t, resp, err))
	})
}

// The attempt's ctx and that of the policies end at the same time, in any order.
func TestPoliciesSeeTheEndOfTimeout(t *testing.T) {
	for range 30 {
		synctest.Test(t, func(t *testing.T) {
			var end error
			client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{
				Timeout: time.Second, ResponseHeaderTimeout: resilience.Unlimited,
				Retry: resiliencehttp.Disabled, Bulkhead: resiliencehttp.Disabled,
				Breaker: func(next resilience.Func) resilience.Func {
					return func(ctx context.Context) error {
						err := next(ctx)
						end = ctx.Err()
						return err
					}
				},
				Base: roundTripper(func(r *http.Request) (*http.Response, error) {
					time.Sleep(time.Second)
					return nil, errors.New("reset")
				}),
			})
			_, err := client.Get("http://a/")
			require.Error(t, err)
			require.Equal(t, context.DeadlineExceeded, end)
		})
	}
}
