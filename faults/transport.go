package faults

import (
	"cmp"
	"context"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Transport returns an http.RoundTripper that sends requests through base and injects the faults of a script.
// A nil base means http.DefaultTransport. Reset and SlowBody have no effect on a response with status 101
// Switching Protocols.
func Transport(s *Script, base http.RoundTripper) http.RoundTripper {
	return &transport{s, cmp.Or[http.RoundTripper](base, http.DefaultTransport)}
}

type transport struct {
	script *Script
	base   http.RoundTripper
}

// RoundTrip sends a request with the next fault of the script.
func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	f := t.script.next()
	if err := wait(req.Context(), f.delay); err != nil {
		closeBody(req)
		return nil, err
	}
	if f.plan == nil {
		return t.base.RoundTrip(req)
	}
	switch p := f.plan; p.Kind {
	case Reset, SlowBody:
		res, err := t.base.RoundTrip(req)
		if err == nil && res.StatusCode != http.StatusSwitchingProtocols {
			res.Body = p.body(req.Context(), res.Body)
		}
		return res, err
	case Status:
		closeBody(req)
		return p.response(req), nil
	case Refuse:
		closeBody(req)
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: errRefused}
	default: // Fail, Hang
		closeBody(req)
		return nil, p.call(req.Context(), nil)
	}
}

// CloseIdleConnections closes the idle connections of base. The method CloseIdleConnections of http.Client
// calls it.
func (t *transport) CloseIdleConnections() {
	if b, ok := t.base.(interface{ CloseIdleConnections() }); ok {
		b.CloseIdleConnections()
	}
}

// closeBody closes the body of a request that is not sent. Every RoundTripper must close the body of its
// request.
func closeBody(req *http.Request) {
	if req.Body != nil {
		_ = req.Body.Close()
	}
}

// response returns the response of a Status plan.
func (p *Plan) response(req *http.Request) *http.Response {
	res := &http.Response{
		Status:     strconv.Itoa(p.status()) + " " + http.StatusText(p.status()),
		StatusCode: p.status(),
		Proto:      "HTTP/1.1",
		ProtoMajor: 1,
		ProtoMinor: 1,
		Header:     p.header(),
		Body:       http.NoBody,
		Request:    req,
	}
	if text := p.text(); req.Method != http.MethodHead && text != "" {
		res.Body = io.NopCloser(strings.NewReader(text))
		res.ContentLength = int64(len(text))
	}
	return res
}

func (p *Plan) header() http.Header {
	h := http.Header{}
	if p.text() != "" {
		h.Set("Content-Type", "text/plain; charset=utf-8")
	}
	if p.RetryAfter > 0 {
		seconds := p.RetryAfter / time.Second
		if p.RetryAfter%time.Second > 0 {
			seconds++
		}
		h.Set("Retry-After", strconv.FormatInt(int64(seconds), 10))
	}
	return h
}

// text returns the body of a Status response. It is empty for statuses that must not have a body.
func (p *Plan) text() string {
	switch p.status() {
	case http.StatusNoContent, http.StatusNotModified:
		return ""
	default:
		return http.StatusText(p.status()) + "\n"
	}
}

// body returns body, the body of a response, with the fault of a Reset or SlowBody plan.
func (p *Plan) body(ctx context.Context, body io.ReadCloser) io.ReadCloser {
	if p.Kind == Reset {
		return &resetBody{body, p.Bytes}
	}
	return &slowBody{ctx, body, p.rate()}
}

// A resetBody is a body whose Read fails after left more bytes, or at the end of the body.
type resetBody struct {
	io.ReadCloser
	left int64
}

func (b *resetBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, errReset
	}
	n, err := b.ReadCloser.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	if err == io.EOF {
		b.left, err = 0, errReset
	}
	return n, err
}

// A slowBody is a body that delivers rate bytes per second.
type slowBody struct {
	ctx context.Context
	io.ReadCloser
	rate int
}

func (b *slowBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p[:min(len(p), piece(b.rate))])
	if ended := wait(b.ctx, timeFor(n, b.rate)); ended != nil {
		return n, ended
	}
	return n, err
}

// piece returns the number of bytes that are delivered together. At rates below 10 bytes per second, bytes
// are delivered one by one. At higher rates, there are about 10 pieces per second.
func piece(rate int) int { return max(1, rate/10) }

// timeFor returns the time that n bytes take at rate bytes per second.
func timeFor(n, rate int) time.Duration {
	return time.Duration(n) * time.Second / time.Duration(rate)
}
