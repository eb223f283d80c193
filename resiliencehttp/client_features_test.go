package resiliencehttp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/hedge"
	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/resiliencehttp"
)

// reply returns a response whose body says whether it was closed.
func reply(r *http.Request, status int, body string, fields ...string) *http.Response {
	h := http.Header{}
	for i := 0; i < len(fields); i += 2 {
		h.Add(fields[i], fields[i+1])
	}
	return &http.Response{StatusCode: status, Status: fmt.Sprint(status), Header: h, Request: r,
		ContentLength: -1, Body: io.NopCloser(strings.NewReader(body))}
}

func request(t *testing.T, method, url string) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, nil)
	require.NoError(t, err)
	return r
}

func TestPoliciesFindTheRequestAndItsHost(t *testing.T) {
	var host string
	var found *http.Request
	transport := &resiliencehttp.Transport{
		Base: roundTripper(func(r *http.Request) (*http.Response, error) { return reply(r, 200, ""), nil }),
		Middleware: func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error {
				host = resiliencehttp.HostOf(ctx)
				found, _ = resiliencehttp.RequestFrom(ctx)
				return next(ctx)
			}
		},
	}
	for url, want := range map[string]string{
		"http://a/x": "a:80", "http://a:80": "a:80", "http://A./": "a:80", "http://A:80": "a:80", "http://a.:80": "a:80",
		"http://a:": "a:80", "https://a": "a:443", "https://a:443": "a:443", "https://a:80": "a:80",
		"http://a:8080": "a:8080",
		"http://b.a":    "b.a:80", "http://[2001:DB8::1]": "[2001:db8::1]:80", "http://[2001:db8::1]:80": "[2001:db8::1]:80",
		"memory://A.": "a", "memory://a:1": "a:1",
	} {
		r := request(t, "GET", url)
		r.Host = "other" // says who is asked for, not where
		_, err := transport.RoundTrip(r)
		require.NoError(t, err)
		require.Equal(t, want, host, url)
		require.Same(t, r, found)
	}
	require.Empty(t, resiliencehttp.HostOf(t.Context()))
	_, ok := resiliencehttp.RequestFrom(t.Context())
	require.False(t, ok)
}

func TestStatusesThatAreFailures(t *testing.T) {
	for status := 200; status < 600; status++ {
		for _, method := range []string{"GET", "POST"} {
			want := behavior.End{Kind: behavior.Done}
			switch get := method == "GET"; {
			case status == 429, get && (status == 408 || status == 425):
				want = behavior.End{Kind: behavior.Answered, Retryable: get}
			case status == 500, status >= 502 && status <= 504, status == 507, status >= 520 && status <= 530:
				want = behavior.End{Kind: behavior.Failed, Retryable: get}
			}
			if want.Kind != behavior.Done {
				want.RetryAfter, want.Throttled = 5*time.Second, status == 429 || status == 503 || status == 529
			}
			resp := reply(request(t, method, "http://a/"), status, "", "Retry-After", "5")
			require.Equal(t, want, behavior.Read(resiliencehttp.DefaultJudge(resp, nil)), "%s %d", method, status)
		}
	}
	err := resiliencehttp.DefaultJudge(reply(request(t, "GET", "http://a:1/secret?q=1"), 530, ""), nil)
	require.EqualError(t, err, "resiliencehttp: status 530 (GET a:1)", "neither the path nor the query is told")
}

func TestRetryAfterDateCountsFromTheDateField(t *testing.T) {
	for _, date := range []string{
		"Mon, 02 Jan 2006 15:04:25 GMT", "Monday, 02-Jan-06 15:04:25 GMT", "Mon Jan  2 15:04:25 2006",
	} {
		resp := reply(request(t, "GET", "http://a/"), 503, "",
			"Date", "Mon, 02 Jan 2006 15:04:05 GMT", "Retry-After", date)
		require.Equal(t, 20*time.Second, resilience.RetryAfter(resiliencehttp.DefaultJudge(resp, nil)), date)
	}
}

func TestPrepareSeesEachAttempt(t *testing.T) {
	var signed []string
	n := 0
	transport := &resiliencehttp.Transport{
		Base: roundTripper(func(r *http.Request) (*http.Response, error) {
			signed = append(signed, r.Header.Get("Signature"))
			return reply(r, 503, ""), nil
		}),
		Middleware: retries(3).Wrap,
		Prepare: func(r *http.Request) error {
			n++
			r.Header.Set("Signature", fmt.Sprint(n))
			return nil
		},
	}
	req := request(t, "GET", "http://a/")
	resp, err := transport.RoundTrip(req)
	require.NoError(t, err)
	require.Equal(t, 503, resp.StatusCode)
	require.Equal(t, []string{"1", "2", "3"}, signed)
	require.Empty(t, req.Header, "the caller's request is not changed")

	server := serve(t, false, func(http.ResponseWriter, *http.Request) {})
	transport.Base = server.Base // of net/http
	req = request(t, "GET", server.URL)
	_, err = transport.RoundTrip(req)
	require.NoError(t, err)
	require.Empty(t, req.Header, "the caller's request is not changed")

	errKey := errors.New("no key")
	n = 0
	transport = &resiliencehttp.Transport{
		Base:       roundTripper(func(*http.Request) (*http.Response, error) { panic("sent") }),
		Middleware: retries(3).Wrap,
		Prepare:    func(*http.Request) error { n++; return errKey },
	}
	_, err = transport.RoundTrip(request(t, "GET", "http://a/"))
	require.ErrorIs(t, err, errKey)
	require.Equal(t, 1, n, "an error of Prepare is not tried again")
}

func TestHedgeSendsASecondAttemptBesideASlowOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var sent, canceled, closed atomic.Int32
		transport := &resiliencehttp.Transport{
			Hedge: hedge.New[*http.Response](hedge.Config{Delay: 100 * time.Millisecond, Ratio: hedge.Unlimited}),
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				n := sent.Add(1)
				took := time.Second
				if n > 1 {
					took = 50 * time.Millisecond
				}
				select {
				case <-time.After(took):
				case <-r.Context().Done():
					canceled.Add(1)
					return nil, r.Context().Err()
				}
				resp := reply(r, 200, fmt.Sprint("answer ", n))
				resp.Body = &closing{resp.Body, &closed}
				return resp, nil
			}),
		}
		start := time.Now()
		resp, err := transport.RoundTrip(request(t, "GET", "http://a/"))
		require.NoError(t, err)
		require.Equal(t, 150*time.Millisecond, time.Since(start))
		require.EqualValues(t, 1, canceled.Load(), "the loser is canceled")
		require.Equal(t, "answer 2", answer(t, resp, nil), "the winner's body can be read")
		require.EqualValues(t, 1, closed.Load())

		sent.Store(0)
		start = time.Now()
		resp, err = transport.RoundTrip(request(t, "POST", "http://a/"))
		require.NoError(t, err)
		require.Equal(t, time.Second, time.Since(start), "a POST is not hedged")
		require.Equal(t, "answer 1", answer(t, resp, nil))
	})
}

// Its ctx ends with its last byte, and not before.
func TestHedgedResponseIsReadToItsEnd(t *testing.T) {
	var ctx context.Context
	transport := &resiliencehttp.Transport{
		Hedge: hedge.New[*http.Response](hedge.Config{Delay: time.Hour, Ratio: hedge.Unlimited}),
		Base: roundTripper(func(r *http.Request) (*http.Response, error) {
			ctx = r.Context()
			resp := reply(r, 200, "")
			rest := strings.NewReader("abc")
			resp.Body = io.NopCloser(readerFunc(func(p []byte) (int, error) {
				if ctx.Err() != nil {
					return 0, ctx.Err()
				}
				return rest.Read(p[:1])
			}))
			return resp, nil
		}),
	}
	resp, err := transport.RoundTrip(request(t, "GET", "http://a/"))
	require.NoError(t, err)
	read, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, "abc", string(read))
	require.ErrorIs(t, ctx.Err(), context.Canceled)
	require.NoError(t, resp.Body.Close())
}

type closing struct {
	io.ReadCloser
	n *atomic.Int32
}

func (c *closing) Close() error { c.n.Add(1); return c.ReadCloser.Close() }

func TestHedgeReturnsTheFailedResponseIfBothFail(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var closed atomic.Int32
		var sent atomic.Int32
		transport := &resiliencehttp.Transport{
			Hedge: hedge.New[*http.Response](hedge.Config{Delay: 100 * time.Millisecond, Ratio: hedge.Unlimited}),
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				n := sent.Add(1)
				time.Sleep(200 * time.Millisecond)
				resp := reply(r, 502+int(n), "bad")
				resp.Body = &closing{resp.Body, &closed}
				return resp, nil
			}),
		}
		resp, err := transport.RoundTrip(request(t, "PUT", "http://a/"))
		require.NoError(t, err)
		require.Equal(t, 504, resp.StatusCode)
		require.Equal(t, "bad", answer(t, resp, nil))
		require.EqualValues(t, 2, closed.Load(), "both bodies are closed")
	})
}

func TestHedgeSendsTheBodyTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var bodies [2]string
		var sent atomic.Int32
		transport := &resiliencehttp.Transport{
			Middleware: retries(2).Wrap,
			Hedge:      hedge.New[*http.Response](hedge.Config{Delay: 100 * time.Millisecond, Ratio: hedge.Unlimited}),
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				n := sent.Add(1)
				b, err := io.ReadAll(r.Body)
				require.NoError(t, err)
				bodies[n-1] = string(b)
				if n == 1 {
					<-r.Context().Done()
					return nil, r.Context().Err()
				}
				return reply(r, 200, "ok"), nil
			}),
		}
		req := request(t, "PUT", "http://a/")
		req.GetBody = func() (io.ReadCloser, error) { return &closable{Reader: strings.NewReader("data")}, nil }
		req.Body, _ = req.GetBody()
		resp, err := transport.RoundTrip(req)
		require.NoError(t, err)
		require.Equal(t, "ok", answer(t, resp, nil))
		require.Equal(t, [2]string{"data", "data"}, bodies)
	})
}

// A server that applies each idempotency key once answers 409 to the second request. That response would win over the
// response to the first, and cancel it.
func TestHedgeSendsWhatCannotBeSentTwiceOnce(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*http.Request)
		sent   int32
	}{
		"upgrade": {func(r *http.Request) { r.Header.Set("Upgrade", "websocket") }, 1},
		"trailer": {func(r *http.Request) { r.Trailer = http.Header{"Sum": nil} }, 1},
		"body":    {func(r *http.Request) { r.GetBody = nil }, 1},
		"key":     {func(r *http.Request) { r.Header.Set("Idempotency-Key", "1") }, 1},
		"x key":   {func(r *http.Request) { r.Header.Set("X-Idempotency-Key", "1") }, 1},
		"no body": {func(r *http.Request) { r.Body, r.GetBody = http.NoBody, nil }, 2},
	} {
		synctest.Test(t, func(t *testing.T) {
			var sent atomic.Int32
			transport := &resiliencehttp.Transport{
				Hedge: hedge.New[*http.Response](hedge.Config{Delay: time.Millisecond, Ratio: hedge.Unlimited}),
				Base: roundTripper(func(r *http.Request) (*http.Response, error) {
					sent.Add(1)
					time.Sleep(time.Second)
					return reply(r, 200, ""), nil
				}),
			}
			req, err := http.NewRequestWithContext(t.Context(), "PUT", "http://a/", strings.NewReader("data"))
			require.NoError(t, err)
			c.change(req)
			_, err = transport.RoundTrip(req)
			require.NoError(t, err)
			require.Equal(t, c.sent, sent.Load(), name)
		})
	}
}

func TestHedgeEndsTheCtxOfAResponseThatLoses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var sent [2]context.Context
		var n atomic.Int32
		transport := &resiliencehttp.Transport{
			Hedge: hedge.New[*http.Response](hedge.Config{Delay: 100 * time.Millisecond, Ratio: hedge.Unlimited}),
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				i := n.Add(1) - 1
				sent[i] = r.Context()
				time.Sleep(200 * time.Millisecond)
				return reply(r, []int{503, 200}[i], strings.Repeat("x", 100<<10)), nil // too long to be read ahead
			}),
		}
		resp, err := transport.RoundTrip(request(t, "GET", "http://a/"))
		require.NoError(t, err)
		require.Equal(t, 200, resp.StatusCode)
		require.Error(t, sent[0].Err())
		require.NoError(t, sent[1].Err())
		require.Len(t, answer(t, resp, nil), 100<<10)
	})
}

func TestClientEndsTheCtxOfARequestWithIt(t *testing.T) {
	for name, answers := range map[string]func(*http.Request) *http.Response{
		"a body":  func(r *http.Request) *http.Response { return reply(r, 200, "body") },
		"a panic": func(*http.Request) *http.Response { panic("base") },
	} {
		synctest.Test(t, func(t *testing.T) {
			var policy context.Context
			client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{
				Timeout: time.Hour,
				Retry:   resiliencehttp.Disabled,
				Throttle: func(next resilience.Func) resilience.Func {
					return func(ctx context.Context) error {
						policy = ctx
						ctx.Done() // somebody waits for its end
						return next(ctx)
					}
				},
				Base: roundTripper(func(r *http.Request) (*http.Response, error) { return answers(r), nil }),
			})
			func() {
				defer func() { _ = recover() }()
				if resp, err := client.Get("http://a/"); err == nil {
					answer(t, resp, nil)
				}
			}()
			require.ErrorIs(t, policy.Err(), context.Canceled, name)
		})
	}
}

// A closable body cannot be read once it is closed.
type closable struct {
	io.Reader
	closed bool
}

func (c *closable) Read(p []byte) (int, error) {
	if c.closed {
		return 0, errors.New("closed")
	}
	return c.Reader.Read(p)
}

func (c *closable) Close() error {
	c.closed = true
	return nil
}

// TestHedgedRequestPastItsDeadlineIsNotCanceled: a deadline reaches what is derived from the caller's ctx in any
// order, and a host that hangs would open no circuit.
func TestHedgedRequestPastItsDeadlineIsNotCanceled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var end error
		transport := &resiliencehttp.Transport{
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				<-r.Context().Done()
				return nil, r.Context().Err()
			}),
			Middleware: func(next resilience.Func) resilience.Func {
				return func(ctx context.Context) error {
					defer func() { end = ctx.Err() }()
					return next(ctx)
				}
			},
			Hedge: hedge.New[*http.Response](hedge.Config{Delay: time.Hour, Ratio: hedge.Unlimited}),
		}
		ctx := overrun{&slowCtx{Context: t.Context(), done: make(chan struct{})}}
		time.AfterFunc(time.Second, ctx.cancel)
		_, err := transport.RoundTrip(request(t, "GET", "http://h/").WithContext(ctx))
		time.Sleep(time.Minute)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, context.DeadlineExceeded, end)
	})
}

// An overrun is a slowCtx whose deadline passes. What waits for Done hears of it first.
type overrun struct{ *slowCtx }

func (c overrun) Err() error {
	if c.slowCtx.Err() != nil {
		return context.DeadlineExceeded
	}
	return nil
}

func (c overrun) AfterFunc(f func()) (stop func() bool) {
	return c.slowCtx.AfterFunc(func() { time.Sleep(time.Second / 10); f() })
}

func TestBodyIsAtFaultOnlyIfItIsNotAsLongAsItSays(t *testing.T) {
	for length, times := range map[int64]int{3: 1, 5: 2, 7: 1} {
		sent := 0
		transport := &resiliencehttp.Transport{
			Middleware: retries(2).Wrap,
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				_, err := io.ReadAll(r.Body)
				require.NoError(t, err)
				if sent++; sent == 1 {
					return nil, io.ErrUnexpectedEOF // the server has gone
				}
				return response(200, strings.NewReader("there")), nil
			}),
		}
		req, err := http.NewRequest("PUT", "http://example.com", nil)
		require.NoError(t, err)
		body := func() (io.ReadCloser, error) { return &closable{Reader: strings.NewReader("hello")}, nil }
		req.Body, _ = body()
		req.GetBody, req.ContentLength = body, length
		resp, err := transport.RoundTrip(req)
		require.Equal(t, times, sent)
		if length == 5 {
			require.Equal(t, "there", answer(t, resp, err))
		} else {
			require.True(t, resilience.Answered(err), "the server is not to blame: %v", err)
		}
	}
}

// The Read of a body may dial, so an error of a Base that has read from it does not tell that nothing was sent.
func TestPostWhoseBodyWasReadIsNotSentAgain(t *testing.T) {
	for _, unsent := range []error{&net.OpError{Op: "dial", Err: errors.New("refused")}, refusal{}} {
		for read, times := range map[bool]int{true: 1, false: 2} {
			sent := 0
			transport := &resiliencehttp.Transport{
				Middleware: retries(2).Wrap,
				Base: roundTripper(func(r *http.Request) (*http.Response, error) {
					sent++
					if read {
						_, _ = r.Body.Read(make([]byte, 1))
					}
					return nil, unsent
				}),
			}
			req, err := http.NewRequest("POST", "http://example.com", strings.NewReader("hello"))
			require.NoError(t, err)
			_, err = transport.RoundTrip(req)
			require.ErrorIs(t, err, unsent)
			require.Equal(t, times, sent)
		}
	}
}

// A Base may answer before it has sent all of the body.
func TestPrepareLeavesTheBodyOpenForBase(t *testing.T) {
	var sending io.Reader
	transport := &resiliencehttp.Transport{
		Prepare: func(*http.Request) error { return nil },
		Base: roundTripper(func(r *http.Request) (*http.Response, error) {
			sending = r.Body
			return response(200, http.NoBody), nil
		}),
	}
	req, err := http.NewRequest("PUT", "http://example.com", &closable{Reader: strings.NewReader("hello")})
	require.NoError(t, err)
	_, err = transport.RoundTrip(req)
	require.NoError(t, err)
	sent, err := io.ReadAll(sending)
	require.NoError(t, err)
	require.Equal(t, "hello", string(sent))
}

func TestHeaderTimeoutOrIdleAloneIsEnough(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		transport := &resiliencehttp.Transport{
			ResponseHeaderTimeout: time.Second,
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				<-r.Context().Done()
				return nil, r.Context().Err()
			}),
		}
		req, err := http.NewRequestWithContext(t.Context(), "GET", "http://example.com", nil)
		require.NoError(t, err)
		began := time.Now()
		_, err = transport.RoundTrip(req)
		require.EqualError(t, err, "resilience: timed out after 1s: context deadline exceeded")
		require.Equal(t, time.Second, time.Since(began))

		began = time.Now()
		transport = &resiliencehttp.Transport{Idle: time.Second,
			Base: streams(new(int), streamed{parts: []part{{time.Hour, "late"}}})}
		resp, err := transport.RoundTrip(req)
		require.NoError(t, err)
		_, err = io.ReadAll(resp.Body)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, time.Second, time.Since(began))
	})
}

// net/http calls hooks of httptrace on other goroutines, perhaps when the response is already being read.
func TestLateHookDoesNotEndIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		transport := &resiliencehttp.Transport{ResponseHeaderTimeout: time.Second, Idle: time.Second,
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				trace := httptrace.ContextClientTrace(r.Context())
				trace.GetConn("example.com:80")
				trace.GotConn(httptrace.GotConnInfo{})
				resp := reply(r, 200, "")
				resp.Body = io.NopCloser(readerFunc(func([]byte) (int, error) {
					trace.WroteHeaders()
					select {
					case <-r.Context().Done():
						return 0, r.Context().Err()
					case <-time.After(time.Hour):
						return 0, io.EOF
					}
				}))
				return resp, nil
			})}
		resp, err := transport.RoundTrip(request(t, "GET", "http://example.com"))
		require.NoError(t, err)
		_, err = io.ReadAll(resp.Body)
		require.ErrorIs(t, err, context.DeadlineExceeded)
	})
}

func TestClosesIdleConnectionsOfBase(t *testing.T) {
	base := &hooked{}
	resiliencehttp.NewClient(resiliencehttp.ClientConfig{Base: base}).CloseIdleConnections()
	require.Equal(t, 1, base.idleClosed)
}

// The policies' ctx may end slightly later than the caller's ctx. The attempt returns only when both have ended.
func TestPrepareIsCutShortByTheCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		caller, cancel := context.WithCancel(t.Context())
		var end error
		transport := &resiliencehttp.Transport{
			Base: roundTripper(func(*http.Request) (*http.Response, error) { return nil, errors.New("sent") }),
			Middleware: func(next resilience.Func) resilience.Func {
				return func(ctx context.Context) error {
					late, stop := context.WithCancel(context.WithoutCancel(ctx))
					context.AfterFunc(ctx, func() { time.Sleep(time.Second / 10); stop() })
					err := next(late)
					end = late.Err()
					return err
				}
			},
			Prepare: func(*http.Request) error { <-caller.Done(); return caller.Err() },
		}
		time.AfterFunc(time.Second, cancel)
		_, err := transport.RoundTrip(request(t, "GET", "http://a/").WithContext(caller))
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, context.Canceled, end)
	})
}
