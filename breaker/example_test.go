package breaker_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/go-resilience/resilience/breaker"
)

var errUnavailable = errors.New("connection refused")

func fetch(context.Context) error { return errUnavailable }

func Example() {
	circuit := breaker.New(breaker.Config{Name: "users", ConsecutiveFailures: 3, OpenFor: 30 * time.Second})
	for range 4 {
		err := circuit.Do(context.Background(), fetch)
		if refused, ok := errors.AsType[*breaker.OpenError](err); ok {
			fmt.Printf("not called: %s: %s\n", refused.Name, refused.State)
			continue
		}
		fmt.Println(err)
	}
	// Output:
	// connection refused
	// connection refused
	// connection refused
	// not called: users: open
}

// Log each change of state.
func ExampleBreaker_Observe() {
	log := slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
	circuit := breaker.New(breaker.Config{Name: "users", ConsecutiveFailures: 1})
	circuit.Observe(func(ctx context.Context, e breaker.Event) {
		if e.Kind == breaker.EventChanged {
			log.WarnContext(ctx, "circuit", "name", e.Name, "from", e.From, "to", e.To, "err", e.Err)
		}
	})
	_ = circuit.Do(context.Background(), fetch)
	circuit.Reset()
	// Output:
	// level=WARN msg=circuit name=users from=closed to=open err="connection refused"
	// level=WARN msg=circuit name=users from=open to=closed err=<nil>
}

// A "not found" is a success of the dependency.
func ExampleConfig_classify() {
	errNotFound := errors.New("no such user")
	circuit := breaker.New(breaker.Config{
		ConsecutiveFailures: 2,
		Classify: func(err error) breaker.Verdict {
			if errors.Is(err, errNotFound) {
				return breaker.Success
			}
			return breaker.DefaultClassify(err)
		},
	})
	for range 10 {
		_ = circuit.Do(context.Background(), func(context.Context) error { return errNotFound })
	}
	fmt.Println(circuit.State())
	// Output: closed
}

// A dependency that hangs opens the breaker, although each call ends by the deadline of its
// caller.
func ExampleConfig_patience() {
	circuit := breaker.New(breaker.Config{ConsecutiveFailures: 3, Patience: 10 * time.Millisecond})
	hang := func(ctx context.Context) error {
		<-ctx.Done()
		return ctx.Err()
	}
	for circuit.State() == breaker.Closed {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		_ = circuit.Do(ctx, hang)
		cancel()
	}
	fmt.Println(circuit.Stats().LastErr)
	// Output: context deadline exceeded
}

// A stream is not a single function call. Its error is reported when it has ended.
func ExampleBreaker_Begin() {
	circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
	var over sync.WaitGroup
	stream := func(ctx context.Context) error {
		done, err := circuit.Begin(ctx)
		if err != nil {
			return err
		}
		over.Go(func() { done(errUnavailable) }) // after the last message
		return nil
	}
	fmt.Println(stream(context.Background()))
	over.Wait()
	fmt.Println(errors.Is(stream(context.Background()), breaker.ErrOpen))
	// Output:
	// <nil>
	// true
}

// ForceOpen overrides the results of calls.
func ExampleBreaker_ForceOpen() {
	circuit := breaker.New(breaker.Config{Name: "billing"})
	circuit.ForceOpen(errors.New("migration until noon"))
	fmt.Println(circuit.Do(context.Background(), fetch))
	circuit.Enable()
	fmt.Println(circuit.State())
	// Output:
	// breaker: billing: circuit forced_open
	// closed
}
