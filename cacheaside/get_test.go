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

func TestSkipMemoryLoadsAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var version, loads atomic.Int32
		var failing atomic.Bool
		c := newCache(t, cacheaside.Config[int, int]{StaleIfError: time.Hour,
			Load: func(context.Context, int) (int, error) {
				loads.Add(1)
				v := version.Load()
				time.Sleep(time.Second)
				if failing.Load() {
					return 0, errLoad
				}
				return int(v), nil
			}})
		skip := func() (int, error) {
			v, _, err := c.GetWith(t.Context(), 1, cacheaside.GetOptions{SkipMemory: true})
			return v, err
		}
		require.Equal(t, 0, mustGet(t, c, 1))
		version.Store(1)
		require.Equal(t, 0, mustGet(t, c, 1))
		v, err := skip()
		require.NoError(t, err)
		require.Equal(t, 1, v)
		require.Equal(t, 1, mustGet(t, c, 1)) // kept
		require.Equal(t, int32(2), loads.Load())

		// A load in flight may have read before the call.
		require.NoError(t, c.Invalidate(t.Context(), 1))
		go func() { _, _ = c.Get(t.Context(), 1) }()
		time.Sleep(time.Millisecond)
		version.Store(2)
		v, err = skip()
		require.NoError(t, err)
		require.Equal(t, 2, v)
		require.Equal(t, 2, mustGet(t, c, 1))

		failing.Store(true)
		_, err = skip()
		require.ErrorIs(t, err, errLoad)
		require.Equal(t, 2, mustGet(t, c, 1)) // the entry in memory stays
	})
}

// A Get with SkipMemory does not get a stale value from memory if its load is slow.
func TestGetWithSkipMemoryWaitsForASlowLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var loads atomic.Int32
		c := newCache(t, cacheaside.Config[int, int]{
			TTL: time.Minute, Jitter: cacheaside.None, StaleIfError: time.Hour, SoftTimeout: time.Second,
			Load: func(context.Context, int) (int, error) {
				time.Sleep(10 * time.Second)
				return int(loads.Add(1)), nil
			},
		})
		require.Equal(t, 1, mustGet(t, c, 1))
		time.Sleep(2 * time.Minute)
		v, _, err := c.GetWith(t.Context(), 1, cacheaside.GetOptions{SkipMemory: true})
		require.NoError(t, err)
		require.Equal(t, 2, v)
	})
}

// A call with SkipMemory gets a stale value from the Store as soon as other callers do. Of several calls, each gets the
// stale value, but none gets it after an invalidation.
func TestEachSkipMemoryServesStaleStoreValue(t *testing.T) {
	for name, test := range map[string]struct {
		soft    time.Duration
		change  func(*cacheaside.Cache[int, int]) error
		want    error
		elapsed time.Duration
	}{
		"the load fails":                   {0, nil, nil, 10 * time.Second},
		"the load is slow":                 {time.Second, nil, nil, time.Second},
		"the load fails, invalidated":      {0, invalidate1, errLoad, 10 * time.Second},
		"the load is slow, invalidated":    {2 * time.Second, invalidate1, errLoad, 10 * time.Second},
		"the load is slow, written":        {2 * time.Second, write1, errLoad, 10 * time.Second},
		"the load is slow, invalidate all": {2 * time.Second, invalidateAll, errLoad, 10 * time.Second},
	} {
		bubble(t, name, func(t *testing.T) {
			var takes time.Duration
			var fault error
			store := newFakeStore()
			store.lease = time.Hour
			c := newCache(t, cacheaside.Config[int, int]{
				TTL: time.Minute, Jitter: cacheaside.None, StaleIfError: time.Hour, SoftTimeout: test.soft,
				Store: store.connect(),
				Load: func(context.Context, int) (int, error) {
					time.Sleep(takes)
					return 1, fault
				},
			})
			synctest.Wait()
			mustGet(t, c, 1)
			time.Sleep(2 * time.Minute)
			takes, fault = 10*time.Second, errLoad
			begun, first := time.Now(), make(chan error)
			second := make(chan error, 1)
			skip := func() error {
				_, source, err := c.GetWith(t.Context(), 1, cacheaside.GetOptions{SkipMemory: true})
				require.Equal(t, err == nil, source == cacheaside.SourceStale)
				return err
			}
			go func() { first <- skip() }()
			synctest.Wait()
			go func() { second <- skip() }()
			synctest.Wait()
			if test.change != nil {
				require.NoError(t, test.change(c))
			}
			require.ErrorIs(t, <-first, test.want)
			require.Equal(t, test.elapsed, time.Since(begun))
			if test.want == nil {
				require.NoError(t, <-second)
			}
		})
	}
}

// The load of an earlier flight fails, after a Get with SkipMemory has loaded a new value.
func TestFailedLoadServesNewerValue(t *testing.T) {
	for _, skip := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			store := newFakeStore()
			store.lease = 5 * time.Second
			var loads atomic.Int64
			c := newCache(t, cacheaside.Config[int, int]{
				TTL: time.Minute, Jitter: cacheaside.None, StaleIfError: time.Hour, Store: store.connect(),
				Load: func(context.Context, int) (int, error) {
					if value := loads.Add(1); value != 2 {
						return int(value), nil
					}
					time.Sleep(20 * time.Second)
					return 0, errLoad
				},
			})
			synctest.Wait()
			mustGet(t, c, 1)
			time.Sleep(2 * time.Minute)
			first := make(chan int)
			go func() {
				value, _, _ := c.GetWith(t.Context(), 1, cacheaside.GetOptions{SkipMemory: skip})
				first <- value
			}()
			time.Sleep(6 * time.Second) // the lease of the first load has expired
			value, _, err := c.GetWith(t.Context(), 1, cacheaside.GetOptions{SkipMemory: true})
			require.NoError(t, err)
			require.Equal(t, 3, value)
			require.Equal(t, 3, <-first)
		})
	}
}

// If a load fails, a stale value of the Store is served instead of an older one in memory.
func TestFailedLoadServesNewerStoreValue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared, loads := newFakeStore(), 0
		open := func() *cacheaside.Cache[int, int] {
			return newCache(t, cacheaside.Config[int, int]{
				TTL: time.Minute, StaleIfError: time.Hour, Store: shared.connect(),
				Load: func(context.Context, int) (int, error) {
					if loads++; loads > 2 {
						return 0, errLoad
					}
					return loads, nil
				},
			})
		}
		c, other := open(), open()
		synctest.Wait()
		require.Equal(t, 1, mustGet(t, c, 1))
		time.Sleep(2 * time.Minute)
		require.Equal(t, 2, mustGet(t, other, 1))
		time.Sleep(2 * time.Minute)
		require.Equal(t, 2, mustGet(t, c, 1))
		require.Equal(t, 3, loads)
		require.Equal(t, 2, mustGet(t, c, 1), "during ErrorPause")
		require.Equal(t, 3, loads)
	})
}

// A call that gets a stale value from memory does not join the load of a Get with SkipMemory. The load is canceled when
// that Get's caller cancels.
func TestStaleCallerDoesNotKeepLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		loads := 0
		c := newCache(t, cacheaside.Config[int, int]{
			TTL: time.Minute, StaleWhileRevalidate: time.Hour,
			Load: func(ctx context.Context, key int) (int, error) {
				if loads++; loads > 1 {
					<-ctx.Done()
				}
				return key, ctx.Err()
			},
		})
		mustGet(t, c, 1)
		time.Sleep(2 * time.Minute)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		go func() { _, _, _ = c.GetWith(ctx, 1, cacheaside.GetOptions{SkipMemory: true}) }()
		synctest.Wait()
		mustGet(t, c, 1)
		require.EqualValues(t, 1, c.Stats().Stale)
		time.Sleep(2 * time.Second)
		require.EqualValues(t, 1, c.Stats().Canceled)
		require.Equal(t, 2, loads)
	})
}

func invalidate1(c *cacheaside.Cache[int, int]) error { return c.Invalidate(context.Background(), 1) }
func invalidateAll(c *cacheaside.Cache[int, int]) error {
	return c.InvalidateAll(context.Background())
}
func write1(c *cacheaside.Cache[int, int]) error {
	return c.Write(context.Background(), 1, func(context.Context) error { return nil })
}

func identity(_ context.Context, key int) (int, error) { return key, nil }

// identities is identity, as a LoadMany.
func identities(_ context.Context, keys []int) (map[int]int, error) {
	values := make(map[int]int, len(keys))
	for _, key := range keys {
		values[key] = key
	}
	return values, nil
}

func TestHitDoesNotAllocate(t *testing.T) {
	c := newCache(t, cacheaside.Config[int, int]{Load: identity, RefreshAhead: 1, StaleWhileRevalidate: 1,
		StaleIfError: 1})
	ctx := t.Context()
	if _, err := c.Get(ctx, 1); err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(1000, func() { _, _ = c.Get(ctx, 1) }); n > 0 {
		t.Errorf("a hit makes %v allocations", n)
	}
}

// GetWith returns the source of its result.
func TestGetWithReturnsTheSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fails := false
		shared := newFakeStore()
		open := func() *cacheaside.Cache[int, int] {
			c := newCache(t, cacheaside.Config[int, int]{
				TTL: time.Minute, Jitter: cacheaside.None, StaleIfError: time.Hour, NotFoundTTL: time.Minute,
				Store: shared.connect(), ErrorPause: cacheaside.None,
				Load: func(_ context.Context, key int) (int, error) {
					switch {
					case key < 0:
						return 0, cacheaside.ErrNotFound
					case fails:
						return 0, errLoad
					}
					return key, nil
				},
			})
			synctest.Wait()
			return c
		}
		a, b := open(), open()
		is := func(c *cacheaside.Cache[int, int], key int, skip bool, want cacheaside.Source, wantErr error) {
			t.Helper()
			_, source, err := c.GetWith(t.Context(), key, cacheaside.GetOptions{SkipMemory: skip})
			require.Equal(t, want, source)
			require.ErrorIs(t, err, wantErr)
		}
		is(a, 1, false, cacheaside.SourceLoaded, nil)
		is(a, 1, false, cacheaside.SourceFresh, nil)
		is(b, 1, true, cacheaside.SourceFresh, nil)
		is(a, -1, false, cacheaside.SourceLoaded, cacheaside.ErrNotFound)
		is(a, -1, false, cacheaside.SourceFresh, cacheaside.ErrNotFound)
		is(b, -1, false, cacheaside.SourceFresh, cacheaside.ErrNotFound)
		fails = true
		is(a, 2, false, "", errLoad)
		time.Sleep(2 * time.Minute)
		is(a, 1, false, cacheaside.SourceStale, nil)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, source, err := a.GetWith(ctx, 1, cacheaside.GetOptions{})
		require.ErrorIs(t, err, context.Canceled)
		require.Empty(t, source)
	})
}
