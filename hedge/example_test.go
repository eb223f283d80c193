package hedge_test

import (
	"context"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/hedge"
)

// The first call hangs, and the second one answers.
func ExampleHedger_Do() {
	calls := make(chan string, 2)
	calls <- "slow replica"
	calls <- "fast replica"
	hedged := hedge.New[string](hedge.Config{Delay: 5 * time.Millisecond, Ratio: hedge.Unlimited})

	from, err := hedged.Do(context.Background(), func(ctx context.Context) (string, error) {
		replica := <-calls
		if replica == "slow replica" {
			<-ctx.Done() // canceled when the other call has won
			return "", ctx.Err()
		}
		return replica, nil
	})
	fmt.Println(from, err)
	// Output:
	// fast replica <nil>
}

// A Hedger is created once for an operation, so that it can learn its delay from the latencies of the calls.
func ExampleNew() {
	lookups := hedge.New[string](hedge.Config{
		Name:     "lookup",
		Delay:    20 * time.Millisecond, // used until enough latencies are known
		Quantile: 0.95,
	})
	name, err := lookups.Do(context.Background(), func(ctx context.Context) (string, error) {
		return "Ada", nil
	})
	fmt.Println(name, err)
	s := lookups.Stats()
	fmt.Println(s.FirstWon, "answered first,", s.Hedged, "hedged")
	// Output:
	// Ada <nil>
	// 1 answered first, 0 hedged
}

// Each second call is counted, for example in a metric.
func ExampleHedger_Observe() {
	lookups := hedge.New[string](hedge.Config{Name: "lookup", Delay: time.Millisecond, Ratio: hedge.Unlimited})
	stop := lookups.Observe(func(_ context.Context, e hedge.Event) { fmt.Println(e.Name, e.Kind) })
	defer stop()

	calls := make(chan bool, 2)
	calls <- true // the first call
	calls <- false
	_, _ = lookups.Do(context.Background(), func(ctx context.Context) (string, error) {
		if <-calls {
			<-ctx.Done()
		}
		return "Ada", ctx.Err()
	})
	// Output:
	// lookup hedged
}
