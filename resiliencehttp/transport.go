// Package resiliencehttp provides the policies of this module for net/http: a client transport, server middleware and
// a health endpoint.
//
//	client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{Name: "payments"})
//
// The client of [NewClient] has a breaker, a bulkhead and a retry budget for each host, and limits the time of each
// request. With a [Transport], choose the policies yourself:
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
// [Server] provides middleware that limits the rate and the number of requests. A request can choose neither its
// priority nor the address by which it is limited:
//
//	server := resiliencehttp.Server{}
//	limit := server.ThrottleBy(tenants, resiliencehttp.ClientIP())
//	http.ListenAndServe(addr, limit(server.Bulkhead(slots)(handler)))
//
// RFC 9110 defines which requests may be repeated, and the field Retry-After.
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

// A Transport is an [http.RoundTripper] that sends each request through its Middleware. One attempt is one call to the
// innermost function: it sends the request and waits for the response.
//
// A Transport retries only requests that may be repeated: GET, HEAD, OPTIONS, TRACE, PUT and DELETE (RFC 9110,
// section 9.2.2), and any request with an Idempotency-Key or X-Idempotency-Key. Their body must be rewindable; see
// MaxBuffer. Any other request, such as a POST, is retried only if it was certainly never sent, or if Judge returned
// [Resend].
//
// When the response of an attempt has arrived, the policies judge the attempt by the response's status, or by the
// error that Judge returns. A failed status is an error for the policies, but a response for the caller. The caller
// gets the last response, with its body open. The Timeout of an http.Client is the caller's deadline. The deprecated
// field Cancel of a request is ignored.
//
// The fault can be in the request, not in its host. For example, it has an invalid header, or reading its body fails.
// Such a request is neither a success nor a failure of its host, so the policies see a refusal. The request is not
// sent again. For the caller, and for policies around the http.Client, its error is an answer: see
// [resilience.Answered].
//
// If a body is truncated, or exceeds Idle or its timeout while the caller waits for more, a breaker replaces the
// attempt's success by a failure. The request is not retried. A caller that reads slowly, or cancels, does not affect
// the policies' view of the server.
//
// After a successful attempt, a bulkhead of this module holds the slot, and a timeout applies, until the body has been
// read to its end, the body is closed, or ctx is done. The caller must see to one of these: a body that is never
// closed is noticed only as bulkhead.ErrFull. Other middleware holds its resources with [resilience.AtEnd]. A stream
// of events, or the connection after 101 Switching Protocols (which no timeout ends), also holds its slot: use a
// separate Transport for streams.
//
// An attempt ends when its response ends. An upload that is still in progress is then cut off. net/http itself does
// that over HTTP/1.1, and for a status of 300 or above.
//
// A failed response holds no slot. If another attempt may follow, the Transport reads up to 64 KiB of the failed
// response, for at most 1 second. Otherwise its connection could not be reused.
//
// The policies and Base run on the caller's goroutine, except for hedged requests (see Hedge). Slots are released
// within Read or Close of the body. If ctx is done first, slots are released on another goroutine. There, a panic of a
// hook ends the program.
//
// Do not change the fields after the first call to RoundTrip. A Transport is safe for concurrent use; build it once
// and share it.
type Transport struct {
	// Base sends the requests. Nil means the value of [http.DefaultTransport] at the first request, or when
	// [NewTransport] or [NewClient] is called. If that value is this Transport, or forwards to it, nil means the
	// value of http.DefaultTransport when the program started.
	//
	// The network may lose a connection that an earlier request has used. If an attempt receives nothing on such a
	// connection until a timeout of this module, or for at least 0.9 seconds until the caller's deadline, no other
	// request uses the connection. If Base is an [http.Transport], the next attempt dials, and other requests on an
	// HTTP/2 connection finish. For any other Base, the Transport calls CloseIdleConnections, and sets
	// [http.Request.Close] in the request's next attempt. Over HTTP/2, that attempt is the last on its connection.
	Base http.RoundTripper

	// Middleware runs each request; usually it is a [resilience.Chain]. It is applied once, at the first request.
	// It may call its Func several times, but not concurrently, and not after it has returned. Nil means that Base
	// receives the requests without policies.
	Middleware resilience.Middleware

	// Judge returns the error that the policies see instead of a response, or nil for a success. The policies
	// classify the error by the methods that it implements; see [resilience]. If the error is not
	// [resilience.Retryable], no other attempt follows. [Resend] marks an error whose request is sent again even if
	// its method forbids that. Judge must read from the Ahead, not from the Body. If no attempts remain and the
	// status is below 400, the caller gets the error and no response. Nil means [DefaultJudge].
	Judge func(*http.Response, *Ahead) error

	// RetryAfter, if not nil, returns the time until the server accepts another request, from a field such as
	// retry-after-ms. It is called for responses that DefaultJudge turns into an error. If it returns zero or less,
	// the field Retry-After is used.
	RetryAfter func(*http.Response) time.Duration

	// ResponseHeaderTimeout is the maximum time between the end of writing the request and the header of its
	// response. It also limits, separately, the time to dial. Neither an upload nor a wait for one of Base's
	// connections counts. Base must call the hooks of [net/http/httptrace]. Otherwise the time starts at the end of
	// the request's body, and includes dialing. A longer wait is a failure of the server, and another attempt may
	// follow. Zero or less means no limit.
	ResponseHeaderTimeout time.Duration

	// HoldBody delays a response until the first byte of its body, or the end of the body, has arrived.
	// ResponseHeaderTimeout includes that wait. A gateway uses HoldBody to retry if the server sends the header and
	// then nothing. HoldBody delays a stream until its first event.
	HoldBody bool

	// Idle is the maximum time that a Read of the response's body waits for the server. The time between two Reads
	// does not count. If the server sends nothing for longer, Read fails, and the failure is one of the server. Idle
	// does not apply after 101 Switching Protocols. Zero or less means no limit.
	Idle time.Duration

	// Prepare, if not nil, is called with the copy of the request that an attempt sends, for example to sign each
	// copy. Prepare may change the copy. If it replaces the Body, it must close the old Body. If it returns an
	// error, the request itself is invalid, and the call ends. See [HostOf] before you change the server in Prepare.
	Prepare func(*http.Request) error

	// Hedge, if not nil, sends a Replayable request a second time if the first response takes too long. The first
	// response that is not a failure is returned. The other request is canceled, and its response is closed. Each
	// request passes through the Middleware, the second one on a separate goroutine. The Hedger needs no Discard. A
	// request is sent only once if it has a body but no GetBody, a Trailer, or the field Upgrade.
	Hedge *hedge.Hedger[*http.Response]

	// HedgeIf, if not nil, reports whether a request may be hedged. Nil means all requests without an
	// Idempotency-Key or X-Idempotency-Key. If a server is still processing the first request with a key, it answers
	// the second with 409, and the 409 would be returned.
	HedgeIf func(*http.Request) bool

	// Replayable reports whether sending a request more than once has the same effect as sending it once. Nil means
	// that the method, or a field Idempotency-Key or X-Idempotency-Key, decides.
	Replayable func(*http.Request) bool

	// MaxBuffer is the maximum size, in bytes, of a body that is copied while it is sent, if its request has no
	// GetBody. Another attempt sends the copy if the request may be repeated, or was certainly never processed. The
	// Transport does not read ahead. If it did, a pipe, or a body that depends on the response, would deadlock. Zero
	// or less means that no body is copied.
	MaxBuffer int64

	once        sync.Once
	sender      http.RoundTripper      // used instead of a nil Base
	mayLeadBack bool                   // sender is no transport of net/http, and may forward to this Transport
	wrapped     func() resilience.Func // panics each time if Middleware panicked
	closing     atomic.Bool            // CloseIdleConnections is running
	abandoned   sync.Map               // maps net.Conn to chan struct{}, which is closed when abandon has returned
	lastHeard   lastHeard              // when the connections of hedged requests last had a response

	// The causes of time limits; nil if there is no limit. Only NewTransport sets the first two. They limit a
	// request and, once the policies have returned, the reading of its response.
	passed, readingPassed, headerPassed, idlePassed *resilience.TimeoutError
	name                                            string
	idleByDefault                                   bool // Idle does not apply to streams whose sender may pause
}

// RoundTrip sends req through the policies. It returns the response that the policies accepted. Otherwise it returns
// the response of the last attempt, or an error: Base's error as the policies return it, a refusal, or the end of
// req's ctx. The error's method Timeout reports a timeout at any depth.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, _, err := t.roundTrip(req)
	return resp, err
}

// roundTrip is like RoundTrip. In addition, it returns the failure that the policies saw instead of resp.
func (t *Transport) roundTrip(req *http.Request) (resp *http.Response, failure, err error) {
	base := t.base()
	switch {
	case t.mayLeadBack && req.Context().Value(t) != nil:
		resp, err = firstTransport.RoundTrip(req) // t.sender has forwarded the request to t, and would again
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

// timeout returns the cause of a time limit of d, or nil if d is zero or less.
func (t *Transport) timeout(d time.Duration) *resilience.TimeoutError {
	if d <= 0 {
		return nil
	}
	return &resilience.TimeoutError{Name: t.name, After: d}
}

// complete sets the fields of a response that a RoundTripper other than net/http's may leave nil.
func complete(resp *http.Response, req *http.Request) {
	if resp.Request == nil {
		resp.Request = req
	}
	if resp.Body == nil {
		resp.Body = http.NoBody
	}
}

// send sends req through the policies. If resp is a failed response, failure is the error that the policies saw. begun
// is when the Timeout of a client started. h, if not nil, is the hedging that req belongs to. over, if not nil, is
// called when resp is not read any further.
func (t *Transport) send(
	req *http.Request, begun time.Time, h *hedging, over func(),
) (resp *http.Response, failure, err error) {
	if ctx := req.Context(); ctx.Err() != nil {
		closeBody(req)
		return nil, nil, withTimeout(ended.Error(ctx))
	}
	c := &call{t: t, req: req, caller: req.Context(), host: hostOf(req), hedging: h, over: over}
	c.body = newRequestBody(req, t.MaxBuffer)
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
		return // Base may forward to t, and the recursion would not end
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
	errNoResponse = errors.New("resiliencehttp: the Middleware returned neither an error nor a response")
	errNothing    = errors.New("resiliencehttp: Base returned neither an error nor a response")
	errCrashed    = errors.New("resiliencehttp: attempt panicked, and the request must not be repeated")
	errNoCall     = errors.New("resiliencehttp: the Middleware lost the request's ctx")
)
