package resiliencegrpc_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/resiliencegrpc"
	"github.com/go-resilience/resilience/saga"
)

// TestCommandsOfASaga answers the Do of a step with each code, and the Undo with NotFound,
// and looks at what the saga makes of it.
func TestCommandsOfASaga(t *testing.T) {
	const (
		declined = "declined"         // at once, nothing to undo
		aborted  = "aborted"          // at once, undone
		doubted  = "tried and undone" // three times, then undone
	)
	for code, want := range map[codes.Code]string{
		codes.InvalidArgument: declined, codes.NotFound: declined, codes.PermissionDenied: declined,
		codes.Unauthenticated: declined, codes.FailedPrecondition: declined, codes.OutOfRange: declined, codes.Unimplemented: declined,
		codes.AlreadyExists: aborted, codes.DataLoss: aborted,
		codes.Canceled: doubted, codes.Unknown: doubted, codes.DeadlineExceeded: doubted, codes.ResourceExhausted: doubted,
		codes.Aborted: doubted, codes.Internal: doubted, codes.Unavailable: doubted,
	} {
		t.Run(code.String(), func(t *testing.T) {
			var keys []string
			send := func(code codes.Code) func(context.Context, *int) error {
				return func(ctx context.Context, _ *int) error {
					return resiliencegrpc.SendCommand(ctx, func(ctx context.Context) error {
						md, _ := metadata.FromOutgoingContext(ctx)
						in, err := resiliencegrpc.CommandContext(metadata.NewIncomingContext(context.Background(), md))
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
			const do, undo = "/hotel/hotel/do", "/hotel/hotel/undo"
			require.Equal(t, map[string][]string{declined: {do}, aborted: {do, undo}, doubted: {do, do, do, undo}}[want], keys)
		})
	}
	require.NoError(t, resiliencegrpc.Outcome(t.Context(), nil))
	refused := fmt.Errorf("hotels: %w", breaker.ErrOpen)
	require.Equal(t, refused, resiliencegrpc.Outcome(t.Context(), refused))
}

func TestACommandNeedsAKey(t *testing.T) {
	for _, md := range []metadata.MD{nil, metadata.Pairs("idempotency-key", "42"), metadata.Pairs("idempotency-key", "a/b/c/do", "idempotency-key", "a/b/d/do")} {
		_, err := resiliencegrpc.CommandContext(metadata.NewIncomingContext(t.Context(), md))
		require.Equal(t, codes.InvalidArgument, status.Code(err))
	}
}

func TestCommandErrorHasACode(t *testing.T) {
	for _, c := range []struct {
		err  error
		want codes.Code
	}{
		{nil, codes.OK},
		{saga.NoEffect(errors.New("full")), codes.FailedPrecondition},
		{saga.NoEffect(saga.ErrUndone), codes.FailedPrecondition},
		{saga.NoEffect(status.Error(codes.NotFound, "no such hotel")), codes.NotFound},
		{errors.New("connection lost"), codes.Unknown},
	} {
		require.Equal(t, c.want, status.Code(resiliencegrpc.CommandError(c.err)))
	}
}

// A key that the ctx has is kept, as in resiliencehttp: a server that gets two takes none.
func TestACommandIsSentWithOneKey(t *testing.T) {
	const id = "a/b/c/do"
	ctx := saga.WithCommand(metadata.AppendToOutgoingContext(t.Context(), "idempotency-key", "a/b/d/do"), saga.Command{ID: id})
	require.NoError(t, resiliencegrpc.SendCommand(ctx, func(ctx context.Context) error {
		md, _ := metadata.FromOutgoingContext(ctx)
		require.Equal(t, []string{"a/b/d/do"}, md.Get("idempotency-key"))
		return nil
	}))
}
