package harm_test

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	testpb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/internal/integration/harm"
	"github.com/go-resilience/resilience/resiliencegrpc"
	"github.com/go-resilience/resilience/retry"
)

// A grpcRow is a row of gRPC as data. It runs in virtual time, with each client.
type grpcRow struct {
	name, trouble string
	rate          int           // calls a second
	length        time.Duration // of the load
	patience      time.Duration // of a caller; zero means that it has no deadline
	recovery      time.Duration // calls that arrive in so much time after the fault may be lost
	end           time.Duration // when the fault ends; zero means never
	streams       bool          // the calls are streams
	chance        int           // so many calls more may be lost
	none          bool          // no call may be refused
	opens         bool          // there must be fewer attempts than calls, and the rule of answers does not apply
	down          bool          // there must be fewer attempts than calls
	options       []grpc.ServerOption

	// serve runs before the answer to attempt n, counted from 1. If it returns an error, that is the answer.
	serve func(w *grpcWorld, ctx context.Context, n int64) error
	// send sends the messages of a stream. Nil means events for streamFor.
	send   func(w *grpcWorld, n int64, s grpc.ServerStreamingServer[testpb.StreamingOutputCallResponse]) error
	load   func(w *grpcWorld) // makes the calls; nil means calls at the rate
	script func(w *grpcWorld) // makes the trouble, at the same time
}

// streamFor is how long a stream lasts.
const streamFor = 5 * time.Second

// replayable allows retries of every method.
func replayable(context.Context, string) bool { return true }

// grpcClients are the clients that are compared, the recommended one last.
var grpcClients = []func() resiliencegrpc.Client{
	func() resiliencegrpc.Client { return resiliencegrpc.Client{} }, // plain
	func() resiliencegrpc.Client { // retries alone
		return resiliencegrpc.Client{Middleware: retry.New(retry.Config{}).Wrap, Replayable: replayable}
	},
	recommended,
}

// recommended returns the client that the package doc of resiliencegrpc recommends. Change it when the doc changes.
func recommended() resiliencegrpc.Client {
	retries := retry.New(retry.Config{
		Name:     "users",
		Attempts: 4,
		Backoff:  retry.Exponential(100*time.Millisecond, 2*time.Second),
		MinDelay: 50 * time.Millisecond,
		Budget:   retry.NewBudget(retry.BudgetConfig{Name: "users"}),
	})
	users := breaker.New(breaker.Config{
		Name:                "users",
		ConsecutiveFailures: 25,
		FailureRate:         0.5,
		Window:              10 * time.Second,
		OpenFor:             900 * time.Millisecond,
		MaxRetryAfter:       30 * time.Second,
	})
	slots := bulkhead.New(bulkhead.Config{Name: "users", Limit: 100, MaxWait: time.Second})
	return resiliencegrpc.Client{
		Middleware: resilience.Chain(retries.Wrap, users.Wrap, slots.Wrap, resilience.Timeout(10*time.Second)),
		Replayable: replayable,
	}
}

// A grpcWorld is a server and a client in one bubble.
type grpcWorld struct {
	testpb.UnimplementedTestServiceServer
	row    *grpcRow
	begun  time.Time
	net    network
	client testpb.TestServiceClient
	calls  sync.WaitGroup
	rng    *rand.Rand // chooses the attempts that fail
	served atomic.Int64

	mu    sync.Mutex
	block []bool // whether the next attempts fail
	done  []grpcCall
	sent  int // attempts, including those that did not reach the server
}

// A grpcCall is the result of one call.
type grpcCall struct {
	at          time.Duration // when it began
	ok, refused bool
}

// run runs the row with one of the clients.
func (r *grpcRow) run(t *testing.T, policies resiliencegrpc.Client) (w *grpcWorld) {
	synctest.Test(t, func(t *testing.T) {
		w = &grpcWorld{row: r, begun: time.Now(), rng: rand.New(rand.NewPCG(1, 2))}
		w.net.listener = bufconn.Listen(1 << 16)
		server := grpc.NewServer(r.options...)
		testpb.RegisterTestServiceServer(server, w)
		go func() { _ = server.Serve(w.net.listener) }()
		conn, err := grpc.NewClient("passthrough:bubble", append(policies.DialOptions(),
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(w.net.dial),
			// A lost server is dialed once a second. By default the time between dials grows to two minutes, and
			// would hide the effect of the policies.
			grpc.WithConnectParams(grpc.ConnectParams{
				Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, MaxDelay: time.Second},
				MinConnectTimeout: time.Second,
			}),
			grpc.WithChainUnaryInterceptor(w.countUnary), grpc.WithChainStreamInterceptor(w.countStream))...)
		require.NoError(t, err)
		w.client = testpb.NewTestServiceClient(conn)
		if r.script != nil {
			w.calls.Go(func() { r.script(w) })
		}
		if r.load != nil {
			r.load(w)
		} else {
			w.steady()
		}
		w.calls.Wait()
		_ = conn.Close()
		server.Stop()
	})
	return w
}

// steady makes calls at the rate of the row.
func (w *grpcWorld) steady() {
	for w.now() < w.row.length {
		w.calls.Go(func() { w.call() })
		time.Sleep(time.Second / time.Duration(w.row.rate))
	}
}

func (w *grpcWorld) now() time.Duration { return time.Since(w.begun) }

// call makes one call and reports whether it was answered.
func (w *grpcWorld) call() bool {
	began := w.now()
	ctx, cancel := context.WithCancel(context.Background())
	if w.row.patience > 0 {
		ctx, cancel = context.WithTimeout(context.Background(), w.row.patience)
	}
	defer cancel()
	var err error
	if w.row.streams {
		err = w.receive(ctx)
	} else {
		_, err = w.client.EmptyCall(ctx, &testpb.Empty{})
	}
	w.end(grpcCall{at: began, ok: err == nil, refused: resilience.Refused(err)})
	return err == nil
}

func (w *grpcWorld) end(c grpcCall) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done = append(w.done, c)
}

// receive opens a stream and receives until it ends.
func (w *grpcWorld) receive(ctx context.Context) error {
	s, err := w.client.StreamingOutputCall(ctx, &testpb.StreamingOutputCallRequest{})
	for err == nil {
		_, err = s.Recv()
	}
	if err == io.EOF {
		return nil
	}
	return err
}

func (w *grpcWorld) countUnary(
	ctx context.Context, method string, req, reply any,
	cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	w.attempt()
	return invoke(ctx, method, req, reply, cc, opts...)
}

func (w *grpcWorld) countStream(
	ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
	open grpc.Streamer, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	w.attempt()
	return open(ctx, desc, cc, method, opts...)
}

func (w *grpcWorld) attempt() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sent++
}

// EmptyCall answers the unary calls.
func (w *grpcWorld) EmptyCall(ctx context.Context, _ *testpb.Empty) (*testpb.Empty, error) {
	n := w.served.Add(1)
	if w.row.serve != nil {
		if err := w.row.serve(w, ctx, n); err != nil {
			return nil, err
		}
	}
	return &testpb.Empty{}, nil
}

// StreamingOutputCall answers the streams.
func (w *grpcWorld) StreamingOutputCall(
	_ *testpb.StreamingOutputCallRequest, s grpc.ServerStreamingServer[testpb.StreamingOutputCallResponse],
) error {
	n := w.served.Add(1)
	if w.row.serve != nil {
		if err := w.row.serve(w, s.Context(), n); err != nil {
			return err
		}
	}
	if w.row.send != nil {
		return w.row.send(w, n, s)
	}
	return events(s, streamFor)
}

// events sends an event each second.
func events(s grpc.ServerStreamingServer[testpb.StreamingOutputCallResponse], d time.Duration) error {
	for ; d > 0 && s.Context().Err() == nil; d -= time.Second {
		if err := s.Send(&testpb.StreamingOutputCallResponse{}); err != nil {
			return err
		}
		wait(s.Context(), time.Second)
	}
	return nil
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// takes returns a serve that takes d.
func takes(d time.Duration) func(*grpcWorld, context.Context, int64) error {
	return func(_ *grpcWorld, ctx context.Context, _ int64) error {
		wait(ctx, d)
		return nil
	}
}

var errUnavailable = status.Error(codes.Unavailable, "out of order")

// failing returns a serve that fails k of each n attempts, in a random order. So the shares are exact,
// and at one failure of five there are never five in a row, at which the breaker opens by chance.
func failing(k, n int) func(*grpcWorld, context.Context, int64) error {
	return func(w *grpcWorld, ctx context.Context, _ int64) error {
		wait(ctx, 20*time.Millisecond)
		w.mu.Lock()
		defer w.mu.Unlock()
		if len(w.block) == 0 {
			w.block = make([]bool, n)
			for _, i := range w.rng.Perm(n)[:k] {
				w.block[i] = true
			}
		}
		fails := w.block[0]
		w.block = w.block[1:]
		if fails {
			return errUnavailable
		}
		return nil
	}
}

// A network is between the client and the server.
type network struct {
	listener *bufconn.Listener

	mu     sync.Mutex
	refuse bool
	conns  []*wire
}

// A wire is a connection as the client has it.
type wire struct {
	net.Conn
	dead atomic.Bool // all bytes are lost, in both directions
}

func (c *wire) Write(b []byte) (int, error) {
	if c.dead.Load() {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

func (c *wire) Read(b []byte) (n int, err error) {
	for n, err = c.Conn.Read(b); err == nil && c.dead.Load(); n, err = c.Conn.Read(b) {
	}
	return n, err
}

func (n *network) dial(ctx context.Context, _ string) (net.Conn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.refuse {
		return nil, syscall.ECONNREFUSED
	}
	conn, err := n.listener.DialContext(ctx)
	if err != nil {
		return nil, err
	}
	n.conns = append(n.conns, &wire{Conn: conn})
	return n.conns[len(n.conns)-1], nil
}

// cut closes all connections. If refuse, no new ones are made.
func (n *network) cut(refuse bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.refuse = refuse
	for _, c := range n.conns {
		_ = c.Close()
	}
	n.conns = nil
}

// accept ends refuse.
func (n *network) accept() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.refuse = false
}

// silence makes the open connections lose all bytes.
func (n *network) silence() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, c := range n.conns {
		c.dead.Store(true)
	}
}

// inFlight returns a script that starts n calls at a time of the run, and calls f 500ms later.
func inFlight(at time.Duration, n int, f func(w *grpcWorld)) func(w *grpcWorld) {
	return func(w *grpcWorld) {
		time.Sleep(at)
		for range n {
			w.calls.Go(func() { w.call() })
		}
		time.Sleep(500 * time.Millisecond)
		f(w)
	}
}

// subscribers returns a load of n streams that are opened again when they end. Each opening is a call. When a
// connection is closed, gRPC may still open a stream on it, which then fails: each subscriber may lose a call so.
func subscribers(n int) func(w *grpcWorld) {
	return func(w *grpcWorld) {
		// Not a deadline: the server would end the streams by it, too, and they would be opened again before ctx is done.
		ctx, cancel := context.WithCancel(context.Background())
		for range n {
			w.calls.Go(func() {
				for ctx.Err() == nil {
					began := w.now()
					s, err := w.client.StreamingOutputCall(ctx, &testpb.StreamingOutputCallRequest{})
					if err == nil {
						_, err = s.Recv()
					}
					if ctx.Err() == nil {
						w.end(grpcCall{at: began, ok: err == nil, refused: resilience.Refused(err)})
					}
					if err != nil {
						wait(ctx, time.Second)
						continue
					}
					for err == nil {
						_, err = s.Recv()
					}
				}
			})
		}
		time.Sleep(w.row.length)
		cancel()
	}
}

func grpcRows() []grpcRow {
	const second = time.Second
	cut := func(w *grpcWorld) { w.net.cut(false) }
	silent := func(w *grpcWorld, ctx context.Context, _ int64) error {
		if at := w.now(); at >= 5*second && at < 15*second {
			wait(ctx, 15*second-at)
		}
		return nil
	}
	return []grpcRow{{
		name: "2 cold", trouble: "the connection is cut once with 30 calls in flight",
		rate: 20, length: 20 * second, patience: 5 * second, end: 500 * time.Millisecond, none: true,
		serve: takes(second), script: inFlight(0, 30, cut),
	}, {
		name: "2 warm", trouble: "the same after 500 good calls",
		rate: 20, length: 45 * second, patience: 5 * second, end: 25500 * time.Millisecond, none: true,
		serve: takes(second), script: inFlight(25*second, 30, cut),
	}, {
		// Not 30 seconds, the default of OpenFor: a few milliseconds would decide whether the first probe fails.
		name: "4", trouble: "the server is down for 20s, connections are refused",
		rate: 20, length: 80 * second, patience: 5 * second, end: 30 * second, recovery: 2 * second, down: true,
		script: func(w *grpcWorld) {
			time.Sleep(10 * second)
			w.net.cut(true)
			time.Sleep(20 * second)
			w.net.accept()
		},
	}, {
		name: "5 3s", trouble: "the server is silent for 10s, callers wait 3s",
		rate: 20, length: 60 * second, patience: 3 * second, end: 15 * second, recovery: 3 * second, serve: silent,
	}, {
		name: "5 30s", trouble: "the server is silent for 10s, callers wait 30s",
		rate: 20, length: 60 * second, patience: 30 * second, end: 15 * second, recovery: 3 * second, serve: silent,
	}, {
		name: "5 old", trouble: "the open connection is silent for ever, new ones work, callers wait 3s",
		rate: 20, length: 60 * second, patience: 3 * second, end: 5 * second, recovery: 3 * second,
		script: func(w *grpcWorld) {
			time.Sleep(5 * second)
			w.net.silence()
		},
	}, {
		name: "8 1%", trouble: "1% of the calls are UNAVAILABLE",
		rate: 20, length: 60 * second, patience: 5 * second, none: true, serve: failing(1, 100),
	}, {
		name: "8 20%", trouble: "20% of the calls are UNAVAILABLE",
		rate: 20, length: 60 * second, patience: 5 * second, none: true, serve: failing(1, 5),
	}, {
		name: "8 50%", trouble: "50% of the calls are UNAVAILABLE",
		rate: 20, length: 60 * second, patience: 5 * second, opens: true, serve: failing(10, 20),
	}, {
		name: "8 100%", trouble: "all calls are UNAVAILABLE",
		rate: 20, length: 60 * second, patience: 5 * second, opens: true, serve: failing(1, 1),
	}, {
		name: "13 calls", trouble: "MaxConnectionAge 5s, calls of 50ms",
		rate: 20, length: 60 * second, patience: 5 * second, none: true, serve: takes(50 * time.Millisecond),
		options: []grpc.ServerOption{grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionAge: 5 * second})},
	}, {
		name: "13 streams", trouble: "MaxConnectionAge 10s and 1s of grace, 20 streams that are opened again",
		length: 60 * second, streams: true, none: true, load: subscribers(20), chance: 20,
		send: func(_ *grpcWorld, _ int64, s grpc.ServerStreamingServer[testpb.StreamingOutputCallResponse]) error {
			return events(s, time.Hour)
		},
		options: []grpc.ServerOption{grpc.KeepaliveParams(keepalive.ServerParameters{
			MaxConnectionAge: 10 * second, MaxConnectionAgeGrace: second,
		})},
	}, {
		name: "14 20%", trouble: "20% of the streams are UNAVAILABLE, the others last 5s and end well",
		rate: 20, length: 60 * second, streams: true, none: true, serve: failing(1, 5),
	}, {
		name: "14 2%", trouble: "2% of the streams break off after 2s",
		rate: 20, length: 60 * second, streams: true, none: true,
		send: func(_ *grpcWorld, n int64, s grpc.ServerStreamingServer[testpb.StreamingOutputCallResponse]) error {
			if n%50 != 0 {
				return events(s, streamFor)
			}
			_ = events(s, 2*second)
			return errUnavailable
		},
	}, {
		name: "14 once", trouble: "the connection is cut once with 20 streams, which are opened again",
		length: 60 * second, streams: true, none: true, load: subscribers(20), chance: 20,
		send: func(_ *grpcWorld, _ int64, s grpc.ServerStreamingServer[testpb.StreamingOutputCallResponse]) error {
			return events(s, time.Hour)
		},
		script: func(w *grpcWorld) {
			time.Sleep(20 * second)
			w.net.cut(false)
		},
	}, {
		name: "14 all", trouble: "each stream breaks off after 1s",
		rate: 20, length: 60 * second, streams: true, opens: true,
		send: func(_ *grpcWorld, _ int64, s grpc.ServerStreamingServer[testpb.StreamingOutputCallResponse]) error {
			_ = events(s, second)
			return errUnavailable
		},
	}}
}

// answered returns the numbers of calls that were answered and refused.
func (w *grpcWorld) answered() (ok, refused int) {
	for _, c := range w.done {
		if c.ok {
			ok++
		}
		if c.refused {
			refused++
		}
	}
	return ok, refused
}

// back returns the time from the end of the fault to the last call that was not answered.
func (w *grpcWorld) back() string {
	if w.row.end == 0 {
		return "-"
	}
	last := w.row.end
	for _, c := range w.done {
		if !c.ok {
			last = max(last, c.at)
		}
	}
	return fmt.Sprintf("%.1fs", (last - w.row.end).Seconds())
}

// judge runs the row with each client and applies the rules to the recommended one.
func (r *grpcRow) judge(t *testing.T) (result harm.Result) {
	var shares []float64
	for i, policies := range grpcClients {
		w := r.run(t, policies())
		asked := len(w.done)
		ok, refused := w.answered()
		share := float64(ok) / float64(asked)
		shares = append(shares, share)
		result.Cells = append(result.Cells, fmt.Sprintf("%.1f%%", 100*share))
		if i < len(grpcClients)-1 {
			continue
		}
		attempts := fmt.Sprintf("%.2f", float64(w.sent)/float64(asked))
		result.Cells = append(result.Cells, attempts, fmt.Sprint(refused), w.back())
		best := slices.Max(shares)
		least := best*float64(asked) - float64(r.rate)*r.recovery.Seconds() - 0.01*float64(asked) - float64(r.chance)
		result.Break(r.opens || float64(ok) >= least,
			"%d of %d calls are answered, without the policies %.0f%%", ok, asked, 100*best)
		most := 1.2*float64(asked) + 10*r.length.Seconds()
		result.Break(float64(w.sent) <= most, "%d attempts for %d calls", w.sent, asked)
		result.Break(!r.opens && !r.down || w.sent < asked,
			"%d attempts for %d calls, though most of them fail", w.sent, asked)
		result.Break(!r.none || refused == 0, "%d of %d calls are refused", refused, asked)
	}
	return result
}

func grpcTable() *harm.Table {
	table := &harm.Table{
		Name: "gRPC",
		Title: "The share of calls that each client answers at 20 calls a second. For the recommended policies also the " +
			"attempts per call, the refused calls, and the time from the end of the fault to the last call that is not " +
			"answered.",
		Head: []string{"plain", "retries alone", "recommended", "attempts", "refused", "back after"},
	}
	for _, r := range grpcRows() {
		table.Rows = append(table.Rows, harm.Row{Name: r.name, Trouble: r.trouble, Run: r.judge})
	}
	return table
}
