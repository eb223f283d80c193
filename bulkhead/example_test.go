package bulkhead_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/go-resilience/resilience/bulkhead"
)

// While two reports are being made, whoever wants a third one is told so at once.
func Example() {
	slots := bulkhead.New(bulkhead.Config{Name: "reports", Limit: 2})
	ctx := context.Background()

	var reports sync.WaitGroup
	made := make(chan struct{})
	begun := make(chan struct{})
	for range 2 {
		reports.Go(func() {
			_ = slots.Do(ctx, func(context.Context) error {
				begun <- struct{}{}
				<-made
				return nil
			})
		})
		<-begun
	}
	err := slots.Do(ctx, func(context.Context) error { return nil })
	fmt.Println(errors.Is(err, bulkhead.ErrFull), err)
	close(made)
	reports.Wait()
	fmt.Println(slots.Do(ctx, func(context.Context) error { return nil }))
	// Output:
	// true bulkhead: reports: full (no slot): 2 of 2 in flight, 0 waiting
	// <nil>
}

// The one-line hook for log/slog.
func ExampleConfig_onReject() {
	log := slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		},
	}))
	slots := bulkhead.New(bulkhead.Config{
		Name:  "users",
		Limit: 1,
		OnReject: func(ctx context.Context, e *bulkhead.FullError) {
			log.WarnContext(ctx, "refused", "by", e.Name, "reason", e.Reason, "inFlight", e.InFlight)
		},
	})
	ctx := context.Background()
	_ = slots.Do(ctx, func(ctx context.Context) error {
		return slots.Do(ctx, func(context.Context) error { return nil })
	})
	// Output:
	// level=WARN msg=refused by=users reason="no slot" inFlight=1
}

// A slot that outlives the function in which it is taken, such as that of a response
// whose body is still being read.
func ExampleBulkhead_Begin() {
	slots := bulkhead.New(bulkhead.Config{Limit: 1, Queue: 1, MaxWait: time.Second})
	done, err := slots.Begin(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer done(nil)
	fmt.Println(slots.Stats().InFlight)
	// Output: 1
}

// Checkout may use every slot. Browsing leaves two free for it, whatever comes.
func ExampleConfig_priority() {
	type checkout struct{}
	slots := bulkhead.New(bulkhead.Config{
		Limit:   5,
		Levels:  2,
		Reserve: []int{2},
		Priority: func(ctx context.Context) int {
			if ctx.Value(checkout{}) != nil {
				return 0
			}
			return 1
		},
	})
	browsing := context.Background()
	paying := context.WithValue(browsing, checkout{}, true)
	take := func(ctx context.Context) (n int) {
		for {
			if _, err := slots.Begin(ctx); err != nil {
				return n
			}
			n++
		}
	}
	fmt.Println("browsing:", take(browsing))
	fmt.Println("paying:", take(paying))
	// Output:
	// browsing: 3
	// paying: 2
}

// An export counts as much as four ordinary calls.
func ExampleWithWeight() {
	slots := bulkhead.New(bulkhead.Config{Limit: 4})
	export := func(context.Context) error {
		return slots.Do(context.Background(), func(context.Context) error { return nil })
	}
	fmt.Println(slots.Do(bulkhead.WithWeight(context.Background(), 4), export))
	fmt.Println(slots.Do(bulkhead.WithWeight(context.Background(), 5), export))
	// Output:
	// bulkhead: full (no slot): 4 of 4 in flight, 0 waiting
	// bulkhead: too heavy: weight 5 at level 0, limit 4
}

// Nobody has to guess the limit.
func ExampleAdaptive() {
	slots := bulkhead.New(bulkhead.Config{
		Adaptive: &bulkhead.Adaptive{Min: 4, Max: 200},
		OnLimit: func(c bulkhead.LimitChange) {
			slog.Info("limit", "to", c.To, "latency", c.Latency, "base", c.Base)
		},
	})
	fmt.Println(slots.Stats().Limit)
	// Output: 20
}

// Each tenant has slots of its own, and those who pay have more.
func ExampleGroup() {
	tenants := bulkhead.NewGroup(bulkhead.GroupConfig[string]{
		Config: bulkhead.Config{Name: "api", Limit: 1},
		For: func(tenant string) bulkhead.Config {
			if tenant == "gold" {
				return bulkhead.Config{Limit: 10}
			}
			return bulkhead.Config{Limit: 1}
		},
	})
	ctx := context.Background()
	err := tenants.Do(ctx, "free", func(ctx context.Context) error {
		fmt.Println(tenants.Do(ctx, "gold", func(context.Context) error { return nil }))
		return tenants.Do(ctx, "free", func(context.Context) error { return nil })
	})
	fmt.Println(err)
	// Output:
	// <nil>
	// bulkhead: api/free: full (no slot): 1 of 1 in flight, 0 waiting
}
