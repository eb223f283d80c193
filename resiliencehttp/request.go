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

// RequestFrom returns the request of the [Transport]'s call that ctx belongs to, or nil and
// false. It must not be changed.
func RequestFrom(ctx context.Context) (*http.Request, bool) {
	if c := callOf(ctx); c != nil {
		return c.req, true
	}
	return nil, false
}

// HostOf returns the server, as "host:port", of the request which ctx belongs to: the key of a
// Group with a member for each server. It is that of the URL that the caller has set, whatever
// the field Host says: in lower case, without a final dot, and with the port 80 for http or 443
// for https if the URL has none. It is "" if ctx is not that of a [Transport]'s call.
//
// A Prepare that changes the server comes too late for the policies, which hold the failures of
// one against the other. Change it further out, or in a RoundTripper of [Failover].
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
	if port = cmp.Or(port, ports[req.URL.Scheme]); port == "" {
		return host
	}
	return net.JoinHostPort(host, port)
}

var ports = map[string]string{"http": "80", "https": "443"}

// replayable reports whether sending a request twice has the effect of sending it once: by
// its method (RFC 9110, section 9.2.2), or because it is keyed.
func replayable(req *http.Request) bool {
	switch req.Method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace,
		http.MethodPut, http.MethodDelete:
		return true
	}
	return keyed(req)
}

// keyed reports whether the request has a key by which the server recognizes a repetition.
func keyed(req *http.Request) bool {
	_, key := req.Header["Idempotency-Key"]
	_, xkey := req.Header["X-Idempotency-Key"]
	return key || xkey
}

// A requestBody provides the caller's body to one attempt after another. It is nil for a
// request without a body.
type requestBody struct {
	req    *http.Request
	copied *copiedBody // the caller's body, if it is copied while it is sent; otherwise nil
	used   bool        // an attempt has taken the caller's own body

	mu   sync.Mutex
	sent []*sentBody // of the latest attempt; several if Base calls GetBody
}

// newRequestBody returns the body of req, of which up to limit bytes are copied while they are sent.
func newRequestBody(req *http.Request, limit int64) *requestBody {
	if req.Body == nil || req.Body == http.NoBody {
		return nil
	}
	b := &requestBody{req: req}
	if req.GetBody == nil && limit > 0 && req.ContentLength <= limit {
		b.copied = newCopiedBody(req.Body, limit)
	}
	return b
}

// rewinds reports whether the body can be sent again after an attempt has taken it.
func (b *requestBody) rewinds() bool {
	return b == nil || b.req.GetBody != nil || b.copied != nil && b.copied.whole()
}

// open returns the body from its beginning.
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

// prepare puts the body for the next attempt into out.
func (b *requestBody) prepare(out *http.Request) error {
	if b == nil {
		return nil
	}
	out.Trailer = b.req.Trailer // the caller sets it while the body is read
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
			return nil, &requestError{err: err} // net/http returns it
		}
		return b.track(body), nil
	}
	return nil
}

// again returns the body from its beginning for a second use.
func (b *requestBody) again() (io.ReadCloser, error) {
	if b.copied != nil {
		return b.copied.open()
	}
	return b.req.GetBody()
}

// track has the body of an attempt remember how it was read. One that is in memory is left
// alone: net/http sends it together with the fields, in one write.
func (b *requestBody) track(body io.ReadCloser) io.ReadCloser {
	if body == http.NoBody {
		return body
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	s := &sentBody{source: body, declared: b.req.ContentLength, reading: make(chan struct{}, 1)}
	b.sent = append(b.sent, s)
	if m := memoryOf(body); m != nil && int64(m.Len()) == b.req.ContentLength {
		s.memory = m
		return body
	}
	return s
}

// retire closes the bodies of the last attempt and waits until no Read of them is under
// way. The next body may be the same file, and a RoundTripper may continue to read after it
// has returned.
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

// any reports whether f is true of a body of the last attempt.
func (b *requestBody) any(f func(*sentBody) bool) bool {
	if b == nil {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.ContainsFunc(b.sent, f)
}

// close closes the caller's body if no attempt took it. No other attempt follows.
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

// A sentBody is the body of one attempt. It remembers how it was read.
type sentBody struct {
	source   io.ReadCloser
	declared int64         // length, if more than 0
	reading  chan struct{} // holds a value during a Read
	memory   inMemory      // what net/http reads in its place, if not nil
	sent     func()        // called at the end of the body and when it is closed; set before it is sent

	mu     sync.Mutex
	begun  bool
	closed bool
	broken bool // the source failed
	atEnd  bool
	length int64 // so far
}

var (
	errBodyClosed = errors.New("resiliencehttp: the request's body is closed")
	errBodyGone   = errors.New("the part that was sent is not kept")
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
	b.broken = err != nil && !b.atEnd && !b.closed // a Read that Close interrupts has not failed
	return n, err
}

// onSent has f called when the body has been read to its end or is closed, before Base has it.
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

// retire closes the body and waits for the Read under way to return.
func (b *sentBody) retire(ctx context.Context) error {
	_ = b.Close()
	if _, copied := b.source.(*copyReader); copied { // the next reader gets what this Read gets
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

// touched reports whether the body has been read.
func (b *sentBody) touched() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.begun || b.memory != nil && int64(b.memory.Len()) != b.declared
}

// failed reports whether the body failed, or is longer or shorter than its declared length.
func (b *sentBody) failed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	wrong := b.declared > 0 && (b.length > b.declared || b.atEnd && b.length < b.declared)
	return b.broken || wrong
}
