package adaptive_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/adaptive"
)

// A busy error is what a server answers that cannot take a call.
type busy struct{}

func (busy) Error() string   { return "503 Service Unavailable" }
func (busy) Throttled() bool { return true }

// A client does not send calls that the server would probably turn away.
func Example() {
	shed := adaptive.New(adaptive.Config{Name: "search"})
	sent := 0
	for range 1000 {
		err := shed.Do(context.Background(), func(context.Context) error {
			sent++
			return busy{}
		})
		if errors.Is(err, throttle.ErrLimited) {
			continue // the call was not made
		}
	}
	fmt.Println(sent < 100, sent > 0)
	// Output: true true
}

func ExampleNew() {
	shed := adaptive.New(adaptive.Config{
		Name:      "search",
		K:         1.5, // calls for each one that the server accepts
		Throttled: func(err error) bool { return errors.Is(err, busy{}) },
	})
	fmt.Println(shed.Config().Window)
	// Output: 2m0s
}

func ExampleThrottle_Do() {
	shed := adaptive.New(adaptive.Config{Name: "search"})
	err := shed.Do(context.Background(), func(context.Context) error { return nil })
	fmt.Println(err, shed.Stats().Probability)
	// Output: <nil> 0
}

func ExampleThrottle_Wrap() {
	shed := adaptive.New(adaptive.Config{Name: "search"})
	search := shed.Wrap(func(context.Context) error { return busy{} })
	fmt.Println(search(context.Background()))
	fmt.Println(shed.Stats().Probability)
	// Output:
	// 503 Service Unavailable
	// 0.5
}
