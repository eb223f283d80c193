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
	// silentFor is the minimum time that a request has had its connection when its caller's deadline expires. If it
	// is shorter, the connection is not abandoned. A timeout of this module always abandons it.
	silentFor = 900 * time.Millisecond
	// abandonedFor is the time for which a Transport remembers that it has abandoned a connection.
	abandonedFor = time.Minute
)

// wasSilent reports whether the attempt has timed out on a connection that an earlier request had used. The network may
// have lost such a connection.
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

// abandonIfSilent abandons the connection of a if it was silent. Otherwise the next attempt could time out on the same
// lost connection.
func (a *attempt) abandonIfSilent() {
	if !a.wasSilent() {
		return
	}
	a.call.silent = true
	a.call.t.abandon(a.route.connection(), a.call.req)
}

// A lastHeard records when each connection last had a response. It removes connections after abandonedFor, or its map
// would grow without limit.
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

// before reports whether no response has arrived on the connection of r since r got that connection.
func (l *lastHeard) before(r *route) bool {
	conn := r.connection()
	l.mu.Lock()
	at := l.at[conn]
	l.mu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	return !at.After(r.since)
}

// abandon makes Base use conn for no other request. Concurrent calls for conn wait until the first has returned.
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
		t.CloseIdleConnections() // idle connections to the same server may be lost also
	}
}
