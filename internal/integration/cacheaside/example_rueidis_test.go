package cacheaside_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/redis/rueidis"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/cacheaside/redisstore"
)

// A cache that processes share, with rueidis. InitAddress may have the address of one server or of a Redis Cluster.
func Example_redisstoreWithRueidis() {
	client, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{"127.0.0.1:6379"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer client.Close()
	eval := func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
		texts := make([]string, len(args))
		for i, arg := range args {
			texts[i] = arg.(string)
		}
		return rueidis.NewLuaScript(script).Exec(ctx, client, keys, texts).ToAny()
	}
	subscribe := func(ctx context.Context, channel string, subscribed func(), message func(string)) error {
		// A separate connection, because the calls to eval must not wait behind messages.
		conn, release := client.Dedicate()
		defer release()
		defer conn.Close()
		lost := conn.SetPubSubHooks(rueidis.PubSubHooks{
			OnSubscription: func(rueidis.PubSubSubscription) { subscribed() },
			OnMessage:      func(m rueidis.PubSubMessage) { message(m.Message) },
		})
		if err := conn.Do(ctx, conn.B().Subscribe().Channel(channel).Build()).Error(); err != nil {
			return err
		}
		select {
		case err := <-lost:
			return err
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	users := cacheaside.New(cacheaside.Config[int, string]{
		Load:  func(context.Context, int) (string, error) { return "", errors.New("no database today") },
		Store: redisstore.New(redisstore.Config{Prefix: "users", Eval: eval, Subscribe: subscribe}),
	})
	defer users.Close()
	name, err := users.Get(context.Background(), 42)
	fmt.Println(name, err)
}
