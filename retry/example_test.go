package retry_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/retry"
)

// The third attempt succeeds.
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

// A Retrier is created once and shared by all calls to a dependency.
func ExampleNew() {
	budget := retry.NewBudget(retry.BudgetConfig{Name: "users", Ratio: 0.1})
	retries := retry.New(retry.Config{
		Name:     "users",
		Backoff:  retry.Exponential(50*time.Millisecond, time.Second),
		MinDelay: 10 * time.Millisecond,
		RetryIf:  func(err error) bool { return errors.Is(err, io.ErrUnexpectedEOF) },
		Budget:   budget,
	})
	err := retries.Do(context.Background(), func(ctx context.Context) error {
		return errors.New("no such user")
	})
	fmt.Println(err)

	// A consumer that never gives up, but can be stopped by its ctx.
	forever := retry.New(retry.Config{Attempts: retry.Unlimited})
	fmt.Println(forever.Config().Attempts == retry.Unlimited)
	// Output:
	// no such user
	// true
}

// A method value such as retries.Wrap is a resilience.Middleware.
func ExampleRetrier_Wrap() {
	retries := retry.New(retry.Config{Backoff: retry.Constant(0)})
	breakdowns := breaker.New(breaker.Config{Name: "users"})

	attempts := 0
	fetch := resilience.Chain(retries.Wrap, breakdowns.Wrap)(func(context.Context) error {
		if attempts++; attempts == 1 {
			return errors.New("connection reset")
		}
		return nil
	})
	fmt.Println(fetch(context.Background()), attempts)
	// Output:
	// <nil> 2
}

// The error shows why Do gave up, and the error of the last attempt.
func ExampleRetrier_Do() {
	retries := retry.New(retry.Config{Name: "users", Backoff: retry.Constant(time.Millisecond)})
	err := retries.Do(context.Background(), func(context.Context) error {
		return errors.New("connection refused")
	})
	fmt.Println(err)
	fmt.Println(errors.Is(err, retry.ErrExhausted))
	// Output:
	// retry: users: gave up after 3 attempts: connection refused
	// true
}

// Update shows the effective configuration.
func ExampleRetrier_Update() {
	retries := retry.New(retry.Config{})
	err := retries.Update(func(c *retry.Config) { c.MaxRetryAfter *= 2 })
	fmt.Println(retries.Config().MaxRetryAfter, err)
	// Output:
	// 2m0s <nil>
}

// Each retry writes a line to the log.
func ExampleRetrier_Observe() {
	log := slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{} // differs between runs
			}
			return a
		},
	}))
	retries := retry.New(retry.Config{Backoff: retry.Constant(time.Millisecond)})
	stop := retries.Observe(func(ctx context.Context, e retry.Event) {
		switch e.Kind {
		case retry.EventRetried:
			log.WarnContext(ctx, "retrying", "attempts", e.Attempts, "in", e.Delay, "err", e.Err)
		case retry.EventEnded:
			log.WarnContext(ctx, "ended", "attempts", e.Attempts, "outcome", e.Outcome)
		}
	})
	defer stop()
	_ = retries.Do(context.Background(), func(context.Context) error {
		return errors.New("connection refused")
	})
	// Output:
	// level=WARN msg=retrying attempts=1 in=1ms err="connection refused"
	// level=WARN msg=retrying attempts=2 in=1ms err="connection refused"
	// level=WARN msg=ended attempts=3 outcome=exhausted
}

// The deadline is too close for another attempt, so Do returns immediately.
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
	// connection refused wait would pass the deadline: context deadline exceeded
}

// Another attempt would not find the user either.
func ExamplePermanent() {
	errNotFound := errors.New("no such user")
	err := retry.New(retry.Config{}).Do(context.Background(), func(ctx context.Context) error {
		fmt.Println("reading")
		return retry.Permanent(errNotFound)
	})
	fmt.Println(err == errNotFound)
	// Output:
	// reading
	// true
}

// A dependency is down, and a hundred calls have three attempts each. The budget that they share allows a fifth
// of the calls to be retried, and ten more.
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
			_ = r.Do(context.Background(), down) // most errors match retry.ErrOverBudget
		}
	}
	fmt.Println(requests, "requests")
	// Output:
	// 130 requests
}

// Each host has its own Retrier and Budget: the host that is down uses up its retries, and the other host keeps
// its own. With resiliencehttp, the key is resiliencehttp.HostOf.
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

// A consumer runs for as long as the program does, under a Retrier that restarts it when the connection to its
// queue is lost. Each message is a separate operation: Fresh lets the handler's Retriers retry.
func ExampleFresh() {
	connections := retry.New(retry.Config{Attempts: retry.Unlimited, Backoff: retry.Constant(time.Millisecond)})
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
				return err // with ctx instead of Fresh(ctx), after one attempt
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

// The delay can depend on the error and on the number of the attempt.
func ExampleConfig_delay() {
	errDeadlock := errors.New("deadlock")
	transactions := retry.New(retry.Config{
		Backoff: retry.Exponential(100*time.Millisecond, time.Second),
		Delay: func(ctx context.Context, a retry.FailedAttempt) time.Duration {
			if errors.Is(a.Err, errDeadlock) {
				return 0 // the other transaction has been committed
			}
			return a.Delay
		},
	})
	transactions.Observe(func(ctx context.Context, e retry.Event) {
		if e.Kind == retry.EventRetried {
			fmt.Println("attempt", e.Attempts, "failed, next one in", e.Delay)
		}
	})
	_ = transactions.Do(context.Background(), func(ctx context.Context) error {
		if n, _ := retry.AttemptFrom(ctx); n == 1 {
			return errDeadlock
		}
		return nil
	})
	// Output:
	// attempt 1 failed, next one in 0s
}

// The number of the attempt tells the server that a request is repeated.
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

// A Budget is shared by the Retriers of one dependency.
func ExampleNewBudget() {
	budget := retry.NewBudget(retry.BudgetConfig{
		Name:      "users",
		Ratio:     retry.None, // calls add no retries
		PerSecond: 2,
	})
	fmt.Println(budget.Stats().Left, "retries left")
	// Output:
	// 20 retries left
}

// MinDelay keeps the random delays of Exponential from being too short.
func ExampleExponential() {
	retries := retry.New(retry.Config{
		Backoff:  retry.Exponential(time.Millisecond, 10*time.Millisecond),
		MinDelay: time.Millisecond,
	})
	retries.Observe(func(_ context.Context, e retry.Event) {
		if e.Kind == retry.EventRetried {
			fmt.Println(e.Delay >= time.Millisecond)
		}
	})
	_ = retries.Do(context.Background(), func(context.Context) error { return errors.New("connection refused") })

	// Arguments that are out of range are reported by Validate.
	fmt.Println(retry.Config{Backoff: retry.Exponential(time.Minute, 30*time.Second)}.Validate())
	// Output:
	// true
	// true
	// retry.Config.Backoff is Exponential(1m0s, 30s): must be Exponential(first, longest) with 0 < first <= longest
}
