package resiliencehttp

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"

	"github.com/go-resilience/resilience"
)

// Guard returns middleware that serves each request under mw: a breaker, a limit
// that is shared, or a [resilience.Chain] of several.
//
//	mux.Handle("/reports/", resiliencehttp.Guard(circuit.Wrap)(reports))
//
// To the policies a response with status 500, 502, 503 or 504 is a failure, a
// [*StatusError]. A request that they refuse gets 429 or 503, as with [Refuse].
// The handler's request has the ctx that the policies have made of it. A request
// is served once, whatever they make of its failure: a retrier has no place here.
func Guard(mw resilience.Middleware) func(http.Handler) http.Handler {
	if mw == nil {
		mw = resilience.Chain()
	}
	return guard(mw, true)
}

var errServed = errors.New("resiliencehttp: the request has been served and is not served again")

// guard is Guard; the policies learn the status of responses if they are told.
func guard(mw resilience.Middleware, told bool) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		serve := mw(func(ctx context.Context) error {
			s, ok := ctx.Value(serviceKey{}).(*service)
			if !ok {
				return errNoCall
			}
			return s.serve(ctx, next, told)
		})
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			s := &service{Context: r.Context(), w: w, r: r}
			err := serve(s)
			switch {
			case s.served || gone(r, err):
			case err != nil:
				refuse(w, err, "")
			default: // a policy swallowed its refusal
				refuse(w, errNoResponse, "")
			}
		})
	}
}

// A service is a request on its way through the policies, and the ctx that they
// run under.
type service struct {
	context.Context
	w      http.ResponseWriter
	r      *http.Request
	served bool
}

type serviceKey struct{}

// Value returns the service itself for its key.
func (s *service) Value(key any) any {
	if key == (serviceKey{}) {
		return s
	}
	return s.Context.Value(key)
}

func (s *service) serve(ctx context.Context, next http.Handler, told bool) error {
	if s.served {
		return &finalError{errServed}
	}
	s.served = true
	r := s.r.WithContext(ctx)
	if !told {
		next.ServeHTTP(s.w, r)
		return nil
	}
	w := &statusWriter{ResponseWriter: s.w}
	next.ServeHTTP(w, r)
	switch w.status {
	case http.StatusInternalServerError, http.StatusBadGateway,
		http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return &StatusError{StatusCode: w.status, Header: s.w.Header().Clone(), final: true}
	}
	return nil
}

// A statusWriter remembers the status. It has the optional methods that handlers
// commonly look for, and [http.ResponseController] finds the others by Unwrap.
type statusWriter struct {
	http.ResponseWriter
	status int
}

func (w *statusWriter) WriteHeader(status int) {
	if w.status < 200 { // those below are followed by another
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *statusWriter) Flush() { _ = http.NewResponseController(w.ResponseWriter).Flush() }

func (w *statusWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	return http.NewResponseController(w.ResponseWriter).Hijack()
}

// ReadFrom keeps what the server can do to copy a file.
func (w *statusWriter) ReadFrom(r io.Reader) (int64, error) {
	return io.Copy(w.ResponseWriter, r)
}
