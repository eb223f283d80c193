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
	circuit := breaker.New(breaker.Config{Name: "users", Failures: 3, OpenFor: 30 * time.Second, Jitter: -1})
	for range 4 {
		err := circuit.Do(context.Background(), fetch)
		if refused, ok := errors.AsType[*breaker.OpenError](err); ok {
			fmt.Printf("not called: %s: %s\n", refused.Name, refused.Reason)
			continue
		}
		fmt.Println(err)
	}
	// Output:
	// connection refused
	// connection refused
	// connection refused
	// not called: users: circuit open
}

// Log each change of state.
func ExampleConfig_onChange() {
	log := slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
	circuit := breaker.New(breaker.Config{
		Name:     "users",
		Failures: 1,
		OnChange: func(ctx context.Context, e breaker.Event) {
			log.WarnContext(ctx, "circuit", "name", e.Name, "from", e.From, "to", e.To, "err", e.Err)
		},
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
		Failures: 2,
		Classify: func(err error) breaker.Outcome {
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

// Any rule over the counts may open the breaker: here ten failures within a minute, but
// only if they are more than one call in a hundred.
func ExampleConfig_openWhen() {
	circuit := breaker.New(breaker.Config{
		Window:   time.Minute,
		OpenWhen: func(c breaker.Counts) bool { return c.Failed >= 10 && c.Failed*100 > c.Calls },
	})
	for range 10 {
		_ = circuit.Do(context.Background(), fetch)
	}
	fmt.Println(circuit.State())
	// Output: open
}

// A dependency that hangs opens the breaker, although each call ends by the deadline of its
// caller.
func ExampleConfig_patience() {
	circuit := breaker.New(breaker.Config{Failures: 3, Patience: 10 * time.Millisecond})
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

// A health check finds out when a dependency is back, instead of a customer.
func ExampleConfig_ping() {
	closed := make(chan struct{})
	circuit := breaker.New(breaker.Config{
		Failures: 1,
		OpenFor:  time.Millisecond,
		Ping: func(context.Context) error {
			fmt.Println("ping")
			return nil
		},
		OnChange: func(_ context.Context, e breaker.Event) {
			fmt.Println(e.From, "->", e.To)
			if e.To == breaker.Closed {
				close(closed)
			}
		},
	})
	defer circuit.Close()
	_ = circuit.Do(context.Background(), fetch)
	<-closed
	// Output:
	// closed -> open
	// open -> half-open
	// ping
	// half-open -> closed
}

// A stream is not a single function call. Its error is reported when it has ended.
func ExampleBreaker_Begin() {
	circuit := breaker.New(breaker.Config{Failures: 1})
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
	// breaker: billing: circuit forced open (last error: migration until noon)
	// closed
}

// Each shard has a breaker of its own.
func ExampleGroup() {
	shards := breaker.NewGroup(breaker.GroupConfig[int]{Config: breaker.Config{Name: "store", Failures: 2}})
	read := func(ctx context.Context, shard int) error {
		return shards.Do(ctx, shard, func(ctx context.Context) error {
			if shard == 3 {
				return errUnavailable
			}
			return nil
		})
	}
	for range 3 {
		for shard := range 8 {
			_ = read(context.Background(), shard)
		}
	}
	for shard, circuit := range shards.All() {
		if circuit.State() != breaker.Closed {
			fmt.Println("shard", shard, "is", circuit.State())
		}
	}
	fmt.Println("shard 4:", read(context.Background(), 4))
	// Output:
	// shard 3 is open
	// shard 4: <nil>
}

// An operator takes one shard out of use.
func ExampleGroup_With() {
	shards := breaker.NewGroup(breaker.GroupConfig[int]{Config: breaker.Config{Name: "store"}})
	shards.With(3, func(b *breaker.Breaker) { b.ForceOpen(errors.New("disk is being replaced")) })
	for shard := 2; shard <= 3; shard++ {
		fmt.Println(shards.Do(context.Background(), shard, func(context.Context) error { return nil }))
	}
	// Output:
	// <nil>
	// breaker: store[3]: circuit forced open (last error: disk is being replaced)
}
