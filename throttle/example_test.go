package throttle_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/throttle"
)

type tenantKey struct{}

// tenantOf returns the tenant of a call.
func tenantOf(ctx context.Context) string { return ctx.Value(tenantKey{}).(string) }

// with returns a ctx of a tenant.
func with(tenant string) context.Context {
	return context.WithValue(context.Background(), tenantKey{}, tenant)
}

func search(context.Context) error { return nil }

// Requests and tokens of a language model, by tenant. The tokens that a call really used are settled afterwards.
func Example() {
	requests := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{
		Name: "requests", Rate: throttle.PerMinute(500), Burst: 500,
		Quotas: []throttle.Quota{{N: 10_000, Window: throttle.Window{Per: throttle.Day}}},
	}})
	tokens := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{
		Name: "tokens", Rate: throttle.PerMinute(90), Burst: 90_000,
		Cost: func(context.Context) int { return 60_000 }, // an estimate
	}})
	limits := throttle.All(requests.For(tenantOf), tokens.For(tenantOf))

	ctx := with("acme")
	reservation, err := limits.Reserve(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	reservation.SettleEach(map[string]int{"tokens": 40_000})

	_, err = limits.Reserve(ctx)
	limited, _ := errors.AsType[*throttle.LimitedError](err)
	fmt.Println(limited.Name, limited.Key, limited.Reason, limited.RetryAfter().Round(time.Minute))
	// Output:
	// tokens acme over_limit 1h51m0s
}

func ExampleNew() {
	limit := throttle.New(throttle.Config{
		Name:  "search",
		Rate:  throttle.PerMinute(1),
		Burst: 2, // calls at once
	})
	fmt.Println(limit.Allow(), limit.Allow(), limit.Allow())
	// Output: true true false
}

// A tier that admits nothing, and one without a limit.
func ExampleNew_limitOfZero() {
	limitOf := func(perDay int) *throttle.Limiter { // from a configuration file
		switch perDay {
		case 0:
			perDay = throttle.None
		case -1:
			perDay = throttle.Unlimited
		}
		return throttle.New(throttle.Config{
			Name:   "emails",
			Quotas: []throttle.Quota{{N: perDay, Window: throttle.Window{Per: throttle.Day}}},
		})
	}
	fmt.Println(limitOf(0).Wait(context.Background()))
	fmt.Println(limitOf(-1).Wait(context.Background()))
	// Output:
	// throttle: emails: limited (over_quota of none per day)
	// <nil>
}

func ExampleLimiter_Do() {
	limit := throttle.New(throttle.Config{Name: "search", Rate: throttle.PerMinute(1)})
	for range 2 {
		err := limit.Do(context.Background(), search)
		limited, ok := errors.AsType[*throttle.LimitedError](err)
		if !ok {
			fmt.Println("done:", err)
			continue
		}
		fmt.Println("come back in", limited.RetryAfter().Round(time.Minute)) // search was not called
	}
	// Output:
	// done: <nil>
	// come back in 1m0s
}

func ExampleLimiter_Wrap() {
	limit := throttle.New(throttle.Config{Name: "search", Rate: throttle.PerMinute(1)})
	limited := limit.Wrap(search)
	fmt.Println(limited(context.Background()))
	fmt.Println(errors.Is(limited(context.Background()), throttle.ErrLimited))
	// Output:
	// <nil>
	// true
}

func ExampleLimiter_Reserve() {
	tokens := throttle.New(throttle.Config{Name: "tokens", Rate: throttle.PerMinute(1), Burst: 1000})
	reservation, err := tokens.Reserve(context.Background(), 800) // an estimate
	if err != nil {
		fmt.Println(err)
		return
	}
	reservation.Settle(300) // what the call used

	decision, err := tokens.Admit(context.Background())
	fmt.Println(decision.Remaining, err)
	// Output: 699 <nil>
}

func ExampleNewGroup() {
	tenants := throttle.NewGroup(throttle.GroupConfig[string]{
		Config: throttle.Config{Name: "api", Rate: throttle.PerMinute(1), Burst: 2},
	})
	for _, tenant := range []string{"acme", "acme", "acme", "globex"} {
		fmt.Println(tenant, tenants.Allow(tenant))
	}
	// Output:
	// acme true
	// acme true
	// acme false
	// globex true
}

func ExampleGroup_Do() {
	tenants := throttle.NewGroup(throttle.GroupConfig[string]{
		Config: throttle.Config{Name: "api", Rate: throttle.PerMinute(1)},
	})
	fmt.Println(tenants.Do(context.Background(), "acme", search))
	err := tenants.Do(context.Background(), "acme", search)
	limited, _ := errors.AsType[*throttle.LimitedError](err)
	fmt.Println(limited.Name, limited.Key, limited.Reason)
	// Output:
	// <nil>
	// api acme over_limit
}

func ExampleGroup_By() {
	tenants := throttle.NewGroup(throttle.GroupConfig[string]{
		Config: throttle.Config{Name: "api", Rate: throttle.PerMinute(1)},
	})
	limited := tenants.By(tenantOf)(search)
	fmt.Println(limited(with("acme")), limited(with("globex")))
	fmt.Println(errors.Is(limited(with("acme")), throttle.ErrLimited))
	// Output:
	// <nil> <nil>
	// true
}

// An organization keeps the tokens that a refused call of one of its users did not take.
func ExampleAll() {
	organization := throttle.New(throttle.Config{Name: "organization", Rate: throttle.PerMinute(1), Burst: 100})
	user := throttle.New(throttle.Config{Name: "user", Rate: throttle.PerMinute(1)})
	limits := throttle.All(organization, user)
	for range 10 {
		_ = limits.Do(context.Background(), search)
	}
	decision, _ := organization.Admit(context.Background())
	fmt.Println(decision.Remaining)
	// Output: 98
}

func ExampleLimits_Do() {
	limits := throttle.All(
		throttle.New(throttle.Config{Name: "requests", Rate: 10}),
		throttle.New(throttle.Config{Name: "exports", Rate: throttle.PerMinute(1)}),
	)
	fmt.Println(limits.Do(context.Background(), search))
	limited, _ := errors.AsType[*throttle.LimitedError](limits.Do(context.Background(), search))
	fmt.Println(limited.Name)
	// Output:
	// <nil>
	// exports
}

func ExampleLimits_Wrap() {
	limits := throttle.All(throttle.New(throttle.Config{Rate: 10}), throttle.New(throttle.Config{Rate: throttle.None}))
	fmt.Println(limits.Wrap(search)(context.Background()))
	// Output: throttle: limited (over_limit)
}

func ExampleBillingMonth() {
	since := time.Date(2026, 1, 31, 0, 0, 0, 0, time.UTC)
	fmt.Println(throttle.Quota{N: 1000, Window: throttle.BillingMonth(since)})
	// Output: 1000 per month from 31
}

// A week that starts on Sunday at six in the evening.
func ExampleWindow() {
	window := throttle.Window{Per: throttle.Week, At: 6*24*time.Hour + 18*time.Hour}
	fmt.Println(throttle.Quota{N: 50, Window: window})
	// Output: 50 per week at 162h0m0s
}
