package cacheaside_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// Some shards that are down, as those of one server of a cluster, leave the others
// alone.
func TestShardsThatAreDownLeaveTheOthersAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := newFakeStore().connect()
		src := newSource()
		c := cacheaside.New(cacheaside.Config[int, int]{Load: src.load, Store: conn, Capacity: -1, TTL: 24 * time.Hour, ErrorPause: time.Minute})
		defer c.Close()
		for key := range 10 {
			mustGet(t, c, key)
		}
		conn.hangs = 250 * time.Millisecond
		for _, shard := range []string{"0", "1", "2"} {
			conn.breakShard(shard, true)
		}

		// Those that answer meanwhile show that not all is down.
		go mustGet(t, c, 0)
		go mustGet(t, c, 1)
		for range 100 {
			time.Sleep(10 * time.Millisecond)
			for key := 3; key < 10; key++ {
				mustGet(t, c, key)
				require.Equal(t, 1, src.loaded(key))
			}
		}

		// If none was asked meanwhile, the next that is asked for is probed.
		time.Sleep(time.Hour)
		mustGet(t, c, 0)
		mustGet(t, c, 1)
		start := time.Now()
		mustGet(t, c, 5)
		require.Equal(t, 2, src.loaded(5))
		synctest.Wait()
		for key := 3; key < 10; key++ {
			mustGet(t, c, key)
		}
		require.Equal(t, 2, src.loaded(5))
		require.Equal(t, 1, src.loaded(6))
		loads := src.loaded(0)
		mustGet(t, c, 0)
		require.Equal(t, loads+1, src.loaded(0))
		require.Zero(t, time.Since(start), "nobody waited, and the pause of what is down goes on")
	})
}

// A shard that fails at once was not waited for, and says nothing of the others.
func TestShardsThatFailAtOnceLeaveTheOthersAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := newFakeStore().connect()
		src := newSource()
		c := cacheaside.New(cacheaside.Config[int, int]{Load: src.load, Store: conn, Capacity: -1, ErrorPause: time.Minute})
		defer c.Close()
		for key := range 10 {
			mustGet(t, c, key)
		}
		for _, shard := range []string{"0", "1", "2"} {
			conn.breakShard(shard, true)
		}
		for key := range 10 {
			mustGet(t, c, key)
			require.Equal(t, key < 3, src.loaded(key) > 1)
		}
	})
}
