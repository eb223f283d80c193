package cacheaside_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/cacheaside/redisstore"
	"github.com/go-resilience/resilience/internal/integration/faultproxy"
	"github.com/go-resilience/resilience/internal/integration/services"
)

// impatient gives a Store a short Timeout.
func impatient(cfg *redisstore.Config) {
	cfg.Timeout, cfg.Heartbeat = 100*time.Millisecond, 100*time.Millisecond
}

// A Write whose fence is in place returns no error, even if Redis fails afterwards.
func TestFencedWriteReturnsNoError(t *testing.T) {
	server := services.NewRedis(t)
	prefix := newPrefix(t)
	var row atomic.Int64
	newCache := func(change ...func(*redisstore.Config)) *cacheaside.Cache[int, int64] {
		c := cacheaside.New(cacheaside.Config[int, int64]{
			Load:  func(context.Context, int) (int64, error) { return row.Load(), nil },
			Store: newProcess(t, server.Addr).store(prefix, change...), ErrorPause: 100 * time.Millisecond,
		})
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	writer := newCache(impatient, func(cfg *redisstore.Config) { cfg.WriteTimeout = time.Hour })
	reader := newCache()
	_, err := reader.Get(t.Context(), 1)
	require.NoError(t, err)
	require.NoError(t, writer.Write(t.Context(), 1, func(context.Context) error {
		row.Store(1)
		server.Pause()
		return nil
	}))
	require.Equal(t, int64(1), writer.Stats().PendingInvalidations)
	server.Resume()
	v, err := reader.Get(t.Context(), 1)
	require.NoError(t, err)
	require.Equal(t, int64(1), v)
	require.Eventually(t, func() bool {
		before := reader.Stats().Loaded
		_, err := reader.Get(t.Context(), 1)
		return err == nil && reader.Stats().Loaded == before
	}, time.Minute, 10*time.Millisecond, "cached again, long before the fence expires")
	require.Zero(t, writer.Stats().PendingInvalidations)
}

// A command that arrives after its client has timed out leaves no fence for which other processes would wait.
func TestCommandsThatArriveLateLeaveNothing(t *testing.T) {
	addr := services.Redis(t)
	for name, act := range map[string]func(c *cacheaside.Cache[int, int]){
		"fence": func(c *cacheaside.Cache[int, int]) {
			_ = c.Write(t.Context(), 1, func(context.Context) error { return nil })
		},
	} {
		t.Run(name, func(t *testing.T) {
			prefix := newPrefix(t)
			proxy := faultproxy.New(t, addr)
			long := func(cfg *redisstore.Config) { cfg.LeaseTTL, cfg.WriteTimeout = time.Hour, time.Hour }
			load := func(context.Context, int) (int, error) { return 1, nil }
			c := cacheaside.New(cacheaside.Config[int, int]{Load: load,
				Store: newProcess(t, proxy.Addr()).store(prefix, long, impatient)})
			defer c.Close()
			other := cacheaside.New(cacheaside.Config[int, int]{Load: load,
				Store: newProcess(t, addr).store(prefix, long)})
			defer other.Close()
			_, err := c.Get(t.Context(), 2) // it is connected
			require.NoError(t, err)
			proxy.Hold(faultproxy.ToServer)
			act(c)
			// the command that timed out arrives before the command that reverts it, after the ErrorPause of a second
			proxy.Heal()
			require.Eventually(t, func() bool {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				before := other.Stats().Loaded
				_, err := other.Get(ctx, 1)
				return err == nil && other.Stats().Loaded == before
			}, time.Minute, 10*time.Millisecond)
		})
	}
}
