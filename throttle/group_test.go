package throttle_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
)

// A group against a limiter for each key that is never dropped.
func TestGroupEvictionKeepsBalances(t *testing.T) {
	play(t, 40, 3, func(t *testing.T, choose interface{ IntN(n int) int }) { playGroup(t, choose, 1500) })
}

// FuzzGroup plays a script: two bytes for each choice of playGroup.
func FuzzGroup(f *testing.F) {
	scripts(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		synctest.Test(t, func(t *testing.T) { playGroup(t, (*script)(&b), min(len(b)/2, 1000)) })
	})
}

func playGroup(t *testing.T, choose interface{ IntN(n int) int }, calls int) {
	token := []time.Duration{10 * time.Millisecond, 30 * 24 * time.Hour, 5}[choose.IntN(3)]
	const most = 20
	keys := 1 + choose.IntN(most)
	cfg := throttle.Config{Rate: every(token), Burst: 1 + choose.IntN(5), Cost: cost}
	if choose.IntN(2) == 0 {
		cfg.MaxWait = -1
	}
	g := throttle.NewGroup(throttle.GroupConfig[int]{Config: cfg, MaxKeys: most, IdleAfter: 1})
	apart := make(map[int]*throttle.Limiter)
	type pair struct{ of, alone *throttle.Reservation }
	var loans []pair
	var calling sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	for range calls {
		key := choose.IntN(keys)
		l := apart[key]
		if l == nil {
			l = throttle.New(cfg)
			apart[key] = l
		}
		n := choose.IntN(4)
		switch choose.IntN(12) {
		case 0:
			time.Sleep(token * time.Duration(choose.IntN(60)) / 4)
		case 1, 2:
			if cfg.MaxWait < 0 {
				continue
			}
			r, err := g.Reserve(t.Context(), key, n)
			alone, errAlone := l.Reserve(t.Context(), n)
			require.Equal(t, errAlone == nil, err == nil, "%v %v", err, errAlone)
			if err == nil {
				loans = append(loans, pair{r, alone})
			}
		case 3, 4:
			if len(loans) > 0 {
				i := choose.IntN(len(loans))
				used := choose.IntN(10)
				loans[i].of.Settle(used)
				loans[i].alone.Settle(used)
				loans = append(loans[:i:i], loans[i+1:]...)
			}
		case 5: // which keeps the key
			if choose.IntN(4) == 0 {
				calling.Go(func() { _ = g.Wait(context.WithValue(ctx, costKey{}, n), key) })
				calling.Go(func() { _ = l.Wait(context.WithValue(ctx, costKey{}, n)) })
				synctest.Wait()
			}
		case 6:
			if choose.IntN(20) == 0 {
				cfg.Rate = every(token) * float64(1+choose.IntN(4)) / 2
				require.NoError(t, g.Update(func(c *throttle.GroupConfig[int]) { c.Config.Rate = cfg.Rate }))
				for _, l := range apart {
					require.NoError(t, l.Update(func(c *throttle.Config) { c.Rate = cfg.Rate }))
				}
			}
		case 7:
			require.Equal(t, l.Allow(), g.Allow(key), "key %d", key)
		default:
			if cfg.MaxWait < 0 {
				n = 0
			}
			require.Equal(t, take(l, n), takeOf(g, key, n), "key %d", key)
		}
	}
	synctest.Wait() // who has just been admitted, by an Update, say, returns so
	cancel()
	calling.Wait()
	var spent, refused, forgiven int64
	for _, l := range apart {
		s := l.Stats()
		spent += s.Spent - s.Refunded
		refused += s.Refused
		forgiven += s.Forgiven
	}
	s := g.Stats()
	require.Zero(t, s.Overflow)
	require.Equal(t, spent, s.Spent-s.Refunded, "with that of evicted keys")
	require.Equal(t, refused, s.Refused)
	require.Equal(t, forgiven, s.Forgiven)
	require.Zero(t, s.Queued)
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
		require.LessOrEqual(t, s.Keys, 1000)
		require.EqualValues(t, 4000, s.Evicted)
		require.GreaterOrEqual(t, s.Overflow, int64(10))
	})
}

// A key that a call is about to take from stays, also if the call's Cost asks for another; and one
// that nothing has been spent of goes, however it was asked for.
func TestGroupKeepsKeysInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g *throttle.Group[string]
		g = throttle.NewGroup(throttle.GroupConfig[string]{
			Config: throttle.Config{Rate: 1, Burst: 1, Cost: func(context.Context) int {
				g.Allow("another")
				return 1
			}}, MaxKeys: 1, IdleAfter: 1})
		_, err := g.Admit(t.Context(), "a")
		require.NoError(t, err)
		require.False(t, g.Allow("a"))
		require.Zero(t, g.Stats().Evicted)
		time.Sleep(time.Minute)
		require.True(t, g.Allow("b"))
		require.EqualValues(t, 1, g.Stats().Evicted)
	})
}

// Nothing that a key has spent goes with it: neither a debt nor a window.
func TestGroupKeepsSpentTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Rate: 1, Burst: 5}, MaxKeys: 1,
			IdleAfter: 1})
		r, err := g.Reserve(t.Context(), "a", 5)
		require.NoError(t, err)
		r.Settle(10)
		time.Sleep(10*time.Second - 1)
		require.True(t, g.Allow("b"), "shares")
		require.EqualValues(t, 0, g.Stats().Evicted)
		time.Sleep(time.Nanosecond)
		require.True(t, g.Allow("b"))
		require.EqualValues(t, 1, g.Stats().Evicted)
	})
}

// A settlement corrects what the call has taken from: what keys without room share, or the key's own
// limit, of which nothing is given to the others when the key has no room any more.
func TestGroupSettlesTheSameMeter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		group := func() *throttle.Group[string] {
			return throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Rate: 1, Burst: 10}, MaxKeys: 1,
				IdleAfter: -1})
		}
		reserve := func(g *throttle.Group[string], key string) *throttle.Reservation {
			r, err := g.Reserve(t.Context(), key, 10)
			require.NoError(t, err)
			return r
		}
		g := group()
		own := reserve(g, "a")
		time.Sleep(10 * time.Second)
		require.True(t, g.Allow("b"), "and a has been evicted")
		reserve(g, "c")
		own.Settle(0)
		require.False(t, g.Allow("d"))

		g = group()
		require.True(t, g.Allow("b"))
		shared := reserve(g, "c")
		time.Sleep(time.Second)
		require.True(t, g.Allow("c"), "by a limit of its own, since b has been evicted")
		shared.Settle(0)
		reserve(g, "d")
		require.EqualValues(t, 2, g.Stats().Overflow)
	})
}

// What keys without room share follows an Update as all keys do.
func TestGroupUpdateReachesKeysWithoutRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Rate: 1, Burst: 5, Cost: cost},
			MaxKeys: 1})
		for _, key := range []string{"a", "b"} {
			require.True(t, takeOf(g, key, 4).Admitted)
		}
		require.EqualValues(t, 1, g.Stats().Overflow, "b")
		require.NoError(t, g.Update(func(c *throttle.GroupConfig[string]) { c.Config.Rate = 4 }))
		for _, key := range []string{"a", "b"} {
			require.Equal(t, time.Second, takeOf(g, key, 0).ResetAfter, key)
		}
	})
}

func TestErrorsCutLongKeys(t *testing.T) {
	g := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Rate: 1e-3, Burst: 1}})
	key := strings.Repeat("ä", 300)
	require.True(t, g.Allow(key))
	limited, _ := errors.AsType[*throttle.LimitedError](g.Wait(t.Context(), key))
	require.Equal(t, key[:100], limited.Key)
}

// A key's String method may use the group: it is called without a lock.
type nosy struct{ n int }

var askNosy func()

func (k nosy) String() string { askNosy(); return strconv.Itoa(k.n) }

func TestGroupCallsKeyStringWithoutLock(t *testing.T) {
	g := throttle.NewGroup(throttle.GroupConfig[nosy]{Config: throttle.Config{Rate: 1e-3, Burst: 1}})
	askNosy = func() { g.Stats() }
	require.NoError(t, g.Wait(t.Context(), nosy{1}))
	require.ErrorContains(t, g.Wait(t.Context(), nosy{1}), "[1]")
}

// On the clock of the machine: keys come and go, calls wait and give up, and the Config changes.
func TestGroupUnderStress(t *testing.T) {
	g := throttle.NewGroup(throttle.GroupConfig[int]{
		Config: throttle.Config{Rate: 1e5, Burst: 3, MaxWait: time.Millisecond,
			Quotas: []throttle.Quota{{N: 5, Window: throttle.Window{Every: time.Millisecond}}}}, MaxKeys: 20, IdleAfter: 1,
	})
	var admitted, refused atomic.Int64
	var calls, updates sync.WaitGroup
	stop := make(chan struct{})
	updates.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				_ = g.Update(func(c *throttle.GroupConfig[int]) { c.Config.Rate = float64(1+i%3) * 1e5 })
				g.Stats()
				runtime.Gosched()
			}
		}
	})
	for i := range 8 {
		calls.Go(func() {
			random := rand.New(rand.NewPCG(uint64(i), 4))
			for range 2000 {
				ctx, cancel := context.WithCancel(t.Context())
				if random.IntN(4) == 0 {
					go cancel()
				}
				r, err := g.Reserve(ctx, random.IntN(40), 1)
				switch {
				case err == nil:
					admitted.Add(1)
					r.Settle(random.IntN(3))
				case reason(err) != "":
					refused.Add(1)
				}
				cancel()
			}
		})
	}
	calls.Wait()
	close(stop)
	updates.Wait()
	s := g.Stats()
	require.Equal(t, admitted.Load(), s.Admitted)
	require.Equal(t, refused.Load(), s.Refused)
	require.Zero(t, s.Queued)
}

// A key that is a string takes at most 150 bytes.
func TestGroupOfAMillionKeys(t *testing.T) {
	keys := 1_000_000
	if testing.Short() {
		keys = 100_000
	}
	g := throttle.NewGroup(throttle.GroupConfig[string]{
		Config: throttle.Config{Rate: 1, Burst: 10}, MaxKeys: keys, IdleAfter: -1,
	})
	heap := func() float64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc)
	}
	before := heap()
	for i := range keys {
		g.Allow(fmt.Sprintf("%08d", i))
	}
	each := (heap() - before) / float64(keys)
	t.Logf("%.0f bytes a key", each)
	require.LessOrEqual(t, each, 150.0)
	require.Equal(t, keys, g.Stats().Keys)
	require.Zero(t, g.Stats().Overflow)
}

func TestGroupValidate(t *testing.T) {
	for want, cfg := range map[string]throttle.GroupConfig[int]{
		"throttle.Config.Rate is 0" + rates: {},
		"throttle.GroupConfig.MaxKeys is -1: must be 0 (for 100000) or more": {
			Config: throttle.Config{Rate: 1}, MaxKeys: -1,
		},
		"throttle.Config.Burst is -1: must be 0 (for a second's worth) or more, or throttle.None to admit nothing\n" +
			"throttle.GroupConfig.MaxKeys is -1: must be 0 (for 100000) or more": {
			Config: throttle.Config{Rate: 1, Burst: -1}, MaxKeys: -1,
		},
		"throttle.GroupConfig.IdleAfter is -2ns: must be 0 (for a minute) or more, or throttle.Unlimited": {
			Config: throttle.Config{Rate: 1}, IdleAfter: -2,
		},
	} {
		require.PanicsWithError(t, want, func() { throttle.NewGroup(cfg) })
	}
}

func TestGroupByTakesTheKeyFromTheContext(t *testing.T) {
	type tenant struct{}
	g := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Rate: 1e-3, Burst: 1}})
	call := g.By(func(ctx context.Context) string { return ctx.Value(tenant{}).(string) })(ok)
	for _, name := range []string{"a", "b"} {
		ctx := context.WithValue(t.Context(), tenant{}, name)
		require.NoError(t, call(ctx))
		require.ErrorContains(t, call(ctx), "["+name+"]")
	}
}

func TestUnusedKeyIsEvictedAfterAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[int]{Config: throttle.Config{Rate: 1}})
		require.True(t, g.Allow(1))
		time.Sleep(59 * time.Second)
		require.True(t, g.Allow(2))
		require.Equal(t, 2, g.Stats().Keys)
		time.Sleep(2 * time.Second)
		require.True(t, g.Allow(3))
		require.Equal(t, 2, g.Stats().Keys, "the first key was evicted")
	})
}
