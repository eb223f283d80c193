package resiliencehttp

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/go-resilience/resilience"
)

const (
	// silentFor limits which connections are abandoned when the caller's deadline passes: an attempt must
	// have had its connection for at least silentFor. If the deadline passes earlier, the connection may
	// still work. If a timeout of this module expires, there is no such minimum.
	silentFor = 900 * time.Millisecond
	// abandonedFor is the time after which a Transport forgets that it has abandoned a connection.
	abandonedFor = time.Minute
)

// wasSilent reports whether the attempt timed out on a connection that an earlier request had used. The
// network may have silently dropped such a connection.
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

// abandonIfSilent abandons a's connection if the attempt timed out on a reused connection (see wasSilent).
// Otherwise the next attempt could time out on the same dead connection.
func (a *attempt) abandonIfSilent() {
	if !a.wasSilent() {
		return
	}
	a.call.silent = true
	a.call.t.abandon(a.route.connection(), a.call.req)
}

// A lastHeard records the time of the latest response on each connection. It removes a connection after
// abandonedFor without a response. Otherwise its map would grow without limit.
type lastHeard struct {
	mu     sync.Mutex
	at     map[net.Conn]time.Time
	purged time.Time
}

// note records that a response has arrived on conn.
func (l *lastHeard) note(conn net.Conn) {
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.at == nil {
		l.at = make(map[net.Conn]time.Time)
	}
	if now.Sub(l.purged) >= abandonedFor {
		maps.DeleteFunc(l.at, func(_ net.Conn, at time.Time) bool { return now.Sub(at) >= abandonedFor })
		l.purged = now
	}
	l.at[conn] = now
}

// before reports whether no response has arrived on r's connection since r got the connection.
func (l *lastHeard) before(r *route) bool {
	conn := r.connection()
	l.mu.Lock()
	at := l.at[conn]
	l.mu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	return !at.After(r.since)
}

// abandon makes Base send no further requests on conn. Concurrent calls with the same conn wait until the
// first call has returned.
func (t *Transport) abandon(conn net.Conn, req *http.Request) {
	abandoned := make(chan struct{})
	if first, known := t.abandoned.LoadOrStore(conn, abandoned); known {
		<-first.(chan struct{}) // not a sync.Once: in a bubble of testing/synctest, time would not advance
		return
	}
	defer close(abandoned)
	time.AfterFunc(abandonedFor, func() { t.abandoned.Delete(conn) })
	if base, ok := t.base().(*http.Transport); ok && multiplexed(base, conn) {
		closeAfterStreams(base, conn, req)
	} else {
		t.CloseIdleConnections() // other idle connections to the same server may be dead too
	}
}
