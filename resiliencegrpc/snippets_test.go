package resiliencegrpc_test

import (
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/resiliencegrpc"
	"github.com/go-resilience/resilience/retry"
)

// The snippet of README.md, for the compiler: see TestSnippetsCompile. It is not run.
func _(retries *retry.Retrier, circuit *breaker.Breaker) (*grpc.ClientConn, error) {
	policies := resiliencegrpc.Client{Middleware: resilience.Chain(retries.Wrap, circuit.Wrap)}
	creds := grpc.WithTransportCredentials(insecure.NewCredentials())
	conn, err := grpc.NewClient("users:50051", append(policies.DialOptions(), creds)...)
	return conn, err
}
