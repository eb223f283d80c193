package adaptive_test

import (
	"context"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/bulkhead/adaptive"
)

// The limit need not be guessed.
func Example() {
	slots := adaptive.New(adaptive.Config{
		Bulkhead: bulkhead.Config{Name: "users", MaxWait: 100 * time.Millisecond, Queue: 64},
		Max:      200,
	})
	err := slots.Do(context.Background(), func(context.Context) error { return nil })
	fmt.Println(err, slots.Stats().Limit)
	// Output: <nil> 20
}
