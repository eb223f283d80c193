// Package sagagrpc sends the commands of a saga's steps over gRPC, and passes each command to the participant's
// handler for [saga.Apply].
package sagagrpc

import (
	"context"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/saga"
)

const idempotencyKey = "idempotency-key"

// The ErrorInfo of a declined command.
const (
	infoDomain   = "github.com/go-resilience/resilience/saga"
	infoDeclined = "COMMAND_DECLINED"
)

// Send calls send, which sends an RPC as the command of a saga's step, and returns the result as [Result] does. ctx is
// the ctx of the step.
//
//	Do: func(ctx context.Context, s *Trip) error {
//		return sagagrpc.Send(ctx, func(ctx context.Context) (err error) {
//			s.Booking, err = hotels.Book(ctx, s.request())
//			return err
//		})
//	},
//
// Send sets the metadata idempotency-key to the command ID unless ctx has one. A server that applies each key once,
// by [Context] and [saga.Apply] for example, is safe from repetition. gRPC sends printable ASCII only, so the saga's
// ID and the names of its steps must be printable ASCII.
//
// Only the saga should retry. With a retryPolicy of gRPC, or a retrier around a step whose Attempts is 1, a server that
// declines the second request appears to have declined the first one too.
func Send(ctx context.Context, send func(context.Context) error) error {
	out := ctx
	sent, _ := metadata.FromOutgoingContext(ctx)
	if id := saga.CommandFrom(ctx).ID; id != "" && len(sent.Get(idempotencyKey)) == 0 {
		out = metadata.AppendToOutgoingContext(ctx, idempotencyKey, id)
	}
	return Result(ctx, send(out))
}

// Result returns the error of an RPC as the error of a saga's Do or Undo. ctx is the ctx of the step.
//
//   - A status with an ErrorInfo of the reason COMMAND_DECLINED and the domain
//     github.com/go-resilience/resilience/saga is a [saga.Declined]: the server declined every attempt of this command
//     and has recorded that.
//   - NotFound is nil in an Undo: there is nothing to undo.
//   - InvalidArgument, NotFound, PermissionDenied, Unauthenticated, FailedPrecondition, OutOfRange, Unimplemented,
//     AlreadyExists and DataLoss are a [saga.Permanent]: the step may have taken effect.
//   - Any other error is returned unchanged. It may be a refusal of a policy. After any other error, the step may have
//     taken effect and is retried.
func Result(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if resilience.Refused(err) {
		return err
	}
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok && info.Reason == infoDeclined && info.Domain == infoDomain {
			return saga.Declined(err)
		}
	}
	switch status.Code(err) {
	case codes.NotFound:
		cmd := saga.CommandFrom(ctx)
		if do := cmd.DoID(); do != "" && do != cmd.ID {
			return nil
		}
		return saga.Permanent(err)
	case codes.InvalidArgument, codes.PermissionDenied, codes.Unauthenticated, codes.FailedPrecondition,
		codes.OutOfRange, codes.Unimplemented, codes.AlreadyExists, codes.DataLoss:
		return saga.Permanent(err)
	}
	return err
}

// Context returns the ctx of an RPC's handler with the command from [Send], for [saga.Apply]. If the metadata has no
// command ID, it returns an error with the code InvalidArgument.
func Context(ctx context.Context) (context.Context, error) {
	keys := metadata.ValueFromIncomingContext(ctx, idempotencyKey)
	if len(keys) == 1 {
		if cmd := (saga.Command{ID: keys[0]}); cmd.DoID() != "" {
			return saga.WithCommand(ctx, cmd), nil
		}
	}
	return ctx, status.Error(codes.InvalidArgument, "the metadata idempotency-key must be the id of a command")
}

// Error converts the result of [saga.Apply] to the error of a handler, which [Result] decodes. An answer
// ([saga.Permanent], resilience.Answer) gets the code FailedPrecondition, unless it has its own code. A
// [saga.Declined], including the error of a Do that arrives after its Undo, also gets the ErrorInfo. Any other error,
// such as an answer with Retryable() true, is returned unchanged.
func Error(err error) error {
	if !resilience.Answered(err) || resilience.Retryable(err) {
		return err
	}
	st, is := status.Convert(err), saga.IsDeclined(err)
	if st.Code() == codes.Unknown {
		st = status.New(codes.FailedPrecondition, err.Error())
	} else if !is {
		return err
	}
	if is {
		if with, err := st.WithDetails(&errdetails.ErrorInfo{Reason: infoDeclined, Domain: infoDomain}); err == nil {
			st = with
		}
	}
	return st.Err()
}
