package cacheaside_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// With Weight, Capacity bounds the sum of the weights, including the weights of values from the Store.
func TestCapacityBoundsWeights(t *testing.T) {
	for name, store := range map[string]func() cacheaside.Store{
		"memory": func() cacheaside.Store { return nil },
		"store":  func() cacheaside.Store { return newFakeStore().connect() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				shared := store()
				open := func() *cacheaside.Cache[int, string] {
					return cacheaside.New(cacheaside.Config[int, string]{
						Capacity: 1000, Store: shared,
						Weight: func(_ int, value string) int { return len(value) },
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
