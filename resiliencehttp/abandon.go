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

// A lastHeard remembers when a connection last had a response. It forgets a connection after abandonedFor.
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

// before reports whether the connection of r had its last response before r got it.
func (l *lastHeard) before(r *route) bool {
	conn := r.connection()
	l.mu.Lock()
	at := l.at[conn]
	l.mu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	return !at.After(r.since)
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
