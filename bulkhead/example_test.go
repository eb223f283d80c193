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

// While two reports are being created, a third is refused immediately.
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
	// true bulkhead: reports: full (no_slot): 2 of 2 in flight, 0 waiting
	// <nil>
}

// Calls that find no slot wait for MaxWait at most, and no more than Queue of them.
func ExampleNew() {
	slots := bulkhead.New(bulkhead.Config{
		Name:    "users",
		Limit:   16,
		MaxWait: 100 * time.Millisecond,
	})
	fmt.Println(slots.Config().Queue) // by default
	// Output: 1000
}

func ExampleBulkhead_Do() {
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	ctx := context.Background()
	err := slots.Do(ctx, func(ctx context.Context) error {
		err := slots.Do(ctx, func(context.Context) error { return nil })
		if full, ok := errors.AsType[*bulkhead.FullError](err); ok {
			fmt.Println("refused:", full.Reason, full.InFlight, "of", full.Limit)
		}
		return nil
	})
	fmt.Println(err)
	// Output:
	// refused: no_slot 1 of 1
	// <nil>
}

func ExampleBulkhead_Wrap() {
	slots := bulkhead.New(bulkhead.Config{Limit: 4})
	fetch := slots.Wrap(func(context.Context) error {
		fmt.Println("in flight:", slots.Stats().InFlight)
		return nil
	})
	fmt.Println(fetch(context.Background()))
	// Output:
	// in flight: 1
	// <nil>
}

// A flood of one tenant waits for itself. Other tenants are served in turn with it.
func ExampleConfig_share() {
	type tenantKey struct{}
	slots := bulkhead.New(bulkhead.Config{
		Limit:   1,
		MaxWait: bulkhead.Unlimited,
		Share: func(ctx context.Context) string {
			tenant, _ := ctx.Value(tenantKey{}).(string)
			return tenant
		},
	})
	done, _ := slots.Begin(context.Background())

	var calls sync.WaitGroup
	for i, tenant := range []string{"flood", "flood", "flood", "flood", "other", "other"} {
		ctx := context.WithValue(context.Background(), tenantKey{}, tenant)
		calls.Go(func() {
			_ = slots.Do(ctx, func(context.Context) error { fmt.Println(tenant); return nil })
		})
		for slots.Stats().Queued[0] <= i {
			time.Sleep(time.Millisecond)
		}
	}
	fmt.Printf("%+v\n", slots.Stats().Shares[0])
	done(nil)
	calls.Wait()
	// Output:
	// {Share:flood InFlight:0 Queued:4}
	// flood
	// other
	// flood
	// other
	// flood
	// flood
}

// Refused calls go to the log.
func ExampleBulkhead_Observe() {
	log := slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		},
	}))
	slots := bulkhead.New(bulkhead.Config{Name: "users", Limit: 1})
	slots.Observe(func(ctx context.Context, e bulkhead.Event) {
		if e.Kind == bulkhead.EventRefused {
			log.WarnContext(ctx, "refused", "by", e.Name, "reason", e.Refusal.Reason)
		}
	})
	ctx := context.Background()
	_ = slots.Do(ctx, func(ctx context.Context) error {
		return slots.Do(ctx, func(context.Context) error { return nil })
	})
	// Output:
	// level=WARN msg=refused by=users reason=no_slot
}

// The slot of a response whose body is still being read outlives the function that takes it.
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

// Checkout is served before browsing, although browsing has waited longer.
func ExampleConfig_priority() {
	type checkout struct{}
	slots := bulkhead.New(bulkhead.Config{
		Limit:   1,
		MaxWait: time.Second,
		Levels:  2,
		Priority: func(ctx context.Context) int {
			if ctx.Value(checkout{}) != nil {
				return 0
			}
			return 1
		},
	})
	browsing := context.Background()
	paying := context.WithValue(browsing, checkout{}, true)
	done, _ := slots.Begin(browsing)

	var calls sync.WaitGroup
	call := func(ctx context.Context, what string) {
		calls.Go(func() {
			_ = slots.Do(ctx, func(context.Context) error { fmt.Println(what); return nil })
		})
	}
	call(browsing, "browsing")
	for slots.Stats().Queued[1] == 0 {
		time.Sleep(time.Millisecond)
	}
	call(paying, "paying")
	for slots.Stats().Queued[0] == 0 {
		time.Sleep(time.Millisecond)
	}
	done(nil)
	calls.Wait()
	// Output:
	// paying
	// browsing
}

// An export takes as many slots as four ordinary calls.
func ExampleConfig_cost() {
	type rows struct{}
	slots := bulkhead.New(bulkhead.Config{
		Limit: 4,
		Cost: func(ctx context.Context) int {
			n, _ := ctx.Value(rows{}).(int)
			return 1 + n/1000
		},
	})
	ping := func(context.Context) error {
		return slots.Do(context.Background(), func(context.Context) error { return nil })
	}
	export := func(n int) error {
		return slots.Do(context.WithValue(context.Background(), rows{}, n), ping)
	}
	fmt.Println(export(3000))
	fmt.Println(export(4000))
	// Output:
	// bulkhead: full (no_slot): 4 of 4 in flight, 0 waiting
	// bulkhead: full (too_costly): 5 slots, limit 4
}

// A limit that follows the size of a connection pool while calls run.
func ExampleBulkhead_Update() {
	slots := bulkhead.New(bulkhead.Config{Name: "db", Limit: 10, MaxWait: time.Second})
	fmt.Println(slots.Update(func(c *bulkhead.Config) { c.Limit *= 2; c.Queue += 10 }))
	fmt.Println(slots.Update(func(c *bulkhead.Config) { c.Limit = 0 }))
	fmt.Println(slots.Config().Limit, slots.Config().Queue)
	// Output:
	// <nil>
	// bulkhead.Config.Limit is 0: must be 1 to 1073741823
	// 20 1010
}
