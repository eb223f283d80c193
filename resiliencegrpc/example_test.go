package resiliencegrpc_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencegrpc"
	"github.com/go-resilience/resilience/resiliencegrpc/internal/testpb"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

// The settings are those that the package documentation recommends. The server rejects the first two calls.
func ExampleClient() {
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
	client, stop := newUsers(&server{rejects: 2}, resiliencegrpc.Client{
		Middleware: resilience.Chain(retries.Wrap, users.Wrap, slots.Wrap, resilience.Timeout(10*time.Second)),
	})
	defer stop()

	user, err := client.Get(context.Background(), &testpb.Message{Text: "Ada"})
	fmt.Println(user.GetText(), err, "retried:", retries.Stats().Retried)

	users.ForceOpen(errors.New("maintenance"))
	_, err = client.Get(context.Background(), &testpb.Message{Text: "Ada"})
	fmt.Println(errors.Is(err, breaker.ErrOpen), status.Code(err))
	// Output:
	// Ada <nil> retried: 2
	// true Unavailable
}

// A stream holds a slot of StreamSlots until it ends. If the server is silent for Idle, the stream fails.
func ExampleClient_streams() {
	streams := bulkhead.New(bulkhead.Config{Name: "users", Limit: 100})
	client, stop := newUsers(&server{}, resiliencegrpc.Client{
		StreamSlots: streams,
		Idle:        time.Minute,
	})
	defer stop()

	ctx, cancel := context.WithCancel(context.Background())
	defer cancel() // ends the stream if the loop is left early
	list, err := client.List(ctx, &testpb.Message{Text: "Ada"})
	for err == nil {
		var user *testpb.Message
		if user, err = list.Recv(); err == nil {
			fmt.Println(user.GetText(), "streams:", streams.Stats().InFlight)
		}
	}
	fmt.Println(err, "streams:", streams.Stats().InFlight)
	// Output:
	// Ada streams: 1
	// EOF streams: 0
}

// Interceptors that the program adds before the options of the Client are called once for each call.
func ExampleClient_DialOptions() {
	retries := retry.New(retry.Config{Backoff: retry.Constant(0)})
	policies := resiliencegrpc.Client{Middleware: retries.Wrap}
	outer, inner := 0, 0
	opts := []grpc.DialOption{grpc.WithChainUnaryInterceptor(counting(&outer))}
	opts = append(opts, policies.DialOptions()...)
	opts = append(opts, grpc.WithChainUnaryInterceptor(counting(&inner)))
	client, stop := newUsers(&server{rejects: 1}, resiliencegrpc.Client{}, opts...)
	defer stop()

	_, err := client.Get(context.Background(), &testpb.Message{Text: "Ada"})
	fmt.Println(err, "calls:", outer, "attempts:", inner)
	// Output: <nil> calls: 1 attempts: 2
}

// A watchdog finds that the messages of a stream are stale. The breaker would not notice that by itself.
func ExampleReportFailure() {
	users := breaker.New(breaker.Config{Name: "users", ConsecutiveFailures: 1})
	client, stop := newUsers(&server{silent: true}, resiliencegrpc.Client{Middleware: users.Wrap})
	defer stop()

	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	list, err := client.List(ctx, &testpb.Message{Text: "Ada, as of yesterday"})
	if err != nil {
		fmt.Println(err)
		return
	}
	if user, err := list.Recv(); err == nil {
		fmt.Println(resiliencegrpc.ReportFailure(list, errors.New("stale: "+user.GetText())))
		cancel() // ReportFailure does not end the stream
	}
	fmt.Println(users.State(), users.Stats().LastErr)
	// Output:
	// true
	// open stale: Ada, as of yesterday
}

// A method whose .proto file does not declare it idempotent may be declared so by the program.
func ExampleIdempotent() {
	replayable := func(_ context.Context, method string) bool {
		return resiliencegrpc.Idempotent(method) || method == testpb.Test_Create_FullMethodName
	}
	fmt.Println(resiliencegrpc.Idempotent(testpb.Test_Get_FullMethodName))
	fmt.Println(resiliencegrpc.Idempotent(testpb.Test_Create_FullMethodName))

	retries := retry.New(retry.Config{Backoff: retry.Constant(0)})
	client, stop := newUsers(&server{rejects: 1}, resiliencegrpc.Client{
		Middleware: retries.Wrap,
		Replayable: replayable,
	})
	defer stop()
	_, err := client.Create(context.Background(), &testpb.Message{Text: "Ada"})
	fmt.Println(err)
	// Output:
	// true
	// false
	// <nil>
}

// Each method has its own breaker.
func ExampleMethodOf() {
	breakers := resilience.NewGroup(func(method string) *breaker.Breaker {
		return breaker.New(breaker.Config{Name: method})
	}, resilience.GroupConfig{})
	client, stop := newUsers(&server{}, resiliencegrpc.Client{Middleware: breakers.By(resiliencegrpc.MethodOf)})
	defer stop()

	_, err := client.Get(context.Background(), &testpb.Message{Text: "Ada"})
	fmt.Println(err)
	for method, b := range breakers.All() {
		fmt.Println(method, b.State())
	}
	// Output:
	// <nil>
	// /resilience.testing.Test/Get closed
}

// A client that exceeds its limit receives the time after which to retry.
func ExampleServer() {
	limited := resiliencegrpc.Server{
		Limit: throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Rate: 0.1, Burst: 1}}),
		Key:   resiliencegrpc.ClientIP(),
		Slots: bulkhead.New(bulkhead.Config{Name: "server", Limit: 64}),
	}
	addr, stop := listen(&server{}, limited.Options()...)
	defer stop()
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = conn.Close() }()
	for range 2 {
		_, err := testpb.NewTestClient(conn).Get(context.Background(), &testpb.Message{Text: "Ada"})
		fmt.Println(status.Code(err), "RetryInfo:", len(status.Convert(err).Details()) == 1)
	}
	// Output:
	// OK RetryInfo: false
	// ResourceExhausted RetryInfo: true
}

// A server without a free slot refuses calls.
func ExampleServer_Options() {
	slots := bulkhead.New(bulkhead.Config{Name: "server", Limit: 1})
	addr, stop := listen(&server{}, resiliencegrpc.Server{Slots: slots}.Options()...)
	defer stop()
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = conn.Close() }()
	client := testpb.NewTestClient(conn)

	release, err := slots.Begin(context.Background()) // another call
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = client.Get(context.Background(), &testpb.Message{Text: "Ada"})
	fmt.Println(err)
	release(nil)
	_, err = client.Get(context.Background(), &testpb.Message{Text: "Ada"})
	fmt.Println(err)
	// Output:
	// rpc error: code = Unavailable desc = the server has no capacity for the call right now
	// <nil>
}

// Only the proxies in 10.0.0.0/8 may specify the address of a client.
func ExampleClientIP() {
	key := resiliencegrpc.ClientIP(netip.MustParsePrefix("10.0.0.0/8"))
	ctx := metadata.NewIncomingContext(context.Background(), metadata.Pairs("x-forwarded-for", "192.0.2.1"))
	for _, addr := range []string{"10.0.0.1:5000", "203.0.113.9:5000"} {
		remote := net.TCPAddrFromAddrPort(netip.MustParseAddrPort(addr))
		fmt.Println(key(peer.NewContext(ctx, &peer.Peer{Addr: remote})))
	}
	// Output:
	// 192.0.2.1
	// 203.0.113.9
}

// A server rejects its first calls. Its List sends the request back.
type server struct {
	testpb.UnimplementedTestServer
	rejects int  // number of calls to reject
	silent  bool // List does not end
}

func (s *server) Get(_ context.Context, m *testpb.Message) (*testpb.Message, error) {
	if s.rejects--; s.rejects >= 0 {
		return nil, status.Error(codes.Unavailable, "starting")
	}
	return m, nil
}

func (s *server) Create(ctx context.Context, m *testpb.Message) (*testpb.Message, error) {
	return s.Get(ctx, m)
}

func (s *server) List(m *testpb.Message, stream grpc.ServerStreamingServer[testpb.Message]) error {
	if err := stream.Send(m); err != nil {
		return err
	}
	if s.silent {
		<-stream.Context().Done()
	}
	return nil
}

// listen serves s on loopback.
func listen(s *server, opts ...grpc.ServerOption) (addr string, stop func()) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	g := grpc.NewServer(opts...)
	testpb.RegisterTestServer(g, s)
	go func() { _ = g.Serve(lis) }()
	return lis.Addr().String(), g.Stop
}

// newUsers serves s and returns a client with the policies and options.
func newUsers(s *server, policies resiliencegrpc.Client, opts ...grpc.DialOption) (testpb.TestClient, func()) {
	addr, stop := listen(s)
	opts = append(append(policies.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials())), opts...)
	conn, err := grpc.NewClient(addr, opts...)
	if err != nil {
		panic(err)
	}
	return testpb.NewTestClient(conn), func() { _ = conn.Close(); stop() }
}

// counting returns an interceptor that counts its calls.
func counting(n *int) grpc.UnaryClientInterceptor {
	return func(
		ctx context.Context, method string, req, reply any,
		cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption,
	) error {
		*n++
		return invoker(ctx, method, req, reply, cc, opts...)
	}
}
