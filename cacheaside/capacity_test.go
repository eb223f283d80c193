package cacheaside_test

import (
	"context"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// A change of one key by another process invalidates few other entries, even after Update has raised Capacity. The
// change of a key still invalidates its entry, whether that was loaded before or after the Update.
func TestRaisedCapacitySeparatesEntries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &telling{Store: newFakeStore().connect(), heard: make(chan func(string), 1)}
		c := newCache(t, cacheaside.Config[int, int]{
			Capacity: 5_000, TTL: time.Hour, Store: w, Load: identity, LoadMany: identities, ReplicaLag: time.Nanosecond,
		})
		heard := <-w.heard
		synctest.Wait()         // memory has been cleared, as when a watch starts
		time.Sleep(time.Second) // longer than ReplicaLag
		load := func(from, to int) {
			var keys []int
			for key := from; key < to; key++ {
				keys = append(keys, key)
			}
			_, err := c.GetMany(t.Context(), keys)
			require.NoError(t, err)
		}
		count := func() (n int) {
			for key := range 4_000 {
				if _, ok := c.Peek(key); ok {
					n++
				}
			}
			return n
		}
		load(0, 1000)
		for i := range 50 {
			heard("another " + strconv.Itoa(i))
		}
		heard("3")
		require.Greater(t, count(), 970)                   // the new buckets take over the times of changes
		for _, capacity := range []int{200_000, 100_000} { // a smaller Capacity does not change the number of buckets
			require.NoError(t, c.Update(func(cfg *cacheaside.Config[int, int]) { cfg.Capacity = capacity }))
		}
		_, ok := c.Peek(3)
		require.False(t, ok, "it was invalidated before the Update")
		time.Sleep(time.Second)
		load(1000, 4000)
		before := count()
		require.Greater(t, before, 3900)
		for i := range 100 {
			heard("another " + strconv.Itoa(i))
		}
		require.Less(t, before-count(), 20)
		for _, key := range []int{7, 2007} {
			heard(strconv.Itoa(key))
			_, ok := c.Peek(key)
			require.False(t, ok, key)
		}
	})
}

// With Weight, Capacity bounds the sum of the weights, including the weights of values from the Store.
func TestCapacityBoundsWeights(t *testing.T) {
	for name, store := range map[string]func() cacheaside.Store{
		"memory": func() cacheaside.Store { return nil },
		"store":  func() cacheaside.Store { return newFakeStore().connect() },
	} {
		bubble(t, name, func(t *testing.T) {
			shared := store()
			open := func() *cacheaside.Cache[int, string] {
				return cacheaside.New(cacheaside.Config[int, string]{
					Capacity: 1000, Store: shared, NotFoundTTL: time.Hour,
					Weight: func(key int, value string) int {
						if key < 0 {
							return 1001
						}
						return len(value)
					},
					Load: func(_ context.Context, key int) (string, error) {
						if key < 0 {
							return "", cacheaside.ErrNotFound
						}
						return strings.Repeat("x", key), nil
					},
				})
			}
			for range 2 { // the second one has its values from the Store
				c := open()
				synctest.Wait()
				for range 3 {
					_, err := c.Get(t.Context(), -1)
					require.ErrorIs(t, err, cacheaside.ErrNotFound)
				}
				require.EqualValues(t, 2, c.Stats().Hits, "absence has weight 1")
				for range 3 {
					for key := 91; key < 110; key++ {
						mustGet(t, c, key)
					}
				}
				require.LessOrEqual(t, c.Stats().Entries, int64(10))
				require.GreaterOrEqual(t, c.Stats().Entries, int64(8))
				mustGet(t, c, 1001)
				_, ok := c.Peek(1001)
				require.False(t, ok, "heavier than Capacity")
				require.NoError(t, c.Update(func(cfg *cacheaside.Config[int, string]) { cfg.Capacity = 200 }))
				mustGet(t, c, 100)
				require.LessOrEqual(t, c.Stats().Entries, int64(2))
				require.NoError(t, c.Close())
			}
		})
	}
}

// A Weight that panics fails its load, and delays no other call.
func TestPanicOfWeightFailsTheLoad(t *testing.T) {
	c := newCache(t, cacheaside.Config[int, int]{
		Load: identity, Capacity: 100, Weight: func(key, _ int) int {
			if key == 1 {
				panic("weight")
			}
			return -1
		},
	})
	_, err := c.Get(t.Context(), 1)
	require.ErrorContains(t, err, "weight")
	require.Equal(t, 2, mustGet(t, c, 2))
	_, ok := c.Peek(2)
	require.True(t, ok)
}
