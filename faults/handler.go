package faults

import (
	"context"
	"io"
	"maps"
	"net/http"
)

// Handler returns an [http.Handler] that serves requests with next and injects the faults of a script.
//
// If the request's ctx is done during a Latency or a Hang, the handler returns without writing a response.
// The middleware that set the ctx's deadline must write the response. If a response has a Content-Length and
// its body is not longer than [Plan].Bytes, a Reset has no effect on the client. The client has received the
// whole body before the connection breaks. If the fault is Refuse, net/http's client may resend the request
// on its own.
func Handler(s *Script, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f := s.next()
		if wait(r.Context(), f.delay) != nil {
			return
		}
		if f.plan == nil {
			next.ServeHTTP(w, r)
			return
		}
		f.plan.serve(w, r, next)
	})
}

// serve responds to a request as the plan specifies.
func (p *Plan) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	switch p.Kind {
	case Fail, Status:
		maps.Copy(w.Header(), p.header())
		w.WriteHeader(p.status())
		_, _ = io.WriteString(w, p.text())
	case Hang:
		if r.Body != nil {
			// net/http notices that the client has disconnected only after the body has been read.
			if _, err := io.Copy(io.Discard, r.Body); err != nil {
				return
			}
		}
		<-r.Context().Done()
	case Refuse:
		panic(http.ErrAbortHandler)
	case Reset:
		next.ServeHTTP(&resetWriter{w, p.Bytes}, r)
		truncate(w) // the body was not longer than Bytes
	case SlowBody:
		next.ServeHTTP(&slowWriter{r.Context(), w, p.rate()}, r)
	}
}

// truncate sends the bytes that were written so far to the client, and closes the connection.
func truncate(w http.ResponseWriter) {
	flush(w)
	panic(http.ErrAbortHandler)
}

func flush(w http.ResponseWriter) { _ = http.NewResponseController(w).Flush() }

// A resetWriter passes on left bytes. At the next byte, it closes the connection.
type resetWriter struct {
	http.ResponseWriter
	left int64
}

func (w *resetWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
func (w *resetWriter) Flush()                      { flush(w.ResponseWriter) }

func (w *resetWriter) Write(p []byte) (int, error) {
	n := min(int64(len(p)), w.left)
	written, err := w.ResponseWriter.Write(p[:n])
	w.left -= int64(written)
	if err == nil && n < int64(len(p)) {
		truncate(w.ResponseWriter)
	}
	return written, err
}

// A slowWriter passes on rate bytes per second.
type slowWriter struct {
	ctx context.Context
	http.ResponseWriter
	rate int
}

func (w *slowWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
func (w *slowWriter) Flush()                      { flush(w.ResponseWriter) }

func (w *slowWriter) Write(p []byte) (int, error) {
	written := 0
	for len(p) > 0 {
		n, err := w.ResponseWriter.Write(p[:min(len(p), piece(w.rate))])
		written += n
		if err != nil {
			return written, err
		}
		flush(w.ResponseWriter)
		if err := wait(w.ctx, timeFor(n, w.rate)); err != nil {
			return written, err
		}
		p = p[n:]
	}
	return written, nil
}
