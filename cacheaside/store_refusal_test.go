package cacheaside_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// A picky Store refuses a Fill with a value of more than 100 bytes, after a while.
type picky struct {
	cacheaside.Store
	takes time.Duration
}

func (p picky) Fill(ctx context.Context, values ...cacheaside.Entry) ([]bool, error) {
	for _, v := range values {
		if len(v.Value) > 100 {
			time.Sleep(p.takes)
			return nil, errors.New("the connection was reset")
		}
	}
	return p.Store.Fill(ctx, values...)
}

// Each process loads a value that the Store refuses, without waiting. Other values in the shard are shared, even if
// they are stored by the same call, and the Store does not count as lost.
func TestRefusedValueIsNoOutage(t *testing.T) {
	for name, takes := range map[string]time.Duration{"fast": 0, "after a timeout": 250 * time.Millisecond} {
		for lag, lagging := range map[time.Duration]string{0: "", time.Nanosecond: ", with a ReplicaLag"} {
			bubble(t, name+lagging, func(t *testing.T) {
				shared, src := newFakeStore(), newSource()
				many := func(ctx context.Context, keys []int) (map[int]string, error) {
					values := map[int]string{}
					for _, key := range keys {
						_, _ = src.load(ctx, key)
						values[key] = strings.Repeat("x", key)
					}
					return values, nil
				}
				var log eventLog
				open := func() *cacheaside.Cache[int, string] {
					c := newCache(t, cacheaside.Config[int, string]{
						Store: picky{unwatched{shared.connect()}, takes}, ReplicaLag: lag, LoadMany: many,
						Load: func(ctx context.Context, key int) (string, error) {
							values, err := many(ctx, []int{key})
							return values[key], err
						},
					})
					c.Observe(log.add)
					return c
				}
				keys := []int{11, 201, 21, 1001, 1} // in one shard; 201 and 1001 are refused
				a, b := open(), open()
				values, err := a.GetMany(t.Context(), keys)
				require.NoError(t, err)
				require.Len(t, values, len(keys))
				time.Sleep(2 * time.Second)
				for range 3 {
					for _, key := range keys {
						start := time.Now()
						require.Len(t, mustGet(t, b, key), key)
						require.LessOrEqual(t, time.Since(start), takes)
						time.Sleep(takes) // the lease ends after the Get
						synctest.Wait()
					}
				}
				require.Zero(t, log.count(cacheaside.EventStoreLost))
				require.Equal(t, 4, src.loaded(201))
				require.Equal(t, 4, src.loaded(1001))
				for _, key := range []int{1, 11, 21} {
					most := 1
					if lag > 0 {
						most = 2
					}
					require.LessOrEqual(t, src.loaded(key), most, key)
				}
				refused := 2 // values refused in the GetMany; each of the other Gets adds one
				if lag > 0 {
					refused = 1 // 201 is not tried
				}
				require.Equal(t, refused+6, log.count(cacheaside.EventCodecFailed))
			})
		}
	}
}

// If several shards refuse values at the same time, the leases of all of these values are released.
func TestSeveralShardsRefuseValues(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := newFakeStore().connect()
		c := newCache(t, config{
			Load: identity, LoadMany: identities,
			Store: unwatched{flaky{conn, func(call string) bool { return call == "Fill" }}},
		})
		_, err := c.GetMany(t.Context(), []int{0, 1, 2, 3, 4, 5, 6, 7})
		require.NoError(t, err)
		synctest.Wait()
		require.Equal(t, 8, conn.called("Release"))
	})
}

// If Release fails after a failed Fill, the Store is lost, and not called again.
func TestFailedFillOfALostStoreIsAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log eventLog
		conn := newFakeStore().connect()
		conn.hangs = 250 * time.Millisecond
		c := newCache(t, cacheaside.Config[int, int]{
			Store: unwatched{conn},
			Load: func(context.Context, int) (int, error) {
				conn.fail()
				return 1, nil
			},
		})
		c.Observe(log.add)
		start := time.Now()
		mustGet(t, c, 1)
		require.Equal(t, conn.hangs, time.Since(start), "the caller waits for the Fill only")
		time.Sleep(conn.hangs)
		synctest.Wait()
		require.Equal(t, 1, log.count(cacheaside.EventStoreLost))
		for _, e := range log.events {
			if e.Kind == cacheaside.EventStoreLost {
				require.Equal(t, errStore, e.Err)
			}
		}
		require.Equal(t, 1, conn.called("Release"))
		require.Zero(t, log.count(cacheaside.EventCodecFailed))
	})
}

// A Fill after an outage shows that the Store works again, even if the Store refuses the value.
func TestFillEndsAnOutage(t *testing.T) {
	for name, size := range map[string]int{"a value": 1, "a refused value": 200} {
		bubble(t, name, func(t *testing.T) {
			var log eventLog
			conn := newFakeStore().connect()
			c := newCache(t, cacheaside.Config[int, string]{
				Store: picky{unwatched{conn}, 0},
				Load: func(_ context.Context, key int) (string, error) {
					if key == 1 {
						time.Sleep(5 * time.Second)
					}
					return strings.Repeat("x", size), nil
				},
			})
			c.Observe(log.add)
			go mustGet(t, c, 1)
			synctest.Wait()
			conn.breakShard("1", true)
			mustGet(t, c, 11)
			require.Equal(t, 1, log.count(cacheaside.EventStoreLost))
			conn.breakShard("1", false)
			time.Sleep(6 * time.Second)
			require.Equal(t, 1, log.count(cacheaside.EventStoreRestored))
		})
	}
}

// A Store that fails fast after a slow Fill does not count as hanging, so it is called with the next invalidation.
func TestFastFailureAfterSlowFillIsNoHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn, called := newFakeStore().connect(), map[string]int{}
		c := newCache(t, config{
			Load: identity, LoadMany: identities,
			Store: unwatched{flaky{conn, func(call string) bool {
				called[call]++
				if call == "Fill" && called[call] == 1 {
					time.Sleep(250 * time.Millisecond)
				}
				return call == "Fill" || call == "Release" && called[call] == 2
			}}},
		})
		_, err := c.GetMany(t.Context(), []int{11, 21})
		require.NoError(t, err)
		synctest.Wait()
		require.Equal(t, map[string]int{"Fill": 2, "Release": 2}, called)
		require.NoError(t, c.Invalidate(t.Context(), 11))
		require.Equal(t, 1, called["Invalidate"])
	})
}
