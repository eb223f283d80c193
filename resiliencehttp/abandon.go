package resiliencehttp

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"sync"
	"time"

	"github.com/go-resilience/resilience"
)

const (
	// silentFor is how long a caller must have waited, when its own deadline passes, before the connection
	// is abandoned. A timeout of this module abandons it at once.
	silentFor = 900 * time.Millisecond
	// abandonTime is how long a connection may take to write the header that abandons it.
	abandonTime = 100 * time.Millisecond
	// abandonedFor is how long a Transport remembers that it has abandoned a connection.
	abandonedFor = time.Minute
)

// wasSilent reports whether the attempt has ended because a connection that an earlier request had used was
// silent.
func (a *attempt) wasSilent() bool {
	if a.Err() == nil {
		return false
	}
	var passed *resilience.TimeoutError
	if errors.As(context.Cause(a), &passed) {
		return a.route.silent(0)
	}
	return a.Err() == context.DeadlineExceeded && a.route.silent(silentFor)
}

// abandonIfSilent sees to it that no later attempt uses the connection of an attempt that was silent.
func (a *attempt) abandonIfSilent() {
	if !a.wasSilent() {
		return
	}
	a.call.silent = true
	a.call.t.abandon(a.route.connection(), a.call.req)
}

// abandon has Base use conn for no other request. Concurrent calls wait until that is done.
func (t *Transport) abandon(conn net.Conn, req *http.Request) {
	once, known := t.abandoned.LoadOrStore(conn, new(sync.Once))
	if !known {
		time.AfterFunc(abandonedFor, func() { t.abandoned.Delete(conn) })
	}
	once.(*sync.Once).Do(func() {
		if base, ok := t.base().(*http.Transport); ok && multiplexed(base, conn) {
			closeAfterStreams(base, conn, req)
		} else {
			t.CloseIdleConnections() // there may be more connections to the same server
		}
	})
}

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
