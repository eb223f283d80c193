package resilience_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-resilience/resilience"
)

// A log line around each call: anything of the form func(next) func(ctx) error
// is a Middleware.
func logged(name string) resilience.Middleware {
	return func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error {
			err := next(ctx)
			fmt.Printf("%s: %v\n", name, err)
			return err
		}
	}
}

func ExampleChain() {
	guarded := resilience.Chain(
		logged("outer"),
		resilience.Fallback(func(ctx context.Context, err error) error { return nil }),
		logged("inner"),
	)
	err := guarded(func(ctx context.Context) error { return errors.New("no route") })(context.Background())
	fmt.Println("result:", err)
	// Output:
	// inner: no route
	// outer: <nil>
	// result: <nil>
}

func ExampleDo() {
	limit := resilience.Timeout(time.Second)
	name, err := resilience.Do(context.Background(), limit, func(ctx context.Context) (string, error) {
		return "Ada", nil
	})
	fmt.Println(name, err)
	// Output: Ada <nil>
}

func ExampleTimeout() {
	impatient := resilience.Timeout(time.Millisecond)
	err := impatient(func(ctx context.Context) error {
		<-ctx.Done()
		return errors.New("gave up waiting for the answer")
	})(context.Background())
	fmt.Println(err)
	fmt.Println(errors.Is(err, context.DeadlineExceeded))
	// Output:
	// resilience: timed out after 1ms: gave up waiting for the answer
	// true
}

func ExampleFallback() {
	cached := map[int]string{42: "Ada"}

	var name string
	err := resilience.Fallback(func(ctx context.Context, err error) error {
		var ok bool
		if name, ok = cached[42]; !ok {
			return err
		}
		return nil
	})(func(ctx context.Context) error {
		return errors.New("the database is down")
	})(context.Background())
	fmt.Println(name, err)
	// Output: Ada <nil>
}

// A pool of one's own: its slots are held until the work has really ended. Within a
// resiliencehttp.Transport that is when the response's body has been read.
func ExampleAtEnd() {
	slots := make(chan struct{}, 10)
	pooled := func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error {
			select {
			case slots <- struct{}{}:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			return resilience.AtEnd(ctx, next, func(err error) {
				<-slots
				fmt.Println("ended:", err)
			})
		}
	}
	err := pooled(func(context.Context) error { return errors.New("no route") })(context.Background())
	fmt.Println("returned:", err, "in use:", len(slots))
	// Output:
	// ended: no route
	// returned: no route in use: 0
}
