package resiliencehttp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/go-resilience/resilience/internal/ended"
)

// RequestFrom returns the request that a [Transport] is sending, if ctx is the ctx of the request's policies
// or derived from it. For any other ctx, RequestFrom returns nil and false. Do not change the request.
func RequestFrom(ctx context.Context) (*http.Request, bool) {
	if c := callOf(ctx); c != nil {
		return c.req, true
	}
	return nil, false
}

// HostOf returns the server to which a [Transport] is sending a request, as "host:port". ctx must be the ctx
// of the request's policies or derived from it; otherwise HostOf returns "". Use HostOf as the key of a
// [resilience.Group] that has a member for each server. The host is taken from the URL of the caller's
// request, in lower case and without a final dot. The request's field Host is ignored. If the URL has no
// port, the port is 80 for http or 443 for https.
//
// Prepare runs inside the policies. If Prepare sends the request to another server, HostOf still returns the
// original server. The policies of the original server then count the failures of the other server. To change
// the server, use a RoundTripper outside the Transport, or a separate Transport for each server, as with
// [Failover].
func HostOf(ctx context.Context) string {
	if c := callOf(ctx); c != nil {
		return c.host
	}
	return ""
}

func hostOf(req *http.Request) string {
	if req.URL == nil {
		return ""
	}
	host, port := strings.TrimSuffix(strings.ToLower(req.URL.Hostname()), "."), req.URL.Port()
	switch port = cmp.Or(port, ports[req.URL.Scheme]); {
	case port == "":
		return host
	case strings.HasPrefix(req.URL.Host, host) && len(req.URL.Host) == len(host)+len(":")+len(port):
		return req.URL.Host // it already has this form, and joining would allocate memory
	}
	return net.JoinHostPort(host, port)
}

var ports = map[string]string{"http": "80", "https": "443"}

// replayable reports whether sending a request twice has the same effect as sending it once. This is the case
// if its method is idempotent (RFC 9110, section 9.2.2), or if it has an idempotency key.
func replayable(req *http.Request) bool {
	switch req.Method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace,
		http.MethodPut, http.MethodDelete:
		return true
	}
	return keyed(req)
}

// keyed reports whether the request has an idempotency key, by which a server recognizes a repeated request.
// An empty value is not a key. A field without any values is one: net/http documents that such a request may
// be repeated.
func keyed(req *http.Request) bool {
	for _, name := range [...]string{"Idempotency-Key", "X-Idempotency-Key"} {
		if values, ok := req.Header[name]; ok && (len(values) == 0 || values[0] != "") {
			return true
		}
	}
	return false
}

// A requestBody provides the caller's body to consecutive attempts. It is nil for a request without a body.
type requestBody struct {
	req    *http.Request
	copied *copiedBody // copies the caller's body while it is sent; nil if the body is not copied
	used   bool        // whether an attempt has used req.Body
	std    bool        // whether an *http.Transport sends the request

	mu   sync.Mutex
	sent []*sentBody // the bodies of the latest attempt; more than one if Base calls GetBody
}

// newRequestBody returns the body of req. If req has no GetBody, up to limit bytes are copied while they are sent. std
// reports whether an *http.Transport sends req.
func newRequestBody(req *http.Request, limit int64, std bool) *requestBody {
	if req.Body == nil || req.Body == http.NoBody {
		return nil
	}
	b := &requestBody{req: req, std: std}
	if req.GetBody == nil && limit > 0 && req.ContentLength <= limit {
		b.copied = newCopiedBody(req.Body, limit)
	}
	return b
}

// rewinds reports whether the body can be resent after an attempt has used it.
func (b *requestBody) rewinds() bool {
	return b == nil || b.req.GetBody != nil || b.copied != nil && b.copied.whole()
}

// open returns a reader of the whole body for the next attempt.
func (b *requestBody) open() (io.ReadCloser, error) {
	first := !b.used
	b.used = true
	switch {
	case b.copied != nil:
		return b.copied.open()
	case first:
		return b.req.Body, nil
	case b.req.GetBody != nil:
		return b.req.GetBody()
	}
	return nil, errBodyGone
}

// prepare sets Body, GetBody and Trailer of out for the next attempt.
func (b *requestBody) prepare(out *http.Request) error {
	if b == nil {
		return nil
	}
	out.Trailer = b.req.Trailer // shared, because the caller sets the Trailer while the body is read
	if err := b.retire(out.Context()); err != nil {
		return err
	}
	body, err := b.open()
	if err != nil {
		return fmt.Errorf("resiliencehttp: rewinding the request's body: %w", err)
	}
	out.Body = b.track(body)
	if b.req.GetBody == nil && b.copied == nil {
		return nil
	}
	out.GetBody = func() (io.ReadCloser, error) {
		body, err := b.again()
		if err != nil {
			return nil, &requestError{err: err} // net/http returns this error from RoundTrip
		}
		return b.track(body), nil
	}
	return nil
}

// again returns a reader of the whole body for GetBody.
func (b *requestBody) again() (io.ReadCloser, error) {
	if b.copied != nil {
		return b.copied.open()
	}
	return b.req.GetBody()
}

// track returns a body that records how it is read. It returns an in-memory body for an *http.Transport
// unchanged, because net/http must recognize its type to send it in one write with the header. How it is read
// need not be recorded: the hooks of httptrace show whether it may have been sent.
func (b *requestBody) track(body io.ReadCloser) io.ReadCloser {
	if body == http.NoBody {
		return body
	}
	s := &sentBody{source: body, declared: b.req.ContentLength, reading: make(chan struct{}, 1)}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sent = append(b.sent, s)
	if m := memoryOf(body); b.std && m != nil && int64(m.Len()) == b.req.ContentLength {
		return body
	}
	return s
}

// retire closes the bodies of the last attempt and waits until none of their Reads is in progress. This is
// necessary because a RoundTripper may continue to read a body after it has returned. If the next body read
// the same file, both readers would move the file's offset.
func (b *requestBody) retire(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.sent {
		if err := s.retire(ctx); err != nil {
			return err
		}
	}
	b.sent = nil
	return nil
}

// any reports whether f returns true for any body of the last attempt.
func (b *requestBody) any(f func(*sentBody) bool) bool {
	if b == nil {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.ContainsFunc(b.sent, f)
}

// close closes the caller's body if no attempt has used it. It is called after the last attempt.
func (b *requestBody) close() {
	switch {
	case b == nil:
	case b.copied != nil:
		b.copied.finish()
	case !b.used:
		closeBody(b.req)
	}
}

func closeBody(req *http.Request) {
	if req.Body != nil {
		_ = req.Body.Close()
	}
}

// A sentBody is the body of one attempt. It records how it is read.
type sentBody struct {
	source   io.ReadCloser
	declared int64         // the request's ContentLength; 0 or less if the length is unknown
	reading  chan struct{} // holds a value during a Read
	sent     func()        // called at the end of the body and when it is closed; set before the body is sent

	mu     sync.Mutex
	begun  bool // Read was called
	closed bool
	broken bool // the source failed
	atEnd  bool
	length int64 // number of bytes read so far
}

var (
	errBodyClosed = errors.New("resiliencehttp: request's body is closed")
	errBodyGone   = errors.New("no GetBody, and no copy of the part that was sent")
)

func (b *sentBody) Read(p []byte) (int, error) {
	b.reading <- struct{}{}
	defer func() { <-b.reading }()
	b.mu.Lock()
	b.begun = true
	closed := b.closed
	b.mu.Unlock()
	if closed {
		return 0, errBodyClosed
	}
	n, err := b.source.Read(p)
	if err == io.EOF && b.sent != nil {
		b.sent()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.length += int64(n)
	b.atEnd = err == io.EOF
	b.broken = err != nil && !b.atEnd && !b.closed // an error after Close does not mean that the source failed
	return n, err
}

// onSent sets f, which is called when the body has been read to its end, and when it is closed. onSent must be called
// before Base gets the body.
func (b *sentBody) onSent(f func()) { b.sent = f }

func (b *sentBody) Close() error {
	b.mu.Lock()
	closed := b.closed
	b.closed = true
	b.mu.Unlock()
	if closed {
		return nil
	}
	if b.sent != nil {
		b.sent()
	}
	return b.source.Close()
}

// retire closes the body and waits until no Read is in progress.
func (b *sentBody) retire(ctx context.Context) error {
	_ = b.Close()
	if _, copied := b.source.(*copyReader); copied { // a Read in progress copies its bytes for the next reader
		return nil
	}
	select {
	case b.reading <- struct{}{}:
		<-b.reading
		return nil
	case <-ctx.Done():
		return ended.Error(ctx)
	}
}

// wasRead reports whether any part of the body may have been read.
func (b *sentBody) wasRead() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.begun
}

// failed reports whether reading the body failed, or the body is longer or shorter than its declared length.
func (b *sentBody) failed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	wrong := b.declared > 0 && (b.length > b.declared || b.atEnd && b.length < b.declared)
	return b.broken || wrong
}
