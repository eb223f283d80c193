// Package resiliencegrpc provides interceptors that run the calls of a gRPC client and of a gRPC server under the
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
// These settings are a good start. While the server is down, the process sends about one call a second. When the
// server is up again, calls pass after about a second. A breaker that opens for longer loses more calls than most
// faults do. docs/BENCHMARKS.md has the share of calls that these settings answer under common faults.
//
// A [Client] has the following rules:
//
//   - A call is repeated only if it may be repeated: its idempotency_level in the .proto file is NO_SIDE_EFFECTS or
//     IDEMPOTENT, or Client.Replayable returns true. Any other call is retried only if it was certainly never sent.
//   - UNAVAILABLE is worth another attempt. RESOURCE_EXHAUSTED and every other status are worth another attempt only
//     if the server specifies when to retry: see [StatusError].
//   - The policies guard a stream until it is open. An open stream is not repeated, and its status is its result.
//     Client.StreamSlots and Client.Idle limit open streams. [ReportFailure] reports that a stream has failed
//     although its status does not show it.
//   - The caller of a stream must receive until RecvMsg returns an error or io.EOF, or must cancel the ctx. gRPC
//     itself requires this.
//   - Health checks pass without policies: see Client.Exempt.
//   - The retries of a service config are disabled. They would multiply with those of a retrier.
//
// # Servers
//
//	server := grpc.NewServer(resiliencegrpc.Server{
//		Limit: tenants, // a *throttle.Group[string] with a limit for each client address
//		Slots: slots,
//	}.Options()...)
//
// A [Server] refuses a call with RESOURCE_EXHAUSTED if a limit is used up, and with UNAVAILABLE if there is no
// capacity. If it is known when a retry can succeed, the status has a RetryInfo detail, and the trailer
// grpc-retry-pushback-ms has the same time. A client cannot choose the priority of its calls, nor the address to which
// limits apply. Only a trusted proxy can specify that address.
//
// # Errors
//
// The error of a policy has a status: [google.golang.org/grpc/status.FromError] returns it. errors.Is also
// works: errors.Is(err, breaker.ErrOpen), for example.
//
// References: gRFC A6, "gRPC Retry Design", specifies which calls may be retried, and grpc-retry-pushback-ms.
// RetryInfo is google.rpc.RetryInfo of error_details.proto.
package resiliencegrpc
