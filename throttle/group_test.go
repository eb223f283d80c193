package throttle_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
)

// top returns the n keys of g that have spent the most, the busiest first.
func top[K comparable](g *throttle.Group[K], n int) (all []usage[K]) {
	for key, u := range g.All() {
		all = append(all, usage[K]{key, u.Spent, u.Refused})
	}
	slices.SortFunc(all, func(a, b usage[K]) int {
		return cmp.Or(cmp.Compare(b.Spent, a.Spent), cmp.Compare(b.Refused, a.Refused))
	})
	return all[:min(n, len(all))]
}

type usage[K comparable] struct {
	key            K
	Spent, Refused int64
}

func TestGroupKeysAreApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Name: "api", Rate: 1, Burst: 2}})
		require.Equal(t, throttle.Decision{OK: true, Limit: 2, Window: 2 * time.Second, Remaining: 1, ResetAfter: time.Second}, g.Take("a", 1))
		require.True(t, g.Allow("a"))
		require.Equal(t, throttle.Decision{Limit: 2, Window: 2 * time.Second, RetryAfter: time.Second, ResetAfter: 2 * time.Second}, g.Take("a", 1))
		err := g.Do(t.Context(), "a", ok)
		require.EqualError(t, err, "throttle: api[a]: limited (over the limit), retry after 1s")
		require.NoError(t, g.Do(t.Context(), "b", ok))
		require.Equal(t, []usage[string]{{"a", 2, 2}, {"b", 1, 0}}, top(g, 5))
		require.Equal(t, []usage[string]{{"a", 2, 2}}, top(g, 1))
		require.Empty(t, top(g, 0))
		require.Equal(t, throttle.GroupStats{Totals: throttle.Totals{Admitted: 3, Refused: 2, Refusals: map[throttle.Reason]int64{throttle.OverLimit: 2}, Spent: 3}, Keys: 2}, g.Stats())
		require.False(t, g.Take("c", 3).OK)
		require.Equal(t, 2, g.Peek("c").Remaining)
		require.Equal(t, 2, g.Peek("never seen").Remaining)
		require.True(t, g.Take("a", 0).OK)

		g.Refund("a", 1)
		g.Refund("a", -1)
		g.Refund("never seen", 1)
		require.Equal(t, 1, g.Peek("a").Remaining)
		require.EqualValues(t, 1, top(g, 1)[0].Spent)

		ended, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, g.Do(ended, "b", ok), context.Canceled)
	})
}

func TestGroupAllHasTheKeysOfAllShards(t *testing.T) {
	const keys = 5000
	g := throttle.NewGroup(throttle.GroupConfig[int]{Config: throttle.Config{Rate: 1e-3, Burst: 100}})
	want := make(map[int]throttle.Usage)
	for key := range keys {
		u := throttle.Usage{Spent: int64(key * 7919 % 97), Refused: int64(key % 3)}
		require.True(t, g.Take(key, int(u.Spent)).OK)
		for range u.Refused {
			require.False(t, g.Take(key, 101).OK)
		}
		want[key] = u
	}
	require.Equal(t, want, maps.Collect(g.All()))
}

func TestGroupSetGivesAKeyItsOwnLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Rate: 1, Burst: 2}, MaxKeys: 1})
		require.True(t, g.Allow("paying"))
		require.NoError(t, g.Set("paying", throttle.Limit{Rate: 100, Burst: 10}))
		require.NoError(t, g.Set("also", throttle.Limit{Rate: 10}), "whatever MaxKeys says")
		require.Equal(t, 100*time.Millisecond, g.Peek("paying").Window, "its own")
		require.Equal(t, 9, g.Peek("paying").Remaining, "what was spent stays spent")
		require.True(t, g.Take("paying", 9).OK)
		require.ErrorIs(t, g.Do(t.Context(), "paying", ok), throttle.ErrLimited)
		require.Equal(t, usage[string]{"paying", 10, 1}, top(g, 1)[0])
		g.Refund("paying", 1)
		require.True(t, g.Allow("paying"))
		time.Sleep(time.Hour)
		require.Equal(t, 10, g.Peek("paying").Remaining)
		require.True(t, g.Take("paying", 5).OK)

		require.NoError(t, g.Set("paying", throttle.Limit{}))
		require.Equal(t, throttle.Decision{Limit: 2, Window: 2 * time.Second, RetryAfter: 4 * time.Second, ResetAfter: 5 * time.Second}, g.Peek("paying"))
		require.NoError(t, g.Set("never seen", throttle.Limit{}))
		require.EqualValues(t, 15, top(g, 1)[0].Spent)
		require.Error(t, g.Set("paying", throttle.Limit{Rate: -1}))
		require.EqualValues(t, 16, g.Stats().Spent)
		require.EqualValues(t, 1, g.Stats().Refunded)
	})
}

func TestGroupSetLimitKeepsTheDebt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[int]{Config: throttle.Config{Rate: 1, Burst: 10}})
		require.NoError(t, g.Set(-1, throttle.Limit{Rate: 1, Burst: 3}))
		for k := range 1000 {
			require.True(t, g.Take(k, 1+k%10).OK)
		}
		time.Sleep(500 * time.Millisecond)
		require.NoError(t, setGroupLimit(g, throttle.Limit{Rate: 10, Burst: 20}))
		for k := range 1000 {
			want := 20 - 1 - k%10
			d := g.Peek(k)
			require.Equal(t, want, d.Remaining, "and a half")
			require.Equal(t, time.Duration(1+k%10)*100*time.Millisecond-50*time.Millisecond, d.ResetAfter)
		}
		require.Equal(t, 3, g.Peek(-1).Limit)
		require.Error(t, setGroupLimit(g, throttle.Limit{Rate: 0}))
	})
}

// A group against a limiter for each key that is never dropped.
func TestGroupEvictionNeitherMintsNorLoses(t *testing.T) {
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) { playGroup(t, rand.New(rand.NewPCG(seed, 3)), 3000) })
	}
}

// A script makes the choices of playGroup: two bytes for each.
type script []byte

func (s *script) IntN(n int) int {
	if len(*s) < 2 {
		return 0
	}
	choice := binary.LittleEndian.Uint16(*s)
	*s = (*s)[2:]
	return int(choice) % n
}

// FuzzGroup plays a script: the scale of the rates, the number of keys and the
// burst, each less 1, and then calls: a key, a kind, and what belongs to it.
func FuzzGroup(f *testing.F) {
	const hundred, monthly, billion = 0, 1, 2
	const sleep, refund, set, unset, take = 0, 1, 2, 3, 4
	play := func(scale, keys, burst uint16, calls ...[]uint16) {
		var b []byte
		for _, choice := range append([]uint16{scale, keys - 1, burst - 1}, slices.Concat(calls...)...) {
			b = binary.LittleEndian.AppendUint16(b, choice)
		}
		f.Add(b)
	}
	call := func(c ...uint16) []uint16 { return c }
	repeat := func(n int, c ...uint16) []uint16 { return slices.Repeat(c, n) }
	for _, scale := range []uint16{hundred, monthly, billion} {
		play(scale, 1, 3, repeat(4, 0, take, 1), call(0, sleep, 700, 14), repeat(3, 0, take, 1)) // a burst, and what refills
		play(scale, 1, 5, call(0, take, 3), repeat(2, 0, refund), repeat(5, 0, take, 2))
		play(scale, 2, 5, call(0, take, 3, 0, set, 49, 8), repeat(4, 0, take, 3), call(0, unset), repeat(2, 0, take, 1, 1, take, 1))
		play(scale, 1, 5, repeat(9, 0, take, 1, 0, set, 49, 8, 0, sleep, 999, 5, 0, set, 0, 0)) // up and down
	}
	play(monthly, 2, 5, repeat(80, 0, sleep, 999, 17, 0, take, 3, 0, take, 3)) // a year each
	var lower, upper []uint16                                                  // keys
	for key := range uint16(60) {
		lower = append(lower, key, take, 1)
		upper = append(upper, 60+key, take, 1)
	}
	tenMS, notYet := call(0, sleep, 611, 14), call(0, sleep, 594, 14) // a token has refilled, or 97 % of one
	play(hundred, 127, 1, lower, tenMS, upper, lower, upper)
	play(hundred, 127, 1, lower, notYet, upper, lower, upper)
	play(billion, 127, 5, lower, call(0, sleep, 999, 17), upper, call(0, set, 0, 0), lower, call(0, unset), upper)
	f.Fuzz(func(t *testing.T, b []byte) {
		synctest.Test(t, func(t *testing.T) { playGroup(t, (*script)(&b), min(len(b)/2, 1000)) })
	})
}

func playGroup(t *testing.T, choose interface{ IntN(n int) int }, calls int) {
	scale := []float64{1, 4e-9, 2e6}[choose.IntN(3)] // 100 tokens a second, one a month, one each 5 ns
	const most = 127                                 // in one shard, so that each new key sweeps past those that are there
	keys := 1 + choose.IntN(most)
	cfg := throttle.Config{Rate: 100 * scale, Burst: 1 + choose.IntN(5)}
	g := throttle.NewGroup(throttle.GroupConfig[int]{
		Config: cfg, MaxKeys: most, IdleAfter: 1,
	})
	apart := make(map[int]*throttle.Limiter)
	// A Group and a Limiter count from different moments, to the nanosecond, and a
	// change of rate rounds once more. What this makes is a difference in tokens: of
	// one nanosecond at the highest rate there are 50 at the lowest.
	highest := 500 * scale
	changes, rates := make(map[int]int), make(map[int]float64)
	tolerated := func(key int) (nanoseconds, tokens float64) {
		rate := rates[key]
		if rate == 0 {
			rate = cfg.Rate
		}
		moments := float64(3 + changes[key])
		return moments * highest / rate, moments * highest / 1e9
	}
	for range calls {
		key := choose.IntN(keys)
		l := apart[key]
		if l == nil {
			l = throttle.New(cfg)
			apart[key] = l
		}
		off, offTokens := tolerated(key)
		switch choose.IntN(12) {
		case 0: // up to the time of 13 tokens
			time.Sleep(time.Duration(float64(choose.IntN(1000)) / scale * float64(int(1)<<choose.IntN(18))))
		case 1: // only what was taken is given back: a key that is full may be gone
			if float64(l.Peek().ResetAfter) > max(1e7/scale, off) {
				g.Refund(key, 1)
				l.Refund(1)
			}
		case 2:
			rate, burst := highest/50*float64(1+choose.IntN(50)), 1+choose.IntN(9)
			changes[key], rates[key] = changes[key]+1, rate
			require.NoError(t, g.Set(key, throttle.Limit{Rate: rate, Burst: burst}))
			require.NoError(t, setLimit(l, throttle.Limit{Rate: rate, Burst: burst}))
		case 3:
			changes[key], rates[key] = changes[key]+1, 0
			require.NoError(t, g.Set(key, throttle.Limit{}))
			require.NoError(t, setLimit(l, throttle.Limit{Rate: cfg.Rate, Burst: cfg.Burst}))
		default:
			n := choose.IntN(4)
			got, want := g.Take(key, n), l.Take(n)
			require.InDelta(t, want.RetryAfter, got.RetryAfter, off)
			if float64(max(want.RetryAfter, got.RetryAfter)) > off {
				require.Equal(t, want.OK, got.OK, "key %d", key)
				require.InDelta(t, want.Remaining, got.Remaining, 1+offTokens)
			}
			if got.OK != want.OK {
				return // a matter of nanoseconds, which ends the comparison
			}
		}
	}
	var spent, refused int64
	for _, l := range apart {
		spent += l.Stats().Spent - l.Stats().Refunded
		refused += l.Stats().Refused
	}
	require.Equal(t, spent, g.Stats().Spent-g.Stats().Refunded, "with that of evicted keys")
	require.Equal(t, refused, g.Stats().Refused)
}

func TestGroupIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[int]{
			Config: throttle.Config{Rate: 1, Burst: 1}, MaxKeys: 1000, IdleAfter: 1,
		})
		for round := range 5 {
			admitted := 0
			for k := range 1500 { // a call that finds none to evict, among a few, shares a limit
				if g.Allow(10_000*round + k) {
					admitted++
				}
			}
			require.Equal(t, 1001, admitted, "each of a thousand keys, and one that shares")
			err := g.Do(t.Context(), -1, ok)
			limited, _ := errors.AsType[*throttle.LimitedError](err)
			require.Equal(t, "(other keys)", limited.Key)
			require.Equal(t, time.Second, limited.RetryAfter())
			time.Sleep(time.Second + 1)
		}
		s := g.Stats()
		require.Equal(t, 1000, s.Keys)
		require.EqualValues(t, 4000, s.Evicted)
		require.GreaterOrEqual(t, s.Overflow, int64(10))
	})
}

// Keys that are kept for All are dropped when their room is needed.
func TestGroupDropsIdleKeysToMakeRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[int]{
			Config: throttle.Config{Rate: 1, Burst: 1}, MaxKeys: 2000, IdleAfter: time.Hour,
		})
		for k := range 2000 {
			require.True(t, g.Allow(k))
		}
		time.Sleep(time.Second)
		require.EqualValues(t, 0, g.Stats().Evicted)
		admitted := 0
		for k := range 2000 {
			if g.Allow(10_000 + k) {
				admitted++
			}
		}
		require.Greater(t, admitted, 1800)
		require.Greater(t, g.Stats().Evicted, int64(1800))
		require.LessOrEqual(t, g.Stats().Keys, 2000)
	})
}

// A new key takes the place of an idle one, also where that is in another shard.
func TestGroupMakesRoomInAllShards(t *testing.T) {
	g := throttle.NewGroup(throttle.GroupConfig[int]{
		Config: throttle.Config{Rate: 1e-6, Burst: 1}, MaxKeys: 256, IdleAfter: -1,
	})
	for key := range 256 {
		require.True(t, g.Allow(key))
	}
	require.True(t, g.Allow(-1), "shares a limit, which has nothing left after that")
	admitted := 0
	for key := range 200 {
		g.Refund(key, 1) // now it is idle, and no other is
		if g.Allow(1000 + key) {
			admitted++
		} else {
			require.True(t, g.Allow(key))
		}
	}
	require.Greater(t, admitted, 20, "about 5 in the shard of the new key alone")
	require.EqualValues(t, admitted, g.Stats().Evicted)
}

// An attacker makes up keys. The tenants that are known go on, memory does not
// grow, and all the made-up keys that do not fit share one limit.
func TestGroupUnderMadeUpKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[string]{
			Config: throttle.Config{Rate: 1, Burst: 10}, MaxKeys: 500,
		})
		require.NoError(t, g.Set("paying", throttle.Limit{Rate: 5, Burst: 5}))
		stolen := 0
		for second := range 20 {
			for i := range 2000 {
				if g.Take(fmt.Sprint("made up ", second, i), 10).OK {
					stolen++
				}
			}
			for range 5 {
				require.True(t, g.Allow("paying"), "second %d", second)
			}
			require.LessOrEqual(t, g.Stats().Keys, 501)
			time.Sleep(time.Second)
		}
		// Each slot turns over once in the 10 s that a burst takes to refill.
		require.LessOrEqual(t, stolen, 2*(500+1)+2)
		require.NotZero(t, g.Stats().Overflow)
		for range 10 {
			err := g.Do(t.Context(), "one more", ok)
			if err != nil {
				require.EqualError(t, err, "throttle: [(other keys)]: limited (over the limit), retry after 1s")
			}
		}
	})
}

// flood makes calls to a server that serves one call a millisecond, in the order of
// arrival: in each of ten rounds of 100 ms, tenant 0 makes 500, and tenants 1 to 19
// make one each. It returns the latencies of tenants 1 to 19, by round.
func flood(t *testing.T, do func(ctx context.Context, tenant int, fn func(context.Context) error) error) (latency [10][]time.Duration) {
	t.Helper()
	server := make(chan struct{}, 1)
	serve := func(context.Context) error {
		server <- struct{}{}
		time.Sleep(time.Millisecond)
		<-server
		return nil
	}
	var calls sync.WaitGroup
	var mu sync.Mutex
	for round := range latency {
		for ms := range 100 {
			for range 5 {
				calls.Go(func() { _ = do(t.Context(), 0, serve) })
			}
			if tenant := ms / 5; ms%5 == 0 && tenant > 0 {
				calls.Go(func() {
					came := time.Now()
					require.NoError(t, do(t.Context(), tenant, serve))
					mu.Lock()
					defer mu.Unlock()
					latency[round] = append(latency[round], time.Since(came))
				})
			}
			time.Sleep(time.Millisecond)
		}
	}
	calls.Wait()
	return latency
}

// One tenant floods: the others keep their rate and their latency. Without the limit
// they lose both.
func TestGroupFloodOfOneTenant(t *testing.T) {
	for name, maxWait := range map[string]time.Duration{"refused": 0, "waiting": 50 * time.Millisecond, "waiting for long": -1} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cfg := throttle.Config{Rate: 10, Burst: 1, MaxWait: maxWait}
				if maxWait != 0 {
					cfg.Queue = 100
				}
				g := throttle.NewGroup(throttle.GroupConfig[int]{Config: cfg})
				for _, took := range flood(t, g.Do) {
					require.Len(t, took, 19)
					for _, latency := range took {
						require.Equal(t, time.Millisecond, latency, "that of the server")
					}
				}
				top := top(g, 2)
				require.Equal(t, 0, top[0].key)
				require.EqualValues(t, 5000, top[0].Spent+top[0].Refused)
				require.EqualValues(t, 10, top[1].Spent)
				require.Zero(t, top[1].Refused)
				if maxWait == 0 {
					require.EqualValues(t, 10, top[0].Spent)
				}
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		bare := flood(t, func(ctx context.Context, _ int, fn func(context.Context) error) error { return fn(ctx) })
		for round, took := range bare {
			require.Greater(t, slices.Min(took), time.Duration(round)*300*time.Millisecond, "without a limit the queue grows")
		}
	})
}

func TestGroupWaitsInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Name: "g", Rate: 10, Burst: 1, MaxWait: 350 * time.Millisecond}})
		start := time.Now()
		var calls sync.WaitGroup
		at := make([]time.Duration, 4)
		for i := range at {
			calls.Go(func() {
				require.NoError(t, g.Wait(t.Context(), "a"))
				at[i] = time.Since(start)
			})
			synctest.Wait()
		}
		err := g.Wait(t.Context(), "a")
		require.EqualError(t, err, "throttle: g[a]: limited (wait too long), retry after 400ms")
		require.NoError(t, g.Wait(t.Context(), "b"))
		require.False(t, g.Allow("a"))
		calls.Wait()
		require.Equal(t, []time.Duration{0, 100 * time.Millisecond, 200 * time.Millisecond, 300 * time.Millisecond}, at)
		require.Equal(t, usage[string]{"a", 4, 2}, top(g, 1)[0])
		require.Equal(t, throttle.GroupStats{Totals: throttle.Totals{Admitted: 5, Refused: 2, Refusals: map[throttle.Reason]int64{throttle.OverLimit: 1, throttle.WaitTooLong: 1}, Spent: 5, Waited: 3, WaitTime: 600 * time.Millisecond}, Keys: 2}, g.Stats())
		require.False(t, g.Allow("a"))
		time.Sleep(100 * time.Millisecond)
		require.True(t, g.Allow("a"), "as exact as before it had to wait")
	})
}

func TestGroupSetWhileACallWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Rate: 10, Burst: 1, MaxWait: -1}})
		require.NoError(t, g.Set("a", throttle.Limit{Rate: 1, Burst: 1}))
		require.True(t, g.Allow("a"))
		start := time.Now()
		var calls sync.WaitGroup
		for range 3 {
			calls.Go(func() { require.NoError(t, g.Wait(t.Context(), "a")) })
		}
		synctest.Wait()
		require.NoError(t, g.Set("a", throttle.Limit{}))
		require.NoError(t, setGroupLimit(g, throttle.Limit{Rate: 5, Burst: 1}))
		require.False(t, g.Allow("a"), "behind those that wait")
		calls.Wait()
		require.Equal(t, 600*time.Millisecond, time.Since(start))
		require.Equal(t, throttle.Decision{Limit: 1, Window: 200 * time.Millisecond, RetryAfter: 200 * time.Millisecond, ResetAfter: 200 * time.Millisecond}, g.Peek("a"))
		require.Equal(t, []usage[string]{{"a", 4, 1}}, top(g, 9))
	})
}

func TestGroupUnderStress(t *testing.T) {
	const rate, burst = 50, 3
	g := throttle.NewGroup(throttle.GroupConfig[int]{
		Config: throttle.Config{Rate: rate, Burst: burst, MaxWait: 10 * time.Millisecond}, MaxKeys: 400, IdleAfter: 1,
	})
	start := time.Now()
	admitted := make([]atomic.Int64, 300)
	var calls sync.WaitGroup
	for i := range 16 {
		calls.Go(func() {
			random := rand.New(rand.NewPCG(uint64(i), 4))
			for n := range 3000 {
				key := random.IntN(len(admitted))
				var ok bool
				switch n % 32 {
				case 0:
					ok = g.Wait(t.Context(), key) == nil
				case 1:
					top(g, 3)
					g.Peek(key)
				case 2:
					g.Allow(1000 + random.IntN(100_000))
				default:
					ok = g.Allow(key)
				}
				if ok {
					admitted[key].Add(1)
				}
			}
		})
	}
	calls.Wait()
	most := int64(burst + rate*time.Since(start).Seconds() + 1)
	for key := range admitted {
		require.LessOrEqual(t, admitted[key].Load(), most)
	}
	require.LessOrEqual(t, g.Stats().Keys, 400)
}

func TestGroupOfAMillionKeys(t *testing.T) {
	const keys = 1_000_000
	names := make([]string, keys)
	for i := range names {
		names[i] = "tenant-" + strconv.Itoa(i)
	}
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	g := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Rate: 1e-3, Burst: 2}, MaxKeys: keys})
	for _, name := range names {
		if !g.Allow(name) {
			t.Fatal("a new key has its burst")
		}
	}
	bytes := float64(heap()-before) / keys
	require.Less(t, bytes, 150.0, "bytes a key")
	require.True(t, g.Allow("one more"))
	require.Equal(t, keys, g.Stats().Keys, "it shares a limit")
	require.Zero(t, testing.AllocsPerRun(100, func() { g.Allow(names[keys/2]) }))
	require.True(t, g.Allow(names[0]), "the second of two")
	require.Equal(t, keys, g.Stats().Keys)
	runtime.KeepAlive(names)
}

func TestGroupCountsFarBeyondAWord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[int]{Config: throttle.Config{Rate: 1e9, Burst: 3e9}})
		for range 5 {
			require.True(t, g.Take(1, 3e9).OK)
			time.Sleep(3 * time.Second)
		}
		require.True(t, g.Allow(1))
		require.EqualValues(t, 15e9+1, top(g, 1)[0].Spent)
		g.Refund(1, 1)
		require.EqualValues(t, 15e9, top(g, 1)[0].Spent)
	})
}

func TestGroupForCenturies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[int]{Config: throttle.Config{Rate: 1, Burst: 10}})
		for range 6 {
			require.True(t, g.Take(1, 10).OK)
			require.False(t, g.Allow(1))
			time.Sleep(40 * 365 * 24 * time.Hour)
		}
	})
}

func TestGroupValidate(t *testing.T) {
	for want, cfg := range map[string]throttle.GroupConfig[int]{
		"throttle.Config.Rate is 0: must be above 0 and at most 1e12 tokens a second": {},
		"throttle.GroupConfig.MaxKeys is -1: must be 0 (for 100000) or more":          {Config: throttle.Config{Rate: 1}, MaxKeys: -1},
		"throttle.GroupConfig.MaxQueued is -1: must be 0 (for 10 000) or more":        {Config: throttle.Config{Rate: 1}, MaxQueued: -1},
	} {
		require.PanicsWithError(t, want, func() { throttle.NewGroup(cfg) })
	}
}

// With a negative IdleAfter, keys stay for All to report until their room is needed.
func TestGroupKeepsIdleKeysUntilRoomIsNeeded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, idleAfter := range []time.Duration{-1, time.Minute} {
			g := throttle.NewGroup(throttle.GroupConfig[int]{
				Config: throttle.Config{Rate: 1, Burst: 1}, MaxKeys: 111, IdleAfter: idleAfter,
			})
			for key := range 100 {
				require.True(t, g.Allow(key))
			}
			time.Sleep(24 * time.Hour)
			for key := range 10 {
				require.True(t, g.Allow(100+key))
			}
			for range 20 {
				g.Peek(-1) // drops nothing while there is room
			}
			if idleAfter < 0 {
				require.Equal(t, 110, g.Stats().Keys)
				require.True(t, g.Allow(999))
				require.True(t, g.Allow(1000), "room is needed")
				require.LessOrEqual(t, g.Stats().Keys, 111)
			} else {
				require.Less(t, g.Stats().Keys, 110)
			}
		}
	})
}

func TestGroupSharesOneLimitByDefault(t *testing.T) {
	g := throttle.NewGroup(throttle.GroupConfig[int]{Config: throttle.Config{Rate: 1e-3, Burst: 2}, MaxKeys: 1})
	require.True(t, g.Allow(1))
	require.True(t, g.Allow(2))
	require.True(t, g.Allow(3))
	require.False(t, g.Allow(4))
	require.ErrorContains(t, g.Wait(t.Context(), 5), "(other keys)")
}

func TestGroupByTakesTheKeyFromTheContext(t *testing.T) {
	type tenant struct{}
	g := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Name: "api", Rate: 1e-3, Burst: 1}})
	guarded := g.By(func(ctx context.Context) string { return ctx.Value(tenant{}).(string) })(ok)
	of := func(name string) context.Context { return context.WithValue(t.Context(), tenant{}, name) }
	require.NoError(t, guarded(of("a")))
	require.NoError(t, guarded(of("b")))
	limited, _ := errors.AsType[*throttle.LimitedError](guarded(of("a")))
	require.Equal(t, "api", limited.Name)
	require.Equal(t, "a", limited.Key)
	used := make(map[string]throttle.Usage)
	for key, u := range g.All() {
		used[key] = u
	}
	require.Equal(t, map[string]throttle.Usage{"a": {Spent: 1, Refused: 1}, "b": {Spent: 1}}, used)
	for range g.All() {
		break
	}
}

// What looks at a key or changes it holds it no longer than that: it can be evicted later.
func TestAKeyIsHeldOnlyWhileItIsUsed(t *testing.T) {
	type group = throttle.Group[string]
	for name, use := range map[string]func(t *testing.T, g *group){
		"Allow":  func(t *testing.T, g *group) { require.True(t, g.Allow("a")) },
		"Peek":   func(t *testing.T, g *group) { g.Allow("a"); g.Peek("a") },
		"Refund": func(t *testing.T, g *group) { g.Allow("a"); g.Refund("a", 1) },
		"Set": func(t *testing.T, g *group) {
			require.NoError(t, g.Set("a", throttle.Limit{Rate: 10}))
			require.NoError(t, g.Set("a", throttle.Limit{}))
		},
		"Restore": func(t *testing.T, g *group) {
			g.Allow("a")
			var saved bytes.Buffer
			require.NoError(t, g.Snapshot(&saved))
			require.NoError(t, g.Restore(&saved))
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := throttle.NewGroup(throttle.GroupConfig[string]{
					Config: throttle.Config{Rate: 1, Burst: 1}, MaxKeys: 2, IdleAfter: 1,
				})
				use(t, g)
				time.Sleep(time.Minute)
				for _, other := range []string{"b", "c"} {
					require.True(t, g.Allow(other))
				}
				require.Zero(t, g.Stats().Overflow, "nothing is lost with the first key")
			})
		})
	}
}
