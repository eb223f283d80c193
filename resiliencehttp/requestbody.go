package resiliencehttp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"sync"

	"github.com/go-resilience/resilience/internal/ended"
)

// A requestBody provides the caller's body to one attempt after another. It is nil for a
// request without a body.
type requestBody struct {
	req      *http.Request
	max      int64
	used     bool // an attempt has taken the caller's own body
	buffered bool // the whole body is in kept
	kept     []byte

	mu   sync.Mutex
	ctx  context.Context // of the latest attempt
	sent []*sentBody     // of it; several if Base calls GetBody
}

func newRequestBody(req *http.Request, max int64) *requestBody {
	if req.Body == nil || req.Body == http.NoBody {
		return nil
	}
	return &requestBody{req: req, max: max}
}

// rewinds reports whether the body can be sent again after an attempt has taken it.
func (b *requestBody) rewinds() bool { return b == nil || b.buffered || b.req.GetBody != nil }

// prepare puts the body for the next attempt into out. mayRepeat is whether another attempt
// may follow.
func (b *requestBody) prepare(out *http.Request, mayRepeat bool) error {
	if b == nil {
		return nil
	}
	out.Trailer = b.req.Trailer // the caller sets it while the body is read
	ctx := out.Context()
	if err := b.retire(ctx); err != nil {
		return err
	}
	switch {
	case !b.used:
		b.used = true
		if !mayRepeat || b.req.GetBody != nil || b.req.ContentLength > b.max || b.max <= 0 {
			out.Body = b.track(b.req.Body)
			break
		}
		body, err := b.buffer(ctx)
		if err != nil {
			return err
		}
		out.Body = body
	case b.buffered:
		out.Body = b.copy()
	default:
		body, err := b.again()
		if err != nil {
			return fmt.Errorf("resiliencehttp: rewinding the request's body: %w", err)
		}
		out.Body = body
	}
	switch {
	case b.buffered:
		if len(out.Trailer) == 0 { // net/http sends a Trailer only after a body of unknown length
			out.ContentLength = int64(len(b.kept))
		}
		out.GetBody = func() (io.ReadCloser, error) { return b.copy(), nil }
	case b.req.GetBody != nil:
		out.GetBody = b.again
	}
	return nil
}

// buffer reads the caller's body into memory, unless it is too long.
func (b *requestBody) buffer(ctx context.Context) (io.ReadCloser, error) {
	body := b.req.Body
	// Only Close interrupts a Read that waits for something else than ctx.
	stop := context.AfterFunc(ctx, func() { _ = body.Close() })
	defer func() {
		if stop() { // a panic: it was not called below
			_ = body.Close()
		}
	}()
	limit := min(b.max, math.MaxInt64-1) + 1
	read, err := io.ReadAll(io.LimitReader(body, limit))
	if !stop() { // ctx has ended, and the body is closed
		return nil, fmt.Errorf("resiliencehttp: reading the request's body: %w", ended.Error(ctx))
	}
	if int64(len(read)) == limit {
		return b.track(struct {
			io.Reader
			io.Closer
		}{io.MultiReader(bytes.NewReader(read), body), body}), nil
	}
	_ = body.Close()
	declared := b.req.ContentLength
	switch {
	case err != nil:
		return nil, fmt.Errorf("resiliencehttp: reading the request's body: %w", err)
	case declared > 0 && declared != int64(len(read)):
		return nil, fmt.Errorf("resiliencehttp: the request has a ContentLength of %d and a body of %d bytes", declared, len(read))
	}
	b.kept, b.buffered = read, true
	return b.copy(), nil
}

func (b *requestBody) copy() io.ReadCloser {
	if len(b.kept) == 0 && len(b.req.Trailer) == 0 {
		return http.NoBody // net/http takes the length of any other empty body for unknown
	}
	return io.NopCloser(bytes.NewReader(b.kept))
}

// again returns a new body by the caller's GetBody.
func (b *requestBody) again() (io.ReadCloser, error) {
	body, err := b.req.GetBody()
	if err != nil {
		return nil, err
	}
	return b.track(body), nil
}

func (b *requestBody) track(body io.ReadCloser) io.ReadCloser {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := &sentBody{source: body, ctx: b.ctx, declared: b.req.ContentLength, reading: make(chan struct{}, 1)}
	b.sent = append(b.sent, s)
	return s
}

// retire closes the bodies of the last attempt and waits until no Read of them is under
// way. The next body may be the same file, and a RoundTripper may continue to read after it
// has returned.
func (b *requestBody) retire(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.sent {
		if err := s.retire(ctx); err != nil {
			return err
		}
	}
	b.ctx = ctx
	b.sent = nil
	return nil
}

// untouched reports whether no body of the last attempt has been read.
func (b *requestBody) untouched() bool { return !b.any((*sentBody).touched) }

// atFault reports whether a body of the last attempt failed, or is longer or shorter than
// its declared length.
func (b *requestBody) atFault() bool { return b.any((*sentBody).atFault) }

// late reports whether a body of the last attempt was waited for when the time of that was over.
func (b *requestBody) late() bool { return b.any((*sentBody).late) }

func (b *requestBody) any(is func(*sentBody) bool) bool {
	if b == nil {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.ContainsFunc(b.sent, is)
}

// close closes the caller's body if no attempt took it.
func (b *requestBody) close() {
	if b != nil && !b.used {
		closeBody(b.req)
	}
}

// A sentBody is the body of one attempt. It remembers how it was read.
type sentBody struct {
	source   io.ReadCloser
	ctx      context.Context // of the attempt
	declared int64           // length, if more than 0
	reading  chan struct{}   // holds a value during a Read

	mu      sync.Mutex
	begun   bool
	closed  bool
	waiting bool // a Read is under way, or was when ctx ended
	broken  bool // the source failed
	atEnd   bool
	length  int64 // so far
}

var errBodyClosed = errors.New("resiliencehttp: the request's body is closed")

func (b *sentBody) Read(p []byte) (int, error) {
	b.reading <- struct{}{}
	defer func() { <-b.reading }()
	if !b.begin() {
		return 0, errBodyClosed
	}
	n, err := b.source.Read(p)
	alive := b.ctx.Err() == nil
	b.mu.Lock()
	defer b.mu.Unlock()
	b.waiting = b.waiting && !alive
	b.length += int64(n)
	b.atEnd = err == io.EOF
	b.broken = err != nil && !b.atEnd && !b.closed // a Read that Close interrupts has not failed
	return n, err
}

func (b *sentBody) begin() bool {
	alive := b.ctx.Err() == nil
	b.mu.Lock()
	defer b.mu.Unlock()
	b.begun = true
	b.waiting = b.waiting || alive && !b.closed && (b.declared <= 0 || b.length < b.declared)
	return !b.closed
}

func (b *sentBody) Close() error {
	alive := b.ctx.Err() == nil
	b.mu.Lock()
	closed := b.closed
	b.closed, b.waiting = true, b.waiting && !alive
	b.mu.Unlock()
	if closed {
		return nil
	}
	return b.source.Close()
}

// retire closes the body and waits for the Read under way to return.
func (b *sentBody) retire(ctx context.Context) error {
	_ = b.Close()
	select {
	case b.reading <- struct{}{}:
		<-b.reading
		return nil
	case <-ctx.Done():
		return ended.Error(ctx)
	}
}

func (b *sentBody) touched() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.begun
}

func (b *sentBody) late() bool {
	passed := b.ctx.Err() == context.DeadlineExceeded
	b.mu.Lock()
	defer b.mu.Unlock()
	return passed && b.waiting
}

func (b *sentBody) atFault() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	wrong := b.declared > 0 && (b.length > b.declared || b.atEnd && b.length < b.declared)
	return b.broken || wrong
}
