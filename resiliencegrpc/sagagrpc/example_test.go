package sagagrpc_test

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/go-resilience/resilience/resiliencegrpc/sagagrpc"
	"github.com/go-resilience/resilience/saga"
)

// A step sends its command. All attempts have the same idempotency-key.
func ExampleSend() {
	book := func(ctx context.Context) error { // a program calls hotels.Book(ctx, request)
		md, _ := metadata.FromOutgoingContext(ctx)
		fmt.Println(md.Get("idempotency-key"))
		return nil
	}
	// In a Do, ctx has the command of the step.
	ctx := saga.WithCommand(context.Background(), saga.Command{ID: "trip-17/hotel/do"})
	fmt.Println(sagagrpc.Send(ctx, book))
	// Output:
	// [trip-17/hotel/do]
	// <nil>
}

// A handler applies the command of the RPC once, with saga.Apply.
func ExampleContext() {
	md := metadata.Pairs("idempotency-key", "trip-17/hotel/do")
	ctx, err := sagagrpc.Context(metadata.NewIncomingContext(context.Background(), md))
	fmt.Println(saga.CommandFrom(ctx).ID, err)
	_, err = sagagrpc.Context(context.Background())
	fmt.Println(status.Code(err))
	// Output:
	// trip-17/hotel/do <nil>
	// InvalidArgument
}

// Error encodes a Declined on the server, and Result decodes it on the client.
func ExampleError() {
	full := saga.Declined(errors.New("hotel full")) // from saga.Apply
	err := sagagrpc.Error(full)
	fmt.Println(status.Code(err))
	fmt.Println(saga.IsDeclined(sagagrpc.Result(context.Background(), err)))
	// Output:
	// FailedPrecondition
	// true
}

// A code becomes the error of a Do. An outage is retried. An invalid request is not retried.
func ExampleResult() {
	for _, code := range []codes.Code{codes.Unavailable, codes.InvalidArgument} {
		err := sagagrpc.Result(context.Background(), status.Error(code, "no"))
		fmt.Println(err, saga.IsDeclined(err))
	}
	// Output:
	// rpc error: code = Unavailable desc = no false
	// rpc error: code = InvalidArgument desc = no false
}
