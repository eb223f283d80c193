package breaker_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
)

func TestGroupOpensABadShardAlone(t *testing.T) {
	var seen changes
	g := breaker.NewGroup(breaker.GroupConfig[int]{Config: breaker.Config{Name: "store", Failures: 2, OnChange: seen.hook}})
	ctx := t.Context()
	for range 5 {
		for shard := range 8 {
			fn := ok
			if shard == 3 {
				fn = down
			}
			_ = g.Do(ctx, shard, fn)
		}
	}
	for shard := range 8 {
		err := g.Do(ctx, shard, ok)
		if shard == 3 {
			require.Equal(t, "store/3", requireRefused(t, err, breaker.Open).Name)
		} else {
			require.NoError(t, err)
		}
	}
	require.Len(t, seen.all, 1)
	require.Equal(t, "store/3", seen.all[0].Name)
	states := map[int]breaker.State{}
	for shard, b := range g.All() {
		states[shard] = b.State()
	}
	require.Len(t, states, 8)
	require.Equal(t, breaker.Open, states[3])
}

func TestGroupHonorsAnEndedContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	g := breaker.NewGroup(breaker.GroupConfig[int]{})
	require.ErrorIs(t, g.Do(ctx, 1, ok), context.Canceled)
	_, err := g.Allow(ctx, 1)
	require.ErrorIs(t, err, context.Canceled)
	require.Empty(t, maps.Collect(g.All()))
}

func TestGroupConfigForAKey(t *testing.T) {
	g := breaker.NewGroup(breaker.GroupConfig[string]{
		Config: breaker.Config{Name: "api"},
		For: func(key string) breaker.Config {
			if key == "own" {
				return breaker.Config{Name: "my", Failures: 1}
			}
			return breaker.Config{Failures: len(key)}
		},
	})
	ctx := t.Context()
	require.Equal(t, errDown, g.Do(ctx, "ab", down))
	require.Equal(t, errDown, g.Do(ctx, "ab", down))
	require.Equal(t, "api/ab", requireRefused(t, g.Do(ctx, "ab", down), breaker.Open).Name)
	require.Equal(t, errDown, g.Do(ctx, "own", down))
	require.Equal(t, "my/own", requireRefused(t, g.Do(ctx, "own", down), breaker.Open).Name)

	g = breaker.NewGroup(breaker.GroupConfig[string]{For: func(string) breaker.Config { return breaker.Config{Failures: -1} }})
	require.PanicsWithError(t, "breaker.Config.Failures is -1: must be 0 (for the default) or more", func() { _ = g.Do(ctx, "a", ok) })
	require.Empty(t, maps.Collect(g.All()))

	plain := breaker.NewGroup(breaker.GroupConfig[int]{Config: breaker.Config{Failures: 1}})
	_ = plain.Do(ctx, 7, down)
	require.Equal(t, "7", requireRefused(t, plain.Do(ctx, 7, ok), breaker.Open).Name)
}

// An operator acts on the breaker that a key has now, and never on that which keys share.
func TestGroupWithTheBreakerOfAKey(t *testing.T) {
	g := breaker.NewGroup(breaker.GroupConfig[int]{MaxKeys: 1, Config: breaker.Config{Failures: 2}})
	ctx := t.Context()
	require.True(t, g.With(1, func(b *breaker.Breaker) {
		b.ForceOpen(errDown)
		require.True(t, g.With(1, func(again *breaker.Breaker) { require.Same(t, b, again) }))
		require.NoError(t, g.Do(ctx, 2, ok), "another key")
	}))
	requireRefused(t, g.Do(ctx, 1, ok), breaker.ForcedOpen)

	require.False(t, g.With(2, func(*breaker.Breaker) { t.Error("called, for a key without a breaker") }), "it is full")
	require.NoError(t, g.Do(ctx, 2, ok))
	require.NoError(t, g.Do(ctx, 3, ok))

	require.True(t, g.With(1, (*breaker.Breaker).Enable))
	require.NoError(t, g.Do(ctx, 1, ok))
	require.True(t, g.With(2, func(*breaker.Breaker) {
		require.False(t, g.With(1, nil), "the only place is in use")
	}))
	require.PanicsWithValue(t, "boom", func() { g.With(2, func(*breaker.Breaker) { panic("boom") }) })
	require.True(t, g.With(1, func(*breaker.Breaker) {}), "the place of key 2 is free again")
}

func TestGroupWrap(t *testing.T) {
	g := breaker.NewGroup(breaker.GroupConfig[int]{MaxKeys: 1, Config: breaker.Config{Failures: 2}})
	wrapped := g.Wrap(1, down)
	require.Equal(t, errDown, wrapped(t.Context()))
	require.NoError(t, g.Do(t.Context(), 2, ok), "takes the place of key 1")
	require.Equal(t, errDown, wrapped(t.Context()), "takes it back, and counts anew")
	require.Equal(t, errDown, wrapped(t.Context()))
	requireRefused(t, wrapped(t.Context()), breaker.Open)
	requireRefused(t, g.Do(t.Context(), 1, ok), breaker.Open)
}

func TestGroupKeepsBreakersThatAreOpenOrInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := breaker.NewGroup(breaker.GroupConfig[int]{
			MaxKeys: 5, Config: steady(breaker.Config{Name: "db", Failures: 1, OpenFor: time.Hour}),
		})
		ctx := t.Context()
		_ = g.Do(ctx, 0, down)
		g.With(1, func(b *breaker.Breaker) { b.ForceOpen(nil) })
		g.With(2, (*breaker.Breaker).Disable)
		done, err := g.Allow(ctx, 3)
		require.NoError(t, err)
		hanging := make(chan struct{})
		go g.Do(ctx, 4, func(context.Context) error { <-hanging; return nil })
		synctest.Wait()

		for key := 100; key < 200; key++ {
			require.NoError(t, g.Do(ctx, key, ok))
		}
		require.ElementsMatch(t, []int{0, 1, 2, 3, 4}, keysOf(g))
		require.Equal(t, errDown, g.Do(ctx, 100, down))
		refusal := requireRefused(t, g.Do(ctx, 101, ok), breaker.Open)
		require.Equal(t, "db/(other keys)", refusal.Name, "keys without a breaker share one")
		_, err = g.Allow(ctx, 102)
		require.ErrorIs(t, err, breaker.ErrOpen)
		done(errDown)
		done(errDown)
		close(hanging)
		synctest.Wait()
		g.With(3, func(b *breaker.Breaker) { require.Equal(t, breaker.Open, b.State()) })
		require.NoError(t, g.Do(ctx, 200, ok), "key 4 was not in use any more")
		require.ElementsMatch(t, []int{0, 1, 2, 3, 200}, keysOf(g))

		time.Sleep(time.Hour) // the open ones may be forgotten now
		for key := 300; key < 400; key++ {
			require.NoError(t, g.Do(ctx, key, ok))
		}
		require.Contains(t, keysOf(g), 1)
		require.Contains(t, keysOf(g), 2)
		require.NotContains(t, keysOf(g), 0)
		require.NotContains(t, keysOf(g), 3)
	})
}

func keysOf(g *breaker.Group[int]) (keys []int) {
	for key := range g.All() {
		keys = append(keys, key)
	}
	return keys
}

func TestGroupForgetsIdleBreakers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := breaker.NewGroup(breaker.GroupConfig[int]{
			IdleAfter: time.Minute, Config: steady(breaker.Config{Failures: 1, OpenFor: 3 * time.Hour}),
		})
		ctx := t.Context()
		for key := range 100 {
			require.NoError(t, g.Do(ctx, key, ok))
		}
		_ = g.Do(ctx, 7, down)
		for key := 1000; key < 5000; key++ {
			time.Sleep(time.Second)
			require.NoError(t, g.Do(ctx, key, ok))
			require.NoError(t, g.Do(ctx, 8, ok))
		}
		left := keysOf(g)
		require.Contains(t, left, 7, "open")
		require.Contains(t, left, 8, "in use")
		require.NotContains(t, left, 9)
		require.Less(t, len(left), 500)
	})
}

func TestGroupForgetsABreakerWhoseHookPanicked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := breaker.NewGroup(breaker.GroupConfig[int]{
			MaxKeys: 1,
			Config: steady(breaker.Config{
				Failures: 1, OpenFor: time.Minute, OnReject: func(context.Context, *breaker.OpenError) { panic("boom") },
			}),
		})
		_ = g.Do(t.Context(), 1, down)
		require.PanicsWithValue(t, "boom", func() { _, _ = g.Allow(t.Context(), 1) })
		time.Sleep(time.Minute)
		require.NoError(t, g.Do(t.Context(), 2, ok))
		require.Equal(t, []int{2}, keysOf(g))
	})
}

func TestGroupPings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var pings atomic.Int64
		var healed atomic.Bool
		g := breaker.NewGroup(breaker.GroupConfig[int]{MaxKeys: 2, Config: steady(breaker.Config{
			Failures: 1, OpenFor: time.Second,
			Ping: func(context.Context) error {
				pings.Add(1)
				time.Sleep(500 * time.Millisecond)
				if healed.Load() {
					return nil
				}
				return errDown
			},
		})})
		ctx := t.Context()
		_ = g.Do(ctx, 1, down)
		time.Sleep(10 * time.Second) // every 1.5 s, and the last one is under way
		synctest.Wait()
		require.EqualValues(t, 7, pings.Load())
		for key := range 20 {
			_ = g.Do(ctx, 100+key, ok)
		}
		require.Contains(t, keysOf(g), 1, "it pings")
		healed.Store(true)
		time.Sleep(time.Second)
		synctest.Wait()
		require.NoError(t, g.Do(ctx, 1, ok))

		_ = g.Do(ctx, 1, down)
		require.NoError(t, g.Close())
		_ = g.Do(ctx, 2, down)
		pings.Store(0)
		time.Sleep(time.Second)
		require.Zero(t, pings.Load(), "neither for those that were there, nor for new ones")
		require.NoError(t, g.Do(ctx, 1, ok))
		require.NoError(t, g.Do(ctx, 2, ok))
	})
}

// A hundred thousand keys, as an attacker may choose them, leave the group bounded
// and the breakers that matter in place.
func TestGroupIsBounded(t *testing.T) {
	const limit, keys = 1000, 100_000
	g := breaker.NewGroup(breaker.GroupConfig[int]{MaxKeys: limit, Config: breaker.Config{Failures: 2, OpenFor: time.Hour}})
	ctx := t.Context()
	for range 2 {
		_ = g.Do(ctx, -1, down)
	}
	before := heap()
	for key := range keys {
		require.NoError(t, g.Do(ctx, key, ok))
		if key%10_000 == 0 {
			require.NoError(t, g.Do(ctx, -2, ok))
			require.LessOrEqual(t, len(keysOf(g)), limit)
		}
	}
	require.Len(t, keysOf(g), limit)
	requireRefused(t, g.Do(ctx, -1, ok), breaker.Open)
	require.Less(t, heap()-before, int64(limit*4096), "bytes")
	runtime.KeepAlive(g)
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// Calls of a key that is in use all go to one breaker, while other keys are made and
// forgotten.
func TestGroupStress(t *testing.T) {
	const (
		workers = 8
		rounds  = 5000
		limit   = 20
	)
	g := breaker.NewGroup(breaker.GroupConfig[int]{
		MaxKeys: limit, IdleAfter: time.Nanosecond,
		Config: breaker.Config{Failures: 2, OpenFor: time.Microsecond, Probes: 2},
	})
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(6, uint64(w)))
			wrapped := g.Wrap(w, func(context.Context) error {
				if rand.IntN(3) == 0 {
					return errDown
				}
				return nil
			})
			for i := range rounds {
				key := r.IntN(3 * limit)
				fn := ok
				if r.IntN(3) == 0 {
					fn = down
				}
				switch r.IntN(6) {
				case 0:
					_ = wrapped(context.Background())
				case 1:
					if done, err := g.Allow(context.Background(), key); err == nil {
						done(fn(nil))
					}
				case 2:
					g.With(w, func(b *breaker.Breaker) {
						b.Stats()
						if i%100 == 0 {
							b.Trip(nil, time.Microsecond)
							b.Reset()
						}
					})
				default:
					_ = g.Do(context.Background(), key, fn)
				}
				if i%500 == 0 {
					for _, b := range g.All() {
						b.State()
					}
				}
			}
		})
	}
	wg.Wait()
	for key := range 3 * limit { // nothing stayed pinned: each key finds room
		require.True(t, g.With(key, (*breaker.Breaker).Reset))
		require.NoError(t, g.Do(t.Context(), key, ok), fmt.Sprint(key))
		require.Contains(t, keysOf(g), key)
	}
}
