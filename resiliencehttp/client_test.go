package resiliencehttp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/faults"
	"github.com/go-resilience/resilience/hedge"
	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
)

// A world is several hosts, each with faults of its own, behind one client.
type world struct {
	hosts    map[string]*faults.Script
	requests map[string]*atomic.Int64
	body     string
}

// newWorld returns the hosts a, b and c, which answer at once.
func newWorld() *world {
	w := &world{hosts: map[string]*faults.Script{}, requests: map[string]*atomic.Int64{}, body: "an answer"}
	for _, host := range []string{"a", "b", "c"} {
		w.hosts[host] = faults.New(faults.Config{Name: host, Enabled: true, Seed: 1})
		w.requests[host] = &atomic.Int64{}
	}
	return w
}

// suffer replaces the faults of a host.
func (w *world) suffer(host string, plans ...faults.Plan) {
	s := w.hosts[host]
	_ = s.Update(func(c *faults.Config) { c.Enabled = false })
	if err := s.Update(func(c *faults.Config) { c.Plans, c.Enabled = plans, true }); err != nil {
		panic(err)
	}
}

func (w *world) sent(host string) int { return int(w.requests[host].Swap(0)) }

func (w *world) RoundTrip(r *http.Request) (*http.Response, error) {
	w.requests[r.URL.Host].Add(1)
	return faults.Transport(w.hosts[r.URL.Host], roundTripper(func(r *http.Request) (*http.Response, error) {
		if r.Body != nil {
			_, _ = io.Copy(io.Discard, r.Body)
			_ = r.Body.Close()
		}
		return reply(r, 200, w.body), nil
	})).RoundTrip(r)
}

// A client is a client under test with its policies.
type client struct {
	*http.Client
	retries  *resilience.Group[string, *retry.Retrier]
	circuits *resilience.Group[string, *breaker.Breaker]
	slots    *resilience.Group[string, *bulkhead.Bulkhead]
}

func newClient(base http.RoundTripper, cfg resiliencehttp.ClientConfig) *client {
	cfg.Base, cfg.Name = base, "payments"
	transport := resiliencehttp.NewTransport(cfg)
	c := &client{&http.Client{Transport: transport}, transport.Retries, transport.Breakers, transport.Bulkheads}
	return c
}

// retrier returns the Retrier of a host, or the only one there is.
func (c *client) retrier(host string) *retry.Retrier {
	for key, r := range c.retries.All() {
		if key == host+":80" || c.retries.Stats().Members == 1 {
			return r
		}
	}
	return nil
}

// circuit returns the Config of its breakers.
func (c *client) circuit() breaker.Config { return c.circuits.Describe().Config().(breaker.Config) }

// totals returns those of its breakers together.
func (c *client) totals() (sum breaker.Stats) {
	for _, b := range c.circuits.All() {
		s := b.Stats()
		sum.Succeeded += s.Succeeded
		sum.Failed += s.Failed
		sum.Ignored += s.Ignored
		sum.Refused += s.Refused
	}
	return sum
}

// outcomes returns the numbers of calls that succeeded, failed, were ignored and were refused.
func outcomes(s breaker.Stats) []int64 { return []int64{s.Succeeded, s.Failed, s.Ignored, s.Refused} }

// metric returns the sum of the metrics of p whose names begin with a text.
func metric(p policy.Describer, name string) (sum float64) {
	for _, f := range p.Describe().Metrics() {
		if strings.HasPrefix(f.Name, name) {
			sum += f.Value
		}
	}
	return sum
}

// get reads the response to a GET.
func (c *client) get(ctx context.Context, host string) (string, error) {
	return c.send(ctx, http.MethodGet, host)
}

func (c *client) send(ctx context.Context, method, host string) (string, error) {
	r, err := http.NewRequestWithContext(ctx, method, "http://"+host+"/", nil)
	if err != nil {
		return "", err
	}
	resp, err := c.Do(r)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != 200 {
		err = errors.New(resp.Status)
	}
	return string(body), err
}

func (c *client) state(host string) breaker.State {
	for key, b := range c.circuits.All() {
		if key == host+":80" || c.retries.Stats().Members == 1 {
			return b.State()
		}
	}
	return breaker.Closed
}

func isTimeout(err error) bool {
	e, ok := errors.AsType[net.Error](err)
	return ok && e.Timeout()
}

func TestClientHasItsDefaults(t *testing.T) {
	c := newClient(newWorld(), resiliencehttp.ClientConfig{})
	_, err := c.get(t.Context(), "a")
	require.NoError(t, err)
	require.Equal(t, 4, c.retrier("a").Config().Attempts)
	waits := c.retrier("a").Config().Backoff()
	for _, bound := range []time.Duration{75 * time.Millisecond, 150 * time.Millisecond, 300 * time.Millisecond} {
		wait := waits.NextBackOff()
		require.GreaterOrEqual(t, wait, bound/2)
		require.LessOrEqual(t, wait, bound)
	}
	require.Equal(t, retry.BudgetConfig{Name: "payments", Ratio: 0.2, PerSecond: 10},
		c.retrier("a").Config().Budget.Config())
	circuit := c.circuit()
	require.Equal(t, []any{0.5, 20, 7 * time.Second}, []any{circuit.FailureRate, circuit.MinCalls, circuit.Window})
	require.Equal(t, []time.Duration{900 * time.Millisecond, 900 * time.Millisecond, 10 * time.Second, 30 * time.Second},
		[]time.Duration{circuit.OpenFor, circuit.MaxOpenFor, circuit.ProbeTimeout, circuit.MaxRetryAfter})
	require.Equal(t, 900*time.Millisecond, circuit.Patience)
	slots := c.slots.Describe().Config().(bulkhead.Config)
	require.Equal(t, []any{100, 1000, 3 * time.Second}, []any{slots.Limit, slots.Queue, slots.MaxWait})

	c = newClient(newWorld(), resiliencehttp.ClientConfig{Timeout: 300 * time.Millisecond})
	require.Equal(t, 90*time.Millisecond, c.circuit().Patience, "less than an attempt may take")
	c = newClient(newWorld(), resiliencehttp.ClientConfig{ResponseHeaderTimeout: resilience.Unlimited,
		Idle: resilience.Unlimited})
	require.Equal(t, 900*time.Millisecond, c.circuit().Patience)
}

func TestClientConfigIsValidated(t *testing.T) {
	require.NoError(t, resiliencehttp.ClientConfig{}.Validate())
	require.NoError(t, resiliencehttp.ClientConfig{
		Timeout: resilience.Unlimited, ResponseHeaderTimeout: resilience.Unlimited, Idle: resilience.Unlimited,
	}.Validate())
	for want, cfg := range map[string]resiliencehttp.ClientConfig{
		"Timeout is -2ns: must be 0 (for the default), more, or Unlimited": {Timeout: -2},
		"ResponseHeaderTimeout is -1s: must be 0 (for the default), more, or Unlimited": {
			ResponseHeaderTimeout: -time.Second,
		},
		"Idle is -1s: must be 0 (for the default), more, or Unlimited": {Idle: -time.Second},
		"AttemptTimeout is -1ns: must be 0 (for none) or more": {
			AttemptTimeout: resilience.Unlimited,
		},
		"MaxBuffer is -1: must be 0 (for none) or more": {MaxBuffer: -1},
	} {
		require.EqualError(t, cfg.Validate(), "resiliencehttp.ClientConfig."+want)
		require.PanicsWithError(t, cfg.Validate().Error(), func() { resiliencehttp.NewTransport(cfg) })
	}
}

// Each default policy is found by its host, and is absent if the configuration replaces it.
func TestTransportHasPoliciesByHost(t *testing.T) {
	w := newWorld()
	transport := resiliencehttp.NewTransport(resiliencehttp.ClientConfig{Name: "payments", Base: w})
	_, ok := transport.Budgets.Get("a:80")
	require.False(t, ok)
	resp, err := (&http.Client{Transport: transport}).Get("http://a/")
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	retrier, ok := transport.Retries.Get("a:80")
	require.True(t, ok)
	budget, ok := transport.Budgets.Get("a:80")
	require.True(t, ok)
	require.Same(t, retrier.Config().Budget, budget)
	for host, b := range transport.Budgets.All() {
		require.Equal(t, "a:80", host)
		require.Same(t, budget, b)
	}
	circuit, ok := transport.Breakers.Get("a:80")
	require.True(t, ok)
	require.EqualValues(t, 1, circuit.Stats().Succeeded)
	_, ok = transport.Bulkheads.Get("a:80")
	require.True(t, ok)
	var kinds []string
	for _, p := range transport.Policies() {
		kinds = append(kinds, p.Describe().Kind+"/"+p.Describe().Name)
	}
	require.Equal(t, []string{"retry/payments", "breaker/payments", "bulkhead/payments"}, kinds)

	off := resiliencehttp.Disabled
	transport = resiliencehttp.NewTransport(resiliencehttp.ClientConfig{Retry: off, Breaker: off, Bulkhead: off})
	require.Equal(t, []any{true, true, true, true}, []any{
		transport.Retries == nil, transport.Budgets == nil, transport.Breakers == nil, transport.Bulkheads == nil,
	})
	require.Empty(t, transport.Policies())
}

// The Timeout has a timer only once somebody waits for it.
func TestPoliciesSeeTheClientsTimeoutWithoutATimer(t *testing.T) {
	for name, asleep := range map[string]time.Duration{"Base": 0, "Middleware": 2 * time.Second} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				calls := 0
				var seen watch
				client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{
					Timeout: time.Second, ResponseHeaderTimeout: resilience.Unlimited, Idle: resilience.Unlimited,
					Retry: seen.Wrap, Breaker: resiliencehttp.Disabled,
					Throttle: func(next resilience.Func) resilience.Func {
						return func(ctx context.Context) error { time.Sleep(asleep); return next(ctx) }
					},
					Base: roundTripper(func(*http.Request) (*http.Response, error) {
						calls++
						time.Sleep(2 * time.Second)
						return response(503, strings.NewReader("")), nil
					}),
				})
				resp, err := client.Get("http://example.com")
				if err == nil {
					require.NoError(t, resp.Body.Close())
				}
				require.Equal(t, []behavior.Kind{behavior.Overran}, seen.kinds)
				require.Equal(t, asleep == 0, calls == 1)
			})
		})
	}
}

func TestClientEndsARequestThatHangs(t *testing.T) {
	for name, c := range map[string]struct {
		cfg      resiliencehttp.ClientConfig
		method   string
		deadline time.Duration
		takes    time.Duration // 0: between the attempts and a second more
		sent     int
	}{
		"by default":           {resiliencehttp.ClientConfig{}, "GET", 0, 30 * time.Second, 3},
		"not repeated":         {resiliencehttp.ClientConfig{}, "POST", 0, 10 * time.Second, 1},
		"quick":                {resiliencehttp.ClientConfig{Timeout: 3 * time.Second}, "GET", 0, 3 * time.Second, 3},
		"attempts are quicker": {resiliencehttp.ClientConfig{AttemptTimeout: time.Second}, "GET", 0, 0, 4},
		"attempts without limit": {resiliencehttp.ClientConfig{ResponseHeaderTimeout: resilience.Unlimited,
			Idle: resilience.Unlimited}, "GET", 0, 30 * time.Second, 1},
		"attempts are slower": {resiliencehttp.ClientConfig{Timeout: time.Second, AttemptTimeout: time.Minute},
			"GET", 0, time.Second, 1},
		"caller's deadline": {resiliencehttp.ClientConfig{}, "GET", time.Second, time.Second, 1},
		"caller's later":    {resiliencehttp.ClientConfig{Timeout: time.Second}, "GET", time.Minute, time.Second, 3},
		"no limit but caller's": {resiliencehttp.ClientConfig{Timeout: resilience.Unlimited,
			ResponseHeaderTimeout: resilience.Unlimited, Idle: resilience.Unlimited}, "GET", time.Hour, time.Hour, 1},
		"no limit of all": {resiliencehttp.ClientConfig{Timeout: resilience.Unlimited}, "POST", 0,
			10 * time.Second, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				client := newClient(w, c.cfg)
				w.suffer("a", faults.Plan{Kind: faults.Hang})
				ctx := t.Context()
				if c.deadline > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, c.deadline)
					defer cancel()
				}
				start := time.Now()
				_, err := client.send(ctx, c.method, "a")
				took := time.Since(start)
				require.True(t, isTimeout(err), "%v", err)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.Equal(t, c.sent, w.sent("a"))
				if c.takes > 0 {
					require.Equal(t, c.takes, took)
				} else {
					require.Greater(t, took, 4*time.Second)
					require.Less(t, took, 5*time.Second)
				}
				if timeout, ok := errors.AsType[*resilience.TimeoutError](err); ok {
					require.Equal(t, "payments", timeout.Name)
				} else {
					require.NotZero(t, c.deadline, "%v", err)
				}
			})
		})
	}
}

// TestCancelOfManyRequestsOpensNothing: a cancel reaches the ctxs that are derived from the caller's one after
// another. One of a request may be the first of thousands, and the other, which the policies look at, the last.
func TestCancelOfManyRequestsOpensNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.suffer("a", faults.Plan{Kind: faults.Hang})
		circuit := breaker.New(breaker.Config{})
		for _, c := range []*http.Client{
			resiliencehttp.NewClient(resiliencehttp.ClientConfig{
				Breaker: circuit.Wrap, Base: w,
			}),
			{Transport: &resiliencehttp.Transport{
				Base: w, Middleware: resilience.Chain(resilience.Timeout(time.Minute), retries(3).Wrap, circuit.Wrap),
			}},
		} {
			ctx := &slowCtx{Context: t.Context(), done: make(chan struct{})}
			time.AfterFunc(time.Second, ctx.cancel)
			_, err := (&client{Client: c}).get(ctx, "a")
			time.Sleep(time.Minute) // until all are canceled
			require.ErrorIs(t, err, context.Canceled)
			require.False(t, isTimeout(err))
			require.Equal(t, 1, w.sent("a"))
		}
		require.Equal(t, []int64{0, 0, 2, 0}, outcomes(circuit.Stats()))
	})
}

// A slowCtx cancels what is derived from it one after another, the latest first.
type slowCtx struct {
	context.Context
	done chan struct{}

	mu      sync.Mutex
	err     error
	derived []func()
}

func (c *slowCtx) Done() <-chan struct{} { return c.done }

func (c *slowCtx) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// AfterFunc is what package context calls for a ctx that is derived from c.
func (c *slowCtx) AfterFunc(f func()) (stop func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.derived = append(c.derived, f)
	return func() bool { return false }
}

func (c *slowCtx) cancel() {
	c.mu.Lock()
	c.err = context.Canceled
	derived := c.derived
	c.mu.Unlock()
	close(c.done)
	for _, f := range slices.Backward(derived) {
		f()
		time.Sleep(time.Second / 10)
	}
}

func TestClientTriesAgain(t *testing.T) {
	for name, plan := range map[string]faults.Plan{
		"refused":  {Kind: faults.Refuse},
		"503":      {Kind: faults.Status},
		"429":      {Kind: faults.Status, Status: 429},
		"an error": {Kind: faults.Fail},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				c := newClient(w, resiliencehttp.ClientConfig{})
				plan.Count = 3
				w.suffer("a", plan)
				body, err := c.get(t.Context(), "a")
				require.NoError(t, err)
				require.Equal(t, "an answer", body)
				require.Equal(t, 4, w.sent("a"))

				plan.Count = 4
				w.suffer("a", plan)
				_, err = c.get(t.Context(), "a")
				require.Error(t, err)
				require.Equal(t, 4, w.sent("a"))
				require.Equal(t, int64(1), c.retrier("a").Stats().Recovered)
				require.Equal(t, int64(1), c.retrier("a").Stats().Exhausted)
			})
		})
	}
}

// One Retry-After does not take the host away: behind a load balancer it is one bad instance.
func TestClientHeedsRetryAfterForTheRequestAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		c := newClient(w, resiliencehttp.ClientConfig{})
		w.suffer("a", faults.Plan{Kind: faults.Status, RetryAfter: 5 * time.Second, Count: 1})
		start := time.Now()
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := c.get(t.Context(), "a")
			require.NoError(t, err)
			require.GreaterOrEqual(t, time.Since(start), 5*time.Second)
			require.Less(t, time.Since(start), 6*time.Second)
		})
		synctest.Wait()
		_, err := c.get(t.Context(), "a")
		require.NoError(t, err, "another request")
		wg.Wait()
		require.Equal(t, 3, w.sent("a"))

		// It asks for more than there is time: the response, at once.
		w.suffer("b", faults.Plan{Kind: faults.Status, RetryAfter: 40 * time.Second, Count: 1})
		start = time.Now()
		_, err = c.get(t.Context(), "b")
		require.EqualError(t, err, "503 Service Unavailable")
		require.Zero(t, time.Since(start))
	})
}

func TestClientLimitsTheTimeOfABody(t *testing.T) {
	for name, c := range map[string]struct {
		cfg   resiliencehttp.ClientConfig
		takes time.Duration
	}{
		"by the attempt": {resiliencehttp.ClientConfig{AttemptTimeout: 10 * time.Second}, 10 * time.Second},
		"by all of it": {resiliencehttp.ClientConfig{Timeout: 30 * time.Second,
			ResponseHeaderTimeout: resilience.Unlimited, Idle: resilience.Unlimited}, 30 * time.Second},
		"sooner": {resiliencehttp.ClientConfig{Timeout: 3 * time.Second, AttemptTimeout: time.Minute},
			3 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				w.body = strings.Repeat("x", 100)
				client := newClient(w, c.cfg)
				w.suffer("a", faults.Plan{Kind: faults.SlowBody, Rate: 1})
				start := time.Now()
				_, err := client.get(t.Context(), "a")
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.Equal(t, c.takes, time.Since(start))
				synctest.Wait() // the end of the time is told on a goroutine of its own
				require.Zero(t, metric(client.slots, "bulkhead.in_flight"))
				require.Equal(t, int64(1), client.totals().Failed)

				w.suffer("a", faults.Plan{Kind: faults.SlowBody, Rate: 100})
				body, err := client.get(t.Context(), "a")
				require.NoError(t, err)
				require.Len(t, body, 100)
			})
		})
	}
}

// The time of an attempt stands still while its response waits for the policies, which may
// return it after all.
func TestClientLimitsTheTimeOfAFailedBody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		long := strings.Repeat("x", 100<<10) // too long to be read ahead
		base := roundTripper(func(r *http.Request) (*http.Response, error) {
			resp := reply(r, 503, "")
			resp.ContentLength = int64(len(long))
			resp.Body = io.NopCloser(&slowReader{strings.NewReader(long), r.Context()})
			return resp, nil
		})
		c := newClient(base, resiliencehttp.ClientConfig{
			Timeout: 15 * time.Second, AttemptTimeout: 5 * time.Second,
			Retry:   retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(4 * time.Second)}).Wrap,
			Breaker: breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Hour}).Wrap,
		})
		start := time.Now()
		resp, err := c.Get("http://a/")
		require.NoError(t, err)
		require.Equal(t, 4*time.Second, time.Since(start), "the circuit was open by then")
		_, err = io.ReadAll(resp.Body)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 9*time.Second, time.Since(start))
		require.NoError(t, resp.Body.Close())

		c = newClient(base, resiliencehttp.ClientConfig{
			Timeout: 7 * time.Second, AttemptTimeout: 5 * time.Second,
			Retry:   retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(4 * time.Second)}).Wrap,
			Breaker: breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Hour}).Wrap,
		})
		start = time.Now()
		resp, err = c.Get("http://a/")
		require.NoError(t, err)
		_, err = io.ReadAll(resp.Body)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 7*time.Second, time.Since(start), "the time of the request goes on")
		require.NoError(t, resp.Body.Close())
	})
}

// A slowReader delivers a kilobyte a second.
type slowReader struct {
	*strings.Reader
	ctx context.Context
}

func (r *slowReader) Read(p []byte) (int, error) {
	select {
	case <-time.After(time.Second):
		return r.Reader.Read(p[:min(len(p), 1024)])
	case <-r.ctx.Done():
		return 0, context.Cause(r.ctx)
	}
}

func TestClientKeepsABadHostFromTheOthers(t *testing.T) {
	for name, plan := range map[string]faults.Plan{
		"hanging":      {Kind: faults.Hang},
		"refused":      {Kind: faults.Refuse},
		"503":          {Kind: faults.Status},
		"slow":         {Kind: faults.Latency, Delay: 9 * time.Second},
		"reset":        {Kind: faults.Reset, Bytes: 1},
		"half of them": {Kind: faults.Status, Share: 0.7},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				c := newClient(w, resiliencehttp.ClientConfig{})
				w.suffer("a", plan)
				var wg sync.WaitGroup
				failed := 0
				var mu sync.Mutex
				for i := range 3000 { // for half a minute
					time.Sleep(10 * time.Millisecond)
					wg.Go(func() {
						host := []string{"a", "b", "c"}[i%3]
						start := time.Now()
						_, err := c.get(t.Context(), host)
						if host == "a" && err != nil {
							mu.Lock()
							failed++
							mu.Unlock()
							return
						}
						if host != "a" {
							require.NoError(t, err)
							require.Zero(t, time.Since(start), "nothing delays it")
						}
					})
				}
				wg.Wait()
				require.Equal(t, []int{1000, 1000}, []int{w.sent("b"), w.sent("c")}, "each once")
				require.Equal(t, []breaker.State{breaker.Closed, breaker.Closed}, []breaker.State{c.state("b"), c.state("c")})
				sent := w.sent("a")
				require.Less(t, sent, 1300, "no more than the budget allows")
				switch name {
				case "slow":
					require.Less(t, failed, 1000, "some of it is served")
				case "half of them":
					require.Less(t, sent, 900, "the circuit was open for a part of the time")
				default:
					require.Equal(t, 1000, failed)
					require.Less(t, sent, 500)
				}
			})
		})
	}
}

func TestClientHasABudgetForEachHost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		c := newClient(w, resiliencehttp.ClientConfig{Breaker: resiliencehttp.Disabled})
		w.suffer("a", faults.Plan{Kind: faults.Refuse})
		var wg sync.WaitGroup
		for range 1000 {
			wg.Go(func() {
				_, err := c.get(t.Context(), "a")
				require.ErrorIs(t, err, syscall.ECONNREFUSED)
			})
		}
		wg.Wait()
		require.Positive(t, c.retrier("a").Stats().OverBudget)
		w.suffer("b", faults.Plan{Kind: faults.Refuse, Count: 2})
		_, err := c.get(t.Context(), "b")
		require.NoError(t, err)
		require.Equal(t, 3, w.sent("b"), "its own budget is not spent")

		budgets := c.Transport.(*resiliencehttp.ClientTransport).Budgets
		hosts := []string{}
		for host, budget := range budgets.All() {
			same, ok := budgets.Get(host)
			require.True(t, ok)
			require.Same(t, same, budget)
			hosts = append(hosts, host)
		}
		require.ElementsMatch(t, []string{"a:80", "b:80"}, hosts)
		for range budgets.All() {
			break // the iteration may end early
		}
	})
}

func TestImpatientCallersOpenBreakerOfHangingHost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		c := newClient(w, resiliencehttp.ClientConfig{})
		w.suffer("a", faults.Plan{Kind: faults.Hang})
		do := func(patience time.Duration) {
			var wg sync.WaitGroup
			for range 20 {
				wg.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), patience)
					defer cancel()
					_, err := c.get(ctx, "a")
					require.Error(t, err)
				})
			}
			wg.Wait()
		}
		do(500 * time.Millisecond)
		require.Equal(t, breaker.Closed, c.state("a"), "half a second says little")
		do(time.Second)
		require.Equal(t, breaker.Closed, c.state("a"), "they were in flight together")
		do(time.Second)
		require.Equal(t, breaker.Open, c.state("a"))
		_, err := c.get(t.Context(), "a")
		require.ErrorIs(t, err, breaker.ErrOpen)
	})
}

// Timeout alone may limit the requests, and may be shorter than the breaker's usual Patience.
func TestShortTimeoutOpensBreakerOfHangingHost(t *testing.T) {
	for name, cfg := range map[string]resiliencehttp.ClientConfig{
		"no header timeout":     {ResponseHeaderTimeout: resilience.Unlimited},
		"longer header timeout": {ResponseHeaderTimeout: 2 * time.Second},
		"longer attempts":       {AttemptTimeout: 2 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				cfg.Timeout = 500 * time.Millisecond
				c := newClient(w, cfg)
				w.suffer("a", faults.Plan{Kind: faults.Hang})
				for range 30 {
					_, err := c.get(t.Context(), "a")
					require.Error(t, err)
				}
				require.Equal(t, breaker.Open, c.state("a"))
			})
		})
	}
}

func TestUnclosedBodiesHoldSlotsForALimitedTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		c := newClient(w, resiliencehttp.ClientConfig{})
		var bodies []io.Closer
		for range 100 {
			resp, err := c.Get("http://a/")
			require.NoError(t, err)
			bodies = append(bodies, resp.Body)
		}
		require.EqualValues(t, 100, metric(c.slots, "bulkhead.in_flight"))
		_, err := c.get(t.Context(), "a")
		require.ErrorIs(t, err, bulkhead.ErrFull)
		_, err = c.get(t.Context(), "b")
		require.NoError(t, err, "another host")
		time.Sleep(9 * time.Minute)
		require.EqualValues(t, 100, metric(c.slots, "bulkhead.in_flight"), "a long download may take as long")
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Zero(t, metric(c.slots, "bulkhead.in_flight"), "the time of reading is over")
		_, err = c.get(t.Context(), "a")
		require.NoError(t, err)
		for _, b := range bodies {
			_ = b.Close()
		}
		require.Equal(t, int64(102), c.totals().Succeeded, "the callers were slow, not the host")
		require.Zero(t, c.totals().Failed)
	})
}

func TestClientPoliciesMayBeOthersOrNone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		off := resiliencehttp.Disabled
		c := newClient(w, resiliencehttp.ClientConfig{Timeout: resilience.Unlimited,
			ResponseHeaderTimeout: resilience.Unlimited, Idle: resilience.Unlimited, Retry: off, Breaker: off, Bulkhead: off})
		w.suffer("a", faults.Plan{Kind: faults.Status, Count: 1})
		_, err := c.get(t.Context(), "a")
		require.EqualError(t, err, "503 Service Unavailable")

		var order []string
		note := func(name string) resilience.Middleware {
			return func(next resilience.Func) resilience.Func {
				return func(ctx context.Context) error { order = append(order, name); return next(ctx) }
			}
		}
		c = newClient(w, resiliencehttp.ClientConfig{
			Retry: note("retry"), Breaker: note("breaker"), Throttle: note("throttle"), Bulkhead: note("bulkhead"),
		})
		_, err = c.get(t.Context(), "a")
		require.NoError(t, err)
		require.Equal(t, []string{"retry", "breaker", "throttle", "bulkhead"}, order)

		// All policies see the end of the request when it is over.
		w.suffer("a", faults.Plan{Kind: faults.Hang})
		c = newClient(w, resiliencehttp.ClientConfig{ResponseHeaderTimeout: resilience.Unlimited,
			Idle: resilience.Unlimited, Throttle: func(next resilience.Func) resilience.Func {
				return func(ctx context.Context) error {
					err := next(ctx)
					require.Equal(t, context.DeadlineExceeded, ctx.Err())
					require.EqualError(t, context.Cause(ctx), "resilience: payments: timed out after 30s")
					return err
				}
			}})
		_, err = c.get(t.Context(), "a")
		require.True(t, isTimeout(err))

		// A policy that derives a ctx of its own ends the attempt, or is ended with it.
		w.suffer("a", faults.Plan{Kind: faults.Hang})
		for policy, takes := range map[time.Duration]time.Duration{time.Second: time.Second,
			5 * time.Second: 2 * time.Second} {
			c = newClient(w, resiliencehttp.ClientConfig{Timeout: 2 * time.Second,
				ResponseHeaderTimeout: resilience.Unlimited, Idle: resilience.Unlimited,
				Throttle: resilience.NamedTimeout("mine", policy)})
			start := time.Now()
			_, err = c.send(t.Context(), "POST", "a")
			require.Equal(t, takes, time.Since(start))
			timeout, ok := errors.AsType[*resilience.TimeoutError](err)
			require.True(t, ok, "%v", err)
			require.Equal(t, map[bool]string{true: "mine", false: "payments"}[policy == takes], timeout.Name)
		}
	})
}

func TestClientWithATimeoutOfItsOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		c := newClient(w, resiliencehttp.ClientConfig{})
		c.Timeout = 2 * time.Second
		w.suffer("a", faults.Plan{Kind: faults.Hang})
		for range 25 {
			require.Equal(t, breaker.Closed, c.state("a"))
			start := time.Now()
			_, err := c.get(t.Context(), "a")
			require.True(t, isTimeout(err), "%v", err)
			require.Equal(t, 2*time.Second, time.Since(start))
		}
		require.Equal(t, breaker.Open, c.state("a"), "25 in a row, although the first ones have left the window")
		require.Equal(t, int64(25), c.totals().Failed)
		body, err := c.get(t.Context(), "b")
		require.NoError(t, err)
		require.Equal(t, "an answer", body)
	})
}

func TestClientPassesOnWhatATransportHas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.suffer("a", faults.Plan{Kind: faults.Refuse})
		var did []string
		c := newClient(w, resiliencehttp.ClientConfig{
			Retry:   retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(0)}).Wrap,
			Prepare: func(*http.Request) error { did = append(did, "prepare"); return nil },
			Judge: func(_ *http.Response, ahead *resiliencehttp.Ahead) error {
				begin, err := ahead.Bytes(2)
				did = append(did, "judge "+string(begin))
				return err
			},
			Replayable: func(*http.Request) bool { did = append(did, "replayable"); return true },
			MaxBuffer:  10,
		})
		_, err := c.get(t.Context(), "a")
		require.Error(t, err)
		require.Equal(t, []string{"replayable", "prepare", "prepare"}, did)
		did = nil
		r, err := http.NewRequestWithContext(t.Context(), "POST", "http://b/", struct{ io.Reader }{strings.NewReader("once")})
		require.NoError(t, err)
		w.suffer("b", faults.Plan{Kind: faults.Refuse, Count: 1})
		resp, err := c.Do(r)
		require.NoError(t, err)
		_ = resp.Body.Close()
		require.Equal(t, 2, w.sent("b"), "its body was kept")
		require.Equal(t, []string{"replayable", "prepare", "prepare", "judge an"}, did)
	})
}

func TestHedgesOfAClientAreSeenAndBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		hedger := hedge.New[*http.Response](hedge.Config{Name: "payments", Delay: 100 * time.Millisecond, Ratio: 0.5})
		c := newClient(w, resiliencehttp.ClientConfig{Hedge: hedger})
		registry.New().MustAdd(hedger)
		var about []string
		hedger.Observe(func(ctx context.Context, e hedge.Event) {
			about = append(about, resiliencehttp.HostOf(ctx)+" "+string(e.Kind))
		})

		for range 2 {
			_, err := c.get(t.Context(), "a")
			require.NoError(t, err)
		}
		w.suffer("a", faults.Plan{Kind: faults.Hang, Count: 1})
		start := time.Now()
		_, err := c.get(t.Context(), "a")
		require.NoError(t, err)
		require.Equal(t, 100*time.Millisecond, time.Since(start))
		require.Equal(t, []string{"a:80 hedged"}, about)
		require.Zero(t, c.retrier("a").Stats().Canceled, "the one that lost")
		require.Equal(t, int64(1), hedger.Stats().HedgeWon)

		w.suffer("a", faults.Plan{Kind: faults.Latency, Delay: 200 * time.Millisecond})
		for range 10 {
			_, err := c.get(t.Context(), "a")
			require.NoError(t, err)
		}
		require.Equal(t, int64(5), hedger.Stats().OverBudget)
		for range 20 {
			_, err := c.get(t.Context(), "b")
			require.NoError(t, err)
		}

		w.suffer("c", faults.Plan{Kind: faults.Hang})
		start = time.Now()
		_, err = c.get(t.Context(), "c")
		require.True(t, isTimeout(err))
		require.Greater(t, w.sent("c"), 3, "hedged")
		require.Equal(t, 30*time.Second, time.Since(start), "both together have one Timeout")
		require.Zero(t, metric(c.slots, "bulkhead.in_flight"))
	})
}

// TestClientUnderEverything has many callers, some of them rude, meet every fault.
func TestClientUnderEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		c := newClient(w, resiliencehttp.ClientConfig{Timeout: 3 * time.Second})
		w.suffer("a",
			faults.Plan{Kind: faults.Latency, Spread: 50 * time.Millisecond},
			faults.Plan{Kind: faults.Status, Share: 0.1},
			faults.Plan{Kind: faults.Refuse, Share: 0.1},
			faults.Plan{Kind: faults.Reset, Share: 0.1, Bytes: 3},
			faults.Plan{Kind: faults.Hang, Share: 0.02},
			faults.Plan{Kind: faults.SlowBody, Share: 0.1, Rate: 10},
			faults.Plan{Kind: faults.Status, Status: 429, RetryAfter: time.Second, Share: 0.05},
		)
		var wg sync.WaitGroup
		var answered atomic.Int64
		for i := range 200 {
			luck := rand.New(rand.NewPCG(1, uint64(i)))
			wg.Go(func() {
				for range 20 {
					time.Sleep(time.Duration(luck.IntN(1000)) * time.Millisecond)
					ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+luck.IntN(5000))*time.Millisecond)
					r, _ := http.NewRequestWithContext(ctx, []string{"GET", "POST"}[luck.IntN(2)], "http://a/", nil)
					resp, err := c.Do(r)
					if err == nil {
						switch luck.IntN(3) {
						case 0:
							_ = resp.Body.Close()
						case 1:
							cancel()
							_, _ = io.ReadAll(resp.Body)
							_ = resp.Body.Close()
						default:
							if _, err := io.ReadAll(resp.Body); err == nil {
								answered.Add(1)
							}
							if luck.IntN(2) == 0 {
								_ = resp.Body.Close()
							}
						}
					}
					cancel()
				}
			})
		}
		wg.Wait()
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Zero(t, metric(c.slots, "bulkhead.in_flight"), "no slot is lost")
		require.Positive(t, answered.Load())
		var retried, allowed int64
		for _, r := range c.retries.All() {
			retried += r.Stats().Retried
			allowed += r.Config().Budget.Stats().Allowed
		}
		require.LessOrEqual(t, retried, allowed+int64(metric(c.slots, "bulkhead.calls{outcome=refused"))+c.totals().Refused)
		w.suffer("a")
		_, err := c.get(t.Context(), "a")
		require.NoError(t, err, "and it is well again")
	})
}

func ExampleClientTransport_Policies() {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "paid")
	}))
	defer server.Close()

	reg := registry.New()
	transport := resiliencehttp.NewTransport(resiliencehttp.ClientConfig{Name: "payments"})
	reg.MustAdd(transport.Policies()...)
	client := &http.Client{Transport: transport} // or give transport to an SDK

	resp, err := client.Get(server.URL)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	fmt.Printf("%s\n", body)
	for e := range reg.All() {
		fmt.Println(e)
	}
	// Output:
	// paid
	// breaker/payments
	// bulkhead/payments
	// retry/payments
}

// The ctx that Base gets is one of this package. It keeps the promises of package context.
func TestContextOfARequestEndsAsOthersDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type key struct{}
		withValue := func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error { return next(context.WithValue(ctx, key{}, "value")) }
		}
		gone := errors.New("gone")
		ctx, cancel := context.WithCancelCause(t.Context())
		base := roundTripper(func(r *http.Request) (*http.Response, error) {
			own := r.Context()
			require.NoError(t, own.Err())
			require.Equal(t, "value", own.Value(key{}))
			deadline, ok := own.Deadline()
			require.True(t, ok)
			require.Equal(t, 30*time.Second, time.Until(deadline))
			var called [5]atomic.Bool
			note := func(i int) func() { return func() { called[i].Store(true) } }
			for i := range called {
				stop := context.AfterFunc(own, note(i))
				if i%2 == 0 {
					require.True(t, stop())
					require.False(t, stop())
				}
			}
			derived, stop := context.WithCancel(own)
			defer stop()

			cancel(gone)
			require.Equal(t, context.Canceled, own.Err(), "at once")
			<-own.Done()
			require.Equal(t, gone, context.Cause(own))
			require.Equal(t, "value", own.Value(key{}), "of a policy")
			synctest.Wait()
			for i := range called {
				require.Equal(t, i%2 == 1, called[i].Load())
			}
			require.Equal(t, gone, context.Cause(derived))
			after := make(chan bool)
			require.False(t, context.AfterFunc(own, func() { close(after) })())
			<-after
			return nil, own.Err()
		})
		c := newClient(base, resiliencehttp.ClientConfig{Throttle: withValue})
		_, err := c.get(ctx, "a")
		require.ErrorIs(t, err, gone)

		base = func(r *http.Request) (*http.Response, error) {
			_, stop := context.WithCancel(r.Context()) // asks for Done
			defer stop()
			<-r.Context().Done()
			require.Equal(t, context.DeadlineExceeded, r.Context().Err())
			require.EqualError(t, context.Cause(r.Context()), "resilience: payments: timed out after 10s")
			return nil, context.Cause(r.Context())
		}
		_, err = newClient(base, resiliencehttp.ClientConfig{}).send(t.Context(), "POST", "a")
		require.EqualError(t, err, `Post "http://a/": resilience: payments: timed out after 10s`)
	})
}

// A host that answers slowly is found well again by a probe that takes longer than the breaker is open.
func TestProbeMayTakeAsLongAsAnAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		down := true
		c := newClient(roundTripper(func(r *http.Request) (*http.Response, error) {
			if down {
				return nil, syscall.ECONNREFUSED
			}
			time.Sleep(8 * time.Second)
			return reply(r, 200, "late"), nil
		}), resiliencehttp.ClientConfig{Retry: resiliencehttp.Disabled})
		for range 20 {
			_, err := c.get(t.Context(), "a")
			require.ErrorIs(t, err, syscall.ECONNREFUSED)
		}
		require.Equal(t, breaker.Open, c.state("a"))
		down = false
		time.Sleep(time.Second)
		body, err := c.get(t.Context(), "a")
		require.NoError(t, err)
		require.Equal(t, "late", body)
		require.Equal(t, breaker.Closed, c.state("a"))
	})
}

// One process sends about one request a second to a host that is down.
func TestDeadHostGetsOneRequestASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.suffer("a", faults.Plan{Kind: faults.Refuse})
		c := newClient(w, resiliencehttp.ClientConfig{})
		for range 600 {
			_, err := c.get(t.Context(), "a")
			require.Error(t, err)
			time.Sleep(100 * time.Millisecond)
		}
		require.LessOrEqual(t, w.sent("a"), 90)
		w.suffer("a")
		time.Sleep(time.Second)
		_, err := c.get(t.Context(), "a")
		require.NoError(t, err, "it is open for less than a second")
	})
}
