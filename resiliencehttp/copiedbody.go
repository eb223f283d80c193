package resiliencehttp

import (
	"io"
	"sync"
)

// A copiedBody copies a request's body while the body is sent. A later attempt can then send the copy. A
// copiedBody never reads ahead of the sender, because a pipe, or a body that depends on the response, would
// then deadlock. Several attempts may read it concurrently, each from its first byte.
type copiedBody struct {
	source io.ReadCloser
	limit  int64

	reading chan struct{} // holds a value while a reader reads the source; preserves the order of the bytes
	mu      sync.Mutex
	kept    []byte // the bytes that were read from the source; nil if long or closed
	length  int64  // the number of bytes that were read from the source
	err     error  // the last error of the source
	long    bool   // the bytes are no longer stored: there are more than limit, or only one reader is left
	readers int    // the number of open readers
	last    bool   // no further reader will be opened
	closed  bool   // the source is closed
}

func newCopiedBody(source io.ReadCloser, limit int64) *copiedBody {
	return &copiedBody{source: source, limit: limit, reading: make(chan struct{}, 1)}
}

// whole reports whether the body can still be read from its first byte.
func (c *copiedBody) whole() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.long && !c.closed
}

// open returns a reader that starts at the first byte of the body.
func (c *copiedBody) open() (io.ReadCloser, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.long || c.closed {
		return nil, errBodyGone
	}
	c.readers++
	return &copyReader{body: c}, nil
}

// finish records that no further reader will be opened. From then on, copying stops when only one reader is
// open, and the source is closed when no reader is open.
func (c *copiedBody) finish() {
	c.change(func() { c.last = true })
}

// change calls f with mu held. It closes the source if, after f, no reader is open and none will be opened.
func (c *copiedBody) change(f func()) {
	c.mu.Lock()
	f()
	unused := c.readers == 0 && c.last && !c.closed
	if unused {
		c.closed, c.kept = true, nil
	}
	c.mu.Unlock()
	if unused {
		_ = c.source.Close()
	}
}

// readAt reads into p the bytes of the body from the offset at, either from the copy or from the source.
func (c *copiedBody) readAt(p []byte, at int64) (int, error) {
	if n, err, ok := c.copyAt(p, at); ok {
		return n, err
	}
	c.reading <- struct{}{}
	defer func() { <-c.reading }()
	if n, err, ok := c.copyAt(p, at); ok { // another reader may have read the source during the wait
		return n, err
	}
	n, err := c.source.Read(p)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.length += int64(n)
	c.err = err
	switch {
	case c.long:
	case c.length > c.limit || c.last && c.readers == 1:
		c.long, c.kept = true, nil
	default:
		c.kept = append(c.kept, p[:n]...)
	}
	return n, err
}

// copyAt reads into p the bytes from the offset at if the copy has them. ok is false if the source must be
// read.
func (c *copiedBody) copyAt(p []byte, at int64) (n int, _ error, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case at < c.length && (c.long || c.closed):
		return 0, errBodyGone, true
	case at < c.length:
		return copy(p, c.kept[at:]), nil, true
	case c.err != nil:
		return 0, c.err, true
	case c.closed:
		return 0, errBodyClosed, true
	}
	return 0, nil, len(p) == 0
}

// A copyReader reads a copiedBody from its first byte.
type copyReader struct {
	body   *copiedBody
	at     int64
	closed sync.Once
}

func (r *copyReader) Read(p []byte) (int, error) {
	n, err := r.body.readAt(p, r.at)
	r.at += int64(n)
	return n, err
}

func (r *copyReader) Close() error {
	r.closed.Do(func() { r.body.change(func() { r.body.readers-- }) })
	return nil
}
