package resiliencehttp

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"
)

// mayHedge reports whether req may be sent twice at once.
func (t *Transport) mayHedge(req *http.Request) bool {
	return t.Hedge != nil && t.replayable(req) &&
		(req.Body == nil || req.Body == http.NoBody || req.GetBody != nil) &&
		len(req.Trailer) == 0 && // which the caller sets while one body is read
		req.Header.Get("Upgrade") == ""
}

// hedged sends req, and sends it once more if there is no response after a while. It returns
// as send does.
func (t *Transport) hedged(req *http.Request, begun time.Time) (resp *http.Response, failure, err error) {
	h := &hedge{t: t, req: req, begun: begun}
	var chosen *hedgeSend
	defer func() { h.closeExcept(chosen) }()          // also if user code panics
	about := &call{t: t, req: req, host: hostOf(req)} // no policy runs for it: it tells the host
	about.begin(req.Context())
	won, err := t.Hedge.Do(about.ctx, h.send)
	switch {
	case err == nil:
		chosen = h.sendOf(won)
	case len(h.sends) == 0, errors.Is(err, req.Context().Err()): // nothing is nil
		return nil, nil, withTimeout(err)
	default: // the last failed response, as without a hedge
		chosen = h.sends[len(h.sends)-1]
	}
	return chosen.hand(req), chosen.failure, nil
}

// A hedge is one request that is sent several times at once.
type hedge struct {
	t     *Transport
	req   *http.Request // the caller's
	begun time.Time

	mu    sync.Mutex
	taken bool         // the caller's own body
	sends []*hedgeSend // that got a response
}

// A hedgeSend is a response to one of them. It is an error if the response is a failed one.
type hedgeSend struct {
	*http.Response
	req     *http.Request
	failure error  // that the policies saw in place of the response
	end     func() // ends the ctx that it is read under
}

func (s *hedgeSend) Error() string { return s.failure.Error() }
func (s *hedgeSend) Unwrap() error { return s.failure }

// send sends the request once, until ctx ends. A response outlasts ctx, since the Hedger
// cancels that when it returns.
func (h *hedge) send(ctx context.Context) (*http.Response, error) {
	sending, cancel := context.WithCancelCause(h.req.Context())
	leave := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	s := &hedgeSend{req: h.req.WithContext(sending), end: func() { cancel(nil) }}
	defer func() {
		leave()
		if s.Response == nil {
			s.end()
		}
	}()
	if h.again() && h.req.GetBody != nil {
		body, err := h.req.GetBody()
		if err != nil {
			return nil, &requestError{err}
		}
		s.req.Body = body
	}
	resp, failure, err := h.t.send(s.req, h.begun)
	if err != nil {
		return nil, err
	}
	s.Response, s.failure = resp, failure
	h.mu.Lock()
	h.sends = append(h.sends, s)
	h.mu.Unlock()
	if failure != nil {
		return nil, s
	}
	return resp, nil
}

// sendOf returns the hedgeSend of a response, after all sends have returned.
func (h *hedge) sendOf(resp *http.Response) *hedgeSend {
	for _, s := range h.sends {
		if s.Response == resp {
			return s
		}
	}
	return nil // not reached: the Hedger returns what send has returned
}

// again reports whether the caller's own body is taken, and takes it.
func (h *hedge) again() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	taken := h.taken
	h.taken = true
	return taken
}

// closeExcept closes what the caller does not get, after all sends have returned.
func (h *hedge) closeExcept(chosen *hedgeSend) {
	if !h.taken {
		closeBody(h.req)
	}
	for _, s := range h.sends {
		if s != chosen {
			_ = s.Body.Close()
			s.end()
		}
	}
}

// hand returns the response for the caller. The end of its body ends its ctx, which would
// otherwise live as long as the caller's.
func (s *hedgeSend) hand(req *http.Request) *http.Response {
	if s.Request == s.req {
		s.Request = req
	}
	if bodyless(req, s.Response) {
		s.end()
	} else {
		s.Body = &hedgeBody{s.Body, s.end}
	}
	return s.Response
}

// A hedgeBody ends a ctx when it ends.
type hedgeBody struct {
	io.ReadCloser
	end func()
}

func (b *hedgeBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		b.end()
	}
	return n, err
}

func (b *hedgeBody) Close() error {
	defer b.end()
	return b.ReadCloser.Close()
}
