package resiliencehttp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/hedge"
	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
)

// A trackedBody counts how often it is closed. It hides what it reads from, so
// that http.NewRequest makes no GetBody.
type trackedBody struct {
	io.Reader
	closed atomic.Int64
}

func (b *trackedBody) Close() error { b.closed.Add(1); return nil }

func TestRepeatableRequestsAreRepeated(t *testing.T) {
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

func TestEmptyIdempotencyKeyIsNoKey(t *testing.T) {
	for _, name := range []string{"Idempotency-Key", "X-Idempotency-Key"} {
		server := serve(t, false, statuses("", 503))
		for i, values := range [][]string{{""}, {}} { // net/http documents that no values mean an idempotent request
			req, err := http.NewRequest("POST", server.URL, nil)
			require.NoError(t, err)
			req.Header[name] = values
			resp, err := server.client(retries(3).Wrap).Do(req)
			answer(t, resp, err)
			require.EqualValues(t, []int64{1, 4}[i], server.requests.Load())
		}
	}
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
		"KeptAlways":     {&trackedBody{Reader: strings.NewReader("0123456789")}, math.MaxInt64, 3},
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
				client := &http.Client{Transport: &resiliencehttp.Transport{Base: server.Base, Middleware: retries(3).Wrap,
					MaxBuffer: c.max}}
				resp, err := client.Do(req)
				answer(t, resp, err)
				require.EqualValues(t, c.requests, server.requests.Load())
				for _, body := range got {
					require.Equal(t, "0123456789", body)
				}
				if tracked, ok := body.(*trackedBody); ok {
					require.Eventually(t, func() bool { return tracked.closed.Load() > 0 }, time.Minute, time.Millisecond)
				}
			})
		})
	}
}

func TestCopiedBodyKeepsItsDeclaredLength(t *testing.T) {
	for _, text := range []string{"", "0123456789"} {
		onBoth(t, func(t *testing.T, http2 bool) {
			server := serve(t, http2, func(w http.ResponseWriter, r *http.Request) {
				b, _ := io.ReadAll(r.Body)
				assert.Equal(t, text, string(b))
				if r.Header.Get("Declared") != "" {
					assert.EqualValues(t, len(text), r.ContentLength)
				}
				w.WriteHeader(503)
			})
			for i, declared := range []int64{0, int64(len(text))} {
				req, _ := http.NewRequest("PUT", server.URL, &trackedBody{Reader: strings.NewReader(text)})
				if req.ContentLength = declared; declared > 0 {
					req.Header.Set("Declared", "yes")
				}
				resp, err := (&http.Client{Transport: &resiliencehttp.Transport{Base: server.Base,
					Middleware: retries(2).Wrap, MaxBuffer: 10}}).Do(req)
				answer(t, resp, err)
				require.EqualValues(t, 2*(i+1), server.requests.Load())
				require.Equal(t, declared, req.ContentLength)
			}
		})
	}
}

// The client says something when it has heard something, and so on.
func TestCopiedBodyIsNotReadAhead(t *testing.T) {
	onBoth(t, func(t *testing.T, http2 bool) {
		server := serve(t, http2, func(w http.ResponseWriter, r *http.Request) {
			_ = http.NewResponseController(w).EnableFullDuplex()
			_, _ = io.WriteString(w, "hello")
			_ = http.NewResponseController(w).Flush()
			_, _ = io.Copy(w, r.Body)
		})
		client := &http.Client{Transport: &resiliencehttp.Transport{
			Base: server.Base, Middleware: retries(2).Wrap, MaxBuffer: 1 << 20,
		}}
		for _, method := range []string{"POST", "PUT"} {
			body, writer := io.Pipe()
			req, err := http.NewRequest(method, server.URL, body)
			require.NoError(t, err)
			resp, err := client.Do(req)
			require.NoError(t, err)
			_, err = io.ReadFull(resp.Body, make([]byte, 5))
			require.NoError(t, err)
			_, err = io.WriteString(writer, "and you?")
			require.NoError(t, err)
			require.NoError(t, writer.Close())
			require.Equal(t, "and you?", answer(t, resp, nil))
		}
	})
}

func TestKnownLengthAboveMaxBufferIsNotRead(t *testing.T) {
	body := &trackedBody{Reader: strings.NewReader("0123456789")}
	req, _ := http.NewRequest("PUT", "http://example.com", body)
	req.ContentLength = 10
	transport := &resiliencehttp.Transport{MaxBuffer: 9, Middleware: retries(2).Wrap,
		Base: roundTripper(func(r *http.Request) (*http.Response, error) {
			require.Equal(t, 10, body.Reader.(*strings.Reader).Len())
			require.Nil(t, r.GetBody)
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
	done, _ := full.Begin(t.Context())
	defer done(nil)
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

// A pipeBody counts how often it is closed.
type pipeBody struct {
	readerFunc
	pipe   io.Closer
	closed atomic.Int64
}

func (b *pipeBody) Close() error { b.closed.Add(1); return b.pipe.Close() }

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

func TestCallersRequestIsNotChanged(t *testing.T) {
	req, _ := http.NewRequest("PUT", "http://example.com/path", strings.NewReader("x"))
	req.Header.Set("A", "1")
	before := req.Clone(t.Context())
	url, body := req.URL, req.Body
	transport := &resiliencehttp.Transport{Middleware: retries(3).Wrap,
		Base: roundTripper(func(r *http.Request) (*http.Response, error) {
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

// A sharedFile is sent from the start each time that GetBody rewinds it.
type sharedFile struct {
	t       *testing.T
	reading atomic.Bool
	pos     int
	slow    chan struct{} // a Read waits for it, if it is not nil
}

func (f *sharedFile) Read(p []byte) (int, error) {
	assert.False(f.t, f.reading.Swap(true))
	defer f.reading.Store(false)
	if f.slow != nil {
		<-f.slow
	}
	n := copy(p, "0123456789"[f.pos:])
	f.pos += n
	if n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

func (f *sharedFile) rewind() (io.ReadCloser, error) {
	assert.False(f.t, f.reading.Load(), "somebody reads the file that is rewound")
	f.pos = 0
	return io.NopCloser(f), nil
}

func TestBodyIsRewoundAfterTheLastRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := &sharedFile{t: t, slow: make(chan struct{})}
		var got []string
		var left sync.WaitGroup
		var first io.Reader
		transport := &resiliencehttp.Transport{Middleware: retries(2).Wrap,
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				if len(got) == 0 { // a server that answers before it has read everything
					got = append(got, "")
					first = r.Body
					left.Go(func() {
						_, _ = io.ReadAll(r.Body)
						_ = r.Body.Close()
					})
					synctest.Wait()
					time.AfterFunc(time.Second, func() { close(file.slow) })
					return response(503, http.NoBody), nil
				}
				_, err := first.Read(make([]byte, 1))
				require.EqualError(t, err, "resiliencehttp: request's body is closed")
				body, err := io.ReadAll(r.Body)
				require.NoError(t, err)
				got = append(got, string(body))
				return response(200, http.NoBody), nil
			})}
		req := httptest.NewRequest("PUT", "http://example.com", nil)
		req.Body, _ = file.rewind()
		req.GetBody = file.rewind
		req.ContentLength = 10
		start := time.Now()
		resp, err := transport.RoundTrip(req)
		answer(t, resp, err)
		require.Equal(t, time.Second, time.Since(start))
		left.Wait()
		require.Equal(t, []string{"", "0123456789"}, got)
	})
}

func TestWaitForTheLastBodyEndsWithTheCtx(t *testing.T) {
	fails := roundTripper(func(r *http.Request) (*http.Response, error) {
		go func() { _, _ = io.ReadAll(r.Body) }()
		synctest.Wait()
		return nil, syscall.ECONNRESET
	})
	for name, transport := range map[string]http.RoundTripper{
		"Transport": &resiliencehttp.Transport{Base: fails, Middleware: retries(2).Wrap},
		"Failover":  resiliencehttp.Failover(fails, fails),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				file := &sharedFile{t: t, slow: make(chan struct{})}
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				req := httptest.NewRequest("PUT", "http://example.com", nil).WithContext(ctx)
				req.Body, _ = file.rewind()
				req.GetBody = file.rewind
				_, err := transport.RoundTrip(req)
				close(file.slow)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.False(t, resilience.Answered(err))
			})
		})
	}
}

func TestBaseMayRewindTheBodyItself(t *testing.T) {
	transport := &resiliencehttp.Transport{Middleware: retries(2).Wrap,
		Base: roundTripper(func(r *http.Request) (*http.Response, error) {
			again, err := r.GetBody() // for two copies at the same time
			require.NoError(t, err)
			for _, body := range []io.ReadCloser{r.Body, again} {
				text, err := io.ReadAll(body)
				require.NoError(t, err)
				require.Equal(t, "0123456789", string(text))
				require.NoError(t, body.Close())
				require.NoError(t, body.Close())
				_, err = body.Read(make([]byte, 1))
				require.EqualError(t, err, "resiliencehttp: request's body is closed")
			}
			return response(503, http.NoBody), nil
		})}
	for _, kept := range []bool{false, true} { // without a GetBody of the caller
		req := httptest.NewRequest("PUT", "http://example.com", nil)
		var bodies []*trackedBody
		req.GetBody = func() (io.ReadCloser, error) {
			bodies = append(bodies, &trackedBody{Reader: strings.NewReader("0123456789")})
			return bodies[len(bodies)-1], nil
		}
		req.Body, _ = req.GetBody()
		many := 4
		if kept {
			req.GetBody, transport.MaxBuffer, many = nil, 10, 1
		}
		resp, err := transport.RoundTrip(req)
		answer(t, resp, err)
		require.Len(t, bodies, many)
		for _, body := range bodies {
			require.EqualValues(t, 1, body.closed.Load())
		}
	}
}

// recovers is a policy that makes an error of a panic.
func recovers(next resilience.Func) resilience.Func {
	return func(ctx context.Context) (err error) {
		defer func() {
			if p := recover(); p != nil {
				err = fmt.Errorf("recovered: %v", p)
			}
		}()
		return next(ctx)
	}
}

// TestUnsafeRequestIsNotRepeatedAfterAPanic: nobody knows how far the attempt got.
func TestUnsafeRequestIsNotRepeatedAfterAPanic(t *testing.T) {
	for name, c := range map[string]struct {
		method string
		body   io.Reader
		sent   int
	}{
		"Get":                 {"GET", nil, 3},
		"Put":                 {"PUT", strings.NewReader("x"), 3},
		"Post":                {"POST", strings.NewReader("x"), 1},
		"BodyThatIsReadTwice": {"PUT", &trackedBody{Reader: strings.NewReader("x")}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			sent := 0
			transport := &resiliencehttp.Transport{
				Middleware: resilience.Chain(retries(3).Wrap, recovers),
				Base: roundTripper(func(r *http.Request) (*http.Response, error) {
					sent++
					panic("boom")
				}),
			}
			req, err := http.NewRequest(c.method, "http://example.com", c.body)
			require.NoError(t, err)
			_, err = transport.RoundTrip(req)
			require.Error(t, err)
			require.Equal(t, c.sent, sent)
		})
	}
}

func TestBodyThatIsClosedAsItIsReadIsNotAtFault(t *testing.T) {
	var seen watch
	reset := errors.New("connection reset")
	reading := make(chan struct{})
	transport := &resiliencehttp.Transport{Middleware: seen.Wrap,
		Base: roundTripper(func(r *http.Request) (*http.Response, error) {
			read := make(chan struct{})
			go func() {
				_, _ = r.Body.Read(make([]byte, 1))
				close(read)
			}()
			<-reading
			_ = r.Body.Close()
			<-read
			return nil, reset
		})}
	pipe, _ := io.Pipe()
	body := &pipeBody{readerFunc: func(p []byte) (int, error) { close(reading); return pipe.Read(p) }, pipe: pipe}
	req, _ := http.NewRequest("PUT", "http://example.com", body)
	_, err := transport.RoundTrip(req)
	require.Equal(t, reset, err)
	require.Equal(t, []behavior.Kind{behavior.Failed}, seen.kinds)
}

func TestBodyBrokenByACancelIsTheCallersEnd(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	server := serve(t, false, func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) })
	var seen watch
	req, _ := http.NewRequestWithContext(ctx, "PUT", server.URL, readerFunc(func([]byte) (int, error) {
		cancel()
		return 0, errors.New("canceled, too")
	}))
	_, err := server.client(seen.Wrap).Do(req)
	require.Error(t, err)
	require.Equal(t, []behavior.Kind{behavior.Canceled}, seen.kinds)
}

// A RoundTripper may read the body after it has returned.
func TestBodyMayBeReadAfterRoundTrip(t *testing.T) {
	for name, wrap := range map[string]func(http.RoundTripper) http.RoundTripper{
		"Failover": func(base http.RoundTripper) http.RoundTripper { return resiliencehttp.Failover(base, base) },
		"Failover of Transport": func(base http.RoundTripper) http.RoundTripper {
			return resiliencehttp.Failover(&resiliencehttp.Transport{Base: base})
		},
	} {
		t.Run(name, func(t *testing.T) {
			done := make(chan struct{})
			client := &http.Client{Transport: wrap(roundTripper(func(req *http.Request) (*http.Response, error) {
				go func() {
					defer close(done)
					_, _ = io.Copy(io.Discard, iotest.OneByteReader(req.Body))
				}()
				return nil, errors.New("reset")
			}))}
			_, err := client.Post("http://a/", "text/plain", strings.NewReader(strings.Repeat("x", 10_000)))
			require.Error(t, err)
			<-done
		})
	}
}

func TestBreakOffDuringTheUploadIsAServerFailure(t *testing.T) {
	server := serve(t, false, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.ReadFull(r.Body, make([]byte, 10))
		panic(http.ErrAbortHandler)
	})
	for _, declared := range []int64{10 << 20, 0, -1} { // 0 and -1: not known
		var seen watch
		req, _ := http.NewRequest("PUT", server.URL, &trackedBody{Reader: strings.NewReader(strings.Repeat("x", 10<<20))})
		req.ContentLength = declared
		_, err := server.client(seen.Wrap).Do(req)
		require.Error(t, err)
		require.Equal(t, []behavior.Kind{behavior.Failed}, seen.kinds, declared)
	}
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

// A Base may still read the body, or ask for another, after it has failed: the race detector
// looks at what the next attempt does meanwhile.
func TestBaseMayUseTheBodyAfterItHasReturned(t *testing.T) {
	for _, method := range []string{"PUT", "POST"} {
		for _, c := range []struct{ read, again time.Duration }{{}, {again: 3 * time.Millisecond},
			{read: 3 * time.Millisecond}} {
			var reads sync.WaitGroup
			transport := &resiliencehttp.Transport{
				Middleware: retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(6 * time.Millisecond)}).Wrap,
				Base: roundTripper(func(r *http.Request) (*http.Response, error) {
					reads.Go(func() {
						_, _ = r.Body.Read(make([]byte, 1))
						time.Sleep(c.again)
						if body, err := r.GetBody(); err == nil {
							_ = body.Close()
						}
					})
					time.Sleep(time.Millisecond)
					return nil, errors.New("reset by peer")
				}),
			}
			req, err := http.NewRequest(method, "http://example.com", strings.NewReader("body"))
			require.NoError(t, err)
			req.Body = io.NopCloser(readerFunc(func([]byte) (int, error) { time.Sleep(c.read); return 1, nil }))
			_, err = transport.RoundTrip(req)
			require.Error(t, err)
			reads.Wait()
		}
	}
}

// A body that fails because the ctx is done, such as the body of another request with this ctx, is no answer either.
func TestFailoverWhoseBodyIsLateHasNoAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		send := roundTripper(func(r *http.Request) (*http.Response, error) {
			_, err := io.ReadAll(r.Body)
			return nil, err
		})
		late := readerFunc(func([]byte) (int, error) { <-ctx.Done(); return 0, ctx.Err() })
		for name, next := range map[string]http.RoundTripper{
			"plain": send, "transport": &resiliencehttp.Transport{Base: send},
		} {
			req := httptest.NewRequest("PUT", "http://example.com", late).WithContext(ctx)
			_, err := resiliencehttp.Failover(next, next).RoundTrip(req)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.False(t, resilience.Answered(err), name)
		}
	})
}

// Nor is a GetBody that fails because the ctx is done, when a Hedger sends a copy of the request.
func TestHedgeWhoseGetBodyIsLateHasNoAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		transport := &resiliencehttp.Transport{Hedge: hedge.New[*http.Response](hedge.Config{Delay: time.Hour}),
			Base: roundTripper(func(*http.Request) (*http.Response, error) { panic("not sent") })}
		req := httptest.NewRequest("PUT", "http://example.com", strings.NewReader("x")).WithContext(ctx)
		req.GetBody = func() (io.ReadCloser, error) { <-ctx.Done(); return nil, ctx.Err() }
		_, err := transport.RoundTrip(req)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.False(t, resilience.Answered(err))
	})
}

// net/http sends a body in memory that is too short over HTTP/2.
func TestShortBodyOverHTTP2IsNotRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var sent atomic.Int64
		base := serveMemory(t, func(_ http.ResponseWriter, r *http.Request) {
			sent.Add(1)
			if _, err := io.Copy(io.Discard, r.Body); err != nil {
				panic(http.ErrAbortHandler)
			}
		}, wires["HTTP/2"]())
		req, err := http.NewRequest("PUT", "http://a/", strings.NewReader("hello"))
		require.NoError(t, err)
		req.ContentLength = 20
		transport := &resiliencehttp.Transport{Base: base, Middleware: retries(3).Wrap}
		_, err = transport.RoundTrip(req)
		require.True(t, resilience.Answered(err), "%v", err)
		require.EqualValues(t, 1, sent.Load())
	})
}
