package resiliencehttp

import (
	"io"
	"sync"
)

// A copiedBody copies a request's body while it is sent, so that it can be sent again. It never reads
// ahead: a pipe, or a body that answers the response, would deadlock. Several attempts may read it at once,
// each from the beginning.
type copiedBody struct {
	source io.ReadCloser
	limit  int64

	reading chan struct{} // holds a value while the source is read, so that a Read under way loses nothing
	mu      sync.Mutex
	kept    []byte // what was read of the source; nil once it was longer than limit
	length  int64  // number of bytes read
	err     error  // how the source has ended
	long    bool   // kept would be longer than limit
	readers int    // number of readers that are open
	last    bool   // no other reader follows
	closed  bool   // the source is closed
}

func newCopiedBody(source io.ReadCloser, limit int64) *copiedBody {
	return &copiedBody{source: source, limit: limit, reading: make(chan struct{}, 1)}
}

// whole reports whether the body can be read from its beginning.
func (c *copiedBody) whole() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.long && !c.closed
}

// open returns a reader that begins at the beginning.
func (c *copiedBody) open() (io.ReadCloser, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.long || c.closed {
		return nil, errBodyGone
	}
	c.readers++
	return &copyReader{body: c}, nil
}

// finish closes the source when the last reader is closed, and stops the copying.
func (c *copiedBody) finish() {
	c.change(func() { c.last = true })
}

// change calls f with mu held, and closes the source if no reader is left then.
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

// readAt reads into p what follows the first at bytes.
func (c *copiedBody) readAt(p []byte, at int64) (int, error) {
	if n, err, ok := c.copyAt(p, at); ok {
		return n, err
	}
	c.reading <- struct{}{}
	defer func() { <-c.reading }()
	if n, err, ok := c.copyAt(p, at); ok { // another reader has read on meanwhile
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

// copyAt reads into p what was copied after the first at bytes. It reports false if the source must be read.
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

// A copyReader reads a copiedBody from its beginning.
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
