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

// Failover returns an http.RoundTripper that sends a request through the first of next and, if
// that fails, through the others in turn: usually a [Transport] for each of several servers,
// whose Base or Prepare knows where that is.
//
//	first := &resiliencehttp.Transport{Prepare: func(r *http.Request) error {
//		r.URL.Scheme, r.URL.Host, r.Host = "https", "eu.example.com", "" // "": the server is told that of the URL
//		return nil
//	}}
//	client := &http.Client{Transport: resiliencehttp.Failover(first, second)}
//
// A request that may be repeated (see [Transport]) goes on after an error, or a response that
// [DefaultJudge] or the Transport's Judge treats as a failure. An Idempotency-Key is taken for one
// that they all know: if another server does not see what the first has done, Replayable must say
// no, or a payment is made twice. Any other request goes on only if it has certainly had no effect:
// a policy refused it, it was never sent, it was answered 429, 503 or 529, or the Judge said
// [Resend]. A POST that was answered 502, or whose connection broke, reaches nobody else. Nothing
// goes on once the caller has left. A RoundTripper around a Transport hides its Judge and its
// Replayable. Envoy answers 503 also where the connection to the server broke after the request:
// behind it, send no POST through Failover that must not act twice.
//
// The body is sent again by GetBody. Without that, up to 1 MiB of it is copied while it is sent;
// a longer one has no failover. If the last response is a failed one, the caller gets it. An error
// names what each has met, in order, and asks to come back when the first does. Failover panics if
// there is nothing in next, or nil.
func Failover(next ...http.RoundTripper) http.RoundTripper {
	if len(next) == 0 || slices.Contains(next, nil) {
		panic(errors.New("resiliencehttp: Failover needs a RoundTripper, not nil"))
	}
	return &failover{slices.Clone(next)}
}

type failover struct{ next []http.RoundTripper }

const failoverBuffer = 1 << 20

// RoundTrip is that of http.RoundTripper.
func (f *failover) RoundTrip(req *http.Request) (*http.Response, error) {
	body := newRequestBody(req, failoverBuffer)
	defer body.close()
	var met []error
	for i, next := range f.next {
		way := route{pooled: true}
		out := req.Clone(way.watch(req.Context()))
		if err := body.prepare(out); err != nil {
			if req.Context().Err() != context.Canceled { // as an answer, it would close a circuit further out
				err = &requestError{err: err}
			}
			return nil, withTimeout(errors.Join(append(met, err)...))
		}
		resp, judged, err := ask(next, out)
		if err != nil && body.any((*sentBody).atFault) { // no other server could take it
			return nil, withTimeout(errors.Join(append(met, &requestError{err: err})...))
		}
		failure := cmp.Or(err, judged, errNothing)
		if resp != nil {
			complete(resp, out)
			failure = cmp.Or(judged, DefaultJudge(resp, nil))
			if resp.Request == out {
				resp.Request = req
			}
		}
		goesOn := failure != nil && i+1 < len(f.next) && body.rewinds() && req.Context().Err() == nil &&
			(repeats(next, req) || behavior.IsRefused(failure) || way.neverSent(body, failure) ||
				resp != nil && overloaded(resp.StatusCode) ||
				resends(failure) && (resp == nil || !fromGateway(resp.StatusCode)))
		if resp != nil && !goesOn {
			return resp, nil
		}
		met = append(met, fmt.Errorf("resiliencehttp: %d of %d: %w", i+1, len(f.next), failure))
		if !goesOn {
			break
		}
		if resp != nil {
			letGo(resp)
		}
	}
	return nil, withTimeout(errors.Join(met...))
}

// letGo closes a response that nobody gets. What is left of it is read before, so that its connection serves again:
// otherwise a server that is overloaded would have a new one for each request that it turns away.
func letGo(resp *http.Response) {
	if resp.ContentLength <= aheadLimit {
		defer time.AfterFunc(drainTime, func() { _ = resp.Body.Close() }).Stop()
		_, _ = io.CopyN(io.Discard, resp.Body, aheadLimit+1)
	}
	_ = resp.Body.Close()
}

// ask sends req through next. judged is what the policies of a Transport saw in place of the response.
func ask(next http.RoundTripper, req *http.Request) (resp *http.Response, judged, err error) {
	if t := transportOf(next); t != nil {
		return t.roundTrip(req)
	}
	resp, err = next.RoundTrip(req)
	return resp, nil, err
}

// transportOf returns the Transport that next is, or nil.
func transportOf(next http.RoundTripper) *Transport {
	switch next := next.(type) {
	case *Transport:
		return next
	case *ClientTransport:
		return next.transport
	}
	return nil
}

// repeats reports whether next may be asked again with req.
func repeats(next http.RoundTripper, req *http.Request) bool {
	if t := transportOf(next); t != nil {
		return t.replayable(req)
	}
	return replayable(req)
}

// CloseIdleConnections forwards to each.
func (f *failover) CloseIdleConnections() {
	for _, next := range f.next {
		if next, ok := next.(interface{ CloseIdleConnections() }); ok {
			next.CloseIdleConnections()
		}
	}
}

// mayHedge reports whether req may be sent twice at once.
func (t *Transport) mayHedge(req *http.Request) bool {
	return t.Hedge != nil && t.replayable(req) &&
		(t.HedgeIf == nil && !keyed(req) || t.HedgeIf != nil && t.HedgeIf(req)) &&
		(req.Body == nil || req.Body == http.NoBody || req.GetBody != nil) &&
		len(req.Trailer) == 0 && // which the caller sets while one body is read
		req.Header.Get("Upgrade") == ""
}

// hedged sends req, and sends it once more if there is no response after a while. It returns
// as send does.
func (t *Transport) hedged(req *http.Request, begun time.Time) (resp *http.Response, failure, err error) {
	h := &hedging{t: t, req: req, begun: begun}
	defer func() { h.closeExcept(resp) }() // also if user code panics

	about := &call{Context: req.Context(), req: req, host: hostOf(req)} // no policy runs for it: it tells the host
	resp, err = t.Hedge.Do(about, h.send)
	switch {
	case err == nil:
		return resp, nil, nil
	case len(h.responses) == 0,
		errors.Is(err, req.Context().Err()): // Err() is nil while the caller waits, and errors.Is(err, nil) is false then
		return nil, nil, withTimeout(err)
	}
	return h.responses[len(h.responses)-1], err, nil // the last failed response, as without a hedge
}

// A hedging is one request that is sent several times at once.
type hedging struct {
	t     *Transport
	req   *http.Request // the caller's
	begun time.Time

	mu        sync.Mutex
	responses []*http.Response
	routes    []*route // of the attempts
}

// A failedResponse is the error that the Hedger sees in place of one.
type failedResponse struct{ error }

func (f failedResponse) Unwrap() error { return f.error }

// send sends the request once, until ctx ends. A response outlasts ctx, since the Hedger
// cancels that when it returns: the end of its body ends what it is read under.
func (h *hedging) send(ctx context.Context) (*http.Response, error) {
	h.leaveSilent()
	sending, cancel := context.WithCancelCause(h.req.Context())
	leave := context.AfterFunc(ctx, func() {
		if h.req.Context().Err() == nil { // which ends sending, too: as a deadline, if it is one
			cancel(context.Cause(ctx))
		}
	})
	var resp *http.Response
	defer func() {
		leave()
		if resp == nil {
			cancel(nil)
		}
	}()
	req := h.req.WithContext(sending)
	if h.req.GetBody != nil {
		body, err := h.req.GetBody()
		if err != nil {
			return nil, &requestError{err: err}
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

// leaveSilent has a second request use another connection, if the first waits on one of HTTP/2 that has been silent
// since.
func (h *hedging) leaveSilent() {
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

// add records the route of an attempt.
func (h *hedging) add(r *route) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.routes = append(h.routes, r)
}

// closeExcept closes what the caller does not get, after all sends have returned, and the body of
// its request, of which each has sent a copy.
func (h *hedging) closeExcept(chosen *http.Response) {
	closeBody(h.req)
	for _, resp := range h.responses {
		if resp != chosen {
			_ = resp.Body.Close()
		}
	}
}
