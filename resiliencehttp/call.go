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

// A call is one request on its way through the policies. It is also the ctx that
// they run under: an attempt finds the call in its ctx, and the policies find work
// that may go on after they have returned.
type call struct {
	context.Context
	t      *Transport
	req    *http.Request // the caller's
	cancel func()        // ends the Context; nil if only the caller can
	body   *requestBody
	work   linger.Work

	replayable bool  // may be sent again even if it was sent before
	final      error // not nil: nothing more may be sent, and this is why

	failed   answer // the latest, if it failed and may be replaced
	accepted answer // which no attempt may replace
}

// An answer is a response that somebody may read, and the lease that it came under.
type answer struct {
	*http.Response
	lease  *lease // nil if there is nothing more to read under it
	failed bool
}

type callKey struct{}

func (c *call) Value(key any) any {
	switch key.(type) {
	case callKey:
		return c
	case linger.Key:
		return &c.work
	}
	return c.Context.Value(key)
}

// AfterFunc spares those who derive a ctx from this one a goroutine: package context
// looks for it.
func (c *call) AfterFunc(f func()) (stop func() bool) { return context.AfterFunc(c.Context, f) }

// attempt is what the policies wrap. It sends the request of the call in ctx.
func attempt(ctx context.Context) error {
	c, ok := ctx.Value(callKey{}).(*call)
	if !ok {
		return errNoCall
	}
	c.heedCancel()
	switch {
	case c.accepted.Response != nil:
		return nil // an error would keep a policy going that tries again whatever it gets
	case c.final != nil:
		return c.final
	case ctx.Err() != nil:
		return ended.Error(ctx)
	}
	lease := newLease(ctx, c)
	defer lease.end()
	return c.send(lease)
}

// heedCancel ends the call if the channel Cancel of its request is closed, and
// reports whether it is. A nil channel never is.
//
// An http.Client with a Timeout closes it when that passes. The deadline of ctx, which
// the Client has set for the same instant, may pass a moment later, and is what the
// policies are to see.
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

// send sends the request and returns what the policies get to see of that.
func (c *call) send(lease *lease) error {
	c.discard()
	req := c.req.Clone(lease) // nothing that is done to it shows in the caller's
	if err := c.body.prepare(req, c.replayable); err != nil {
		if c.Err() == nil {
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
		return c.unanswered(req, err)
	}
	if resp.Request == nil {
		resp.Request = req
	}
	if resp.Body == nil {
		resp.Body = http.NoBody
	}
	err = c.answered(resp, lease)
	if resp.Request == req { // Classify has seen it, and found the call
		resp.Request = c.req
	}
	return err
}

// answered returns what the policies get to see of a response.
func (c *call) answered(resp *http.Response, lease *lease) error {
	returned := false
	defer func() {
		if !returned { // nobody else has it
			_ = resp.Body.Close()
		}
	}()
	failure := c.classify(resp)
	last := failure == nil || !c.mayRepeat() || !behavior.Read(failure).Retryable || duplex(resp)
	drained := !last && drain(resp)
	returned = true

	a := answer{resp, lease, failure != nil}
	if drained || bodyless(c.req, resp) {
		a.lease = nil
	} else {
		lease.extend()
	}
	if !last {
		c.failed = a
		return failure
	}
	c.accepted = a
	if failure != nil {
		return retry.Permanent(failure)
	}
	if a.lease != nil {
		c.work.GoOn()
	}
	return nil
}

// mayRepeat reports whether a request that has been sent may be sent again.
func (c *call) mayRepeat() bool { return c.replayable && c.body.rewinds() }

// unanswered returns for the policies the error that Base returned.
func (c *call) unanswered(req *http.Request, err error) error {
	switch {
	case c.Err() != nil: // which says nothing of the request, nor of the server
	case c.body.atFault() || unsupported(req, err):
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

// finally returns err for the policies, as one after which nothing is sent, whatever
// they make of it.
func (c *call) finally(err error) error {
	c.final = retry.Permanent(&finalError{err})
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

// discard closes a failed response that another one takes the place of.
func (c *call) discard() {
	c.failed.close()
	c.failed = answer{}
}

func (a answer) close() {
	if a.Response != nil {
		_ = a.Body.Close()
	}
	if a.lease != nil {
		a.lease.drop()
	}
}

// result returns what RoundTrip returns after the policies have returned err.
func (c *call) result(err error) (*http.Response, error) {
	if c.accepted.Response != nil {
		return c.hand(c.accepted), nil
	}
	if c.failed.Response != nil && !c.abandoned(err) {
		return c.hand(c.failed), nil
	}
	c.discard()
	if err != nil && err == c.final {
		err = errors.Unwrap(err)
	}
	switch err := err.(type) {
	case nil:
		return nil, errNoResponse
	case *finalError:
		return nil, err.err // as Base returned it
	}
	return nil, withTimeout(err)
}

// abandoned reports whether the policies gave up because the caller had.
func (c *call) abandoned(err error) bool {
	end := c.Err()
	return end != nil && errors.Is(err, end)
}

// hand returns the response for the caller, whose body ends what is held for it.
func (c *call) hand(a answer) *http.Response {
	if a.lease != nil {
		a.lease.limit()
		if c.work.Held() || a.lease.apart() {
			a.Body = newBody(a)
		}
	}
	if a.failed { // the policies have its Header
		a.Header = a.Header.Clone()
	}
	return a.Response
}

// crash lets go of everything where the policies do not return.
func (c *call) crash() {
	defer c.work.End(nil)
	c.accepted.close()
	c.discard()
}
