package attempt_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/attempt"
)

func TestFrom(t *testing.T) {
	_, ok := attempt.From(context.Background())
	require.False(t, ok)

	ctx := attempt.With(context.Background(), 3)
	n, ok := attempt.From(ctx)
	require.True(t, ok)
	require.Equal(t, 3, n)

	_, ok = attempt.From(attempt.With(ctx, 0))
	require.False(t, ok, "a new operation")
}
