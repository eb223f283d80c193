package resiliencehttp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/internal/ended"
)

// Guard returns middleware that serves each request under mw: a breaker, a shared limit, or
// a [resilience.Chain] of several.
//
//	mux.Handle("/reports/", resiliencehttp.Server{}.Guard(circuit.Wrap)(reports))
//
// The policies see a response with status 500, 502, 503, 504, 507 or 520 to 530 as a
// failure, a [*StatusError]. If [Server.Refuse] or other middleware of this package wrote it, they
// see the refusal. A request that the policies refuse gets 429 or 503, as Refuse writes it;
// if a limit refused, with the fields RateLimit-Policy and RateLimit. The handler's request
// has the ctx of the innermost policy. If that ctx ends by a timeout and the handler
// returns without having written anything, the handler has failed, and the client gets 503.
//
// The client's behavior does not count against the handler. If the client hangs up, the ctx
// of the policies is canceled, and they ignore the result of the handler. A panic with
// [http.ErrAbortHandler] counts as the same and passes through. The failure of a handler counts
// as the same if the request's body could not be read: it was malformed, say, or too long for
// an [http.MaxBytesReader] further out. If a timeout passed while the body was waited for, the
// failure is [resilience.Answered]. The time in which a client sends and reads is part of that
// of the call, though: a SlowRate and an adaptive limit go by it.
//
// A request is served once, so a retrier is of no use in mw. A nil mw means none.
func (s Server) Guard(mw resilience.Middleware) func(http.Handler) http.Handler {
	if mw == nil {
		mw = resilience.Chain()
	}
	return s.guard(mw, true)
}

var (
	errServed  = errors.New("resiliencehttp: the request has been served and is not served again")
	errAborted = fmt.Errorf("resiliencehttp: the handler aborted the response: %w", context.Canceled)
	errBroken  = fmt.Errorf("resiliencehttp: the request's body could not be read: %w", context.Canceled)
)

// guard is Guard if told is true. Otherwise the policies do not see how requests end.
func (s Server) guard(mw resilience.Middleware, told bool) func(http.Handler) http.Handler {
	return s.exempting(func(next http.Handler) http.Handler {
		serve := mw(func(ctx context.Context) error {
			v, ok := ctx.Value(serviceKey{}).(*service)
			if !ok {
				return errNoCall
			}
			return v.serve(ctx, next, told)
		})
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			v := &service{w: w, r: r, shareBy: s.ShareBy}
			v.ctx = context.WithValue(r.Context(), serviceKey{}, v)
			if told {
				v.ctx, v.cancel = context.WithCancelCause(v.ctx)
				defer v.cancel(nil)
			}
			as := refusal{encoding: w.Header()["Content-Encoding"]}
			err := serve(v.ctx)
			switch {
			case v.aborted:
				panic(http.ErrAbortHandler)
			case v.served && (!v.late || gone(r)):
			case err != nil:
				s.refuse(w, r, err, as)
			default: // a policy turned a failure into success
				s.refuse(w, r, errNoResponse, as)
			}
		})
	})
}

// A service is a request on its way through the policies.
type service struct {
	ctx     context.Context         // that they run under
	cancel  context.CancelCauseFunc // of ctx
	w       http.ResponseWriter
	r       *http.Request
	shareBy func(*http.Request) string
	body    clientBody // of r, if that has one
	served  bool
	aborted bool // by the handler, with http.ErrAbortHandler
	late    bool // the handler returned after its ctx had ended, and wrote nothing
}

type serviceKey struct{}

func (s *service) serve(ctx context.Context, next http.Handler, told bool) error {
	if s.served {
		return &finalError{errServed}
	}
	s.served = true
	r := s.r.WithContext(ctx)
	defer giveBack(r, s.r)
	if !told {
		next.ServeHTTP(s.w, r)
		return nil
	}
	if r.Body != nil && r.Body != http.NoBody {
		s.body.ReadCloser, s.body.ctx, r.Body = r.Body, ctx, &s.body
	}
	w := &statusWriter{ResponseWriter: s.w}
	if s.abort(func() { next.ServeHTTP(w.capable(), r) }) {
		s.aborted = true
		s.cancel(errAborted)
		return ended.Error(s.ctx)
	}
	s.late = w.status == 0 && ctx.Err() != nil
	failed := failed(w.status) && w.refusal == nil
	switch {
	case (s.late || failed) && s.body.failed():
		if ctx.Err() == context.DeadlineExceeded { // policies within the timeout would see no cancel
			return &requestError{ended.Error(ctx)}
		}
		s.cancel(errBroken)
		return ended.Error(s.ctx)
	case w.status == 0:
		return ended.Error(ctx)
	case failed:
		return &StatusError{StatusCode: w.status, Header: s.w.Header().Clone(), final: true}
	}
	return w.refusal
}

// A clientBody is the body of a request, and knows whether the client failed to send it, or to
// send it in time. What becomes of a Read after Close says nothing: a reverse proxy closes the
// body when its server fails.
type clientBody struct {
	io.ReadCloser
	ctx            context.Context // of the handler
	closed, broken atomic.Bool
	waiting        atomic.Bool // a Read is under way, or was when ctx ended
}

func (b *clientBody) Read(p []byte) (int, error) {
	if b.ctx.Err() == nil {
		b.waiting.Store(!b.closed.Load())
	}
	n, err := b.ReadCloser.Read(p)
	b.notWaiting()
	if err != nil && err != io.EOF && !b.closed.Load() {
		b.broken.Store(true)
	}
	return n, err
}

func (b *clientBody) Close() error {
	b.closed.Store(true)
	b.notWaiting()
	return b.ReadCloser.Close()
}

func (b *clientBody) notWaiting() {
	if b.ctx.Err() == nil {
		b.waiting.Store(false)
	}
}

// failed reports whether the client is why a handler has failed that has returned.
func (b *clientBody) failed() bool {
	return b.broken.Load() || b.waiting.Load() && b.ctx.Err() != nil
}

// giveBack gives the request that a middleware got what a handler has set in r, its copy with
// another ctx: net/http removes the temporary files of MultipartForm, and middleware further
// out looks at the pattern that matched, and at its values.
func giveBack(r, to *http.Request) {
	to.MultipartForm = r.MultipartForm
	if r.Pattern == to.Pattern {
		return
	}
	to.Pattern = r.Pattern
	for _, wildcard := range strings.Split(r.Pattern, "{")[1:] {
		name, _, _ := strings.Cut(wildcard, "}")
		name = strings.TrimSuffix(name, "...")
		to.SetPathValue(name, r.PathValue(name))
	}
}

// abort calls serve and reports whether it panics with http.ErrAbortHandler. Any other
// panic passes through.
func (s *service) abort(serve func()) (aborted bool) {
	defer func() {
		switch p := recover(); p {
		case nil:
		case http.ErrAbortHandler:
			aborted = true
		default:
			panic(p)
		}
	}()
	serve()
	return false
}
