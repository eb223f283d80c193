package lease_test

import (
	"context"
	"crypto/rand"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/redislease"
	"github.com/go-resilience/resilience/lease/storetest"
	"github.com/go-resilience/resilience/resilienceredis"
)

func redisStore(client redis.UniversalClient, prefix string) lease.Store {
	return redislease.New(redislease.Config{
		Prefix: prefix,
		Eval:   resilienceredis.Eval(client),
	})
}

func redisClient(t testing.TB, addr string) *redis.Client {
	client := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true, MaxRetries: -1})
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func newRedisStore(t testing.TB) lease.Store {
	client := redisClient(t, services.Redis(t))
	return redisStore(client, redisPrefix(t, client))
}

// redisPrefix returns a prefix of keys that are deleted when the test ends.
func redisPrefix(t testing.TB, client *redis.Client) string {
	prefix := "lease-test:" + rand.Text() + ":"
	t.Cleanup(func() {
		keys, _ := client.Keys(context.Background(), prefix+"*").Result()
		for _, key := range keys {
			client.Del(context.Background(), key)
		}
	})
	return prefix
}

func TestRedisStore(t *testing.T) {
	t.Parallel()
	storetest.Run(t, func(t *testing.T) lease.Store { return newRedisStore(t) })
}

// TestRedisStoreOfClientThatRepeats: a client such as go-redis runs a script again if the reply was lost.
func TestRedisStoreOfClientThatRepeats(t *testing.T) {
	t.Parallel()
	storetest.Run(t, func(t *testing.T) lease.Store {
		client := redisClient(t, services.Redis(t))
		eval := resilienceredis.Eval(client)
		return redislease.New(redislease.Config{
			Prefix: redisPrefix(t, client),
			Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
				if _, err := eval(ctx, script, keys, args...); err != nil {
					return nil, err
				}
				return eval(ctx, script, keys, args...)
			},
		})
	})
}

// TestRedisRunIsNotForgotten: a lease that nobody holds is kept for a day, and one of Every for ever.
func TestRedisRunIsNotForgotten(t *testing.T) {
	t.Parallel()
	client, prefix, ctx := redisClient(t, services.Redis(t)), "lease-test:"+rand.Text()+":", t.Context()
	store := redisStore(client, prefix)
	t.Cleanup(func() { client.Del(context.Background(), prefix+"a") })
	_, err := store.Acquire(ctx, lease.Request{Name: "a", Token: "x", TTL: time.Hour})
	require.NoError(t, err)
	require.InDelta(t, 25*time.Hour, client.PTTL(ctx, prefix+"a").Val(), float64(time.Minute))
	require.NoError(t, store.Renew(ctx, lease.Request{Name: "a", Token: "x", TTL: time.Hour, Run: 1}))
	require.NoError(t, store.Release(ctx, "a", "x"))
	require.Equal(t, time.Duration(-1), client.PTTL(ctx, prefix+"a").Val())
}

// TestRedisLeaderLearnsOfAnEmptyRestart has another lead while the last leader still does,
// which only epochs can tell apart.
func TestRedisLeaderLearnsOfAnEmptyRestart(t *testing.T) {
	t.Parallel()
	server := services.NewRedis(t)
	store := redisStore(redisClient(t, server.Addr), "")
	cfg := lease.Config{Name: "a", TTL: 3 * time.Second}
	one, err := quiet(store, cfg).Campaign(t.Context())
	require.NoError(t, err)
	server.Kill()
	server.Start()
	two, err := quiet(store, cfg).Campaign(t.Context())
	require.NoError(t, err)
	require.Greater(t, two.Epoch(), one.Epoch())
	select {
	case <-one.Context().Done():
		require.ErrorIs(t, context.Cause(one.Context()), lease.ErrLost)
	case <-time.After(3 * time.Second):
		require.Fail(t, "the first leader has not heard of it")
	}
	require.ErrorIs(t, one.Fence(t.Context(), nil), lease.ErrLost)
	require.ErrorIs(t, two.Fence(t.Context(), nil), lease.ErrNoFence)
	require.NoError(t, two.Resign(t.Context()))
}
