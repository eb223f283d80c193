package resiliencehttp

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"

	"github.com/go-resilience/resilience/internal/linger"
)

// A body is the body of a response that the caller has. Its end is that of the
// work that the policies hold something for.
type body struct {
	inner   io.ReadCloser
	work    *linger.Work
	lease   *lease
	unwatch func() bool // the end of the lease
	closing atomic.Bool
}

// newBody returns what the caller gets in the place of the answer's body. The work
// also ends with the ctx of the answer, though nobody may read or close it, unless
// its body is a connection, which does not end with that.
func newBody(a answer, work *linger.Work) io.ReadCloser {
	b := &body{inner: a.Body, work: work, lease: a.lease}
	if duplex(a.Response) {
		return &duplexBody{b, b.inner.(io.Writer)}
	}
	if a.lease.Done() != nil {
		b.unwatch = a.lease.AfterFunc(func() { work.End(a.lease.reason()) })
	}
	return b
}

// bodyless reports whether there is nothing to wait for in the response's body,
// which callers then need not close. A ContentLength of 0 does not say so: it is
// what a RoundTripper leaves that knows no better, and trailers may be to come.
func bodyless(req *http.Request, resp *http.Response) bool {
	return resp.Body == http.NoBody || req.Method == http.MethodHead ||
		resp.StatusCode == http.StatusNoContent || resp.StatusCode == http.StatusNotModified
}

// duplex reports whether the response's body is a connection to be written to,
// as after 101 Switching Protocols.
func duplex(resp *http.Response) bool {
	_, ok := resp.Body.(io.Writer)
	return ok && resp.StatusCode == http.StatusSwitchingProtocols
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.inner.Read(p)
	if err != nil {
		b.finish(err)
	}
	return n, err
}

// Close ends the work well, whatever has been read: the caller has had enough.
func (b *body) Close() error {
	b.closing.Store(true) // what that does to a Read is no failure
	defer b.finish(nil)
	return b.inner.Close()
}

// finish ends the work: slots are free and counts are true when Read or Close
// returns, unless ctx has just ended.
func (b *body) finish(err error) {
	if b.unwatch != nil {
		b.unwatch()
	}
	switch {
	case err == nil || err == io.EOF || b.closing.Load():
		err = nil
	case b.lease.Err() != nil:
		err = b.lease.reason()
	}
	b.work.End(err)
}

// A duplexBody is the connection after 101 Switching Protocols. The end of what
// comes in is not the end of what goes out, so only Close ends the work.
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
// place of its body, with how that broke off, if it did. It returns false if there is
// too much for that, and the body is still open.
func drain(resp *http.Response) bool {
	if resp.Body == http.NoBody {
		return true
	}
	read, err := io.ReadAll(io.LimitReader(resp.Body, drainLimit+1))
	if len(read) > drainLimit {
		resp.Body = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(bytes.NewReader(read), resp.Body), resp.Body}
		return false
	}
	_ = resp.Body.Close()
	resp.Body = &drained{Reader: *bytes.NewReader(read), err: err}
	return true
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
