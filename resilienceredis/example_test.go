package resilienceredis_test

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/resilienceredis"
)

// The first command fails, because no server listens at the address. The breaker of the node then refuses the second
// command.
func Example() {
	breakers := resilience.NewGroup(func(string) *breaker.Breaker {
		return breaker.New(breaker.Config{ConsecutiveFailures: 1})
	}, resilience.GroupConfig{})
	// No server listens at this address.
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1, DialerRetries: 1})
	resilienceredis.Hook(rdb, resilienceredis.Config{Node: func(addr string) resilience.Middleware {
		return breakers.By(func(context.Context) string { return addr })
	}})

	fmt.Println(resilience.Refused(rdb.Get(context.Background(), "key").Err()))
	fmt.Println(resilience.Refused(rdb.Get(context.Background(), "key").Err()))
	// Output:
	// false
	// true
}
