package resiliencesql_test

import (
	"context"
	"fmt"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/resiliencesql"
)

// A duplicate key is an answer of the database, so the breaker stays closed. A server with too many connections opens
// the breaker.
func Example() {
	circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
	guarded := resilience.Chain(circuit.Wrap, resiliencesql.Middleware(resiliencesql.Config{}))

	err := guarded(func(context.Context) error { return state("23505") })(context.Background())
	fmt.Println(err, resilience.Answered(err), circuit.State())
	err = guarded(func(context.Context) error { return state("53300") })(context.Background())
	fmt.Println(err, resilience.Answered(err), circuit.State())
	// Output:
	// SQLSTATE 23505 true closed
	// SQLSTATE 53300 false open
}
