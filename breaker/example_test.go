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
	users := breaker.New(breaker.Config{Name: "users", ConsecutiveFailures: 3, OpenFor: 30 * time.Second})
	for range 4 {
		err := users.Do(context.Background(), fetch)
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

// Open by the rate of failures, and close after three successful probes.
func ExampleNew() {
	users := breaker.New(breaker.Config{
		Name:         "users",
		FailureRate:  0.5,
		Window:       10 * time.Second,
		OpenFor:      time.Second,
		ProbeTimeout: 5 * time.Second, // the dependency may be slow while it recovers
		Probes:       3,
	})
	cfg := users.Config()
	fmt.Println(cfg.MinCalls, cfg.MaxOpenFor, users.State())
	// Output: 20 1s closed
}

// A fallback answers for a call that was not made.
func ExampleBreaker_Do() {
	users := breaker.New(breaker.Config{Name: "users"})
	users.Trip(errUnavailable, time.Minute)

	err := users.Do(context.Background(), fetch)
	if errors.Is(err, breaker.ErrOpen) {
		fmt.Println("cached:", err)
	}
	// Output: cached: breaker: users: circuit open
}

// A wrapped function runs under the breaker wherever it is called.
func ExampleBreaker_Wrap() {
	users := breaker.New(breaker.Config{Name: "users", ConsecutiveFailures: 1})
	guarded := users.Wrap(fetch)
	fmt.Println(guarded(context.Background()))
	fmt.Println(guarded(context.Background()))
	// Output:
	// connection refused
	// breaker: users: circuit open
}

// Log each change of state.
func ExampleBreaker_Observe() {
	log := slog.New(slog.NewTextHandler(os.Stdout,
		&slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}}))
	users := breaker.New(breaker.Config{Name: "users", ConsecutiveFailures: 1})
	stop := users.Observe(func(ctx context.Context, e breaker.Event) {
		if e.Kind == breaker.EventChanged {
			log.WarnContext(ctx, "breaker", "name", e.Name, "from", e.From, "to", e.To, "err", e.Err)
		}
	})
	defer stop()
	_ = users.Do(context.Background(), fetch)
	users.Reset()
	// Output:
	// level=WARN msg=breaker name=users from=closed to=open err="connection refused"
	// level=WARN msg=breaker name=users from=open to=closed err=<nil>
}

// A "not found" is a success of the dependency.
func ExampleConfig_classify() {
	errNotFound := errors.New("no such user")
	users := breaker.New(breaker.Config{
		ConsecutiveFailures: 2,
		Classify: func(err error) breaker.Verdict {
			if errors.Is(err, errNotFound) {
				return breaker.Success
			}
			return breaker.DefaultClassify(err)
		},
	})
	for range 10 {
		_ = users.Do(context.Background(), func(context.Context) error { return errNotFound })
	}
	fmt.Println(users.State())
	// Output: closed
}

// A dependency that hangs opens the breaker, although each call ends by its caller's deadline.
func ExampleConfig_patience() {
	users := breaker.New(breaker.Config{ConsecutiveFailures: 3, Patience: 10 * time.Millisecond})
	hang := func(ctx context.Context) error {
		<-ctx.Done()
		return ctx.Err()
	}
	for users.State() == breaker.Closed {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		_ = users.Do(ctx, hang)
		cancel()
	}
	fmt.Println(users.Stats().LastErr)
	// Output: context deadline exceeded
}

// A subscription is not a single function call. Its error is reported when it has ended.
func ExampleBreaker_Begin() {
	events := breaker.New(breaker.Config{ConsecutiveFailures: 1})
	var running sync.WaitGroup
	subscribe := func(ctx context.Context) error {
		done, err := events.Begin(ctx)
		if err != nil {
			return err
		}
		running.Go(func() { done(errUnavailable) }) // after the last message
		return nil
	}
	fmt.Println(subscribe(context.Background()))
	running.Wait()
	fmt.Println(errors.Is(subscribe(context.Background()), breaker.ErrOpen))
	// Output:
	// <nil>
	// true
}

// ForceOpen overrides the results of calls. The reason is for operators, and not in the error's text.
func ExampleBreaker_ForceOpen() {
	billing := breaker.New(breaker.Config{Name: "billing"})
	billing.ForceOpen(errors.New("migration until noon"))
	err := billing.Do(context.Background(), fetch)
	fmt.Println(err)
	if refused, ok := errors.AsType[*breaker.OpenError](err); ok {
		fmt.Println(refused.LastErr)
	}
	billing.Enable()
	fmt.Println(billing.State())
	// Output:
	// breaker: billing: circuit forced_open
	// migration until noon
	// closed
}
