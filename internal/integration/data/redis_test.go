package data_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/resilienceredis"
)

// TestOneNodeOfAClusterIsDown opens its breaker and no other, and what is refused is told for
// each command of a pipeline.
func TestOneNodeOfAClusterIsDown(t *testing.T) {
	cluster := services.NewRedisCluster(t)
	circuits := resilience.NewGroup(func(string) *breaker.Breaker {
		return breaker.New(breaker.Config{ConsecutiveFailures: 3, OpenFor: time.Hour})
	}, resilience.GroupConfig{})
	slots := bulkhead.New(bulkhead.Config{Limit: 4})
	rdb := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: cluster.Addrs(), ContextTimeoutEnabled: true, DialerRetries: 1, DialTimeout: time.Second,
		MinRetryBackoff: time.Millisecond, MaxRetryBackoff: time.Millisecond,
	})
	t.Cleanup(func() { _ = rdb.Close() })
	resilienceredis.Hook(rdb, resilienceredis.Config{Node: func(addr string) resilience.Middleware {
		return resilience.Chain(circuits.By(func(context.Context) string { return addr }), slots.Wrap)
	}})
	eval := resilienceredis.Eval(rdb)
	var keys [3]string // of each master
	for i := 0; keys[0] == "" || keys[1] == "" || keys[2] == ""; i++ {
		key := fmt.Sprintf("{key%d}", i)
		keys[cluster.MasterOf(key)] = key
	}
	set := func() (errs [3]error) {
		for i, key := range keys {
			_, errs[i] = eval(t.Context(), "return redis.call('SET', KEYS[1], ARGV[1], 'PX', 60000)", []string{key}, "v")
		}
		return errs
	}
	require.Equal(t, [3]error{}, set())
	_, err := eval(t.Context(), "return redis.call('LPUSH', KEYS[1], 'x')", []string{keys[1]})
	require.ErrorContains(t, err, "WRONGTYPE", "an answer")

	cluster.Masters[1].Kill()
	for range 5 {
		errs := set()
		require.NoError(t, errs[0])
		require.Error(t, errs[1])
		require.NoError(t, errs[2])
	}
	states := map[string]breaker.State{}
	for addr, circuit := range circuits.All() {
		states[addr] = circuit.State()
	}
	require.Equal(t, map[string]breaker.State{
		cluster.Masters[0].Addr: breaker.Closed, cluster.Masters[1].Addr: breaker.Open,
		cluster.Masters[2].Addr: breaker.Closed,
	}, states)
	cmds, err := rdb.Pipelined(t.Context(), func(p redis.Pipeliner) error {
		for _, key := range keys {
			p.Get(t.Context(), key)
		}
		return nil
	})
	require.Error(t, err)
	require.NoError(t, cmds[0].Err())
	require.ErrorIs(t, cmds[1].Err(), breaker.ErrOpen)
	require.NoError(t, cmds[2].Err())
	require.Zero(t, slots.Stats().InFlight)
}
