package throttle_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/resilienceredis"
	"github.com/go-resilience/resilience/throttle"
)

// An evalFunc is a SharedConfig's Eval.
type evalFunc = func(ctx context.Context, script string, keys []string, args ...any) (any, error)

func evalWithRueidis(client rueidis.Client) evalFunc {
	return func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
		texts := make([]string, len(args))
		for i, arg := range args {
			texts[i] = fmt.Sprint(arg)
		}
		return rueidis.NewLuaScript(script).Exec(ctx, client, keys, texts).ToAny()
	}
}

// clients connect to servers: to one, or to those of a cluster.
var clients = map[string]func(t testing.TB, addrs ...string) evalFunc{
	"go-redis": func(t testing.TB, addrs ...string) evalFunc {
		// No timeout of its own: a call ends by its ctx.
		var rdb redis.UniversalClient
		if len(addrs) == 1 {
			rdb = redis.NewClient(&redis.Options{Addr: addrs[0], ContextTimeoutEnabled: true, MaxRetries: -1, ReadTimeout: -1, WriteTimeout: -1})
		} else {
			rdb = redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs, ContextTimeoutEnabled: true, MaxRedirects: 16, ReadTimeout: -1, WriteTimeout: -1})
		}
		t.Cleanup(func() { _ = rdb.Close() })
		return resilienceredis.Eval(rdb)
	},
	"rueidis": func(t testing.TB, addrs ...string) evalFunc {
		giveUp := patient
		if len(addrs) == 1 {
			giveUp = 2 * time.Second // a connection that is half open
		}
		c, err := rueidis.NewClient(rueidis.ClientOption{
			InitAddress: addrs, ForceSingleClient: len(addrs) == 1, DisableCache: true,
			ConnWriteTimeout: giveUp,
		})
		require.NoError(t, err)
		t.Cleanup(c.Close)
		return evalWithRueidis(c)
	},
}

func TestClientsShareOneLimit(t *testing.T) {
	addr := services.Redis(t)
	p := prefix(t, client(t, addr))
	var instances []*throttle.Shared
	for _, connect := range clients {
		instances = append(instances, throttle.NewShared(throttle.SharedConfig{
			Name: "clients", Prefix: p, Eval: connect(t, addr), Rate: 1.0 / 3600, Burst: 50, Timeout: patient, OnOutage: throttle.RefuseAll,
		}))
	}
	for i := range 100 {
		d := instances[i%2].Take(t.Context(), "", 1)
		require.Equal(t, i < 50, d.OK)
		require.Equal(t, max(0, 49-i), d.Remaining)
		require.LessOrEqual(t, d.RetryAfter, time.Hour)
	}
	for _, s := range instances {
		require.EqualValues(t, 0, s.Stats().Failed)
	}
}
