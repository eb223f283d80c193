package benchmarks

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/failsafe-go/failsafe-go/failsafegrpc"
	middleware "github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/retry"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/go-resilience/resilience/resiliencegrpc"
	"github.com/go-resilience/resilience/retry"
)

func BenchmarkGRPC(b *testing.B) { benchmark(b, grpcCases) }

var grpcCases = []comparison{
	{"unary-ok", checkers(nil)},
	{"interceptor-alone", checkers([]grpc.DialOption{grpc.WithChainUnaryInterceptor(answersAtOnce)})},
}

// checkers are clients that call a health service on loopback, which answers, through an
// interceptor that would retry. With answersAtOnce innermost, nothing is sent, and what
// remains is what the interceptor costs.
func checkers(inner []grpc.DialOption) []impl {
	check := func(outer ...grpc.DialOption) func(*testing.B) {
		return func(b *testing.B) { checkHealth(b, append(outer, inner...)) }
	}
	return []impl{
		{"resilience", check(resiliencegrpc.Client{
			Middleware: retry.New(retry.Config{Attempts: 3}).Wrap,
			Exempt:     func(string) bool { return false }, // the calls are health checks
		}.DialOptions()...)},
		{"failsafe", check(grpc.WithChainUnaryInterceptor(
			failsafegrpc.NewUnaryClientInterceptor[*healthpb.HealthCheckResponse](
				failsafegrpc.NewRetryPolicyBuilder[*healthpb.HealthCheckResponse]().WithMaxRetries(2).Build(),
			)))},
		{"go-grpc-middleware", check(grpc.WithChainUnaryInterceptor(middleware.UnaryClientInterceptor(
			middleware.WithMax(3), middleware.WithBackoff(middleware.BackoffLinear(100*time.Millisecond)),
		)))},
		{"plain", check()},
	}
}

func checkHealth(b *testing.B, opts []grpc.DialOption) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	server := grpc.NewServer()
	healthpb.RegisterHealthServer(server, health.NewServer())
	go func() { _ = server.Serve(lis) }()
	defer server.Stop()
	conn, err := grpc.NewClient(lis.Addr().String(),
		append(opts, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	client := healthpb.NewHealthClient(conn)
	ctx, req := context.Background(), &healthpb.HealthCheckRequest{}
	for b.Loop() {
		if _, err := client.Check(ctx, req); err != nil {
			b.Fatal(err)
		}
	}
}

func answersAtOnce(context.Context, string, any, any, *grpc.ClientConn, grpc.UnaryInvoker, ...grpc.CallOption) error {
	return nil
}
