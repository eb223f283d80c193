package resiliencehttp

import (
	"cmp"
	"errors"
	"io"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience"
)

const defaultBodyIdle = 30 * time.Second

// serve calls next while the request holds a slot. It applies BodyIdle to the body of r.
func (s Server) serve(next http.Handler, w http.ResponseWriter, r *http.Request) {
	if s.BodyIdle == resilience.Unlimited || r.Body == nil || r.Body == http.NoBody || r.Method == http.MethodConnect {
		next.ServeHTTP(w, r)
		return
	}
	own, atEnd := ownBody(r.Body)
	if atEnd {
		next.ServeHTTP(w, r)
		return
	}
	b := &idleBody{
		ReadCloser: r.Body,
		idle:       cmp.Or(s.BodyIdle, defaultBodyIdle),
		control:    http.NewResponseController(w),
		own:        own,
		perStream:  !readsWhileWritten(r),
	}
	if server, ok := r.Context().Value(http.ServerContextKey).(*http.Server); ok && server.ReadTimeout > 0 {
		b.until = time.Now().Add(server.ReadTimeout)
	}
	if own {
		b.setDeadline() // net/http may read the body before the handler does
	}
	inner := *r
	inner.Body = b
	serveCopy(next, w, r, &inner)
}

// An idleBody is a request's body that limits the time for which each Read waits for the client.
type idleBody struct {
	io.ReadCloser
	idle    time.Duration
	until   time.Time // time at which the server's ReadTimeout expires; zero if there is none
	control *http.ResponseController
	// own reports whether ReadCloser is the body of net/http's HTTP/1 server. That server removes the deadline
	// at the end of the body. Until then, the deadline also limits net/http's own reads of the body.
	own bool
	// perStream reports whether a read deadline that expires between two Reads would end the stream.
	perStream bool
	over      atomic.Bool // a Read returned an error, or the body was closed
}

// Read reads from the client. Read waits for data for at most BodyIdle, and then returns a TimeoutError.
func (b *idleBody) Read(p []byte) (int, error) {
	if b.over.Load() {
		// Over HTTP/1, net/http reads from the connection after the end of the body. If a deadline expired
		// then, net/http would cancel the request.
		return b.ReadCloser.Read(p)
	}
	at := b.setDeadline()
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		b.over.Store(true)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		if !at.Equal(b.until) {
			err = &resilience.TimeoutError{After: b.idle, Err: err}
		}
		return n, err
	}
	b.removeDeadline(err)
	return n, err
}

// Close closes the body. Over HTTP/1, net/http's Close reads the unread part of the body.
func (b *idleBody) Close() error {
	if b.over.Swap(true) || b.perStream {
		return b.ReadCloser.Close()
	}
	b.setDeadline()
	err := b.ReadCloser.Close()
	b.removeDeadline(io.EOF)
	return err
}

// removeDeadline removes the deadline after a Read that returned err, unless net/http does.
func (b *idleBody) removeDeadline(err error) {
	switch {
	case b.own:
	case err == io.EOF && !b.perStream: // net/http has also removed the deadline of ReadTimeout
		_ = b.control.SetReadDeadline(time.Time{})
	default:
		_ = b.control.SetReadDeadline(b.until)
	}
}

// setDeadline sets and returns the deadline of the next Read. The deadline is never later than until, because
// that would extend the server's ReadTimeout.
func (b *idleBody) setDeadline() time.Time {
	at := time.Now().Add(b.idle)
	if !b.until.IsZero() && b.until.Before(at) {
		at = b.until
	}
	_ = b.control.SetReadDeadline(at) // not every ResponseWriter supports it
	return at
}
