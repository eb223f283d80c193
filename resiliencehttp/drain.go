package resiliencehttp

import (
	"cmp"
	"io"
	"net/http"
	"sync"
	"time"
)

// The limits of drain, which reads a failed response so that its connection serves again:
// in bytes, and in the time by which this delays the next attempt.
const (
	drainLimit = 64 << 10
	drainTime  = time.Second
)

// drain reads the body of a failed response into memory and closes it. It returns the response
// with what the caller of RoundTrip reads instead, and whether it got all of it; otherwise the
// body is too long or too slow, and is still open.
func drain(resp *http.Response) (read *http.Response, whole bool) {
	if resp.Body == http.NoBody {
		return resp, true
	}
	if resp.ContentLength > drainLimit {
		return resp, false
	}
	d := &drained{body: resp.Body, done: make(chan struct{}), from: resp, to: *resp}
	d.to.Body, d.to.Trailer = d, resp.Trailer.Clone()
	go d.fill()
	timer := time.NewTimer(drainTime)
	defer timer.Stop()
	select {
	case <-d.done:
		if d.panicked != nil {
			panic(d.panicked)
		}
		return &d.to, d.complete
	case <-timer.C:
		return &d.to, false
	}
}

// A drained body is read ahead by a goroutine of its own, since only Close would interrupt a
// Read that is too slow.
type drained struct {
	body     io.ReadCloser
	from     *http.Response // whose Trailer a Read of body sets
	to       http.Response  // with this body, for the caller
	once     sync.Once      // of Close
	done     chan struct{}  // closed when the fields below are set
	read     []byte
	complete bool  // read is the whole body
	err      error // with which the body broke off, if not nil
	panicked any   // value of a panic of body, if not nil
}

// fill reads the body.
func (d *drained) fill() {
	defer close(d.done)
	defer func() { d.panicked = recover() }()
	d.read, d.err = io.ReadAll(io.LimitReader(d.body, drainLimit+1))
	d.complete = len(d.read) <= drainLimit
	if d.complete {
		_ = d.Close()
	}
}

func (d *drained) Read(p []byte) (n int, err error) {
	<-d.done
	if len(d.read) > 0 {
		n := copy(p, d.read)
		d.read = d.read[n:]
		return n, nil
	}
	if d.complete {
		err = cmp.Or(d.err, io.EOF)
	} else {
		n, err = d.body.Read(p)
	}
	if err != nil {
		d.to.Trailer = d.from.Trailer
	}
	return n, err
}

func (d *drained) Close() error {
	var err error
	d.once.Do(func() { err = d.body.Close() })
	return err
}
