package faults_test

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/faults"
)

// get returns what a client sees of one request: the status, the body as far as it came,
// and the first error.
func get(t *testing.T, client *http.Client, url string) (status int, body string, err error) {
	req, err := http.NewRequestWithContext(t.Context(), "POST", url, strings.NewReader("request"))
	require.NoError(t, err)
	res, err := client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	return res.StatusCode, string(b), err
}

var hello = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	_, _ = io.WriteString(w, "hello, world")
})

func TestTransportAndHandlerInjectEachFault(t *testing.T) {
	for _, c := range []struct {
		plan   faults.Plan
		status int
		body   string
		fails  bool
	}{
		{faults.Plan{Kind: faults.Latency, Delay: time.Microsecond}, 200, "hello, world", false},
		{faults.Plan{Kind: faults.Status}, 503, "Service Unavailable\n", false},
		{faults.Plan{Kind: faults.Status, Status: 429, RetryAfter: time.Second}, 429, "Too Many Requests\n", false},
		{faults.Plan{Kind: faults.Refuse}, 0, "", true},
		{faults.Plan{Kind: faults.Reset, Bytes: 5}, 200, "hello", true},
		{faults.Plan{Kind: faults.SlowBody, Rate: 10_000}, 200, "hello, world", false},
	} {
		t.Run(string(c.plan.Kind), func(t *testing.T) {
			plain := httptest.NewServer(hello)
			defer plain.Close()
			client := &http.Client{Transport: faults.Transport(script(c.plan), nil)}
			status, body, err := get(t, client, plain.URL)
			require.Equal(t, c.status, status)
			require.Equal(t, c.body, body)
			require.Equal(t, c.fails, err != nil, "%v", err)

			faulty := httptest.NewServer(faults.Handler(script(c.plan), hello))
			defer faulty.Close()
			status, body, err = get(t, faulty.Client(), faulty.URL)
			require.Equal(t, c.status, status)
			require.Equal(t, c.body, body)
			require.Equal(t, c.fails, err != nil, "%v", err)
		})
	}
}

func TestFailInTransportAndHandler(t *testing.T) {
	client := &http.Client{Transport: faults.Transport(script(faults.Plan{Kind: faults.Fail, Err: errFull}), nil)}
	_, _, err := get(t, client, "http://127.0.0.1:1/")
	require.ErrorIs(t, err, errFull)

	server := httptest.NewServer(faults.Handler(script(faults.Plan{Kind: faults.Fail, Status: 500}), hello))
	defer server.Close()
	status, _, err := get(t, server.Client(), server.URL)
	require.NoError(t, err)
	require.Equal(t, 500, status)
}

func TestHangEndsWithTheCallersCtx(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		body := &closed{Reader: strings.NewReader("x")}
		req, err := http.NewRequestWithContext(ctx, "POST", "http://backend/", body)
		require.NoError(t, err)
		start := time.Now()
		_, err = faults.Transport(script(faults.Plan{Kind: faults.Hang}), nil).RoundTrip(req)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, time.Second, time.Since(start))
		require.True(t, body.closed, "a RoundTripper closes the body of the request")

		w := httptest.NewRecorder()
		ctx, cancel = context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start = time.Now()
		r := httptest.NewRequestWithContext(ctx, "GET", "/", nil)
		faults.Handler(script(faults.Plan{Kind: faults.Hang}), hello).ServeHTTP(w, r)
		require.Equal(t, time.Second, time.Since(start))
	})
}

func TestHangEndsAfterABodyOnDisconnect(t *testing.T) {
	t.Parallel()
	began, ended := make(chan struct{}), make(chan struct{})
	hang := faults.Handler(script(faults.Plan{Kind: faults.Hang}), hello)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer close(ended)
		close(began)
		hang.ServeHTTP(w, r)
	}))
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL, strings.NewReader("a body"))
	require.NoError(t, err)
	go func() { <-began; cancel() }()
	_, err = server.Client().Do(req)
	require.ErrorIs(t, err, context.Canceled)
	<-ended // hangs if the handler does not notice
	server.Close()
}

type closed struct {
	io.Reader
	closed bool
}

func (c *closed) Close() error { c.closed = true; return nil }

func TestSlowBodyHasARateAndEndsWithItsCtx(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		base := roundTripper(func(r *http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: 200, Body: io.NopCloser(strings.NewReader(strings.Repeat("x", 100)))}, nil
		})
		rt := faults.Transport(script(faults.Plan{Kind: faults.SlowBody, Rate: 10}), base)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		start := time.Now()
		res, err := rt.RoundTrip(httptest.NewRequestWithContext(ctx, "GET", "http://backend/", nil))
		require.NoError(t, err)
		b, err := io.ReadAll(res.Body)
		require.NoError(t, err)
		require.Len(t, b, 100)
		require.Equal(t, 10*time.Second, time.Since(start))

		ctx, cancel = context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		res, err = rt.RoundTrip(httptest.NewRequestWithContext(ctx, "GET", "http://backend/", nil))
		require.NoError(t, err)
		_, err = io.ReadAll(res.Body)
		require.ErrorIs(t, err, context.DeadlineExceeded)
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestDisabledScriptChangesNoHTTP(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s := faults.New(faults.Config{})
	req := httptest.NewRequestWithContext(ctx, "GET", "http://backend/", nil)
	w := httptest.NewRecorder()
	faults.Handler(s, hello).ServeHTTP(w, req)
	require.Equal(t, "hello, world", w.Body.String())
	made := false
	base := roundTripper(func(*http.Request) (*http.Response, error) { made = true; return nil, io.EOF })
	_, err := faults.Transport(s, base).RoundTrip(req)
	require.ErrorIs(t, err, io.EOF)
	require.True(t, made)
}

func TestResetTruncatesAShortBody(t *testing.T) {
	reset := faults.Plan{Kind: faults.Reset, Bytes: 100}
	plain := httptest.NewServer(hello)
	defer plain.Close()
	_, body, err := get(t, &http.Client{Transport: faults.Transport(script(reset), nil)}, plain.URL)
	require.Equal(t, "hello, world", body)
	require.ErrorIs(t, err, syscall.ECONNRESET)

	faulty := httptest.NewServer(faults.Handler(script(reset), hello))
	defer faulty.Close()
	status, body, err := get(t, faulty.Client(), faulty.URL)
	require.Equal(t, 200, status)
	require.Equal(t, "hello, world", body)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
}

func TestFaultsOfHTTP2EndTheStreamAlone(t *testing.T) {
	s := script()
	server := httptest.NewUnstartedServer(faults.Handler(s, hello))
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()
	set := func(plans ...faults.Plan) {
		require.NoError(t, s.Update(func(c *faults.Config) { c.Plans = plans }))
	}
	for _, c := range []struct {
		plan   faults.Plan
		status int
		body   string
		fails  bool
	}{
		{faults.Plan{Kind: faults.Refuse}, 0, "", true},
		{faults.Plan{Kind: faults.Reset}, 200, "", true},
		{faults.Plan{Kind: faults.Reset, Bytes: 5}, 200, "hello", true},
		{faults.Plan{Kind: faults.Reset, Bytes: 100}, 200, "hello, world", true},
		{faults.Plan{Kind: faults.SlowBody, Rate: 10_000}, 200, "hello, world", false},
		{faults.Plan{Kind: faults.Status, Status: 204}, 204, "", false},
	} {
		set(c.plan)
		status, body, err := get(t, server.Client(), server.URL)
		require.Equal(t, c.status, status, "%+v", c.plan)
		require.Equal(t, c.body, body, "%+v", c.plan)
		require.Equal(t, c.fails, err != nil, "%+v: %v", c.plan, err)
		set()
		status, _, err = get(t, server.Client(), server.URL)
		require.NoError(t, err)
		require.Equal(t, 200, status)
	}
}

func TestStatusHasABodyIfAllowed(t *testing.T) {
	for _, c := range []struct {
		method string
		status int
		body   string
	}{
		{"GET", 503, "Service Unavailable\n"},
		{"HEAD", 503, ""},
		{"GET", 204, ""},
		{"GET", 304, ""},
	} {
		rt := faults.Transport(script(faults.Plan{Kind: faults.Status, Status: c.status}), nil)
		res, err := rt.RoundTrip(httptest.NewRequest(c.method, "http://backend/", nil))
		require.NoError(t, err)
		b, err := io.ReadAll(res.Body)
		require.NoError(t, err)
		require.Equal(t, c.body, string(b))
		require.EqualValues(t, len(c.body), res.ContentLength)
	}
}

func TestRetryAfterIsRoundedUp(t *testing.T) {
	for after, want := range map[time.Duration]string{
		0: "", 1: "1", time.Second: "1", time.Second + 1: "2", 1<<63 - 1: "9223372037",
	} {
		rt := faults.Transport(script(faults.Plan{Kind: faults.Status, RetryAfter: after}), nil)
		res, err := rt.RoundTrip(httptest.NewRequest("GET", "http://backend/", nil))
		require.NoError(t, err)
		require.Equal(t, want, res.Header.Get("Retry-After"))
	}
}

func TestHandlersMayStillFlush(t *testing.T) {
	for _, kind := range []faults.Kind{faults.Reset, faults.SlowBody} {
		w := httptest.NewRecorder()
		s := script(faults.Plan{Kind: kind, Bytes: 100, Rate: 1 << 30})
		h := faults.Handler(s, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.(http.Flusher).Flush()
		}))
		func() {
			defer func() { _ = recover() }() // of the Reset
			h.ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
		}()
		require.True(t, w.Flushed)
	}
}

func TestSwitchedProtocolsAreUnchanged(t *testing.T) {
	conn := struct {
		io.ReadCloser
		io.Writer
	}{io.NopCloser(strings.NewReader("")), bufio.NewWriter(io.Discard)}
	base := roundTripper(func(*http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: http.StatusSwitchingProtocols, Body: conn}, nil
	})
	res, err := faults.Transport(script(faults.Plan{Kind: faults.Reset}), base).
		RoundTrip(httptest.NewRequest("GET", "http://backend/", nil))
	require.NoError(t, err)
	require.Implements(t, (*io.Writer)(nil), res.Body)
}

func TestTransportClosesIdleConnectionsOfItsBase(t *testing.T) {
	base := &idle{}
	(&http.Client{Transport: faults.Transport(script(), base)}).CloseIdleConnections()
	require.True(t, base.closed)
}

type idle struct {
	http.RoundTripper
	closed bool
}

func (b *idle) CloseIdleConnections() { b.closed = true }
