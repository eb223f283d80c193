package main

import (
	"bytes"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

// newPlain returns a client that has a timeout, but no policies.
func newPlain(base http.RoundTripper) *http.Client {
	return &http.Client{Transport: base, Timeout: time.Second}
}

// newResilient returns a client whose transport has the policies in the order that the README recommends. If a request
// fails, the transport returns the last known answer. newResilient adds the policies to reg.
func newResilient(base http.RoundTripper, reg *registry.Registry) *http.Client {
	budget := retry.NewBudget(retry.BudgetConfig{Name: "products"})
	retries := retry.New(retry.Config{
		Name:    "products",
		Backoff: retry.Exponential(20*time.Millisecond, 200*time.Millisecond),
		Budget:  budget,
	})
	circuit := breaker.New(breaker.Config{
		Name:        "products",
		FailureRate: 0.6,
		MinCalls:    20,
		Window:      time.Second,
		OpenFor:     200 * time.Millisecond,
		MaxOpenFor:  800 * time.Millisecond,
	})
	rate := throttle.New(throttle.Config{Name: "products", Rate: 300, Burst: 60})
	slots := bulkhead.New(bulkhead.Config{Name: "products", Limit: 24, Queue: 24, MaxWait: 100 * time.Millisecond})
	reg.MustAdd(budget, retries, circuit, rate, slots)

	transport := &resiliencehttp.Transport{Base: base, Middleware: resilience.Chain(
		retries.Wrap, circuit.Wrap, rate.Wrap, slots.Wrap, resilience.Timeout(250*time.Millisecond))}
	return &http.Client{Transport: &lastKnown{next: transport}, Timeout: time.Second}
}

// A lastKnown is a transport that returns the last good response for a URL if a request fails. All callers get the same
// response.
type lastKnown struct {
	next http.RoundTripper
	good sync.Map // the body ([]byte) of the last good response, by URL
}

func (l *lastKnown) RoundTrip(req *http.Request) (*http.Response, error) {
	url := req.URL.String()
	resp, err := l.next.RoundTrip(req)
	if err == nil && resp.StatusCode == http.StatusOK {
		defer resp.Body.Close()
		var body []byte
		if body, err = io.ReadAll(resp.Body); err == nil {
			l.good.Store(url, body)
			resp.Body = io.NopCloser(bytes.NewReader(body))
			return resp, nil
		}
	}
	known, ok := l.good.Load(url)
	if !ok {
		return resp, err
	}
	if resp != nil {
		_ = resp.Body.Close()
	}
	return &http.Response{
		StatusCode: http.StatusOK, Header: http.Header{"Cache-Status": {"last-known; hit"}}, Request: req,
		Body: io.NopCloser(bytes.NewReader(known.([]byte))), ContentLength: int64(len(known.([]byte))),
	}, nil
}
