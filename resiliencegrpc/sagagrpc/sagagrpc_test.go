package sagagrpc_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/resiliencegrpc/sagagrpc"
	"github.com/go-resilience/resilience/saga"
)

// TestSagaCommands answers the Do of a step with each code, and its Undo with NotFound, and checks what the saga
// does.
func TestSagaCommands(t *testing.T) {
	const (
		aborted = "aborted"          // immediately, undone
		doubted = "tried and undone" // three times, then undone
	)
	for code, want := range map[codes.Code]string{
		codes.InvalidArgument: aborted, codes.NotFound: aborted, codes.PermissionDenied: aborted,
		codes.Unauthenticated: aborted, codes.FailedPrecondition: aborted, codes.OutOfRange: aborted,
		codes.Unimplemented: aborted,
		codes.AlreadyExists: aborted, codes.DataLoss: aborted,
		codes.Canceled: doubted, codes.Unknown: doubted, codes.DeadlineExceeded: doubted, codes.ResourceExhausted: doubted,
		codes.Aborted: doubted, codes.Internal: doubted, codes.Unavailable: doubted,
	} {
		t.Run(code.String(), func(t *testing.T) {
			var keys []string
			send := func(code codes.Code) func(context.Context, *int) error {
				return func(ctx context.Context, _ *int) error {
					return sagagrpc.Send(ctx, func(ctx context.Context) error {
						md, _ := metadata.FromOutgoingContext(ctx)
						in, err := sagagrpc.Context(metadata.NewIncomingContext(context.Background(), md))
						require.NoError(t, err)
						keys = append(keys, saga.CommandFrom(in).ID[26:])
						return status.Error(code, "on purpose")
					})
				}
			}
			sg := &saga.Saga[int]{Name: "trip", Steps: []saga.Step[int]{
				{Name: "hotel", Do: send(code), Undo: send(codes.NotFound), Backoff: saga.Exponential(1, 1)},
			}}
			n := 0
			err := saga.Run(t.Context(), sg, &n)
			require.ErrorIs(t, err, saga.ErrCompensated)
			const do, undo = "/hotel/do", "/hotel/undo"
			require.Equal(t, map[string][]string{aborted: {do, undo}, doubted: {do, do, do, undo}}[want], keys)
		})
	}
	for _, id := range []string{"42", "orders/do"} { // of no Undo
		require.Error(t, sagagrpc.Result(saga.WithCommand(t.Context(), saga.Command{ID: id}),
			status.Error(codes.NotFound, "on purpose")))
	}
	require.NoError(t, sagagrpc.Result(t.Context(), nil))
	refused := fmt.Errorf("hotels: %w", breaker.ErrOpen)
	require.Equal(t, refused, sagagrpc.Result(t.Context(), refused))
}

func TestCommandNeedsKey(t *testing.T) {
	for _, md := range []metadata.MD{nil, metadata.Pairs("idempotency-key", "42"),
		metadata.Pairs("idempotency-key", "a/b/c/do", "idempotency-key", "a/b/d/do")} {
		_, err := sagagrpc.Context(metadata.NewIncomingContext(t.Context(), md))
		require.Equal(t, codes.InvalidArgument, status.Code(err))
	}
}

// lost is a retryable answer, like a deadlock error.
type lost struct{}

func (lost) Error() string   { return "lost" }
func (lost) Answered() bool  { return true }
func (lost) Retryable() bool { return true }

func TestErrorCode(t *testing.T) {
	for _, c := range []struct {
		err  error
		want codes.Code
	}{
		{nil, codes.OK},
		{saga.Permanent(errors.New("full")), codes.FailedPrecondition},
		{saga.Declined(errors.New("full")), codes.FailedPrecondition},
		{saga.Declined(status.Error(codes.NotFound, "no such hotel")), codes.NotFound},
		{saga.Permanent(status.Error(codes.NotFound, "no such hotel")), codes.NotFound},
		{errors.New("connection lost"), codes.Unknown},
		{lost{}, codes.Unknown},
		{saga.Permanent(lost{}), codes.FailedPrecondition},
	} {
		require.Equal(t, c.want, status.Code(sagagrpc.Error(c.err)))
	}
}

// TestDeclinedCrossesNetwork checks that a Declined error remains one over the network, and that no other error
// becomes one.
func TestDeclinedCrossesNetwork(t *testing.T) {
	other, err := status.New(codes.FailedPrecondition,
		"full").WithDetails(&errdetails.ErrorInfo{Reason: "COMMAND_DECLINED", Domain: "hotels.example"})
	require.NoError(t, err)
	for _, c := range []struct {
		err  error
		want bool
	}{
		{saga.Declined(errors.New("full")), true},
		{fmt.Errorf("hotels: %w", saga.Declined(status.Error(codes.NotFound, "no such hotel"))), true},
		{saga.Permanent(errors.New("full")), false},
		{errors.Join(saga.Declined(errors.New("full")), context.DeadlineExceeded), false},
		{other.Err(), false},
	} {
		sent := status.Convert(sagagrpc.Error(c.err)).Proto()
		require.Equal(t, c.want, saga.IsDeclined(sagagrpc.Result(t.Context(), status.FromProto(sent).Err())), "%v", c.err)
	}
}

// TestPivotDeclinedAfterLostReply loses the reply to the first attempt of a pivot. The second attempt is declined.
func TestPivotDeclinedAfterLostReply(t *testing.T) {
	undone, calls := 0, 0
	order := &saga.Saga[int]{Name: "order", Steps: []saga.Step[int]{{
		Name: "stock",
		Do:   func(context.Context, *int) error { return nil },
		Undo: func(context.Context, *int) error { undone++; return nil },
	}, {
		Name: "charge", Pivot: true, Backoff: saga.Exponential(1, 1),
		Do: func(ctx context.Context, _ *int) error {
			return sagagrpc.Send(ctx, func(context.Context) error {
				if calls++; calls == 1 {
					return status.Error(codes.Unavailable, "connection lost")
				}
				sent := status.Convert(sagagrpc.Error(saga.Declined(errors.New("declined")))).Proto()
				return status.FromProto(sent).Err()
			})
		},
	}}}
	require.ErrorIs(t, saga.Run(t.Context(), order, new(int)), saga.ErrCompensated)
	require.Equal(t, 2, calls)
	require.Equal(t, 1, undone)
}

// TestCommandIsSentWithOneKey checks that a key in the ctx is sent unchanged, as in sagahttp: a server accepts no
// command with two keys.
func TestCommandIsSentWithOneKey(t *testing.T) {
	const id = "a/b/c/do"
	ctx := saga.WithCommand(metadata.AppendToOutgoingContext(t.Context(), "idempotency-key", "a/b/d/do"),
		saga.Command{ID: id})
	require.NoError(t, sagagrpc.Send(ctx, func(ctx context.Context) error {
		md, _ := metadata.FromOutgoingContext(ctx)
		require.Equal(t, []string{"a/b/d/do"}, md.Get("idempotency-key"))
		return nil
	}))
}
