package resiliencehttp

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/go-resilience/resilience"
)

const (
	// silentFor is how long a caller must have waited, when its own deadline passes, before the connection
	// is abandoned. A timeout of this module abandons it at once.
	silentFor = 900 * time.Millisecond
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
