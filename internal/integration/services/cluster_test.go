package services_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/services"
)

func TestRedisCluster(t *testing.T) {
	began := time.Now()
	c := services.NewRedisCluster(t)
	t.Logf("started in %v", time.Since(began))
	rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: c.Addrs()})
	defer rdb.Close()
	var perMaster [3]int
	for i := range 300 {
		key := fmt.Sprintf("{key%d}", i%30)
		perMaster[c.MasterOf(key)]++
		require.NoError(t, rdb.Set(t.Context(), fmt.Sprintf("%s%d", key, i), i, time.Hour).Err())
	}
	t.Log(perMaster)
	for i := range 30 {
		key := fmt.Sprintf("{key%d}", i)
		to := (c.MasterOf(key) + 1) % 3
		c.Move(key, to, func() {
			for j := i; j < 300; j += 30 {
				require.Equal(t, fmt.Sprint(j), rdb.Get(t.Context(), fmt.Sprintf("%s%d", key, j)).Val())
				require.ErrorIs(t, rdb.Get(t.Context(), fmt.Sprintf("%sno%d", key, j)).Err(), redis.Nil, "by way of the new master")
			}
		})
		require.Equal(t, to, c.MasterOf(key))
		for j := i; j < 300; j += 30 {
			require.Equal(t, fmt.Sprint(j), rdb.Get(t.Context(), fmt.Sprintf("%s%d", key, j)).Val())
		}
	}
	moved := "{key0}0"
	dead := c.MasterOf(moved)
	c.Masters[dead].Kill()
	for i := range 300 {
		key := fmt.Sprintf("{key%d}", i%30)
		if c.MasterOf(key) != dead {
			require.NoError(t, rdb.Get(t.Context(), fmt.Sprintf("%s%d", key, i)).Err())
		}
	}
	c.Masters[dead].Start()
	require.Equal(t, dead, c.MasterOf(moved), "it has its slots, also those that were moved to it")
	require.ErrorIs(t, rdb.Get(context.Background(), moved).Err(), redis.Nil, "and no keys")
}
