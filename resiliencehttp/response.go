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

// A body is the body of a response. The caller first reads the bytes that were read ahead. When the body
// ends, the call's Work ends, and the policies release their resources.
type body struct {
	inner   io.ReadCloser // Base's body
	attempt *attempt

	begun    bool           // Idle applies instead of ResponseHeaderTimeout
	touched  bool           // the Transport may have read from inner, so the caller must not get inner itself
	ahead    []byte         // bytes that were read ahead and that the caller has not read yet
	aheadErr error          // the error at the end of ahead, such as io.EOF; nil if inner has more bytes
	small    [64]byte       // the initial memory of ahead
	from     *http.Response // the original of the response that drain copied; inner sets its Trailer; may be nil
	filling  chan struct{}  // closed when drain's goroutine has ended; nil if drain was not called
	crash    any            // the value of a panic in drain's goroutine; a later Read repeats the panic

	once    sync.Once   // calls inner.Close
	unwatch func() bool // stops the AfterFunc of the attempt's ctx; may be nil
	waiting atomic.Bool // a Read is in progress that started before the attempt's ctx was done
	closing atomic.Bool // Close was called
}

// aheadLimit is the maximum number of bytes that are read ahead. drainTime is the maximum time by which drain delays
// the next attempt.
const (
	aheadLimit = 64 << 10
	drainTime  = time.Second
)

// fill reads ahead until ahead has n bytes, or read returns an error.
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

// begin ends ResponseHeaderTimeout. After that, Idle applies.
func (b *body) begin() {
	b.begun = true
	b.attempt.unlimit(ofSilence)
}

// read reads from Base's body. It waits for at most Idle. Before begin, ResponseHeaderTimeout applies
// instead, if it is set.
func (b *body) read(p []byte) (int, error) {
	if b.begun || b.attempt.call.t.ResponseHeaderTimeout <= 0 {
		b.attempt.awaitServer()
		defer b.attempt.unlimit(ofSilence)
	}
	return b.inner.Read(p)
}

// broken reports whether reading ahead failed.
func (b *body) broken() bool { return b.aheadErr != nil && b.aheadErr != io.EOF }

// mayBeRead reports whether the body may be read ahead. Reading from the connection after a 101 could block until the
// caller writes to it.
func (b *body) mayBeRead() bool {
	a := b.attempt
	return mayHaveBody(a.call.req, a.resp) && a.resp.StatusCode != http.StatusSwitchingProtocols
}

// drain reads the body of a failed response into memory and closes it. Otherwise net/http could not reuse the
// connection. drain reports whether it has read the whole body. If the body is too long or too slow, drain
// returns false, and the body is still open. A separate goroutine reads the body, because nothing but Close
// could interrupt a slow Read.
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

// readForDrain reads from Base's body. Idle does not apply during drain. After drain has returned, the
// caller's Read may wait for the goroutine that still reads. Then Idle applies, and restarts whenever bytes
// arrive.
func (b *body) readForDrain(p []byte) (int, error) {
	n, err := b.inner.Read(p)
	if n > 0 {
		b.attempt.resetIdle()
	}
	return n, err
}

// open returns the body for the caller. The call's Work also ends when the attempt's ctx is done. Otherwise a
// caller that neither reads nor closes the body would hold its slot forever. The connection after 101
// Switching Protocols stays open even if the ctx is done.
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
		} // otherwise the AfterFunc of open may run first, and must see that a Read was waiting
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
		if !b.closing.Load() { // otherwise Close ends the work; it must not return while this Read releases slots
			b.finish(err, alive)
		}
	}
	return n, err
}

// Close closes the body. Even if the body was not read to its end, the policies see that the call has ended
// without an error.
func (b *body) Close() error {
	b.closing.Store(true) // the error of a Read that Close interrupts is not a failure of the server
	defer b.finish(nil, false)
	return b.closeInner()
}

func (b *body) closeInner() (err error) {
	b.once.Do(func() { err = b.inner.Close() })
	return err
}

// finish ends the work before Read or Close returns. When the caller continues, slots are already released
// and metrics are up to date. The only exception is a ctx that is done at the same moment.
func (b *body) finish(err error, waiting bool) {
	if b.unwatch != nil {
		b.unwatch()
	}
	b.end(err, waiting)
}

// end ends the work with err. waiting reports whether a Read was waiting for the server.
func (b *body) end(err error, waiting bool) {
	err = b.result(err, waiting)
	b.attempt.end()
	b.attempt.call.ended()
	b.attempt.call.work.End(err)
}

// result returns the error that the policies receive for a body that ends with err. It is nil if the caller
// has read the whole body, has closed it, or did not read it before a deadline. It wraps context.Canceled if
// the caller canceled.
func (b *body) result(err error, waiting bool) error {
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

// ReportFailure reports to the policies that a response failed with err, although its status is a success.
// For example, the body of a stream of events may contain an event that describes an error. Close the body
// after the call to ReportFailure.
//
// ReportFailure reports whether it had an effect. ReportFailure has no effect if err is nil, if the body has
// been read to its end or closed, or if no policy of a [Transport] holds resources for resp. ReportFailure
// finds the policies through resp.Request, so the Body may be wrapped.
//
// A body that was read to its end counts as a success, even if it is a stream that ends without its last event.
// There are two exceptions. The stream counts as a failure if Base's body returns [io.ErrUnexpectedEOF], or if
// the caller calls ReportFailure before the Body returns io.EOF.
func ReportFailure(resp *http.Response, err error) bool {
	if resp == nil || resp.Request == nil || err == nil {
		return false
	}
	reported := false
	for c := callOf(resp.Request.Context()); c != nil && c.work.Held(); c = c.inner {
		c.work.End(err)
		reported = true
	}
	return reported
}

// mayHaveBody reports whether a response to req may have a body (RFC 9110, section 6.4.1), or may turn into a
// connection. If not, the work does not wait for the end of the body, because callers need not close it. Even
// a response with a ContentLength of 0 may have a body: a RoundTripper that does not know the length may set
// ContentLength to 0, and trailers may follow.
func mayHaveBody(req *http.Request, resp *http.Response) bool {
	return req.Method != http.MethodHead &&
		resp.StatusCode != http.StatusNoContent && resp.StatusCode != http.StatusNotModified
}

// paused reports whether a response is a stream of events or of multipart parts, whose sender may pause.
func paused(resp *http.Response) bool {
	kind, _, _ := strings.Cut(resp.Header.Get("Content-Type"), ";")
	kind = strings.ToLower(strings.TrimSpace(kind))
	return kind == "text/event-stream" || strings.HasPrefix(kind, "multipart/")
}

// duplex reports whether the response's body is the connection after 101 Switching Protocols, and can be written to.
func duplex(resp *http.Response) bool {
	_, ok := resp.Body.(io.Writer)
	return ok && resp.StatusCode == http.StatusSwitchingProtocols
}

// A duplexBody is the connection after 101 Switching Protocols. Only Close ends the call's Work, because one
// direction of the connection may end before the other.
type duplexBody struct {
	*body
	w io.Writer
}

func (b *duplexBody) Read(p []byte) (int, error)  { return b.inner.Read(p) }
func (b *duplexBody) Write(p []byte) (int, error) { return b.w.Write(p) }

// CloseWrite calls CloseWrite of Base's body. The body of net/http has a method CloseWrite if the connection
// has one.
func (b *duplexBody) CloseWrite() error {
	if c, ok := b.inner.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return fmt.Errorf("resiliencehttp: CloseWrite: %w", http.ErrNotSupported)
}

// A connBody is a duplexBody that also has the addresses and deadlines of a net.Conn.
type connBody struct {
	net.Conn
	d *duplexBody
}

func (b *connBody) Close() error      { return b.d.Close() }
func (b *connBody) CloseWrite() error { return b.d.CloseWrite() }

// An Ahead lets a Judge read up to 64 KiB of a response's body. The caller can still read the bytes that the
// Judge has read: the caller's Body starts at the first byte. The first byte must arrive within
// ResponseHeaderTimeout, and each further wait is limited by Idle. If reading the body fails, the attempt
// fails, whatever the Judge returns.
//
// An Ahead returns the same bytes as the Body: if net/http decompresses the body, the bytes are decompressed.
// If the response has no body (HEAD, or status 101, 204 or 304), the methods of an Ahead return [io.EOF].
type Ahead struct {
	body *body
	at   int // offset at which the next line starts
}

var (
	// ErrTooLong reports that an [Ahead] cannot return data beyond the first 64 KiB.
	ErrTooLong = errors.New("resiliencehttp: response is too long to read ahead")
	// ErrEncoded reports that an [Ahead] cannot read events, because the response has a Content-Encoding.
	ErrEncoded = errors.New("resiliencehttp: response has a Content-Encoding")
)

// Bytes waits for the first n bytes of the body and returns them. A negative n means 0. Each call starts at
// the first byte. If Bytes returns fewer than n bytes, it also returns an error: [io.EOF] if the body is
// shorter, [ErrTooLong] if n is more than 64 KiB, or the error of reading the body. The caller must not change
// or retain the bytes.
func (a *Ahead) Bytes(n int) ([]byte, error) {
	if a == nil || !a.body.mayBeRead() {
		return nil, io.EOF
	}
	n = max(n, 0)
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

// Event waits for the next event of a response of type text/event-stream. Event returns the event's data and
// its name, which is "message" if the event has none. Like a browser, Event skips events without data
// (https://html.spec.whatwg.org/multipage/server-sent-events.html). The error of Event is [ErrEncoded] or an
// error of Bytes.
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
		case c == '\n' && n > 0 && read[n-1] == '\r': // the LF of a CR LF, whose CR has already ended the line
			a.at++
		case c == '\n' || c == '\r':
			line := strings.TrimPrefix(string(read[a.at:n]), "\ufeff") // a stream may start with a byte order mark
			a.at = n + 1
			return line, nil
		}
	}
}
