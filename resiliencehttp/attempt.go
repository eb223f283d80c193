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

// A call is one request that passes through the policies. It is also the ctx under which the policies run. From this
// ctx, policies get the linger.Work, which may continue after they have returned, and makeAttempt gets the call.
type call struct {
	context.Context
	caller  context.Context // the ctx of the caller
	t       *Transport
	req     *http.Request // the caller's request
	host    string        // see HostOf
	until   time.Time     // when the Timeout of a client expires; zero if there is none
	hedging *hedging      // the hedging that the call belongs to; usually nil
	over    func()        // called when the response is not read any further; may be nil
	body    *requestBody
	work    linger.Work

	replayable bool          // the request may be sent more than once
	fault      *requestError // set if the request itself is invalid; usually nil
	final      error         // why no further attempt may be sent; nil if one may be sent
	silent     bool          // the connection of an attempt was abandoned because it was silent
	last       *attempt      // the latest attempt with a response
	chosen     bool          // no other attempt may replace last
	inner      *call         // the call of a Transport inside Base whose policies hold resources; usually nil
	first      attempt       // the first attempt; a field saves an allocation
	delivered  deliveredCtx  // of the response's Request; a field saves an allocation
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

// A deliveredCtx is the ctx of a response's Request, from which ReportFailure gets the call.
type deliveredCtx struct {
	context.Context
	call *call
}

func (d *deliveredCtx) Value(key any) any {
	if key == (callKey{}) {
		return d.call
	}
	return d.Context.Value(key)
}

// makeAttempt is the innermost function, which the policies wrap. It sends the request of the call in ctx.
func makeAttempt(ctx context.Context) error {
	c := callOf(ctx)
	switch {
	case c == nil:
		return errNoCall
	case c.chosen:
		return nil // after an error, a policy that retries any error would continue
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
		if !returned && !c.mayRepeat() { // a policy may turn the panic into an error, and retry
			_ = c.makeFinal(errCrashed)
		}
	}()
	err := a.send()
	returned = true
	return err
}

// An attempt sends the request once. It is also the ctx under which the request is sent and its response is read. This
// ctx has the values of the policies' ctx, and is done when the policies' ctx is done. There is one exception. Policies
// cancel the ctx that they have derived when they return, and a response is read after that. So if there is a response,
// the attempt outlasts the policies' ctx.
type attempt struct {
	context.Context // the policies' ctx
	call            *call
	route           route
	resp            *http.Response // nil if there is none
	failure         error          // the error that the policies see instead of resp; nil for a success
	body            body           // the body of resp
	empty           bool           // all of resp has been read from the server

	// Set if the policies' ctx may be done before the caller's, or if there is a time limit:
	own      context.Context         // ends the attempt instead of the policies' ctx
	cancel   context.CancelCauseFunc // cancels own
	detach   func() bool             // detaches own from the policies' ctx; nil if own does not depend on it
	extended atomic.Bool             // the attempt outlasts the policies' ctx

	mu      sync.Mutex
	answers bool // the header of the response has arrived
	limits  [3]limit
	left    time.Duration // remaining time of the limit ofPolicy, which is paused until the policies have returned
	timer   *time.Timer
}

// A limit is a time limit. If it expires, it cancels the attempt with its cause.
type limit struct {
	at    time.Time // when the limit expires; zero if it does not apply
	cause error
}

// The indexes of attempt.limits.
const (
	ofPolicy  = iota // a resilience.Timeout of the policies, for the body
	ofSilence        // ResponseHeaderTimeout, then Idle
	ofReading        // the Timeout of a client
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
		a.route.attempt = a
	}
	a.Context = a.route.watch(ctx) // inside a: a ctx around a would hide the method AfterFunc
	if !limited {
		return a
	}
	a.own, a.cancel = context.WithCancelCause(c.caller)
	switch {
	case same:
	case ctx.Done() == c.Done(): // only the client's Timeout can end ctx, so a limit replaces an AfterFunc
		a.limits[ofReading] = limit{at: c.until, cause: t.passed}
	default:
		a.detach = context.AfterFunc(ctx, a.policiesEnded)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.arm(time.Now())
	return a
}

// moved starts ResponseHeaderTimeout when the attempt starts to dial, and again when the request has been written. In
// any other stage it stops it: neither an upload nor a wait for a connection of this process is the server's fault.
func (a *attempt) moved(s stage) {
	if s == dialing || s == written {
		a.awaitHeader()
	} else {
		a.unlimit(ofSilence)
	}
}

// awaitHeader starts ResponseHeaderTimeout, unless the header has arrived.
func (a *attempt) awaitHeader() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if passed := a.call.t.headerPassed; !a.answers {
		now := time.Now()
		a.limits[ofSilence] = limit{at: now.Add(passed.After), cause: passed}
		a.arm(now)
	}
}

// gotHeader is called when the header has arrived. ResponseHeaderTimeout continues for a Judge that reads ahead and for
// HoldBody, until the first byte of the body.
func (a *attempt) gotHeader() {
	passed := a.call.t.headerPassed
	if passed == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.answers = true
	if a.limits[ofSilence].at.IsZero() { // the header has arrived before the request was written
		now := time.Now()
		a.limits[ofSilence] = limit{at: now.Add(passed.After), cause: passed}
		a.arm(now)
	}
}

// policiesEnded is called when the policies' ctx is done. It cancels a, unless a outlasts that ctx. In that case, a
// policy may have canceled its ctx because it returned, and its timeout is the limit ofPolicy.
func (a *attempt) policiesEnded() {
	if !a.extended.Load() {
		a.cancel(context.Cause(a.Context))
	}
}

// awaitServer starts Idle, if it applies to the response.
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

// unlimit removes limits. It leaves the timer running; if it fires, arm ignores removed limits.
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

// arm cancels a if a limit has expired. Otherwise it sets the timer to the next limit. The caller holds a.mu.
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

// extend makes a outlast the policies' ctx. Otherwise the caller could not read the response. The time of a's limits
// does not pass until the policies have returned: they may wait to retry, stop retrying, and return this response.
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

// resume starts the limits for reading the response after the policies have returned. The policies' ctx no longer ends
// a.
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

// end releases the ctx and the timer of a. Without it, both would live as long as the caller's ctx.
func (a *attempt) end() {
	if a.own == nil {
		return
	}
	if a.detach != nil {
		a.detach()
	}
	a.cancel(nil)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.timer != nil {
		a.timer.Stop()
	}
}

// timedOut returns err. If the attempt failed because of ResponseHeaderTimeout, Idle, or a Timeout of policies that
// have returned, err is wrapped in a TimeoutError.
func (a *attempt) timedOut(err error) error {
	a.mu.Lock()
	a.arm(time.Now()) // a connection with the same deadline often returns before the timer fires
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

// Value hides the work of the call from Base. Otherwise policies inside Base would hold their resources until the end
// of this call's response.
func (a *attempt) Value(key any) any {
	switch key {
	case linger.Key{}:
		return nil
	case a.call.t: // a.call.t has sent the request: see Transport.mayLeadBack
		return true
	}
	if a.own != nil && a.own.Err() != nil {
		if v := a.own.Value(key); v == any(a.own) {
			return v // context.Cause must find the cause of own, not the cause of the policies' ctx
		}
	}
	return a.Context.Value(key)
}

// AfterFunc calls f when a is done. If a type has this method, package context cancels derived ctxs with the result of
// Err.
func (a *attempt) AfterFunc(f func()) (stop func() bool) {
	return context.AfterFunc(cmp.Or(a.own, a.Context), f)
}

// send sends the request. It returns the error that the policies see, or nil.
func (a *attempt) send() error {
	c := a.call
	c.discard()
	req := a.request()
	prepared := true
	defer func() {
		if !prepared { // Base does not get req, and does not close its body
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
			return c.makeFinal(err)
		}
		return c.failInvalid(err) // even after a deadline, because the server did not receive the request
	}
	a.watchUpload(req)
	resp, err := c.t.base().RoundTrip(req)
	if err == nil && resp == nil {
		err = errNothing
	}
	if err != nil {
		return a.noResponseError(err)
	}
	a.gotHeader()
	if c.hedging != nil {
		c.t.lastHeard.note(a.route.connection())
	}
	complete(resp, req)
	return a.handleResponse(req, resp)
}

// watchUpload starts ResponseHeaderTimeout at the end of the request's body. Otherwise it would not start if Base does
// not call the hooks of httptrace. If Base calls them, they start it instead.
func (a *attempt) watchUpload(req *http.Request) {
	c := a.call
	if _, std := c.t.base().(*http.Transport); std || c.t.headerPassed == nil {
		return
	}
	if body, ok := req.Body.(*sentBody); ok {
		body.onSent(func() {
			if a.route.at() == noConnRequested {
				a.awaitHeader()
			}
		})
		return
	}
	a.awaitHeader()
}

// request returns a copy of the caller's request for Base and Prepare, which may change it. The header and the URL are
// also copied, except for a transport of net/http, which does not change them: see docs/decisions/http-client.md.
func (a *attempt) request() *http.Request {
	c := a.call
	var req *http.Request
	if _, std := c.t.base().(*http.Transport); std && c.t.Prepare == nil {
		req = c.req.WithContext(a)
	} else {
		req = c.req.Clone(a)
	}
	// An http.Client with a Timeout sets Cancel in addition to a deadline, for the same instant. The error of Base
	// would then look like a failure of the server.
	req.Cancel = nil //lint:ignore SA1019 it is deprecated
	if _, std := c.t.base().(*http.Transport); !std && c.silent {
		req.Close = true // the next attempt must not reuse a silent connection; see Transport.Base
	}
	return req
}

// handleResponse returns the error that the policies see instead of a response, or nil for a success.
func (a *attempt) handleResponse(req *http.Request, resp *http.Response) error {
	c, b := a.call, &a.body
	a.resp, b.inner, b.attempt = resp, resp.Body, a
	returned := false
	defer func() {
		if !returned { // after a panic or a truncated body, the caller does not get the response
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
		return a.noResponseError(b.aheadErr)
	}
	if resp.Request == req { // the Judge needed req, whose ctx has the call
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
		return c.makeFinal(failure)
	case !a.empty && mayHaveBody(c.req, resp):
		c.work.Continue()
	}
	return nil
}

// noResponseError returns the error that the policies see if there is no response, or if reading its body ahead failed.
func (a *attempt) noResponseError(err error) error {
	c := a.call
	err = a.timedOut(err)
	a.abandonIfSilent()
	a.awaitEnd()
	if a.Err() != nil && a.route.waited() || ownFault(err) {
		err = &waitError{err}
	}
	switch {
	case c.Err() != nil: // err is a result of the ctx, not of the request or the server
	case a.invalidRequest(err):
		return c.failInvalid(err)
	}
	if isPermanent(err) || !c.mayRepeat() && !(c.body.rewinds() && a.route.neverSent(c.body, err)) {
		return c.makeFinal(err)
	}
	return err
}

// awaitEnd waits, if the caller's ctx is done, until the policies' ctx is done. Derived ctxs are done a moment later
// than their parent. Until then, the policies would treat the error of a as a failure of the server.
func (a *attempt) awaitEnd() {
	c := a.call
	if c.caller.Err() != nil || context.Cause(a) == error(c.t.passed) {
		<-c.Done()
		select {
		case <-a.Context.Done():
		case <-time.After(time.Second): // a policy may use a ctx that does not end with the caller's
		}
	}
}

// mayRepeat reports whether a request that has been sent may be sent again.
func (c *call) mayRepeat() bool { return c.replayable && c.body.rewinds() }

// mayRepeatAfter reports whether the request may be sent again after the response resp, which Judge treats as failure.
func (c *call) mayRepeatAfter(failure error, resp *http.Response) bool {
	return c.mayRepeat() || c.body.rewinds() && resends(failure) && !fromGateway(resp.StatusCode)
}

// makeFinal returns err for the policies, and prevents further attempts even if a policy retries.
func (c *call) makeFinal(err error) error {
	c.final = retry.Permanent(err)
	return c.final
}

// failInvalid is like makeFinal, for a request that itself is invalid.
func (c *call) failInvalid(err error) error {
	c.fault = &requestError{err: err}
	c.fault.deciding.Store(true)
	return c.makeFinal(c.fault)
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

// discard closes the latest response, which the caller does not get.
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
	abandoned := end != nil && errors.Is(err, end) // the policies stopped because the caller's ctx is done
	if a := c.last; a != nil && (a.failure == nil || a.resp.StatusCode >= 400) && !abandoned {
		return a.deliver(), a.failure, nil
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

// deliver returns the response for the caller. The policies release their resources when its body ends.
func (a *attempt) deliver() *http.Response {
	c := a.call
	if a.failure != nil {
		a.resp.Header = a.resp.Header.Clone() // the StatusError shares the header
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
			c.delivered = deliveredCtx{ctx, c}
			a.resp.Request = a.resp.Request.WithContext(&c.delivered)
		}
	}
	return a.resp
}

// ended is called when the response is not read any further.
func (c *call) ended() {
	if c.over != nil {
		c.over()
	}
}

// close closes the latest response, if there is one, and ends the work.
func (c *call) close() {
	defer c.work.End(nil)
	c.discard()
}
