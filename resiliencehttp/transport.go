// Package resiliencehttp brings the policies of this module to net/http: a
// client transport, server middleware and a health endpoint.
//
//	client := &http.Client{
//		Transport: &resiliencehttp.Transport{
//			Middleware: resilience.Chain(
//				retries.Wrap,                        // *retry.Retrier
//				circuit.Wrap,                        // *breaker.Breaker
//				slots.Wrap,                          // *bulkhead.Bulkhead
//				resilience.Timeout(2*time.Second),   // of each attempt
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
//   - A failed status is an error for the policies and a response for the
//     caller, who gets the last one, its body open.
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
	"context"
	"errors"
	"net/http"
	"runtime"
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
// bulkhead given back. A body that breaks off is a failure to the policies. It
// is not retried, since the caller has the response by then, nor is anything
// else of which an error in the chain says that it is not Retryable.
//
// A response that says "failed" is read up to 64 KiB and closed before it
// is handed to the policies as an error, so that its connection serves the next
// attempt. If no other response follows, it is what RoundTrip returns, with a
// nil error and its body whole and open.
//
// The policies run on a goroutine of the request's own, which ends with the
// attempt; panics and [runtime.Goexit] pass from there to the caller of
// RoundTrip, or of the body's Read or Close.
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
	// nil if there is nothing wrong with it. It may read neither body. If its
	// error says that it is not Retryable, the response goes to the caller
	// without another attempt. Nil means [DefaultClassify].
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
// the error of Base, or a refusal of their own, or the end of req's ctx.
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
		return nil, ended.Error(ctx)
	}
	t.wrapOnce.Do(func() { t.wrapped = t.Middleware(attempt) })

	c := newCall(t, req)
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
	errAnswered   = errors.New("resiliencehttp: the request has been answered and is not sent again")
)

// A call is one request on its way through the policies. It is the ctx that they
// run under, too, so that an attempt, at the other end of them, finds it.
//
// Two goroutines take turns: the caller's waits on turn until the policies'
// goroutine has a response for it, or is done; that one then waits on the body's
// end. Nothing here needs a lock.
type call struct {
	context.Context
	cancel context.CancelCauseFunc

	t    *Transport
	req  *http.Request // the caller's
	body requestBody

	replayable bool           // may be sent again even if it was sent before
	final      error          // not nil: nothing more may be sent, and this is why
	failed     *http.Response // the latest response, if it failed and may be replaced
	rest       *rest          // its body, if there was too much to drain

	response *http.Response // what the caller gets instead
	handed   bool           // got, before the policies were done
	turn     chan struct{}  // has a value when it is handed over, and at the end

	err      error // what the policies returned
	panicked any   // or what they panicked with
	exited   bool  // or that they called runtime.Goexit
}

type callKey struct{}

func newCall(t *Transport, req *http.Request) *call {
	c := &call{
		t:    t,
		req:  req,
		body: requestBody{req: req, max: t.MaxBuffer},
		turn: make(chan struct{}, 1),
	}
	c.Context, c.cancel = context.WithCancelCause(req.Context())
	if t.Replayable != nil {
		c.replayable = t.Replayable(req)
	} else {
		c.replayable = replayable(req)
	}
	return c
}

// Value returns the call itself for its key.
func (c *call) Value(key any) any {
	if key == (callKey{}) {
		return c
	}
	return c.Context.Value(key)
}

// run takes the call through the policies, on a goroutine of its own.
func (c *call) run() {
	returned := false
	defer func() {
		if !returned {
			c.panicked = recover()
			c.exited = c.panicked == nil
		}
		c.body.close()
		if c.rest == nil {
			c.cancel(nil)
		}
		c.turn <- struct{}{}
	}()
	c.err = c.t.wrapped(c)
	returned = true
}

// rethrow lets a panic or Goexit of the policies pass to the calling goroutine.
func (c *call) rethrow() {
	if c.panicked != nil {
		panic(c.panicked)
	}
	if c.exited {
		runtime.Goexit()
	}
}

// result returns what RoundTrip returns once the policies are done.
func (c *call) result() (*http.Response, error) {
	if c.panicked != nil || c.exited {
		c.discard()
		c.cancel(nil)
		c.rethrow()
	}
	if c.response != nil {
		return c.response, nil
	}
	if c.failed != nil && !c.abandoned() {
		if c.rest != nil {
			c.rest.end = c.cancel
		}
		return c.failed, nil
	}
	c.discard()
	c.cancel(nil)
	if c.err == nil {
		return nil, errNoResponse
	}
	if e, ok := c.err.(*finalError); ok {
		return nil, e.err // as Base returned it
	}
	return nil, c.err
}

// abandoned reports whether the policies gave up because the caller had.
func (c *call) abandoned() bool {
	end := c.req.Context().Err()
	return end != nil && errors.Is(c.err, end)
}

// discard closes a failed response that another one takes the place of.
func (c *call) discard() {
	if c.failed != nil {
		_ = c.failed.Body.Close()
		c.failed, c.rest = nil, nil
	}
}

// attempt is what the policies wrap: it sends the request of the call in ctx.
func attempt(ctx context.Context) error {
	c, ok := ctx.Value(callKey{}).(*call)
	if !ok {
		return errNoCall
	}
	if c.final != nil {
		// A policy that tries again all the same shall not wait long in vain.
		c.cancel(c.final)
		return c.final
	}
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	c.discard()
	l := newLease(ctx, c)
	defer l.end()
	req, err := c.request(l.ctx)
	if err != nil {
		c.final = &finalError{err}
		return c.final
	}
	resp, err := c.t.base().RoundTrip(req)
	if err != nil {
		return c.unanswered(req, err)
	}
	if resp.Request == req {
		resp.Request = c.req
	}
	if resp.Body == nil {
		resp.Body = http.NoBody
	}
	failure := c.classify(resp)
	if failure != nil && c.mayRepeat() && worthRepeating(failure) && !duplex(resp) {
		c.keep(resp, l)
		return failure
	}
	return c.hand(ctx, resp, failure)
}

// request returns what Base is to send: a copy, so that nothing that is done to
// it shows in the caller's.
func (c *call) request(ctx context.Context) (*http.Request, error) {
	body, err := c.body.next(ctx)
	if err != nil {
		return nil, err
	}
	req := c.req.Clone(ctx)
	req.Body = body
	req.GetBody = c.body.getBody()
	req.Trailer = c.req.Trailer // the caller fills it in while the body is read
	return req, nil
}

// mayRepeat reports whether a request that has been sent may be sent again.
func (c *call) mayRepeat() bool { return c.replayable && c.body.rewinds() }

// unanswered returns for the policies the error that Base returned.
func (c *call) unanswered(req *http.Request, err error) error {
	if !c.mayRepeat() && !(c.body.rewinds() && neverSent(err)) {
		c.final = &finalError{err}
		return c.final
	}
	if hopeless(req, err) {
		return &finalError{err}
	}
	return err
}

func (c *call) classify(resp *http.Response) error {
	if c.t.Classify != nil {
		return c.t.Classify(resp)
	}
	return classify(resp, c.mayRepeat())
}

// keep lets go of a failed response's connection, and holds the rest in case no
// other response follows.
func (c *call) keep(resp *http.Response, l *lease) {
	c.failed = resp
	if c.rest = drain(resp); c.rest != nil {
		l.extend()
	}
}

// hand gives the caller a response that no attempt may replace. It waits until
// its body is done with, and returns how that went: failure, if the response
// itself was one.
func (c *call) hand(ctx context.Context, resp *http.Response, failure error) error {
	c.final = errAnswered
	if failure != nil {
		failure = final(failure)
		c.final = failure
	}
	c.response = resp
	if resp.Body == http.NoBody {
		return failure
	}
	end := ctx.Done()
	if duplex(resp) {
		end = nil // after 101 the connection is the caller's, whatever becomes of the request
	}
	finished := make(chan error, 1)
	resp.Body = newBody(c, resp.Body, finished)
	c.handed = true
	c.turn <- struct{}{}

	var err error
	select {
	case err = <-finished:
	case <-end:
		// The connection ends with the ctx, though nobody may read or close.
		err = ended.Error(ctx)
	}
	if failure != nil || err == nil {
		return failure
	}
	c.final = final(err)
	return c.final
}
