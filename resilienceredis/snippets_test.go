package resilienceredis_test

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/redislease"
	"github.com/go-resilience/resilience/resilienceredis"
	"github.com/go-resilience/resilience/throttle/fleet"
)

// The snippets of docs/cookbook.md and docs/migrating.md, for the compiler.
func _(addr string, circuits *resilience.Group[string, *breaker.Breaker], slots *bulkhead.Bulkhead) {
	rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true, MaxRetries: -1, DialerRetries: 1})
	resilienceredis.Hook(rdb, resilienceredis.Config{Node: func(addr string) resilience.Middleware {
		node := circuits.By(func(context.Context) string { return addr })
		return resilience.Chain(node, slots.Wrap, resilience.Timeout(50*time.Millisecond))
	}})
}

func _(ctx context.Context, rdb *redis.Client, bill func(context.Context) error) error {
	store := redislease.New(redislease.Config{Eval: resilienceredis.Eval(rdb)})
	candidate := lease.New(store, lease.Config{Name: "billing"})
	term, err := candidate.Campaign(ctx) // Lock; TryCampaign is TryLock
	if err != nil {
		return err
	}
	defer func() { _ = term.Resign(context.WithoutCancel(ctx)) }() // Unlock
	return bill(term.Context())                                    // canceled if the lease is lost
}

func _(
	ctx context.Context, rdb *redis.Client, tenantOf func(context.Context) string,
	work func(context.Context) error,
) error {
	limits := fleet.New(fleet.Config{Name: "api", Eval: resilienceredis.Eval(rdb),
		Meters: func(ctx context.Context) []fleet.Meter {
			return []fleet.Meter{fleet.Rate(tenantOf(ctx), 10, 1).Burst(10)}
		}})
	defer limits.Close(context.WithoutCancel(ctx))
	err := limits.Do(ctx, work)
	return err
}
