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

// This file holds what depends on the behavior of net/http beyond its documentation: the order of its trace hooks, the
// texts of its errors, the bodies that it knows to be in memory, the last request on an HTTP/2 connection, and the
// server's read deadline. TestGoVersionIsChecked names the versions of Go that it was checked with.

// A stage is how far an attempt has come on its way to the server.
type stage int

const (
	unasked   stage = iota // no connection was asked for
	waiting                // for a connection of this process, or for a stream on one
	dialing                // a connection is being made
	connected              // the attempt has a connection and, if it may have to wait for a stream, has that
	written                // the whole request has been written
)

// A route follows a request to its connection by httptrace. Its hooks may be called on several goroutines,
// and after RoundTrip has returned.
type route struct {
	pooled bool        // the request may have to wait for a connection although none is being dialed
	moved  func(stage) // called when the stage changes, with mu held; may be nil

	mu    sync.Mutex
	stage stage
	got   bool // the request had a connection at some time
	has   bool // it has conn
	conn  httptrace.GotConnInfo
	since time.Time // when the request got conn
}

// pooled reports whether a request may wait for a connection of base although none is being dialed.
// It is unknown, so true, of a foreign base.
func pooled(base http.RoundTripper) bool {
	t, ok := base.(*http.Transport)
	return !ok || t.MaxConnsPerHost > 0 || t.HTTP2 != nil && t.HTTP2.StrictMaxConcurrentRequests
}

// watch returns ctx with the hooks that update r.
func (r *route) watch(ctx context.Context) context.Context {
	trace := &httptrace.ClientTrace{
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
			r.got, r.has, r.conn, r.since = true, true, info, time.Now()
			if r.pooled {
				r.move(waiting) // for an HTTP/2 stream, until the header is written
			} else {
				r.move(connected)
			}
		},
		WroteRequest: func(info httptrace.WroteRequestInfo) {
			r.mu.Lock()
			defer r.mu.Unlock()
			if info.Err == nil && r.has { // not an earlier connection's
				r.move(written)
			}
		},
	}
	if r.pooled {
		trace.DNSStart = func(httptrace.DNSStartInfo) { r.dials() }
		trace.ConnectStart = func(string, string) { r.dials() }
		trace.WroteHeaders = func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.has {
				r.since = time.Now()
				r.move(connected)
			}
		}
	}
	return httptrace.WithClientTrace(ctx, trace)
}

// dials moves r on if it waits. A dial may also begin after another connection has become free.
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
	if r.moved != nil {
		r.moved(s)
	}
}

// at returns the stage of r.
func (r *route) at() stage {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stage
}

// waited reports whether the request has had to wait for a connection of this process, or for a stream on
// one, until now.
func (r *route) waited() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stage == waiting
}

// silent reports whether the request has a connection that an earlier request had used, for at least d.
func (r *route) silent(d time.Duration) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stage >= connected && r.conn.Reused && time.Since(r.since) >= d
}

// connection returns the latest connection of the request, or nil. It returns nil for a connection that cannot be the
// key of a map.
func (r *route) connection() net.Conn {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.conn.Conn; c != nil && reflect.TypeOf(c).Comparable() {
		return c
	}
	return nil
}

// neverSent reports whether a request that failed with err was certainly not sent: a
// connection was asked for and there was none, or a policy within Base refused. A Base that
// does not call the hooks is judged by its error, unless the body was read: a body whose Read dials may
// return such an error too.
func (r *route) neverSent(body *requestBody, err error) bool {
	r.mu.Lock()
	stage, got := r.stage, r.got
	r.mu.Unlock()
	switch {
	case got || body.any((*sentBody).wasRead):
		return false
	case stage != unasked, behavior.IsRefused(err):
		return true
	}
	op, ok := errors.AsType[*net.OpError](err)
	return ok && (op.Op == "dial" || op.Op == "proxyconnect")
}

// unasked reports whether net/http has found a fault in the request itself: it has not asked
// for a connection.
func (r *route) unasked(c *call) bool {
	_, std := c.t.base().(*http.Transport)
	return std && r.at() == unasked && (c.req.URL == nil || c.req.URL.Scheme == "http" || c.req.URL.Scheme == "https")
}

// wrongRequest reports whether the request itself is the reason for err, which the attempt has failed with.
func (a *attempt) wrongRequest(err error) bool {
	return is[*requestError](err) || // of a Transport within Base, or of GetBody
		a.call.body.any((*sentBody).failed) ||
		a.Err() == nil && a.route.unasked(a.call) ||
		is[*net.AddrError](err) || // the port
		hasWrongRequestText(err)
}

// wrongRequestTexts are the beginnings of errors with which net/http does not send a request, or stops sending it,
// because of the request itself. These errors have no types.
var wrongRequestTexts = []string{
	"unsupported protocol scheme ",
	"http: Request.ContentLength=", // without a body
	"http: ContentLength=",         // with a body of another length
	"http: invalid Host header",
	"http: Request.Write on Request with no Host or URL set",
	"http: nil Request.",
	"http: no Host in request URL",
	"http2: invalid ",
	"http2: request body larger than specified content length",
	"http2: request header list larger than peer's advertised limit",
	"net/http: can't write control character in Request.URL",
	"net/http: invalid ", // method, field or trailer
	"idna: ",
	"invalid Trailer key ",
	"invalid request :path ",
}

// hasWrongRequestText reports whether err, or an error that it wraps, begins with one of wrongRequestTexts.
func hasWrongRequestText(err error) bool {
	for ; err != nil; err = errors.Unwrap(err) {
		text := err.Error()
		if slices.ContainsFunc(wrongRequestTexts, func(t string) bool { return strings.HasPrefix(text, t) }) {
			return true
		}
	}
	return false
}

// ownFault reports whether err is a shortage of this process: of file descriptors or of local ports.
func ownFault(err error) bool {
	errno, ok := errors.AsType[syscall.Errno](err)
	return ok && (errno == syscall.EMFILE || errno == syscall.ENFILE || errno == syscall.EADDRNOTAVAIL)
}

// An inMemory knows how much of it has not been read.
type inMemory interface{ Len() int }

// memoryOf returns the reader that io.NopCloser has made body of, if net/http knows that it is
// in memory, or nil.
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

// abandonTime is the time that an HTTP/2 connection may take to write the header that abandons it.
const abandonTime = 100 * time.Millisecond

// closeAfterStreams has base use conn, which is of HTTP/2, for no other request. Requests on it may finish. A
// request with Close set is the last on its connection: an OPTIONS for the server itself, which is canceled
// once its header is written.
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
				cancel() // it is no longer used
			}
		},
		WroteHeaders: cancel,
	})
	if resp, err := base.RoundTrip(last.WithContext(ctx)); err == nil {
		_ = resp.Body.Close()
	}
}

// multiplexed reports whether conn, which base has made, speaks HTTP/2.
func multiplexed(base *http.Transport, conn net.Conn) bool {
	if c, ok := conn.(interface{ ConnectionState() tls.ConnectionState }); ok {
		return c.ConnectionState().NegotiatedProtocol == "h2"
	}
	p := base.Protocols
	return p != nil && p.UnencryptedHTTP2() && !p.HTTP1()
}

// readsWhileWritten reports whether the server of net/http may read the rest of r's body when its handler writes.
// It then clears the read deadline at the end of the body.
func readsWhileWritten(r *http.Request) bool { return r.ProtoMajor == 1 }
