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
//     DELETE (RFC 9110, section 9.2.2) and requests with an Idempotency-Key, with
//     a body that can be sent again. A POST is retried only if it was certainly
//     never sent.
//   - A failed status (500, 502, 503, 504) is an error for the policies and a
//     response for the caller, who gets the last one, its body open. So is a status
//     that asks for the request again later (408, 425, 429), but not as a failure of
//     the server: see [DefaultClassify]. A retrier heeds Retry-After.
//   - A request that is wrong in itself says nothing against the server, and neither
//     does a caller that leaves. A Timeout of the http.Client is the deadline of the
//     caller.
//   - A bulkhead's slot is held, and a time-out covers the response, until its body
//     has been read to its end or closed. As always with net/http, the caller closes
//     the body.
//
// The server middleware answers 429 where a limit refuses and 503 where there is
// no capacity, with Retry-After and a problem document (RFC 9457). Nothing that
// a request says of itself changes how it is treated: not its priority, and not
// its address either, unless a trusted proxy says so.
package resiliencehttp

import (
	"context"
	"errors"
	"net/http"
	"sync"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/internal/ended"
)

// A Transport is an [http.RoundTripper] that sends each request through its
// Middleware. One call of the policies is one attempt: a request and its response.
//
// Policies judge an attempt when its response is there, by its status. A body that
// breaks off later is one more failure for a breaker, also where a time-out or the
// caller's deadline passes while the caller waits for more of it. It is not retried:
// the caller gets what there is of it, and then the error. A caller that is slow to
// read, or that leaves, says nothing about the server.
//
// A bulkhead of this module holds the slot of an attempt that succeeds until the
// response's body has been read to its end or closed, or ctx has ended. One of these
// must happen: a body that is never closed shows only as bulkhead.ErrFull, and in how
// long the longest slot has been held. A time-out (resilience.Timeout, and the
// AttemptTimeout of a retrier) covers all of it: connecting, sending, the wait for the
// response, and the time which the caller takes to read the body. Other middleware is
// done with an attempt when the response is there. Canceling a ctx that it derived, on
// return, does not cut off the body.
//
// A failed response holds no slot. One that may be followed by another attempt is read
// ahead, up to 64 KiB and for at most a second, and closed before the policies see its
// [*StatusError], so that its connection serves again. One that is longer, or slower,
// keeps its connection until the next attempt. If no other response follows, it is
// what RoundTrip returns, with a nil error and its body whole and open; a time-out of
// the attempt goes on from where it was.
//
// A request that no transport can send (a field that cannot be written, an invalid
// method, a URL without a host, a ContentLength without a Body) returns an error
// before the policies see it. A body that fails while it is sent, or whose length is
// not its ContentLength, is an error that policies take for an answer
// ([resilience.Answered]): the server is not to blame.
//
// A long-lived response, such as a stream of events or the connection after 101
// Switching Protocols (which no time-out ends), holds its slot as long; give it a
// Transport of its own.
//
// The policies and Base run on the caller's goroutine, and what is held is given back
// within the body's Read or Close. Only where ctx ends first is it given back on a
// goroutine of its own, with the hooks that this calls: nobody recovers their panics.
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
	// error is not [resilience.Retryable], the response goes to the caller without
	// another attempt. It may call [DefaultClassify], which knows of resp.Request
	// whether that may be sent again. Nil means DefaultClassify.
	Classify func(*http.Response) error

	// Replayable reports whether a request may be sent more than once without
	// doing more than it does once. Nil means by the method, or by an
	// Idempotency-Key or X-Idempotency-Key field.
	Replayable func(*http.Request) bool

	// MaxBuffer is the number of bytes up to which the body of a Replayable request
	// that has no GetBody is read into memory before it is sent, so that it can be
	// sent again. A longer body is sent once. The caller must not wait for the
	// response before it provides the body. Zero or less means that none are kept.
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
	if err := unsendable(req); err != nil {
		closeBody(req)
		return nil, &requestError{err}
	}
	if ctx := req.Context(); ctx.Err() != nil {
		closeBody(req)
		return nil, withTimeout(ended.Error(ctx))
	}
	c := &call{Context: req.Context(), t: t, req: req, body: newRequestBody(req, t.MaxBuffer)}
	if canceled(req) != nil {
		c.Context, c.cancel = context.WithCancel(c.Context)
		defer c.cancel()
	}
	returned := false
	defer func() {
		c.body.close()
		if !returned {
			c.crash()
		}
	}()
	t.wrapOnce.Do(func() {
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
