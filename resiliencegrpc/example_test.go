package resiliencegrpc_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencegrpc"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

// A service whose methods do not declare that they may be repeated: the program says so.
func ExampleClient() {
	addr, stop := healthServer(failing(2))
	defer stop()

	retries := retry.New(retry.Config{Attempts: 3, Backoff: retry.Constant(0)})
	circuit := breaker.New(breaker.Config{Name: "health", ConsecutiveFailures: 5})
	conn, err := grpc.NewClient(addr, append(resiliencegrpc.Client{
		Middleware: resilience.Chain(retries.Wrap, circuit.Wrap, resilience.Timeout(5*time.Second)),
		Replayable: func(_ context.Context, method string) bool {
			return resiliencegrpc.Idempotent(method) || method == healthpb.Health_Check_FullMethodName
		},
		Exempt: func(string) bool { return false }, // otherwise health checks would pass without policies
	}.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = conn.Close() }()

	resp, err := healthpb.NewHealthClient(conn).Check(context.Background(), &healthpb.HealthCheckRequest{})
	fmt.Println(resp.GetStatus(), err, "retried:", retries.Stats().Retried)

	circuit.ForceOpen(nil)
	_, err = healthpb.NewHealthClient(conn).Check(context.Background(), &healthpb.HealthCheckRequest{})
	fmt.Println(errors.Is(err, breaker.ErrOpen), status.Code(err))
	// Output:
	// SERVING <nil> retried: 2
	// true Unavailable
}

// A stream holds a slot while it is opened, and none while it is open.
func ExampleClient_stream() {
	addr, stop := healthServer(failing(0))
	defer stop()

	slots := bulkhead.New(bulkhead.Config{Name: "health", Limit: 1})
	conn, err := grpc.NewClient(addr, append(resiliencegrpc.Client{Middleware: slots.Wrap}.DialOptions(),
		grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = conn.Close() }()

	ctx, cancel := context.WithCancel(context.Background())
	defer cancel() // for a stream that is left before its end
	watch, err := healthpb.NewHealthClient(conn).Watch(ctx, &healthpb.HealthCheckRequest{})
	for err == nil {
		var resp *healthpb.HealthCheckResponse
		if resp, err = watch.Recv(); err == nil {
			fmt.Println(resp.GetStatus(), slots.Stats().InFlight)
		}
	}
	fmt.Println(err == io.EOF, slots.Stats().InFlight)
	// Output:
	// SERVING 0
	// true 0
}

// A client that is over its limit learns when to come back.
func ExampleServer() {
	addr, stop := healthServer(failing(0), resiliencegrpc.Server{
		Limit:  throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Rate: 0.1, Burst: 1}}),
		Key:    resiliencegrpc.ClientIP(),
		Slots:  bulkhead.New(bulkhead.Config{Limit: 64}),
		Exempt: func(string) bool { return false }, // for this example, not even health checks
	}.Options()...)
	defer stop()

	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = conn.Close() }()
	for range 2 {
		_, err := healthpb.NewHealthClient(conn).Check(context.Background(), &healthpb.HealthCheckRequest{})
		st := status.Convert(err)
		fmt.Println(st.Code(), len(st.Details())) // a RetryInfo
	}
	// Output:
	// OK 0
	// ResourceExhausted 1
}

// healthServer serves h on loopback.
func healthServer(h healthpb.HealthServer, opts ...grpc.ServerOption) (addr string, stop func()) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	server := grpc.NewServer(opts...)
	healthpb.RegisterHealthServer(server, h)
	go func() { _ = server.Serve(lis) }()
	return lis.Addr().String(), server.Stop
}

// failing is a health service that is unavailable for the first n calls.
func failing(n int) healthpb.HealthServer { return &unsteady{fail: n} }

type unsteady struct {
	healthpb.UnimplementedHealthServer
	fail int
}

func (u *unsteady) Check(context.Context, *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	if u.fail--; u.fail >= 0 {
		return nil, status.Error(codes.Unavailable, "starting")
	}
	return &healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_SERVING}, nil
}

func (u *unsteady) Watch(_ *healthpb.HealthCheckRequest, s grpc.ServerStreamingServer[healthpb.HealthCheckResponse]) error {
	return s.Send(&healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_SERVING})
}
