package lease_test

import (
	"context"
	"crypto/rand"
	mathrand "math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/faultproxy"
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

// TestRedisNeverTwo has candidates lead behind networks that fail in every way: while the
// ctx of a term is alive, Redis has no later term.
func TestRedisNeverTwo(t *testing.T) {
	t.Parallel()
	const ttl = 300 * time.Millisecond
	addr, prefix := services.Redis(t), "lease-test:"+rand.Text()+":"
	direct := redisClient(t, addr)
	t.Cleanup(func() { direct.Del(context.Background(), prefix+"a") })
	truth := redisStore(direct, prefix)
	ctx, cancel := context.WithTimeout(t.Context(), 6*time.Second)
	defer cancel()
	var terms atomic.Int64
	var wg sync.WaitGroup
	for i := range 3 {
		proxy := faultproxy.New(t, addr)
		store := redisStore(redisClient(t, proxy.Addr()), prefix)
		wg.Go(func() {
			c := quiet(store, lease.Config{Name: "a", TTL: ttl})
			for ctx.Err() == nil {
				_ = c.Run(ctx, func(ctx context.Context, term lease.Term) error {
					terms.Add(1)
					for until := time.Now().Add(mathrand.N(5 * ttl)); ctx.Err() == nil && time.Now().Before(until); {
						rec, err := truth.Load(context.WithoutCancel(ctx), "a")
						if err == nil && term.Err() == nil && rec.Epoch != term.Epoch() {
							t.Errorf("%d believes that it leads in term %d, in the middle of %d", i, term.Epoch(), rec.Epoch)
						}
						time.Sleep(time.Millisecond)
					}
					return nil
				})
			}
		})
		wg.Go(func() {
			faults := faultproxy.Every(ttl)
			for ctx.Err() == nil {
				time.Sleep(mathrand.N(3 * ttl))
				faults[mathrand.N(len(faults))].Begin(proxy)
				time.Sleep(mathrand.N(2 * ttl))
				proxy.Heal()
			}
		})
	}
	wg.Wait()
	t.Logf("%d terms", terms.Load())
	require.Greater(t, terms.Load(), int64(3))
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
