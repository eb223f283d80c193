// Package sagagrpc sends the commands of a saga's steps over gRPC. On the server, which is called the
// participant, the package passes the command to the RPC's handler, which calls [saga.Apply].
//
// # Stability
//
// This package is unstable until version 1.0.0: a minor version may change it.
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

// Send calls the function send, which must send one RPC, and converts the error of send with [Result]. Send
// marks the RPC as the command of a saga's step. ctx is the ctx of the step's Do or Undo.
//
//	Do: func(ctx context.Context, s *Trip) error {
//		return sagagrpc.Send(ctx, func(ctx context.Context) (err error) {
//			s.Booking, err = hotels.Book(ctx, s.request())
//			return err
//		})
//	},
//
// Send sets the metadata idempotency-key to the command ID, unless ctx already has this metadata. A server
// that applies each key only once, with [Context] and [saga.Apply] for example, tolerates repeated commands.
// gRPC sends only printable ASCII in metadata, so the saga's ID and the names of its steps must be printable
// ASCII.
//
// Only the saga should retry the RPC. Do not use a retryPolicy of gRPC. If the Attempts of a step is 1, do
// not use a retrier around the step, either. If anything other than the saga retries the RPC, the saga sees
// only the last response. If the server declined only the second request, the saga would conclude that the
// server also declined the first request. But the first request may have taken effect.
func Send(ctx context.Context, send func(context.Context) error) error {
	out := ctx
	sent, _ := metadata.FromOutgoingContext(ctx)
	if id := saga.CommandFrom(ctx).ID; id != "" && len(sent.Get(idempotencyKey)) == 0 {
		out = metadata.AppendToOutgoingContext(ctx, idempotencyKey, id)
	}
	return Result(ctx, send(out))
}

// Result converts the error of an RPC to the error that a step's Do or Undo must return. ctx is the ctx of
// the step.
//
//   - A status becomes a [saga.Declined] if it has an ErrorInfo with the reason COMMAND_DECLINED and the
//     domain github.com/go-resilience/resilience/saga. The server has then declined this command and has
//     recorded the decision, so no attempt of the command takes effect.
//   - In an Undo, NotFound becomes nil, because there is nothing to undo.
//   - InvalidArgument, NotFound, PermissionDenied, Unauthenticated, FailedPrecondition, OutOfRange,
//     Unimplemented, AlreadyExists and DataLoss become a [saga.Permanent]: the step is not retried, but may
//     have taken effect.
//   - Any other error is returned unchanged. If a policy refused the call, the step has not taken effect. After any
//     other unchanged error, the step may have taken effect. The step is then retried, unless the error is an answer;
//     see [saga.Permanent].
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

// Context reads the command that [Send] has added to an RPC. Context returns ctx with the command, for
// [saga.Apply]. ctx must be the ctx of the RPC's handler. If the metadata has no valid command ID, Context
// returns an error with the code InvalidArgument.
func Context(ctx context.Context) (context.Context, error) {
	keys := metadata.ValueFromIncomingContext(ctx, idempotencyKey)
	if len(keys) == 1 {
		if cmd := (saga.Command{ID: keys[0]}); cmd.DoID() != "" {
			return saga.WithCommand(ctx, cmd), nil
		}
	}
	return ctx, status.Error(codes.InvalidArgument, "the metadata idempotency-key must be the id of a command")
}

// Error converts the error of [saga.Apply] to the error that the RPC's handler must return. [Result] decodes
// the returned error on the client. The error of a [saga.Permanent] or a resilience.Answer gets the code
// FailedPrecondition, unless it already has a code. A [saga.Declined] gets its code by the same rule, and
// also an ErrorInfo, by which Result recognizes the Declined. Apply returns a Declined error, for example,
// for a Do that arrives after its Undo. Any other error, such as an answer whose Retryable method returns
// true, is returned unchanged.
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
