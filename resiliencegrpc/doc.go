// Package resiliencegrpc provides interceptors for gRPC clients and servers. The interceptors run calls under the
// policies of this module.
//
// # Clients
//
// Build the policies once, and share them among all calls to a service:
//
//	retries := retry.New(retry.Config{
//		Name:     "users",
//		Attempts: 4,
//		Backoff:  retry.Exponential(100*time.Millisecond, 2*time.Second),
//		MinDelay: 50 * time.Millisecond,
//		Budget:   retry.NewBudget(retry.BudgetConfig{Name: "users"}),
//	})
//	users := breaker.New(breaker.Config{
//		Name:                "users",
//		ConsecutiveFailures: 25,
//		FailureRate:         0.5,
//		Window:              10 * time.Second,
//		OpenFor:             900 * time.Millisecond,
//		MaxRetryAfter:       30 * time.Second,
//	})
//	slots := bulkhead.New(bulkhead.Config{Name: "users", Limit: 100, MaxWait: time.Second})
//	client := resiliencegrpc.Client{
//		Middleware: resilience.Chain(
//			retries.Wrap,
//			users.Wrap,
//			slots.Wrap,
//			resilience.Timeout(10*time.Second), // of each attempt
//		),
//	}
//	conn, err := grpc.NewClient(addr, append(client.DialOptions(), creds)...)
//
// The settings in this example are a good start. While the server is down, the breaker is open and the
// process sends about one call per second. After the server has recovered, calls succeed again within about a
// second. With a longer OpenFor, more calls would usually fail because of the open breaker than because of
// the fault itself. docs/BENCHMARKS.md shows the share of calls that succeed with these settings under common
// faults.
//
// A [Client] follows these rules:
//
//   - A call is repeated if its method is safe to repeat: the method's idempotency_level in the .proto file
//     is NO_SIDE_EFFECTS or IDEMPOTENT, or Client.Replayable returns true for the method. If a method is
//     not safe to repeat, its call is retried only if the first attempt was certainly never sent.
//   - Retriers retry a call that failed with UNAVAILABLE. After any other status, such as RESOURCE_EXHAUSTED,
//     retriers retry a call only if the server specifies when to retry. See [StatusError].
//   - The policies guard the opening of a stream. An open stream is not repeated. The status with which the
//     stream ends is the stream's result. Client.StreamSlots and Client.Idle limit open streams. If a stream
//     fails in a way that its status does not show, [ReportFailure] reports the failure to the policies.
//   - As gRPC itself requires, the caller of a stream must call RecvMsg until it returns an error or io.EOF,
//     or must cancel the ctx.
//   - Health checks bypass the policies: see Client.Exempt.
//   - Retries that a gRPC service config specifies are disabled, because otherwise gRPC would retry each
//     attempt of a retrier several times.
//
// # Servers
//
//	server := grpc.NewServer(resiliencegrpc.Server{
//		Limit: tenants, // a *throttle.Group[string] with a limit for each client address
//		Slots: slots,
//	}.Options()...)
//
// A [Server] refuses a call with RESOURCE_EXHAUSTED if a limit is used up, and with UNAVAILABLE if there is no
// capacity. If the policy that refused the call specifies when to retry, the client receives this time. The time
// is in a RetryInfo detail of the status and in the trailer grpc-retry-pushback-ms. A client cannot choose the
// priority of its calls, or the client address to which a limit applies: only a trusted proxy can specify the
// client address.
//
// # Errors
//
// The error that a policy returns has a gRPC status, which [google.golang.org/grpc/status.FromError] returns.
// The error with the status still matches the policy's own error: for example, errors.Is(err,
// breaker.ErrOpen) works.
//
// References: gRFC A6, "gRPC Retry Design", specifies the trailer grpc-retry-pushback-ms, and which calls may
// be retried. RetryInfo is the message google.rpc.RetryInfo in error_details.proto.
//
// # Stability
//
// This package is unstable until version 1.0.0: a minor version may change it.
package resiliencegrpc
