// Package faultproxy is a bad network between a client and a server: a TCP proxy
// for tests that delays, holds back, loses and cuts what goes through it.
//
//	proxy := faultproxy.New(t, "127.0.0.1:5432")
//	db := open(proxy.Addr())
//	proxy.Hold(faultproxy.ToServer) // the server hears nothing
//	...
//	proxy.Heal()                    // now it hears all of it
//
// A sender is never told of a fault. What it writes is read at once and waits in
// the proxy, also when the sender closes its connection meanwhile: the receiver
// then gets the data, and the end of the stream after it. That is how a COMMIT
// takes effect after its client has given up.
//
// TCP repairs what an interruption loses, so an interruption that ends is a Hold
// that is healed. What never arrives is a Cut: a half-open connection.
package faultproxy

import (
	"maps"
	"net"
	"slices"
	"sync"
	"testing"
	"time"
)

// A Direction is the way that data takes.
type Direction uint8

// The directions. Both is each of the two.
const (
	ToServer Direction = 1 << iota
	ToClient
	Both = ToServer | ToClient
)

// A Proxy forwards connections to one server. Faults apply to the connections
// that are open and to those that come, until Heal; Cut and Reset apply to those
// that are open. A Proxy is safe for concurrent use.
type Proxy struct {
	addr string

	mu       sync.Mutex
	target   string
	changed  chan struct{} // closed when a fault changes
	faults   [Both + 1]faults
	links    map[*link]struct{}
	listener net.Listener // nil: connections are refused
	closed   bool
	work     sync.WaitGroup
}

// faults are those of one direction.
type faults struct {
	delay func([]byte) time.Duration
	rate  int // bytes a second; 0: any number
	held  bool
	hung  bool
}

// New returns a proxy to a server, on a free port of the loopback interface. It
// ends with the test.
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

// Addr returns the address to connect to.
func (p *Proxy) Addr() string { return p.addr }

// Point sends the connections that come to another server, as a name does whose address has
// changed. Those that are open stay with theirs.
func (p *Proxy) Point(target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = target
}

// Conns returns the number of open connections. A connection is open until each
// side has closed it and has been told that the other has.
func (p *Proxy) Conns() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.links)
}

// Delay delivers each piece of data later, by as much as by returns for it; what
// follows on the same connection waits behind it. by may be called by many
// goroutines and must not keep data. A piece is what one read returned, which is
// most often what the sender wrote at once.
func (p *Proxy) Delay(d Direction, by func(data []byte) time.Duration) {
	p.change(d, func(f *faults) { f.delay = by })
}

// Slow lets so many bytes a second through, on each connection.
func (p *Proxy) Slow(d Direction, bytesPerSecond int) {
	p.change(d, func(f *faults) { f.rate = bytesPerSecond })
}

// Hold keeps all data back until Heal.
func (p *Proxy) Hold(d Direction) { p.change(d, func(f *faults) { f.held = true }) }

// Hang is a server that has stopped: connections are made, and nothing is read
// or delivered until Heal. Unlike with Hold, a sender is blocked when its buffers
// are full.
func (p *Proxy) Hang() { p.change(Both, func(f *faults) { f.held, f.hung = true, true }) }

// Cut makes the connections that are open half open, for good: in direction d all
// that is sent, and the end of the stream, is lost silently. New connections work.
// end resets those that were cut, as keepalives do in the end; it need not be
// called.
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

// Reset ends the connections that are open, on both sides, with a TCP reset. What
// is held back on them is lost.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.reset()
	}
}

// Refuse refuses new connections until Heal. Those that are open stay.
func (p *Proxy) Refuse() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener != nil {
		_ = p.listener.Close()
		p.listener = nil
	}
}

// Heal ends every fault and delivers what was held back or delayed. Connections
// that were cut stay so.
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

// tell wakes the streams. p.mu is held.
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

// A piece is data under way. One without data is the end of the stream.
type piece struct {
	data []byte
	due  time.Time
}

// forward is one stream of a link: a reader that takes in what is sent, and a
// writer that delivers it when the faults allow.
func (p *Proxy) forward(l *link, d Direction, from, to *net.TCPConn) {
	// As large as a test may need, so that the sender notices nothing.
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
				<-l.ended // the receiver never learns that the sender has gone
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

// arrive waits until data that is due then may be delivered.
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

// await waits until ok, which is called with p.mu held. It reports false if the
// link is reset before.
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

// deliver writes data, at the rate that there is.
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
