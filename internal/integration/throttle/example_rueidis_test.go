package throttle_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/redis/rueidis"

	"github.com/go-resilience/resilience/throttle"
)

// One limit for all instances of a service, with rueidis. InitAddress may be that of
// one server or of a Redis Cluster.
func Example_sharedWithRueidis() {
	client, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{"127.0.0.1:6379"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer client.Close()
	limit := throttle.NewShared(throttle.SharedConfig{
		Name: "mail", Rate: throttle.PerMinute(600), Burst: 20, Instances: 4,
		Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
			texts := make([]string, len(args)) // what rueidis takes
			for i, arg := range args {
				texts[i] = fmt.Sprint(arg)
			}
			return rueidis.NewLuaScript(script).Exec(ctx, client, keys, texts).ToAny()
		},
	})
	err = limit.Do(context.Background(), "", func(context.Context) error { return errors.New("no mail today") })
	if limited, ok := errors.AsType[*throttle.LimitedError](err); ok {
		fmt.Println("come back in", limited.RetryAfter())
	}
}
