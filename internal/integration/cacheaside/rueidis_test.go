package cacheaside_test

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/cacheaside/redisstore"
	"github.com/go-resilience/resilience/resilienceredis"
)

// connectors return the functions of a redisstore.Config for one process of the application. Each call creates a client
// of one server or of a cluster.
var connectors = map[string]func(t testing.TB, addrs ...string) redisstore.Config{
	"go-redis": func(t testing.TB, addrs ...string) redisstore.Config {
		// no timeouts of the client: only ctx ends a call
		var rdb redis.UniversalClient
		if len(addrs) == 1 {
			rdb = redis.NewClient(&redis.Options{Addr: addrs[0], ContextTimeoutEnabled: true, MaxRetries: -1, ReadTimeout: -1,
				WriteTimeout: -1})
		} else {
			rdb = redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs, ContextTimeoutEnabled: true, ReadTimeout: -1,
				WriteTimeout: -1})
		}
		t.Cleanup(func() { _ = rdb.Close() })
		return redisstore.Config{
			Eval:      resilienceredis.Eval(rdb),
			Subscribe: resilienceredis.Subscribe(rdb),
		}
	},
	"rueidis": func(t testing.TB, addrs ...string) redisstore.Config {
		client, err := rueidis.NewClient(rueidis.ClientOption{
			InitAddress: addrs, ForceSingleClient: len(addrs) == 1, DisableCache: true,
			ConnWriteTimeout: 2 * time.Second, // the time after which a half-open connection is closed
		})
		require.NoError(t, err)
		t.Cleanup(client.Close)
		return redisstore.Config{
			Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
				texts := make([]string, len(args))
				for i, arg := range args {
					texts[i] = arg.(string)
				}
				return rueidis.NewLuaScript(script).Exec(ctx, client, keys, texts).ToAny()
			},
			Subscribe: func(ctx context.Context, channel string, subscribed func(), message func(string)) error {
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
			},
		}
	},
}

// newStore returns the Store of one process.
func newStore(cfg redisstore.Config, prefix string, change ...func(*redisstore.Config)) cacheaside.Store {
	cfg.Prefix, cfg.Timeout = prefix, 5*time.Second
	for _, f := range change {
		f(&cfg)
	}
	return redisstore.New(cfg)
}
