package cacheaside_test

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// A notifier is a Store that passes the test the function that reports changes.
type notifier struct {
	cacheaside.Store
	changed chan func(string)
}

func (n notifier) Watch(ctx context.Context, up func(), heard func(string)) error {
	up()
	n.changed <- heard
	<-ctx.Done()
	return ctx.Err()
}

// After Update has raised Capacity, a change of one key invalidates few other entries. The change of a key still
// invalidates its entry, whether that was loaded before or after the Update.
func TestRaisedCapacitySeparatesEntries(t *testing.T) {
	n := notifier{newFakeStore().connect(), make(chan func(string), 1)}
	many := func(_ context.Context, keys []int) (map[int]int, error) {
		values := make(map[int]int, len(keys))
		for _, key := range keys {
			values[key] = key
		}
		return values, nil
	}
	c := newCache(t, cacheaside.Config[int, int]{
		Capacity: 5_000, TTL: time.Hour, Store: n, LoadMany: many, ReplicaLag: time.Nanosecond,
		Load: func(_ context.Context, key int) (int, error) { return key, nil },
	})
	heard := <-n.changed
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
	heard("another") // the new buckets take over the times of changes
	load(0, 1000)
	for _, capacity := range []int{200_000, 100_000} { // a smaller Capacity does not change the number of buckets
		require.NoError(t, c.Update(func(cfg *cacheaside.Config[int, int]) { cfg.Capacity = capacity }))
	}
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
}
