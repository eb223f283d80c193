package breaker_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"strings"
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
			refusal := requireRefused(t, err, breaker.CircuitOpen)
			require.Equal(t, []string{"store", "3"}, []string{refusal.Name, refusal.Key})
			require.ErrorContains(t, err, "breaker: store[3]: circuit open for ")
		} else {
			require.NoError(t, err)
		}
	}
	require.Len(t, seen.all, 1)
	require.Equal(t, []string{"store", "3"}, []string{seen.all[0].Name, seen.all[0].Key})
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
	_, err := g.Begin(ctx, 1)
	require.ErrorIs(t, err, context.Canceled)
	require.Empty(t, maps.Collect(g.All()))
}

func TestGroupConfigForAKey(t *testing.T) {
	g := breaker.NewGroup(breaker.GroupConfig[string]{
		Config: breaker.Config{Name: "api"},
		ConfigFor: func(key string) breaker.Config {
			if key == "own" {
				return breaker.Config{Name: "ignored", Failures: 1}
			}
			return breaker.Config{Failures: len(key)}
		},
	})
	ctx := t.Context()
	require.Equal(t, errDown, g.Do(ctx, "ab", down))
	require.Equal(t, errDown, g.Do(ctx, "ab", down))
	require.ErrorContains(t, g.Do(ctx, "ab", down), "breaker: api[ab]: circuit open")
	require.Equal(t, errDown, g.Do(ctx, "own", down))
	require.ErrorContains(t, g.Do(ctx, "own", down), "breaker: api[own]: circuit open", "a Name of ConfigFor is ignored")

	g = breaker.NewGroup(breaker.GroupConfig[string]{ConfigFor: func(string) breaker.Config { return breaker.Config{Failures: -1} }})
	require.PanicsWithError(t, "breaker.Config.Failures is -1: must be 0 (for the default) or more", func() { _ = g.Do(ctx, "a", ok) })
	require.Empty(t, maps.Collect(g.All()))

	plain := breaker.NewGroup(breaker.GroupConfig[int]{Config: breaker.Config{Failures: 1}})
	_ = plain.Do(ctx, 7, down)
	require.ErrorContains(t, plain.Do(ctx, 7, ok), "breaker: [7]: circuit open")
}

// With operates on the breaker of one key, never on the one that keys share.
func TestGroupWithTheBreakerOfAKey(t *testing.T) {
	g := breaker.NewGroup(breaker.GroupConfig[int]{MaxKeys: 1, Config: breaker.Config{Failures: 2}})
	ctx := t.Context()
	require.True(t, g.With(1, func(b *breaker.Breaker) {
		b.ForceOpen(errDown)
		require.True(t, g.With(1, func(again *breaker.Breaker) { require.Same(t, b, again) }))
		require.NoError(t, g.Do(ctx, 2, ok), "another key")
	}))
	requireRefused(t, g.Do(ctx, 1, ok), breaker.CircuitForcedOpen)

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

func TestGroupMakesTheBreakerOfAKeyAnew(t *testing.T) {
	g := breaker.NewGroup(breaker.GroupConfig[int]{MaxKeys: 1, Config: breaker.Config{Failures: 2}})
	wrapped := func(ctx context.Context) error { return g.Do(ctx, 1, down) }
	require.Equal(t, errDown, wrapped(t.Context()))
	require.NoError(t, g.Do(t.Context(), 2, ok), "takes the place of key 1")
	require.Equal(t, errDown, wrapped(t.Context()), "takes it back, and counts anew")
	require.Equal(t, errDown, wrapped(t.Context()))
	requireRefused(t, wrapped(t.Context()), breaker.CircuitOpen)
	requireRefused(t, g.Do(t.Context(), 1, ok), breaker.CircuitOpen)
}

func TestGroupBy(t *testing.T) {
	type tenant struct{}
	g := breaker.NewGroup(breaker.GroupConfig[string]{Config: breaker.Config{Failures: 1}})
	guarded := g.By(func(ctx context.Context) string { return ctx.Value(tenant{}).(string) })(down)
	a, b := context.WithValue(t.Context(), tenant{}, "a"), context.WithValue(t.Context(), tenant{}, "b")
	require.Equal(t, errDown, guarded(a))
	require.Equal(t, "a", requireRefused(t, guarded(a), breaker.CircuitOpen).Key)
	require.Equal(t, errDown, guarded(b), "another key")
}

// A long key is cut, and its text is not held in memory.
func TestGroupShortensKeys(t *testing.T) {
	g := breaker.NewGroup(breaker.GroupConfig[string]{Config: breaker.Config{Failures: 1}})
	key := strings.Repeat("k", 1<<20)
	_ = g.Do(t.Context(), key, down)
	require.Equal(t, key[:100], requireRefused(t, g.Do(t.Context(), key, ok), breaker.CircuitOpen).Key)
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
		done, err := g.Begin(ctx, 3)
		require.NoError(t, err)
		hanging := make(chan struct{})
		go g.Do(ctx, 4, func(context.Context) error { <-hanging; return nil })
		synctest.Wait()

		for key := 100; key < 200; key++ {
			require.NoError(t, g.Do(ctx, key, ok))
		}
		require.ElementsMatch(t, []int{0, 1, 2, 3, 4}, keysOf(g))
		require.Equal(t, errDown, g.Do(ctx, 100, down))
		refusal := requireRefused(t, g.Do(ctx, 101, ok), breaker.CircuitOpen)
		require.Equal(t, "db", refusal.Name)
		require.Equal(t, "(other keys)", refusal.Key, "keys without a breaker share one")
		_, err = g.Begin(ctx, 102)
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
				Failures: 1, OpenFor: time.Minute,
			}),
		})
		onRefuse(g, func(context.Context, *breaker.OpenError) { panic("boom") })
		_ = g.Do(t.Context(), 1, down)
		require.PanicsWithValue(t, "boom", func() { _, _ = g.Begin(t.Context(), 1) })
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

// A hundred thousand new keys neither exceed MaxKeys nor displace an open breaker.
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
	requireRefused(t, g.Do(ctx, -1, ok), breaker.CircuitOpen)
	require.Less(t, heap()-before, int64(limit*4096), "bytes")
	runtime.KeepAlive(g)
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// All calls of a key in use go to one breaker, while other breakers are made and forgotten.
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
			flaky := func(context.Context) error {
				if rand.IntN(3) == 0 {
					return errDown
				}
				return nil
			}
			for i := range rounds {
				key := r.IntN(3 * limit)
				fn := ok
				if r.IntN(3) == 0 {
					fn = down
				}
				switch r.IntN(6) {
				case 0:
					_ = g.Do(context.Background(), w, flaky)
				case 1:
					if done, err := g.Begin(context.Background(), key); err == nil {
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
