package resiliencehttp

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
)

// A body is the body of a response that the caller has. It keeps the attempt
// going after RoundTrip has returned.
type body struct {
	inner   io.ReadCloser
	call    *call
	end     chan error // to the attempt: how it ended, nil if well
	once    sync.Once
	closing atomic.Bool
}

// bodyless reports whether there is nothing to wait for in the response's body,
// which callers then need not close. A ContentLength of 0 does not say so: it is
// what a RoundTripper leaves that knows no better.
func bodyless(req *http.Request, resp *http.Response) bool {
	return resp.Body == http.NoBody || req.Method == http.MethodHead ||
		resp.StatusCode == http.StatusNoContent || resp.StatusCode == http.StatusNotModified
}

// duplex reports whether the response's body is a connection to be written to,
// as after 101 Switching Protocols.
func duplex(resp *http.Response) bool {
	_, ok := resp.Body.(io.Writer)
	return ok
}

// shortLimit is how long a body may be to be read before RoundTrip returns.
const shortLimit = 4 << 10

// short reports whether the response's body is known to be short.
func short(resp *http.Response) bool {
	return 0 < resp.ContentLength && resp.ContentLength <= shortLimit && !duplex(resp)
}

// reader returns what the caller gets.
func (b *body) reader() io.ReadCloser {
	if w, ok := b.inner.(io.Writer); ok {
		return &duplexBody{b, w}
	}
	return b
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.inner.Read(p)
	if err != nil {
		b.finish(err)
	}
	return n, err
}

// Close ends the attempt well, whatever has been read: the caller has had enough.
func (b *body) Close() error {
	b.closing.Store(true) // what that does to a Read is no failure
	err := b.inner.Close()
	b.finish(nil)
	return err
}

// finish ends the attempt, unless it has ended, and waits for the policies, so
// that their slots are free and their counts are true when Read or Close returns.
func (b *body) finish(err error) {
	b.once.Do(func() {
		if err == io.EOF || b.closing.Load() {
			err = nil
		}
		b.end <- err
		<-b.call.turn
		b.call.rethrow()
	})
}

// A duplexBody is the connection after 101 Switching Protocols. The end of what
// comes in is not the end of what goes out, so only Close ends the attempt.
type duplexBody struct {
	*body
	w io.Writer
}

func (b *duplexBody) Read(p []byte) (int, error)  { return b.inner.Read(p) }
func (b *duplexBody) Write(p []byte) (int, error) { return b.w.Write(p) }

// CloseWrite forwards, as the body that net/http returns does.
func (b *duplexBody) CloseWrite() error {
	if c, ok := b.inner.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return fmt.Errorf("resiliencehttp: CloseWrite: %w", http.ErrNotSupported)
}

// drainLimit is how much of a response is read to save its connection.
const drainLimit = 64 << 10

// drain reads what is left of a response, closes it and puts what was read in the
// place of its body, with how that broke off, if it did. Of a response that is too
// long for that it returns the body, still open.
func drain(resp *http.Response) (*rest, error) {
	if resp.Body == http.NoBody {
		return nil, nil
	}
	read, err := io.ReadAll(io.LimitReader(resp.Body, drainLimit+1))
	if len(read) > drainLimit {
		r := &rest{Reader: io.MultiReader(bytes.NewReader(read), resp.Body), inner: resp.Body}
		resp.Body = r
		return r, nil
	}
	_ = resp.Body.Close()
	resp.Body = &drained{Reader: *bytes.NewReader(read), err: err}
	return nil, err
}

// drained is a body that has been read before.
type drained struct {
	bytes.Reader
	err error // how it broke off, if it did
}

func (d *drained) Read(p []byte) (int, error) {
	n, err := d.Reader.Read(p)
	if err == io.EOF && d.err != nil {
		err = d.err
	}
	return n, err
}

func (d *drained) Close() error { return nil }

// A rest is a body of which only the beginning has been read before.
type rest struct {
	io.Reader
	inner io.Closer
	end   context.CancelFunc // of what the response is read under; may be nil
}

func (r *rest) Close() error {
	err := r.inner.Close()
	if r.end != nil {
		r.end()
	}
	return err
}
