package retry_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

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
		Backoff: retry.Delays(time.Millisecond, 2*time.Millisecond),
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
		fmt.Println(gaveUp.Errs, gaveUp.Reason)
	}
	// Output:
	// true true
	// [connection refused] a wait of 2h0m0s would pass the deadline: context deadline exceeded
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
			_ = r.Do(context.Background(), down) // errors.Is(err, retry.ErrBudget) for most
		}
	}
	fmt.Println(requests, "requests")
	// Output:
	// 130 requests
}

// The first call hangs. One that is made beside it answers.
func ExampleHedge() {
	calls := make(chan string, 2)
	calls <- "slow replica"
	calls <- "fast replica"
	hedged := retry.HedgeConfig{Delay: 5 * time.Millisecond}

	from, err := retry.Hedge(context.Background(), hedged, func(ctx context.Context) (string, error) {
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

// A server may want to know that it sees a request again.
func ExampleAttemptFrom() {
	retries := retry.New(retry.Config{Backoff: retry.Immediately(1, nil)})
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
