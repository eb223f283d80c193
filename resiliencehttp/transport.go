// Package resiliencehttp brings the policies of this module to net/http: a
// client transport, server middleware and a health endpoint.
//
//	client := &http.Client{
//		Transport: &resiliencehttp.Transport{
//			Middleware: resilience.Chain(
//				retries.Wrap,                      // *retry.Retrier
//				circuit.Wrap,                      // *breaker.Breaker
//				slots.Wrap,                        // *bulkhead.Bulkhead
//				resilience.Timeout(2*time.Second), // of each attempt
//			),
//		},
//	}
//
//	limit := resiliencehttp.ThrottleBy(tenants, resiliencehttp.ClientIP())
//	http.ListenAndServe(addr, limit(resiliencehttp.Bulkhead(slots)(handler)))
//
// What a user of [Transport] must know:
//
//   - Only what may be repeated is repeated: GET, HEAD, OPTIONS, TRACE, PUT and
//     DELETE (RFC 9110, section 9.2.2) and what carries an Idempotency-Key, with
//     a body that can be sent again. A POST is retried only if it was certainly
//     never sent.
//   - A failed status (429, 502, 503, 504, and 500 where the request may be
//     repeated) is an error for the policies and a response for the caller, who
//     gets the last one, its body open. A retrier heeds its Retry-After.
//   - An attempt lasts until its response's body has been read to its end or
//     closed. So long does it hold its place in a bulkhead, and so long must a
//     time-out within the chain allow for. As always with net/http, the caller
//     closes the body.
//
// The server middleware answers 429 where a limit refuses and 503 where there is
// no capacity, with Retry-After and a problem document (RFC 9457). Nothing that
// a request says of itself changes how it is treated: not its priority, and not
// its address either, unless a trusted proxy says so.
package resiliencehttp

import (
	"errors"
	"net/http"
	"sync"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
)

// A Transport is an [http.RoundTripper] that sends each request through its
// Middleware. What the policies see as one call is one attempt: a request and its
// response.
//
// What the policies of this module hold for an attempt that succeeds they hold until
// the response's body has been read to its end or closed, or the ctx has ended, so
// that one of these must happen: a bulkhead its slot and the measuring of its
// latency, and a breaker its judgment. A time-out (resilience.Timeout, and the
// AttemptTimeout of a retrier) covers all of it: connecting, sending, the wait for
// the response, and the time which the caller takes to read the body. A body that
// breaks off is a failure to a breaker, but is not retried: the caller gets what
// there is of it, and then the error.
//
// Other middleware is done with an attempt when the response is there. The body is
// not cut off by the end of a ctx which that cancels when it returns.
//
// A failed response is a failure without its body, and holds no slot after that. One
// that may be followed by another attempt is read, up to 64 KiB, and closed before
// the policies see its [*StatusError], so that its connection serves again; of a
// longer one the connection is kept until the next attempt. If no other response
// follows, it is what RoundTrip returns, with a nil error and its body whole and
// open; no time-out covers what is left to read of it then.
//
// What lives long, such as a stream of events or the connection after 101 Switching
// Protocols (which no time-out ends), holds its slot as long; give it a Transport of
// its own.
//
// The policies and Base run on the caller's goroutine, and what is held is given back
// within the body's Read or Close. Only where ctx ends first is it given back on a
// goroutine beside them, with the hooks that this calls: nobody recovers their panics.
//
// The pattern's sources are those of the packages that the policies come from;
// what may be repeated, and what Retry-After means, is RFC 9110.
//
// The fields are not to be changed once RoundTrip has been called. A Transport
// is safe for concurrent use, and meant to be built once and shared.
type Transport struct {
	// Base sends the requests. Nil means [http.DefaultTransport].
	Base http.RoundTripper

	// Middleware runs each request; usually a [resilience.Chain]. It is applied
	// once, to the first request, and serves them all. It may call what it wraps
	// more than once, but one call after the other, and none after it has returned.
	// Nil means that Base gets the requests as they are.
	Middleware resilience.Middleware

	// Classify returns the error that the policies see in place of a response,
	// nil if there is nothing wrong with it. It must not read the body. If its
	// error has a method Retryable() bool that returns false, the response goes to
	// the caller without another attempt. Nil means [DefaultClassify], and
	// Replayable where that asks whether the request may be sent again.
	Classify func(*http.Response) error

	// Replayable reports whether a request may be sent more than once without
	// doing more than it does once. Nil means by the method, or by an
	// Idempotency-Key or X-Idempotency-Key field.
	Replayable func(*http.Request) bool

	// MaxBuffer is the number of bytes up to which a request body that has no
	// GetBody is read into memory before it is sent, so that it can be sent
	// again. A longer body is sent once. Zero or less means that none are kept.
	MaxBuffer int64

	wrapOnce sync.Once
	wrapped  func() resilience.Func // which panics each time if Middleware does
}

// RoundTrip sends req through the policies, and returns the response that they
// accepted, or else the last one received. An error is what the policies made of
// the error of Base, or a refusal of their own, or the end of req's ctx. If it is
// due to a time-out, however deep, its Timeout() bool returns true, and so does
// that of the [net/url.Error] that an http.Client makes of it.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	if t.Middleware == nil {
		return t.base().RoundTrip(req)
	}
	if err := malformed(req); err != nil {
		closeBody(req)
		return nil, err
	}
	if ctx := req.Context(); ctx.Err() != nil {
		closeBody(req)
		return nil, withTimeout(ended.Error(ctx))
	}
	c := &call{Context: req.Context(), t: t, req: req, body: requestBody{req: req, max: t.MaxBuffer}}
	returned := false
	defer func() {
		c.body.close()
		if !returned {
			c.crash()
		}
	}()
	t.wrapOnce.Do(func() {
		linger.Use()
		t.wrapped = sync.OnceValue(func() resilience.Func { return t.Middleware(attempt) })
	})
	c.replayable = t.replayable(req)
	err := t.wrapped()(c)
	returned = true
	return c.result(err)
}

// CloseIdleConnections forwards to Base, as [http.Client.CloseIdleConnections]
// forwards to its transport.
func (t *Transport) CloseIdleConnections() {
	if base, ok := t.base().(interface{ CloseIdleConnections() }); ok {
		base.CloseIdleConnections()
	}
}

func (t *Transport) replayable(req *http.Request) bool {
	if t.Replayable != nil {
		return t.Replayable(req)
	}
	return replayable(req)
}

func (t *Transport) base() http.RoundTripper {
	if t.Base != nil {
		return t.Base
	}
	return http.DefaultTransport
}

// malformed returns what no transport could send, and no policy should count.
func malformed(req *http.Request) error {
	switch {
	case req.URL == nil:
		return errors.New("resiliencehttp: the request has no URL")
	case req.Header == nil:
		return errors.New("resiliencehttp: the request has no Header")
	}
	return nil
}

func closeBody(req *http.Request) {
	if req.Body != nil {
		_ = req.Body.Close()
	}
}

var (
	errNoResponse = errors.New("resiliencehttp: the Middleware returned neither an error nor a response")
	errNothing    = errors.New("resiliencehttp: Base returned neither an error nor a response")
	errNoCall     = errors.New("resiliencehttp: the Middleware lost the request's ctx")
)
