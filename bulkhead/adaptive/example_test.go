package adaptive_test

import (
	"context"
	"errors"
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

// The first limit is 20, or Min or Max if these exclude 20.
func ExampleNew() {
	slots := adaptive.New(adaptive.Config{Max: 8})
	fmt.Println(slots.Stats().Limit, slots.Config().Tolerance)
	// Output: 8 0.25
}

// The errors are those of package bulkhead.
func ExampleBulkhead_Do() {
	slots := adaptive.New(adaptive.Config{Bulkhead: bulkhead.Config{Name: "users"}, Max: 1})
	ctx := context.Background()
	err := slots.Do(ctx, func(ctx context.Context) error {
		return slots.Do(ctx, func(context.Context) error { return nil })
	})
	fmt.Println(errors.Is(err, bulkhead.ErrFull), err)
	// Output: true bulkhead: users: full (no_slot): 1 of 1 in flight, 0 waiting
}

func ExampleBulkhead_Wrap() {
	slots := adaptive.New(adaptive.Config{})
	fetch := slots.Wrap(func(context.Context) error {
		fmt.Println("in flight:", slots.Stats().InFlight)
		return nil
	})
	fmt.Println(fetch(context.Background()))
	// Output:
	// in flight: 1
	// <nil>
}
