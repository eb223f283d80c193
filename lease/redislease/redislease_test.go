package redislease_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/redislease"
)

// The script is tested on a real Redis, in internal/integration/lease. These tests need no Redis.

var errDown = errors.New("down")

// answers returns a store whose script always returns value and err.
func answers(value any, err error) lease.Store {
	return redislease.New(redislease.Config{
		Eval: func(_ context.Context, script string, keys []string, args ...any) (any, error) {
			if len(keys) != 1 || keys[0] != "lease:a" || len(args) < 2 {
				panic(keys)
			}
			return value, err
		},
	})
}

var second = lease.Request{Name: "a", Token: "x", TTL: time.Second}

func TestNewNeedsEval(t *testing.T) {
	require.PanicsWithError(t, "redislease.Config.Eval is nil: must be set",
		func() { redislease.New(redislease.Config{}) })
}

func TestAnswersOfClients(t *testing.T) {
	for _, value := range []any{
		[]any{"x", "me", int64(7), int64(1000), int64(1), int64(1)},
		[]any{[]byte("x"), []byte("me"), 7, 1000, 1, 1},
		[]any{"x", "me", "7", []byte("1000"), "1", "1"},
	} {
		rec, err := answers(value, nil).Acquire(t.Context(), lease.Request{Name: "a", Token: "x"})
		require.NoError(t, err)
		require.Equal(t, lease.Record{
			Name: "a", Token: "x", Holder: "me", Epoch: 7, Left: time.Millisecond, LastRun: 1,
		}, rec)
		rec, err = answers(value, nil).Load(t.Context(), "a")
		require.NoError(t, err)
		require.Equal(t, int64(7), rec.Epoch)
		require.NoError(t, answers(value, nil).Release(t.Context(), "a", "x"))
	}
	rec, err := answers([]any{"", "", 0, -3, 0, 0}, nil).Load(t.Context(), "a")
	require.NoError(t, err)
	require.Equal(t, lease.Record{Name: "a"}, rec)
	require.NoError(t, answers([]any{"x", "me", 7, 1, 0, 1}, nil).Renew(t.Context(), second))
	require.ErrorIs(t, answers([]any{"y", "me", 7, 1, 0, 0}, nil).Renew(t.Context(), second), lease.ErrLost)
	require.ErrorIs(t, answers([]any{"x", "me", 7, 1, 9, 0}, nil).Renew(t.Context(), second), lease.ErrRunTaken)
}

func TestInvalidAnswers(t *testing.T) {
	for _, value := range []any{
		nil, "OK", []any{}, []any{1, "me", 7, 1, 0, 1}, []any{"x", nil, 7, 1, 0, 1},
		[]any{"x", "me", "seven", 1, 0, 1}, []any{"x", "me", 7, 3.5, 0, 1},
	} {
		_, err := answers(value, nil).Load(t.Context(), "a")
		require.ErrorContains(t, err, "redislease: load: script's answer")
		require.Error(t, answers(value, nil).Renew(t.Context(), second))
	}
	_, err := answers(nil, errDown).Acquire(t.Context(), lease.Request{Name: "a"})
	require.ErrorIs(t, err, errDown)
	require.ErrorContains(t, err, "redislease: acquire: ")
	require.ErrorIs(t, answers(nil, errDown).Renew(t.Context(), second), errDown)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = answers(nil, nil).Load(ctx, "a")
	require.ErrorIs(t, err, context.Canceled)
}
