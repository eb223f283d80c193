package main

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// A phase is a stretch of the backend's life.
type phase struct {
	Name    string
	Lasts   time.Duration
	Outage  bool          // nothing useful can come back
	Answers time.Duration // how long an answer takes
	Errors  float64       // the share of requests answered with 503
	Workers int           // requests worked on at once; more wait their turn. 0: no limit
	Hangs   bool          // requests are taken and never answered
	Down    bool          // connections are reset before a word
}

// badHalfMinute is the life of the backend, compressed.
var badHalfMinute = []phase{
	{Name: "healthy", Lasts: 1500 * time.Millisecond, Answers: 5 * time.Millisecond},
	{Name: "30% errors", Lasts: 1500 * time.Millisecond, Answers: 5 * time.Millisecond, Errors: 0.3},
	{Name: "overloaded", Lasts: 1500 * time.Millisecond, Answers: 60 * time.Millisecond, Workers: 6},
	{Name: "hanging", Lasts: 1500 * time.Millisecond, Outage: true, Hangs: true},
	{Name: "down", Lasts: 1500 * time.Millisecond, Outage: true, Down: true},
	{Name: "recovering", Lasts: 1500 * time.Millisecond, Answers: 20 * time.Millisecond, Errors: 0.2, Workers: 10},
	{Name: "healthy again", Lasts: 1500 * time.Millisecond, Answers: 5 * time.Millisecond},
}

// A backend is a real HTTP server on loopback that serves products and lives
// through phases. Each client has one of its own, so that neither suffers from
// what the other does to it.
type backend struct {
	URL string

	seed     uint64
	server   *http.Server
	listener net.Listener
	onPhase  []*tally // what reached it, by phase

	now   atomic.Int32 // the index of the phase
	mu    sync.Mutex
	over  context.Context // ends with the phase
	end   context.CancelFunc
	queue chan struct{}         // a place for each request at work; nil: no limit
	conns map[net.Conn]struct{} // open ones, to be reset when the backend goes down
}

func newBackend(seed uint64, tallies []*tally) (*backend, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	b := &backend{
		URL:      "http://" + l.Addr().String(),
		seed:     seed,
		listener: l,
		onPhase:  tallies,
		conns:    map[net.Conn]struct{}{},
	}
	b.over, b.end = context.WithCancel(context.Background())
	b.server = &http.Server{Handler: b, ConnState: b.track}
	go func() { _ = b.server.Serve(resettingListener{l, b}) }()
	return b, nil
}

// enter begins the phase of index i: requests that hang are let go, and a
// backend that goes down resets its connections.
func (b *backend) enter(i int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.end()
	b.over, b.end = context.WithCancel(context.Background())
	b.queue = nil
	if n := badHalfMinute[i].Workers; n > 0 {
		b.queue = make(chan struct{}, n)
	}
	b.now.Store(int32(i))
	if badHalfMinute[i].Down {
		for c := range b.conns {
			reset(c)
		}
	}
}

func (b *backend) close() error {
	b.mu.Lock()
	b.end()
	b.mu.Unlock()
	return b.server.Close()
}

// ServeHTTP answers GET /products/<id>?call=<n> as the phase has it.
func (b *backend) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	i := b.now.Load()
	b.onPhase[i].reached.Add(1)
	b.mu.Lock()
	over, queue := b.over, b.queue
	b.mu.Unlock()
	ctx := r.Context()
	p := badHalfMinute[i]
	if p.Hangs {
		select {
		case <-over.Done():
		case <-ctx.Done():
		}
		panic(http.ErrAbortHandler)
	}
	if queue != nil {
		select {
		case queue <- struct{}{}:
			defer func() { <-queue }()
		case <-ctx.Done():
			return
		}
	}
	if b.unlucky(p.Errors, r) {
		http.Error(w, "try again", http.StatusServiceUnavailable)
		return
	}
	select {
	case <-time.After(p.Answers):
		fmt.Fprintf(w, "product %s", r.URL.Path[len("/products/"):])
	case <-ctx.Done():
	}
}

// unlucky reports whether this request fails: by seed, call and attempt, so that
// a run can be repeated.
func (b *backend) unlucky(share float64, r *http.Request) bool {
	h := fnv.New64a()
	fmt.Fprintf(h, "%d %s %s", b.seed, r.URL, r.Header.Get("Attempt"))
	return float64(h.Sum64()%1000) < share*1000
}

// track keeps the open connections.
func (b *backend) track(c net.Conn, state http.ConnState) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch state {
	case http.StateNew:
		b.conns[c] = struct{}{}
	case http.StateClosed, http.StateHijacked:
		delete(b.conns, c)
	}
}

// A resettingListener resets what it accepts while the backend is down, as a
// load balancer does whose last server has died.
type resettingListener struct {
	net.Listener
	b *backend
}

func (l resettingListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		i := l.b.now.Load()
		if !badHalfMinute[i].Down {
			return c, nil
		}
		l.b.onPhase[i].reached.Add(1)
		reset(c)
	}
}

// reset closes a connection without a farewell.
func reset(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	if err := c.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		panic(err)
	}
}
