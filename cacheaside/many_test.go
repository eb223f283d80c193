package cacheaside_test

import (
	"context"
	"errors"
	"iter"
	"maps"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// many is a source that is read by LoadMany, one second at a time.
type many struct {
	mu    sync.Mutex
	asked [][]int
	err   func(ctx context.Context) error
}

func (m *many) load(ctx context.Context, keys []int) (map[int]int, error) {
	keys = slices.Clone(keys)
	slices.Sort(keys)
	m.mu.Lock()
	m.asked = append(m.asked, keys)
	m.mu.Unlock()
	select {
	case <-time.After(time.Second):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if m.err != nil {
		return nil, m.err(ctx)
	}
	values := make(map[int]int)
	for _, k := range keys {
		if k < 100 {
			values[k] = 10 * k
		}
	}
	values[1000] = 1 // nobody asked for it
	return values, nil
}

func (m *many) one(context.Context, int) (int, error) {
	time.Sleep(time.Second)
	return -1, nil
}

func TestGetManyLoadsWhatIsMissingAtOnce(t *testing.T) {
	for _, tier := range []string{"memory", "both", "store"} {
		t.Run(tier, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var src many
				cfg := cacheaside.Config[int, int]{Load: src.one, LoadMany: src.load, NotFoundTTL: time.Minute}
				if tier != "memory" {
					cfg.Store = newFakeStore().connect()
				}
				if tier == "store" {
					cfg.Capacity = -1
				}
				c := cacheaside.New(cfg)
				defer c.Close()
				synctest.Wait()
				start := time.Now()
				got, err := c.GetMany(t.Context(), []int{1, 2, 2, 100})
				require.NoError(t, err)
				require.Equal(t, map[int]int{1: 10, 2: 20}, got)
				got, err = c.GetMany(t.Context(), []int{3, 2, 1, 100})
				require.NoError(t, err)
				require.Equal(t, map[int]int{1: 10, 2: 20, 3: 30}, got)
				require.Equal(t, [][]int{{1, 2, 100}, {3}}, src.asked)
				require.Equal(t, 2*time.Second, time.Since(start))
				_, ok := c.Peek(1000)
				require.False(t, ok)
				got, err = c.GetMany(t.Context(), nil)
				require.NoError(t, err)
				require.Empty(t, got)
			})
		})
	}
}

func TestGetManyWithoutLoadMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := cacheaside.New(cacheaside.Config[int, int]{
			Loads: 4,
			Load: func(_ context.Context, k int) (int, error) {
				time.Sleep(time.Second)
				switch k {
				case 3:
					return 0, errLoad
				case 4:
					return 0, cacheaside.ErrNotFound
				}
				return k, nil
			},
		})
		defer c.Close()
		start := time.Now()
		got, err := c.GetMany(t.Context(), []int{1, 2, 3, 4, 5, 6, 7, 8})
		require.ErrorIs(t, err, errLoad)
		require.EqualError(t, err, "cacheaside: 3: "+errLoad.Error())
		require.Equal(t, map[int]int{1: 1, 2: 2, 5: 5, 6: 6, 7: 7, 8: 8}, got)
		require.Equal(t, 2*time.Second, time.Since(start))
	})
}

func TestGetManyAndGetShareTheirFlights(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var src many
		c := cacheaside.New(cacheaside.Config[int, int]{Load: src.one, LoadMany: src.load})
		defer c.Close()
		var wg sync.WaitGroup
		wg.Go(func() {
			got, err := c.GetMany(t.Context(), []int{1, 2})
			if err != nil || !maps.Equal(got, map[int]int{1: 10, 2: 20}) {
				t.Errorf("%v, %v", got, err)
			}
		})
		synctest.Wait()
		wg.Go(func() {
			if v, err := c.Get(t.Context(), 2); err != nil || v != 20 {
				t.Errorf("%v, %v", v, err)
			}
		})
		wg.Go(func() {
			got, err := c.GetMany(t.Context(), []int{2, 3})
			if err != nil || !maps.Equal(got, map[int]int{2: 20, 3: 30}) {
				t.Errorf("%v, %v", got, err)
			}
		})
		wg.Wait()
		require.Equal(t, [][]int{{1, 2}, {3}}, src.asked)
	})
}

func TestBatchIsOvertakenKeyByKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var src many
		c := cacheaside.New(cacheaside.Config[int, int]{Load: src.one, LoadMany: src.load})
		defer c.Close()
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = c.GetMany(t.Context(), []int{1, 2}) })
		synctest.Wait()
		require.NoError(t, c.Invalidate(t.Context(), 1))
		wg.Wait()
		_, ok := c.Peek(1)
		require.False(t, ok)
		_, ok = c.Peek(2)
		require.True(t, ok)
	})
}

func TestBatchThatFailsFailsItsKeys(t *testing.T) {
	for name, fail := range map[string]func(context.Context) error{
		"error":  func(context.Context) error { return errLoad },
		"panic":  func(context.Context) error { panic(errLoad) },
		"goexit": func(context.Context) error { runtime.Goexit(); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				src := many{err: fail}
				c := cacheaside.New(cacheaside.Config[int, int]{Load: src.one, LoadMany: src.load})
				defer c.Close()
				got, err := c.GetMany(t.Context(), []int{1, 2})
				require.Empty(t, got)
				if name == "goexit" {
					require.ErrorAs(t, err, new(*cacheaside.PanicError))
				} else {
					require.ErrorIs(t, err, errLoad)
				}
				require.Equal(t, int64(2), c.Stats().Failed)
			})
		})
	}
}

func TestBatchIsCanceledWhenNobodyWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var canceled atomic.Bool
		c := cacheaside.New(cacheaside.Config[int, int]{
			Load: func(context.Context, int) (int, error) { return 0, errLoad },
			LoadMany: func(ctx context.Context, _ []int) (map[int]int, error) {
				<-ctx.Done()
				canceled.Store(errors.Is(ctx.Err(), context.Canceled))
				return nil, ctx.Err()
			},
		})
		defer c.Close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		got, err := c.GetMany(ctx, []int{1, 2, 3})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Empty(t, got)
		synctest.Wait()
		require.True(t, canceled.Load())
		require.Zero(t, c.Stats().Loading)
	})
}

func TestPrimeWarmsMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, tier := range []string{"memory", "both", "store"} {
			src := newSource()
			cfg := cacheaside.Config[int, int]{Load: src.load, TTL: time.Minute, Jitter: -1, Ahead: 1}
			if tier != "memory" {
				cfg.Store = newFakeStore().connect()
			}
			if tier == "store" {
				cfg.Capacity = -1
			}
			c := cacheaside.New(cfg)
			synctest.Wait()
			require.NoError(t, c.Prime(t.Context(), maps.All(map[int]int{1: 10, 2: 20})))
			v, ok := c.Peek(1)
			require.Equal(t, tier != "store", ok)
			if ok {
				require.Equal(t, 10, v)
				mustGet(t, c, 2)
				require.Zero(t, src.loaded(2))
			}
			time.Sleep(time.Minute)
			_, ok = c.Peek(1)
			require.False(t, ok)
			require.NoError(t, c.Close())
		}
	})
}

// What a sequence read before an update must not be put over it.
func TestPrimeIsFencedLikeALoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		other := shared.connect()
		c := cacheaside.New(cacheaside.Config[int, int]{Load: newSource().load, Store: shared.connect()})
		defer c.Close()
		synctest.Wait()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var snapshot iter.Seq2[int, int] = func(yield func(int, int) bool) {
			_ = yield(1, 1) && yield(2, 2)
			_ = c.Invalidate(ctx, 2, 3)    // after and before it is given
			_ = c.Expire(ctx, 4)           // by this process
			_ = other.Invalidate(ctx, "5") // and by another
			_ = yield(3, 3) && yield(4, 4) && yield(5, 5) && yield(6, 6)
			_ = c.InvalidateAll(ctx)
			_ = yield(7, 7)
			cancel()
			_ = yield(8, 8)
		}
		got := func() (keys []int) {
			for k := range 10 {
				if _, ok := c.Peek(k); ok {
					keys = append(keys, k)
				}
			}
			return keys
		}
		require.ErrorIs(t, c.Prime(ctx, func(yield func(int, int) bool) {
			n := 0
			for k, v := range snapshot {
				if n++; n == 7 {
					require.Empty(t, got())
				}
				if !yield(k, v) {
					return
				}
				if n == 6 {
					require.Equal(t, []int{1, 6}, got())
				}
			}
		}), context.Canceled)
		require.Empty(t, got())
	})
}
