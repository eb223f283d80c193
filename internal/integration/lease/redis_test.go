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
)

func redisStore(client redis.UniversalClient, prefix string) *redislease.Store {
	return redislease.New(redislease.Config{
		Prefix: prefix,
		Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
			return redis.NewScript(script).Run(ctx, client, keys, args...).Result()
		},
		Subscribe: func(ctx context.Context, channel string, subscribed func(), message func(string)) error {
			sub := client.Subscribe(ctx, channel)
			defer sub.Close()
			defer context.AfterFunc(ctx, func() { sub.Close() })()
			if _, err := sub.Receive(ctx); err != nil {
				return err
			}
			subscribed()
			for {
				m, err := sub.ReceiveMessage(ctx)
				if err != nil {
					return err
				}
				message(m.Payload)
			}
		},
	})
}

func redisClient(t testing.TB, addr string) *redis.Client {
	client := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true, MaxRetries: -1})
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func newRedisStore(t testing.TB) *redislease.Store {
	client := redisClient(t, services.Redis(t))
	prefix := "lease-test:" + rand.Text() + ":"
	t.Cleanup(func() {
		keys, _ := client.Keys(context.Background(), prefix+"*").Result()
		for _, key := range keys {
			client.Del(context.Background(), key)
		}
	})
	return redisStore(client, prefix)
}

func TestRedisStore(t *testing.T) {
	t.Parallel()
	storetest.Run(t, func(t *testing.T) lease.Store { return newRedisStore(t) })
}

// TestRedisEpochsGrowAfterAnEmptyRestart has Redis lose all that it held.
func TestRedisEpochsGrowAfterAnEmptyRestart(t *testing.T) {
	t.Parallel()
	server := services.NewRedis(t)
	store := redisStore(redisClient(t, server.Addr), "")
	var last int64
	for range 3 {
		rec, err := store.Acquire(t.Context(), lease.Request{Name: "a", Token: rand.Text(), Holder: "x", TTL: time.Hour})
		require.NoError(t, err)
		require.Greater(t, rec.Epoch, last)
		last = rec.Epoch
		server.Kill()
		server.Start()
	}
}

// TestRedisLeaderLearnsOfAnEmptyRestart has another lead while the last leader still does,
// which only epochs can tell apart.
func TestRedisLeaderLearnsOfAnEmptyRestart(t *testing.T) {
	t.Parallel()
	server := services.NewRedis(t)
	store := redisStore(redisClient(t, server.Addr), "")
	cfg := lease.Config{Name: "a", TTL: 3 * time.Second, OnStoreError: func(context.Context, error) {}}
	one, err := lease.New(store, cfg).Campaign(t.Context())
	require.NoError(t, err)
	server.Kill()
	server.Start()
	two, err := lease.New(store, cfg).Campaign(t.Context())
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
