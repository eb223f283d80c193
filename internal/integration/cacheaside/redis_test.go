// Package cacheaside_test tests the cache and its store on a real Redis.
package cacheaside_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/cacheaside/redisstore"
	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/resilienceredis"
)

// A process represents one process of an application. It has its own connection pool.
type process struct {
	client *redis.Client
	evals  atomic.Int64 // round trips
}

func newProcess(t testing.TB, addr string) *process {
	p := &process{client: redis.NewClient(&redis.Options{
		Addr: addr, ContextTimeoutEnabled: true, MaxRetries: -1, DialTimeout: time.Second, PoolSize: 64,
	})}
	t.Cleanup(func() { _ = p.client.Close() })
	return p
}

func (p *process) eval(ctx context.Context, script string, keys []string, args ...any) (any, error) {
	p.evals.Add(1)
	return resilienceredis.Eval(p.client)(ctx, script, keys, args...)
}

func (p *process) subscribe(ctx context.Context, channel string, subscribed func(), message func(string)) error {
	return resilienceredis.Subscribe(p.client)(ctx, channel, subscribed, message)
}

func (p *process) store(prefix string, change ...func(*redisstore.Config)) cacheaside.Store {
	cfg := redisstore.Config{Prefix: prefix, Eval: p.eval, Subscribe: p.subscribe, Timeout: 5 * time.Second}
	for _, f := range change {
		f(&cfg)
	}
	return redisstore.New(cfg)
}

func newPrefix(t testing.TB) string {
	return fmt.Sprintf("test-%s-%x", t.Name(), rand.Uint64())
}

// awaitWatch waits until the cache is notified of changes by other processes.
func awaitWatch(t testing.TB, cache interface{ Stats() cacheaside.Stats }) {
	t.Helper()
	require.Eventually(t, func() bool { return cache.Stats().Watching == 1 }, time.Minute, time.Millisecond)
}

func TestRoundTrips(t *testing.T) {
	p := newProcess(t, services.Redis(t))
	for name, skip := range map[string]bool{"memory in front": false, "memory skipped": true} {
		t.Run(name, func(t *testing.T) {
			prefix := newPrefix(t)
			cfg := cacheaside.Config[int, string]{
				Load:  func(context.Context, int) (string, error) { return "v", nil },
				Store: p.store(prefix),
			}
			c := cacheaside.New(cfg)
			defer c.Close()
			awaitWatch(t, c)
			count := func(f func()) int64 {
				before := p.evals.Load()
				f()
				return p.evals.Load() - before
			}
			get := func() {
				v, _, err := c.GetWith(t.Context(), 1, cacheaside.GetOptions{SkipMemory: skip})
				require.NoError(t, err)
				require.Equal(t, "v", v)
			}
			require.Equal(t, int64(2), count(get), "a miss")
			hit := int64(1)
			if !skip {
				hit = 0
			}
			require.Equal(t, hit, count(get), "a hit")

			cfg.Store = p.store(prefix)
			other := cacheaside.New(cfg)
			defer other.Close()
			require.Equal(t, int64(1), count(func() {
				_, err := other.Get(t.Context(), 1)
				require.NoError(t, err)
			}), "a hit of another process")
			require.Equal(t, int64(1), count(func() { require.NoError(t, c.Invalidate(t.Context(), 1)) }))
			require.Equal(t, int64(2), count(func() {
				require.NoError(t, c.Write(t.Context(), 1, func(context.Context) error { return nil }))
			}), "fence and unfence")
		})
	}
}
