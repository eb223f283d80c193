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
//     closes the body. A short one is read before the caller has it.
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
)

// A Transport is an [http.RoundTripper] that sends each request through its
// Middleware. What the policies see as one call is one attempt: a request, its
// response, and the reading of that response's body.
//
// A time-out in the chain therefore covers all of that: connecting, sending, the
// wait for the response, and the time which the caller takes to read the body.
// An attempt ends when the body has been read to its end or closed, or its ctx
// has ended, and not before; only then are its ctx canceled and its slot in a
// bulkhead given back. A body that breaks off is a failure to the policies, but is
// not retried: the caller gets what there is of it, and then the error. Nor is
// anything else retried whose error is not Retryable: a failed response to a POST
// goes to the caller at once, and is a failure to the policies when its body ends.
//
// A body of at most 4 KiB, by its Content-Length, is read before RoundTrip returns,
// and its slot given back, unless the request has a body, too. What lives long, such
// as a stream of events or the connection after 101 Switching Protocols (which no
// time-out ends), holds its slot as long; give it a Transport of its own.
//
// A failed response that may be followed by another attempt is read up to 64 KiB
// and closed before the policies see its [*StatusError], so that its connection
// serves again; of a longer one the connection is kept until the next attempt.
// If no other response follows, it is what RoundTrip returns, with a nil error
// and its body whole and open. Its slot has been given back by then.
//
// The policies and Base run on a goroutine of the request's own, which ends with
// the attempt: when the body is read to its end or closed, or the request's ctx
// ends, so that one of these must happen. A panic or [runtime.Goexit] in them
// passes to the caller of RoundTrip, or of the body's Read or Close; the stack
// that it came from does not.
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
	// once, to the first request, and serves them all. Nil means that Base gets
	// the requests as they are.
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
	wrapped  resilience.Func
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
	t.wrapOnce.Do(func() { t.wrapped = t.Middleware(attempt) })
	c := newCall(t, req)
	defer c.body.close()
	go c.run()
	<-c.turn
	if c.handed {
		return c.response, nil
	}
	return c.result()
}

// CloseIdleConnections forwards to Base, as [http.Client.CloseIdleConnections]
// forwards to its transport.
func (t *Transport) CloseIdleConnections() {
	if base, ok := t.base().(interface{ CloseIdleConnections() }); ok {
		base.CloseIdleConnections()
	}
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
	errNoCall     = errors.New("resiliencehttp: the Middleware lost the request's ctx")
)
