package ended_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/ended"
)

func TestErrorIsNilWhileTheContextLives(t *testing.T) {
	require.NoError(t, ended.Error(t.Context()))
}

func TestErrorIsBothTheEndAndItsCause(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("the user went away")
	cancel(cause)
	err := ended.Error(ctx)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, cause)
	require.EqualError(t, err, "context canceled: the user went away")
}

func TestErrorIsTheCauseWhereThatSaysItAll(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.Equal(t, context.Canceled, ended.Error(ctx))
}
