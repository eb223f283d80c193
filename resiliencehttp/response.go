package resiliencehttp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// A body is the body of a response. What was read ahead of the caller is read first. When it
// ends, the work ends, and the policies release what they hold.
type body struct {
	inner   io.ReadCloser // Base's
	attempt *attempt

	begun    bool           // the first byte has come: Idle applies
	touched  bool           // something was read ahead, or its end was found
	ahead    []byte         // read ahead and not yet by the caller
	aheadErr error          // what follows ahead: io.EOF, or how it broke off; nil: inner does
	small    [64]byte       // the first memory of ahead
	from     *http.Response // that drain has copied, whose Trailer inner sets
	filling  chan struct{}  // closed when drain has ended; nil if it has not begun
	crash    any            // that drain ended with; it panics in the Read that waits, or nowhere

	once    sync.Once   // of Close of inner
	unwatch func() bool // undoes the AfterFunc of the attempt's ctx, if not nil
	waiting atomic.Bool // a Read is under way that began before the attempt's ctx ended
	closing atomic.Bool
}

// aheadLimit is how many bytes are read ahead at most, and drainTime is for how long drain may
// delay the next attempt.
const (
	aheadLimit = 64 << 10
	drainTime  = time.Second
)

// fill reads ahead until there are n bytes, or the end is found.
func (b *body) fill(n int, read func([]byte) (int, error)) {
	for len(b.ahead) < n && b.aheadErr == nil {
		switch {
		case b.ahead == nil:
			b.ahead = b.small[:0]
		case len(b.ahead) == cap(b.ahead):
			b.ahead = slices.Grow(b.ahead, 1) // doubles it
		}
		got, err := read(b.ahead[len(b.ahead):min(cap(b.ahead), aheadLimit+1)])
		b.ahead = b.ahead[:len(b.ahead)+got]
		b.aheadErr = err
		if !b.begun {
			b.begin()
		}
	}
}

// begin has Idle count in place of ResponseHeaderTimeout.
func (b *body) begin() {
	b.begun = true
	b.attempt.unlimit(ofSilence)
}

// read reads from Base, for at most Idle, unless ResponseHeaderTimeout still counts.
func (b *body) read(p []byte) (int, error) {
	if b.begun || b.attempt.call.t.ResponseHeaderTimeout <= 0 {
		b.attempt.awaitServer()
		defer b.attempt.unlimit(ofSilence)
	}
	return b.inner.Read(p)
}

// broken reports whether the body has broken off while it was read ahead.
func (b *body) broken() bool { return b.aheadErr != nil && b.aheadErr != io.EOF }

// mayBeRead reports whether reading the body ahead is of use: a connection is not.
func (b *body) mayBeRead() bool {
	a := b.attempt
	return mayHaveBody(a.call.req, a.resp) && a.resp.StatusCode != http.StatusSwitchingProtocols
}

// drain reads a failed response into memory and closes it, so that its connection serves
// again. It reports whether it got all of it. Otherwise the body is too long or too slow, and
// is still open. A goroutine reads, since only Close would interrupt a Read that is too slow.
func (b *body) drain() bool {
	a := b.attempt
	if a.resp.ContentLength > aheadLimit {
		return false
	}
	to := *a.resp
	to.Trailer = to.Trailer.Clone()
	b.from, a.resp, b.filling, b.touched = a.resp, &to, make(chan struct{}), true
	go func() {
		defer close(b.filling)
		defer func() { b.crash = recover() }()
		b.fill(aheadLimit+1, b.readForDrain)
		if b.aheadErr != nil {
			_ = b.closeInner()
		}
	}()
	timer := time.NewTimer(drainTime)
	defer timer.Stop()
	select {
	case <-b.filling:
		if b.crash != nil {
			panic(b.crash)
		}
		return b.aheadErr != nil
	case <-timer.C:
		return false
	}
}

// readForDrain reads from Base. Idle does not count while the policies wait, and from byte to byte
// once the caller does.
func (b *body) readForDrain(p []byte) (int, error) {
	n, err := b.inner.Read(p)
	if n > 0 {
		b.attempt.heard()
	}
	return n, err
}

// open returns the body that the caller gets. The work also ends with the ctx of the attempt,
// even if the caller neither reads nor closes the body. A connection (101 Switching Protocols)
// does not end with the ctx.
func (b *body) open() io.ReadCloser {
	a := b.attempt
	if duplex(a.resp) {
		a.unlimit(ofPolicy, ofSilence, ofReading)
		d := &duplexBody{b, b.inner.(io.Writer)}
		if conn, ok := b.inner.(net.Conn); ok {
			return &connBody{conn, d}
		}
		return d
	}
	if !a.empty {
		b.unwatch = a.AfterFunc(func() { b.end(ended.Error(a), b.waiting.Load()) })
	}
	return b
}

func (b *body) Read(p []byte) (int, error) {
	if b.filling != nil {
		b.attempt.awaitServer()
		<-b.filling
		b.attempt.unlimit(ofSilence)
		if b.crash != nil {
			panic(b.crash)
		}
	}
	if len(b.ahead) > 0 {
		n := copy(p, b.ahead)
		b.ahead = b.ahead[n:]
		return n, nil
	}
	n, err, alive := 0, b.aheadErr, b.attempt.Err() == nil
	if err == nil {
		b.waiting.Store(alive)
		n, err = b.read(p)
		if err == nil || err == io.EOF {
			b.waiting.Store(false)
		} // otherwise the AfterFunc of open, which may come first, is to see that a Read was waiting
	}
	if err != nil {
		if err != io.EOF {
			err = b.attempt.timedOut(err)
			if passed := b.attempt.call.t.idlePassed; passed != nil && context.Cause(b.attempt) == error(passed) {
				b.attempt.abandonIfSilent()
			}
		}
		if b.from != nil {
			b.attempt.resp.Trailer = b.from.Trailer
		}
		b.finish(err, alive)
	}
	return n, err
}

// Close ends the work without an error, even if the body has not been read to its end.
func (b *body) Close() error {
	b.closing.Store(true) // a Read that this interrupts has not failed
	defer b.finish(nil, false)
	return b.closeInner()
}

func (b *body) closeInner() (err error) {
	b.once.Do(func() { err = b.inner.Close() })
	return err
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
	b.attempt.end()
	b.attempt.call.ended()
	b.attempt.call.work.End(err)
}

// brokeOff returns what the policies hear of the end of the body with err. It is nil if the
// caller has read it all, has closed it, or was too slow to read it in time, and wraps
// context.Canceled if the caller has left.
func (b *body) brokeOff(err error, waiting bool) error {
	a := b.attempt
	caller := a.call.caller
	switch {
	case err == io.EOF || b.closing.Load():
		return nil
	case caller.Err() == context.Canceled:
		return ended.Error(caller)
	case a.Err() == nil:
		return err
	case waiting:
		return ended.Error(a)
	}
	return nil
}

// ReportFailure tells the policies that a response failed although its status says otherwise, as the
// caller has found in its body: an event of a stream that reports an error, say. Close the body
// afterwards. ReportFailure reports false, and tells nobody, if no policy of a [Transport] holds
// anything for resp, if its body has been read to its end or closed, or if err is nil. It goes by
// resp.Request, so the Body may be wrapped.
//
// A body that was read to its end is a success. A stream that ends without its last event needs
// a Base whose Body returns [io.ErrUnexpectedEOF] then, or a ReportFailure before io.EOF is returned.
func ReportFailure(resp *http.Response, err error) bool {
	if resp == nil || resp.Request == nil || err == nil {
		return false
	}
	told := false
	for c := callOf(resp.Request.Context()); c != nil && c.work.Held(); c = c.inner {
		c.work.End(err)
		told = true
	}
	return told
}

// mayHaveBody reports whether a response to req with this status may have a body (RFC 9110,
// section 6.4.1), or be a connection. Its end is not waited for otherwise, so that callers
// need not close it. A ContentLength of 0 does not say so: a RoundTripper that does not know
// the length leaves it at 0, and trailers may follow.
func mayHaveBody(req *http.Request, resp *http.Response) bool {
	return req.Method != http.MethodHead &&
		resp.StatusCode != http.StatusNoContent && resp.StatusCode != http.StatusNotModified
}

// paused reports whether a response is a stream whose sender may pause: of events, or of parts.
func paused(resp *http.Response) bool {
	kind, _, _ := strings.Cut(resp.Header.Get("Content-Type"), ";")
	kind = strings.ToLower(strings.TrimSpace(kind))
	return kind == "text/event-stream" || strings.HasPrefix(kind, "multipart/")
}

// duplex reports whether the response's body is a connection that can be written to, as
// after 101 Switching Protocols.
func duplex(resp *http.Response) bool {
	_, ok := resp.Body.(io.Writer)
	return ok && resp.StatusCode == http.StatusSwitchingProtocols
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

// A connBody is a duplexBody that has addresses and deadlines.
type connBody struct {
	net.Conn
	d *duplexBody
}

func (b *connBody) Close() error      { return b.d.Close() }
func (b *connBody) CloseWrite() error { return b.d.CloseWrite() }

// An Ahead reads a response ahead for a Judge: 64 KiB at most. What it has read is given to the
// caller again. It waits for the server for at most ResponseHeaderTimeout and Idle. If the body breaks off
// meanwhile, the attempt has failed, whatever the Judge returns.
//
// It sees what the caller would, after the Transport's own gunzip. A response to HEAD, or of
// status 101, 204 or 304, has no bytes: [io.EOF].
type Ahead struct {
	body *body
	at   int // where the next event begins
}

var (
	// ErrTooLong says that what an [Ahead] was asked for is longer than 64 KiB.
	ErrTooLong = errors.New("resiliencehttp: the response is too long to be read ahead")
	// ErrEncoded says that an [Ahead] cannot find events in a response with a Content-Encoding.
	ErrEncoded = errors.New("resiliencehttp: the response has a Content-Encoding")
)

// Bytes waits for the first n bytes and returns them, or fewer and the error that is why:
// [io.EOF] if that is all, [ErrTooLong], or how the body broke off. It reads from the
// beginning each time. The bytes must not be changed or kept.
func (a *Ahead) Bytes(n int) ([]byte, error) {
	if a == nil || !a.body.mayBeRead() {
		return nil, io.EOF
	}
	a.body.touched = true
	a.body.fill(min(n, aheadLimit), a.body.read)
	switch got := a.body.ahead; {
	case len(got) >= n:
		return got[:n], nil
	case len(got) >= aheadLimit:
		return got[:aheadLimit], ErrTooLong
	default:
		return got, a.body.aheadErr
	}
}

// Event waits for the next event of a response of type text/event-stream and returns its name,
// "message" if it has none, and its data. Events without data are skipped, as browsers do
// (https://html.spec.whatwg.org/multipage/server-sent-events.html). The error is as that of
// Bytes, or [ErrEncoded].
func (a *Ahead) Event() (name, data string, err error) {
	switch {
	case a == nil || !a.body.mayBeRead():
		return "", "", io.EOF
	case a.body.attempt.resp.Header.Get("Content-Encoding") != "":
		return "", "", ErrEncoded
	}
	var lines []string
	for {
		line, err := a.line()
		if err != nil {
			return "", "", err
		}
		field, value, _ := strings.Cut(line, ":")
		value = strings.TrimPrefix(value, " ")
		switch {
		case line == "" && lines != nil:
			return cmp.Or(name, "message"), strings.Join(lines, "\n"), nil
		case line == "":
			name = ""
		case field == "event":
			name = value
		case field == "data":
			lines = append(lines, value)
		}
	}
}

// line returns the next line, which ends with CR, LF or both.
func (a *Ahead) line() (string, error) {
	for n := a.at; ; n++ {
		read, err := a.Bytes(n + 1)
		if err != nil {
			return "", err
		}
		switch c := read[n]; {
		case c == '\n' && n > 0 && read[n-1] == '\r': // of the CR that ended the last line
			a.at++
		case c == '\n' || c == '\r':
			line := strings.TrimPrefix(string(read[a.at:n]), "\ufeff") // a byte order mark comes first, if at all
			a.at = n + 1
			return line, nil
		}
	}
}
