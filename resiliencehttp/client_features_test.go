package resiliencehttp_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/faults"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
)

// A rounds is a RoundTripper that is a function.
type rounds func(*http.Request) (*http.Response, error)

func (f rounds) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// reply returns a response whose body says whether it was closed.
func reply(r *http.Request, status int, body string, fields ...string) *http.Response {
	h := http.Header{}
	for i := 0; i < len(fields); i += 2 {
		h.Add(fields[i], fields[i+1])
	}
	return &http.Response{StatusCode: status, Status: fmt.Sprint(status), Header: h, Request: r,
		ContentLength: -1, Body: io.NopCloser(strings.NewReader(body))}
}

func text(t *testing.T, resp *http.Response) string {
	t.Helper()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	return string(b)
}

func request(t *testing.T, method, url string) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, nil)
	require.NoError(t, err)
	return r
}

func quick(attempts int) *retry.Retrier {
	return retry.New(retry.Config{Attempts: attempts, Backoff: retry.Constant(time.Millisecond)})
}

func TestPoliciesFindTheRequestAndItsHost(t *testing.T) {
	var hosts []string
	var mine *http.Request
	circuits := breaker.NewGroup(breaker.GroupConfig[string]{Config: breaker.Config{Failures: 1}})
	transport := &resiliencehttp.Transport{
		Base: rounds(func(r *http.Request) (*http.Response, error) {
			if r.URL.Host == "bad:80" {
				return nil, errors.New("down")
			}
			return reply(r, 200, ""), nil
		}),
		Middleware: resilience.Chain(circuits.By(resiliencehttp.HostOf), func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error {
				hosts = append(hosts, resiliencehttp.HostOf(ctx))
				r, ok := resiliencehttp.RequestFrom(ctx)
				require.True(t, ok)
				require.Same(t, mine, r)
				return next(ctx)
			}
		}),
	}
	for _, url := range []string{"http://BAD:80/x", "http://Good/y"} {
		mine = request(t, "GET", url)
		mine.URL.Host = strings.ToLower(mine.URL.Host)
		_, _ = transport.RoundTrip(mine)
	}
	require.Equal(t, []string{"bad:80", "good"}, hosts)
	_, err := transport.RoundTrip(request(t, "GET", "http://bad:80/"))
	require.ErrorIs(t, err, breaker.ErrOpen, "one host has a breaker of its own")
	mine = request(t, "GET", "http://good/")
	_, err = transport.RoundTrip(mine)
	require.NoError(t, err)

	_, ok := resiliencehttp.RequestFrom(t.Context())
	require.False(t, ok)
	require.Empty(t, resiliencehttp.HostOf(t.Context()))
}

func TestMoreStatusesAreFailures(t *testing.T) {
	for status := 200; status < 600; status++ {
		want := status == 429 || status == 408 || status == 425 || status == 500 || status >= 502 && status <= 504 ||
			status == 507 || status >= 520 && status <= 530
		err := resiliencehttp.DefaultClassify(reply(request(t, "GET", "http://a/"), status, ""))
		require.Equal(t, want, err != nil, "%d", status)
	}
	err := resiliencehttp.DefaultClassify(reply(request(t, "GET", "http://a:1/secret?q=1"), 530, ""))
	require.EqualError(t, err, "resiliencehttp: status 530 (GET a:1)", "neither the path nor the query is told")
}

func TestRetryAfterDateIsReadAgainstTheResponsesDate(t *testing.T) {
	resp := reply(request(t, "GET", "http://a/"), 503, "",
		"Date", "Mon, 02 Jan 2006 15:04:05 GMT", "Retry-After", "Mon, 02 Jan 2006 15:04:25 GMT")
	require.Equal(t, 20*time.Second, resilience.RetryAfter(resiliencehttp.DefaultClassify(resp)))
}

func TestPrepareSeesEachAttempt(t *testing.T) {
	var signed []string
	n := 0
	transport := &resiliencehttp.Transport{
		Base: rounds(func(r *http.Request) (*http.Response, error) {
			signed = append(signed, r.Header.Get("Signature"))
			return reply(r, 503, ""), nil
		}),
		Middleware: quick(3).Wrap,
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

	errKey := errors.New("no key")
	n = 0
	transport = &resiliencehttp.Transport{
		Base:       rounds(func(*http.Request) (*http.Response, error) { panic("sent") }),
		Middleware: quick(3).Wrap,
		Prepare:    func(*http.Request) error { n++; return errKey },
	}
	_, err = transport.RoundTrip(request(t, "GET", "http://a/"))
	require.ErrorIs(t, err, errKey)
	require.Equal(t, 1, n, "an error of Prepare is not tried again")
}

func TestRetryBodyFindsAFailureThatOnlyTheBodyTells(t *testing.T) {
	n := 0
	var seen []int
	transport := &resiliencehttp.Transport{
		Base: rounds(func(r *http.Request) (*http.Response, error) {
			n++
			switch n {
			case 1:
				return reply(r, 200, `{"error": "try again"}`), nil
			case 2: // breaks off
				resp := reply(r, 200, "")
				resp.Body = io.NopCloser(io.MultiReader(strings.NewReader("{"), errReader{}))
				return resp, nil
			}
			return reply(r, 200, strings.Repeat("x", 100)), nil
		}),
		Middleware:   quick(4).Wrap,
		MaxRetryBody: 50,
		RetryBody: func(_ *http.Response, body []byte) error {
			seen = append(seen, len(body))
			if bytes.Contains(body, []byte("error")) {
				return errors.New("an error in the body")
			}
			return nil
		},
	}
	resp, err := transport.RoundTrip(request(t, "GET", "http://a/"))
	require.NoError(t, err)
	require.Len(t, text(t, resp), 100, "the body is whole")
	require.Equal(t, []int{22, 50}, seen)
	require.Equal(t, 3, n)

	n = 0
	resp, err = transport.RoundTrip(request(t, "POST", "http://a/"))
	require.NoError(t, err)
	require.Equal(t, `{"error": "try again"}`, text(t, resp), "a POST is not sent again, and has its response")
}

type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

func TestFallbackTakesThePlaceOfAFailure(t *testing.T) {
	errDown := errors.New("down")
	for _, c := range []struct {
		name     string
		base     func(*http.Request) (*http.Response, error)
		fallback func(*http.Request, error) (*http.Response, error)
		status   int
		err      error
	}{
		{"success", func(r *http.Request) (*http.Response, error) { return reply(r, 404, ""), nil }, nil, 404, nil},
		{"error", func(*http.Request) (*http.Response, error) { return nil, errDown },
			func(r *http.Request, err error) (*http.Response, error) {
				require.ErrorIs(t, err, errDown)
				return reply(r, 203, ""), nil
			}, 203, nil},
		{"status", func(r *http.Request) (*http.Response, error) { return reply(r, 503, ""), nil },
			func(r *http.Request, err error) (*http.Response, error) {
				var status *resiliencehttp.StatusError
				require.ErrorAs(t, err, &status)
				return reply(r, 203, ""), nil
			}, 203, nil},
		{"status, no fallback", func(r *http.Request) (*http.Response, error) { return reply(r, 503, ""), nil },
			func(_ *http.Request, err error) (*http.Response, error) { return nil, err }, 503, nil},
		{"error, other error", func(*http.Request) (*http.Response, error) { return nil, errDown },
			func(*http.Request, error) (*http.Response, error) { return nil, io.EOF }, 0, io.EOF},
		{"error, nothing", func(*http.Request) (*http.Response, error) { return nil, errDown },
			func(*http.Request, error) (*http.Response, error) { return nil, nil }, 0, errDown},
	} {
		for _, policies := range []resilience.Middleware{nil, quick(2).Wrap} {
			transport := &resiliencehttp.Transport{Base: rounds(c.base), Middleware: policies, Fallback: c.fallback}
			if c.fallback == nil {
				transport.Fallback = func(*http.Request, error) (*http.Response, error) { panic("called") }
			}
			resp, err := transport.RoundTrip(request(t, "GET", "http://a/"))
			if c.err != nil {
				require.ErrorIs(t, err, c.err, c.name)
				require.Nil(t, resp, c.name)
				continue
			}
			require.NoError(t, err, c.name)
			require.Equal(t, c.status, resp.StatusCode, c.name)
		}
	}
}

func TestHedgeSendsASecondAttemptBesideASlowOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var sent, canceled, closed atomic.Int32
		transport := &resiliencehttp.Transport{
			Hedge: retry.NewHedger[*http.Response](retry.HedgeConfig{Delay: 100 * time.Millisecond}),
			Base: rounds(func(r *http.Request) (*http.Response, error) {
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
		require.Equal(t, "answer 2", text(t, resp), "the winner's body can be read")
		require.EqualValues(t, 1, closed.Load())

		sent.Store(0)
		start = time.Now()
		resp, err = transport.RoundTrip(request(t, "POST", "http://a/"))
		require.NoError(t, err)
		require.Equal(t, time.Second, time.Since(start), "a POST is not hedged")
		require.Equal(t, "answer 1", text(t, resp))
	})
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
			Hedge: retry.NewHedger[*http.Response](retry.HedgeConfig{Delay: 100 * time.Millisecond}),
			Base: rounds(func(r *http.Request) (*http.Response, error) {
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
		require.Equal(t, "bad", text(t, resp))
		require.EqualValues(t, 2, closed.Load(), "both bodies are closed")
	})
}

func TestHedgeSendsTheBodyTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var bodies [2]string
		var sent atomic.Int32
		transport := &resiliencehttp.Transport{
			Middleware: quick(2).Wrap,
			Hedge:      retry.NewHedger[*http.Response](retry.HedgeConfig{Delay: 100 * time.Millisecond}),
			Base: rounds(func(r *http.Request) (*http.Response, error) {
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
		req, err := http.NewRequestWithContext(t.Context(), "PUT", "http://a/", strings.NewReader("data"))
		require.NoError(t, err)
		resp, err := transport.RoundTrip(req)
		require.NoError(t, err)
		require.Equal(t, "ok", text(t, resp))
		require.Equal(t, [2]string{"data", "data"}, bodies)
	})
}

// lastKnown returns a client that remembers, and the switch that breaks its server.
func lastKnown(t *testing.T, capacity int64, fields ...string) (*http.Client, *faults.Script, *atomic.Int32) {
	script := faults.New(faults.Config{Plans: []faults.Plan{{Kind: faults.Refuse}}})
	n := new(atomic.Int32)
	base := rounds(func(r *http.Request) (*http.Response, error) {
		resp := reply(r, 200, fmt.Sprint(r.URL.Path, " ", n.Add(1)), fields...)
		return resp, nil
	})
	return &http.Client{Transport: resiliencehttp.LastKnown(faults.Transport(script, base), capacity)}, script, n
}

func fetch(t *testing.T, client *http.Client, url string, fields ...string) (string, *http.Response) {
	t.Helper()
	r := request(t, "GET", url)
	for i := 0; i < len(fields); i += 2 {
		r.Header.Set(fields[i], fields[i+1])
	}
	resp, err := client.Do(r)
	if err != nil {
		return "", nil
	}
	return text(t, resp), resp
}

func TestLastKnownAnswersWhileTheServerIsDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, script, _ := lastKnown(t, 1<<20, "Age", "5")
		body, _ := fetch(t, client, "http://a/x")
		require.Equal(t, "/x 1", body)
		body, _ = fetch(t, client, "http://a/x")
		require.Equal(t, "/x 2", body, "a good response is never replaced")
		script.Enable()
		time.Sleep(7 * time.Second)
		for range 2 {
			body, resp := fetch(t, client, "http://a/x")
			require.Equal(t, "/x 2", body)
			require.Equal(t, "12", resp.Header.Get("Age"))
			require.Equal(t, "last-known; hit", resp.Header.Get("Cache-Status"))
		}
		_, resp := fetch(t, client, "http://a/never")
		require.Nil(t, resp)
		_, err := client.Post("http://a/x", "", nil)
		require.Error(t, err, "only a GET is answered")
	})
}

func TestLastKnownKeepsWhatMayBeKept(t *testing.T) {
	for _, c := range []struct {
		fields []string
		kept   bool
	}{
		{nil, true},
		{[]string{"Cache-Control", "public, max-age=5"}, true},
		{[]string{"Cache-Control", "max-age=5, No-Store"}, false},
		{[]string{"Cache-Control", "no-cache"}, false},
		{[]string{"Cache-Control", "must-revalidate"}, false},
		{[]string{"Cache-Control", `private="x"`}, false},
		{[]string{"Vary", "*"}, false},
		{[]string{"Vary", "Accept"}, true},
	} {
		client, script, _ := lastKnown(t, 1<<20, c.fields...)
		fetch(t, client, "http://a/x")
		script.Enable()
		_, resp := fetch(t, client, "http://a/x")
		require.Equal(t, c.kept, resp != nil, "%v", c.fields)
	}
}

func TestLastKnownAnswersNobodyElse(t *testing.T) {
	client, script, _ := lastKnown(t, 1<<20, "Vary", "Accept-Language, X-Tenant")
	fetch(t, client, "http://a/x", "Authorization", "me", "Accept-Language", "de")
	script.Enable()
	for _, fields := range [][]string{
		{"Authorization", "you", "Accept-Language", "de"},
		{"Accept-Language", "de"},
		{"Authorization", "me", "Accept-Language", "en"},
		{"Authorization", "me", "Accept-Language", "de", "X-Tenant", "7"},
		{"Authorization", "me", "Accept-Language", "de", "Cookie", "a=b"},
	} {
		_, resp := fetch(t, client, "http://a/x", fields...)
		require.Nil(t, resp, "%v", fields)
	}
	_, resp := fetch(t, client, "http://a/x", "Authorization", "me", "Accept-Language", "de", "Other", "1")
	require.NotNil(t, resp)
	_, resp = fetch(t, client, "http://a/x?y", "Authorization", "me", "Accept-Language", "de")
	require.Nil(t, resp)
}

func TestLastKnownIsBounded(t *testing.T) {
	client, script, _ := lastKnown(t, 8000)
	for i := range 500 {
		fetch(t, client, fmt.Sprint("http://a/", i))
	}
	require.Eventually(t, func() bool { // otter evicts a moment later
		script.Enable()
		defer script.Disable()
		kept := 0
		for i := range 500 {
			if _, resp := fetch(t, client, fmt.Sprint("http://a/", i)); resp != nil {
				kept++
			}
		}
		return kept > 0 && kept*200 <= 8000
	}, 10*time.Second, 10*time.Millisecond)

	long := &http.Client{Transport: resiliencehttp.LastKnown(rounds(func(r *http.Request) (*http.Response, error) {
		if r.Header.Get("Fail") != "" {
			return nil, errors.New("down")
		}
		return reply(r, 200, strings.Repeat("x", 1001)), nil
	}), 8000)}
	fetch(t, long, "http://a/long")
	_, resp := fetch(t, long, "http://a/long", "Fail", "1")
	require.Nil(t, resp, "a body longer than an eighth is not kept")
	require.Panics(t, func() { resiliencehttp.LastKnown(nil, 1) })
	require.Panics(t, func() { resiliencehttp.LastKnown(http.DefaultTransport, 0) })
}

func TestLastKnownKeepsABodyThatADecoderHasRead(t *testing.T) {
	down := false
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if down {
			w.WriteHeader(503)
			return
		}
		_, _ = io.WriteString(w, `{"a":1}`) // has a Content-Length
	}))
	defer server.Close()
	client := &http.Client{Transport: resiliencehttp.LastKnown(&resiliencehttp.Transport{}, 1<<20)}
	resp, err := client.Get(server.URL)
	require.NoError(t, err)
	_, err = io.ReadFull(resp.Body, make([]byte, 7)) // no Read sees the EOF
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	down = true
	resp, err = client.Get(server.URL)
	require.NoError(t, err)
	require.Equal(t, 200, resp.StatusCode)
	require.Equal(t, `{"a":1}`, text(t, resp))
}
