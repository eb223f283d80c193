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

// duplex reports whether the response's body is a connection to be written to,
// as after 101 Switching Protocols.
func duplex(resp *http.Response) bool {
	_, ok := resp.Body.(io.Writer)
	return ok
}

// newBody returns the body that the caller of RoundTrip gets: b, which tells
// finished how its reading ended.
func newBody(c *call, b io.ReadCloser, finished chan<- error) io.ReadCloser {
	if w, ok := b.(io.Writer); ok {
		return &duplexBody{body: body{inner: b, call: c, finished: finished}, w: w}
	}
	return &body{inner: b, call: c, finished: finished}
}

// A body is what keeps an attempt going after RoundTrip has returned.
type body struct {
	inner    io.ReadCloser
	call     *call
	finished chan<- error
	once     sync.Once
	closing  atomic.Bool
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.inner.Read(p)
	if err != nil {
		if err == io.EOF || b.closing.Load() {
			b.finish(nil)
		} else {
			b.finish(err)
		}
	}
	return n, err
}

// Close ends the attempt well: the caller has had enough.
func (b *body) Close() error {
	b.closing.Store(true) // what Close does to a Read is no failure
	err := b.inner.Close()
	b.finish(nil)
	return err
}

// finish ends the attempt and waits for the policies, so that their slots are
// free and their counts are true when Read or Close returns.
func (b *body) finish(err error) {
	b.once.Do(func() {
		b.finished <- err
		<-b.call.turn
		b.call.rethrow()
	})
}

// A duplexBody is the connection after 101 Switching Protocols. The end of what
// comes in is not the end of what goes out, so only Close ends the attempt.
type duplexBody struct {
	body
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

// drainLimit is how much of a failed response is read to save its connection.
const drainLimit = 64 << 10

// drain reads what is left of a failed response, closes it and puts what was
// read in the place of its body. Of a response that is too long for that it
// returns the body, still open.
func drain(resp *http.Response) *rest {
	if resp.Body == http.NoBody {
		return nil
	}
	read, err := io.ReadAll(io.LimitReader(resp.Body, drainLimit+1))
	if len(read) > drainLimit {
		r := &rest{Reader: io.MultiReader(bytes.NewReader(read), resp.Body), inner: resp.Body}
		resp.Body = r
		return r
	}
	_ = resp.Body.Close()
	resp.Body = &drained{Reader: *bytes.NewReader(read), err: err}
	return nil
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
	end   context.CancelCauseFunc // releases the ctx that the rest is read under
}

func (r *rest) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if err != nil && r.end != nil {
		r.end(nil)
	}
	return n, err
}

func (r *rest) Close() error {
	err := r.inner.Close()
	if r.end != nil {
		r.end(nil)
	}
	return err
}

// A lease is the ctx that a request is sent under: the attempt's, except that it
// can be extended beyond it. A failed response may have to outlive its attempt,
// since only the policies know whether it is the last.
type lease struct {
	ctx    context.Context
	cancel context.CancelFunc // nil if no policy gave the attempt a ctx that ends
	unlink func() bool        // from the attempt's ctx
	longer bool
}

func newLease(ctx context.Context, c *call) *lease {
	if ctx.Done() == c.Done() || !c.replayable {
		return &lease{ctx: ctx}
	}
	l := &lease{}
	loose, cancel := context.WithCancel(c)
	l.ctx = &leaseCtx{Context: ctx, loose: loose}
	l.cancel = cancel
	l.unlink = context.AfterFunc(ctx, cancel)
	return l
}

// extend makes the lease last until the end of the call.
func (l *lease) extend() {
	l.longer = true
	if l.unlink != nil {
		l.unlink()
	}
}

// end is called when the attempt is over.
func (l *lease) end() {
	if l.cancel != nil && !l.longer {
		l.unlink()
		l.cancel()
	}
}

// leaseCtx has the values and the deadline of the attempt's ctx, and its reason
// for ending, but it ends with loose.
type leaseCtx struct {
	context.Context
	loose context.Context
}

func (c *leaseCtx) Done() <-chan struct{} { return c.loose.Done() }

func (c *leaseCtx) Err() error {
	end := c.loose.Err()
	if end != nil && c.Context.Err() != nil {
		return c.Context.Err()
	}
	return end
}

// AfterFunc spares a derived ctx a goroutine: package context looks for it.
func (c *leaseCtx) AfterFunc(f func()) (stop func() bool) {
	return context.AfterFunc(c.loose, f)
}
