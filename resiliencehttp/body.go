package resiliencehttp

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// A body is the body of a response that the caller has. Its end is that of the
// work that the policies hold something for.
type body struct {
	inner   io.ReadCloser
	lease   *lease
	unwatch func() bool // the end of the lease
	waiting atomic.Bool // a Read, since before the lease ended
	closing atomic.Bool
}

// newBody returns what the caller gets in the place of the answer's body. The work
// also ends with the ctx of the answer, though nobody may read or close it, unless
// its body is a connection, which does not end with that.
func newBody(a answer) io.ReadCloser {
	b := &body{inner: a.Body, lease: a.lease}
	if duplex(a.Response) {
		return &duplexBody{b, b.inner.(io.Writer)}
	}
	if a.lease.Done() != nil {
		b.unwatch = a.lease.AfterFunc(func() { b.end(a.lease.reason(), b.waiting.Load()) })
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
	alive := b.lease.Err() == nil
	b.waiting.Store(alive)
	n, err := b.inner.Read(p)
	b.waiting.Store(false)
	if err != nil {
		b.finish(err, alive)
	}
	return n, err
}

// Close ends the work well, whatever has been read: the caller has had enough.
func (b *body) Close() error {
	b.closing.Store(true) // what that does to a Read is no failure
	defer b.finish(nil, false)
	return b.inner.Close()
}

// finish ends the work: slots are free and counts are true when Read or Close
// returns, unless ctx has just ended.
func (b *body) finish(err error, waiting bool) {
	if b.unwatch != nil {
		b.unwatch()
	}
	b.end(err, waiting)
}

// end ends the work with err. waiting is whether a Read was waiting for the server when
// err came.
func (b *body) end(err error, waiting bool) {
	err = b.brokeOff(err, waiting)
	b.lease.drop()
	b.lease.call.work.End(err)
}

// brokeOff returns how the body broke off, or nil if that says nothing of the server:
// the caller has read it all, has had enough, or was too slow to read it in time.
func (b *body) brokeOff(err error, waiting bool) error {
	if err == nil || err == io.EOF || b.closing.Load() {
		return nil
	}
	canceled := b.lease.call.heedCancel()
	switch b.lease.call.req.Context().Err() {
	case nil:
		if canceled {
			return nil
		}
	case context.Canceled:
		return nil
	}
	switch {
	case b.lease.Err() == nil:
		return err
	case waiting:
		return b.lease.reason()
	}
	return nil
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

// How much of a failed response is read to save its connection, and for how long the
// next attempt waits for that.
const (
	drainLimit = 64 << 10
	drainTime  = time.Second
)

// drain reads a failed response ahead and closes it, and reports whether all of it is
// there. If it is too long or too slow for that, its body is still open. The caller
// may read either.
func drain(resp *http.Response) bool {
	if resp.Body == http.NoBody {
		return true
	}
	if resp.ContentLength > drainLimit {
		return false
	}
	d := &drained{body: resp.Body, done: make(chan struct{})}
	resp.Body = d
	go d.fill()
	timer := time.NewTimer(drainTime)
	defer timer.Stop()
	select {
	case <-d.done:
		if d.panicked != nil {
			panic(d.panicked)
		}
		return d.complete
	case <-timer.C:
		return false
	}
}

// A drained body is one that is read ahead by a goroutine: it may be too slow for
// those who wait, and only its Close would interrupt a Read.
type drained struct {
	body     io.ReadCloser
	once     sync.Once     // for Close
	done     chan struct{} // closed when the fields below are set
	read     []byte
	complete bool  // nothing more is to come
	err      error // how it broke off, if it did
	panicked any   // with which a method of body panicked
}

// fill reads the body ahead.
func (d *drained) fill() {
	defer close(d.done)
	defer func() { d.panicked = recover() }()
	d.read, d.err = io.ReadAll(io.LimitReader(d.body, drainLimit+1))
	d.complete = len(d.read) <= drainLimit
	if d.complete {
		_ = d.Close()
	}
}

func (d *drained) Read(p []byte) (int, error) {
	<-d.done
	if len(d.read) > 0 {
		n := copy(p, d.read)
		d.read = d.read[n:]
		return n, nil
	}
	switch {
	case !d.complete:
		return d.body.Read(p)
	case d.err != nil:
		return 0, d.err
	}
	return 0, io.EOF
}

func (d *drained) Close() error {
	var err error
	d.once.Do(func() { err = d.body.Close() })
	return err
}
