package resiliencehttp

import (
	"context"
	"errors"
	"net/http"
	"runtime"
	"sync/atomic"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/stack"
)

// A call is one request on its way through the policies. It is also the ctx that
// they run under, so that an attempt, at their other end, finds it.
//
// The policies run on a goroutine of their own, so that they can go on after
// RoundTrip has returned; all else happens on the caller's. The two take turns,
// as calls do on one stack: the policies' goroutine passes the turn when it wants
// an attempt to be made, and when it is done; the caller's passes it back with
// the outcome. One of them always waits, so that nothing else needs a lock.
//
// Base is left on the caller's, whose stack has room for it and shows in its
// panics. The turn is passed through channels, not by [iter.Pull], which is
// faster but ends the process if one of a body's readers is locked to a thread.
type call struct {
	context.Context
	t    *Transport
	req  *http.Request // the caller's
	body requestBody

	replayable bool  // may be sent again even if it was sent before
	final      error // not nil: nothing more may be sent, and this is why

	turn    chan struct{}   // to the caller: see attempt, or over
	attempt context.Context // of the attempt to be made
	lease   *lease          // what it is sent under, if not that
	over    bool            // the policies are done
	outcome chan error      // to the policies: how the attempt went
	crash   *crash          // how it ended instead, if it did not return

	failed   *http.Response // the latest response, if it failed and may be replaced
	rest     *rest          // its body, if there was too much to drain
	response *http.Response // what no attempt may replace
	answer   body           // its body
	handed   atomic.Bool    // the caller has it, and outcome gets a value when answer ends

	err     error  // what the policies returned
	crashed *crash // or how they ended instead
	stopped bool   // or that they were stopped, since nobody wants to know
}

// A crash is a panic with value, or runtime.Goexit if that is nil.
type crash struct{ value any }

// again lets the current goroutine go the way of another one.
func (c *crash) again() {
	if c.value != nil {
		panic(c.value)
	}
	runtime.Goexit()
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
		outcome: make(chan error, 1),
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
			if value := recover(); value != nil || !c.stopped {
				c.crashed = &crash{value}
			}
		}
		c.over = true
		c.turn <- struct{}{}
	}()
	stack.To8K() // which policies commonly need
	c.err = c.t.wrapped(c)
	returned = true
}

// attempt is what the policies wrap. It has the caller send the request of the
// call in ctx, and returns when the response's body is done with.
func attempt(ctx context.Context) error {
	c, ok := ctx.Value(callKey{}).(*call)
	switch {
	case !ok:
		return errNoCall
	case c.handed.Load():
		// Nobody waits for what a policy makes of an error that it should have
		// left alone, except the caller, to close the body.
		c.stopped = true
		runtime.Goexit()
	case c.final != nil:
		return c.final
	case ctx.Err() != nil:
		return ended.Error(ctx)
	}
	c.attempt, c.lease = ctx, newLease(ctx, c)
	defer c.lease.end()
	c.turn <- struct{}{}

	end := ctx.Done()
	for {
		select {
		case err := <-c.outcome:
			if crash := c.crash; crash != nil {
				c.crash = nil
				crash.again()
			}
			return err
		case <-end:
			if c.handed.Load() && !c.answer.duplex() {
				// The connection ends with the ctx, though nobody may read or close.
				return c.answer.verdict(ended.Error(ctx))
			}
			c.lease.end() // so that Base returns, and hand sees to the rest
			end = nil
		}
	}
}

// serve makes attempts for as long as the policies want them and RoundTrip has
// nothing to return.
func (c *call) serve() {
	for {
		<-c.turn
		if c.over || c.try() {
			return
		}
	}
}

// try makes an attempt. It reports whether RoundTrip has something to return.
func (c *call) try() (done bool) {
	returned := false
	defer func() {
		if returned {
			return
		}
		// The policies crash, too, each returning its permits, unless one makes an
		// error of it. This goroutine goes on from here, its stack still in place.
		c.crash = &crash{recover()}
		c.outcome <- nil
		c.serve()
		c.rethrow()
		done = true
	}()
	err, done := c.send()
	returned = true
	if !done {
		c.outcome <- err
	}
	return done
}

// rethrow lets the crash of the policies be the caller's.
func (c *call) rethrow() {
	if c.crashed != nil {
		c.discard()
		c.crashed.again()
	}
}

// send sends the request and hands the response over, unless its failure, or the
// error in its place, goes to the policies first.
func (c *call) send() (err error, handed bool) {
	c.discard()
	req, err := c.request()
	if err != nil {
		c.final = &finalError{err}
		return c.final, false
	}
	resp, err := c.t.base().RoundTrip(req)
	if err != nil {
		return c.unanswered(req, err), false
	}
	if resp.Request == req {
		resp.Request = c.req
	}
	if resp.Body == nil {
		resp.Body = http.NoBody
	}
	failure := c.classify(resp)
	if failure != nil && c.mayRepeat() && worthRepeating(failure) && !duplex(resp) {
		c.keep(resp)
		return failure, false
	}
	return c.hand(resp, failure)
}

// request returns what Base is to send: a copy, so that nothing that is done to
// it shows in the caller's.
func (c *call) request() (*http.Request, error) {
	ctx := c.attempt
	if c.lease != nil {
		ctx = c.lease
	}
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
func (c *call) keep(resp *http.Response) {
	c.failed = resp
	if c.rest = drain(resp); c.rest != nil {
		c.rest.end = c.lease.extend()
	}
}

// discard closes a failed response that another one takes the place of.
func (c *call) discard() {
	if c.failed != nil {
		_ = c.failed.Body.Close()
		c.failed, c.rest = nil, nil
	}
}

// hand gives the caller a response that no attempt may replace, and makes the
// attempt last as long as its body does.
func (c *call) hand(resp *http.Response, failure error) (err error, handed bool) {
	c.final = errAnswered
	if failure != nil {
		failure = final(failure)
		c.final = failure
	}
	c.response = resp
	if bodyless(c.req, resp) {
		return failure, false
	}
	c.answer = body{inner: resp.Body, call: c, failure: failure}
	resp.Body = c.answer.reader()
	c.handed.Store(true)
	if end := c.attempt.Err(); end != nil && !c.answer.duplex() {
		c.answer.ended(end) // attempt may have looked before
	}
	return nil, true
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
