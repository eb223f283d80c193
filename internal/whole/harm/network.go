package harm

import (
	"context"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// dialTimeout is the dial timeout of http.DefaultTransport.
const dialTimeout = 30 * time.Second

// synRetries are the times, since the start of a dial, at which Linux sends a SYN. If the network drops the
// first SYNs and then recovers, the dial succeeds only at the next of these times.
var synRetries = []time.Duration{0, time.Second, 3 * time.Second, 7 * time.Second, 15 * time.Second}

// A Network is the in-memory network of one run. The run's server listens on it.
type Network struct {
	accept chan net.Conn
	closed chan struct{}
	close  sync.Once

	mu      sync.Mutex
	conns   []*conn         // the server's ends of the connections
	refused map[string]bool // the hosts that refuse connections; "" means every host
	hole    bool            // whether dials hang
	refusal func()          // called for each refused dial
}

func newNetwork(refusal func()) *Network {
	return &Network{
		accept:  make(chan net.Conn, 10_000),
		closed:  make(chan struct{}),
		refused: map[string]bool{},
		refusal: refusal,
	}
}

// Refuse makes host refuse new connections, or every host if host is empty. Existing connections stay open.
func (n *Network) Refuse(host string) { n.setRefused(host, true) }

// Accept reverts Refuse.
func (n *Network) Accept(host string) { n.setRefused(host, false) }

func (n *Network) setRefused(host string, refused bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.refused[host] = refused
}

// Cut resets all connections.
func (n *Network) Cut() {
	n.mu.Lock()
	conns := n.conns
	n.conns = nil
	n.mu.Unlock()
	for _, c := range conns {
		c.reset()
	}
}

// DropOld makes all existing connections drop the bytes that are written to them, in both directions.
func (n *Network) DropOld() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, c := range n.conns {
		c.dropping.Store(true)
	}
}

// DropDials makes dials hang if drop is true, and ends that if drop is false.
func (n *Network) DropDials(drop bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.hole = drop
}

// dial connects to the server. It is the DialContext of the base transport.
func (n *Network) dial(ctx context.Context, _, addr string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	start := time.Now()
	for _, at := range synRetries {
		if err := sleep(ctx, time.Until(start.Add(at))); err != nil {
			return nil, err
		}
		if c, err := n.connect(host); c != nil || err != nil {
			return c, err
		}
	}
	<-ctx.Done()
	return nil, &net.OpError{Op: "dial", Net: "tcp", Err: os.ErrDeadlineExceeded}
}

// connect handles one SYN of a dial to host. It returns a connection or an error, or nil and nil if the
// network drops the SYN.
func (n *Network) connect(host string) (net.Conn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.hole:
		return nil, nil
	case n.refused[""] || n.refused[host]:
		n.refusal()
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
	}
	up, down, dropping, now := newPipe(), newPipe(), new(atomic.Bool), time.Now()
	server := &conn{in: up, out: down, dropping: dropping, dialed: now}
	n.conns = append(n.conns, server)
	n.accept <- server
	return &conn{in: down, out: up, dropping: dropping, dialed: now}, nil
}

// A listener adapts a Network to net.Listener, because Network's own method Accept does something else.
type listener struct{ *Network }

func (l listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.accept:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l listener) Close() error {
	l.close.Do(func() { close(l.closed) })
	return nil
}

func (l listener) Addr() net.Addr { return address("10.0.0.2:80") }

type address string

func (a address) Network() string { return "tcp" }
func (a address) String() string  { return string(a) }

// A conn is one end of a connection.
type conn struct {
	in, out  *pipe
	dropping *atomic.Bool // shared by both ends
	dialed   time.Time
}

func (c *conn) Read(b []byte) (int, error) { return c.in.read(b) }

func (c *conn) Write(b []byte) (int, error) {
	if c.dropping.Load() {
		return len(b), nil
	}
	return c.out.write(b)
}

func (c *conn) Close() error {
	if !c.dropping.Load() {
		c.out.close(io.EOF, false)
	}
	c.in.close(net.ErrClosed, true)
	return nil
}

func (c *conn) LocalAddr() net.Addr               { return address("10.0.0.1:1") }
func (c *conn) RemoteAddr() net.Addr              { return address("10.0.0.2:80") }
func (c *conn) SetDeadline(t time.Time) error     { return c.SetReadDeadline(t) }
func (c *conn) SetReadDeadline(t time.Time) error { c.in.setDeadline(t); return nil }
func (c *conn) SetWriteDeadline(time.Time) error  { return nil } // writes never block

func (c *conn) reset() {
	err := &net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET}
	c.in.close(err, true)
	c.out.close(err, true)
}

// A pipe carries bytes in one direction. Its buffer is unbounded.
type pipe struct {
	mu       sync.Mutex
	changed  *sync.Cond
	buffer   []byte
	err      error // read returns err once buffer is empty
	deadline time.Time
	timer    *time.Timer // wakes the reader at deadline
}

func newPipe() *pipe {
	p := new(pipe)
	p.changed = sync.NewCond(&p.mu)
	return p
}

func (p *pipe) read(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		switch {
		case !p.deadline.IsZero() && !time.Now().Before(p.deadline):
			return 0, os.ErrDeadlineExceeded
		case len(p.buffer) > 0:
			n := copy(b, p.buffer)
			if p.buffer = p.buffer[n:]; len(p.buffer) == 0 {
				p.buffer = nil
			}
			return n, nil
		case p.err != nil:
			return 0, p.err
		}
		p.changed.Wait()
	}
}

func (p *pipe) write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		return 0, &net.OpError{Op: "write", Net: "tcp", Err: syscall.EPIPE}
	}
	p.buffer = append(p.buffer, b...)
	p.changed.Broadcast()
	return len(b), nil
}

// close makes read return err after it has returned the buffered bytes. If discard is set, the buffered bytes
// are discarded.
func (p *pipe) close(err error, discard bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		p.err = err
	}
	if discard {
		p.buffer = nil
	}
	if p.timer != nil {
		p.timer.Stop()
	}
	p.changed.Broadcast()
}

func (p *pipe) setDeadline(t time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.deadline = t
	if p.timer != nil {
		p.timer.Stop()
	}
	// In a bubble, a timer that is due already can crash the race detector of Go 1.26.
	if d := time.Until(t); d > 0 {
		p.timer = time.AfterFunc(d, p.wake)
	}
	p.changed.Broadcast()
}

func (p *pipe) wake() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.changed.Broadcast()
}
