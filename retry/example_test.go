package retry_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/retry"
)

// A job that the third attempt gets done.
func Example() {
	retries := retry.New(retry.Config{
		Attempts: 4,
		Backoff:  retry.Exponential(time.Millisecond, 10*time.Millisecond),
	})
	err := retries.Do(context.Background(), func(ctx context.Context) error {
		n, _ := retry.AttemptFrom(ctx)
		if n < 3 {
			fmt.Println("attempt", n, "failed")
			return errors.New("connection refused")
		}
		fmt.Println("attempt", n, "succeeded")
		return nil
	})
	fmt.Println(err)
	// Output:
	// attempt 1 failed
	// attempt 2 failed
	// attempt 3 succeeded
	// <nil>
}

// Each retry makes a line in the log.
func ExampleConfig_onRetry() {
	log := slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{} // it differs from run to run
			}
			return a
		},
	}))
	retries := retry.New(retry.Config{
		Delay: func(_ context.Context, a retry.Attempt) time.Duration {
			return time.Duration(a.Number) * time.Millisecond
		},
		OnRetry: func(ctx context.Context, a retry.Attempt) {
			log.WarnContext(ctx, "retrying", "attempt", a.Number, "in", a.Delay, "err", a.Err)
		},
	})
	_ = retries.Do(context.Background(), func(context.Context) error {
		return errors.New("connection refused")
	})
	// Output:
	// level=WARN msg=retrying attempt=1 in=1ms err="connection refused"
	// level=WARN msg=retrying attempt=2 in=2ms err="connection refused"
}

// Both why it gave up and what the last attempt said are in the error. Here the
// deadline is too close for another attempt, and that is known at once.
func ExampleError() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	errRefused := errors.New("connection refused")
	retries := retry.New(retry.Config{Name: "users", Backoff: retry.Constant(2 * time.Hour)})

	err := retries.Do(ctx, func(context.Context) error { return errRefused })
	fmt.Println(errors.Is(err, errRefused), errors.Is(err, context.DeadlineExceeded))
	if gaveUp, ok := errors.AsType[*retry.Error](err); ok {
		fmt.Println(gaveUp.Err, gaveUp.Cause)
	}
	// Output:
	// true true
	// connection refused a wait of 2h0m0s would pass the deadline: context deadline exceeded
}

// Another attempt will not find the user either.
func ExamplePermanent() {
	errNotFound := errors.New("no such user")
	err := retry.New(retry.Config{}).Do(context.Background(), func(ctx context.Context) error {
		fmt.Println("looking")
		return retry.Permanent(errNotFound)
	})
	fmt.Println(err == errNotFound)
	// Output:
	// looking
	// true
}

// A dependency is down, and a hundred calls each want to be made three times.
// The budget that they share allows a fifth of that, and ten in any case.
func ExampleBudget() {
	users := retry.NewBudget(retry.BudgetConfig{Ratio: 0.2, PerSecond: 1})
	read := retry.New(retry.Config{Backoff: retry.Constant(0), Budget: users})
	write := retry.New(retry.Config{Backoff: retry.Constant(0), Budget: users})

	requests := 0
	down := func(context.Context) error {
		requests++
		return errors.New("connection refused")
	}
	for range 50 {
		for _, r := range []*retry.Retrier{read, write} {
			_ = r.Do(context.Background(), down) // errors.Is(err, retry.ErrOverBudget) for most
		}
	}
	fmt.Println(requests, "requests")
	// Output:
	// 130 requests
}

// Two hosts, each with a Retrier and a budget of its own: the one that is down uses up its
// retries, and the other keeps its own. With resiliencehttp, the key is resiliencehttp.HostOf.
func ExampleBudget_group() {
	hosts := resilience.NewGroup(func(host string) *retry.Retrier {
		return retry.New(retry.Config{Backoff: retry.Constant(0), Budget: retry.NewBudget(retry.BudgetConfig{PerSecond: 1})})
	}, resilience.GroupConfig{})

	ctx := context.Background()
	for range 100 {
		_ = hosts.Do(ctx, "down.example", func(context.Context) error { return errors.New("connection refused") })
	}
	for host, r := range hosts.All() {
		fmt.Println(host, "has", r.Config().Budget.Stats().Left, "retries left")
	}

	calls := 0
	err := hosts.Do(ctx, "up.example", func(context.Context) error {
		if calls++; calls == 1 {
			return errors.New("connection reset")
		}
		return nil
	})
	fmt.Println(calls, err)
	// Output:
	// down.example has 0 retries left
	// 2 <nil>
}

// A consumer runs for as long as the program does, and under a Retrier that starts it
// again when the connection to its queue is lost. Each message that it handles is an
// operation of its own: Fresh lets the Retriers of the handler retry.
func ExampleFresh() {
	connections := retry.New(retry.Config{Attempts: -1, Backoff: retry.Constant(time.Millisecond)})
	charges := retry.New(retry.Config{Attempts: 3, Backoff: retry.Constant(time.Millisecond)})

	queue := []string{"order 1", "order 2"}
	charge := func(ctx context.Context, order string) error {
		n, _ := retry.AttemptFrom(ctx)
		fmt.Println(order, "attempt", n)
		if order == "order 1" && n == 1 {
			return errors.New("connection reset")
		}
		return nil
	}
	consume := func(ctx context.Context) error {
		for len(queue) > 0 {
			order := queue[0]
			queue = queue[1:]
			err := charges.Do(retry.Fresh(ctx), func(ctx context.Context) error {
				return charge(ctx, order)
			})
			if err != nil {
				return err // with ctx in place of Fresh(ctx): after one attempt
			}
		}
		return nil
	}
	fmt.Println(connections.Do(context.Background(), consume))
	// Output:
	// order 1 attempt 1
	// order 1 attempt 2
	// order 2 attempt 1
	// <nil>
}

// The delay may depend on the error and on the number of the attempt.
func ExampleConfig_delay() {
	errDeadlock := errors.New("deadlock")
	transactions := retry.New(retry.Config{
		Backoff: retry.Exponential(100*time.Millisecond, time.Second),
		Delay: func(ctx context.Context, a retry.Attempt) time.Duration {
			if errors.Is(a.Err, errDeadlock) {
				return 0 // the other transaction has won and is done
			}
			return a.Delay
		},
		OnRetry: func(ctx context.Context, a retry.Attempt) {
			fmt.Println("attempt", a.Number, "failed, again in", a.Delay)
		},
	})
	_ = transactions.Do(context.Background(), func(ctx context.Context) error {
		if n, _ := retry.AttemptFrom(ctx); n == 1 {
			return errDeadlock
		}
		return nil
	})
	// Output:
	// attempt 1 failed, again in 0s
}

// A server may want to know that it sees a request again.
func ExampleAttemptFrom() {
	retries := retry.New(retry.Config{Backoff: retry.Constant(0)})
	_ = retries.Do(context.Background(), func(ctx context.Context) error {
		n, _ := retry.AttemptFrom(ctx)
		fmt.Printf("X-Attempt: %d\n", n)
		if n == 1 {
			return errors.New("connection reset")
		}
		return nil
	})
	// Output:
	// X-Attempt: 1
	// X-Attempt: 2
}
