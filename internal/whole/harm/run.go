package harm

import (
	"context"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-resilience/resilience"
)

// A World is one run of a row with one client.
type World struct {
	Net *Network

	row     *Row
	cell    Cell
	seed    uint64
	start   time.Time
	client  *http.Client
	workers chan struct{} // holds an element for each busy worker; nil means no limit
	calls   sync.WaitGroup
	arrived time.Duration // time at which the last call started

	mu       sync.Mutex
	random   *rand.Rand // random numbers of the callers
	attempts map[int]int
	sent     []time.Duration // times at which requests reached the server or dials were refused
	results  []result        // by number of the call
}

// A result is the result of a call.
type result struct {
	at       time.Duration // time at which the call started
	took     time.Duration
	answered bool
	refused  bool // whether a policy of the client refused the call
	counted  bool
}

// Now returns the time since the start of the run.
func (w *World) Now() time.Duration { return time.Since(w.start) }

// Seeds are the seeds with which each row runs.
var Seeds = []uint64{1, 2, 3}

// Run runs the row in cell with c, once for each seed, in virtual time. It returns the sum of the results. A
// Real row runs only once, in real time.
func Run(t *testing.T, r *Row, cell Cell, c Client, seeds ...uint64) *Measurement {
	sum := new(Measurement)
	if r.Real {
		w := newWorld(r, cell, seeds[0])
		w.runReal(t, c)
		sum.add(w)
		return sum
	}
	for _, seed := range seeds {
		w := newWorld(r, cell, seed)
		synctest.Test(t, func(*testing.T) { w.run(c) })
		sum.add(w)
	}
	return sum
}

func newWorld(r *Row, cell Cell, seed uint64) *World {
	return &World{
		row: r, cell: cell, seed: seed, random: rand.New(rand.NewPCG(seed, 1)), attempts: map[int]int{},
	}
}

// run runs the row in virtual time, in a bubble of testing/synctest.
func (w *World) run(c Client) {
	w.start = time.Now()
	w.Net = newNetwork(w.refusedDial)
	if w.row.Workers > 0 {
		w.workers = make(chan struct{}, w.row.Workers)
	}
	server := &http.Server{
		Handler:     http.HandlerFunc(w.serve),
		ConnContext: withConn,
		ErrorLog:    log.New(io.Discard, "", 0),
		Protocols:   w.protocols(),
	}
	go func() { _ = server.Serve(listener{w.Net}) }()
	base := w.base()
	base.DialContext = w.Net.dial
	w.client = c.New(base, w.row.Config)
	w.calls.Go(w.play)
	w.arrive()
	w.calls.Wait()
	_ = server.Close()
	w.Net.Cut()
	base.CloseIdleConnections()
	time.Sleep(2 * time.Minute) // until the goroutines that wait for a timer have ended
}

// base returns the base transport of every client, without its DialContext.
func (w *World) base() *http.Transport {
	base := http.DefaultTransport.(*http.Transport).Clone()
	base.Proxy, base.ForceAttemptHTTP2, base.Protocols = nil, false, w.protocols()
	base.MaxConnsPerHost = w.row.Tuned.MaxConnsPerHost
	return base
}

func (w *World) protocols() *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(!w.row.HTTP2)
	p.SetUnencryptedHTTP2(w.row.HTTP2)
	return p
}

func (w *World) refusedDial() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sent = append(w.sent, w.Now())
}

// play plays the row's script.
func (w *World) play() {
	for _, e := range w.row.Script {
		time.Sleep(time.Until(w.start.Add(e.At)))
		e.Do(w)
	}
}

// arrive starts calls at the cell's rate for the length of the row. The first call starts at a random time
// within the first interval between calls.
func (w *World) arrive() {
	if w.cell.Rate == 0 {
		return
	}
	gap := float64(time.Second) / w.cell.Rate
	next := w.random.Float64() * gap
	for n := 0; time.Duration(next) < w.row.Length || n < w.row.MinCalls; n++ {
		time.Sleep(time.Until(w.start.Add(time.Duration(next))))
		var c Call
		if w.row.Call != nil {
			c = w.row.Call(n)
		}
		w.call(c)
		if w.row.Poisson {
			next += w.random.ExpFloat64() * gap
		} else {
			next += gap
		}
	}
	w.arrived = w.Now()
}

// call starts a call on a goroutine.
func (w *World) call(c Call) {
	w.mu.Lock()
	n := len(w.results)
	w.results = append(w.results, result{at: w.Now(), counted: !c.Uncounted})
	w.mu.Unlock()
	cancelAfter := time.Duration(0)
	if c.Cancels > 0 {
		own := rand.New(rand.NewPCG(w.seed, uint64(n)<<16|1<<15))
		cancelAfter = 1 + time.Duration(own.Int64N(int64(c.Cancels)))
	}
	w.calls.Go(func() {
		start := time.Now()
		ctx, cancel := w.callerCtx(cancelAfter)
		defer cancel()
		err := w.do(ctx, c, n)
		took := time.Since(start)
		w.mu.Lock()
		defer w.mu.Unlock()
		r := &w.results[n]
		r.took, r.answered, r.refused = took, err == nil, resilience.Refused(err)
	})
}

// callerCtx returns the ctx of a caller. If cancelAfter is not zero, the caller cancels after cancelAfter.
// Otherwise the ctx depends on the row and on the patience of the cell.
func (w *World) callerCtx(cancelAfter time.Duration) (context.Context, context.CancelFunc) {
	switch {
	case cancelAfter > 0:
		return canceledAfter(cancelAfter)
	case w.cell.Patience == 0 || w.row.Streams:
		return context.WithCancel(context.Background())
	case w.row.Cancels:
		return canceledAfter(w.cell.Patience)
	default:
		return context.WithTimeout(context.Background(), w.cell.Patience)
	}
}

func canceledAfter(d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.Background())
	timer := time.AfterFunc(d, cancel)
	return ctx, func() {
		timer.Stop()
		cancel()
	}
}

// do sends a request and reads its response.
func (w *World) do(ctx context.Context, c Call, n int) error {
	host, method := c.Host, http.MethodGet
	if host == "" {
		host = "svc.test"
	}
	var body io.Reader
	if c.Body != nil {
		method, body = http.MethodPost, c.Body()
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://"+host+"/"+strings.TrimPrefix(c.Path, "/"), body)
	if err != nil {
		return err
	}
	req.Header.Set(callHeader, strconv.Itoa(n))
	start := time.Now()
	resp, err := w.client.Do(req)
	if err != nil {
		return err
	}
	headers := time.Since(start)
	all, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	switch {
	case err != nil:
		return err
	case resp.StatusCode != http.StatusOK:
		return fmt.Errorf("status %d", resp.StatusCode)
	case w.row.Streams && !strings.HasSuffix(string(all), streamEnd):
		return io.ErrUnexpectedEOF
	case w.row.Streams && w.cell.Patience > 0 && headers > w.cell.Patience:
		return fmt.Errorf("headers after %v", headers)
	}
	return nil
}
