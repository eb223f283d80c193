package resiliencehttp

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

// The code in this file depends on undocumented behavior of net/http: the order of its trace hooks, the texts of its
// errors, the types of its bodies in memory, the last request on an HTTP/2 connection, and the server's read deadline.
// TestGoVersionIsChecked lists the versions of Go with which the code was checked.

// A stage is the progress of an attempt until its request has been written.
type stage int

const (
	noConnRequested stage = iota // net/http has not requested a connection
	waiting                      // the attempt waits for a connection of this process, or for a stream on one
	dialing                      // a connection is being established
	connected                    // the attempt has a connection and, if it may have to wait for a stream, a stream
	written                      // the whole request has been written
)

// A route records how a request gets its connection. Its httptrace hooks may be called on several goroutines, and after
// RoundTrip has returned.
type route struct {
	pooled  bool     // the request may have to wait for a connection even if none is being dialed
	attempt *attempt // is notified, with mu held, when the stage changes; may be nil
	trace   httptrace.ClientTrace

	mu    sync.Mutex
	stage stage
	got   bool // the request has had a connection
	has   bool // the request has the connection conn now
	conn  httptrace.GotConnInfo
	since time.Time // when the request got conn, or its stream on conn
	write error     // why the request could not be written to conn
}

// pooled reports whether a request may wait for a connection of base even if none is being dialed. It returns true for
// a base that is not a transport of net/http, because that is unknown.
func pooled(base http.RoundTripper) bool {
	t, ok := base.(*http.Transport)
	return !ok || t.MaxConnsPerHost > 0 || t.HTTP2 != nil && t.HTTP2.StrictMaxConcurrentRequests
}

// watch returns ctx with the hooks that update r.
func (r *route) watch(ctx context.Context) context.Context {
	r.trace = httptrace.ClientTrace{
		GetConn: func(string) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.has = false
			if r.pooled {
				r.move(waiting)
			} else {
				r.move(dialing)
			}
		},
		GotConn: func(info httptrace.GotConnInfo) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.got, r.has, r.conn, r.since, r.write = true, true, info, time.Now(), nil
			if r.pooled {
				r.move(waiting) // it may wait for an HTTP/2 stream until the header is written
			} else {
				r.move(connected)
			}
		},
		WroteRequest: func(info httptrace.WroteRequestInfo) {
			r.mu.Lock()
			defer r.mu.Unlock()
			switch {
			case !r.has: // the hook belongs to an earlier connection
			case info.Err != nil:
				r.write = info.Err
			default:
				r.move(written)
			}
		},
	}
	if r.pooled {
		r.trace.DNSStart = func(httptrace.DNSStartInfo) { r.dials() }
		r.trace.ConnectStart = func(string, string) { r.dials() }
		r.trace.WroteHeaders = func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.has {
				r.since = time.Now()
				r.move(connected)
			}
		}
	}
	return httptrace.WithClientTrace(ctx, &r.trace)
}

// dials moves r from waiting to dialing. A dial may start even if the request has got another connection by then; r
// does not move in that case.
func (r *route) dials() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stage == waiting && !r.has {
		r.move(dialing)
	}
}

// move moves r to a stage. The caller holds mu.
func (r *route) move(s stage) {
	r.stage = s
	if r.attempt != nil {
		r.attempt.moved(s)
	}
}

// at returns the current stage of r.
func (r *route) at() stage {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stage
}

// waited reports whether the request is still waiting for a connection of this process, or for a stream on one.
func (r *route) waited() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stage == waiting
}

// silent reports whether the request has had, for at least d, a connection that an earlier request had used.
func (r *route) silent(d time.Duration) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stage >= connected && r.conn.Reused && time.Since(r.since) >= d
}

// connection returns the latest connection of the request, or nil. It also returns nil for a connection that is not
// comparable, because it would be used as the key of a map.
func (r *route) connection() net.Conn {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.conn.Conn; c != nil && reflect.TypeOf(c).Comparable() {
		return c
	}
	return nil
}

// neverSent reports whether a request that failed with err was certainly not sent: net/http requested a connection and
// got none, or a policy inside Base refused. If Base does not call the hooks, the type of err decides, unless the body
// was read: if the body's Read dials, it may return an error of that type after the request was sent.
func (r *route) neverSent(body *requestBody, err error) bool {
	r.mu.Lock()
	stage, got := r.stage, r.got
	r.mu.Unlock()
	switch {
	case got || body.any((*sentBody).wasRead):
		return false
	case stage != noConnRequested, behavior.IsRefused(err):
		return true
	}
	op, ok := errors.AsType[*net.OpError](err)
	return ok && (op.Op == "dial" || op.Op == "proxyconnect")
}

// rejected reports whether net/http has rejected the request because the request is invalid: net/http has not requested
// a connection. Other schemes may belong to a RoundTripper that does not call the hooks.
func (r *route) rejected(c *call) bool {
	_, std := c.t.base().(*http.Transport)
	return std && r.at() == noConnRequested &&
		(c.req.URL == nil || c.req.URL.Scheme == "http" || c.req.URL.Scheme == "https")
}

// invalidRequest reports whether the attempt has failed with err because the request itself is invalid.
func (a *attempt) invalidRequest(err error) bool {
	return is[*requestError](err) || // from GetBody, or from a Transport inside Base
		a.call.body.any((*sentBody).failed) ||
		a.Err() == nil && a.route.rejected(a.call) ||
		is[*net.AddrError](err) || // the port is invalid
		hasInvalidRequestText(err) ||
		hasInvalidRequestText(a.route.writeError())
}

// writeError returns why the request could not be written. When net/http cannot write a request, it closes the
// connection, and may then return the error of the read that this interrupts.
func (r *route) writeError() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.write
}

// invalidRequestTexts are prefixes of the errors with which net/http rejects an invalid request, or stops sending it.
// These errors have no types.
var invalidRequestTexts = []string{
	"unsupported protocol scheme ",
	"http: Request.ContentLength=", // the request has no body
	"http: ContentLength=",         // the body has another length
	"http: invalid Host header",
	"http: Request.Write on Request with no Host or URL set",
	"http: nil Request.",
	"http: no Host in request URL",
	"http2: invalid ",
	"http2: request body larger than specified content length",
	"http2: request header list larger than peer's advertised limit",
	"net/http: can't write control character in Request.URL",
	"net/http: invalid ", // a method, field or trailer
	"idna: ",
	"invalid Trailer key ",
	"invalid request :path ",
}

// hasInvalidRequestText reports whether the text of err, or of an error that err wraps, has a prefix in
// invalidRequestTexts.
func hasInvalidRequestText(err error) bool {
	for ; err != nil; err = errors.Unwrap(err) {
		text := err.Error()
		if slices.ContainsFunc(invalidRequestTexts, func(t string) bool { return strings.HasPrefix(text, t) }) {
			return true
		}
	}
	return false
}

// ownFault reports whether this process has run out of file descriptors or of local ports.
func ownFault(err error) bool {
	errno, ok := errors.AsType[syscall.Errno](err)
	return ok && (errno == syscall.EMFILE || errno == syscall.ENFILE || errno == syscall.EADDRNOTAVAIL)
}

// An inMemory is a reader in memory. Len returns the number of bytes that have not been read.
type inMemory interface{ Len() int }

// memoryOf returns the reader in memory that body wraps by io.NopCloser, or nil. net/http recognizes the same types.
func memoryOf(body io.ReadCloser) inMemory {
	switch reflect.TypeOf(body) {
	case reflect.TypeOf(io.NopCloser(nil)), reflect.TypeOf(io.NopCloser(&bytes.Buffer{})):
	default:
		return nil
	}
	switch r := reflect.ValueOf(body).Field(0).Interface().(type) {
	case *bytes.Reader:
		return r
	case *strings.Reader:
		return r
	case *bytes.Buffer:
		return r
	}
	return nil
}

// abandonTime limits the time in which closeAfterStreams writes its request to an HTTP/2 connection.
const abandonTime = 100 * time.Millisecond

// closeAfterStreams makes base use conn, an HTTP/2 connection, for no further request. Requests in flight on conn may
// finish. net/http has no function for this, but a request with Close set is the last one on its connection.
// closeAfterStreams sends such a request, an OPTIONS for the server itself, and cancels it after its header is written.
func closeAfterStreams(base *http.Transport, conn net.Conn, req *http.Request) {
	ctx, cancel := context.WithTimeout(context.Background(), abandonTime)
	defer cancel()
	last := &http.Request{
		Method: http.MethodOptions,
		URL:    &url.URL{Scheme: req.URL.Scheme, Host: req.URL.Host, Opaque: "*"},
		Header: http.Header{},
		Host:   req.Host,
		Close:  true,
	}
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(info httptrace.GotConnInfo) {
			if info.Conn != conn {
				cancel() // base does not use conn any more
			}
		},
		WroteHeaders: cancel,
	})
	if resp, err := base.RoundTrip(last.WithContext(ctx)); err == nil {
		_ = resp.Body.Close()
	}
}

// multiplexed reports whether conn, a connection of base, uses HTTP/2.
func multiplexed(base *http.Transport, conn net.Conn) bool {
	if c, ok := conn.(interface{ ConnectionState() tls.ConnectionState }); ok {
		return c.ConnectionState().NegotiatedProtocol == "h2"
	}
	p := base.Protocols
	return p != nil && p.UnencryptedHTTP2() && !p.HTTP1()
}

// readsWhileWritten reports whether the server of net/http may read the remaining body of r when its handler writes.
// Such a server clears the read deadline at the end of the body.
func readsWhileWritten(r *http.Request) bool { return r.ProtoMajor == 1 }
