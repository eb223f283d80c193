// Package resiliencehttp brings the policies of this module to net/http: a
// client transport, server middleware and a health endpoint.
//
//	client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{Name: "payments"})
//
// NewClient has a breaker, a bulkhead and a retry budget for each host, and limits of time.
// With a [Transport], choose the policies yourself:
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
// On a server, a request cannot choose its own priority, nor the address that it is limited by:
//
//	server := resiliencehttp.Server{}
//	limit := server.ThrottleBy(tenants, resiliencehttp.ClientIP())
//	http.ListenAndServe(addr, limit(server.Bulkhead(slots)(handler)))
//
// RFC 9110 says what may be repeated and what Retry-After means.
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

// A Transport is an [http.RoundTripper] that sends each request through its Middleware. One
// call of the policies is one attempt: a request and its response.
//
// Only a request that may be repeated is retried: GET, HEAD, OPTIONS, TRACE, PUT and DELETE
// (RFC 9110, section 9.2.2), and any request with an Idempotency-Key, if its body can be sent
// again. A POST is retried only if it was certainly never sent.
//
// Policies judge an attempt when its response has arrived, by its status or by what Judge reads
// of it. A failed status is an error for them, and a response for the caller, who gets the last
// one, its body open. The Timeout of an http.Client is the caller's deadline. The field Cancel of a request,
// which is deprecated, is not heeded.
//
// A request that is wrong in itself, such as one with an invalid header or with a body that fails, is neither a
// success nor a failure of its host: the policies see a refusal. It is not sent again. For the caller, and for
// policies around the http.Client, its error is an answer: see [resilience.Answered].
//
// A body that breaks off, falls silent, or meets its timeout while the caller waits for more, is
// one more failure for a breaker, and not retried. A caller that reads slowly or leaves says
// nothing about the server.
//
// A bulkhead of this module holds the slot of an attempt that succeeded, and a timeout covers it,
// until the body has been read to its end or closed, or ctx has ended. One of these must happen: a
// body that is never closed shows only as bulkhead.ErrFull. Middleware of your own does the same
// with [resilience.AtEnd]. A stream of events, or the connection after 101 Switching Protocols
// (which no timeout ends), holds its slot as long: give it a Transport of its own.
//
// An attempt ends with its response: an upload that is still under way then is cut, which net/http
// does itself over HTTP/1.1 and for a status of 300 and above.
//
// A failed response holds no slot. If another attempt may follow, up to 64 KiB of it are read
// ahead, for at most a second, so that its connection serves again.
//
// The policies and Base run on the caller's goroutine (but see Hedge), and slots are released
// within Read or Close of the body. If ctx ends first, they are released on another goroutine,
// where a hook that panics ends the program.
//
// Do not change the fields after the first call of RoundTrip. A Transport is safe for
// concurrent use; build it once and share it.
type Transport struct {
	// Base sends the requests. Nil means [http.DefaultTransport] as it is at the first
	// request, or when [NewClient] is called. If that is this Transport, or leads back to
	// it, nil means http.DefaultTransport as it was when the program began.
	//
	// A connection that was silent until a timeout of this module, or until the caller's deadline and for
	// at least 0.9 seconds, gets no other request if an earlier request had used it. A Base that is an
	// [http.Transport] dials for the next attempt; other requests on an HTTP/2 connection finish. Of any other Base,
	// CloseIdleConnections is called, and the next attempt of the request sets [http.Request.Close]: over
	// HTTP/2, that attempt is the last on the connection.
	Base http.RoundTripper

	// Middleware runs each request; usually it is a [resilience.Chain]. It is applied
	// once, at the first request. It may call its Func more than once, but only one call
	// after another, and not after it has returned. Nil means that Base gets the requests
	// as they are.
	Middleware resilience.Middleware

	// Judge returns the error that the policies see in place of a response, or nil for a
	// success. The error says what it says by the methods of the protocol (see
	// [resilience]); if it is not [resilience.Retryable], there is no other attempt, and
	// [Resend] has a request sent again whose method forbids that. Judge must not use the Body,
	// but the Ahead. If attempts are spent and the status is below 400, the caller gets the
	// error, and no response. Nil means [DefaultJudge].
	Judge func(*http.Response, *Ahead) error

	// RetryAfter, if not nil, returns for how long the server asks not to be asked again, by
	// fields of its own such as retry-after-ms, in a response that DefaultJudge makes an error
	// of. Zero or less means that the field Retry-After tells.
	RetryAfter func(*http.Response) time.Duration

	// ResponseHeaderTimeout is how long an attempt may wait for the header of the response, from the moment
	// the request has been written, and separately how long it may take to dial. An upload does not count,
	// nor does a wait for a connection of Base's own. Base must call the hooks of [net/http/httptrace];
	// otherwise the limit counts from the end of the request's body, dialing included. A longer wait is a
	// failure of the server, and another attempt may follow. Zero or less means no limit.
	ResponseHeaderTimeout time.Duration

	// HoldBody returns a response only when the first byte of its body has arrived, or its end. The
	// wait is part of ResponseHeaderTimeout. A gateway uses it to try again if the server sends the header
	// and then nothing. A stream whose first event comes late is delayed until then.
	HoldBody bool

	// Idle is how long a Read of the response's body may wait for the server. A reader
	// that pauses costs nothing. A body that is silent for longer breaks off, as a failure
	// of the server. Idle does not apply after 101 Switching Protocols. Zero or less means no limit.
	Idle time.Duration

	// Prepare, if not nil, is called with the copy of the request that each attempt sends, to
	// sign it anew, for example. It may change it; if it replaces the Body, it must close the old
	// one. An error ends the call: the request is wrong in itself. See [HostOf] before it changes the server.
	Prepare func(*http.Request) error

	// Hedge, if not nil, has a Replayable request sent again if the first takes too long;
	// the first response that is not a failure wins, the other is canceled and its body
	// closed. Each passes the Middleware, the second on a goroutine of its own. The Hedger needs
	// no Discard. A request with a body but no GetBody, with a Trailer or with the field Upgrade
	// is sent once.
	Hedge *hedge.Hedger[*http.Response]

	// HedgeIf, if not nil, reports whether Hedge is meant for a request. Nil means all but those
	// with an Idempotency-Key or X-Idempotency-Key: a server that works on the first answers the
	// second with 409, which would win.
	HedgeIf func(*http.Request) bool

	// Replayable reports whether sending a request more than once has the effect of
	// sending it once. Nil means that the method or a field Idempotency-Key or
	// X-Idempotency-Key decides.
	Replayable func(*http.Request) bool

	// MaxBuffer is the size in bytes up to which the body of a request without GetBody is copied while it is
	// sent, so that it can be sent again: by another attempt if the request may be repeated, or if it was certainly
	// never processed. A pipe, or a body that answers the response, works as without it: nothing is read
	// ahead. Zero or less means that no body is copied.
	MaxBuffer int64

	once        sync.Once
	sender      http.RoundTripper      // what a nil Base means
	mayLeadBack bool                   // sender is of somebody else's making, and may lead back to the Transport
	wrapped     func() resilience.Func // panics each time if Middleware panicked
	closing     atomic.Bool            // CloseIdleConnections is under way
	abandoned   sync.Map               // of net.Conn: *sync.Once
	lastHeard   lastHeard              // of the connections of hedged requests

	// The causes of limits of time; nil if there is none. The first two are of a client that
	// NewClient has made: of a request, and of the reading of its response instead.
	passed, readingPassed, headerPassed, idlePassed *resilience.TimeoutError
	name                                            string
	idleByDefault                                   bool // Idle does not apply to streams whose sender may pause
}

// RoundTrip sends req through the policies. It returns the response that they accepted, or
// else that of the last attempt, or an error: that of Base as the policies return it, a
// refusal, or the end of req's ctx. The method Timeout of the error tells of a timeout at any
// depth.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, _, err := t.roundTrip(req)
	return resp, err
}

// roundTrip is RoundTrip, and returns as failure what the policies saw in place of resp.
func (t *Transport) roundTrip(req *http.Request) (resp *http.Response, failure, err error) {
	base := t.base()
	switch {
	case t.mayLeadBack && req.Context().Value(t) != nil:
		resp, err = firstTransport.RoundTrip(req) // the request has been here
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

// passes reports whether the Transport does nothing but Base.
func (t *Transport) passes() bool {
	return t.Middleware == nil && t.Prepare == nil && t.Judge == nil && t.Hedge == nil &&
		!t.HoldBody && t.ResponseHeaderTimeout <= 0 && t.Idle <= 0
}

// build makes what the Transport needs once.
func (t *Transport) build() {
	t.headerPassed, t.idlePassed = t.timeout(t.ResponseHeaderTimeout), t.timeout(t.Idle)
	if t.Base == nil {
		t.sender = http.DefaultTransport
		_, std := t.sender.(*http.Transport)
		t.mayLeadBack = !std
	}
	t.wrapped = sync.OnceValue(func() resilience.Func { return resilience.Chain(t.Middleware)(makeAttempt) })
}

// timeout returns the cause of a limit of d, or nil if that is none.
func (t *Transport) timeout(d time.Duration) *resilience.TimeoutError {
	if d <= 0 {
		return nil
	}
	return &resilience.TimeoutError{Name: t.name, After: d}
}

// complete sets the fields of a response that its maker may have left out.
func complete(resp *http.Response, req *http.Request) {
	if resp.Request == nil {
		resp.Request = req
	}
	if resp.Body == nil {
		resp.Body = http.NoBody
	}
}

// send sends req through the policies. failure is the error that they saw in place of
// resp, if that is a failed response. begun is when the Timeout of a client began. h, if not nil, has other requests
// in flight. over, if not nil, is called when nothing more of resp is read.
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

// CloseIdleConnections calls CloseIdleConnections of Base, if it has that method.
func (t *Transport) CloseIdleConnections() {
	if !t.closing.CompareAndSwap(false, true) {
		return // perhaps Base leads back to t
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

// firstTransport is http.DefaultTransport as it was when the program began.
var firstTransport = http.DefaultTransport

var (
	errNoResponse = errors.New("resiliencehttp: the Middleware returned neither an error nor a response")
	errNothing    = errors.New("resiliencehttp: Base returned neither an error nor a response")
	errCrashed    = errors.New("resiliencehttp: an attempt panicked, and the request may not be sent again")
	errNoCall     = errors.New("resiliencehttp: the Middleware lost the request's ctx")
)
