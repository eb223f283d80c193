// Package faultproxy simulates a bad network between a client and a server. It provides a TCP proxy for tests that
// delays, holds back or drops data and resets connections.
//
//	proxy := faultproxy.New(t, "127.0.0.1:5432")
//	db := open(proxy.Addr())
//	proxy.Hold(faultproxy.ToServer) // the server receives nothing
//	...
//	proxy.Heal() // the server receives all data
//
// A sender does not notice a fault. The proxy immediately reads all data that the sender writes, and stores the data
// until it can be delivered. If the sender closes its connection by then, the receiver still gets the data, and then
// the end of the stream. In this way, a COMMIT can take effect after its client has stopped waiting.
//
// TCP resends data that was lost in an interruption. Therefore, use Hold and then Heal to simulate an interruption
// that ends. Use Cut to simulate a half-open connection, on which data never arrives.
package faultproxy

import (
	"maps"
	"net"
	"slices"
	"sync"
	"testing"
	"time"
)

// A Direction is the direction in which data is sent.
type Direction uint8

// The directions. A fault with the direction Both applies to each of the two directions.
const (
	ToServer Direction = 1 << iota
	ToClient
	Both = ToServer | ToClient
)

// A Proxy forwards connections to one server. Faults apply to open connections and to new connections, until Heal is
// called. Cut and Reset apply only to open connections. A Proxy is safe for concurrent use.
type Proxy struct {
	addr string

	mu       sync.Mutex
	target   string
	changed  chan struct{} // closed when a fault changes
	faults   [Both + 1]faults
	links    map[*link]struct{}
	listener net.Listener // nil while connections are refused
	closed   bool
	work     sync.WaitGroup
}

// faults are the faults of one direction.
type faults struct {
	delay func([]byte) time.Duration
	rate  int // bytes per second; 0 means no limit
	held  bool
	hung  bool
}

// New returns a proxy for a server, on a free port of the loopback interface. The proxy is closed at the end of the
// test.
func New(t testing.TB, target string) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{
		target: target, addr: l.Addr().String(), listener: l,
		changed: make(chan struct{}), links: make(map[*link]struct{}),
	}
	p.work.Go(func() { p.accept(l) })
	t.Cleanup(p.close)
	return p
}

// Addr returns the address to which clients connect.
func (p *Proxy) Addr() string { return p.addr }

// Point makes the proxy connect new connections to another server, like a DNS name whose address has changed. Open
// connections stay connected to their server.
func (p *Proxy) Point(target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = target
}

// Conns returns the number of open connections. A connection is open until both sides have closed it and each side
// has been notified that the other side has closed it.
func (p *Proxy) Conns() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.links)
}

// Delay delays each piece of data by the duration that by returns for the piece. Later data on the same connection
// waits until the piece has been delivered. by may be called by several goroutines at the same time and must not
// retain data. A piece is the result of one read, which usually contains the data of one write.
func (p *Proxy) Delay(d Direction, by func(data []byte) time.Duration) {
	p.change(d, func(f *faults) { f.delay = by })
}

// Slow limits the number of bytes per second on each connection.
func (p *Proxy) Slow(d Direction, bytesPerSecond int) {
	p.change(d, func(f *faults) { f.rate = bytesPerSecond })
}

// Hold stores all data without delivering it, until Heal is called.
func (p *Proxy) Hold(d Direction) { p.change(d, func(f *faults) { f.held = true }) }

// Hang simulates a server that has stopped. Connections are accepted, but the proxy neither reads nor delivers data
// until Heal is called. In contrast to Hold, a sender blocks when its buffers are full.
func (p *Proxy) Hang() { p.change(Both, func(f *faults) { f.held, f.hung = true, true }) }

// Cut makes the open connections half open permanently: in direction d, all data and the end of the stream are
// dropped silently. New connections work. end resets the connections that were cut, in the same way as keepalives
// eventually do. A test need not call end.
func (p *Proxy) Cut(d Direction) (end func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	links := slices.Collect(maps.Keys(p.links))
	for _, l := range links {
		l.cut |= d
	}
	p.tell()
	return func() {
		for _, l := range links {
			l.reset()
		}
	}
}

// Reset closes the open connections on both sides with a TCP reset. Data that the proxy has not delivered is lost.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.reset()
	}
}

// Refuse refuses new connections until Heal is called. Open connections stay open.
func (p *Proxy) Refuse() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener != nil {
		_ = p.listener.Close()
		p.listener = nil
	}
}

// Heal ends every fault and delivers the data that was held back or delayed. Connections that were cut stay cut.
func (p *Proxy) Heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = [Both + 1]faults{}
	for p.listener == nil && !p.closed {
		l, err := net.Listen("tcp", p.addr)
		if err != nil {
			time.Sleep(10 * time.Millisecond) // until the port is free again
			continue
		}
		p.listener = l
		p.work.Go(func() { p.accept(l) })
	}
	p.tell()
}

func (p *Proxy) change(d Direction, fn func(*faults)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, one := range []Direction{ToServer, ToClient} {
		if d&one != 0 {
			fn(&p.faults[one])
		}
	}
	p.tell()
}

// tell wakes the goroutines that forward data. The caller holds p.mu.
func (p *Proxy) tell() {
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *Proxy) close() {
	p.Refuse()
	p.mu.Lock()
	p.closed = true
	p.tell()
	p.mu.Unlock()
	p.Reset()
	p.work.Wait()
}

func (p *Proxy) accept(l net.Listener) {
	for {
		client, err := l.Accept()
		if err != nil {
			return
		}
		p.work.Go(func() { p.connect(client.(*net.TCPConn)) })
	}
}

// connect forwards one connection until both of its streams have ended.
func (p *Proxy) connect(client *net.TCPConn) {
	defer client.Close()
	p.mu.Lock()
	target := p.target
	p.mu.Unlock()
	conn, err := net.Dial("tcp", target)
	if err != nil {
		_ = client.SetLinger(0)
		return
	}
	server := conn.(*net.TCPConn)
	defer server.Close()
	l := &link{client: client, server: server, ended: make(chan struct{})}
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return
	}
	p.links[l] = struct{}{}
	p.mu.Unlock()
	var streams sync.WaitGroup
	streams.Go(func() { p.forward(l, ToServer, client, server) })
	streams.Go(func() { p.forward(l, ToClient, server, client) })
	streams.Wait()
	p.mu.Lock()
	delete(p.links, l)
	p.mu.Unlock()
}

// A link is one connection through the proxy.
type link struct {
	client, server *net.TCPConn
	cut            Direction
	once           sync.Once
	ended          chan struct{} // closed by reset
}

func (l *link) reset() {
	l.once.Do(func() { close(l.ended) })
	for _, c := range []*net.TCPConn{l.client, l.server} {
		_ = c.SetLinger(0)
		_ = c.Close()
	}
}

// A piece is data that the proxy has read and not yet delivered. A piece without data represents the end of the
// stream.
type piece struct {
	data []byte
	due  time.Time
}

// forward forwards the data of a link in one direction. A reader stores the data that is sent, and a writer delivers
// the data when the faults allow it.
func (p *Proxy) forward(l *link, d Direction, from, to *net.TCPConn) {
	// The buffer is large enough for any test, so the sender does not notice a fault.
	pieces := make(chan piece, 1<<14)
	var reader sync.WaitGroup
	reader.Go(func() {
		defer close(pieces)
		for {
			if !p.await(l, func() bool { return !p.faults[d].hung }) {
				return
			}
			data := make([]byte, 32<<10)
			n, err := from.Read(data)
			if n > 0 {
				select {
				case pieces <- piece{data[:n], p.due(d, data[:n])}:
				case <-l.ended:
					return
				}
			}
			if err != nil {
				return
			}
		}
	})
	defer reader.Wait()
	failed := false
	for {
		next, ok := <-pieces
		if !p.arrive(l, d, next.due) {
			return // the link is reset; the reader is ending
		}
		p.mu.Lock()
		lost := l.cut&d != 0
		p.mu.Unlock()
		if !ok {
			if lost {
				<-l.ended // the receiver is not notified that the sender has closed the connection
			} else {
				_ = to.CloseWrite()
			}
			return
		}
		if !lost && !failed {
			failed = !p.deliver(l, d, to, next.data)
		}
	}
}

func (p *Proxy) due(d Direction, data []byte) time.Time {
	p.mu.Lock()
	by := p.faults[d].delay
	p.mu.Unlock()
	if by == nil {
		return time.Time{}
	}
	return time.Now().Add(by(data))
}

// arrive waits until data that is due at the given time may be delivered. It returns false if the link is reset
// first.
func (p *Proxy) arrive(l *link, d Direction, due time.Time) bool {
	if due.IsZero() {
		return p.await(l, func() bool { return !p.faults[d].held })
	}
	t := time.AfterFunc(time.Until(due), func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.tell()
	})
	defer t.Stop()
	return p.await(l, func() bool {
		f := &p.faults[d]
		return !f.held && (f.delay == nil || !time.Now().Before(due))
	})
}

// await waits until ok returns true. It calls ok with p.mu held. It returns false if the link is reset first.
func (p *Proxy) await(l *link, ok func() bool) bool {
	for {
		p.mu.Lock()
		done, changed := ok(), p.changed
		p.mu.Unlock()
		if done {
			return true
		}
		select {
		case <-changed:
		case <-l.ended:
			return false
		}
	}
}

// deliver writes data, at the rate that Slow has set. It reports whether all data was written.
func (p *Proxy) deliver(l *link, d Direction, to *net.TCPConn, data []byte) bool {
	for len(data) > 0 {
		p.mu.Lock()
		rate := p.faults[d].rate
		p.mu.Unlock()
		n := len(data)
		if rate > 0 {
			n = min(n, max(rate/100, 1))
		}
		if _, err := to.Write(data[:n]); err != nil {
			return false
		}
		data = data[n:]
		if rate > 0 {
			select {
			case <-time.After(time.Duration(n) * time.Second / time.Duration(rate)):
			case <-l.ended:
				return false
			}
		}
	}
	return true
}
