package throttle_test

import (
	"context"
	"errors"
	"math"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
)

// NaN is not equal to itself: the group could never find its key again.
func TestGroupHoldsNoKeyThatIsNotEqualToItself(t *testing.T) {
	nan := math.NaN()
	g := throttle.NewGroup(throttle.GroupConfig[float64]{Config: throttle.Config{Rate: 1e-3, Burst: 3}, MaxKeys: 10})
	for i := range 100 {
		require.Equal(t, i < 3, g.Allow(nan), "under the limit that keys without room share")
	}
	require.False(t, g.Peek(nan).OK)
	require.EqualError(t, g.Set(nan, throttle.Limit{Rate: 5, Burst: 5}), "throttle: the key NaN is not equal to itself: it cannot have a limit")
	require.Error(t, g.Set(nan, throttle.Limit{}))
	g.Refund(nan, 1)
	require.Zero(t, g.Stats().Keys)
	require.EqualValues(t, 100, g.Stats().Overflow)
	require.Empty(t, top(g, 10))

	require.True(t, g.Allow(7))
}

type tenantID string

// A key that was cut from a long text does not keep that alive.
func TestGroupKeepsTheTextOfAKeyAndNoMore(t *testing.T) {
	g := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Rate: 1e-3, Burst: 3}})
	named := throttle.NewGroup(throttle.GroupConfig[tenantID]{Config: throttle.Config{Rate: 1e-3, Burst: 3}})
	const keys, size = 50, 1 << 20
	for i := range keys {
		text := []byte(strings.Repeat("x", size))
		text[0], text[1] = byte('a'+i/10), byte('0'+i%10)
		long := string(text)
		require.True(t, g.Allow(long[:5]))
		require.NoError(t, g.Set("set"+long[:5], throttle.Limit{Rate: 1, Burst: 1}))
		require.True(t, named.Allow(tenantID(long[:6])))
	}
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	require.Less(t, m.HeapAlloc, uint64(keys*size/2))
	runtime.KeepAlive(g)
	runtime.KeepAlive(named)
}

func TestErrorsShowTheBeginningOfALongKey(t *testing.T) {
	type number int
	long := strings.Repeat("\u00e4", 500_000)
	g := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Rate: 1e-3, Burst: 1, MaxWait: time.Millisecond}})
	s := throttle.NewShared(throttle.SharedConfig{
		Name: "api", Rate: 1, OnOutage: throttle.RefuseAll, Timeout: time.Minute,
		Eval: (&fakeRedis{answer: answers(0, 0, 0)}).eval,
	})
	require.True(t, g.Allow(long))
	for _, err := range []error{g.Wait(t.Context(), long), s.Wait(t.Context(), long)} {
		limited, _ := errors.AsType[*throttle.LimitedError](err)
		require.Equal(t, strings.Repeat("\u00e4", 50), limited.Key)
		require.Less(t, len(err.Error()), 200)
	}
	require.True(t, g.Allow("x"+long))
	err := g.Wait(t.Context(), "x"+long)
	require.True(t, utf8.ValidString(err.Error()), "no half of a rune")
	require.NotContains(t, err.Error(), string(utf8.RuneError))

	numbers := throttle.NewGroup(throttle.GroupConfig[number]{Config: throttle.Config{Rate: 1e-3, Burst: 1}})
	require.True(t, numbers.Allow(7))
	require.ErrorContains(t, numbers.Wait(t.Context(), 7), "throttle: [7]: limited")
}

// Peek agrees with Take, also for a key without room.
func TestGroupPeeksAtKeysWithoutRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[int]{
			Config: throttle.Config{Rate: 1, Burst: 2}, MaxKeys: 3, IdleAfter: time.Hour,
		})
		for key := range 3 {
			require.True(t, g.Peek(key).OK)
			require.True(t, g.Take(key, 2).OK)
		}
		for range 3 {
			peek := g.Peek(99)
			require.Equal(t, 3, g.Stats().Keys)
			d := g.Take(99, 1)
			require.Equal(t, d.OK, peek.OK)
			if !d.OK {
				require.Equal(t, d, peek)
			}
		}
		time.Sleep(2 * time.Second) // keys that are as good as new make room
		require.True(t, g.Peek(98).OK)
		require.Equal(t, 2, g.Peek(98).Remaining)
		require.True(t, g.Take(98, 2).OK)
		require.LessOrEqual(t, g.Stats().Keys, 3)
	})
}

func TestGroupRefundsUnderSharedLimit(t *testing.T) {
	g := throttle.NewGroup(throttle.GroupConfig[int]{
		Config: throttle.Config{Rate: 1e-3, Burst: 2}, MaxKeys: 1,
	})
	require.True(t, g.Allow(1))
	require.True(t, g.Take(2, 2).OK)
	require.False(t, g.Allow(3))
	g.Refund(2, 1)
	require.EqualValues(t, 3, g.Stats().Spent)
	require.EqualValues(t, 1, g.Stats().Refunded)
	require.True(t, g.Allow(3))
	require.False(t, g.Allow(3))
	g.Refund(4, 99)
	require.EqualValues(t, 4, g.Stats().Spent)
	require.EqualValues(t, 3, g.Stats().Refunded, "no more than was spent there")
	require.EqualValues(t, 1, top(g, 1)[0].Spent)
}

// No more is given back than was spent.
func TestRefundGivesBackNoMoreThanWasSpent(t *testing.T) {
	limiterNet := func(l *throttle.Limiter) int64 { return l.Stats().Spent - l.Stats().Refunded }
	net := func(g *throttle.Group[int]) int64 { return g.Stats().Spent - g.Stats().Refunded }
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 1, Burst: 5})
		l.Refund(7)
		require.Zero(t, limiterNet(l))
		require.True(t, l.Take(2).OK)
		l.Refund(7)
		require.Zero(t, limiterNet(l))

		g := throttle.NewGroup(throttle.GroupConfig[int]{Config: throttle.Config{Rate: 1, Burst: 5, MaxWait: -1}})
		require.True(t, g.Take(1, 3).OK)
		g.Refund(1, 7)
		require.Zero(t, top(g, 1)[0].Spent)
		require.Zero(t, net(g))
		require.True(t, g.Take(1, 3).OK)
		require.NoError(t, g.Set(1, throttle.Limit{Rate: 1, Burst: 10})) // what was spent before counts
		require.True(t, g.Take(1, 1).OK)
		g.Refund(1, 3)
		require.EqualValues(t, 1, top(g, 1)[0].Spent)
		require.Equal(t, 9, g.Peek(1).Remaining)
		g.Refund(1, 7)
		require.Zero(t, top(g, 1)[0].Spent)
		require.Zero(t, net(g))
		require.NoError(t, g.Set(1, throttle.Limit{}))
		require.Zero(t, top(g, 1)[0].Spent)
		require.Zero(t, net(g))
	})
}

// A key for which a call waits, or that has a limit by Set, can be evicted after that,
// however the wait ends.
func TestGroupEvictsKeysAfterTheyWereNeeded(t *testing.T) {
	for name, use := range map[string]func(t *testing.T, g *throttle.Group[int]){
		"after a wait": func(t *testing.T, g *throttle.Group[int]) { require.NoError(t, g.Wait(t.Context(), 1)) },
		"after a deadline that is too close": func(t *testing.T, g *throttle.Group[int]) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			require.Equal(t, throttle.DeadlineTooClose, reason(g.Wait(ctx, 1)))
		},
		"after giving up": func(t *testing.T, g *throttle.Group[int]) {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(time.Millisecond, cancel)
			require.Equal(t, throttle.ContextEnded, reason(g.Wait(ctx, 1)))
		},
		"after calls beside one that waits": func(t *testing.T, g *throttle.Group[int]) {
			time.AfterFunc(time.Millisecond, func() {
				g.Allow(1)
				g.Take(1, 1)
				g.Peek(1)
				g.Refund(1, 1)
			})
			require.NoError(t, g.Wait(t.Context(), 1))
		},
		"after a panic": func(t *testing.T, g *throttle.Group[int]) {
			require.Panics(t, func() { _ = g.Do(t.Context(), 1, func(context.Context) error { panic("boom") }) })
		},
		"after Set is undone": func(t *testing.T, g *throttle.Group[int]) {
			require.NoError(t, g.Set(1, throttle.Limit{Rate: 10, Burst: 1}))
			require.NoError(t, g.Wait(t.Context(), 1))
			require.NoError(t, g.Set(1, throttle.Limit{}))
		},
		"after Set is undone during a wait": func(t *testing.T, g *throttle.Group[int]) {
			require.NoError(t, g.Set(1, throttle.Limit{Rate: 10, Burst: 1}))
			time.AfterFunc(time.Millisecond, func() { require.NoError(t, g.Set(1, throttle.Limit{})) })
			require.NoError(t, g.Wait(t.Context(), 1))
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := throttle.NewGroup(throttle.GroupConfig[int]{
					Config: throttle.Config{Rate: 10, Burst: 1, MaxWait: -1}, MaxKeys: 1, IdleAfter: 1,
				})
				require.True(t, g.Allow(1))
				use(t, g)
				synctest.Wait()
				require.Zero(t, g.Stats().Queued)
				time.Sleep(time.Minute)
				require.True(t, g.Allow(2), "the key made room")
			})
		})
	}
}

// However many keys, no more calls wait than MaxQueued, and a more important one
// takes the place of another of its key.
func TestGroupBoundsTheWaitersOfAllKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[int]{
			Config: throttle.Config{
				Rate: 1, Burst: 1, MaxWait: -1, Levels: 2, Reserve: []float64{}, Priority: levelOf,
			},
			MaxQueued: 4, MaxKeys: 3,
		})
		var done tally
		call := func(key, n int) {
			go func() { done.add(g.Wait(at(t.Context(), n), key)) }()
			synctest.Wait()
		}
		for key := range 6 { // three of them share one
			require.Equal(t, key < 4, g.Allow(key))
			call(key, 1)
		}
		require.Equal(t, 4, g.Stats().Queued)
		require.Equal(t, map[throttle.Reason]int{throttle.QueueFull: 2}, done.all())
		call(0, 0)
		require.Equal(t, 4, g.Stats().Queued)
		require.Equal(t, map[throttle.Reason]int{throttle.QueueFull: 2, throttle.Displaced: 1}, done.all(), "the other of key 0 has left")
		call(0, 0)
		require.Equal(t, map[throttle.Reason]int{throttle.QueueFull: 3, throttle.Displaced: 1}, done.all(), "none of its key is less important")
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Zero(t, g.Stats().Queued)
		require.Equal(t, map[throttle.Reason]int{throttle.QueueFull: 3, throttle.Displaced: 1, "": 4}, done.all())
		call(0, 0)
		call(0, 0)
		require.Equal(t, 1, g.Stats().Queued)
		time.Sleep(time.Minute)
	})
}
