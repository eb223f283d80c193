package resiliencegrpc_test

import (
	"context"
	"fmt"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/resiliencegrpc"
	"github.com/go-resilience/resilience/resiliencegrpc/internal/testpb"
	"github.com/go-resilience/resilience/retry"
)

// The streams of handlers.
type (
	listStream   = grpc.ServerStreamingServer[testpb.Message]
	uploadStream = grpc.ClientStreamingServer[testpb.Message, testpb.Message]
	chatStream   = grpc.BidiStreamingServer[testpb.Message, testpb.Message]
)

// A service is the server of the tests. If a function is nil, the calls of that kind succeed.
type service struct {
	testpb.UnimplementedTestServer
	calls atomic.Int64 // number of calls that reached a handler

	unary  func(ctx context.Context, n int64, m *testpb.Message) (*testpb.Message, error)
	list   func(n int64, m *testpb.Message, s listStream) error
	upload func(n int64, s uploadStream) error
	chat   func(n int64, s chatStream) error
}

func (s *service) Get(ctx context.Context, m *testpb.Message) (*testpb.Message, error) {
	n := s.calls.Add(1)
	if s.unary == nil {
		return m, nil
	}
	return s.unary(ctx, n, m)
}
func (s *service) Put(ctx context.Context, m *testpb.Message) (*testpb.Message, error) {
	return s.Get(ctx, m)
}
func (s *service) Create(ctx context.Context, m *testpb.Message) (*testpb.Message, error) {
	return s.Get(ctx, m)
}
func (s *service) List(m *testpb.Message, stream listStream) error {
	n := s.calls.Add(1)
	if s.list == nil {
		return stream.Send(m)
	}
	return s.list(n, m, stream)
}
func (s *service) Run(m *testpb.Message, stream listStream) error {
	return s.List(m, stream)
}
func (s *service) Upload(stream uploadStream) error {
	n := s.calls.Add(1)
	if s.upload != nil {
		return s.upload(n, stream)
	}
	for {
		if _, err := stream.Recv(); err != nil {
			return stream.SendAndClose(&testpb.Message{Text: "done"})
		}
	}
}
func (s *service) Chat(stream chatStream) error {
	n := s.calls.Add(1)
	if s.chat != nil {
		return s.chat(n, stream)
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			return nil
		}
		if err := stream.Send(m); err != nil {
			return err
		}
	}
}

// A listener can close the connections that it has accepted.
type listener struct {
	net.Listener
	mu    sync.Mutex
	conns []net.Conn
}

func (l *listener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil {
		l.mu.Lock()
		l.conns = append(l.conns, conn)
		l.mu.Unlock()
	}
	return conn, err
}

// cut closes all connections.
func (l *listener) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.conns {
		_ = c.Close()
	}
	l.conns = nil
}

// serve starts a server on loopback.
func serve(t testing.TB, s *service, opts ...grpc.ServerOption) (*grpc.Server, *listener) {
	t.Helper()
	return serveWith(t, s, func(*grpc.Server) {}, opts...)
}

// serveWith is like serve. register registers more services.
func serveWith(
	t testing.TB, s *service, register func(*grpc.Server), opts ...grpc.ServerOption,
) (*grpc.Server, *listener) {
	t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	l := &listener{Listener: lis}
	server := grpc.NewServer(opts...)
	testpb.RegisterTestServer(server, s)
	register(server)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	return server, l
}

// dial connects a client to addr.
func dial(t testing.TB, addr string, c resiliencegrpc.Client, opts ...grpc.DialOption) testpb.TestClient {
	t.Helper()
	conn := connect(t, addr, c, opts...)
	return testpb.NewTestClient(conn)
}

func connect(t testing.TB, addr string, c resiliencegrpc.Client, opts ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	opts = append(append(c.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials())), opts...)
	conn, err := grpc.NewClient(addr, opts...)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// inBubble connects a client to a server in the memory of a synctest bubble. Both stop at the end of the test.
func inBubble(t *testing.T, s *service, c resiliencegrpc.Client, opts ...grpc.ServerOption) testpb.TestClient {
	t.Helper()
	return inBubbleWith(t, s, c, grpc.EmptyDialOption{}, opts...)
}

// inBubbleWith is inBubble with an option of the connection after those of the client.
func inBubbleWith(
	t *testing.T, s *service, c resiliencegrpc.Client, inner grpc.DialOption, opts ...grpc.ServerOption,
) testpb.TestClient {
	t.Helper()
	return dial(t, "passthrough:bubble", c, inner, dialer(serveInBubble(t, s, opts...)))
}

// serveInBubble starts a server in the memory of a synctest bubble.
func serveInBubble(t *testing.T, s *service, opts ...grpc.ServerOption) *listener {
	t.Helper()
	lis := &listener{Listener: bufconn.Listen(1 << 20)}
	server := grpc.NewServer(opts...)
	testpb.RegisterTestServer(server, s)
	go func() { _ = server.Serve(lis) }()
	t.Cleanup(server.Stop)
	return lis
}

// dialer returns an option that connects to the server of serveInBubble.
func dialer(l *listener) grpc.DialOption {
	return grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		return l.Listener.(*bufconn.Listener).DialContext(ctx)
	})
}

// An opener opens a stream.
type opener = func(context.Context) (grpc.ClientStream, error)

// intercept returns an option with an interceptor of streams.
func intercept(f func(ctx context.Context, open opener) (grpc.ClientStream, error)) grpc.DialOption {
	return interceptWith(false, f)
}

// interceptWith is like intercept. If drop is true, the interceptor does not pass on the call options.
func interceptWith(drop bool, f func(context.Context, opener) (grpc.ClientStream, error)) grpc.DialOption {
	return grpc.WithChainStreamInterceptor(func(
		ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
		streamer grpc.Streamer, opts ...grpc.CallOption,
	) (grpc.ClientStream, error) {
		if drop {
			opts = nil
		}
		return f(ctx, func(ctx context.Context) (grpc.ClientStream, error) {
			return streamer(ctx, desc, cc, method, opts...)
		})
	})
}

// interceptUnary is like interceptWith, for unary calls.
func interceptUnary(drop bool, f func(_ context.Context, req any, invoke resilience.Func) error) grpc.DialOption {
	return grpc.WithChainUnaryInterceptor(func(
		ctx context.Context, method string, req, reply any,
		cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption,
	) error {
		if drop {
			opts = nil
		}
		return f(ctx, req, func(ctx context.Context) error { return invoker(ctx, method, req, reply, cc, opts...) })
	})
}

// interceptServer returns an option with an interceptor of the unary calls of a server.
func interceptServer(
	f func(ctx context.Context, method string, handle func(context.Context) (any, error)) (any, error),
) grpc.ServerOption {
	return grpc.ChainUnaryInterceptor(func(
		ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler,
	) (any, error) {
		return f(ctx, info.FullMethod, func(ctx context.Context) (any, error) { return handler(ctx, req) })
	})
}

// look returns a policy that appends the result of each call to results.
func look(results *[]error) resilience.Middleware {
	return func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error {
			err := next(ctx)
			*results = append(*results, err)
			return err
		}
	}
}

// counts returns a policy that counts its calls.
func counts(n *int) resilience.Middleware {
	return func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error { *n++; return next(ctx) }
	}
}

// recovers is a policy that makes an error of a panic.
func recovers(next resilience.Func) resilience.Func {
	return func(ctx context.Context) (err error) {
		defer func() {
			if p := recover(); p != nil {
				err = fmt.Errorf("recovered: %v", p)
			}
		}()
		return next(ctx)
	}
}

// A gauge counts calls that run at the same time.
type gauge struct{ now, most atomic.Int64 }

func (g *gauge) enter() (leave func()) {
	now := g.now.Add(1)
	for most := g.most.Load(); now > most && !g.most.CompareAndSwap(most, now); most = g.most.Load() {
	}
	return func() { g.now.Add(-1) }
}

// noLeaks fails the test if goroutines of this package or of gRPC's streams are left at its end.
func noLeaks(t *testing.T) {
	t.Helper()
	t.Cleanup(func() {
		var left string
		require.Eventually(t, func() bool {
			buf := make([]byte, 1<<22)
			left = ""
			for _, g := range strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
				if strings.Contains(g, "resilience/resiliencegrpc.") || strings.Contains(g, "grpc.newClientStreamWithParams") {
					left += g + "\n\n"
				}
			}
			return left == ""
		}, time.Minute, 5*time.Millisecond, "goroutines are left")
		require.Empty(t, left)
	})
}

// twice returns a retrier with two attempts that does not wait.
func twice() *retry.Retrier {
	return retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(0)})
}

// opensAtOnce returns a breaker that opens at the first failure.
func opensAtOnce() *breaker.Breaker {
	return breaker.New(breaker.Config{Name: "users", ConsecutiveFailures: 1})
}

func requireCode(t testing.TB, code codes.Code, err error) {
	t.Helper()
	require.Equal(t, code, status.Code(err), "%v", err)
}

var hello = &testpb.Message{Text: "hello"}

func retryInfo(after time.Duration) *errdetails.RetryInfo {
	return &errdetails.RetryInfo{RetryDelay: durationpb.New(after)}
}
