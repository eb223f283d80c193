package cacheaside_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// hanging returns a cache whose Store answers each call after 250ms with an error. Its keys are in 64 shards.
func hanging(t *testing.T) (*cacheaside.Cache[int, int], *fakeConn) {
	conn := newFakeStore().connect()
	conn.hangs, conn.failing = 250*time.Millisecond, true
	return newCache(t, config{Load: identity, LoadMany: identities, Store: spread{unwatched{conn}}}), conn
}

// A spread is a Store with a shard for each of 64 keys.
type spread struct{ cacheaside.Store }

func (spread) Shard(key string) (n uint8) {
	for _, digit := range key {
		n = 10*n + uint8(digit-'0')
	}
	return n % 64
}

// However many shards it has, a Store that hangs keeps two callers waiting in each ErrorPause.
func TestHangingStoreKeepsTwoWaiting(t *testing.T) {
	for name, do := range map[string]func(t *testing.T, c *cacheaside.Cache[int, int]){
		"Get": func(t *testing.T, c *cacheaside.Cache[int, int]) {
			for key := range 60 {
				mustGet(t, c, key)
			}
		},
		"Write": func(t *testing.T, c *cacheaside.Cache[int, int]) {
			for key := range 20 {
				write(t, c, key)
			}
		},
		"Invalidate": func(t *testing.T, c *cacheaside.Cache[int, int]) {
			for key := range 20 {
				require.ErrorAs(t, c.Invalidate(t.Context(), key), new(*cacheaside.InvalidateError))
			}
		},
		"GetMany": func(t *testing.T, c *cacheaside.Cache[int, int]) {
			keys := make([]int, 60)
			for i := range keys {
				keys[i] = i
			}
			values, err := c.GetMany(t.Context(), keys)
			require.NoError(t, err)
			require.Len(t, values, 60)
		},
	} {
		for _, refused := range []bool{false, true} {
			bubble(t, fmt.Sprint(name, ", refused before ", refused), func(t *testing.T) {
				c, conn := hanging(t)
				if hangs := conn.hangs; refused { // as when a process has died, and then its machine
					conn.hangs = 0
					for key := range 60 {
						write(t, c, key)
					}
					conn.hangs = hangs
				}
				for range 3 {
					start := time.Now()
					do(t, c)
					require.LessOrEqual(t, time.Since(start), 2*conn.hangs)
					time.Sleep(1100 * time.Millisecond)
				}
			})
		}
	}
}
