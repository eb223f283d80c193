package resiliencehttp_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencehttp"
)

// A trackedBody counts how often it is closed. It hides what it reads from, so
// that http.NewRequest makes no GetBody.
type trackedBody struct {
	io.Reader
	closed atomic.Int64
}

func (b *trackedBody) Close() error { b.closed.Add(1); return nil }

func TestWhatMayBeRepeatedIs(t *testing.T) {
	for _, c := range []struct {
		method   string
		header   string
		requests int64
	}{
		{"GET", "", 3}, {"HEAD", "", 3}, {"OPTIONS", "", 3}, {"TRACE", "", 3}, {"PUT", "", 3}, {"DELETE", "", 3},
		{"POST", "", 1}, {"PATCH", "", 1}, {"CONNECTED", "", 1}, {"get", "", 1},
		{"POST", "Idempotency-Key", 3}, {"PATCH", "X-Idempotency-Key", 3},
	} {
		t.Run(c.method+c.header, func(t *testing.T) {
			server := serve(t, false, statuses("", 503))
			req, err := http.NewRequest(c.method, server.URL, nil)
			require.NoError(t, err)
			if c.header != "" {
				req.Header.Set(c.header, "123")
			}
			resp, err := server.client(retries(3).Wrap).Do(req)
			answer(t, resp, err)
			require.Equal(t, c.requests, server.requests.Load())
		})
	}
}

func TestReplayableDecides(t *testing.T) {
	server := serve(t, false, statuses("", 500))
	client := &http.Client{Transport: &resiliencehttp.Transport{Base: server.Base, Middleware: retries(3).Wrap,
		Replayable: func(r *http.Request) bool { return r.Method == "POST" }}}
	resp, err := client.Get(server.URL)
	answer(t, resp, err)
	require.EqualValues(t, 1, server.requests.Load())
	resp, err = client.Post(server.URL, "", strings.NewReader("x"))
	answer(t, resp, err)
	require.EqualValues(t, 4, server.requests.Load())
}

func TestBodiesThatCanBeSentAgain(t *testing.T) {
	for name, c := range map[string]struct {
		body     io.Reader
		max      int64
		requests int64
	}{
		"GetBody":        {strings.NewReader("0123456789"), 0, 3},
		"NotKept":        {&trackedBody{Reader: strings.NewReader("0123456789")}, 0, 1},
		"Kept":           {&trackedBody{Reader: strings.NewReader("0123456789")}, 10, 3},
		"TooLongToKeep":  {&trackedBody{Reader: strings.NewReader("0123456789")}, 9, 1},
		"NegativeBuffer": {&trackedBody{Reader: strings.NewReader("0123456789")}, -1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, http2 bool) {
				var got []string
				server := serve(t, http2, func(w http.ResponseWriter, r *http.Request) {
					body, _ := io.ReadAll(r.Body)
					got = append(got, string(body))
					w.WriteHeader(503)
				})
				if seeker, ok := c.body.(*trackedBody); ok {
					_, _ = seeker.Reader.(io.Seeker).Seek(0, io.SeekStart)
					seeker.closed.Store(0)
				} else {
					c.body = strings.NewReader("0123456789")
				}
				req, _ := http.NewRequest("PUT", server.URL, c.body)
				body := req.Body
				client := &http.Client{Transport: &resiliencehttp.Transport{Base: server.Base, Middleware: retries(3).Wrap, MaxBuffer: c.max}}
				resp, err := client.Do(req)
				answer(t, resp, err)
				require.EqualValues(t, c.requests, server.requests.Load())
				for _, body := range got {
					require.Equal(t, "0123456789", body)
				}
				if tracked, ok := body.(*trackedBody); ok {
					require.Eventually(t, func() bool { return tracked.closed.Load() > 0 }, 10*time.Second, time.Millisecond)
				}
			})
		})
	}
}

func TestKnownLengthAboveMaxBufferIsNotRead(t *testing.T) {
	body := &trackedBody{Reader: strings.NewReader("0123456789")}
	req, _ := http.NewRequest("PUT", "http://example.com", body)
	req.ContentLength = 10
	transport := &resiliencehttp.Transport{MaxBuffer: 9, Middleware: retries(2).Wrap,
		Base: roundTripper(func(r *http.Request) (*http.Response, error) {
			require.Same(t, body, r.Body)
			_ = r.Body.Close()
			return response(503, strings.NewReader("")), nil
		})}
	resp, err := transport.RoundTrip(req)
	answer(t, resp, err)
}

func TestBodyIsClosedOnEveryPath(t *testing.T) {
	ok := roundTripper(func(r *http.Request) (*http.Response, error) {
		_ = r.Body.Close()
		return response(200, strings.NewReader("")), nil
	})
	full := bulkhead.New(bulkhead.Config{Limit: 1})
	release, _ := full.TryAcquire()
	defer release()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for name, c := range map[string]struct {
		prepare func(*http.Request)
		mw      resilience.Middleware
		max     int64
		want    string
	}{
		"Sent":          {nil, retries(1).Wrap, 0, ""},
		"SentWithout":   {nil, nil, 0, ""},
		"Kept":          {nil, retries(1).Wrap, 100, ""},
		"Refused":       {nil, full.Wrap, 0, "bulkhead: full"},
		"RefusedInTime": {func(r *http.Request) { *r = *r.WithContext(ended) }, full.Wrap, 0, "context canceled"},
		"NoURL":         {func(r *http.Request) { r.URL = nil }, full.Wrap, 0, "resiliencehttp: the request has no URL"},
		"NoHeader":      {func(r *http.Request) { r.Header = nil }, full.Wrap, 0, "resiliencehttp: the request has no Header"},
		"Unreadable": {func(r *http.Request) { r.Body.(*trackedBody).Reader = broken{} }, retries(3).Wrap, 100,
			"resiliencehttp: reading the request's body: broken"},
	} {
		t.Run(name, func(t *testing.T) {
			body := &trackedBody{Reader: strings.NewReader("x")}
			req, _ := http.NewRequest("POST", "http://example.com", body)
			if c.prepare != nil {
				c.prepare(req)
			}
			resp, err := (&resiliencehttp.Transport{Base: ok, Middleware: c.mw, MaxBuffer: c.max}).RoundTrip(req)
			if c.want == "" {
				answer(t, resp, err)
			} else {
				require.ErrorContains(t, err, c.want)
			}
			require.EqualValues(t, 1, body.closed.Load())
		})
	}
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, errors.New("broken") }

func TestBodyThatWaitsIsGivenUpWithTheCtx(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	r, _ := io.Pipe()
	reading := make(chan struct{})
	req, _ := http.NewRequestWithContext(ctx, "PUT", "http://example.com", struct {
		io.Reader
		io.Closer
	}{readerFunc(func(p []byte) (int, error) { close(reading); return r.Read(p) }), r})
	go func() { <-reading; cancel() }()
	_, err := (&resiliencehttp.Transport{Middleware: retries(3).Wrap, MaxBuffer: 100}).RoundTrip(req)
	require.Error(t, err)
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

func TestBodyThatFailsToRewind(t *testing.T) {
	server := serve(t, false, statuses("", 503))
	req, _ := http.NewRequest("PUT", server.URL, strings.NewReader("x"))
	lost := errors.New("lost")
	req.GetBody = func() (io.ReadCloser, error) { return nil, lost }
	_, err := server.client(retries(5).Wrap).Do(req)
	require.ErrorIs(t, err, lost)
	require.ErrorContains(t, err, "resiliencehttp: rewinding the request's body: lost")
	require.EqualValues(t, 1, server.requests.Load())
}

func TestCallersRequestIsNotChanged(t *testing.T) {
	req, _ := http.NewRequest("PUT", "http://example.com/path", strings.NewReader("x"))
	req.Header.Set("A", "1")
	before := req.Clone(t.Context())
	url, body := req.URL, req.Body
	transport := &resiliencehttp.Transport{Middleware: retries(3).Wrap, Base: roundTripper(func(r *http.Request) (*http.Response, error) {
		require.NotSame(t, req, r)
		require.Equal(t, before.Header, r.Header, "an attempt sees what another one did")
		require.Equal(t, "/path", r.URL.Path)
		r.Header.Set("A", "2")
		r.Header.Set("Authorization", "secret")
		r.URL.Path = "/elsewhere"
		_ = r.Body.Close()
		return response(503, strings.NewReader("")), nil
	})}
	resp, err := transport.RoundTrip(req)
	answer(t, resp, err)
	require.Equal(t, before.Header, req.Header)
	require.Same(t, url, req.URL)
	require.Equal(t, "/path", req.URL.Path)
	require.Equal(t, body, req.Body)
}

func TestPostThatWasNeverSentIsRetried(t *testing.T) {
	server := serve(t, false, statuses("", 200))
	dials := 0
	base := &http.Transport{DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		if dials++; dials < 3 {
			return nil, &net.OpError{Op: "dial", Net: network, Err: errors.New("connection refused")}
		}
		return new(net.Dialer).DialContext(ctx, network, addr)
	}}
	defer base.CloseIdleConnections()
	client := &http.Client{Transport: &resiliencehttp.Transport{Base: base, Middleware: retries(3).Wrap}}
	resp, err := client.Post(server.URL, "", bytes.NewReader([]byte("x")))
	require.Equal(t, "OK", answer(t, resp, err))
	require.Equal(t, 3, dials)
}

func TestPostRefusedFurtherDownIsRetried(t *testing.T) {
	calls := 0
	base := roundTripper(func(*http.Request) (*http.Response, error) {
		if calls++; calls < 3 {
			return nil, refusal{}
		}
		return response(200, strings.NewReader("ok")), nil
	})
	outer := &resiliencehttp.Transport{Middleware: retries(3).Wrap,
		Base: &resiliencehttp.Transport{Middleware: resilience.Chain(), Base: base}}
	resp, err := outer.RoundTrip(httptest.NewRequest("POST", "http://example.com", nil))
	require.Equal(t, "ok", answer(t, resp, err))
}

type refusal struct{}

func (refusal) Error() string { return "full" }
func (refusal) Refused() bool { return true }

func TestPostThatMayHaveBeenSentIsNotRetried(t *testing.T) {
	server := serve(t, false, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		panic(http.ErrAbortHandler) // hangs up
	})
	var seen watch
	for _, body := range []string{"", "x"} {
		_, err := server.client(retries(3).Wrap, seen.Wrap).Post(server.URL, "", strings.NewReader(body))
		require.Error(t, err)
	}
	require.EqualValues(t, 2, server.requests.Load())
	require.Len(t, seen.seen(), 2)

	// Not even by a policy that tries again all the same.
	again := func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error { _ = next(ctx); return next(ctx) }
	}
	_, err := server.client(again).Post(server.URL, "", strings.NewReader("x"))
	require.Error(t, err)
	require.EqualValues(t, 3, server.requests.Load())
}
