package fleet_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/cacheaside/redisstore"
	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/resilienceredis"
	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/fleet"
)

// This file holds the recipes of docs/cookbook.md for fleets, and runs them against Redis. A snippet of
// docs/migrating.md is here for the compiler.

// recipes returns a Redis of the test's own, in which no limit of a recipe is used yet.
func recipes(t *testing.T) *redis.Client {
	server := services.NewRedis(t)
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr, ContextTimeoutEnabled: true, MaxRetries: -1,
		DialerRetries: 1})
	t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

func TestRecipeOfAnLLM(t *testing.T) {
	rdb, ctx, used := recipes(t), t.Context(), 0
	estimate := func(context.Context) int { return 60_000 }
	ask := func() error {
		limits := fleet.New(fleet.Config{Name: "llm", Eval: resilienceredis.Eval(rdb),
			Meters: func(ctx context.Context) []fleet.Meter {
				return []fleet.Meter{
					fleet.Rate("llm/requests", throttle.PerMinute(500), 1).Burst(500),
					fleet.Rate("llm/tokens", throttle.PerMinute(90_000), estimate(ctx)).Burst(90_000).Estimated(),
				}
			}})
		defer func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
			defer cancel()
			_ = limits.Close(ctx) // sends the settlements and releases the slots
		}()
		r, err := limits.Reserve(ctx)
		if err != nil {
			return err // resilience.RetryAfter(err) is the time to wait
		}
		defer func() { r.Settle(used) }()

		used = 80_000
		return nil
	}
	require.NoError(t, ask())
	limited, ok := errors.AsType[*throttle.LimitedError](ask())
	require.True(t, ok)
	require.Equal(t, "llm/tokens", limited.Key)
	require.InDelta(t, 10_000, limited.Left, 1000)
	require.InDelta(t, 50.0/90*60, limited.RetryAfter().Seconds(), 2)
}

func TestRecipeOfAnOrganization(t *testing.T) {
	rdb, ctx := recipes(t), t.Context()
	whose := func(context.Context) (string, string) { return "acme", "ann" }
	work := func(context.Context) error { return nil }
	orgs := fleet.New(fleet.Config{Name: "orgs", Eval: resilienceredis.Eval(rdb),
		Meters: func(ctx context.Context) []fleet.Meter {
			org, user := whose(ctx)
			return []fleet.Meter{
				fleet.Rate(org+"/all", 0.01, 1).Burst(100),
				fleet.Rate(org+"/user/"+user, 0.01, 1).Burst(5), // if it refuses, nothing is taken from /all
			}
		}})
	err := orgs.Do(ctx, work)

	require.NoError(t, err)
	for range 4 {
		require.NoError(t, orgs.Do(ctx, work))
	}
	for range 200 {
		require.ErrorContains(t, orgs.Do(ctx, work), "orgs[acme/user/ann]")
	}
	whose = func(context.Context) (string, string) { return "acme", "bob" }
	require.NoError(t, orgs.Do(ctx, work), "the organization keeps what its user was refused")
}

func TestRecipeOfABillingMonth(t *testing.T) {
	rdb, ctx, since := recipes(t), t.Context(), time.Now().AddDate(0, -3, 3)
	customer, work := "c-17", func(context.Context) error { return nil }
	billed := fleet.New(fleet.Config{Name: "billed", Eval: resilienceredis.Eval(rdb),
		Meters: func(context.Context) []fleet.Meter {
			return []fleet.Meter{fleet.Quota(customer+"/month", 2, throttle.BillingMonth(since), 1)}
		}})
	err := billed.Do(ctx, work)

	require.NoError(t, err)
	require.NoError(t, billed.Do(ctx, work))
	limited, ok := errors.AsType[*throttle.LimitedError](billed.Do(ctx, work))
	require.True(t, ok)
	require.Equal(t, throttle.OverQuota, limited.Reason)
	require.Less(t, limited.RetryAfter(), 4*24*time.Hour, "in three days, and not at the end of the month")
}

func TestRecipeOfConcurrency(t *testing.T) {
	rdb, ctx := recipes(t), t.Context()
	export := func(context.Context) error { time.Sleep(20 * time.Millisecond); return nil }
	slots := fleet.New(fleet.Config{Name: "exports", Eval: resilienceredis.Eval(rdb), MaxWait: time.Minute,
		Meters: func(context.Context) []fleet.Meter { return []fleet.Meter{fleet.Slots("exports/running", 2)} }})
	defer slots.Close(context.WithoutCancel(ctx)) // otherwise the slots stay taken for Lease
	err := slots.Do(ctx, export)                  // waits for a slot; the ctx of export is canceled if the slot is lost

	require.NoError(t, err)
	ends := make(chan error)
	began := time.Now()
	for range 10 {
		go func() { ends <- slots.Do(ctx, export) }()
	}
	for range 10 {
		require.NoError(t, <-ends)
	}
	require.GreaterOrEqual(t, time.Since(began), 100*time.Millisecond, "two at once")
}

// A tooMany is an upstream's 429.
type tooMany struct{}

func (tooMany) Error() string             { return "too many requests" }
func (tooMany) RetryAfter() time.Duration { return time.Minute }

func TestRecipeOfACooldown(t *testing.T) {
	rdb, ctx := recipes(t), t.Context()
	call := func(context.Context) error { return tooMany{} }
	var err error
	cooling := func() {
		bank := fleet.New(fleet.Config{Name: "bank", Eval: resilienceredis.Eval(rdb),
			Meters: func(context.Context) []fleet.Meter { return []fleet.Meter{fleet.Rate("bank/calls", 1000, 0)} }})
		err = bank.Do(ctx, func(ctx context.Context) error {
			err := call(ctx)
			if after := resilience.RetryAfter(err); after > 0 {
				_ = bank.Cooldown(ctx, "bank/calls", after)
			}
			return err
		})
	}
	cooling()
	require.ErrorIs(t, err, tooMany{})
	cooling() // another process
	limited, ok := errors.AsType[*throttle.LimitedError](err)
	require.True(t, ok)
	require.Equal(t, throttle.CoolingDown, limited.Reason)
	require.InDelta(t, 60, limited.RetryAfter().Seconds(), 2)
}

func TestRecipeFromOneProcessToMany(t *testing.T) {
	ctx, used, many := t.Context(), 7, true
	rdb := recipes(t)
	cost := func(context.Context) int { return 5 }
	type reservation interface{ Settle(int) }
	reserve := func() (r reservation, err error) {
		if !many {
			limits := throttle.All(
				throttle.New(throttle.Config{Name: "requests", Rate: 10}),
				throttle.New(throttle.Config{Name: "tokens", Rate: 1000, Cost: cost}))
			return limits.Reserve(ctx)
		}
		limits := fleet.New(fleet.Config{Name: "api", Eval: resilienceredis.Eval(rdb),
			Meters: func(ctx context.Context) []fleet.Meter {
				return []fleet.Meter{fleet.Rate("api/requests", 10, 1), fleet.Rate("api/tokens", 1000, cost(ctx)).Estimated()}
			}})
		return limits.Reserve(ctx)
	}
	for _, many = range []bool{false, true} {
		r, err := reserve()
		require.NoError(t, err)
		r.Settle(used)
	}
}

// User is the value of the snippet below.
type User struct{ ID int }

func _(ctx context.Context, rdb *redis.Client, selectUser func(context.Context, int) (User, error)) (User, error) {
	users := cacheaside.New(cacheaside.Config[int, User]{
		Name: "users",
		Load: selectUser,
		TTL:  time.Hour,
		Store: redisstore.New(redisstore.Config{
			Prefix: "users", Eval: resilienceredis.Eval(rdb), Subscribe: resilienceredis.Subscribe(rdb),
		}),
	})
	defer users.Close()
	user, err := users.Get(ctx, 42)
	return user, err
}
