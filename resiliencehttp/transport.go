// Package resiliencehttp provides the policies of this module for net/http: a client transport, server middleware and
// a health endpoint.
//
//	client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{Name: "payments"})
//
// The client that [NewClient] returns has a breaker, a bulkhead and a retry budget for each host, and limits
// the time of each request. To choose the policies yourself, use a [Transport]:
//
//	client := &http.Client{
//		Transport: &resiliencehttp.Transport{
//			Middleware: resilience.Chain(
//				retries.Wrap,                      // *retry.Retrier
//				users.Wrap,                        // *breaker.Breaker
//				slots.Wrap,                        // *bulkhead.Bulkhead
//				resilience.Timeout(2*time.Second), // limits each attempt
//			),
//		},
//	}
//
// [Server] provides middleware that limits the rate of requests and the number of concurrent requests. A
// client can choose neither the priority of its requests nor the address by which its requests are limited:
//
//	server := resiliencehttp.Server{}
//	limit := server.ThrottleBy(tenants, resiliencehttp.ClientIP())
//	http.ListenAndServe(addr, limit(server.Bulkhead(slots)(handler)))
//
// RFC 9110 defines the header field Retry-After, and which requests may be repeated.
package resiliencehttp

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/hedge"
	"github.com/go-resilience/resilience/internal/ended"
)

// A Transport is an [http.RoundTripper] that sends each request through its Middleware, which holds the
// policies. The policies call an innermost function, which sends the request once and waits for the response.
// Each call to the innermost function is an attempt.
//
// With two exceptions, policies can retry only requests that may be repeated. A request may be repeated if its method
// is GET, HEAD, OPTIONS, TRACE, PUT or DELETE (RFC 9110, section 9.2.2), or if it has a header field Idempotency-Key
// or X-Idempotency-Key. A request with a body is retried only if the body is rewindable: the request has a GetBody,
// or MaxBuffer allows a copy of the body. The exceptions: a request that may not be repeated, such as a POST, is
// retried if it was certainly never sent, or if Judge returned [Resend].
//
// When an attempt has received a response, the function Judge decides, usually by the status, whether the
// attempt has failed. If the attempt has failed, the policies see an error instead of the response. The caller
// receives the response of the last attempt with its body open, even if that attempt failed. The Timeout of an
// http.Client acts as the caller's deadline. The deprecated field Cancel of a request is ignored.
//
// A request may fail because the request itself is invalid: for example, it has an invalid header, or its
// body cannot be read. An invalid request is neither a success nor a failure of the host, so the policies see
// a refusal. An invalid request is not retried. For the caller, and for policies around the http.Client, the
// error of an invalid request is an answer: see [resilience.Answered]. There is one exception: if Prepare or
// GetBody fails only in a later attempt, a retrier returns the failure of the earlier attempts.
//
// The body of a successful response may still fail: the connection breaks before the body's end, or the
// caller waits for data until Idle or a timeout expires. If the body fails, a breaker replaces the attempt's
// success by a failure, but the request is not retried. If the caller cancels, or reads too slowly, policies
// do not count the attempt as a failure of the server.
//
// After a successful attempt, the bulkhead still holds the slot, and timeouts still apply. Both end when the
// caller has read the body to its end, when the caller closes the body, or when ctx is done. The caller must
// therefore read each body to its end or close it. If bodies are never closed, their slots are never
// released, and later calls fail with bulkhead.ErrFull. Your own middleware can use [resilience.AtEnd] to
// hold a resource until the body ends.
//
// A stream of events, or the connection after 101 Switching Protocols, holds its slot until the stream or the
// connection ends. No timeout ends a connection after 101 Switching Protocols. Use a separate Transport for streams.
//
// An attempt ends when its response ends. If the request's body is still being uploaded when the response ends, the
// upload is cut off. net/http itself also cuts off the upload: over HTTP/1.1 always, and over HTTP/2 if the status is
// 300 or above.
//
// A failed response holds no slot while the caller reads its body. If another attempt may follow, the Transport
// itself reads the body of the failed response, because otherwise net/http could not reuse the connection. The
// Transport reads up to 64 KiB, for at most 1 second. During this time, the attempt holds its slot.
//
// The policies and Base run on the caller's goroutine, except for hedged requests (see Hedge). Slots are
// released during the last Read of the body, or during its Close. If ctx is done before the body ends, slots
// are released on another goroutine. If an observer of a policy panics on that other goroutine, the program
// ends.
//
// Do not change the fields of a Transport after the first call to RoundTrip. A Transport is safe for
// concurrent use; create it once and share it.
type Transport struct {
	// Base sends the requests. Nil means the value that [http.DefaultTransport] has at the first request. There
	// is one exception: the program may have set http.DefaultTransport to this Transport, or to a RoundTripper
	// that forwards to this Transport. Nil then means the value that http.DefaultTransport had when the program
	// started.
	//
	// The network may silently drop a connection between two requests. Therefore, if an attempt on a reused
	// connection receives nothing and a timeout of this module expires, the Transport abandons the connection. The
	// Transport also does so if the caller's deadline expires instead, but only if the attempt has had the connection
	// for at least 0.9 seconds. If Base is an [http.Transport], the next attempt dials a new connection. If the
	// abandoned connection uses HTTP/2, other requests on it can finish. For any other Base, the Transport calls
	// Base's method CloseIdleConnections. The Transport then also sets [http.Request.Close] in the request's next
	// attempt. Over HTTP/2, an attempt with Close set is the last attempt on its connection.
	Base http.RoundTripper

	// Middleware holds the policies, usually a [resilience.Chain]. The Transport applies the Middleware once, at
	// the first request, to a Func that makes one attempt. Middleware may call this Func several times, but not
	// concurrently, and not after Middleware itself has returned. Nil means no policies.
	Middleware resilience.Middleware

	// Judge decides whether an attempt that received a response has failed. Judge returns nil for a success, or
	// the error that the policies see instead of the response. The policies classify Judge's error by its
	// optional methods; see package [resilience]. If Judge's error is not [resilience.Retryable], no other
	// attempt follows. If Judge marks the error with [Resend], the request may be repeated even if its method
	// forbids that.
	//
	// If Judge needs the body, it must read from the Ahead, not from the response's Body. If Judge rejects a
	// response whose status is below 400, and no attempts remain, the caller receives the error and no
	// response. Nil means [DefaultJudge].
	Judge func(*http.Response, *Ahead) error

	// RetryAfter, if not nil, returns the time to wait before the server accepts another request. RetryAfter can
	// read the time from a header field such as retry-after-ms. RetryAfter is called for responses that
	// [DefaultJudge] treats as a failure. If RetryAfter returns zero or less, the header field Retry-After is
	// used.
	RetryAfter func(*http.Response) time.Duration

	// ResponseHeaderTimeout is the maximum time to wait for the header of the response after the whole request
	// has been written. Separately, ResponseHeaderTimeout limits the time to dial a connection. The time to upload the
	// request's body does not count, and neither does a wait for a free connection of Base. If the header does not
	// arrive in time, the attempt fails and counts as a failure of the server. Another attempt may follow. Zero or less
	// means no limit.
	//
	// Some RoundTrippers do not call the hooks of [net/http/httptrace]. With such a Base, the time starts when
	// the request's body has been read to its end. The time then includes dialing.
	ResponseHeaderTimeout time.Duration

	// HoldBody delays a response until the first byte of its body, or the end of the body, has arrived.
	// ResponseHeaderTimeout includes the wait for the first byte of the body. With HoldBody, a gateway can retry
	// a request if the server sends a header but no body. A stream is delayed until its first event.
	HoldBody bool

	// Idle is the maximum time that a Read of the response's body waits for data. The time between two Reads
	// does not count. If the server sends nothing for longer than Idle, Read fails, and the attempt counts as a
	// failure of the server. Idle does not apply after 101 Switching Protocols. Zero or less means no limit.
	Idle time.Duration

	// Prepare, if not nil, is called before each attempt. Each attempt sends a copy of the request, and Prepare
	// receives this copy. Prepare may change the copy, for example to sign it. If Prepare replaces the Body, it
	// must close the old Body. If Prepare returns an error, the request counts as invalid and is not retried. If
	// the copy's ctx is done by then, the error is not an answer for the caller. If Prepare changes the server
	// that the request is sent to, see [HostOf].
	Prepare func(*http.Request) error

	// Hedge, if not nil, sends a second copy of a request if the response takes too long. Hedge applies only to
	// requests that may be repeated (see Replayable). The caller receives the first response that is not a
	// failure. The other copy is canceled, and its response is closed. Each copy passes through the Middleware,
	// the second copy on a separate goroutine. The Hedger needs no Discard. A request is never hedged if it has a
	// body without a GetBody, if it has a Trailer, or if it has the header field Upgrade.
	Hedge *hedge.Hedger[*http.Response]

	// HedgeIf, if not nil, reports whether a request may be hedged. Nil excludes only requests with an Idempotency-Key
	// or X-Idempotency-Key, because both copies would have the same key. If the server is still processing the first
	// copy, it would respond to the second copy with 409. The caller would then receive the 409.
	HedgeIf func(*http.Request) bool

	// Replayable reports whether a request may be repeated. It may be repeated if sending it more than once has
	// the same effect as sending it once. Nil means that the method and the header fields Idempotency-Key and
	// X-Idempotency-Key decide, as described at [Transport].
	Replayable func(*http.Request) bool

	// MaxBuffer is the maximum size, in bytes, of a request body that the Transport copies while the body is
	// sent. The Transport copies a body only if the request has no GetBody, and sends the copy in the next
	// attempt. The Transport copies only the bytes that it sends, and does not read ahead. If the body is a pipe
	// or depends on the response, reading ahead could cause a deadlock. Zero or less means that no body is
	// copied.
	MaxBuffer int64

	once        sync.Once
	sender      http.RoundTripper      // used instead of a nil Base
	mayLeadBack bool                   // sender may forward to this Transport: it is not an *http.Transport
	wrapped     func() resilience.Func // returns the guarded makeAttempt; panics each time if Middleware panicked
	closing     atomic.Bool            // CloseIdleConnections is running
	abandoned   sync.Map               // maps net.Conn to chan struct{}, which is closed when abandon has returned
	lastHeard   lastHeard              // times at which the connections of hedged requests last had a response

	// The fields below are the causes with which time limits cancel an attempt. A cause is nil if its limit
	// is not set. Only NewTransport sets passed and readingPassed. If both are set, passed limits the request
	// until the policies have returned, and readingPassed limits the reading of the response after that. If
	// only passed is set, it limits both together.
	passed, readingPassed, headerPassed, idlePassed *resilience.TimeoutError
	name                                            string
	idleByDefault                                   bool // Idle is the default and exempts streams whose sender may pause
}

// RoundTrip sends req through the policies. RoundTrip returns the response of the successful attempt. If no
// attempt was successful, RoundTrip returns the response of the last attempt. If there is no such response,
// RoundTrip returns an error. The error comes from Base, from a policy that refused the request, or from
// req's ctx. If the error is or wraps a timeout, its method Timeout returns true.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, _, err := t.roundTrip(req)
	return resp, err
}

// roundTrip is like RoundTrip. If resp is a failed response, it also returns the error that the policies saw
// instead.
func (t *Transport) roundTrip(req *http.Request) (resp *http.Response, failure, err error) {
	base := t.base()
	switch {
	case t.mayLeadBack && req.Context().Value(t) != nil:
		// t.sender has forwarded this request to t, and would do so again without end.
		resp, err = firstTransport.RoundTrip(req)
		return resp, nil, err
	case t.passes() && !t.mayLeadBack:
		resp, err = base.RoundTrip(req)
		return resp, nil, err
	}
	var begun time.Time
	if t.passed != nil {
		begun = time.Now()
	}
	if t.mayHedge(req) {
		return t.hedged(req, begun)
	}
	return t.send(req, begun, nil, nil)
}

// passes reports whether the Transport only forwards requests to Base.
func (t *Transport) passes() bool {
	return t.Middleware == nil && t.Prepare == nil && t.Judge == nil && t.Hedge == nil &&
		!t.HoldBody && t.ResponseHeaderTimeout <= 0 && t.Idle <= 0
}

// build initializes the unexported fields. It is called once.
func (t *Transport) build() {
	t.headerPassed, t.idlePassed = t.timeout(t.ResponseHeaderTimeout), t.timeout(t.Idle)
	if t.Base == nil {
		t.sender = http.DefaultTransport
		_, std := t.sender.(*http.Transport)
		t.mayLeadBack = !std
	}
	t.wrapped = sync.OnceValue(func() resilience.Func { return resilience.Chain(t.Middleware)(makeAttempt) })
}

// timeout returns the cause for a time limit of d, or nil if d is zero or less.
func (t *Transport) timeout(d time.Duration) *resilience.TimeoutError {
	if d <= 0 {
		return nil
	}
	return &resilience.TimeoutError{Name: t.name, After: d}
}

// complete sets the fields Request and Body of a response if a RoundTripper other than net/http's left them
// nil.
func complete(resp *http.Response, req *http.Request) {
	if resp.Request == nil {
		resp.Request = req
	}
	if resp.Body == nil {
		resp.Body = http.NoBody
	}
}

// send sends req through the policies. If resp is a failed response, failure is the error that the policies
// saw instead. begun is the time at which the Timeout of a ClientConfig started. h, if not nil, is the
// hedging that req belongs to. over, if not nil, is called when the caller has finished reading resp, or when
// there is no response.
func (t *Transport) send(
	req *http.Request, begun time.Time, h *hedging, over func(),
) (resp *http.Response, failure, err error) {
	if ctx := req.Context(); ctx.Err() != nil {
		closeBody(req)
		return nil, nil, withTimeout(ended.Error(ctx))
	}
	c := &call{t: t, req: req, caller: req.Context(), host: hostOf(req), hedging: h, over: over}
	_, std := t.base().(*http.Transport)
	c.body = newRequestBody(req, t.MaxBuffer, std)
	stop := func() {}
	c.Context = c.caller
	if t.passed != nil {
		at := begun.Add(t.passed.After)
		if deadline, ok := c.Deadline(); !ok || at.Before(deadline) {
			c.Context, stop = context.WithDeadlineCause(c.caller, at, t.passed)
			c.until = at
		}
	}
	returned := false
	defer func() {
		stop()
		c.body.close()
		if !returned {
			c.close()
		}
	}()
	c.replayable = t.replayable(req)
	err = t.wrapped()(c)
	returned = true
	return c.result(err)
}

// CloseIdleConnections calls Base's method CloseIdleConnections, if Base has one.
func (t *Transport) CloseIdleConnections() {
	if !t.closing.CompareAndSwap(false, true) {
		return // Base forwards to t; without this check, the recursion would not end
	}
	defer t.closing.Store(false)
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
	t.once.Do(t.build)
	if t.Base != nil {
		return t.Base
	}
	return t.sender
}

// firstTransport is the value of http.DefaultTransport when the program started.
var firstTransport = http.DefaultTransport

var (
	errNoResponse = errors.New("resiliencehttp: Middleware returned neither an error nor a response")
	errNothing    = errors.New("resiliencehttp: Base returned neither an error nor a response")
	errCrashed    = errors.New("resiliencehttp: attempt panicked, and the request must not be repeated")
	errNoCall     = errors.New("resiliencehttp: Middleware lost the request's ctx")
)
