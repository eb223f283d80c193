package resiliencehttp_test

import (
	"context"
	"errors"
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
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/hedge"
	"github.com/go-resilience/resilience/resiliencehttp"
)

func TestHedgeClosesTheBodyOfACallerThatHasLeft(t *testing.T) {
	var closed atomic.Int32
	transport := &resiliencehttp.Transport{Hedge: hedge.New[*http.Response](hedge.Config{Delay: time.Hour,
		Ratio: hedge.Unlimited})}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	req, err := http.NewRequestWithContext(ctx, "PUT", "http://a/", strings.NewReader("x"))
	require.NoError(t, err)
	req.Body = &closing{req.Body, &closed}
	_, err = transport.RoundTrip(req)
	require.ErrorIs(t, err, context.Canceled)
	require.EqualValues(t, 1, closed.Load())
}

func TestHedgeReturnsAFailedResponseThatCanBeRead(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(503)
		_, _ = io.WriteString(w, strings.Repeat("x", 1<<20)) // too long to be read ahead
	}))
	defer server.Close()
	transport := &resiliencehttp.Transport{Hedge: hedge.New[*http.Response](hedge.Config{Delay: time.Hour,
		Ratio: hedge.Unlimited})}
	req := request(t, "GET", server.URL)
	resp, err := transport.RoundTrip(req)
	require.NoError(t, err)
	require.Same(t, req, resp.Request)
	require.Len(t, answer(t, resp, nil), 1<<20)
}

// A Base other than that of net/http may have no http.NoBody.
func TestResponseThatCannotHaveABodyIsNotWaitedFor(t *testing.T) {
	for _, c := range []struct {
		method string
		status int
		empty  bool
		body   bool
	}{
		{"HEAD", 200, false, false}, {"GET", 204, false, false}, {"GET", 304, false, false}, {"GET", 101, false, true},
		{"GET", 200, false, true}, {"GET", 200, true, false},
	} {
		slots := bulkhead.New(bulkhead.Config{Limit: 1})
		asked := false
		transport := &resiliencehttp.Transport{
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				resp := reply(r, c.status, "x")
				if c.empty {
					resp.Body = http.NoBody
				}
				return resp, nil
			}),
			Middleware: slots.Wrap,
			Judge: func(_ *http.Response, ahead *resiliencehttp.Ahead) error {
				_, err := ahead.Bytes(1)
				asked = err == nil
				return nil
			},
		}
		resp, err := transport.RoundTrip(request(t, c.method, "http://a/"))
		require.NoError(t, err)
		require.Equal(t, c.body, slots.Stats().InFlight == 1, c)
		require.Equal(t, c.body && c.status != 101, asked, c)
		require.NoError(t, resp.Body.Close())
		require.Zero(t, slots.Stats().InFlight)
	}
}

func TestJudgeOfARequestWithoutAURL(t *testing.T) {
	err := resiliencehttp.DefaultJudge(&http.Response{StatusCode: 503, Request: &http.Request{}}, nil)
	require.EqualError(t, err, "resiliencehttp: status 503 Service Unavailable")
}

// The functions of a Transport are called even if there is no Middleware.
func TestTransportWithOneFunction(t *testing.T) {
	called := false
	base := roundTripper(func(r *http.Request) (*http.Response, error) {
		if body, _ := io.ReadAll(r.Body); string(body) != "body" {
			return nil, errors.New("the body is gone")
		}
		return reply(r, 200, "x"), nil
	})
	for _, transport := range []*resiliencehttp.Transport{
		{Base: base, Prepare: func(*http.Request) error { called = true; return nil }},
		{Base: base, Judge: func(*http.Response, *resiliencehttp.Ahead) error { called = true; return nil }},
	} {
		called = false
		req, err := http.NewRequestWithContext(t.Context(), "PUT", "http://a/", strings.NewReader("body"))
		require.NoError(t, err)
		resp, err := transport.RoundTrip(req)
		require.NoError(t, err)
		require.Equal(t, "x", answer(t, resp, nil))
		require.True(t, called)
	}
}

func TestBaseSeesTheDeadlineOfAnAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, c := range []struct {
			timeout, attempt, caller time.Duration
			want                     time.Duration // 0: none
		}{
			{-1, 0, 0, 0}, {-1, 0, time.Second, time.Second}, {time.Minute, 0, 0, time.Minute},
			{time.Minute, time.Second, 0, time.Second}, {time.Minute, time.Second, time.Millisecond, time.Millisecond},
			{-1, time.Second, time.Minute, time.Second}, {-1, time.Second, 0, time.Second},
		} {
			client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{Timeout: c.timeout, AttemptTimeout: c.attempt,
				Base: roundTripper(func(r *http.Request) (*http.Response, error) {
					deadline, ok := r.Context().Deadline()
					require.Equal(t, c.want > 0, ok, c)
					if ok {
						require.Equal(t, c.want, time.Until(deadline), c)
					}
					return reply(r, 200, "x"), nil
				})})
			ctx := t.Context()
			if c.caller > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, c.caller)
				defer cancel()
			}
			req, err := http.NewRequestWithContext(ctx, "GET", "http://a/", nil)
			require.NoError(t, err)
			resp, err := client.Do(req)
			require.NoError(t, err)
			answer(t, resp, nil)
		}
	})
}

func TestPrepareIsNotCalledForABodyThatFails(t *testing.T) {
	prepared := 0
	transport := &resiliencehttp.Transport{
		Base:       roundTripper(func(*http.Request) (*http.Response, error) { return nil, errors.New("reset") }),
		Prepare:    func(*http.Request) error { prepared++; return nil },
		Middleware: retries(3).Wrap,
	}
	req := httptest.NewRequest("PUT", "http://a/", strings.NewReader("x"))
	req.GetBody = func() (io.ReadCloser, error) { return nil, errors.New("broken") }
	_, err := transport.RoundTrip(req)
	require.ErrorContains(t, err, "resiliencehttp: rewinding the request's body: broken")
	require.Equal(t, 1, prepared)
}

func TestPrepareThatFailsLeavesNoBodyOpen(t *testing.T) {
	for name, prepare := range map[string]func(*http.Request) error{
		"panics": func(*http.Request) error { panic("prepare") },
		"fails":  func(*http.Request) error { return io.EOF },
	} {
		var closed atomic.Int32
		var seen error
		transport := &resiliencehttp.Transport{
			Base:    roundTripper(func(*http.Request) (*http.Response, error) { panic("sent") }),
			Prepare: prepare,
			Middleware: func(next resilience.Func) resilience.Func {
				return func(ctx context.Context) error { seen = next(ctx); return seen }
			},
		}
		req, err := http.NewRequestWithContext(t.Context(), "PUT", "http://a/", strings.NewReader("x"))
		require.NoError(t, err)
		req.Body = &closing{req.Body, &closed}
		if name == "panics" {
			require.PanicsWithValue(t, "prepare", func() { _, _ = transport.RoundTrip(req) })
		} else {
			_, err = transport.RoundTrip(req)
			require.Error(t, err, name)
			require.True(t, resilience.Answered(seen), name)
		}
		require.EqualValues(t, 1, closed.Load(), name)
	}
}
