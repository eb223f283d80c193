// Package resiliencegrpc brings the policies of this module to gRPC, on the client and
// on the server.
//
//	conn, err := grpc.NewClient(addr, append(resiliencegrpc.Client{
//		Middleware: resilience.Chain(
//			retries.Wrap,                      // *retry.Retrier
//			circuit.Wrap,                      // *breaker.Breaker
//			slots.Wrap,                        // *bulkhead.Bulkhead
//			resilience.Timeout(2*time.Second), // of each attempt
//		),
//	}.DialOptions(), creds)...)
//
//	server := grpc.NewServer(resiliencegrpc.Server{
//		Limit: tenants, // *throttle.Group[string], by the peer's address
//		Slots: slots,
//	}.Options()...)
//
// A user of [Client] must know:
//
//   - Only what may be repeated is repeated: methods whose idempotency_level in the
//     .proto file is NO_SIDE_EFFECTS or IDEMPOTENT, and what Client.Replayable adds. Any
//     other call is retried only if it was certainly never sent.
//   - UNAVAILABLE is worth another attempt. RESOURCE_EXHAUSTED and every other status is
//     so only if the server says when to come back: see [StatusError].
//   - A stream is guarded until it is open, and is not repeated then. It holds no slot while
//     it is open. Its status is its result, for a breaker and what else asks for it. As
//     always with gRPC, the caller receives until RecvMsg has returned an error or io.EOF,
//     or ends the ctx.
//   - The retries of a service config are switched off, because they would multiply
//     with those of a retrier.
//
// A server refuses a call with RESOURCE_EXHAUSTED if a limit is used up, and with
// UNAVAILABLE if there is no capacity. A RetryInfo detail and grpc-retry-pushback-ms say when
// to come back, if that is known. A call cannot choose its own priority, nor the address
// that it is limited by: only a trusted proxy can tell that.
//
// An error of a policy has a status: [google.golang.org/grpc/status.FromError]
// understands it, and errors.Is(err, breaker.ErrOpen) holds.
//
// Which calls may be retried, and what grpc-retry-pushback-ms means, is gRFC A6, "gRPC
// Retry Design"; RetryInfo is google.rpc.RetryInfo of error_details.proto.
package resiliencegrpc
