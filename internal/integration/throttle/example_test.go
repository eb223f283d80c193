package throttle_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/go-resilience/resilience/resilienceredis"
	"github.com/go-resilience/resilience/throttle"
)

// One limit for all instances of a service, with go-redis.
func Example_shared() {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379", ContextTimeoutEnabled: true, MaxRetries: -1})
	limit := throttle.NewShared(throttle.SharedConfig{
		Name: "mail", Rate: throttle.PerMinute(600), Burst: 20, Instances: 4,
		Eval: resilienceredis.Eval(rdb),
	})
	err := limit.Do(context.Background(), "", func(context.Context) error { return errors.New("no mail today") })
	if limited, ok := errors.AsType[*throttle.LimitedError](err); ok {
		fmt.Println("come back in", limited.RetryAfter())
	}
}
