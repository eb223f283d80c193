package resiliencehttp

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/retry"
)

// A call is one request on its way through the policies, and the ctx that they run under. They
// find in it the linger.Work, which may go on after they have returned, and an attempt its call.
type call struct {
	context.Context
	caller  context.Context // the caller's
	t       *Transport
	req     *http.Request // the caller's
	host    string        // see HostOf
	until   time.Time     // when the Timeout of a client passes; zero if there is none
	hedging *hedging      // that the call is a part of; mostly nil
	over    func()        // called when nothing more of the response is read; may be nil
	body    *requestBody
	work    linger.Work

	replayable bool          // the request may be sent more than once
	fault      *requestError // the request is wrong in itself; mostly nil
	final      error         // why nothing more may be sent; nil if something may
	silent     bool          // the connection of an attempt was silent
	last       *attempt      // the latest with a response
	chosen     bool          // no other attempt may take the place of last
	inner      *call         // of a Transport within Base that holds something for the response; mostly nil
	first      attempt
}

type callKey struct{}

func callOf(ctx context.Context) *call {
	c, _ := ctx.Value(callKey{}).(*call)
	return c
}

func (c *call) Value(key any) any {
	switch key {
	case linger.Key{}:
		return &c.work
	case callKey{}:
		return c
	}
	return c.Context.Value(key)
}

// makeAttempt is the function that the policies wrap. It sends the request of the call in
// ctx.
func makeAttempt(ctx context.Context) error {
	c := callOf(ctx)
	switch {
	case c == nil:
		return errNoCall
	case c.chosen:
		return nil // an error would make a policy that retries any error go on
	case c.final != nil:
		return c.final
	case ctx.Err() != nil:
		return ended.Error(ctx)
	}
	a := c.newAttempt(ctx)
	returned := false
	defer func() {
		if !a.extended.Load() {
			a.end()
		}
		if !returned && !c.mayRepeat() { // a panic, of which a policy may make an error
			_ = c.finally(errCrashed)
		}
	}()
	err := a.send()
	returned = true
	return err
}

// An attempt is one sending of the request, and the ctx that it is sent and its response is
// read under. That has the values of the policies' ctx. It ends when the policies' ctx does,
// but outlasts it if there is a response to read: policies cancel a ctx that they derived
// when they return, and the body is read after that.
type attempt struct {
	context.Context // the policies'
	call            *call
	route           route
	resp            *http.Response // nil if there is none
	failure         error          // that the policies see in place of resp; nil for a success
	body            body           // of resp
	empty           bool           // nothing of resp remains to be read from the server

	// Set if the policies' ctx may end before the caller's, or a limit of time is set:
	own      context.Context // its end
	cancel   context.CancelCauseFunc
	leave    func() bool // unties own from the policies' ctx; nil if that is no other
	extended atomic.Bool // the attempt outlasts the policies' ctx

	mu      sync.Mutex
	answers bool // the header of the response has arrived
	limits  [3]limit
	left    time.Duration // of the limit ofPolicy, which does not pass while the policies wait
	timer   *time.Timer
}

// A limit ends an attempt with its cause.
type limit struct {
	at    time.Time // zero if it does not count
	cause error
}

const (
	ofPolicy  = iota // what a resilience.Timeout leaves for the body
	ofSilence        // ResponseHeaderTimeout, and then Idle
	ofReading        // what the Timeout of a client leaves for it
)

func (c *call) newAttempt(ctx context.Context) *attempt {
	a := &c.first
	if a.call != nil {
		a = new(attempt)
	}
	t := c.t
	a.Context, a.call = ctx, c
	same := ctx.Done() == c.caller.Done()
	limited := !same || c.over != nil || t.headerPassed != nil || t.idlePassed != nil
	a.route.pooled = pooled(t.base())
	if c.hedging != nil {
		c.hedging.add(&a.route)
	}
	if t.headerPassed != nil {
		a.route.moved = a.moved
	}
	// within a: around it, the ctx of the trace would hide AfterFunc
	a.Context = a.route.watch(ctx)
	if !limited {
		return a
	}
	a.own, a.cancel = context.WithCancelCause(c.caller)
	switch {
	case same:
	case ctx.Done() == c.Done(): // nothing else to wait for than a time
		a.limits[ofReading] = limit{at: c.until, cause: t.passed}
	default:
		a.leave = context.AfterFunc(ctx, a.policiesEnded)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.arm(time.Now())
	return a
}

// moved has ResponseHeaderTimeout begin when the request has been written, and limits a dial to the same time.
// Neither a wait for a connection of this process nor an upload counts.
func (a *attempt) moved(s stage) {
	if s == dialing || s == written {
		a.awaitHeader()
	} else {
		a.unlimit(ofSilence)
	}
}

// awaitHeader has ResponseHeaderTimeout begin, unless the header has arrived.
func (a *attempt) awaitHeader() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if passed := a.call.t.headerPassed; !a.answers {
		now := time.Now()
		a.limits[ofSilence] = limit{at: now.Add(passed.After), cause: passed}
		a.arm(now)
	}
}

// heardHeader is called when the header has arrived. Until the first byte of the body, the limit remains for
// a Judge that reads ahead and for HoldBody.
func (a *attempt) heardHeader() {
	passed := a.call.t.headerPassed
	if passed == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.answers = true
	if a.limits[ofSilence].at.IsZero() { // the header came before the request was written
		now := time.Now()
		a.limits[ofSilence] = limit{at: now.Add(passed.After), cause: passed}
		a.arm(now)
	}
}

// policiesEnded ends a when the policies' ctx has ended, unless a outlasts that: a policy that
// returns cancels it, and a timeout that covers the body is a limit.
func (a *attempt) policiesEnded() {
	if !a.extended.Load() {
		a.cancel(context.Cause(a.Context))
	}
}

// awaitServer has Idle begin, if it applies to the response.
func (a *attempt) awaitServer() {
	passed := a.call.t.idlePassed
	if passed == nil || a.call.t.idleByDefault && paused(a.resp) {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	a.limits[ofSilence] = limit{at: now.Add(passed.After), cause: passed}
	a.arm(now)
}

// resetIdle restarts Idle, if it applies.
func (a *attempt) resetIdle() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if l := &a.limits[ofSilence]; !l.at.IsZero() {
		l.at = time.Now().Add(a.call.t.Idle)
	}
}

// unlimit takes limits away. The timer may still fire for one, and finds none.
func (a *attempt) unlimit(which ...int) {
	if a.own == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, i := range which {
		a.limits[i].at = time.Time{}
	}
}

// arm ends a if a limit has passed. Otherwise it has the timer fire at the next.
func (a *attempt) arm(now time.Time) {
	var next time.Time
	for _, l := range a.limits {
		switch {
		case l.at.IsZero():
		case !now.Before(l.at):
			a.cancel(l.cause)
			return
		case next.IsZero() || l.at.Before(next):
			next = l.at
		}
	}
	switch {
	case next.IsZero():
	case a.timer == nil:
		a.timer = time.AfterFunc(next.Sub(now), func() {
			a.mu.Lock()
			defer a.mu.Unlock()
			a.arm(time.Now())
		})
	default:
		a.timer.Reset(next.Sub(now))
	}
}

// extend lets a outlast the policies, so that its response can be read. Its time does not pass
// until they have returned: they may wait for another attempt, give up, and have it handed out.
func (a *attempt) extend() {
	a.extended.Store(true)
	if a.own == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if l := linger.LimitOf(a.Context); l != nil {
		a.limits[ofPolicy].cause, a.left = l.Cause, max(1, time.Until(l.At))
	}
}

// resume goes on with the limits of a when the policies have returned. Their ctx no longer ends
// it.
func (a *attempt) resume() {
	if a.own == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	switch t := a.call.t; {
	case t.readingPassed != nil:
		a.limits[ofReading] = limit{at: now.Add(t.readingPassed.After), cause: t.readingPassed}
	case !a.call.until.IsZero():
		a.limits[ofReading] = limit{at: a.call.until, cause: t.passed}
	}
	if a.left > 0 {
		a.limits[ofPolicy].at = now.Add(a.left)
	}
	a.arm(now)
}

// end ends a.
func (a *attempt) end() {
	if a.own == nil {
		return
	}
	if a.leave != nil {
		a.leave()
	}
	a.cancel(nil)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.timer != nil {
		a.timer.Stop()
	}
}

// timedOut returns err, in a TimeoutError if silence is why the attempt failed, or a Timeout of the
// policies, which have returned.
func (a *attempt) timedOut(err error) error {
	a.mu.Lock()
	a.arm(time.Now()) // a connection with the same deadline often returns a moment before
	late := []error{a.call.t.headerPassed, a.call.t.idlePassed, a.limits[ofPolicy].cause}
	a.mu.Unlock()
	passed, ok := context.Cause(a).(*resilience.TimeoutError)
	if !ok || err == error(passed) || !slices.Contains(late, error(passed)) {
		return err
	}
	return &resilience.TimeoutError{Name: passed.Name, After: passed.After, Err: err}
}

func (a *attempt) Done() <-chan struct{} { return cmp.Or(a.own, a.Context).Done() }

func (a *attempt) Err() error {
	err := cmp.Or(a.own, a.Context).Err()
	if a.own != nil && errors.Is(context.Cause(a.own), context.DeadlineExceeded) {
		return context.DeadlineExceeded
	}
	return err
}

// Value hides the work of the call from Base: policies within Base hold nothing for this
// response.
func (a *attempt) Value(key any) any {
	switch key {
	case linger.Key{}:
		return nil
	case a.call.t: // that the request has been here: see Transport.mayLeadBack
		return true
	}
	if a.own == nil || a.own.Err() == nil {
		return a.Context.Value(key)
	}
	if v := context.WithoutCancel(a.Context).Value(key); v != nil {
		return v
	}
	return a.own.Value(key) // context.Cause finds the cause of own, and not that of the policies' ctx
}

// AfterFunc has package context cancel a ctx that is derived from a with the result of Err.
func (a *attempt) AfterFunc(f func()) (stop func() bool) {
	return context.AfterFunc(cmp.Or(a.own, a.Context), f)
}

// send sends the request and returns the error that the policies see, or nil.
func (a *attempt) send() error {
	c := a.call
	c.discard()
	req := a.request()
	prepared := true
	defer func() {
		if !prepared { // no Base will close it
			closeBody(req)
		}
	}()
	err := c.body.prepare(req)
	if err == nil && c.t.Prepare != nil {
		prepared = false
		err = c.t.Prepare(req)
		prepared = err == nil
	}
	if err != nil {
		a.awaitEnd()
		if c.Err() == context.Canceled {
			return c.finally(err)
		}
		return c.wrong(err) // even after a deadline: the server did not get the request
	}
	a.watchUpload(req)
	resp, err := c.t.base().RoundTrip(req)
	if err == nil && resp == nil {
		err = errNothing
	}
	if err != nil {
		return a.unanswered(err)
	}
	a.heardHeader()
	if c.hedging != nil {
		c.t.lastHeard.note(a.route.connection())
	}
	complete(resp, req)
	return a.answered(req, resp)
}

// watchUpload has ResponseHeaderTimeout begin for a Base that does not call the hooks of httptrace: with the
// end of the request's body. A Base that calls them replaces that.
func (a *attempt) watchUpload(req *http.Request) {
	c := a.call
	if _, std := c.t.base().(*http.Transport); std || c.t.headerPassed == nil {
		return
	}
	if body, ok := req.Body.(*sentBody); ok {
		body.onSent(func() {
			if a.route.at() == unasked {
				a.awaitHeader()
			}
		})
		return
	}
	a.awaitHeader()
}

// request returns a copy of the caller's request to send, so that the caller's is not changed.
// Its header and URL are copied too, unless they go to a transport of net/http, which does not
// change them: see docs/decisions/http-client.md.
func (a *attempt) request() *http.Request {
	c := a.call
	var req *http.Request
	if _, std := c.t.base().(*http.Transport); std && c.t.Prepare == nil {
		req = c.req.WithContext(a)
	} else {
		req = c.req.Clone(a)
	}
	// An http.Client with a Timeout sets it beside a deadline, for the same instant, and Base would tell
	// of it by an error of the server's.
	req.Cancel = nil //lint:ignore SA1019 it is deprecated
	if _, std := c.t.base().(*http.Transport); !std && c.silent {
		req.Close = true // what a foreign Base understands
	}
	return req
}

// answered returns the error that the policies see in place of a response, or nil.
func (a *attempt) answered(req *http.Request, resp *http.Response) error {
	c, b := a.call, &a.body
	a.resp, b.inner, b.attempt = resp, resp.Body, a
	returned := false
	defer func() {
		if !returned { // a panic, or a break: the caller does not get it
			_ = b.closeInner()
		}
	}()
	failure := c.judge(resp, b)
	if failure == nil && c.t.HoldBody && resp.Body != http.NoBody && b.mayBeRead() {
		b.touched = true
		b.fill(1, b.read)
	}
	b.begin()
	if b.broken() {
		return a.unanswered(b.aheadErr)
	}
	if resp.Request == req { // the Judge needed it, to find the call
		resp.Request = c.req
	}
	chosen := failure == nil || !c.mayRepeatAfter(failure, resp) ||
		!behavior.Read(failure).Retryable || duplex(resp)
	a.failure, c.last, c.chosen = failure, a, chosen
	a.empty = resp.Body == http.NoBody || !chosen && b.drain()
	returned = true
	if !a.empty {
		a.extend()
	}
	switch {
	case !chosen:
		return failure
	case failure != nil:
		return c.finally(failure)
	case !a.empty && mayHaveBody(c.req, resp):
		c.work.Continue()
	}
	return nil
}

// unanswered returns the error that the policies see when there is no response, or one whose
// body has broken off while it was read ahead.
func (a *attempt) unanswered(err error) error {
	c := a.call
	err = a.timedOut(err)
	a.abandonIfSilent()
	a.awaitEnd()
	if a.Err() != nil && a.route.waited() || ownFault(err) {
		err = &waitError{err}
	}
	switch {
	case c.Err() != nil: // err says nothing about the request or the server
	case a.wrongRequest(err):
		return c.wrong(err)
	}
	if isPermanent(err) || !c.mayRepeat() && !(c.body.rewinds() && a.route.neverSent(c.body, err)) {
		return c.finally(err)
	}
	return err
}

// awaitEnd waits, if the caller's ctx has ended, for those that the policies see: they may end a moment later, and
// the error of a would say something of the server until then.
func (a *attempt) awaitEnd() {
	c := a.call
	if c.caller.Err() != nil || context.Cause(a) == error(c.t.passed) {
		<-c.Done()
		select {
		case <-a.Context.Done():
		case <-time.After(time.Second): // that of a policy may not end with the caller's
		}
	}
}

// mayRepeat reports whether a request that has been sent may be sent again.
func (c *call) mayRepeat() bool { return c.replayable && c.body.rewinds() }

// mayRepeatAfter reports the same of a request that was answered by resp.
func (c *call) mayRepeatAfter(failure error, resp *http.Response) bool {
	return c.mayRepeat() || c.body.rewinds() && resends(failure) && !fromGateway(resp.StatusCode)
}

// finally returns err for the policies and ends the sending, even if they try again.
func (c *call) finally(err error) error {
	c.final = retry.Permanent(err)
	return c.final
}

// wrong is like finally, for a request that is wrong in itself.
func (c *call) wrong(err error) error {
	c.fault = &requestError{err: err}
	c.fault.deciding.Store(true)
	return c.finally(c.fault)
}

func (c *call) judge(resp *http.Response, b *body) error {
	if c.t.Judge != nil {
		return c.t.Judge(resp, &Ahead{body: b})
	}
	if failed := classify(resp, c, c.mayRepeat()); failed != nil {
		return failed
	}
	return nil
}

// discard closes the response that another replaces.
func (c *call) discard() {
	if c.last != nil {
		_ = c.last.body.closeInner()
		c.last.end()
	}
	c.last, c.chosen = nil, false
}

// result returns what Transport.send returns after the policies have returned err.
func (c *call) result(err error) (resp *http.Response, failure, _ error) {
	if c.fault != nil {
		c.fault.deciding.Store(false)
	}
	end := c.Err()
	abandoned := end != nil && errors.Is(err, end) // the policies gave up because of the caller
	if a := c.last; a != nil && (a.failure == nil || a.resp.StatusCode >= 400) && !abandoned {
		return a.hand(), a.failure, nil
	}
	if err == nil && c.last != nil {
		err = c.last.failure
	}
	c.close()
	if err == c.final { // both may be nil
		err = errors.Unwrap(err)
	}
	return nil, nil, withTimeout(cmp.Or(err, errNoResponse))
}

// hand returns the response for the caller. The end of its body releases what the policies
// hold for it.
func (a *attempt) hand() *http.Response {
	c := a.call
	if a.failure != nil {
		a.resp.Header = a.resp.Header.Clone() // the StatusError has it
	}
	if a.empty {
		c.ended()
	} else {
		a.resume()
	}
	if held := c.work.Held(); held || a.own != nil && !a.empty || a.body.touched {
		a.resp.Body = a.body.open()
		if held { // ReportFailure finds the call
			ctx := a.resp.Request.Context()
			if inner := callOf(ctx); inner != callOf(c.caller) {
				c.inner = inner
			}
			a.resp.Request = a.resp.Request.WithContext(context.WithValue(ctx, callKey{}, c))
		}
	}
	return a.resp
}

// ended is called when nothing more is read.
func (c *call) ended() {
	if c.over != nil {
		c.over()
	}
}

// close closes the response, if there is one, and ends the work.
func (c *call) close() {
	defer c.work.End(nil)
	c.discard()
}
