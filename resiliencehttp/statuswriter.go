package resiliencehttp

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
)

// A statusWriter remembers the status of a response. It has the optional methods that
// handlers commonly look for, and [http.ResponseController] finds the others by Unwrap.
type statusWriter struct {
	http.ResponseWriter
	status  int   // 0 if nothing has been written
	refusal error // the err of refuse, if that has written the response
}

// capable returns w with those methods of its inner writer that a handler may look for and
// that w cannot always offer.
func (w *statusWriter) capable() http.ResponseWriter {
	if h := hijackerOf(w.ResponseWriter); h != nil { // HTTP/1.1
		return &hijackWriter{w, h}
	}
	if p, ok := w.ResponseWriter.(http.Pusher); ok { // HTTP/2
		return &pushWriter{w, p}
	}
	return w
}

// hijackerOf returns the Hijacker that [http.ResponseController] finds, or nil.
func hijackerOf(w http.ResponseWriter) http.Hijacker {
	for {
		switch at := w.(type) {
		case http.Hijacker:
			return at
		case interface{ Unwrap() http.ResponseWriter }:
			w = at.Unwrap()
		default:
			return nil
		}
	}
}

// wrote notes the status of the response. The first status counts: net/http ignores later
// ones.
func (w *statusWriter) wrote(status int) {
	if w.status == 0 {
		w.status = status
	}
}

func (w *statusWriter) WriteHeader(status int) {
	// Another status follows one below 200, except 101.
	if status >= 200 || status == http.StatusSwitchingProtocols {
		w.wrote(status)
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *statusWriter) Write(p []byte) (int, error) {
	w.wrote(http.StatusOK)
	return w.ResponseWriter.Write(p)
}

func (w *statusWriter) WriteString(s string) (int, error) {
	w.wrote(http.StatusOK)
	return io.WriteString(w.ResponseWriter, s)
}

// ReadFrom keeps the server's fast way to copy a file. The server writes nothing before it
// has read something.
func (w *statusWriter) ReadFrom(r io.Reader) (int64, error) {
	n, err := io.Copy(w.ResponseWriter, r)
	if n > 0 {
		w.wrote(http.StatusOK)
	}
	return n, err
}

func (w *statusWriter) Flush() { _ = w.FlushError() }

// FlushError is what [http.ResponseController] calls, if there is one.
func (w *statusWriter) FlushError() error {
	err := http.NewResponseController(w.ResponseWriter).Flush()
	if !errors.Is(err, http.ErrNotSupported) {
		w.wrote(http.StatusOK)
	}
	return err
}

func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// A hijackWriter is a statusWriter whose handler may take over the connection.
type hijackWriter struct {
	*statusWriter
	hijacker http.Hijacker
}

func (w *hijackWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := w.hijacker.Hijack()
	if err == nil {
		w.wrote(http.StatusSwitchingProtocols)
	}
	return conn, rw, err
}

// A pushWriter is a statusWriter whose handler may use HTTP/2 server push.
type pushWriter struct {
	*statusWriter
	http.Pusher
}

// refusing tells every statusWriter in w that the response about to be written is a refusal
// with err.
func refusing(w http.ResponseWriter, err error) {
	for w != nil {
		if s, ok := w.(interface{ refusing(error) }); ok {
			s.refusing(err)
		}
		u, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			return
		}
		w = u.Unwrap()
	}
}

func (w *statusWriter) refusing(err error) {
	if w.status == 0 {
		w.refusal = err
	}
}
