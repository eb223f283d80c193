package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

// newPlain returns an ordinary client with a sensible time-out.
func newPlain(base http.RoundTripper) *http.Client {
	return &http.Client{Transport: base, Timeout: time.Second}
}

// newResilient returns a client whose transport carries the policies, in the
// order that the README explains, and falls back on the last answer known.
func newResilient(base http.RoundTripper, onChange func(breaker.Change)) *http.Client {
	retries := retry.New(retry.Config{
		Name:       "products",
		MaxElapsed: 600 * time.Millisecond,
		Backoff:    retry.Exponential(20*time.Millisecond, 200*time.Millisecond),
		Budget:     retry.NewBudget(retry.BudgetConfig{}),
	})
	circuit := breaker.New(breaker.Config{
		Name:        "products",
		FailureRate: 0.6,
		MinCalls:    20,
		Window:      time.Second,
		OpenFor:     200 * time.Millisecond,
		MaxOpenFor:  800 * time.Millisecond,
		OnChange:    func(_ context.Context, c breaker.Change) { onChange(c) },
	})
	rate := throttle.New(throttle.Config{Name: "products", Rate: 300, Burst: 60})
	slots := bulkhead.New(bulkhead.Config{Name: "products", Limit: 24, Queue: 24, MaxWait: 100 * time.Millisecond})

	return &http.Client{
		Transport: &lastKnown{
			next: &resiliencehttp.Transport{
				Base: base,
				Middleware: resilience.Chain(
					retries.Wrap, circuit.Wrap, rate.Wrap, slots.Wrap, resilience.Timeout(250*time.Millisecond)),
			},
			answers: map[string][]byte{},
		},
		Timeout: time.Second,
	}
}

// lastKnown remembers the last good answer for each path and gives it again
// where there is no new one, marked with a Cache-Status (RFC 9211).
type lastKnown struct {
	next    http.RoundTripper
	mu      sync.Mutex
	answers map[string][]byte
}

func (l *lastKnown) RoundTrip(req *http.Request) (*http.Response, error) {
	var res *http.Response
	fetch := func(ctx context.Context) error {
		fresh, err := l.next.RoundTrip(req)
		if err != nil {
			return err
		}
		defer fresh.Body.Close()
		body, err := io.ReadAll(io.LimitReader(fresh.Body, 1<<20))
		if err != nil {
			return err
		}
		if fresh.StatusCode != http.StatusOK {
			return errors.New(fresh.Status)
		}
		l.mu.Lock()
		l.answers[req.URL.Path] = body
		l.mu.Unlock()
		fresh.Body = io.NopCloser(bytes.NewReader(body))
		res = fresh
		return nil
	}
	recall := func(_ context.Context, err error) error {
		l.mu.Lock()
		body, known := l.answers[req.URL.Path]
		l.mu.Unlock()
		if !known {
			return err
		}
		res = &http.Response{
			Status: "200 OK", StatusCode: http.StatusOK,
			Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
			Header:        http.Header{"Cache-Status": {"last-known; hit"}},
			Body:          io.NopCloser(bytes.NewReader(body)),
			ContentLength: int64(len(body)),
			Request:       req,
		}
		return nil
	}
	err := resilience.Fallback(recall)(fetch)(req.Context())
	return res, err
}

// wire is the last stop before the network. It counts what is in flight, and
// tells the backend which attempt this is, so that each has luck of its own.
type wire struct {
	base http.RoundTripper
	side *side
}

func (w wire) RoundTrip(req *http.Request) (*http.Response, error) {
	if n, ok := retry.AttemptFrom(req.Context()); ok {
		req = req.Clone(req.Context())
		req.Header.Set("Attempt", strconv.Itoa(n))
	}
	w.side.enterFlight()
	defer w.side.leaveFlight()
	return w.base.RoundTrip(req)
}
