package cacheaside_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// tagged loads from a source. Even keys have the tag "even", all have "all".
func tagged(src *source) func(context.Context, int) (int, error) {
	return func(ctx context.Context, key int) (int, error) {
		cacheaside.SetTags(ctx, "all")
		if key%2 == 0 {
			cacheaside.SetTags(ctx, "even")
		}
		return src.load(ctx, key)
	}
}

func TestInvalidateTagsReachesValuesWithOneOfTheTags(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newSource()
		c := cacheaside.New(cacheaside.Config[int, int]{Load: tagged(src), Stale: time.Hour, StaleOnError: time.Hour})
		defer c.Close()
		get := func() {
			for key := range 4 {
				mustGet(t, c, key)
			}
		}
		get()
		require.NoError(t, c.InvalidateTags(t.Context(), "none has it"))
		require.NoError(t, c.InvalidateTags(t.Context()))
		get()
		require.Equal(t, []int{1, 1, 1, 1}, []int{src.loaded(0), src.loaded(1), src.loaded(2), src.loaded(3)})
		require.NoError(t, c.InvalidateTags(t.Context(), "even", "none has it"))
		_, ok := c.Peek(2)
		require.False(t, ok)
		get()
		get()
		require.Equal(t, []int{2, 1, 2, 1}, []int{src.loaded(0), src.loaded(1), src.loaded(2), src.loaded(3)})
		require.NoError(t, c.InvalidateTags(t.Context(), "all"))
		_, err := c.GetMany(t.Context(), []int{0, 1, 2, 3})
		require.NoError(t, err)
		require.Equal(t, []int{3, 2, 3, 2}, []int{src.loaded(0), src.loaded(1), src.loaded(2), src.loaded(3)})
	})
}

// A load sets its tags before it ends, possibly after the invalidation. Its result then
// goes only to its first callers.
func TestInvalidateTagsReachesLoadsUnderWay(t *testing.T) {
	for name, c := range map[string]struct {
		tag   string
		loads int32
		kept  bool
	}{
		"with the tag":    {"even", 2, false},
		"without the tag": {"odd", 1, true},
	} {
		for how, get := range map[string]func(*cacheaside.Cache[int, int]) (int, error){
			"Get": func(c *cacheaside.Cache[int, int]) (int, error) { return c.Get(context.Background(), 2) },
			"GetMany": func(c *cacheaside.Cache[int, int]) (int, error) {
				m, err := c.GetMany(context.Background(), []int{2})
				return m[2], err
			},
		} {
			t.Run(name+" "+how, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var version, loads atomic.Int32
					cache := cacheaside.New(cacheaside.Config[int, int]{Load: func(ctx context.Context, key int) (int, error) {
						loads.Add(1)
						v := version.Load()
						time.Sleep(time.Second)
						cacheaside.SetTags(ctx, "even")
						return int(v), nil
					}})
					defer cache.Close()
					var wg sync.WaitGroup
					wg.Go(func() {
						if v, err := get(cache); v != 0 || err != nil {
							t.Errorf("the first: %d, %v", v, err)
						}
					})
					time.Sleep(time.Millisecond)
					version.Store(1)
					require.NoError(t, cache.InvalidateTags(t.Context(), c.tag))
					v, err := get(cache)
					require.NoError(t, err)
					require.Equal(t, !c.kept, v == 1)
					require.Equal(t, c.loads, loads.Load())
					_, err = get(cache)
					require.NoError(t, err)
					require.Equal(t, c.loads, loads.Load())
					wg.Wait()
					overtaken := int64(c.loads - 1)
					require.Equal(t, overtaken, cache.Stats().Overtaken)
				})
			})
		}
	}
}

// A key that does not exist may have no tags. A caller that asks after the invalidation
// does not get the earlier answer.
func TestInvalidateTagsReachesLoadsThatFindNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var there atomic.Bool
		c := cacheaside.New(cacheaside.Config[int, int]{Load: func(context.Context, int) (int, error) {
			found := there.Load()
			time.Sleep(time.Second)
			if !found {
				return 0, cacheaside.ErrNotFound
			}
			return 1, nil
		}})
		defer c.Close()
		go func() { _, _ = c.Get(t.Context(), 1) }()
		time.Sleep(time.Millisecond)
		there.Store(true)
		require.NoError(t, c.InvalidateTags(t.Context(), "new"))
		require.Equal(t, 1, mustGet(t, c, 1))
	})
}

func TestTagsOfARememberedNotFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var loads int
		c := cacheaside.New(cacheaside.Config[int, int]{NotFoundTTL: time.Minute, Load: func(ctx context.Context, _ int) (int, error) {
			loads++
			cacheaside.SetTags(ctx, "a")
			return 0, cacheaside.ErrNotFound
		}})
		defer c.Close()
		for range 3 {
			_, err := c.Get(t.Context(), 1)
			require.ErrorIs(t, err, cacheaside.ErrNotFound)
			_, _ = c.Get(t.Context(), 1)
			require.NoError(t, c.InvalidateTags(t.Context(), "a"))
		}
		require.Equal(t, 3, loads)
	})
}

// A value that was invalidated by a tag is not served when the next load fails or is
// late.
func TestInvalidatedTagIsNotServedAsAnOldValue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var failing atomic.Bool
		c := cacheaside.New(cacheaside.Config[int, int]{TTL: time.Second, StaleOnError: time.Hour, SoftTimeout: time.Second, ErrorPause: -1,
			Load: func(ctx context.Context, _ int) (int, error) {
				cacheaside.SetTags(ctx, "a")
				if failing.Load() {
					time.Sleep(2 * time.Second)
					return 0, errLoad
				}
				return 1, nil
			}})
		defer c.Close()
		mustGet(t, c, 1)
		time.Sleep(2 * time.Second)
		failing.Store(true)
		require.Equal(t, 1, mustGet(t, c, 1))
		time.Sleep(2 * time.Second) // that load has failed
		go func() {
			time.Sleep(time.Millisecond)
			_ = c.InvalidateTags(context.Background(), "a")
		}()
		_, err := c.Get(t.Context(), 1)
		require.ErrorIs(t, err, errLoad)
	})
}

func TestInvalidateTagsWithAStoreIsUnsupported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newSource()
		c := cacheaside.New(cacheaside.Config[int, int]{Load: tagged(src), Store: newFakeStore().connect()})
		synctest.Wait()
		mustGet(t, c, 2)
		require.ErrorIs(t, c.InvalidateTags(t.Context(), "even"), errors.ErrUnsupported)
		mustGet(t, c, 2)
		require.Equal(t, 1, src.loaded(2))
		require.NoError(t, c.Close())
		require.ErrorIs(t, c.InvalidateTags(t.Context(), "even"), cacheaside.ErrClosed)
	})
}

// InvalidateTags keeps the promise of Invalidate.
func TestNoStaleReadAfterInvalidateTags(t *testing.T) {
	violations, _ := stress(t, func(get func(int) int64) *cacheaside.Cache[int, int64] {
		return cacheaside.New(cacheaside.Config[int, int64]{Load: func(ctx context.Context, key int) (int64, error) {
			v := get(key)
			cacheaside.SetTags(ctx, "row")
			runtime.Gosched()
			return v, nil
		}})
	}, 2, 4, 4_000, func(c *cacheaside.Cache[int, int64], _ int, commit func()) bool {
		commit()
		return c.InvalidateTags(context.Background(), "row") == nil
	})
	require.Zero(t, violations)
}

func TestHitWithTagsDoesNotAllocate(t *testing.T) {
	c := cacheaside.New(cacheaside.Config[int, int]{Load: tagged(newSource())})
	defer c.Close()
	ctx := t.Context()
	require.NoError(t, c.InvalidateTags(ctx, "even"))
	_, err := c.Get(ctx, 2)
	require.NoError(t, err)
	require.Zero(t, testing.AllocsPerRun(1000, func() { _, _ = c.Get(ctx, 2) }))
}
