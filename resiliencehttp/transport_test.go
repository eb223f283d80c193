package resiliencehttp_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
)

// retries returns a retrier that does not wait.
func retries(attempts int) *retry.Retrier {
	return retry.New(retry.Config{Attempts: attempts, Backoff: retry.Constant(0)})
}

// A testServer is a server on loopback, over HTTP/1.1 or, with TLS, HTTP/2.
type testServer struct {
	*httptest.Server
	Base          *http.Transport // to talk to it
	opened, open, // connections
	requests atomic.Int64
}

func serve(t *testing.T, http2 bool, handler http.HandlerFunc) *testServer {
	s := &testServer{}
	s.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.requests.Add(1)
		handler(w, r)
	}))
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		switch state {
		case http.StateNew:
			s.opened.Add(1)
			s.open.Add(1)
		case http.StateClosed, http.StateHijacked:
			s.open.Add(-1)
		}
	}
	if http2 {
		s.EnableHTTP2 = true
		s.StartTLS()
		s.Base = s.Client().Transport.(*http.Transport)
	} else {
		s.Start()
		s.Base = &http.Transport{}
	}
	t.Cleanup(func() {
		if !t.Failed() { // a body that somebody has left open keeps its connection from being idle
			require.Eventually(t, func() bool {
				s.Base.CloseIdleConnections()
				return s.open.Load() == 0
			}, time.Minute, time.Millisecond, "a connection is left")
		}
		s.CloseClientConnections()
		s.Close()
		requireNoCall(t)
	})
	return s
}

// client returns one that uses mw.
func (s *testServer) client(mw ...resilience.Middleware) *http.Client {
	return &http.Client{Transport: &resiliencehttp.Transport{Base: s.Base, Middleware: resilience.Chain(mw...)}}
}

// onBoth runs a test over HTTP/1.1 and HTTP/2.
func onBoth(t *testing.T, test func(t *testing.T, http2 bool)) {
	for name, http2 := range map[string]bool{"HTTP1": false, "HTTP2": true} {
		t.Run(name, func(t *testing.T) { test(t, http2) })
	}
}

// requireNoCall waits for all goroutines in this package's code to end.
func requireNoCall(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		dump := make([]byte, 1<<20)
		return !bytes.Contains(dump[:runtime.Stack(dump, true)], []byte("/resiliencehttp."))
	}, time.Minute, time.Millisecond, "a goroutine is left")
}

// requireFree waits until nobody has a slot, as a call whose ctx has ended does not
// wait for that.
func requireFree(t *testing.T, slots *bulkhead.Bulkhead) {
	t.Helper()
	require.Eventually(t, func() bool { return slots.Stats().InFlight == 0 }, time.Minute, time.Millisecond)
}

// answer reads the response to its end and closes it.
func answer(t *testing.T, resp *http.Response, err error) string {
	t.Helper()
	require.NoError(t, err)
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	return string(body)
}

// statuses answers with one status after the other, the last one forever, and
// the body, or else a text that names the status.
func statuses(body string, codes ...int) http.HandlerFunc {
	var n atomic.Int64
	return func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		code := codes[min(int(n.Add(1)), len(codes))-1]
		w.WriteHeader(code)
		if body == "" {
			_, _ = io.WriteString(w, http.StatusText(code))
		}
		_, _ = io.WriteString(w, body)
	}
}

// watch records what the policies get to see, and how bodies broke off later.
type watch struct {
	mu         sync.Mutex
	errs, ends []error
	kinds      []behavior.Kind // of errs, when they were returned
	ctxs       []context.Context
}

func (w *watch) Wrap(next resilience.Func) resilience.Func {
	return func(ctx context.Context) error {
		w.note(func() { w.ctxs = append(w.ctxs, ctx) })
		work := linger.WorkOf(ctx)
		err := next(ctx)
		kind := behavior.ReadUnder(ctx, err).Kind
		w.note(func() { w.errs, w.kinds = append(w.errs, err), append(w.kinds, kind) })
		if err == nil {
			work.OnEnd(func(err error) {
				if err != nil {
					w.note(func() { w.ends = append(w.ends, err) })
				}
			})
		}
		return err
	}
}

func (w *watch) note(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

func (w *watch) seen() (errs []error) {
	w.note(func() { errs = w.errs })
	return errs
}

func (w *watch) broken() (ends []error) {
	w.note(func() { ends = w.ends })
	return ends
}

// roundTripper is a RoundTripper that is a function.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func response(status int, body io.Reader, header ...string) *http.Response {
	resp := &http.Response{StatusCode: status, Header: http.Header{}, Body: io.NopCloser(body)}
	for i := 0; i < len(header); i += 2 {
		resp.Header.Add(header[i], header[i+1])
	}
	return resp
}

func TestRetriesUseOneConnectionAndLeaveNothing(t *testing.T) {
	onBoth(t, func(t *testing.T, http2 bool) {
		var n atomic.Int64
		server := serve(t, http2, func(w http.ResponseWriter, r *http.Request) {
			if n.Add(1)%3 != 0 {
				w.WriteHeader(503)
				_, _ = io.WriteString(w, strings.Repeat("x", 60<<10))
				return
			}
			_, _ = io.WriteString(w, "done")
		})
		client := server.client(retries(3).Wrap)
		for range 20 {
			resp, err := client.Get(server.URL)
			require.Equal(t, "done", answer(t, resp, err))
			require.Equal(t, 200, resp.StatusCode)
		}
		require.EqualValues(t, 60, server.requests.Load())
		require.EqualValues(t, 1, server.opened.Load())
		requireNoCall(t)
	})
}

func TestReturnsLastFailedResponseOpen(t *testing.T) {
	for name, size := range map[string]int{"None": 0, "Short": 10, "Drained": 64 << 10, "TooLong": 64<<10 + 1,
		"Long": 3 << 20} {
		t.Run(name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, http2 bool) {
				body := strings.Repeat("0123456789", size/10+1)[:size]
				server := serve(t, http2, func(w http.ResponseWriter, r *http.Request) {
					w.WriteHeader(503)
					_, _ = io.WriteString(w, body)
				})
				// The ctx of an attempt ends with it, that of its response must not.
				client := server.client(retries(3).Wrap, resilience.Timeout(time.Minute))
				resp, err := client.Get(server.URL)
				require.Equal(t, body, answer(t, resp, err))
				require.Equal(t, 503, resp.StatusCode)
				require.EqualValues(t, 3, server.requests.Load())
			})
		})
	}
}

func TestBrokenFailedResponseIsStillTheResponse(t *testing.T) {
	server := serve(t, false, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "100")
		w.WriteHeader(503)
		_, _ = io.WriteString(w, "half of i")
	})
	resp, err := server.client(retries(2).Wrap).Get(server.URL)
	require.NoError(t, err)
	body, err := io.ReadAll(resp.Body)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.Equal(t, "half of i", string(body))
	require.NoError(t, resp.Body.Close())
	require.EqualValues(t, 2, server.requests.Load())
}

func TestErrorAfterFailedResponseIsReturned(t *testing.T) {
	broken := errors.New("broken")
	closed := 0
	calls := 0
	transport := &resiliencehttp.Transport{
		Middleware: retries(3).Wrap,
		Base: roundTripper(func(r *http.Request) (*http.Response, error) {
			if calls++; calls < 3 {
				resp := response(503, nil)
				resp.Body = closeCounter{strings.NewReader(strings.Repeat("x", calls*60<<10)), &closed}
				return resp, nil
			}
			require.Equal(t, 2, closed, "a long one and a short one")
			return nil, broken
		}),
	}
	_, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
	require.ErrorIs(t, err, broken)
	require.Equal(t, 2, closed)
}

func TestFailedResponseIsClosedBeforeTheWait(t *testing.T) {
	for name, c := range map[string]struct {
		size         int
		declared     bool
		closed, left int
	}{
		"Short":           {10, false, 1, 0},
		"Drained":         {64 << 10, true, 1, 0},
		"TooLong":         {64<<10 + 1, false, 0, 0}, // in case it is the last
		"DeclaredTooLong": {64<<10 + 1, true, 0, 64<<10 + 1},
	} {
		t.Run(name, func(t *testing.T) {
			body := strings.NewReader(strings.Repeat("x", c.size))
			closed, waits := 0, 0
			r := retry.New(retry.Config{Backoff: retry.Constant(0)})
			r.Observe(func(_ context.Context, e retry.Event) {
				if e.Kind == retry.EventRetried {
					waits++
					require.Equal(t, c.closed, closed)
					require.Equal(t, c.left, body.Len())
				}
			})
			transport := &resiliencehttp.Transport{Middleware: r.Wrap,
				Base: roundTripper(func(*http.Request) (*http.Response, error) {
					if waits == 0 {
						resp := response(503, nil)
						resp.Body = closeCounter{body, &closed}
						if c.declared {
							resp.ContentLength = int64(c.size)
						}
						return resp, nil
					}
					require.Equal(t, 1, closed, "the connection is needed now")
					return response(200, strings.NewReader("ok")), nil
				})}
			resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
			require.Equal(t, "ok", answer(t, resp, err))
			require.Equal(t, 1, waits)
		})
	}
}

// A trickle is a body of n bytes, one each second.
type trickle struct {
	n       int
	closing chan struct{}
	closed  int
}

func newTrickle(n int) *trickle { return &trickle{n: n, closing: make(chan struct{})} }

func (b *trickle) Read(p []byte) (int, error) {
	if b.n == 0 {
		return 0, io.EOF
	}
	select {
	case <-time.After(time.Second + time.Millisecond):
		b.n--
		p[0] = 'x'
		return 1, nil
	case <-b.closing:
		return 0, errors.New("closed")
	}
}

func (b *trickle) Close() error {
	b.closed++
	close(b.closing)
	return nil
}

// The Transport reads a failed response for a second before the next attempt, and goes on while the retrier waits.
func TestTrickleDelaysTheNextAttemptForASecond(t *testing.T) {
	for name, c := range map[string]struct {
		n, left int
		waits   time.Duration // of the retrier
	}{
		"AtOnce":     {1000, 1000, 0},
		"AfterAWait": {3, 0, 10 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				body := newTrickle(c.n)
				calls := 0
				r := retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(c.waits)})
				transport := &resiliencehttp.Transport{Middleware: r.Wrap,
					Base: roundTripper(func(*http.Request) (*http.Response, error) {
						if calls++; calls == 1 {
							resp := response(503, nil)
							resp.Body = body
							return resp, nil
						}
						require.Equal(t, c.left, body.n)
						require.Equal(t, 1, body.closed)
						return response(200, strings.NewReader("ok")), nil
					})}
				start := time.Now()
				resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
				require.Equal(t, "ok", answer(t, resp, err))
				require.Equal(t, time.Second+c.waits, time.Since(start))
				require.Equal(t, 1, body.closed)
			})
		})
	}
}

type closeCounter struct {
	io.Reader
	closed *int
}

func (c closeCounter) Close() error { *c.closed++; return nil }

func TestStatusErrorHasACopyOfTheHeader(t *testing.T) {
	for _, method := range []string{"GET", "POST"} {
		server := serve(t, false, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("A", "b")
			w.WriteHeader(503)
		})
		var seen watch
		req, err := http.NewRequest(method, server.URL, nil)
		require.NoError(t, err)
		resp, err := server.client(retries(2).Wrap, seen.Wrap).Do(req)
		require.Empty(t, answer(t, resp, err))
		resp.Header.Set("A", "c")
		for _, err := range seen.seen() {
			status, ok := errors.AsType[*resiliencehttp.StatusError](err)
			require.True(t, ok)
			require.Equal(t, "b", status.Header.Get("A"))
			require.Equal(t, "503", status.ErrorType())
		}
	}
	resp := response(503, nil, "A", "b")
	status, ok := errors.AsType[*resiliencehttp.StatusError](resiliencehttp.DefaultJudge(resp, nil))
	require.True(t, ok)
	resp.Header.Set("A", "c")
	require.Equal(t, "b", status.Header.Get("A"))
}

func TestResponseThatJudgeFindsHopelessIsTheLast(t *testing.T) {
	always := retry.New(retry.Config{Attempts: 3, Backoff: retry.Constant(0), RetryIf: func(error) bool { return true }})
	for name, c := range map[string]struct {
		failure  error
		requests int64
	}{
		"Failure":      {errors.New("a teapot"), 3},
		"NotRetryable": {final{errors.New("never")}, 1},
		"Answered":     {resilience.Answer(errors.New("no")), 1},
	} {
		t.Run(name, func(t *testing.T) {
			server := serve(t, false, statuses("", 418))
			var seen watch
			transport := &resiliencehttp.Transport{Base: server.Base, Middleware: resilience.Chain(always.Wrap, seen.Wrap),
				Judge: func(*http.Response, *resiliencehttp.Ahead) error { return c.failure }}
			resp, err := transport.RoundTrip(httptest.NewRequest("GET", server.URL, nil))
			answer(t, resp, err)
			require.Equal(t, c.requests, server.requests.Load())
			require.ErrorIs(t, seen.seen()[0], c.failure)
		})
	}
}

// final is an error that another attempt cannot help.
type final struct{ error }

func (final) Retryable() bool { return false }

func TestDefaultJudgeKnowsRepeatableRequests(t *testing.T) {
	asks := func(resp *http.Response, _ *resiliencehttp.Ahead) error {
		if err := resiliencehttp.DefaultJudge(resp, nil); err != nil {
			return fmt.Errorf("asked: %w", err)
		}
		return nil
	}
	for name, c := range map[string]struct {
		method     string
		body       io.Reader
		replayable func(*http.Request) bool
		requests   int64
	}{
		"Get":               {"GET", nil, nil, 3},
		"Post":              {"POST", nil, nil, 1},
		"PostThatMay":       {"POST", nil, func(*http.Request) bool { return true }, 3},
		"GetThatMayNot":     {"GET", nil, func(*http.Request) bool { return false }, 1},
		"BodyThatIsGone":    {"PUT", &trackedBody{Reader: strings.NewReader("x")}, nil, 1},
		"BodyThatIsRewound": {"PUT", strings.NewReader("x"), nil, 3},
	} {
		t.Run(name, func(t *testing.T) {
			for _, forgets := range []bool{false, true} { // whose response names no request
				server := serve(t, false, statuses("", 503))
				base := roundTripper(func(r *http.Request) (*http.Response, error) {
					resp, err := server.Base.RoundTrip(r)
					if forgets {
						resp.Request = nil
					}
					return resp, err
				})
				if seeker, ok := c.body.(io.Seeker); ok {
					_, _ = seeker.Seek(0, io.SeekStart)
				}
				var seen watch
				req, _ := http.NewRequest(c.method, server.URL, c.body)
				resp, err := (&resiliencehttp.Transport{Base: base, Judge: asks, Replayable: c.replayable,
					Middleware: resilience.Chain(retries(3).Wrap, seen.Wrap)}).RoundTrip(req)
				answer(t, resp, err)
				require.Equal(t, c.requests, server.requests.Load())
				require.Equal(t, c.requests > 1, behavior.Read(seen.seen()[0]).Retryable)
				require.Same(t, req, resp.Request)
			}
		})
	}
	// Elsewhere the request alone says it.
	for method, may := range map[string]bool{"GET": true, "POST": false} {
		resp := response(503, nil)
		resp.Request = httptest.NewRequest(method, "http://example.com", nil)
		require.Equal(t, may, behavior.Read(resiliencehttp.DefaultJudge(resp, nil)).Retryable)
	}
	require.False(t, behavior.Read(resiliencehttp.DefaultJudge(response(503, nil), nil)).Retryable)
	transport := &resiliencehttp.Transport{Middleware: retries(2).Wrap,
		Base:       roundTripper(func(*http.Request) (*http.Response, error) { return response(503, nil), nil }),
		Replayable: func(*http.Request) bool { return false },
		RetryAfter: func(*http.Response) time.Duration { return time.Hour },
	}
	resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
	require.NoError(t, err)
	require.Equal(t, behavior.End{Kind: behavior.Failed, Retryable: true, Throttled: true},
		behavior.Read(resiliencehttp.DefaultJudge(resp, nil)), "the caller's view")
}

func TestResponseNamesTheCallersRequest(t *testing.T) {
	other := httptest.NewRequest("GET", "http://example.com/other", nil)
	for _, method := range []string{"GET", "POST"} {
		for _, status := range []int{200, 503} {
			for name, named := range map[string]func(*http.Request) *http.Request{
				"Sent":  func(r *http.Request) *http.Request { return r },
				"None":  func(*http.Request) *http.Request { return nil },
				"Other": func(*http.Request) *http.Request { return other },
			} {
				transport := &resiliencehttp.Transport{Middleware: retries(2).Wrap,
					Base: roundTripper(func(r *http.Request) (*http.Response, error) {
						resp := response(status, http.NoBody)
						resp.Request = named(r)
						return resp, nil
					})}
				req := httptest.NewRequest(method, "http://example.com", nil)
				resp, err := transport.RoundTrip(req)
				answer(t, resp, err)
				if name == "Other" {
					require.Same(t, other, resp.Request)
				} else {
					require.Same(t, req, resp.Request)
				}
			}
		}
	}
}

func TestCallerThatHasGivenUpGetsNoResponse(t *testing.T) {
	gaveUp := errors.New("gave up")
	for name, c := range map[string]struct {
		give func(ctx context.Context) error // what a policy makes of the end of ctx
		want bool                            // the response
	}{
		"Canceled":   {func(ctx context.Context) error { return ctx.Err() }, false},
		"Wrapped":    {func(ctx context.Context) error { return fmt.Errorf("stopped: %w", ctx.Err()) }, false},
		"Joined":     {func(ctx context.Context) error { return errors.Join(gaveUp, ctx.Err()) }, false},
		"OtherError": {func(context.Context) error { return gaveUp }, true},
	} {
		for _, status := range []int{503, 200} {
			t.Run(fmt.Sprintf("%s/%d", name, status), func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				closed := 0
				transport := &resiliencehttp.Transport{
					Middleware: func(next resilience.Func) resilience.Func {
						return func(ctx context.Context) error {
							_ = next(ctx)
							cancel()
							return c.give(ctx)
						}
					},
					Base: roundTripper(func(*http.Request) (*http.Response, error) {
						resp := response(status, nil)
						resp.Body = closeCounter{strings.NewReader(strings.Repeat("x", 100<<10)), &closed}
						return resp, nil
					}),
				}
				resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil).WithContext(ctx))
				if c.want {
					require.NoError(t, err)
					require.NoError(t, resp.Body.Close())
				} else {
					require.ErrorIs(t, err, context.Canceled)
				}
				require.Equal(t, 1, closed)
			})
		}
	}
}

func TestPlainWithoutMiddleware(t *testing.T) {
	want := response(503, strings.NewReader(""))
	req := httptest.NewRequest("GET", "http://example.com", nil)
	got, err := (&resiliencehttp.Transport{Base: roundTripper(func(r *http.Request) (*http.Response, error) {
		require.Same(t, req, r)
		return want, nil
	})}).RoundTrip(req)
	require.NoError(t, err)
	require.Same(t, want, got)
}

func TestMiddlewareThatAnswersWithNothing(t *testing.T) {
	failing := roundTripper(func(*http.Request) (*http.Response, error) { return nil, errors.New("broken") })
	swallow := resilience.Fallback(func(context.Context, error) error { return nil })
	forget := func(next resilience.Func) resilience.Func {
		return func(context.Context) error { return next(context.Background()) }
	}
	for name, c := range map[string]struct {
		mw   resilience.Middleware
		want string
	}{
		"Swallows": {swallow, "resiliencehttp: Middleware returned neither an error nor a response"},
		"NeverCalls": {func(resilience.Func) resilience.Func { return func(context.Context) error { return nil } },
			"resiliencehttp: Middleware returned neither an error nor a response"},
		"LosesCtx": {forget, "resiliencehttp: Middleware lost the request's ctx"},
	} {
		t.Run(name, func(t *testing.T) {
			transport := &resiliencehttp.Transport{Base: failing, Middleware: c.mw}
			resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
			require.Nil(t, resp)
			require.EqualError(t, err, c.want)
		})
	}

	nothing := &resiliencehttp.Transport{Middleware: retries(2).Wrap,
		Base: roundTripper(func(*http.Request) (*http.Response, error) { return nil, nil })}
	_, err := nothing.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
	require.ErrorContains(t, err, "resiliencehttp: Base returned neither an error nor a response")

	judged := errors.New("no answer")
	disliked := &resiliencehttp.Transport{Middleware: swallow,
		Base: roundTripper(func(*http.Request) (*http.Response, error) {
			return response(200, strings.NewReader("ok")),
				nil
		}),
		Judge: func(*http.Response, *resiliencehttp.Ahead) error { return judged }}
	_, err = disliked.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
	require.Equal(t, judged, err)

	// With a response there is something to answer with.
	ends := 0
	hears := func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error {
			work := resilience.WorkOf(ctx)
			err := next(ctx)
			if !work.OnEnd(func(error) { ends++ }) {
				ends++
			}
			return err
		}
	}
	transport := &resiliencehttp.Transport{Middleware: resilience.Chain(hears, swallow),
		Base: roundTripper(func(*http.Request) (*http.Response, error) {
			return response(503, strings.NewReader("sorry")), nil
		})}
	resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
	require.Equal(t, 1, ends, "to the policies it is over")
	require.Equal(t, "sorry", answer(t, resp, err))
}

func TestErrorOfBaseComesBackAsItIs(t *testing.T) {
	for _, failure := range []error{&net.OpError{Op: "read", Err: context.DeadlineExceeded},
		&net.DNSError{IsNotFound: true}} {
		for _, method := range []string{"GET", "POST"} {
			transport := &resiliencehttp.Transport{
				Middleware: retries(1).Wrap,
				Base:       roundTripper(func(*http.Request) (*http.Response, error) { return nil, failure }),
			}
			if method == "GET" {
				transport.Middleware = resilience.Chain()
			}
			_, err := transport.RoundTrip(httptest.NewRequest(method, "http://example.com", nil))
			require.Same(t, failure, err)
		}
	}
}

func TestRetryAfterThatIsRubbish(t *testing.T) {
	for _, value := range []string{"soon", "-5", "1.5", "+3", "", " ", "1,2", "Thu, 01 Jan 1970 00:00:00 GMT", "\xff"} {
		e := &resiliencehttp.StatusError{StatusCode: 503, Header: http.Header{"Retry-After": {value}}}
		require.Zero(t, e.RetryAfter(), "%q", value)
	}
	require.Zero(t, (&resiliencehttp.StatusError{}).RetryAfter())
	for _, long := range []string{"9223372037", "18446744074", "99999999999999999999999999",
		"Fri, 31 Dec 9999 23:59:59 GMT"} {
		e := &resiliencehttp.StatusError{StatusCode: 503, Header: http.Header{"Retry-After": {long}}}
		require.Greater(t, e.RetryAfter(), 100*365*24*time.Hour, long)
	}
	require.EqualError(t, &resiliencehttp.StatusError{StatusCode: 799}, "resiliencehttp: status 799")
}

func TestBulkheadUnderManyCallers(t *testing.T) {
	const limit, callers = 4, 32
	calls := int64(50)
	if testing.Short() {
		calls = 15
	}
	onBoth(t, func(t *testing.T, http2 bool) {
		var n atomic.Int64
		server := serve(t, http2, func(w http.ResponseWriter, r *http.Request) {
			if n.Add(1)%7 == 0 {
				w.WriteHeader(503)
			}
			_, _ = w.Write(make([]byte, n.Load()%5*1000))
		})
		slots := bulkhead.New(bulkhead.Config{Limit: limit, MaxWait: -1, Queue: callers})
		var judged atomic.Int64
		circuit := breaker.New(breaker.Config{Window: time.Hour, FailureRate: 1, Classify: func(error) breaker.Verdict {
			judged.Add(1)
			return breaker.Success
		}})
		var attempts watch
		client := server.client(retries(2).Wrap, circuit.Wrap, slots.Wrap, resilience.Timeout(time.Minute), attempts.Wrap)
		var wg sync.WaitGroup
		for i := range callers {
			wg.Go(func() {
				for j := range int(calls) {
					ctx, cancel := context.WithCancel(t.Context())
					req, _ := http.NewRequestWithContext(ctx, "GET", server.URL, nil)
					resp, err := client.Do(req)
					if err != nil {
						t.Error(err)
					} else if (i+j)%3 == 0 {
						_ = resp.Body.Close()
					} else if (i+j)%3 == 1 {
						_, _ = io.Copy(io.Discard, resp.Body)
						_ = resp.Body.Close()
					}
					cancel() // the last third is neither read nor closed
				}
			})
		}
		wg.Wait()
		requireFree(t, slots)
		requireNoCall(t)
		require.Positive(t, judged.Load())
		// Each attempt counts once, but for those whose ctx ended first.
		ended := int64(len(attempts.seen()))
		require.EqualValues(t, len(attempts.ctxs), ended)
		counted := circuit.Stats().Window.Succeeded + circuit.Stats().Window.Failed
		require.LessOrEqual(t, counted, ended)
		require.GreaterOrEqual(t, counted, ended-callers*calls/3-callers)
	})
}

func TestTransportOverATransport(t *testing.T) {
	more := make(chan struct{})
	server := serve(t, false, halves(more))
	inner, outer := bulkhead.New(bulkhead.Config{Limit: 1}), bulkhead.New(bulkhead.Config{Limit: 1})
	var base http.RoundTripper = server.client(inner.Wrap, resilience.Timeout(time.Minute)).Transport
	client := &http.Client{Transport: &resiliencehttp.Transport{Base: base, Middleware: outer.Wrap}}
	resp, err := client.Get(server.URL)
	require.NoError(t, err)
	require.Equal(t, []int{1, 1}, []int{inner.Stats().InFlight, outer.Stats().InFlight})
	close(more)
	require.Equal(t, "onetwo", answer(t, resp, nil))
	require.Equal(t, []int{0, 0}, []int{inner.Stats().InFlight, outer.Stats().InFlight})
}

// wrapped is what otelhttp and others make of http.DefaultTransport.
type wrapped struct {
	http.RoundTripper
	calls *int
}

func (w wrapped) RoundTrip(req *http.Request) (*http.Response, error) {
	*w.calls++
	return w.RoundTripper.RoundTrip(req.WithContext(context.WithValue(req.Context(), w.calls, 1)))
}

func (w wrapped) CloseIdleConnections() {
	w.RoundTripper.(interface{ CloseIdleConnections() }).CloseIdleConnections()
}

func TestDefaultTransportMayBeATransport(t *testing.T) {
	server := httptest.NewServer(hello)
	t.Cleanup(server.Close)
	first := http.DefaultTransport
	t.Cleanup(func() { http.DefaultTransport = first })
	attempts := 0
	counted := func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error { attempts++; return next(ctx) }
	}
	for name, c := range map[string]struct {
		make     func() http.RoundTripper
		attempts int // of the second request
	}{
		"NewClient": {func() http.RoundTripper {
			return resiliencehttp.NewClient(resiliencehttp.ClientConfig{Throttle: counted}).Transport
		}, 1},
		"Composed": {func() http.RoundTripper { return &resiliencehttp.Transport{Middleware: counted} }, 1},
		"Empty":    {func() http.RoundTripper { return &resiliencehttp.Transport{} }, 0},
	} {
		for _, wrap := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/wrapped=%v", name, wrap), func(t *testing.T) {
				http.DefaultTransport = first
				wraps := 0
				made := c.make()
				if wrap {
					made = wrapped{made, &wraps}
				}
				http.DefaultTransport = made
				for range 2 {
					attempts = 0
					resp, err := http.Get(server.URL)
					require.Equal(t, "hello", answer(t, resp, err))
				}
				require.Equal(t, c.attempts, attempts, "the policies see a request once")
				http.DefaultClient.CloseIdleConnections()
			})
		}
	}
}

// TestDefaultTransportIsHeeded: of whoever has replaced it before.
func TestDefaultTransportIsHeeded(t *testing.T) {
	first := http.DefaultTransport
	t.Cleanup(func() { http.DefaultTransport = first })
	calls := 0
	for _, later := range []bool{false, true} {
		http.DefaultTransport = wrapped{roundTripper(func(req *http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: 200, Request: req, Body: http.NoBody}, nil
		}), &calls}
		client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{})
		if later {
			http.DefaultTransport = client.Transport
		}
		_, err := client.Get("http://h/")
		require.NoError(t, err)
	}
	require.Equal(t, 2, calls)
}
