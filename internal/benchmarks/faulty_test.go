package benchmarks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/failsafe-go/failsafe-go/circuitbreaker"
	"github.com/failsafe-go/failsafe-go/failsafehttp"
	"github.com/failsafe-go/failsafe-go/timeout"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/resiliencehttp"
)

// A faulty server answers the n-th request, from 1 on.
type faulty func(n int, r *http.Request) (*http.Response, error)

// A script is the body of a response: its events, a second apart, and then end, or silence until
// the request's ctx ends if that is nil.
type script struct {
	ctx    context.Context
	events int
	end    error
}

const event = "data: hello\n\n"

func (s *script) Read(p []byte) (int, error) {
	if s.events > 0 {
		s.events--
		return copy(p, event), nil
	}
	if s.end != nil {
		return 0, s.end
	}
	<-s.ctx.Done()
	return 0, context.Cause(s.ctx)
}

func (s *script) Close() error { return nil }

func reply(r *http.Request, status int, body io.ReadCloser) *http.Response {
	return &http.Response{StatusCode: status, ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{}, Body: body,
		ContentLength: -1, Request: r}
}

func silentAfter(events int) faulty {
	return func(_ int, r *http.Request) (*http.Response, error) {
		return reply(r, 200, &script{r.Context(), events, nil}), nil
	}
}

// An account is what became of the calls of a client.
type account struct {
	sent, answered, refused, failed int
	longest                         time.Duration // that a caller waited; a minute if it gave up
}

// run makes calls, each begun a pause after the last, and reads their responses.
func run(calls int, pause time.Duration, server faulty, client func(http.RoundTripper) *http.Client) account {
	var mu sync.Mutex
	var a account
	c := client(roundTripper(func(r *http.Request) (*http.Response, error) {
		mu.Lock()
		a.sent++
		n := a.sent
		mu.Unlock()
		return server(n, r)
	}))
	var wg sync.WaitGroup
	for range calls {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			begun := time.Now()
			req, _ := http.NewRequestWithContext(ctx, http.MethodGet, "http://provider.test/", nil)
			resp, err := c.Do(req)
			if err == nil {
				_, err = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
			}
			mu.Lock()
			defer mu.Unlock()
			a.longest = max(a.longest, time.Since(begun))
			switch {
			case err == nil && resp.StatusCode == http.StatusOK:
				a.answered++
			case resilience.Refused(err), errors.Is(err, circuitbreaker.ErrOpen):
				a.refused++
			default:
				a.failed++
			}
		})
		time.Sleep(pause)
	}
	wg.Wait()
	return a
}

type roundTripper func(*http.Request) (*http.Response, error)

func (rt roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return rt(r) }

// TestDefaultClientAgainstFaultyServers prints what became of the calls of three clients as they
// come: net/http's, failsafe-go's with its default retries, circuit breaker and a timeout of ten
// seconds, and NewClient's. A caller gives up after a minute.
func TestDefaultClientAgainstFaultyServers(t *testing.T) {
	clients := []struct {
		name string
		new  func(http.RoundTripper) *http.Client
	}{
		{"plain", func(base http.RoundTripper) *http.Client { return &http.Client{Transport: base} }},
		{"failsafe", func(base http.RoundTripper) *http.Client {
			return &http.Client{Transport: failsafehttp.NewRoundTripper(base,
				failsafehttp.NewRetryPolicyBuilder().Build(), circuitbreaker.NewWithDefaults[*http.Response](),
				timeout.New[*http.Response](10*time.Second))}
		}},
		{"NewClient", func(base http.RoundTripper) *http.Client {
			return resiliencehttp.NewClient(resiliencehttp.ClientConfig{Base: base})
		}},
	}
	breaks := func(n int, r *http.Request) (*http.Response, error) {
		if n%20 == 0 {
			return reply(r, 200, &script{r.Context(), 1, io.EOF}), nil
		}
		return reply(r, 200, &script{r.Context(), 1, io.ErrUnexpectedEOF}), nil
	}
	fewUnavailable := func(n int, r *http.Request) (*http.Response, error) {
		if n%100 != 0 {
			return reply(r, 200, &script{r.Context(), 1, io.EOF}), nil
		}
		resp := reply(r, 503, http.NoBody)
		resp.Header.Set("Retry-After", "5")
		return resp, nil
	}
	hangs := func(_ int, r *http.Request) (*http.Response, error) {
		<-r.Context().Done()
		return nil, context.Cause(r.Context())
	}
	text := strings.Builder{}
	defer func() { t.Log(text.String()) }()
	fmt.Fprintf(&text, "\n%-34s %-10s %6s %9s %8s %7s  %s\n", "server", "client", "sent", "answered", "refused",
		"failed", "longest")
	for _, c := range []struct {
		name   string
		calls  int
		pause  time.Duration
		server faulty
		want   func(t *testing.T, ours, plain, failsafe account)
	}{
		{"breaks off 950 of 1000 streams", 1000, 10 * time.Millisecond, breaks,
			func(t *testing.T, ours, plain, failsafe account) {
				require.Equal(t, 10, ours.sent, "no more than fail in a row")
				require.Equal(t, 990, ours.refused)
				require.Equal(t, 950, plain.failed)
				require.Zero(t, failsafe.refused, "it judges a response by its headers")
			}},
		{"1 % are 503 with Retry-After: 5", 1200, 10 * time.Millisecond, fewUnavailable,
			func(t *testing.T, ours, plain, failsafe account) {
				require.GreaterOrEqual(t, ours.answered, plain.answered, "one bad instance does not take the host away")
				require.Equal(t, 1200, ours.answered)
				require.Equal(t, 1212, ours.sent)
				require.Equal(t, 1188, plain.answered)
				require.LessOrEqual(t, ours.longest, 11*time.Second, "one or two waits of 5 s and a tenth")
			}},
		{"silent after its headers", 5, 2 * time.Minute, silentAfter(0), func(t *testing.T, ours, plain, failsafe account) {
			require.Equal(t, time.Minute, plain.longest)
			require.Equal(t, time.Minute, failsafe.longest, "its timeout ends with the headers")
			require.Less(t, ours.sent, 15, "three times each, until ten in a row have failed")
			require.Greater(t, ours.sent, 9)
			require.LessOrEqual(t, ours.longest, 30*time.Second)
		}},
		{"silent after the first event", 5, 2 * time.Minute, silentAfter(1),
			func(t *testing.T, ours, plain, failsafe account) {
				require.Equal(t, 5, ours.sent, "the caller has had a part")
				require.Equal(t, time.Minute, min(plain.longest, failsafe.longest))
				require.Equal(t, 10*time.Second, ours.longest)
			}},
		{"silent in the middle", 5, 2 * time.Minute, silentAfter(100), func(t *testing.T, ours, plain, failsafe account) {
			require.Equal(t, 5, ours.sent)
			require.Equal(t, time.Minute, min(plain.longest, failsafe.longest))
			require.Equal(t, 10*time.Second, ours.longest)
		}},
		{"hangs, a request each 3 s", 200, 3 * time.Second, hangs, func(t *testing.T, ours, plain, failsafe account) {
			require.Equal(t, 200, plain.sent)
			require.Equal(t, time.Minute, plain.longest)
			require.Greater(t, ours.refused, 150)
			require.Less(t, ours.sent, 80)
			require.LessOrEqual(t, ours.longest, 31*time.Second)
		}},
	} {
		accounts := map[string]account{}
		for _, client := range clients {
			synctest.Test(t, func(t *testing.T) {
				a := run(c.calls, c.pause, c.server, client.new)
				fmt.Fprintf(&text, "%-34s %-10s %6d %9d %8d %7d  %v\n", c.name, client.name, a.sent, a.answered, a.refused,
					a.failed, a.longest.Round(10*time.Millisecond))
				accounts[client.name] = a
			})
		}
		c.want(t, accounts["NewClient"], accounts["plain"], accounts["failsafe"])
	}
}
