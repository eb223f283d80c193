package hedge_test

import (
	"context"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/hedge"
)

// The first call hangs. One that is made beside it answers.
func ExampleHedger_Do() {
	calls := make(chan string, 2)
	calls <- "slow replica"
	calls <- "fast replica"
	hedged := hedge.New[string](hedge.Config{Delay: 5 * time.Millisecond})

	from, err := hedged.Do(context.Background(), func(ctx context.Context) (string, error) {
		replica := <-calls
		if replica == "slow replica" {
			<-ctx.Done() // a call that heeds its ctx ends when another has won
			return "", ctx.Err()
		}
		return replica, nil
	})
	fmt.Println(from, err)
	// Output:
	// fast replica <nil>
}

// One Hedger for an operation keeps its figures, and learns its delay from them.
func ExampleHedger() {
	lookups := hedge.New[string](hedge.Config{
		Name:     "lookup",
		Delay:    20 * time.Millisecond, // until it knows better
		Quantile: 0.95,
		Ratio:    0.1,
	})
	name, err := lookups.Do(context.Background(), func(ctx context.Context) (string, error) {
		return "Ada", nil
	})
	fmt.Println(name, err)
	s := lookups.Stats()
	fmt.Println(s.FirstWon, "answered at first,", s.Hedged, "hedged")
	// Output:
	// Ada <nil>
	// 1 answered at first, 0 hedged
}
