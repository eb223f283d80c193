package resiliencehttp_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
)

// upgrade switches to a protocol that sends each line back, and says goodbye
// when the other side has no more to say.
func upgrade(w http.ResponseWriter, r *http.Request) {
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		w.WriteHeader(http.StatusNotImplemented)
		return
	}
	defer conn.Close()
	_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	for {
		line, err := rw.ReadString('\n')
		if err != nil {
			_, _ = io.WriteString(conn, "goodbye\n")
			return
		}
		_, _ = io.WriteString(conn, line)
	}
}

func upgradeRequest(t *testing.T, url string) *http.Request {
	req, err := http.NewRequest("GET", url, nil)
	require.NoError(t, err)
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", "websocket")
	return req
}

func requireEcho(t *testing.T, conn io.ReadWriter, lines ...string) {
	r := bufio.NewReader(conn)
	for _, line := range lines {
		_, err := io.WriteString(conn, line+"\n")
		require.NoError(t, err)
		got, err := r.ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, line+"\n", got)
	}
}

func TestSwitchingProtocols(t *testing.T) {
	server := serve(t, false, upgrade)
	var slots *bulkhead.Bulkhead
	var inner *watch
	resp, _ := patiently(t, func(limit time.Duration) (*http.Response, error) {
		slots, inner = bulkhead.New(bulkhead.Config{Limit: 1}), new(watch)
		client := server.client(slots.Wrap, resilience.Timeout(limit), inner.Wrap)
		return client.Do(upgradeRequest(t, server.URL))
	})
	require.Equal(t, 101, resp.StatusCode)
	conn := resp.Body.(io.ReadWriteCloser)
	requireEcho(t, conn, "one")
	<-inner.ctxs[0].Done()
	requireEcho(t, conn, "two", "three") // the request's timeout is not the connection's
	require.Equal(t, 1, slots.Stats().InFlight)

	require.NoError(t, conn.(interface{ CloseWrite() error }).CloseWrite())
	rest, err := io.ReadAll(conn)
	require.NoError(t, err)
	require.Equal(t, "goodbye\n", string(rest))
	require.Equal(t, 1, slots.Stats().InFlight, "the end of one direction is not the end")
	require.NoError(t, conn.Close())
	require.Zero(t, slots.Stats().InFlight)
}

func TestSwitchingProtocolsThatJudgeDislikes(t *testing.T) {
	one, other := net.Pipe()
	defer other.Close()
	transport := &resiliencehttp.Transport{
		Middleware: resilience.Chain(retries(3).Wrap, resilience.Timeout(time.Minute)),
		Base: roundTripper(func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: 101, Body: one}, nil
		}),
		Judge: func(*http.Response, *resiliencehttp.Ahead) error { return errors.New("whatever this is") },
	}
	_, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
	require.EqualError(t, err, "whatever this is")
	_, err = other.Write([]byte("x"))
	require.ErrorIs(t, err, io.ErrClosedPipe)
}

// TestSwitchingProtocolsThroughAReverseProxy passes two Transports, of which the inner one repeats
// the handshakes that fail at first.
func TestSwitchingProtocolsThroughAReverseProxy(t *testing.T) {
	var handshakes atomic.Int64
	backend := serve(t, false, func(w http.ResponseWriter, r *http.Request) {
		if handshakes.Add(1)%2 == 1 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		upgrade(w, r)
	})
	inside, outside := bulkhead.New(bulkhead.Config{Limit: 2}), bulkhead.New(bulkhead.Config{Limit: 2})
	target, err := url.Parse(backend.URL)
	require.NoError(t, err)
	proxy := serve(t, false, (&httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport: &resiliencehttp.Transport{
			Base:       backend.Base,
			Middleware: resilience.Chain(retries(2).Wrap, inside.Wrap, resilience.Timeout(time.Minute)),
		},
	}).ServeHTTP)
	client := proxy.client(retries(2).Wrap, outside.Wrap, resilience.Timeout(time.Minute))
	var conns []io.ReadWriteCloser
	for range 2 {
		resp, err := client.Do(upgradeRequest(t, proxy.URL))
		require.NoError(t, err)
		conns = append(conns, resp.Body.(io.ReadWriteCloser))
	}
	require.EqualValues(t, 4, handshakes.Load())
	require.Equal(t, []int{2, 2}, []int{inside.Stats().InFlight, outside.Stats().InFlight})
	for i, conn := range conns {
		requireEcho(t, conn, "hello", strings.Repeat("long ", 20_000))
		require.NoError(t, conn.Close())
		require.Equal(t, 1-i, outside.Stats().InFlight)
	}
	require.Eventually(t, func() bool { return inside.Stats().InFlight == 0 }, time.Minute, time.Millisecond,
		"the proxy closes its side")
}

type connection struct{ io.ReadWriteCloser }

// The timeouts of a client end with the handshake.
func TestConnectionOutlivesTheTimeoutsOfAClient(t *testing.T) {
	for _, attempt := range []time.Duration{500 * time.Millisecond, 0} {
		testConnectionOutlives(t, attempt)
	}
}

func testConnectionOutlives(t *testing.T, attempt time.Duration) {
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		defer far.Close()
		var sent context.Context
		client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{
			Timeout: time.Second, AttemptTimeout: attempt,
			Judge: func(_ *http.Response, ahead *resiliencehttp.Ahead) error {
				_, err := ahead.Bytes(1)
				require.Equal(t, io.EOF, err, "a connection is no body")
				return nil
			}, Base: roundTripper(func(req *http.Request) (*http.Response, error) {
				sent = req.Context()
				return &http.Response{StatusCode: http.StatusSwitchingProtocols, Header: http.Header{}, Body: connection{near}}, nil
			}),
		})
		ctx, leave := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1", nil)
		require.NoError(t, err)
		resp, err := client.Do(req)
		require.NoError(t, err)
		time.Sleep(time.Hour)
		require.NoError(t, sent.Err())
		leave()
		synctest.Wait()
		select {
		case <-sent.Done():
		default:
			t.Error("the ctx of the connection goes on")
		}
		require.ErrorIs(t, sent.Err(), context.Canceled)
		require.NoError(t, resp.Body.Close())
	})
}

func TestTrailersSurvive(t *testing.T) {
	onBoth(t, func(t *testing.T, http2 bool) {
		for status, wrapped := range map[int]bool{200: false, 503: true} {
			server := serve(t, http2, func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Trailer", "Out")
				w.WriteHeader(status)
				_, _ = io.Copy(w, r.Body)
				w.Header().Set("Out", r.Trailer.Get("In")+" and out")
			})
			req, _ := http.NewRequest("PUT", server.URL, nil)
			req.Trailer = http.Header{"In": nil}
			text := strings.NewReader("text")
			req.Body = io.NopCloser(readerFunc(func(p []byte) (int, error) {
				n, err := text.Read(p)
				if err == io.EOF {
					req.Trailer.Set("In", "in")
				}
				return n, err
			}))
			req.ContentLength = -1
			client := server.client(retries(2).Wrap)
			if wrapped {
				client.Transport.(*resiliencehttp.Transport).Base = roundTripper(server.Base.RoundTrip)
			}
			resp, err := client.Do(req)
			require.Equal(t, "text", answer(t, resp, err))
			require.Equal(t, "in and out", resp.Trailer.Get("Out"))
		}
	})
}

func TestTrailersOfABodyThatIsKeptAreSentEachTime(t *testing.T) {
	onBoth(t, func(t *testing.T, http2 bool) {
		for _, text := range []string{"text", ""} {
			got := make(chan string, 3)
			server := serve(t, http2, func(w http.ResponseWriter, r *http.Request) {
				body, _ := io.ReadAll(r.Body)
				got <- string(body) + r.Trailer.Get("In")
				w.WriteHeader(503)
			})
			req, _ := http.NewRequest("PUT", server.URL, &trackedBody{Reader: strings.NewReader(text)})
			req.Trailer = http.Header{"In": {"in"}}
			transport := &resiliencehttp.Transport{Base: server.Base, Middleware: retries(2).Wrap, MaxBuffer: 10}
			resp, err := transport.RoundTrip(req)
			answer(t, resp, err)
			for range 2 {
				require.Equal(t, text+"in", <-got)
			}
		}
	})
}

func TestErrorsThatAreNotRetryable(t *testing.T) {
	secure := httptest.NewTLSServer(statuses("", 200))
	defer secure.Close()
	secure.Config.ErrorLog = nil
	plain := httptest.NewServer(statuses("", 200))
	defer plain.Close()
	roots := x509.NewCertPool()
	roots.AddCert(secure.Certificate())
	dial := func(ctx context.Context, network, addr string) (net.Conn, error) {
		host, _, _ := net.SplitHostPort(addr)
		switch host {
		case "nowhere.example":
			return nil, &net.OpError{Op: "dial", Err: &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}}
		case "busy.example":
			return nil, &net.OpError{Op: "dial", Err: &net.DNSError{Err: "server misbehaving", Name: host, IsTemporary: true}}
		}
		return new(net.Dialer).DialContext(ctx, network, addr)
	}
	valid := &tls.Config{RootCAs: roots}
	for name, c := range map[string]struct {
		url    string
		config *tls.Config
		is     func(error) bool
		again  bool
	}{
		"UnknownAuthority": {secure.URL, nil, is[x509.UnknownAuthorityError], false},
		"NoTLS":            {"https" + strings.TrimPrefix(plain.URL, "http"), valid, is[tls.RecordHeaderError], false},
		"NXDOMAIN":         {"http://nowhere.example", nil, is[*net.DNSError], false},
		"ResolverIsBusy":   {"http://busy.example", nil, is[*net.DNSError], true},
	} {
		t.Run(name, func(t *testing.T) {
			var seen watch
			base := &http.Transport{DialContext: dial, TLSClientConfig: c.config}
			defer base.CloseIdleConnections()
			transport := &resiliencehttp.Transport{Base: base, Middleware: resilience.Chain(retries(3).Wrap, seen.Wrap)}
			req, err := http.NewRequest("GET", c.url, nil)
			require.NoError(t, err)
			req.Header.Set("Idempotency-Key", "1")
			_, err = transport.RoundTrip(req)
			require.Error(t, err)
			require.True(t, c.is(err), "%T: %v", err, err)
			if c.again {
				require.Len(t, seen.seen(), 3)
			} else {
				require.Len(t, seen.seen(), 1, "%v", err)
			}
		})
	}
}

// TestConnectionOfAnotherRequestIsNotAFault: net/http tells only one request that it asks for an HTTP/2 connection,
// and gives it to whichever comes first.
func TestConnectionOfAnotherRequestIsNotAFault(t *testing.T) {
	var seen watch
	base := &http.Transport{TLSNextProto: map[string]func(string, *tls.Conn) http.RoundTripper{}} // no other HTTP/2
	base.RegisterProtocol("https", roundTripper(func(r *http.Request) (*http.Response, error) {
		httptrace.ContextClientTrace(r.Context()).GotConn(httptrace.GotConnInfo{})
		return nil, io.ErrUnexpectedEOF
	}))
	client := &http.Client{Transport: &resiliencehttp.Transport{
		Middleware: resilience.Chain(retries(2).Wrap, seen.Wrap), Base: base,
	}}
	_, err := client.Get("https://a")
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.Equal(t, []behavior.Kind{behavior.Failed, behavior.Failed}, seen.kinds)
}

func TestPostIsSentAgainAfterAFailedDial(t *testing.T) {
	for name, c := range map[string]struct {
		err   error
		again bool
	}{
		"a proxy that does not answer": {&net.OpError{Op: "proxyconnect", Err: errors.New("refused")}, true},
		"a dial":                       {&net.OpError{Op: "dial", Err: errors.New("refused")}, true},
		"a read":                       {&net.OpError{Op: "read", Err: errors.New("reset")}, false},
	} {
		t.Run(name, func(t *testing.T) {
			sent := 0
			transport := &resiliencehttp.Transport{Middleware: retries(2).Wrap,
				Base: roundTripper(func(*http.Request) (*http.Response, error) {
					sent++
					return nil, c.err
				})}
			_, err := transport.RoundTrip(httptest.NewRequest("POST", "http://example.com", nil))
			require.ErrorIs(t, err, c.err)
			require.Equal(t, c.again, sent == 2)
		})
	}
}

// A scheme that is registered with a RoundTripper has a server behind it, which may fail.
func TestRegisteredSchemeMayFail(t *testing.T) {
	var seen watch
	base := &http.Transport{}
	down := &net.OpError{Op: "read", Err: errors.New("down")}
	base.RegisterProtocol("gopher", roundTripper(func(*http.Request) (*http.Response, error) { return nil, down }))
	client := &http.Client{Transport: &resiliencehttp.Transport{Base: base,
		Middleware: resilience.Chain(retries(3).Wrap, seen.Wrap)}}
	_, err := client.Get("gopher://example.com")
	require.ErrorIs(t, err, down)
	require.Len(t, seen.seen(), 3)
	require.Equal(t, behavior.Failed, seen.kinds[0])

	// It is to blame for a timeout, too, which net/http returns as the cause of its ctx.
	synctest.Test(t, func(t *testing.T) {
		var seen watch
		transport := &resiliencehttp.Transport{
			Middleware: resilience.Chain(retries(2).Wrap, seen.Wrap, resilience.Timeout(time.Second)),
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				<-r.Context().Done()
				return nil, context.Cause(r.Context())
			}),
		}
		_, err := (&http.Client{Transport: transport}).Get("gopher://example.com")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, []behavior.Kind{behavior.Failed, behavior.Failed}, seen.kinds)
	})
}

// TestFieldsInvalidInHTTP2AreNotTheServersFault: a proxy passes on what its clients
// ask to upgrade to, and any of them could open the circuit of a server for all.
func TestFieldsInvalidInHTTP2AreNotTheServersFault(t *testing.T) {
	server := serve(t, true, func(http.ResponseWriter, *http.Request) {})
	var seen watch
	client := server.client(retries(3).Wrap, seen.Wrap)
	resp, err := client.Get(server.URL) // which tells how long the fields may be
	answer(t, resp, err)
	get := func(name, value string) error {
		req, err := http.NewRequest("GET", server.URL, nil)
		require.NoError(t, err)
		req.Header.Set(name, value)
		_, err = client.Do(req)
		return err
	}
	for name, value := range map[string]string{
		"Upgrade": "h2c", "Connection": "Upgrade", "Transfer-Encoding": "gzip",
		"X-Long": strings.Repeat("x", 2*http.DefaultMaxHeaderBytes),
	} {
		seen = watch{}
		require.ErrorContains(t, get(name, value), "http2: ")
		require.Equal(t, []behavior.Kind{behavior.Refused}, seen.kinds, name)
	}

	// A server that fails is to blame, whatever the fields.
	seen = watch{}
	down := errors.New("no answer to an Upgrade")
	client.Transport.(*resiliencehttp.Transport).Base = roundTripper(func(*http.Request) (*http.Response,
		error) {
		return nil, down
	})
	require.ErrorIs(t, get("Upgrade", "h2c"), down)
	require.Equal(t, []behavior.Kind{behavior.Failed, behavior.Failed, behavior.Failed}, seen.kinds)
}

func is[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}

func TestTimeoutIsStillOneOutside(t *testing.T) {
	late := &net.OpError{Op: "read", Err: context.DeadlineExceeded}
	broken := errors.New("broken")
	for name, c := range map[string]struct {
		method  string
		err     error
		timeout bool
	}{
		"Retried":      {"GET", late, true},
		"Sent":         {"POST", late, true},
		"SentDeep":     {"POST", fmt.Errorf("asking: %w", late), true},
		"Beside":       {"GET", errors.Join(&net.OpError{Op: "dial", Err: broken}, context.DeadlineExceeded), true},
		"NoDeadline":   {"GET", &net.DNSError{IsTimeout: true, IsTemporary: true}, true},
		"NoTimeout":    {"GET", broken, false},
		"OtherNetwork": {"GET", &net.OpError{Op: "read", Err: broken}, false},
	} {
		t.Run(name, func(t *testing.T) {
			var seen watch
			client := &http.Client{Transport: &resiliencehttp.Transport{Middleware: resilience.Chain(retries(2).Wrap, seen.Wrap),
				Base: roundTripper(func(*http.Request) (*http.Response, error) { return nil, c.err })}}
			req, _ := http.NewRequest(c.method, "http://example.com", nil)
			_, err := client.Do(req)
			outer, ok := errors.AsType[*url.Error](err)
			require.True(t, ok)
			require.Equal(t, c.timeout, outer.Timeout(), "%v", err)
			require.ErrorIs(t, err, c.err)
			_, exhausted := errors.AsType[*retry.Error](err)
			require.Equal(t, c.method == "GET", exhausted)
			if c.method == "GET" {
				require.Regexp(t, `^Get "http://example.com": retry: gave up after 2 attempts: `, err.Error())
			}
			if final, ok := seen.seen()[0].(interface{ Timeout() bool }); ok { // what the policies see says so, too
				require.Equal(t, c.timeout, final.Timeout())
			} else {
				require.ErrorIs(t, seen.seen()[0], c.err)
			}
		})
	}
}

// hangs answers nothing before the request's ctx ends.
func hangs(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() }

func TestTimeoutOfTheClientIsTheCallersDeadline(t *testing.T) {
	onBoth(t, func(t *testing.T, http2 bool) {
		server := serve(t, http2, hangs)
		var outer, inner watch
		client := server.client(outer.Wrap, retries(3).Wrap, derives, inner.Wrap)
		for range 20 {
			client.Timeout = time.Millisecond
			_, err := client.Get(server.URL)
			outer, ok := errors.AsType[*url.Error](err)
			require.True(t, ok)
			require.True(t, outer.Timeout())
		}
		for _, w := range []*watch{&outer, &inner} {
			for i, kind := range w.kinds {
				require.Equal(t, behavior.Overran, kind, "%v", w.seen()[i])
			}
		}
	})
}

// net/http sets the field Cancel for the same instant as the deadline.
func TestClientTimeoutReachesBaseAsADeadline(t *testing.T) {
	transport := &resiliencehttp.Transport{Middleware: derives,
		Base: roundTripper(func(r *http.Request) (*http.Response, error) {
			_, ok := r.Context().Deadline()
			require.True(t, ok)
			require.Nil(t, r.Cancel) //lint:ignore SA1019 it is deprecated
			return response(204, strings.NewReader("")), nil
		})}
	_, err := (&http.Client{Transport: transport, Timeout: time.Minute}).Get("http://a")
	require.NoError(t, err)
}

func TestDeadlineThatHadPassedIsATimeout(t *testing.T) {
	tooSlow := errors.New("too slow")
	ctx, cancel := context.WithDeadlineCause(t.Context(), time.Now().Add(-time.Second), tooSlow)
	defer cancel()
	req, _ := http.NewRequestWithContext(ctx, "GET", "http://example.com", nil)
	_, err := (&http.Client{Transport: &resiliencehttp.Transport{Middleware: retries(2).Wrap}}).Do(req)
	outer, ok := errors.AsType[*url.Error](err)
	require.True(t, ok)
	require.True(t, outer.Timeout())
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorIs(t, err, tooSlow)
}
