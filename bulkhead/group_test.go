package bulkhead_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
)

func TestGroupKeepsANoisyTenantFromTheSlotsOfOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := bulkhead.NewGroup(bulkhead.GroupConfig[string]{Config: bulkhead.Config{Name: "api", Limit: 2, MaxWait: -1, Queue: 1}})
		var wg sync.WaitGroup
		var refused atomic.Int64
		for range 50 {
			wg.Go(func() {
				err := g.Do(t.Context(), "noisy", func(context.Context) error {
					time.Sleep(time.Hour)
					return nil
				})
				if errors.Is(err, bulkhead.ErrFull) {
					refused.Add(1)
				}
			})
		}
		synctest.Wait()
		require.EqualValues(t, 47, refused.Load())
		for range 100 {
			require.NoError(t, g.Do(t.Context(), "quiet", nothing))
		}
		err := g.Do(t.Context(), "noisy", nothing)
		require.EqualError(t, err, "bulkhead: api[noisy]: full (queue full): 2 of 2 in flight, 1 waiting")
		wg.Wait()
	})
}

func TestGroupGivesAKeyItsOwnConfig(t *testing.T) {
	g := bulkhead.NewGroup(bulkhead.GroupConfig[int]{
		Config: bulkhead.Config{Name: "x", Limit: 1},
		ConfigFor: func(tenant int) bulkhead.Config {
			if tenant == 9 {
				return bulkhead.Config{Name: "vip", Limit: 20}
			}
			return bulkhead.Config{Limit: 2}
		},
	})
	for tenant, want := range map[int]bulkhead.FullError{
		9: {Name: "x", Key: "9", Reason: bulkhead.NoSlot, Cost: 1, Limit: 20, InFlight: 20},
		1: {Name: "x", Key: "1", Reason: bulkhead.NoSlot, Cost: 1, Limit: 2, InFlight: 2},
	} {
		for range want.Limit {
			_, err := g.Begin(t.Context(), tenant)
			require.NoError(t, err)
		}
		_, err := g.Begin(t.Context(), tenant)
		require.Equal(t, &want, err)
	}
}

func TestGroupIsBounded(t *testing.T) {
	g := bulkhead.NewGroup(bulkhead.GroupConfig[int]{Config: bulkhead.Config{Limit: 1}, MaxKeys: 3})
	size := func() (n int) {
		for range g.All() {
			n++
		}
		return n
	}
	for key := range 1000 { // idle ones make room
		require.NoError(t, g.Do(t.Context(), key, nothing))
		require.LessOrEqual(t, size(), 3)
	}
	var releases []func(error)
	for key := range 3 {
		release, err := g.Begin(t.Context(), key)
		require.NoError(t, err)
		releases = append(releases, release)
	}
	// Busy ones do not: the others share one bulkhead.
	release, err := g.Begin(t.Context(), 7)
	require.NoError(t, err)
	err = g.Do(t.Context(), 8, nothing)
	require.EqualError(t, err, "bulkhead: [(other keys)]: full (no slot): 1 of 1 in flight, 0 waiting")
	release(nil)
	require.NoError(t, g.Do(t.Context(), 8, nothing))
	for key := range 3 {
		require.ErrorIs(t, g.Do(t.Context(), key, nothing), bulkhead.ErrFull)
	}
	for _, release := range releases {
		release(nil)
		release(nil)
	}
	for key := range 9 {
		require.NoError(t, g.Do(t.Context(), key, nothing))
	}
}

// Members with a Config of their own may have more levels than the others.
func TestGroupStatsCountTheQueuedByLevel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := bulkhead.NewGroup(bulkhead.GroupConfig[int]{
			Config: bulkhead.Config{Limit: 1},
			ConfigFor: func(key int) bulkhead.Config {
				return bulkhead.Config{Limit: 10 * key, MaxWait: time.Second, Levels: key, Priority: levelOf, Cost: func(context.Context) int { return 10 * key }, Reserve: []float64{}}
			},
		})
		for key := 2; key <= 3; key++ {
			for level := range 4 {
				go func() {
					_ = g.Do(atLevel(t.Context(), level), key, func(context.Context) error { time.Sleep(time.Minute); return nil })
				}()
				synctest.Wait()
			}
		}
		s := g.Stats()
		require.Equal(t, []int{0, 4, 2}, s.Queued)
		require.Equal(t, 1+20+30, s.Limit)
		require.Equal(t, 20+30, s.InFlight)
		time.Sleep(2 * time.Minute)
	})
}

func TestGroupMiddlewareUsesTheBulkheadOfItsKey(t *testing.T) {
	g := bulkhead.NewGroup(bulkhead.GroupConfig[int]{Config: bulkhead.Config{Limit: 1}})
	require.NoError(t, g.Do(t.Context(), 1, func(ctx context.Context) error {
		require.ErrorIs(t, g.By(levelOf)(nothing)(atLevel(ctx, 1)), bulkhead.ErrFull)
		return g.By(levelOf)(nothing)(atLevel(ctx, 2))
	}))
}

func TestGroupShowsTheStartOfALongKey(t *testing.T) {
	g := bulkhead.NewGroup(bulkhead.GroupConfig[string]{Config: bulkhead.Config{Limit: 1}})
	for key, want := range map[string]string{
		strings.Repeat("a", 100):  strings.Repeat("a", 100),
		strings.Repeat("a", 1000): strings.Repeat("a", 100),
	} {
		err := g.Do(t.Context(), key, func(ctx context.Context) error { return g.Do(ctx, key, nothing) })
		var full *bulkhead.FullError
		require.ErrorAs(t, err, &full)
		require.Equal(t, want, full.Key)
	}
}

func TestGroupWithNegativeIdleAfterForgetsOnlyForRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := bulkhead.NewGroup(bulkhead.GroupConfig[int]{Config: bulkhead.Config{Limit: 1}, MaxKeys: 100, IdleAfter: -1})
		size := func() (n int) {
			for range g.All() {
				n++
			}
			return n
		}
		for key := range 100 {
			require.NoError(t, g.Do(t.Context(), key, nothing))
			time.Sleep(24 * time.Hour)
		}
		require.Equal(t, 100, size())
		require.NoError(t, g.Do(t.Context(), 100, nothing))
		require.Equal(t, 100, size())
	})
}

func TestGroupForgetsIdleBulkheads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := bulkhead.NewGroup(bulkhead.GroupConfig[string]{Config: bulkhead.Config{Limit: 1}, IdleAfter: time.Minute})
		release, err := g.Begin(t.Context(), "busy")
		require.NoError(t, err)
		for i := range 100 {
			require.NoError(t, g.Do(t.Context(), fmt.Sprint(i), nothing))
		}
		for range 10 { // other keys come, and idle ones go
			time.Sleep(time.Minute)
			for i := range 300 {
				require.NoError(t, g.Do(t.Context(), fmt.Sprint("later ", i), nothing))
			}
		}
		held := map[string]bool{}
		for key := range g.All() {
			held[key] = true
		}
		require.True(t, held["busy"])
		require.Less(t, len(held), 350)
		require.ErrorIs(t, g.Do(t.Context(), "busy", nothing), bulkhead.ErrFull)
		release(nil)
	})
}

// However the group forgets and makes bulkheads, a key never has more slots than
// its limit.
func TestGroupHoldsTheLimitWhileItForgets(t *testing.T) {
	const keys = 12
	g := bulkhead.NewGroup(bulkhead.GroupConfig[int]{
		Config:  bulkhead.Config{Name: "x", Limit: 2, MaxWait: -1, Queue: 2},
		MaxKeys: 4,
	})
	// At most four keys have bulkheads of their own, and the others share one.
	var all, most atomic.Int64
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			rng := newRand(uint64(i))
			for range 5000 {
				_ = g.Do(t.Context(), rng.IntN(keys), func(context.Context) error {
					now := all.Add(1)
					for m := most.Load(); now > m && !most.CompareAndSwap(m, now); m = most.Load() {
					}
					all.Add(-1)
					return nil
				})
			}
		})
	}
	wg.Wait()
	require.LessOrEqual(t, most.Load(), int64((4+1)*2))
	for _, b := range g.All() {
		requireIdle(t, b)
	}
}

func TestGroupHonorsAnEndedContext(t *testing.T) {
	g := bulkhead.NewGroup(bulkhead.GroupConfig[string]{Config: bulkhead.Config{Limit: 1}})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, g.Do(ctx, "k", nothing), context.Canceled)
	_, err := g.Begin(ctx, "k")
	require.ErrorIs(t, err, context.Canceled)
	for key := range g.All() {
		t.Errorf("made one for %v", key)
	}
}

func TestGroupConfigIsValidated(t *testing.T) {
	cfg := bulkhead.GroupConfig[string]{MaxKeys: -1}
	err := cfg.Validate()
	require.ErrorContains(t, err, "bulkhead.GroupConfig.MaxKeys is -1: must be 0 (for 10000) or more")
	require.ErrorContains(t, err, "bulkhead.Config.Limit is 0")
	require.PanicsWithError(t, err.Error(), func() { bulkhead.NewGroup(cfg) })
}

func TestGroupKeepsABulkheadWhileItsCallRuns(t *testing.T) {
	g := bulkhead.NewGroup(bulkhead.GroupConfig[string]{Config: bulkhead.Config{Limit: 1}, MaxKeys: 1})
	require.NoError(t, g.Do(t.Context(), "busy", func(context.Context) error {
		require.NoError(t, g.Do(t.Context(), "another", nothing))
		require.ErrorIs(t, g.Do(t.Context(), "busy", nothing), bulkhead.ErrFull)
		return nil
	}))
}

// A bulkhead whose hook panics is not held forever: there is room for another.
func TestGroupForgetsABulkheadWhoseHookPanicked(t *testing.T) {
	g := bulkhead.NewGroup(bulkhead.GroupConfig[string]{
		Config:  bulkhead.Config{Limit: 1},
		MaxKeys: 1,
	})
	onRefuse(g, func(context.Context, *bulkhead.FullError) { panic("boom") })
	release, err := g.Begin(t.Context(), "a")
	require.NoError(t, err)
	require.PanicsWithValue(t, "boom", func() { _, _ = g.Begin(t.Context(), "a") })
	release(nil)
	require.NoError(t, g.Do(t.Context(), "b", nothing))
	for key := range g.All() {
		require.Equal(t, "b", key)
	}
}

// A member of such a key could never be found again.
func TestGroupSharesOneBulkheadAmongKeysThatAreNotThemselves(t *testing.T) {
	g := bulkhead.NewGroup(bulkhead.GroupConfig[float64]{Config: bulkhead.Config{Limit: 1}})
	nan := math.NaN()
	done, err := g.Begin(t.Context(), nan)
	require.NoError(t, err)
	err = g.Do(t.Context(), nan, nothing)
	require.EqualError(t, err, "bulkhead: [(other keys)]: full (no slot): 1 of 1 in flight, 0 waiting")
	done(nil)
	for range 100 {
		require.NoError(t, g.Do(t.Context(), nan, nothing))
	}
	for key := range g.All() {
		t.Errorf("has one for %v", key)
	}
}
