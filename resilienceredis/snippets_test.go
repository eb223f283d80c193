package resilienceredis_test

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resilienceredis"
)

// The snippets of docs/cookbook.md and docs/migrating.md, for the compiler.
func _(addr string, circuits *resilience.Group[string, *breaker.Breaker], slots *bulkhead.Bulkhead) {
	rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true, MaxRetries: -1, DialerRetries: 1})
	resilienceredis.Hook(rdb, resilienceredis.Config{Node: func(addr string) resilience.Middleware {
		node := circuits.By(func(context.Context) string { return addr })
		return resilience.Chain(node, slots.Wrap, resilience.Timeout(50*time.Millisecond))
	}})
}

func _(addr string, circuit *breaker.Breaker) {
	rdb := redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1, DialerRetries: 1})
	resilienceredis.Hook(rdb, resilienceredis.Config{Node: func(string) resilience.Middleware { return circuit.Wrap }})
}
