package resiliencehttp_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/hedge"
	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/resiliencehttp"
)

var errBody = errors.New("body failed")

// wrongRequests change a PUT with the body "hello" so that it is wrong in itself.
var wrongRequests = map[string]func(*http.Request){
	"length without body": func(r *http.Request) { r.Body, r.GetBody, r.ContentLength = nil, nil, 5 },
	"long body":           func(r *http.Request) { r.ContentLength = 3 },
	"short body":          func(r *http.Request) { r.ContentLength = 20 },
	"long unbuffered":     func(r *http.Request) { r.GetBody, r.ContentLength = nil, 3 },
	"body fails":          func(r *http.Request) { r.Body, r.GetBody = io.NopCloser(iotest.ErrReader(errBody)), nil },
	"body fails later": func(r *http.Request) {
		more := strings.NewReader(strings.Repeat("x", 1<<16))
		r.Body, r.GetBody = io.NopCloser(io.MultiReader(more, iotest.ErrReader(errBody))), nil
		r.ContentLength = -1
	},
	"method":        func(r *http.Request) { r.Method = "PUT IT" },
	"no URL":        func(r *http.Request) { r.URL = nil },
	"no header":     func(r *http.Request) { r.Header = nil },
	"no host":       func(r *http.Request) { r.URL.Host = "" },
	"host field":    func(r *http.Request) { r.Host = "xn--a\nb" },
	"scheme":        func(r *http.Request) { r.URL.Scheme = "gopher" },
	"no scheme":     func(r *http.Request) { r.URL.Scheme = "" },
	"port":          func(r *http.Request) { r.URL.Host = "127.0.0.1:99999" },
	"opaque":        func(r *http.Request) { r.URL.Opaque = "\x01" },
	"query":         func(r *http.Request) { r.URL.RawQuery = "\x01" },
	"field name":    func(r *http.Request) { r.Header["a b"] = []string{"c"} },
	"field value":   func(r *http.Request) { r.Header["A"] = []string{"b\nsecret"} },
	"trailer name":  func(r *http.Request) { r.Trailer = http.Header{"a b": nil} },
	"trailer field": func(r *http.Request) { r.Trailer, r.ContentLength = http.Header{"Content-Length": nil}, -1 },
}

// sentBy holds the wrong requests that net/http sends all the same, over HTTP/2 or over HTTP/1.1.
var sentBy = map[bool][]string{true: {"length without body", "short body", "query", "method"}, false: {"host field"}}

// A wrong request is neither a failure nor a success of its host, and is not retried.
func TestWrongRequestIsNoResultOfItsHost(t *testing.T) {
	onBoth(t, func(t *testing.T, http2 bool) {
		server := serve(t, http2, func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			select { // an answer may come before the client has noticed
			case <-r.Context().Done():
			case <-time.After(5 * time.Second):
			}
		})
		bases := map[string]http.RoundTripper{
			"net/http": server.Base,
			"wrapped":  roundTripper(server.Base.RoundTrip),
			"within": &resiliencehttp.Transport{
				Base: server.Base, Middleware: retries(2).Wrap, Prepare: func(*http.Request) error { return nil },
			},
		}
		for name, base := range bases {
			for wrong, change := range wrongRequests {
				if slices.Contains(sentBy[http2], wrong) {
					continue
				}
				t.Run(name+"/"+wrong, func(t *testing.T) {
					req, err := http.NewRequestWithContext(t.Context(), "PUT", server.URL+"/", strings.NewReader("hello"))
					require.NoError(t, err)
					change(req)
					checkWrong(t, base, req)
				})
			}
		}
	})
}

// checkWrong sends a wrong request to hosts that are up, failing and down.
func checkWrong(t *testing.T, base http.RoundTripper, wrong *http.Request) {
	t.Helper()
	var seen watch
	fails := true
	b := breaker.New(breaker.Config{ConsecutiveFailures: 2, OpenFor: time.Minute})
	transport := &resiliencehttp.Transport{
		Base: roundTripper(func(r *http.Request) (*http.Response, error) {
			if fails {
				return nil, errors.New("down")
			}
			return base.RoundTrip(r)
		}),
		Middleware: resilience.Chain(retries(3).Wrap, b.Wrap, seen.Wrap),
	}
	down := func() {
		fails = true
		_, err := transport.RoundTrip(mustPost(t))
		require.Error(t, err)
		fails = false
	}
	down()
	_, err := transport.RoundTrip(wrong)
	require.Error(t, err)
	require.NotContains(t, err.Error(), "secret")
	require.Len(t, seen.kinds, 2, "retried: %v", err)
	require.Equal(t, behavior.Refused, seen.kinds[1], "%v", err)
	require.Equal(t, behavior.End{Kind: behavior.Answered}, behavior.Read(err), "%v", err)
	require.Equal(t, 1, int(b.Stats().Window.ConsecutiveFailures), "it ended the run of failures: %v", err)
	down()
	require.Equal(t, breaker.Open, b.State())
}

// mustPost returns a POST, which is not retried.
func mustPost(t *testing.T) *http.Request {
	req, err := http.NewRequestWithContext(t.Context(), "POST", "http://a/", strings.NewReader("x"))
	require.NoError(t, err)
	return req
}

// A wrong request does not close the breaker of a dead host.
func TestWrongRequestIsNoProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		base := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
			return nil, &net.OpError{Op: "dial", Err: errors.New("refused")}
		}}
		transport := resiliencehttp.NewTransport(resiliencehttp.ClientConfig{Base: base})
		for b := breaker.Closed; b == breaker.Closed; {
			_, err := transport.RoundTrip(mustPost(t))
			require.Error(t, err)
			host, _ := transport.Breakers.Get("a:80")
			b = host.State()
		}
		b, _ := transport.Breakers.Get("a:80")
		require.Equal(t, breaker.Open, b.State())
		time.Sleep(time.Second)
		for range 3 {
			req := mustPost(t)
			req.Header["a b"] = []string{"c"}
			_, err := transport.RoundTrip(req)
			require.ErrorContains(t, err, "invalid header field name")
			require.Equal(t, breaker.HalfOpen, b.State())
		}
		_, err := transport.RoundTrip(mustPost(t))
		require.ErrorContains(t, err, "dial")
		require.Equal(t, breaker.Open, b.State())
	})
}

// The body may also fail when net/http or a Transport reads it again, and Prepare may fail.
func TestRequestThatCannotBePreparedIsNoResult(t *testing.T) {
	for name, change := range map[string]func(*resiliencehttp.Transport, *http.Request){
		"Prepare": func(tr *resiliencehttp.Transport, _ *http.Request) {
			tr.Prepare = func(*http.Request) error { return errBody }
		},
		"GetBody": func(tr *resiliencehttp.Transport, r *http.Request) {
			tr.Base = roundTripper(func(r *http.Request) (*http.Response, error) {
				_, err := r.GetBody() // as net/http does after a GOAWAY
				return nil, err
			})
			r.GetBody = func() (io.ReadCloser, error) { return nil, errBody }
		},
		"GetBody for a hedge": func(tr *resiliencehttp.Transport, r *http.Request) {
			tr.Hedge = hedge.New[*http.Response](hedge.Config{Delay: time.Hour})
			r.GetBody = func() (io.ReadCloser, error) { return nil, errBody }
		},
	} {
		t.Run(name, func(t *testing.T) {
			var seen watch
			transport := &resiliencehttp.Transport{Middleware: resilience.Chain(retries(3).Wrap, seen.Wrap)}
			req := mustPost(t)
			req.Method = http.MethodPut
			change(transport, req)
			_, err := transport.RoundTrip(req)
			require.ErrorIs(t, err, errBody)
			require.Equal(t, behavior.End{Kind: behavior.Answered}, behavior.Read(err))
			for _, kind := range seen.kinds {
				require.Equal(t, behavior.Refused, kind)
			}
		})
	}
	// Prepare, which may call another server, may also fail because the time is over. That is no answer of the host.
	for name, limit := range map[string]resilience.Middleware{"caller": nil, "policy": resilience.Timeout(time.Second)} {
		t.Run(name+" is late", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var seen watch
				transport := &resiliencehttp.Transport{
					Middleware: resilience.Chain(retries(3).Wrap, seen.Wrap, limit),
					Prepare:    func(r *http.Request) error { <-r.Context().Done(); return r.Context().Err() },
				}
				ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
				defer cancel()
				_, err := transport.RoundTrip(request(t, "GET", "http://a/").WithContext(ctx))
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.Equal(t, behavior.End{Kind: behavior.Failed}, behavior.Read(err))
				require.Equal(t, []behavior.Kind{behavior.Refused}, seen.kinds)
			})
		})
	}
	// What a policy refuses in Prepare, such as a call for a token, is refused for the caller.
	transport := &resiliencehttp.Transport{Prepare: func(*http.Request) error { return refusal{} }}
	_, err := transport.RoundTrip(&http.Request{URL: &url.URL{Scheme: "http", Host: "a"}, Header: http.Header{}})
	require.True(t, resilience.Refused(err))
	require.False(t, resilience.Retryable(err))
}

// A policy in Prepare may refuse a later attempt, when the request was already sent.
func TestPrepareRefusedAfterARequestWasSent(t *testing.T) {
	down := errors.New("down")
	sent := 0
	transport := &resiliencehttp.Transport{
		Middleware: retries(3).Wrap,
		Base:       roundTripper(func(*http.Request) (*http.Response, error) { sent++; return nil, down }),
		Prepare: func(*http.Request) error {
			if sent > 0 {
				return refusal{}
			}
			return nil
		},
	}
	_, err := transport.RoundTrip(request(t, "GET", "http://a/"))
	require.ErrorIs(t, err, down)
	require.ErrorIs(t, err, refusal{})
	require.False(t, resilience.Refused(err), "%v", err)
	require.Equal(t, 1, sent)
}
