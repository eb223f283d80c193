package resiliencehttp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

// Failover returns an http.RoundTripper that sends each request through the first of the given RoundTrippers.
// If the request fails, Failover sends it through the other RoundTrippers, one after another. Usually each
// RoundTripper is a [Transport] for one of several servers. The Base or the Prepare of each Transport sets
// the server's address:
//
//	first := &resiliencehttp.Transport{Prepare: func(r *http.Request) error {
//		r.URL.Scheme, r.URL.Host, r.Host = "https", "eu.example.com", "" // if Host is "", URL.Host is sent
//		return nil
//	}}
//	client := &http.Client{Transport: resiliencehttp.Failover(first, second)}
//
// A request that may be repeated (see [Transport]) is sent to the next server after an error, or after a
// response that [DefaultJudge] or the Transport's Judge treats as a failure. Failover assumes that each
// server recognizes an Idempotency-Key that another server has received. If your servers do not share
// Idempotency-Keys, set a Replayable that returns false. Otherwise a request, such as a payment, may take
// effect twice.
//
// Any other request, such as a POST, is sent to the next server only if it has certainly had no effect. A request has
// certainly had no effect if a policy refused it, if it was never sent, if the response was 429, 503 or 529, or if the
// Judge returned [Resend]. For example, a POST is not sent to another server after the status 502, or after its
// connection broke. No request is sent after the caller's ctx is done. Failover uses the Judge and the Replayable of a
// Transport or a [ClientTransport] only if it receives the transport itself, and not a RoundTripper that wraps it.
//
// Envoy also responds with 503 if the connection to the server breaks after Envoy has sent the request. After
// a 503 from Envoy, the request may therefore have had an effect. If a POST must not take effect twice, do
// not send it through Failover to servers behind Envoy.
//
// To resend a body, Failover calls the request's GetBody. If the request has no GetBody, Failover copies up
// to 1 MiB of the body while the body is sent. A request without a GetBody is not sent to another server if
// its body is longer than 1 MiB.
//
// If the last server returns a failed response, the caller receives that response. If the last server returns
// an error, the caller receives the errors of all servers, joined in order. The RetryAfter of the joined
// error is the longest RetryAfter of the servers' errors. Failover panics if it receives no RoundTripper or a
// nil RoundTripper.
func Failover(next ...http.RoundTripper) http.RoundTripper {
	if len(next) == 0 || slices.Contains(next, nil) {
		panic(errors.New("resiliencehttp: Failover needs at least one RoundTripper, and none may be nil"))
	}
	return &failover{slices.Clone(next)}
}

type failover struct{ next []http.RoundTripper }

const failoverBuffer = 1 << 20

// RoundTrip implements http.RoundTripper.
func (f *failover) RoundTrip(req *http.Request) (*http.Response, error) {
	std := !slices.ContainsFunc(f.next, func(next http.RoundTripper) bool {
		if t, ok := next.(*Transport); ok {
			next = t.base()
		}
		_, ok := next.(*http.Transport)
		return !ok
	})
	body := newRequestBody(req, failoverBuffer, std)
	defer body.close()
	var errs []error
	for i, next := range f.next {
		trace := route{pooled: true}
		out := req.Clone(trace.watch(req.Context()))
		if err := body.prepare(out); err != nil {
			return nil, withTimeout(errors.Join(append(errs, badRequest(req.Context(), err))...))
		}
		resp, judged, err := sendThrough(next, out)
		if err != nil && body.any((*sentBody).failed) { // reading it for the next server would also fail
			return nil, withTimeout(errors.Join(append(errs, badRequest(req.Context(), err))...))
		}
		failure := cmp.Or(err, judged, errNothing)
		if resp != nil {
			complete(resp, out)
			failure = cmp.Or(judged, DefaultJudge(resp, nil))
			if resp.Request == out {
				resp.Request = req
			}
		}
		tryNext := failure != nil && i+1 < len(f.next) && body.rewinds() && req.Context().Err() == nil &&
			(replayableBy(next, req) || behavior.IsRefused(failure) || trace.neverSent(body, failure) ||
				resp != nil && overloaded(resp.StatusCode) ||
				resends(failure) && (resp == nil || !fromGateway(resp.StatusCode)))
		if resp != nil && !tryNext {
			return resp, nil
		}
		errs = append(errs, fmt.Errorf("resiliencehttp: %d of %d: %w", i+1, len(f.next), failure))
		if !tryNext {
			break
		}
		if resp != nil {
			drainAndClose(resp)
		}
	}
	return nil, withTimeout(errors.Join(errs...))
}

// drainAndClose closes a response that the caller will not receive. It first reads up to 64 KiB of the
// remaining body, for at most 1 second, because net/http reuses a connection only if the body was read to its
// end. Otherwise an overloaded server would have to accept a new connection for each request that it rejects.
func drainAndClose(resp *http.Response) {
	if resp.ContentLength <= aheadLimit {
		defer time.AfterFunc(drainTime, func() { _ = resp.Body.Close() }).Stop()
		_, _ = io.CopyN(io.Discard, resp.Body, aheadLimit+1)
	}
	_ = resp.Body.Close()
}

// sendThrough sends req through next. If next is a Transport and resp is a failed response, judged is the
// error that its policies saw instead.
func sendThrough(next http.RoundTripper, req *http.Request) (resp *http.Response, judged, err error) {
	if t := transportOf(next); t != nil {
		return t.roundTrip(req)
	}
	resp, err = next.RoundTrip(req)
	return resp, nil, err
}

// transportOf returns next if it is a Transport, the Transport inside a ClientTransport, or nil for any other
// next.
func transportOf(next http.RoundTripper) *Transport {
	switch next := next.(type) {
	case *Transport:
		return next
	case *ClientTransport:
		return next.transport
	}
	return nil
}

// replayableBy reports whether req may be repeated. If next is a Transport with a Replayable, that function
// decides.
func replayableBy(next http.RoundTripper, req *http.Request) bool {
	if t := transportOf(next); t != nil {
		return t.replayable(req)
	}
	return replayable(req)
}

// CloseIdleConnections calls the method CloseIdleConnections of each RoundTripper that has one.
func (f *failover) CloseIdleConnections() {
	for _, next := range f.next {
		if next, ok := next.(interface{ CloseIdleConnections() }); ok {
			next.CloseIdleConnections()
		}
	}
}

// mayHedge reports whether two copies of req may be in flight at the same time.
func (t *Transport) mayHedge(req *http.Request) bool {
	return t.Hedge != nil && t.replayable(req) &&
		(t.HedgeIf == nil && !keyed(req) || t.HedgeIf != nil && t.HedgeIf(req)) &&
		(req.Body == nil || req.Body == http.NoBody || req.GetBody != nil) &&
		len(req.Trailer) == 0 && // the caller sets the Trailer while one body is read
		req.Header.Get("Upgrade") == ""
}

// hedged sends req, and sends a second copy if there is no response within the Hedger's delay. It returns the
// same results as send.
func (t *Transport) hedged(req *http.Request, begun time.Time) (resp *http.Response, failure, err error) {
	h := &hedging{t: t, req: req, begun: begun}
	defer func() { h.closeExcept(resp) }() // deferred because user code may panic

	info := &call{Context: req.Context(), req: req, host: hostOf(req)} // HostOf needs info in the Hedger's observers
	resp, err = t.Hedge.Do(info, h.send)
	switch {
	case err == nil:
		return resp, nil, nil
	case len(h.responses) == 0,
		errors.Is(err, req.Context().Err()): // false if ctx is not done, because err is not nil
		return nil, nil, withTimeout(err)
	}
	return h.responses[len(h.responses)-1], err, nil // return the last failed response, as send does
}

// A hedging is the state of a hedged request, of which two copies may be in flight at the same time.
type hedging struct {
	t     *Transport
	req   *http.Request // the caller's
	begun time.Time

	mu        sync.Mutex
	responses []*http.Response
	routes    []*route // the routes of the attempts
}

// A failedResponse is the error that the Hedger sees instead of a failed response.
type failedResponse struct{ error }

func (f failedResponse) Unwrap() error { return f.error }

// send sends one copy of the request. It stops waiting for the response when ctx is done. The Hedger cancels
// ctx when it returns, but the caller reads the response after that. Therefore the response has its own ctx,
// which is canceled when the body ends.
func (h *hedging) send(ctx context.Context) (*http.Response, error) {
	h.abandonSilent()
	sending, cancel := context.WithCancelCause(h.req.Context())
	detach := context.AfterFunc(ctx, func() {
		if h.req.Context().Err() == nil { // otherwise sending is already done, with the correct error
			cancel(context.Cause(ctx))
		}
	})
	var resp *http.Response
	defer func() {
		detach()
		if resp == nil {
			cancel(nil)
		}
	}()
	req := h.req.WithContext(sending)
	if h.req.GetBody != nil {
		body, err := h.req.GetBody()
		if err != nil {
			return nil, badRequest(ctx, err)
		}
		req.Body = body
	}
	resp, failure, err := h.t.send(req, h.begun, h, func() { cancel(nil) })
	if err != nil {
		return nil, err
	}
	if resp.Request == req {
		resp.Request = h.req
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.responses = append(h.responses, resp)
	if failure != nil {
		return nil, failedResponse{failure}
	}
	return resp, nil
}

// abandonSilent abandons the HTTP/2 connection on which the first copy of the request waits for its response,
// if no response has arrived on that connection since the copy was sent. Otherwise both copies could wait on
// the same dead connection.
func (h *hedging) abandonSilent() {
	h.mu.Lock()
	routes := slices.Clone(h.routes)
	h.mu.Unlock()
	for _, r := range routes {
		if base, ok := h.t.base().(*http.Transport); ok && r.silent(0) && h.t.lastHeard.before(r) &&
			multiplexed(base, r.connection()) {
			h.t.abandon(r.connection(), h.req)
		}
	}
}

// add records the route of an attempt to send a copy.
func (h *hedging) add(r *route) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.routes = append(h.routes, r)
}

// closeExcept closes all responses except chosen, which the caller receives. It is called after all sends
// have returned. It also closes the body of the caller's request, which was never sent, because each send
// used a new body from GetBody.
func (h *hedging) closeExcept(chosen *http.Response) {
	closeBody(h.req)
	for _, resp := range h.responses {
		if resp != chosen {
			_ = resp.Body.Close()
		}
	}
}
