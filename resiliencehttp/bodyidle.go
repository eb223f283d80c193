package resiliencehttp

import (
	"cmp"
	"errors"
	"io"
	"net/http"
	"os"
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
	b := &idleBody{
		ReadCloser: r.Body,
		idle:       cmp.Or(s.BodyIdle, defaultBodyIdle),
		control:    http.NewResponseController(w),
		perStream:  !readsWhileWritten(r),
	}
	if server, ok := r.Context().Value(http.ServerContextKey).(*http.Server); ok && server.ReadTimeout > 0 {
		b.until = time.Now().Add(server.ReadTimeout)
	}
	if readsWhileWritten(r) {
		b.setDeadline()
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
	// perStream reports whether a read deadline that expires between two Reads would end the stream. If so,
	// Read removes its deadline before it returns.
	perStream bool
}

// Read reads from the client. Read waits for data for at most BodyIdle, and then returns a TimeoutError.
func (b *idleBody) Read(p []byte) (int, error) {
	at := b.setDeadline()
	n, err := b.ReadCloser.Read(p)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		if !at.Equal(b.until) {
			err = &resilience.TimeoutError{After: b.idle, Err: err}
		}
	case b.perStream:
		_ = b.control.SetReadDeadline(b.until)
	}
	return n, err
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
