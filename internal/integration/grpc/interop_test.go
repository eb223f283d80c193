// Package grpc_test runs grpc-go's interoperability tests under the policies of resiliencegrpc, on the client and on
// the server.
package grpc_test

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/interop"
	testpb "google.golang.org/grpc/interop/grpc_testing"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencegrpc"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

// TestInterop runs each test that needs no credentials. A test that fails logs the reason and exits the program
// (grpclog's Fatal).
func TestInterop(t *testing.T) {
	plenty := throttle.GroupConfig[string]{Config: throttle.Config{Rate: 1e6, Burst: 1e6}}
	served := bulkhead.New(bulkhead.Config{Limit: 100})
	streams := bulkhead.New(bulkhead.Config{Limit: 100})
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := grpc.NewServer(resiliencegrpc.Server{
		Limit:       throttle.NewGroup(plenty),
		Slots:       served,
		StreamSlots: streams,
		Middleware: resilience.Chain(
			breaker.New(breaker.Config{ConsecutiveFailures: 100}).Wrap,
			resilience.Timeout(time.Minute),
		),
	}.Options()...)
	testpb.RegisterTestServiceServer(server, interop.NewTestServer())
	go func() { _ = server.Serve(lis) }()
	defer server.Stop()

	slots, open := bulkhead.New(bulkhead.Config{Limit: 100}), bulkhead.New(bulkhead.Config{Limit: 100})
	conn, err := grpc.NewClient(lis.Addr().String(), append(resiliencegrpc.Client{
		Middleware: resilience.Chain(
			retry.New(retry.Config{Attempts: 3}).Wrap,
			breaker.New(breaker.Config{ConsecutiveFailures: 100}).Wrap,
			slots.Wrap,
			resilience.Timeout(time.Minute),
		),
		Replayable:  func(context.Context, string) bool { return true },
		StreamSlots: open,
		Idle:        time.Minute,
	}.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	client := testpb.NewTestServiceClient(conn)

	type test func(context.Context, testpb.TestServiceClient, ...grpc.CallOption)
	for name, run := range map[string]test{
		"empty unary":                 interop.DoEmptyUnaryCall,
		"large unary":                 interop.DoLargeUnaryCall,
		"client streaming":            interop.DoClientStreaming,
		"server streaming":            interop.DoServerStreaming,
		"ping pong":                   interop.DoPingPong,
		"empty stream":                interop.DoEmptyStream,
		"timeout on sleeping server":  interop.DoTimeoutOnSleepingServer,
		"cancel after begin":          interop.DoCancelAfterBegin,
		"cancel after first response": interop.DoCancelAfterFirstResponse,
		"custom metadata":             interop.DoCustomMetadata,
		"status code and message":     interop.DoStatusCodeAndMessage,
		"special status message":      interop.DoSpecialStatusMessage,
	} {
		t.Run(name, func(t *testing.T) { run(t.Context(), client) })
	}
	t.Run("unimplemented service", func(t *testing.T) {
		interop.DoUnimplementedService(t.Context(), testpb.NewUnimplementedServiceClient(conn))
	})
	t.Run("unimplemented method", func(t *testing.T) { interop.DoUnimplementedMethod(t.Context(), conn) })

	for _, b := range []*bulkhead.Bulkhead{slots, open, served, streams} {
		require.Positive(t, b.Stats().Admitted)
		require.Eventually(t, func() bool { return b.Stats().InFlight == 0 }, time.Minute, time.Millisecond)
	}
}
