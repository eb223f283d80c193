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

// A call is one request that passes through the policies. It is also the ctx under which the policies run.
// From this ctx, policies obtain the linger.Work, which may continue after they have returned, and
// makeAttempt obtains the call.
type call struct {
	context.Context
	caller  context.Context // the ctx of the caller
	t       *Transport
	req     *http.Request // the caller's request
	host    string        // see HostOf
	until   time.Time     // time at which ClientConfig.Timeout expires; zero if there is no Timeout
	hedging *hedging      // the hedging that the call belongs to; usually nil
	over    func()        // called when the caller has finished reading the response; may be nil
	body    *requestBody
	work    linger.Work

	replayable bool          // whether the request may be sent more than once
	fault      *requestError // set if the request itself is invalid; usually nil
	final      error         // the reason why no further attempt may be sent; nil if another attempt may be sent
	silent     bool          // whether an attempt's connection was abandoned after a timeout
	last       *attempt      // the latest attempt with a response
	chosen     bool          // whether last is the final result, which no other attempt may replace
	inner      *call         // a call by a Transport inside Base, whose policies hold resources; usually nil
	first      attempt       // the first attempt; a field saves an allocation
	delivered  deliveredCtx  // the ctx of the response's Request; a field saves an allocation
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

// A deliveredCtx is the ctx of a response's Request. It contains the call, for ReportFailure.
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

// makeAttempt is the innermost function, which the policies wrap. It sends the request of ctx's call once.
func makeAttempt(ctx context.Context) error {
	c := callOf(ctx)
	switch {
	case c == nil:
		return errNoCall
	case c.chosen:
		return nil // an error could make a policy send the request again
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
		if !returned && !c.mayRepeat() { // a policy may recover the panic and retry
			_ = c.makeFinal(errCrashed)
		}
	}()
	err := a.send()
	returned = true
	return err
}

// An attempt sends the request once. It is also the ctx under which the request is sent and its response is
// read.
//
// This ctx has the values of the policies' ctx, which is the ctx that the policies passed to makeAttempt. It
// is also done when the policies' ctx is done, with one exception. When policies return, they cancel the ctx
// that they have derived, but the caller reads the response after that. Therefore, if there is a response,
// the attempt outlasts the policies' ctx.
type attempt struct {
	context.Context // the policies' ctx
	call            *call
	route           route
	resp            *http.Response // the response; nil if there is none
	failure         error          // the error that the policies see instead of resp; nil for a success
	body            body           // the body of resp
	empty           bool           // whether all of resp has been read from the server

	// The fields below are set only if the policies' ctx may be done before the caller's ctx, or if a time
	// limit applies.
	own      context.Context         // replaces the policies' ctx: the attempt is done when own is done
	cancel   context.CancelCauseFunc // cancels own
	detach   func() bool             // detaches own from the policies' ctx; nil if own does not depend on it
	extended atomic.Bool             // whether the attempt outlasts the policies' ctx

	mu      sync.Mutex
	answers bool // whether the header of the response has arrived
	limits  [3]limit
	// left is the remaining time of the limit ofPolicy. This limit is paused until the policies have
	// returned.
	left  time.Duration
	timer *time.Timer
}

// A limit is a time limit. If it expires, it cancels the attempt with its cause.
type limit struct {
	at    time.Time // the time at which the limit expires; zero if it does not apply
	cause error
}

// The indexes of attempt.limits.
const (
	ofPolicy  = iota // a timeout of the policies, which applies to the body
	ofSilence        // ResponseHeaderTimeout until the body is read, then Idle
	ofReading        // ClientConfig.Timeout
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
	a.Context = a.route.watch(ctx) // derive the ctx inside a, because a ctx derived from a would hide its method AfterFunc
	if !limited {
		return a
	}
	a.own, a.cancel = context.WithCancelCause(c.caller)
	switch {
	case same:
	case ctx.Done() == c.Done(): // only ClientConfig.Timeout can cancel ctx, so a limit is enough
		a.limits[ofReading] = limit{at: c.until, cause: t.passed}
	default:
		a.detach = context.AfterFunc(ctx, a.policiesEnded)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.arm(time.Now())
	return a
}

// moved starts ResponseHeaderTimeout when the attempt starts to dial, and again when the request has been
// written. In any other stage, moved stops ResponseHeaderTimeout, because the server is responsible neither
// for the duration of an upload nor for a wait for a free connection.
func (a *attempt) moved(s stage) {
	if s == dialing || s == written {
		a.awaitHeader()
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.answers { // otherwise net/http called the hook late, and the limit already applies to the body
		a.limits[ofSilence].at = time.Time{}
	}
}

// awaitHeader starts ResponseHeaderTimeout, unless the response's header has already arrived.
func (a *attempt) awaitHeader() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if passed := a.call.t.headerPassed; !a.answers {
		now := time.Now()
		a.limits[ofSilence] = limit{at: now.Add(passed.After), cause: passed}
		a.arm(now)
	}
}

// gotHeader is called when the response's header has arrived. ResponseHeaderTimeout continues until the first
// byte of the body has been read, because a Judge or HoldBody may read ahead.
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

// policiesEnded is called when the policies' ctx is done. It cancels a, unless a outlasts that ctx. If it
// does, the policies' ctx may be done only because a policy has returned. The policy's timeout then continues
// as the limit ofPolicy.
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

// unlimit removes limits. It does not stop the timer, because arm ignores removed limits.
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

// arm cancels a if a limit has expired. Otherwise it sets the timer to the limit that expires next. The
// caller holds a.mu.
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

// extend makes a outlast the policies' ctx. Otherwise the caller could not read the response. The timeout of
// the policies is paused until they have returned: a retrier may first wait, then not send another attempt,
// and finally return this response.
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

// resume starts the limits for reading the response. It is called after the policies have returned.
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

// end releases a's ctx and timer. Without end, they would stay allocated as long as the caller's ctx.
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

// timedOut wraps err in a TimeoutError if the attempt failed because ResponseHeaderTimeout or Idle expired,
// or a timeout of policies that have already returned. Otherwise it returns err unchanged.
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

// Value hides the call's Work from Base. Otherwise policies inside Base would find the Work in the ctx, and
// would hold their resources until this call's response ends.
func (a *attempt) Value(key any) any {
	switch key {
	case linger.Key{}:
		return nil
	case a.call.t: // marks the request as sent by a.call.t; see Transport.mayLeadBack
		return true
	}
	if a.own != nil && a.own.Err() != nil {
		if v := a.own.Value(key); v == any(a.own) {
			return v // context.Cause must return the cause of own, and not of the policies' ctx
		}
	}
	return a.Context.Value(key)
}

// AfterFunc calls f when a is done. Because a has this method, package context cancels derived ctxs with the
// result of a.Err.
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
		if !prepared { // Base does not receive req, so it does not close its body
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
		failure := c.failInvalid(err) // even after a deadline, because the request never reached the server
		c.fault.late = a.Err() != nil
		return failure
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

// watchUpload starts ResponseHeaderTimeout at the end of the request's body if Base does not call the hooks
// of httptrace. If Base calls these hooks, they start ResponseHeaderTimeout.
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

// request returns a copy of the caller's request for Base and Prepare, which may change the copy. Usually the
// header and the URL are also copied. They are not copied if Base is an *http.Transport and there is no
// Prepare, because an *http.Transport does not change them; see docs/decisions/http-client.md.
func (a *attempt) request() *http.Request {
	c := a.call
	var req *http.Request
	if _, std := c.t.base().(*http.Transport); std && c.t.Prepare == nil {
		req = c.req.WithContext(a)
	} else {
		req = c.req.Clone(a)
	}
	// An http.Client with a Timeout sets both a deadline and Cancel, for the same time. If Cancel took effect
	// first, Base's error would look like a failure of the server.
	req.Cancel = nil //lint:ignore SA1019 it is deprecated
	if _, std := c.t.base().(*http.Transport); !std && c.silent {
		req.Close = true // the next attempt must not reuse an abandoned connection; see Transport.Base
	}
	return req
}

// handleResponse returns the error that the policies see instead of a response, or nil for a success.
func (a *attempt) handleResponse(req *http.Request, resp *http.Response) error {
	c, b := a.call, &a.body
	a.resp, b.inner, b.attempt = resp, resp.Body, a
	returned := false
	defer func() {
		if !returned { // after a panic, or if reading ahead failed, the caller does not receive the response
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

// noResponseError returns the error that the policies see if RoundTrip failed with err, or if reading the
// body ahead failed with err.
func (a *attempt) noResponseError(err error) error {
	c := a.call
	err = a.timedOut(err)
	a.abandonIfSilent()
	a.awaitEnd()
	if a.Err() != nil && a.route.waited() || ownFault(err) {
		err = &waitError{err}
	}
	switch {
	case c.Err() != nil: // the ctx is the reason for err, and not the request or the server
	case a.invalidRequest(err):
		return c.failInvalid(err)
	}
	if isPermanent(err) || !c.mayRepeat() && !(c.body.rewinds() && a.route.neverSent(c.body, err)) {
		return c.makeFinal(err)
	}
	return err
}

// awaitEnd waits until the policies' ctx is done if the caller's ctx is done or ClientConfig.Timeout has
// expired. A derived ctx may be done slightly later than its parent. In between, the policies would treat the
// attempt's error as a failure of the server.
func (a *attempt) awaitEnd() {
	c := a.call
	if c.caller.Err() != nil || context.Cause(a) == error(c.t.passed) {
		<-c.Done()
		select {
		case <-a.Context.Done():
		case <-time.After(time.Second): // a policy's ctx may outlive the caller's ctx
		}
	}
}

// mayRepeat reports whether a request that has been sent may be repeated.
func (c *call) mayRepeat() bool { return c.replayable && c.body.rewinds() }

// mayRepeatAfter reports whether the request may be repeated after resp, for which Judge returned failure.
func (c *call) mayRepeatAfter(failure error, resp *http.Response) bool {
	return c.mayRepeat() || c.body.rewinds() && resends(failure) && !fromGateway(resp.StatusCode)
}

// makeFinal marks err as not retryable and returns it. Even if a policy still retries, no further attempt is
// sent.
func (c *call) makeFinal(err error) error {
	c.final = retry.Permanent(err)
	return c.final
}

// failInvalid is like makeFinal, but marks err as the error of an invalid request. The mark is a refusal that is not
// retryable. If it were a retry.Permanent, a retrier would return it alone, and lose the failures of earlier attempts.
func (c *call) failInvalid(err error) error {
	c.fault = &requestError{err: err}
	c.fault.deciding.Store(true)
	c.final = c.fault
	return c.final
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

// discard closes the latest response, because the caller will not receive it.
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
	if err == c.final && c.fault == nil { // err and c.final may be nil
		err = errors.Unwrap(err)
	}
	return nil, nil, withTimeout(cmp.Or(err, errNoResponse))
}

// deliver returns the response for the caller. When its body ends, the policies release their resources.
func (a *attempt) deliver() *http.Response {
	c := a.call
	if a.failure != nil {
		a.resp.Header = a.resp.Header.Clone() // the StatusError also refers to the header, and the caller may change it
	}
	if a.empty {
		c.ended()
	} else {
		a.resume()
	}
	if held := c.work.Held(); held || a.own != nil && !a.empty || a.body.touched {
		a.resp.Body = a.body.open()
		if held { // ReportFailure must find the call
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

// ended is called when the caller has finished reading the response.
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
