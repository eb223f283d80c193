package cacheaside_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/cacheaside/redisstore"
	"github.com/go-resilience/resilience/cacheaside/storetest"
	"github.com/go-resilience/resilience/internal/integration/services"
)

func TestRedisStoreIsAStore(t *testing.T) {
	addr := services.Redis(t)
	storetest.Run(t, func(t *testing.T, lease, write time.Duration) storetest.Backend {
		prefix := newPrefix(t)
		return storetest.Backend{Connect: func() cacheaside.Store {
			p := newProcess(t, addr)
			t.Cleanup(func() { requireTTLs(t, p, prefix) })
			return p.store(prefix, func(cfg *redisstore.Config) { cfg.LeaseTTL, cfg.WriteTimeout = lease, write })
		}}
	})
}

// TestRedisStoreInAnOutage is TestRedisStoreIsAStore on a server that the tests stop.
func TestRedisStoreInAnOutage(t *testing.T) {
	storetest.Run(t, func(t *testing.T, lease, write time.Duration) storetest.Backend {
		server, prefix := services.NewRedis(t), newPrefix(t)
		return storetest.Backend{
			Connect: func() cacheaside.Store {
				return newProcess(t, server.Addr).store(prefix,
					func(cfg *redisstore.Config) { cfg.LeaseTTL, cfg.WriteTimeout = lease, write })
			},
			Break: func() (restore func()) {
				server.Kill()
				return server.Start
			},
		}
	})
}

// requireTTLs requires that every key that a test has left in Redis expires.
func requireTTLs(t *testing.T, p *process, prefix string) {
	t.Helper()
	ctx := context.Background() // t.Context has ended
	for keys := p.client.Scan(ctx, 0, "*", 1000).Iterator(); keys.Next(ctx); {
		if strings.HasPrefix(keys.Val(), "{"+prefix) {
			ttl, err := p.client.PTTL(ctx, keys.Val()).Result()
			require.NoError(t, err)
			require.NotEqual(t, time.Duration(-1), ttl, "%s does not expire", keys.Val())
		}
	}
}
