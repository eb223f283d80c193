// Package sagagrpc sends the commands of a saga's steps by gRPC, and tells the participant's
// handler the command, for [saga.Apply].
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

// The ErrorInfo of a command that was refused for good.
const (
	infoDomain   = "github.com/go-resilience/resilience/saga"
	infoDeclined = "COMMAND_DECLINED"
)

// Send calls send, which makes an RPC, as the command of the saga's step whose ctx
// it is given, and returns what the answer means to the step, as [Result] does.
//
//	Do: func(ctx context.Context, s *Trip) error {
//		return sagagrpc.Send(ctx, func(ctx context.Context) (err error) {
//			s.Booking, err = hotels.Book(ctx, s.request())
//			return err
//		})
//	},
//
// The metadata idempotency-key gets the id of the command, unless ctx has one: a server that
// applies each key once, such as by [Context] and [saga.Apply], is safe from
// repetition. gRPC sends printable ASCII alone, so the id of the saga and the names of its
// steps must be that.
//
// Let the saga alone try again: behind a retryPolicy of gRPC, or a retrier of a step whose
// Attempts is 1, a server that declines what was sent again seems to have declined it all.
func Send(ctx context.Context, send func(context.Context) error) error {
	out := ctx
	sent, _ := metadata.FromOutgoingContext(ctx)
	if id := saga.CommandFrom(ctx).ID; id != "" && len(sent.Get(idempotencyKey)) == 0 {
		out = metadata.AppendToOutgoingContext(ctx, idempotencyKey, id)
	}
	return Result(ctx, send(out))
}

// Result returns the error of an RPC as the error of the saga's Do or Undo whose ctx it is
// given:
//
//   - A status with an ErrorInfo of the reason COMMAND_DECLINED and the domain
//     github.com/go-resilience/resilience/saga is a [saga.Declined]: the server declined every
//     attempt of this command, and has recorded that.
//   - NotFound is nil in an Undo: there is nothing to undo.
//   - InvalidArgument, NotFound, PermissionDenied, Unauthenticated, FailedPrecondition,
//     OutOfRange, Unimplemented, AlreadyExists and DataLoss are a [saga.Permanent]: the step may
//     have taken effect.
//   - Any other error is returned as it is. A refusal of a policy remains one: the attempt
//     was not made. After any other error the step is in doubt and is tried again.
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

// Context returns the ctx of an RPC's handler with the command of [Send],
// for [saga.Apply]. The error has the code InvalidArgument, if the
// metadata has no id of a command.
func Context(ctx context.Context) (context.Context, error) {
	keys := metadata.ValueFromIncomingContext(ctx, idempotencyKey)
	if len(keys) == 1 {
		if cmd := (saga.Command{ID: keys[0]}); cmd.DoID() != "" {
			return saga.WithCommand(ctx, cmd), nil
		}
	}
	return ctx, status.Error(codes.InvalidArgument, "the metadata idempotency-key must be the id of a command")
}

// Error returns the result of [saga.Apply] as a handler answers it, so that
// [Result] reads it. An answer ([saga.Permanent], resilience.Answer) has the
// code FailedPrecondition, unless it has a code of its own. A [saga.Declined], also that of a
// Do that comes after its Undo, has the ErrorInfo of one, too. Any other error, such as an
// answer with Retryable() true, is returned as it is.
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
