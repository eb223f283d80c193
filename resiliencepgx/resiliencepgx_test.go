package resiliencepgx_test

import (
	"context"
	"net"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/resiliencepgx"
)

// nobody returns a pool of a server that refuses connections. What needs a server is in
// internal/integration/data.
func nobody(t testing.TB) *pgxpool.Pool {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	pool, err := pgxpool.New(context.Background(), "postgres://nobody@"+l.Addr().String()+"/none?sslmode=disable")
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// Without a pool, the function would panic on a goroutine of the Runner and end the program.
func TestListenNeedsPool(t *testing.T) {
	require.PanicsWithValue(t, "resiliencepgx: Listen: *pgxpool.Pool is nil: must be set",
		func() { resiliencepgx.Listen(nil) })
}

func TestAServerThatIsAwayOpensTheBreaker(t *testing.T) {
	pool, circuit := nobody(t), breaker.New(breaker.Config{ConsecutiveFailures: 1})
	_, err := resiliencepgx.Acquire(t.Context(), pool, circuit.Wrap)
	require.Error(t, err)
	require.True(t, resilience.Retryable(err))
	_, err = resiliencepgx.Acquire(t.Context(), pool, circuit.Wrap)
	require.ErrorIs(t, err, breaker.ErrOpen)

	circuit.Reset()
	cfg := resiliencepgx.Config{Retry: circuit.Wrap}
	never := func(context.Context, pgx.Tx) error { panic("there is no transaction") }
	require.True(t, resilience.Retryable(resiliencepgx.InTx(t.Context(), pool, cfg, never)))
	require.ErrorIs(t, resiliencepgx.InTx(t.Context(), pool, cfg, never), breaker.ErrOpen)
	require.Error(t, resiliencepgx.Listen(pool)(t.Context(), "c", func() { t.Error("it listens") }))
}

func TestACancelOpensNothing(t *testing.T) {
	pool, circuit := nobody(t), breaker.New(breaker.Config{ConsecutiveFailures: 1})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := resiliencepgx.Acquire(ctx, pool, circuit.Wrap)
	require.ErrorIs(t, err, context.Canceled)
	v, err := resiliencepgx.Value(ctx, pool, resiliencepgx.Config{},
		func(context.Context, pgx.Tx) (int, error) { return 7, nil })
	require.ErrorIs(t, err, context.Canceled)
	require.Zero(t, v)
	require.Equal(t, breaker.Closed, circuit.State())
}
