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

func TestUnmarked(t *testing.T) {
	type key struct{}
	ctx := context.WithValue(t.Context(), key{}, 1)
	require.Equal(t, ctx, attempt.Unmarked(ctx))
	marked := attempt.With(attempt.With(ctx, 1), 2)
	require.Equal(t, ctx, attempt.Unmarked(marked))
	require.Equal(t, 1, marked.Value(key{}))
	outer := context.WithValue(marked, key{}, 2)
	require.Equal(t, outer, attempt.Unmarked(outer), "a mark further in stays")
}
