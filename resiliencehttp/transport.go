// Package resiliencehttp brings the policies of this module to net/http: a
// client transport, server middleware and a health endpoint.
//
//	client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{Name: "payments"})
//
// NewClient has a breaker, a bulkhead and a retry budget for each host, and two timeouts.
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
//	server := resiliencehttp.Server{}
//	limit := server.ThrottleBy(tenants, resiliencehttp.ClientIP())
//	http.ListenAndServe(addr, limit(server.Bulkhead(slots)(handler)))
//
// A user of [Transport] must know:
//
//   - Only a request that may be repeated is retried: GET, HEAD, OPTIONS, TRACE, PUT and
//     DELETE (RFC 9110, section 9.2.2), and any request with an Idempotency-Key, if its
//     body can be sent again. A POST is retried only if it was certainly never sent.
//   - A failed status (500, 502, 503, 504, 507, 520 to 530) is an error for the policies
//     and a response for the caller, who gets the last one, its body open. A status that
//     asks for the request again later (408, 425, 429) is treated in the same way, but is
//     not a failure of the server: see [DefaultJudge]. A retrier heeds Retry-After.
//   - A request that is wrong in itself does not count against the server, nor does a
//     caller that leaves. The Timeout of an http.Client is the caller's deadline.
//   - A bulkhead's slot is held, and a timeout covers the response, until its body has
//     been read to its end or closed. As always with net/http, the caller closes the body.
//
// The server middleware answers 429 if the client is over a limit and 503 if there is no
// capacity, with Retry-After and a problem document (RFC 9457); see [Server]. A request cannot
// choose its own priority, nor the address that it is limited by: only a trusted proxy can tell
// that.
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
// Policies judge an attempt when its response has arrived, by its status or by what Judge reads
// of it. If the body breaks off later, that is one more failure for a breaker. It has broken off,
// too, if a timeout or the caller's deadline passes while the caller waits for more of it, or if
// its reader finds a failure in it and calls [Break] before its end. It is not retried: the
// caller gets the part that has arrived, and then the error. A caller that reads slowly or
// leaves says nothing about the server.
//
// A bulkhead of this module holds the slot of a successful attempt until the response's body
// has been read to its end or closed, or ctx has ended. One of these must happen: a body that
// is never closed shows only as bulkhead.ErrFull. A timeout (resilience.Timeout, and the
// AttemptTimeout of a retrier) covers all of it: connecting, sending, waiting for the response,
// and the caller's reading of the body.
// Middleware of your own does the same with [resilience.AtEnd]; otherwise its call ends when
// the response has arrived. Canceling the ctx that such middleware derived, on return, does
// not cut off the body.
//
// A failed response holds no slot. If another attempt may follow, up to 64 KiB of it are read
// ahead, for at most a second, and it is closed before the policies see its [*StatusError],
// so that its connection serves again. A longer or slower response keeps its connection until
// the next attempt. If the request is not sent again, RoundTrip returns this response, with a
// nil error and its body whole and open, unless its status is below 400: then it returns the
// error of Judge. A timeout of the attempt then continues from where it stopped.
//
// If a Base of net/http cannot send a request (an invalid field or method, a URL without a
// host), or a body fails while it is sent, or its length is not the ContentLength, the policies
// see an error that is [resilience.Answered], since the server is not to blame.
//
// A long-lived response, such as a stream of events or the connection after 101 Switching
// Protocols (which no timeout ends), holds its slot as long. Give it a Transport of its own.
//
// The policies and Base run on the caller's goroutine (but see Hedge), and slots are released
// within Read or Close of the body. Only if ctx ends first are they released on another
// goroutine, together with the hooks that this calls; a panic in one of these ends the
// program.
//
// The sources of the patterns are named in their packages. RFC 9110 says what may be
// repeated and what Retry-After means.
//
// Do not change the fields after the first call of RoundTrip. A Transport is safe for
// concurrent use; build it once and share it.
type Transport struct {
	// Base sends the requests. Nil means [http.DefaultTransport] as it is at the first
	// request, or when [NewClient] is called. If that is this Transport, or leads back to
	// it, nil means http.DefaultTransport as it was when the program began.
	Base http.RoundTripper

	// Middleware runs each request; usually it is a [resilience.Chain]. It is applied
	// once, at the first request. It may call its Func more than once, but only one call
	// after another, and not after it has returned. Nil means that Base gets the requests
	// as they are.
	Middleware resilience.Middleware

	// Judge returns the error that the policies see in place of a response, or nil for a
	// success. The error says what it says by the methods of the protocol (see
	// [resilience]); [Resend] lets it have a request sent again whose method would forbid
	// that. If it is not [resilience.Retryable], there is no other attempt. Judge sees every
	// response, those of status 429, 503 and 529 too, before the caller does. It must not
	// use the Body: the Ahead reads of it what is needed, an event of a stream, say, and the
	// caller gets it again. Nil means [DefaultJudge].
	Judge func(*http.Response, *Ahead) error

	// RetryAfter, if not nil, returns for how long the server asks not to be asked again, by
	// fields of its own: x-ratelimit-reset-requests, or retry-after-ms. Zero or less means
	// that the field Retry-After tells. It is asked for responses that DefaultJudge treats
	// as failures.
	RetryAfter func(*http.Response) time.Duration

	// FirstByte is how long an attempt may take from its sending to the first byte of the
	// response's body, or its end if there is none. A response is not returned before. What
	// is not there by then is a failure of the server, and another attempt may follow. Zero
	// or less means no limit.
	FirstByte time.Duration

	// Idle is for how long a Read of the response's body may wait for the server. A reader
	// that pauses costs nothing. A body that is silent for longer breaks off, as a failure
	// of the server. Zero or less means no limit.
	Idle time.Duration

	// Prepare, if not nil, is called with the copy of the request that each attempt sends,
	// before it is sent: to sign it anew, for example. It may change its fields, its URL and its
	// Header. If it replaces the Body, it must close the old one. An error ends the call. Policies
	// treat it as an answer ([resilience.Answered]), since the server is not to blame. See [HostOf]
	// before it changes the server.
	Prepare func(*http.Request) error

	// Hedge, if not nil, has a Replayable request sent again if the first takes too long;
	// the first response that is not a failure wins, the others are canceled and their
	// bodies closed. Each of them passes the Middleware. The Ratio of the Hedger bounds how
	// many there are; it needs no Discard. [HostOf] tells its observers the host.
	//
	// The second send runs on a goroutine of its own. The functions of the Transport,
	// GetBody of the request, and a body that GetBody returned are then in use at the same
	// time as those of the first. A request with a body but no GetBody, with a Trailer or
	// with the field Upgrade is sent once.
	Hedge *hedge.Hedger[*http.Response]

	// HedgeIf, if not nil, reports whether Hedge is meant for a request. Nil means all.
	HedgeIf func(*http.Request) bool

	// Replayable reports whether sending a request more than once has the effect of
	// sending it once. Nil means that the method or a field Idempotency-Key or
	// X-Idempotency-Key decides.
	Replayable func(*http.Request) bool

	// MaxBuffer is the size in bytes up to which the body of a Replayable request without
	// GetBody is read into memory before it is sent, so that it can be sent again. A
	// longer body is sent once. The caller must not wait for the response before it
	// provides the body. Zero or a negative number means that no body is kept.
	MaxBuffer int64

	once        sync.Once
	sender      http.RoundTripper      // what a nil Base means
	mayLeadBack bool                   // sender is of somebody else's making, and may lead back to the Transport
	wrapped     func() resilience.Func // panics each time if Middleware panicked
	closing     atomic.Bool            // CloseIdleConnections is under way

	// The causes of limits of time; nil if there is none. The first three are of a client that
	// NewClient has made: of a request, of the reading of its response instead, and of an attempt.
	passed, readingPassed, attemptPassed, firstBytePassed, idlePassed *resilience.TimeoutError
	name                                                              string
}

// RoundTrip sends req through the policies. It returns the response that they accepted, or
// else that of the last attempt, or an error: that of Base as the policies return it, a
// refusal, or the end of req's ctx. If a timeout is the cause, at any depth, the method
// Timeout of the error returns true, and so does that of the [net/url.Error] that an
// http.Client makes of it.
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
	return t.send(req, begun, nil)
}

// passes reports whether the Transport does nothing but Base.
func (t *Transport) passes() bool {
	return t.Middleware == nil && t.Prepare == nil && t.Judge == nil && t.Hedge == nil && t.FirstByte <= 0 && t.Idle <= 0
}

// build makes what the Transport needs once.
func (t *Transport) build() {
	t.firstBytePassed, t.idlePassed = t.timeout(t.FirstByte), t.timeout(t.Idle)
	if t.Base == nil {
		t.sender = http.DefaultTransport
		_, std := t.sender.(*http.Transport)
		if t.mayLeadBack = !std; t.sender == http.RoundTripper(t) {
			t.sender = firstTransport
		}
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
// resp, if that is a failed response. begun is when the Timeout of a client began. over, if not
// nil, is called when nothing more of resp is read.
func (t *Transport) send(req *http.Request, begun time.Time, over func()) (resp *http.Response, failure, err error) {
	if ctx := req.Context(); ctx.Err() != nil {
		closeBody(req)
		return nil, nil, withTimeout(ended.Error(ctx))
	}
	c := &call{t: t, req: req, host: hostOf(req), body: newRequestBody(req, t.MaxBuffer), over: over}
	ctx, stop := req.Context(), func() {}
	if t.passed != nil {
		at := begun.Add(t.passed.After)
		if deadline, ok := ctx.Deadline(); !ok || at.Before(deadline) {
			ctx, stop = context.WithDeadlineCause(ctx, at, t.passed)
			c.until = at
		}
	}
	if canceled(req) != nil {
		ctx, c.cancel = context.WithCancel(ctx)
		defer c.cancel()
	}
	c.begin(ctx)
	returned := false
	defer func() {
		stop()
		c.body.close()
		if !returned {
			c.close(nil)
		}
	}()
	c.replayable = t.replayable(req)
	err = t.wrapped()(c.ctx)
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
