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

// The code in this file depends on behavior of net/http that its documentation does not promise:
//
//   - the order in which it calls the hooks of httptrace,
//   - the texts of its errors,
//   - the types of request bodies that it recognizes as in memory,
//   - its use of an HTTP/2 connection after a request with Close set,
//   - the read deadline of the server,
//   - the type of the server's request bodies, and its field sawEOF.
//
// TestGoVersionIsChecked lists the versions of Go with which this code was checked.

// A stage is the progress of an attempt until its request has been written.
type stage int

const (
	noConnRequested stage = iota // net/http has not requested a connection
	waiting                      // the attempt waits for a free connection, or for a free stream on a connection
	dialing                      // a connection is being established
	connected                    // the attempt has a connection and does not wait for a stream
	written                      // the whole request has been written
)

// A route records how an attempt gets its connection. It is updated by httptrace hooks, which net/http may
// call on several goroutines, and even after RoundTrip has returned.
type route struct {
	pooled  bool     // whether the request may wait for a connection that is not being dialed
	attempt *attempt // its method moved is called, with mu held, when the stage changes; may be nil
	trace   httptrace.ClientTrace

	mu    sync.Mutex
	stage stage
	got   bool // whether the request has ever had a connection
	has   bool // whether the request has the connection conn now
	conn  httptrace.GotConnInfo
	since time.Time // time at which the request got conn, or its stream on conn
	write error     // why the request could not be written to conn
}

// pooled reports whether a request may have to wait until another request releases a connection of base. For
// a base that is not an *http.Transport, this is unknown, and pooled returns true.
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
				r.move(waiting) // the request may wait for an HTTP/2 stream until the header is written
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

// dials moves r from waiting to dialing. net/http may start to dial after the request has already got another
// connection. In that case, dials has no effect.
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

// waited reports whether the request is still waiting for a free connection, or for a free stream on a
// connection.
func (r *route) waited() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stage == waiting
}

// silent reports whether the request has had a reused connection for at least d. A reused connection has
// served an earlier request.
func (r *route) silent(d time.Duration) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stage >= connected && r.conn.Reused && time.Since(r.since) >= d
}

// connection returns the latest connection of the request, or nil if there is none. It also returns nil if
// the connection's type is not comparable, because callers use the connection as the key of a map.
func (r *route) connection() net.Conn {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.conn.Conn; c != nil && reflect.TypeOf(c).Comparable() {
		return c
	}
	return nil
}

// neverSent reports whether a request that failed with err was certainly not sent. This is the case if
// net/http requested a connection and got none, or if a policy inside Base refused the request. If Base does
// not call the hooks, neverSent returns true if err is the error of a dial. If any part of the body was read,
// neverSent returns false: the body's own Read may have dialed another server and returned the error of that
// dial.
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

// rejected reports whether net/http has rejected the request because the request is invalid. net/http then
// has not requested a connection. rejected considers only http and https, because another scheme may be
// registered with a RoundTripper that does not call the hooks.
func (r *route) rejected(c *call) bool {
	_, std := c.t.base().(*http.Transport)
	return std && r.at() == noConnRequested &&
		(c.req.URL == nil || c.req.URL.Scheme == "http" || c.req.URL.Scheme == "https")
}

// invalidRequest reports whether the attempt failed with err because the request itself is invalid.
func (a *attempt) invalidRequest(err error) bool {
	return is[*requestError](err) || // the error is from GetBody, or from a Transport inside Base
		a.call.body.any((*sentBody).failed) ||
		a.Err() == nil && a.route.rejected(a.call) ||
		is[*net.AddrError](err) || // the port is invalid
		hasInvalidRequestText(err) ||
		hasInvalidRequestText(a.route.writeError())
}

// writeError returns the reason why the request could not be written, or nil. RoundTrip may return a
// different error: when net/http cannot write a request, it closes the connection, which interrupts a read,
// and it may return the error of that read.
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

// memoryOf returns the in-memory reader that body wraps with io.NopCloser, or nil for any other body.
// net/http recognizes the same types.
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

// abandonTime is the maximum time for which closeAfterStreams tries to write its request to an HTTP/2
// connection.
const abandonTime = 100 * time.Millisecond

// closeAfterStreams makes base send no further requests on conn, an HTTP/2 connection. Requests in flight on
// conn can finish. net/http has no function for this, but it sends no requests on a connection after a
// request with Close set. closeAfterStreams therefore sends such a request (OPTIONS *) and cancels it when
// its header has been written.
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

// multiplexed reports whether conn, a connection of base, uses HTTP/2, on which several requests can be in
// flight.
func multiplexed(base *http.Transport, conn net.Conn) bool {
	if c, ok := conn.(interface{ ConnectionState() tls.ConnectionState }); ok {
		return c.ConnectionState().NegotiatedProtocol == "h2"
	}
	p := base.Protocols
	return p != nil && p.UnencryptedHTTP2() && !p.HTTP1()
}

// readsWhileWritten reports whether net/http's server may read the remaining body of r when the handler
// starts to write its response. net/http does this only over HTTP/1, where it also clears the read deadline
// at the end of the body.
func readsWhileWritten(r *http.Request) bool { return r.ProtoMajor == 1 }

// ownBody reports whether body is a body of net/http's HTTP/1 server that no middleware has replaced or
// wrapped, and whether it has been read to its end.
func ownBody(body io.ReadCloser) (own, atEnd bool) {
	for idle, ok := body.(*idleBody); ok; idle, ok = body.(*idleBody) { // added by an outer Bulkhead
		body = idle.ReadCloser
	}
	v := reflect.ValueOf(body)
	if v.Kind() != reflect.Pointer || v.Type().String() != "*http.body" || v.Type().Elem().PkgPath() != "net/http" {
		return false, false
	}
	f := v.Elem().FieldByName("sawEOF")
	if f.Kind() != reflect.Bool {
		return false, false
	}
	return true, f.Bool()
}
