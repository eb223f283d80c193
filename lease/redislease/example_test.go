package redislease_test

import (
	"context"
	"fmt"

	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/redislease"
)

// eval answers as Redis does for a free lease. A real program uses resilienceredis.Eval(client).
func eval(_ context.Context, _ string, _ []string, args ...any) (any, error) {
	return []any{args[1], "process 1", int64(1_700_000_000_000_000), int64(15_000_000), int64(0), int64(1)}, nil
}

// A leader sends the epoch of its term to a resource that rejects lower epochs.
func ExampleNew() {
	store := redislease.New(redislease.Config{Eval: eval})
	reports := lease.New(store, lease.Config{Name: "report", Holder: "process 1"})
	err := reports.Run(context.Background(), func(ctx context.Context, term lease.Term) error {
		fmt.Println(term.Holder(), "sends a report with epoch", term.Epoch())
		return nil
	})
	fmt.Println(err)
	// Output:
	// process 1 sends a report with epoch 1700000000000000
	// <nil>
}
