package cacheaside_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// Without ErrorPause, memory does not cache a stale value of the Store, which may have a new value by now.
func TestStaleStoreValueUncachedWithoutPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var loads atomic.Int64
		var failing atomic.Bool
		shared := newFakeStore()
		cfg := cacheaside.Config[int, int64]{
			TTL: time.Minute, StaleWhileRevalidate: time.Hour, ErrorPause: cacheaside.None, Store: shared.connect(),
			Load: func(context.Context, int) (int64, error) {
				if failing.Load() {
					return 0, errLoad
				}
				return loads.Add(1), nil
			},
		}
		other := newCache(t, cfg)
		cfg.Store = shared.connect()
		c := newCache(t, cfg)
		synctest.Wait()
		mustGet(t, other, 1)
		time.Sleep(2 * time.Minute)
		failing.Store(true)
		require.EqualValues(t, 1, mustGet(t, c, 1))
		synctest.Wait()
		require.EqualValues(t, 1, c.Stats().Failed)
		failing.Store(false)
		require.EqualValues(t, 1, mustGet(t, other, 1))
		synctest.Wait()
		require.EqualValues(t, 2, mustGet(t, c, 1))
	})
}

// A stale value may arrive while callers wait for it, from another process whose load has just ended.
func TestStaleValueArrivesDuringWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		cfg := cacheaside.Config[int, int]{
			TTL: time.Second, Jitter: cacheaside.None, StaleWhileRevalidate: time.Hour, Store: shared.connect(),
			Load: func(context.Context, int) (int, error) { time.Sleep(time.Second); return 1, nil },
		}
		other := newCache(t, cfg)
		cfg.Store = shared.connect()
		c := newCache(t, cfg)
		synctest.Wait()
		go mustGet(t, other, 1)
		synctest.Wait()
		begun := time.Now()
		require.Equal(t, 1, mustGet(t, c, 1))
		require.Less(t, time.Since(begun), 2*time.Second, "it is stale when it is stored, and served during a refresh")
		require.EqualValues(t, 1, c.Stats().Stale)
	})
}

// An unheard Store receives no messages of other processes, which are still in flight.
type unheard struct{ cacheaside.Store }

func (unheard) Watch(ctx context.Context, up func(), _ func(string)) error {
	up()
	<-ctx.Done()
	return ctx.Err()
}

// A flight that starts after an invalidation has no stale value from before, even if the Store still has a fence of
// another process.
func TestRestartedFlightHasNoStaleValue(t *testing.T) {
	type cache = *cacheaside.Cache[int, int]
	for name, get := range map[string]func(context.Context, cache) (int, error){
		"Get": func(ctx context.Context, c cache) (int, error) { return c.Get(ctx, 1) },
		"GetMany": func(ctx context.Context, c cache) (int, error) {
			found, err := c.GetMany(ctx, []int{1})
			return found[1], err
		},
	} {
		bubble(t, name, func(t *testing.T) {
			src, shared := newSource(), newFakeStore()
			store := late{unheard{shared.connect()}, make(chan struct{}), new(atomic.Bool)}
			c := newCache(t, cacheaside.Config[int, int]{
				Load: func(ctx context.Context, key int) (int, error) {
					if src.loaded(1) > 0 {
						time.Sleep(time.Second)
					}
					return src.load(ctx, key)
				},
				TTL: time.Minute, StaleIfError: time.Hour, SoftTimeout: 10 * time.Millisecond, Store: store,
			})
			synctest.Wait()
			require.Equal(t, 0, mustGet(t, c, 1))
			time.Sleep(2 * time.Minute)
			_, err := shared.connect().Fence(t.Context(), "1", "another process")
			require.NoError(t, err)
			require.Equal(t, 0, mustGet(t, c, 1)) // its flight loads without the Store
			store.on.Store(true)
			require.Equal(t, 0, mustGet(t, c, 1)) // the next flight queries the Store
			require.NoError(t, c.Write(t.Context(), 1, src.write(1)))
			close(store.hold) // the answer: still fenced
			synctest.Wait()
			v, err := get(t.Context(), c)
			require.NoError(t, err)
			require.Equal(t, 1, v)
		})
	}
}

// After SoftTimeout, callers get the Store's stale value as soon as the Store has responded, even a caller that joins a
// flight that waits for another process.
func TestSoftTimeoutServesStaleStoreValue(t *testing.T) {
	for name, capacity := range map[string]int{"memory": 0, "no memory": -1} {
		for who, elsewhere := range map[string]bool{"it loads": false, "another process loads": true} {
			bubble(t, name+"/"+who, func(t *testing.T) {
				var takes atomic.Int64
				shared := newFakeStore()
				shared.lease = time.Minute
				cfg := cacheaside.Config[int, int]{
					Load: func(context.Context, int) (int, error) {
						time.Sleep(time.Duration(takes.Load()))
						return 1, nil
					},
					TTL: time.Minute, Jitter: cacheaside.None, StaleIfError: time.Hour, SoftTimeout: 100 * time.Millisecond,
					Store: watchedIf(capacity == 0, shared.connect()),
				}
				other := newCache(t, cfg)
				cfg.Store = slowly{Store: shared.connect(), takes: 200 * time.Millisecond}
				c := newCache(t, cfg)
				synctest.Wait()
				mustGet(t, other, 1)
				time.Sleep(2 * time.Minute)
				takes.Store(int64(20 * time.Second))
				if elsewhere {
					mustGet(t, other, 1)
				}
				for i := range 30 {
					start := time.Now()
					require.Equal(t, 1, mustGet(t, c, 1))
					require.Less(t, time.Since(start), 600*time.Millisecond, i) // two answers, and a rest
					time.Sleep(77 * time.Millisecond)
				}
				require.Equal(t, 1, shared.called("Fill"))
			})
		}
	}
}
