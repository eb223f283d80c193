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

// Transport returns an http.RoundTripper that sends requests through base with the
// faults of s. A nil base means http.DefaultTransport.
func Transport(s *Script, base http.RoundTripper) http.RoundTripper {
	return &transport{s, cmp.Or[http.RoundTripper](base, http.DefaultTransport)}
}

type transport struct {
	script *Script
	base   http.RoundTripper
}

// RoundTrip is that of http.RoundTripper.
func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	f := t.script.next(req.Context())
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
		if err == nil {
			res.Body = p.body(req.Context(), res.Body)
		}
		return res, err
	case Status:
		closeBody(req)
		return p.response(req), nil
	case Refuse:
		closeBody(req)
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: errRefused}
	default:
		closeBody(req)
		return nil, p.instead(req.Context())
	}
}

func closeBody(req *http.Request) {
	if req.Body != nil {
		_ = req.Body.Close() // as every RoundTripper does
	}
}

// response returns the response of a Status.
func (p *Plan) response(req *http.Request) *http.Response {
	text := http.StatusText(p.status()) + "\n"
	return &http.Response{
		Status:        strconv.Itoa(p.status()) + " " + http.StatusText(p.status()),
		StatusCode:    p.status(),
		Proto:         "HTTP/1.1",
		ProtoMajor:    1,
		ProtoMinor:    1,
		Header:        p.header(),
		Body:          io.NopCloser(strings.NewReader(text)),
		ContentLength: int64(len(text)),
		Request:       req,
	}
}

func (p *Plan) header() http.Header {
	h := http.Header{"Content-Type": {"text/plain; charset=utf-8"}}
	if p.RetryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(int((p.RetryAfter+time.Second-1)/time.Second)))
	}
	return h
}

// body returns the body of a response whose reading the plan disturbs.
func (p *Plan) body(ctx context.Context, body io.ReadCloser) io.ReadCloser {
	if p.Kind == Reset {
		return &resetBody{body, p.Bytes}
	}
	return &slowBody{ctx, body, cmp.Or(p.Rate, 1000)}
}

// A resetBody breaks off.
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
	return n, err
}

// A slowBody is read at a rate.
type slowBody struct {
	ctx context.Context
	io.ReadCloser
	rate int
}

func (b *slowBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p[:min(len(p), max(1, b.rate/10))]) // ten pieces a second
	if e := wait(b.ctx, time.Duration(n)*time.Second/time.Duration(b.rate)); e != nil {
		return n, e
	}
	return n, err
}

// Handler returns an http.Handler that serves requests by next with the faults of s.
func Handler(s *Script, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f := s.next(r.Context())
		if wait(r.Context(), f.delay) != nil {
			return
		}
		if f.plan == nil {
			next.ServeHTTP(w, r)
			return
		}
		f.plan.serve(w, r, next)
	})
}

// serve answers r as the plan has it.
func (p *Plan) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	switch p.Kind {
	case Fail, Status:
		for name, values := range p.header() {
			w.Header()[name] = values
		}
		w.WriteHeader(p.status())
		_, _ = io.WriteString(w, http.StatusText(p.status())+"\n")
	case Hang:
		<-r.Context().Done()
	case Refuse:
		panic(http.ErrAbortHandler)
	case Reset:
		next.ServeHTTP(&resetWriter{w, p.Bytes}, r)
		panic(http.ErrAbortHandler) // the body was shorter than Bytes
	case SlowBody:
		next.ServeHTTP(&slowWriter{r.Context(), w, cmp.Or(p.Rate, 1000)}, r)
	}
}

// A resetWriter closes the connection when left bytes were written.
type resetWriter struct {
	http.ResponseWriter
	left int64
}

func (w *resetWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *resetWriter) Write(p []byte) (int, error) {
	n := min(int64(len(p)), w.left)
	written, err := w.ResponseWriter.Write(p[:n])
	w.left -= int64(written)
	if err == nil && n < int64(len(p)) {
		_ = http.NewResponseController(w.ResponseWriter).Flush() // so that the client has these bytes
		panic(http.ErrAbortHandler)
	}
	return written, err
}

// A slowWriter writes at a rate.
type slowWriter struct {
	ctx context.Context
	http.ResponseWriter
	rate int
}

func (w *slowWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *slowWriter) Write(p []byte) (int, error) {
	written := 0
	for len(p) > 0 {
		piece := p[:min(len(p), max(1, w.rate/10))]
		n, err := w.ResponseWriter.Write(piece)
		written += n
		if err != nil {
			return written, err
		}
		_ = http.NewResponseController(w.ResponseWriter).Flush()
		if err := wait(w.ctx, time.Duration(n)*time.Second/time.Duration(w.rate)); err != nil {
			return written, err
		}
		p = p[n:]
	}
	return written, nil
}
