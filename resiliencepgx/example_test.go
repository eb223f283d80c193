package resiliencepgx_test

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/resiliencepgx"
	"github.com/go-resilience/resilience/retry"
)

// A transaction runs under a retrier and a breaker. The breaker opens because the server cannot be reached.
func Example() {
	pool, _ := pgxpool.New(context.Background(), "postgres://nobody@127.0.0.1:1/none?sslmode=disable") // no server
	defer pool.Close()
	retries, circuit := retry.New(retry.Config{}), breaker.New(breaker.Config{ConsecutiveFailures: 1})

	balance, err := resiliencepgx.Value(context.Background(), pool,
		resiliencepgx.Config{Retry: resilience.Chain(retries.Wrap, circuit.Wrap)},
		func(ctx context.Context, tx pgx.Tx) (cents int, err error) {
			err = tx.QueryRow(ctx, "UPDATE account SET cents = cents - 1 WHERE id = 7 RETURNING cents").Scan(&cents)
			return cents, err
		})
	fmt.Println(balance, err != nil, circuit.State())
	// Output: 0 true open
}
