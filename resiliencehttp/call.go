package resiliencehttp

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/retry"
)

// A call is one request on its way through the policies.
type call struct {
	ctx    context.Context // that they run under; see begin
	t      *Transport
	req    *http.Request   // the caller's
	host   string          // see HostOf
	cancel func()          // ends ctx; nil if only the caller can
	whole  context.Context // the caller's, with the Timeout of a client
	stop   func()          // ends whole; nil if only the caller can
	body   *requestBody
	work   linger.Work

	replayable bool  // the request may be sent more than once
	final      error // why nothing more may be sent; nil if something may

	failed   answer // the latest failed response, which another may replace
	accepted answer // the response that no other may replace

	first sendCtx // of the first attempt
	read  body    // of the response that the caller gets
}

// An answer is a response that the caller may get, and the ctx that it came under.
type answer struct {
	*http.Response
	ctx     *sendCtx // nil if there is nothing more to read
	failure error    // that the policies saw in its place; nil for a success
}

type callKey struct{}

// begin makes ctx that of c: an attempt finds the call in it, and the policies find the
// linger.Work, which may go on after they have returned.
func (c *call) begin(ctx context.Context) {
	c.ctx = context.WithValue(context.WithValue(ctx, linger.Key{}, &c.work), callKey{}, c)
}

// endsWith reports whether ctx, that of an attempt, ends when the caller's does, and not
// before.
func (c *call) endsWith(ctx context.Context) bool {
	if c.cancel != nil {
		return false
	}
	return ctx.Done() == c.ctx.Done()
}

// release releases the timer of whole.
func (c *call) release() {
	if c.stop != nil {
		c.stop()
	}
}

// makeAttempt is the function that the policies wrap. It sends the request of the call in
// ctx.
func makeAttempt(ctx context.Context) error {
	c, ok := ctx.Value(callKey{}).(*call)
	if !ok {
		return errNoCall
	}
	c.heedCancel()
	switch {
	case c.accepted.Response != nil:
		return nil // an error would make a policy that retries any error go on
	case c.final != nil:
		return c.final
	case ctx.Err() != nil:
		return ended.Error(ctx)
	}
	sending := newSendCtx(ctx, c)
	defer sending.endAttempt()
	returned := false
	defer func() {
		if !returned && !c.mayRepeat() { // a panic, of which a policy may make an error
			_ = c.finally(errCrashed)
		}
	}()
	err := c.send(sending)
	returned = true
	return err
}

// heedCancel ends the call if the channel Cancel of its request is closed, and reports
// whether it is. A nil channel is never closed.
//
// An http.Client with a Timeout closes the channel when that passes. It also gives ctx a
// deadline for the same instant, which may pass a moment later. The policies are to see the
// deadline, so heedCancel waits for it.
func (c *call) heedCancel() bool {
	select {
	case <-canceled(c.req):
	default:
		return false
	}
	deadline, ok := c.req.Context().Deadline()
	if ok && !time.Now().Before(deadline) {
		<-c.req.Context().Done()
	} else {
		c.cancel()
	}
	return true
}

// canceled returns the channel Cancel of req, which may be nil.
func canceled(req *http.Request) <-chan struct{} {
	//lint:ignore SA1019 http.Client sets it
	return req.Cancel
}

// send sends the request and returns the error that the policies see, or nil.
func (c *call) send(ctx *sendCtx) error {
	c.discard()
	req := c.copy(ctx)
	err := c.body.prepare(req, c.replayable)
	if err == nil {
		err = c.prepare(req)
	}
	if err != nil {
		if c.ctx.Err() != context.Canceled { // a deadline says nothing about a server that was not asked
			err = &requestError{err}
		}
		return c.finally(err)
	}
	resp, err := c.t.base().RoundTrip(req)
	if err == nil && resp == nil {
		err = errNothing
	}
	if err != nil {
		c.heedCancel()
		return c.unanswered(ctx.timedOut(err))
	}
	complete(resp, req)
	return c.answered(req, resp, ctx)
}

// copy returns a copy of the caller's request to send, so that the caller's is not changed.
// Its header and URL are copied too, unless they go to a transport of net/http, which does not
// change them: see docs/decisions/http-client.md.
func (c *call) copy(ctx context.Context) *http.Request {
	if _, ok := c.t.base().(*http.Transport); ok && c.t.Prepare == nil {
		return c.req.WithContext(ctx)
	}
	return c.req.Clone(ctx)
}

// prepare has the Prepare of the Transport change req. If it fails, or makes req unsendable,
// no Base will close the body.
func (c *call) prepare(req *http.Request) error {
	if c.t.Prepare == nil {
		return nil
	}
	prepared := false
	defer func() {
		if !prepared {
			closeBody(req)
		}
	}()
	if err := c.t.Prepare(req); err != nil {
		return err
	}
	if err := unsendable(req); err != nil {
		return err
	}
	prepared = true
	return nil
}

// answered returns the error that the policies see in place of a response, or nil.
func (c *call) answered(req *http.Request, resp *http.Response, ctx *sendCtx) error {
	returned := false
	defer func() {
		if !returned { // a panic: the caller does not get it
			_ = resp.Body.Close()
		}
	}()
	failure := c.classify(resp)
	if failure == nil && c.t.RetryBody != nil && mayHaveBody(c.req, resp) && !duplex(resp) {
		begin, err := c.t.peek(resp)
		if err != nil {
			_ = resp.Body.Close()
			returned = true
			c.heedCancel()
			return c.unanswered(ctx.timedOut(err))
		}
		failure = c.t.RetryBody(resp, begin)
	}
	if resp.Request == req { // Classify needed it, to find the call
		resp.Request = c.req
	}
	last := failure == nil || !c.mayRepeat() || !behavior.Read(failure).Retryable || duplex(resp)
	drained := false
	if !last {
		resp, drained = drain(resp)
	}
	returned = true

	a := answer{resp, ctx, failure}
	if drained || bodyless(c.req, resp) {
		a.ctx = nil
	} else {
		ctx.extend()
	}
	if !last {
		ctx.pause()
		c.failed = a
		return failure
	}
	c.accepted = a
	if failure != nil {
		return retry.Permanent(failure)
	}
	if a.ctx != nil {
		c.work.GoOn()
	}
	return nil
}

// mayRepeat reports whether a request that has been sent may be sent again.
func (c *call) mayRepeat() bool { return c.replayable && c.body.rewinds() }

// unanswered returns the error that the policies see when Base returns err.
func (c *call) unanswered(err error) error {
	switch {
	case c.body.late():
		return c.finally(&requestError{err})
	case c.ctx.Err() != nil: // err says nothing about the request or the server
	case c.body.atFault() || unsupported(err):
		return c.finally(&requestError{err})
	}
	if !c.mayRepeat() && !(c.body.rewinds() && c.body.untouched() && neverConnected(err)) {
		return c.finally(err)
	}
	if hopeless(err) {
		return &finalError{err}
	}
	return err
}

// finally returns err for the policies and ends the sending, even if they try again.
func (c *call) finally(err error) error {
	c.final = retry.Permanent(err)
	return c.final
}

func (c *call) classify(resp *http.Response) error {
	if c.t.Classify != nil {
		return c.t.Classify(resp)
	}
	if failed := classify(resp, c.mayRepeat()); failed != nil {
		return failed
	}
	return nil
}

// discard closes a failed response that another replaces.
func (c *call) discard() {
	c.failed.close()
	c.failed = answer{}
}

func (a answer) close() {
	if a.Response != nil {
		_ = a.Body.Close()
	}
	if a.ctx != nil {
		a.ctx.end()
	}
}

// result returns what send returns after the policies have returned err.
func (c *call) result(err error) (resp *http.Response, failure, _ error) {
	if a := c.accepted; a.Response != nil {
		return c.hand(a), a.failure, nil
	}
	if a := c.failed; a.Response != nil && !c.abandoned(err) {
		return c.hand(a), a.failure, nil
	}
	c.discard()
	c.release()
	if err == c.final { // both may be nil
		err = errors.Unwrap(err)
	}
	if hopeless, ok := err.(*finalError); ok {
		err = hopeless.err
	}
	if err == nil {
		err = errNoResponse
	}
	return nil, nil, withTimeout(err)
}

// abandoned reports whether the policies gave up because the caller's ctx has ended.
func (c *call) abandoned(err error) bool {
	end := c.ctx.Err()
	return end != nil && errors.Is(err, end)
}

// hand returns the response for the caller. The end of its body releases what the policies
// hold for it.
func (c *call) hand(a answer) *http.Response {
	if a.ctx != nil {
		a.ctx.limit()
		if c.work.Held() || a.ctx.apart {
			a.Body = newBody(a)
		}
	} else {
		c.release()
	}
	if a.failure != nil { // the StatusError has its Header
		a.Header = a.Header.Clone()
	}
	return a.Response
}

// crash closes and releases everything if the policies panic or end the goroutine.
func (c *call) crash() {
	defer c.work.End(nil)
	c.release()
	c.accepted.close()
	c.discard()
}
