package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/throttle"
)

const (
	estimate = 60        // the maximum number of tokens of an answer
	monthly  = 1_000_000 // tokens per month of each tenant
)

// A gateway passes the requests of tenants to the first provider that can serve them.
type gateway struct {
	limits *throttle.Limits
	months *throttle.Group[string]
	client *http.Client

	mu      sync.Mutex
	reserve map[string]int64 // sum of the reserved tokens, by tenant
}

type tenantKey struct{}

func tenantOf(ctx context.Context) string { return ctx.Value(tenantKey{}).(string) }

func newGateway(providers ...string) *gateway {
	perCall := func(ctx context.Context) int {
		if ctx.Value(tenantKey{}) == nil {
			return 0 // not a request, but a query for the remaining tokens; see charged
		}
		return estimate
	}
	requests := throttle.NewGroup(throttle.GroupConfig[string]{
		Config: throttle.Config{Name: "requests", Rate: 40, Burst: 40},
	})
	tokens := throttle.NewGroup(throttle.GroupConfig[string]{
		Config: throttle.Config{Name: "tokens", Rate: 2000, Burst: 4000, Cost: perCall},
	})
	months := throttle.NewGroup(throttle.GroupConfig[string]{
		Config: throttle.Config{
			Name: "month", Quotas: []throttle.Quota{{N: monthly, Window: throttle.Window{Per: throttle.Month}}}, Cost: perCall,
		},
	})
	var transports []http.RoundTripper
	for i, address := range providers {
		transports = append(transports, transport(fmt.Sprint(i+1), address))
	}
	return &gateway{
		limits:  throttle.All(requests.For(tenantOf), tokens.For(tenantOf), months.For(tenantOf)),
		months:  months,
		client:  &http.Client{Transport: resiliencehttp.Failover(transports...)},
		reserve: map[string]int64{},
	}
}

// transport sends requests to one provider, under the provider's own policies.
func transport(name, address string) http.RoundTripper {
	circuit := breaker.New(breaker.Config{
		Name: name, FailureRate: 0.5, MinCalls: 10, Window: time.Second, OpenFor: 300 * time.Millisecond,
	})
	slots := bulkhead.New(bulkhead.Config{Name: name, Limit: 100})
	server, err := url.Parse(address)
	if err != nil {
		panic(err)
	}
	return &resiliencehttp.Transport{
		Middleware:            resilience.Chain(cooldown(circuit), circuit.Wrap, slots.Wrap),
		Judge:                 judge,
		ResponseHeaderTimeout: time.Second, // set it higher for a model that thinks longer
		HoldBody:              true,
		Idle:                  time.Second,
		Replayable:            func(*http.Request) bool { return true }, // until the caller has read a byte
		Prepare: func(req *http.Request) error {
			req.URL.Scheme, req.URL.Host, req.Host = server.Scheme, server.Host, ""
			req.Header.Set("Provider", name) // instead of an API key
			return nil
		},
	}
}

// cooldown is middleware for responses with a Retry-After, such as 429. It opens the provider's breaker for the time in
// Retry-After, because this time applies to all requests to the provider, not only to the request with this response.
// Trip may also shorten the open time. So cooldown does not call Trip if an earlier response asked for a longer time.
func cooldown(circuit *breaker.Breaker) resilience.Middleware {
	return func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error {
			err := next(ctx)
			if after := resilience.RetryAfter(err); after > 0 && !resilience.Refused(err) && after > circuit.Stats().OpenLeft {
				circuit.Trip(err, after)
			}
			return err
		}
	}
}

// judge returns an error for a response whose first event is an error. The request then fails. The tenant has not
// received anything yet, so another provider can serve the request.
func judge(resp *http.Response, ahead *resiliencehttp.Ahead) error {
	err := resiliencehttp.DefaultJudge(resp, ahead)
	if err != nil || !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		return err
	}
	event, data, err := ahead.Event()
	if err == nil && event == "error" {
		err = resiliencehttp.Resend(errors.New(data))
	}
	return err
}

// ServeHTTP reserves the maximum number of tokens of an answer, and sends the request to a provider. Then it passes the
// stream to the tenant, and charges the tokens that were passed on, even if the stream is cut off.
func (g *gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	tenant := r.Header.Get("Tenant")
	ctx := context.WithValue(r.Context(), tenantKey{}, tenant)
	reservation, err := g.limits.Reserve(ctx)
	if err != nil {
		resiliencehttp.Server{}.Refuse(w, r, err)
		return
	}
	g.mu.Lock()
	g.reserve[tenant] += estimate
	g.mu.Unlock()
	used := 0
	defer func() { // the limit of requests is not refunded, even if nothing was sent
		reservation.SettleEach(map[string]int{"tokens": used, "month": used})
	}()

	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://providers/answers", r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	resp, err := g.client.Do(req)
	if err != nil {
		if !(resiliencehttp.Server{}).Refuse(w, r, err) {
			http.Error(w, "no provider has an answer", http.StatusBadGateway)
		}
		return
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		http.Error(w, "no provider has an answer", http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Provider", resp.Header.Get("Provider"))
	if used, err = pass(w, resp.Body); err != nil {
		resiliencehttp.ReportFailure(resp, err) // has no effect if the Transport already knows of the error
		_, _ = io.WriteString(w, "event: error\ndata: the answer was cut off\n\n")
	}
}

// pass copies a stream of events to w and returns the number of words, each of which is a token.
func pass(w io.Writer, body io.Reader) (words int, err error) {
	flush := http.NewResponseController(w.(http.ResponseWriter))
	lines := bufio.NewScanner(body)
	event := "message"
	for lines.Scan() {
		line := lines.Text()
		if name, ok := strings.CutPrefix(line, "event: "); ok {
			event = name
		}
		if event == "error" { // the stream failed after its start
			return words, errors.New("an error in a stream")
		}
		if _, err := io.WriteString(w, line+"\n"); err != nil {
			return words, nil // the tenant has disconnected
		}
		if line == "data: word" {
			words++
		}
		if line == "" {
			event = "message"
			_ = flush.Flush()
		}
	}
	return words, lines.Err()
}

func (g *gateway) reserved(tenant string) int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.reserve[tenant]
}

// charged returns the number of tokens that were charged to a tenant's monthly quota.
func (g *gateway) charged(tenant string) int64 {
	left, err := g.months.Admit(context.Background(), tenant) // takes no tokens: see perCall
	if err != nil {
		panic(err)
	}
	return int64(left.Limit - left.Remaining)
}
