package resiliencehttp

import (
	"context"
	"errors"
	"net/http"
	"runtime"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/stack"
)

// A call is one request on its way through the policies. It is also the ctx that
// they run under, so that an attempt, at their other end, finds it.
//
// The policies, and Base under them, run on a goroutine of their own, so that they
// can go on after RoundTrip has returned. That one and the caller's take turns, as
// calls do on one stack: RoundTrip waits until it has something to return, the
// policies for the end of a body that they have handed over, and the Read or Close
// that is its end for the policies. One of them always waits, so that nothing else
// needs a lock.
//
// The turn is passed through channels, not by [iter.Pull], which ends the process
// if one of a body's readers is locked to a thread.
type call struct {
	context.Context
	t    *Transport
	req  *http.Request // the caller's
	body requestBody

	replayable bool  // may be sent again even if it was sent before
	final      error // not nil: nothing more may be sent, and this is why

	failed   *http.Response // the latest response, if it failed and may be replaced
	response *http.Response // what no attempt may replace
	answer   body           // its body, if that was
	handed   bool           // over to the caller before it had ended

	turn     chan struct{} // to the caller: a response is handed over; the policies are done
	err      error         // what they returned
	stopped  bool          // or that they were stopped, since nobody wants to know
	crashed  bool          // or that they ended otherwise: in a panic with the
	panicked any           // value, or by runtime.Goexit if that is nil
}

type callKey struct{}

// Value returns the call itself for its key.
func (c *call) Value(key any) any {
	if key == (callKey{}) {
		return c
	}
	return c.Context.Value(key)
}

func newCall(t *Transport, req *http.Request) *call {
	c := &call{
		Context: req.Context(),
		t:       t,
		req:     req,
		body:    requestBody{req: req, max: t.MaxBuffer},
		turn:    make(chan struct{}, 1),
	}
	if t.Replayable != nil {
		c.replayable = t.Replayable(req)
	} else {
		c.replayable = replayable(req)
	}
	return c
}

// run takes the call through the policies, on a goroutine of its own.
func (c *call) run() {
	returned := false
	defer func() {
		if !returned {
			c.panicked = recover()
			c.crashed = c.panicked != nil || !c.stopped
		}
		c.turn <- struct{}{}
	}()
	stack.To8K() // which policies over an http.Transport commonly need
	c.err = c.t.wrapped(c)
	returned = true
}

// attempt is what the policies wrap. It sends the request of the call in ctx, and
// returns when the response's body is done with.
func attempt(ctx context.Context) error {
	c, ok := ctx.Value(callKey{}).(*call)
	switch {
	case !ok:
		return errNoCall
	case c.response != nil:
		// Nobody waits for what a policy makes of an error that it should have
		// left alone, except the caller, to return or to close the body.
		c.stopped = true
		runtime.Goexit()
	case c.final != nil:
		return c.final
	case ctx.Err() != nil:
		return ended.Error(ctx)
	}
	lease := newLease(ctx, c)
	defer lease.end()
	return c.send(ctx, lease)
}

// send sends the request and returns what the policies get to see of that.
func (c *call) send(ctx context.Context, lease *lease) error {
	c.discard()
	req, err := c.request(lease.or(ctx))
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
		c.keep(resp, lease)
		return failure
	}
	c.response = resp
	if failure != nil {
		failure = final(failure)
	}
	switch {
	case bodyless(c.req, resp):
		return failure
	case short(resp) && c.body.none(): // of two bodies, one may wait for the other
		if rest, err := drain(resp); rest == nil {
			return verdict(failure, err)
		}
	}
	return c.hand(ctx, failure)
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

func (c *call) classify(resp *http.Response) (failure error) {
	if c.t.Classify == nil {
		return classify(resp, c.mayRepeat())
	}
	returned := false
	defer func() {
		if !returned { // nobody else has it
			_ = resp.Body.Close()
		}
	}()
	failure = c.t.Classify(resp)
	returned = true
	return failure
}

// keep lets go of a failed response's connection, and holds the rest in case no
// other response follows.
func (c *call) keep(resp *http.Response, lease *lease) {
	c.failed = resp
	if rest, _ := drain(resp); rest != nil {
		rest.end = lease.extend()
	}
}

// discard closes a failed response that another one takes the place of.
func (c *call) discard() {
	if c.failed != nil {
		_ = c.failed.Body.Close()
		c.failed = nil
	}
}

// hand gives the caller the response, and returns when its body has ended or,
// though nobody may read or close that, ctx.
func (c *call) hand(ctx context.Context, failure error) error {
	done := ctx.Done()
	if duplex(c.response) {
		done = nil // the connection does not end with it
	}
	c.answer = body{inner: c.response.Body, call: c, end: make(chan error, 1)}
	c.response.Body = c.answer.reader()
	c.handed = true
	c.turn <- struct{}{}
	select {
	case err := <-c.answer.end:
		return verdict(failure, err)
	case <-done:
		return verdict(failure, ended.Error(ctx))
	}
}

// verdict returns what the policies get to see of a response that no attempt may
// replace, once they know how its body ended.
func verdict(failure, err error) error {
	if failure != nil || err == nil {
		return failure
	}
	return final(err)
}

// result returns what RoundTrip returns when the policies are done.
func (c *call) result() (*http.Response, error) {
	c.rethrow()
	if c.response != nil {
		return c.response, nil
	}
	if c.failed != nil && !c.abandoned() {
		return c.failed, nil
	}
	c.discard()
	switch err := c.err.(type) {
	case nil:
		return nil, errNoResponse
	case *finalError:
		return nil, err.err // as Base returned it
	}
	return nil, withTimeout(c.err)
}

// abandoned reports whether the policies gave up because the caller had.
func (c *call) abandoned() bool {
	end := c.req.Context().Err()
	return end != nil && errors.Is(c.err, end)
}

// rethrow lets the caller's goroutine go the way that the policies' went.
func (c *call) rethrow() {
	if !c.crashed {
		return
	}
	c.discard()
	if c.panicked != nil {
		panic(c.panicked)
	}
	runtime.Goexit()
}
