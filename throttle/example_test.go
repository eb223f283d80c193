package throttle_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/go-resilience/resilience/throttle"
)

// A call that is refused is told when to come back.
func Example() {
	limit := throttle.New(throttle.Config{Name: "search", Rate: throttle.PerMinute(1), Burst: 2})
	for range 3 {
		err := limit.Do(context.Background(), func(context.Context) error {
			fmt.Println("found")
			return nil
		})
		if limited, ok := errors.AsType[*throttle.LimitedError](err); ok {
			fmt.Println("come back in", limited.RetryAfter().Round(time.Minute))
		}
	}
	// Output:
	// found
	// found
	// come back in 1m0s
}

// Each tenant has a limit of its own, and one pays for more.
func ExampleGroup() {
	tenants := throttle.NewGroup(throttle.GroupConfig[string]{
		Config: throttle.Config{Name: "api", Rate: 100.0 / 3600, Burst: 3},
	})
	if err := tenants.Set("paying", throttle.Limit{Rate: 1000, Burst: 10}); err != nil {
		panic(err)
	}
	for _, tenant := range []string{"free", "paying"} {
		admitted := 0
		for range 10 {
			if tenants.Allow(tenant) {
				admitted++
			}
		}
		fmt.Println(tenant, admitted)
	}
	for key, used := range tenants.All() {
		fmt.Printf("%s %+v\n", key, used)
	}
	// Unordered output:
	// free 3
	// paying 10
	// free {Spent:3 Refused:7}
	// paying {Spent:10 Refused:0}
}

// A Decision has the information for the headers of an HTTP response.
func ExampleLimiter_Take() {
	limit := throttle.New(throttle.Config{Rate: throttle.PerMinute(1), Burst: 100})
	d := limit.Take(40)
	fmt.Println(d.OK, d.Limit, d.Window, d.Remaining)
	d = limit.Take(70)
	fmt.Println(d.OK, d.Remaining, d.RetryAfter.Round(time.Minute))
	// Output:
	// true 100 1h40m0s 60
	// false 60 10m0s
}

// Refused calls go to the log.
func ExampleLimiter_Observe() {
	limit := throttle.New(throttle.Config{Name: "search", Rate: 10})
	limit.Observe(func(ctx context.Context, e throttle.Event) {
		if e.Kind == throttle.EventRefused {
			slog.WarnContext(ctx, "limited", "name", e.Name, "why", e.Reason, "err", e.Err)
		}
	})
	fmt.Println(limit.Do(context.Background(), func(context.Context) error { return nil }))
	// Output: <nil>
}

// tooMany is the error of a client for HTTP 429.
type tooMany struct{}

func (tooMany) Error() string   { return "429 Too Many Requests" }
func (tooMany) Throttled() bool { return true }

// A client does not send calls that the server would refuse.
func ExampleAdaptive() {
	var sent int
	server := func(context.Context) error {
		sent++
		return tooMany{}
	}
	client := throttle.NewAdaptive(throttle.AdaptiveConfig{Name: "users"})
	for range 1000 {
		_ = client.Do(context.Background(), server)
	}
	fmt.Println("less than a tenth was sent:", sent < 100)
	// Output: less than a tenth was sent: true
}

// An operator doubles the limit while the program runs. What has been spent stays spent.
func ExampleLimiter_Update() {
	limit := throttle.New(throttle.Config{Name: "search", Rate: 10, Burst: 10})
	limit.Take(7)
	err := limit.Update(func(c *throttle.Config) {
		c.Rate *= 2
		c.Burst *= 2
	})
	fmt.Println(err, limit.Config().Burst, limit.Peek().Remaining)
	fmt.Println(limit.Update(func(c *throttle.Config) { c.Rate = 0 }))
	// Output:
	// <nil> 20 13
	// throttle.Config.Rate is 0: must be above 0 and at most 1e12 tokens a second
}

// A plan allows 10 calls a second and 1000 a day. The day is that of the customer.
func ExampleQuota() {
	tokyo, err := time.LoadLocation("Asia/Tokyo")
	if err != nil {
		panic(err)
	}
	limit := throttle.New(throttle.Config{
		Name: "free plan", Rate: 10,
		Quotas: []throttle.Quota{{N: 1000, Per: throttle.Day, In: tokyo}, {N: 10_000, Per: throttle.Month, In: tokyo}},
	})
	d := limit.Take(8)
	fmt.Println(d.OK, d.Remaining, "left of", d.Limit, "in", d.Window)
	fmt.Println(limit.Config().Quotas)
	// Output:
	// true 2 left of 10 in 1s
	// [1000 per day in Asia/Tokyo 10000 per month in Asia/Tokyo]
}

// A restart does not refill what a tenant has spent of a month's quota.
func ExampleGroup_Snapshot() {
	cfg := throttle.GroupConfig[string]{Config: throttle.Config{
		Name: "api", Quotas: []throttle.Quota{{N: 10_000, Per: throttle.Month}},
	}}
	before := throttle.NewGroup(cfg)
	before.Take("tenant 7", 9_000)
	var file bytes.Buffer // a file, in a program
	if err := before.Snapshot(&file); err != nil {
		panic(err)
	}

	after := throttle.NewGroup(cfg)
	if err := after.Restore(&file); err != nil {
		panic(err)
	}
	fmt.Println(after.Peek("tenant 7").Remaining)
	// Output:
	// 1000
}
