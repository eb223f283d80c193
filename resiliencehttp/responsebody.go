package resiliencehttp

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
)

// A body is the body of a response that the caller has. When it ends, the work ends, and
// the policies release what they hold.
type body struct {
	inner   io.ReadCloser
	ctx     *sendCtx
	unwatch func() bool // undoes the AfterFunc of ctx, if not nil
	waiting atomic.Bool // a Read is under way that began before ctx ended
	closing atomic.Bool
}

// newBody returns the body that the caller gets in place of the answer's. The work also
// ends with the ctx of the answer, even if the caller neither reads nor closes the body. A
// connection (101 Switching Protocols) does not end with the ctx.
func newBody(a answer) io.ReadCloser {
	b := &a.ctx.call.read
	b.inner, b.ctx = a.Body, a.ctx
	if duplex(a.Response) {
		a.ctx.unlimited()
		return &duplexBody{b, b.inner.(io.Writer)}
	}
	if a.ctx.Done() != nil {
		b.unwatch = a.ctx.AfterFunc(b.ctxEnded)
	}
	return b
}

// ctxEnded is called when the ctx of the answer has ended.
func (b *body) ctxEnded() { b.end(b.ctx.reason(), b.waiting.Load()) }

// bodyless reports whether a response has no body to wait for, so that callers need not
// close it. A ContentLength of 0 does not say so: a RoundTripper that does not know the
// length leaves it at 0, and trailers may follow.
func bodyless(req *http.Request, resp *http.Response) bool {
	return resp.Body == http.NoBody || !mayHaveBody(req, resp)
}

// mayHaveBody reports whether a response to req with this status may have a body (RFC 9110,
// section 6.4.1), or be a connection.
func mayHaveBody(req *http.Request, resp *http.Response) bool {
	return req.Method != http.MethodHead &&
		resp.StatusCode != http.StatusNoContent && resp.StatusCode != http.StatusNotModified
}

// duplex reports whether the response's body is a connection that can be written to, as
// after 101 Switching Protocols.
func duplex(resp *http.Response) bool {
	_, ok := resp.Body.(io.Writer)
	return ok && resp.StatusCode == http.StatusSwitchingProtocols
}

func (b *body) Read(p []byte) (int, error) {
	alive := b.ctx.Err() == nil
	b.waiting.Store(alive)
	n, err := b.inner.Read(p)
	if err == nil || err == io.EOF {
		b.waiting.Store(false)
	} // otherwise ctxEnded, which may come first, is to see that a Read was waiting
	if err != nil {
		b.finish(err, alive)
	}
	return n, err
}

// Close ends the work without an error, even if the body has not been read to its end.
func (b *body) Close() error {
	b.closing.Store(true) // a Read that this interrupts has not failed
	defer b.finish(nil, false)
	return b.inner.Close()
}

// finish ends the work when Read or Close returns, so that slots are free and counts are
// exact by then, unless ctx has just ended.
func (b *body) finish(err error, waiting bool) {
	if b.unwatch != nil {
		b.unwatch()
	}
	b.end(err, waiting)
}

// end ends the work with err. waiting is whether a Read was waiting for the server at that
// time.
func (b *body) end(err error, waiting bool) {
	err = b.brokeOff(err, waiting)
	b.ctx.end()
	b.ctx.call.release()
	b.ctx.call.work.End(err)
}

// brokeOff returns the error with which the body broke off. It returns nil if the error
// says nothing about the server: the caller has read it all, has closed it, has left, or
// was too slow to read it in time.
func (b *body) brokeOff(err error, waiting bool) error {
	if err == nil || err == io.EOF || b.closing.Load() {
		return nil
	}
	canceled := b.ctx.call.heedCancel()
	switch b.ctx.call.req.Context().Err() {
	case nil:
		if canceled {
			return nil
		}
	case context.Canceled:
		return nil
	}
	switch {
	case b.ctx.Err() == nil:
		return err
	case waiting:
		return b.ctx.reason()
	}
	return nil
}

// A duplexBody is the connection after 101 Switching Protocols. One direction may end
// before the other, so only Close ends the work.
type duplexBody struct {
	*body
	w io.Writer
}

func (b *duplexBody) Read(p []byte) (int, error)  { return b.inner.Read(p) }
func (b *duplexBody) Write(p []byte) (int, error) { return b.w.Write(p) }

// CloseWrite forwards to the body of net/http.
func (b *duplexBody) CloseWrite() error {
	if c, ok := b.inner.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return fmt.Errorf("resiliencehttp: CloseWrite: %w", http.ErrNotSupported)
}
