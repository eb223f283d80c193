package throttle_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
)

func setLimit(l *throttle.Limiter, limit throttle.Limit) error {
	return l.Update(func(c *throttle.Config) { c.Rate, c.Burst, c.Quotas = limit.Rate, limit.Burst, limit.Quotas })
}

func setGroupLimit[K comparable](g *throttle.Group[K], limit throttle.Limit) error {
	return g.Update(func(c *throttle.GroupConfig[K]) {
		c.Config.Rate, c.Config.Burst, c.Config.Quotas = limit.Rate, limit.Burst, limit.Quotas
	})
}

func setSharedLimit(s *throttle.Shared, limit throttle.Limit) error {
	return s.Update(func(c *throttle.SharedConfig) { c.Rate, c.Burst, c.Quotas = limit.Rate, limit.Burst, limit.Quotas })
}

func TestConfigHasItsDefaultsFilledIn(t *testing.T) {
	reserve := []float64{0.2}
	cfg := throttle.Config{Name: "api", Rate: 2.5, MaxWait: -1, Levels: 2, Reserve: reserve, Priority: levelOf}
	l := throttle.New(cfg)
	got := l.Config()
	require.Equal(t, "api", l.Name())
	require.Equal(t, "api", got.Name)
	require.Equal(t, 3, got.Burst)
	require.Equal(t, 1000, got.Queue)
	reserve[0], got.Reserve[0] = 0.9, 0.9
	require.Equal(t, []float64{0.2}, l.Config().Reserve, "a Config shares no memory")
	require.NoError(t, l.Config().Validate())
	require.NoError(t, throttle.New(throttle.Config{Rate: 1}).Config().Validate(), "no Queue without a MaxWait")

	cfg.Reserve = nil
	g := throttle.NewGroup(throttle.GroupConfig[int]{Config: cfg})
	require.Equal(t, "api", g.Name())
	c := g.Config()
	require.Equal(t, 100_000, c.MaxKeys)
	require.Equal(t, 10_000, c.MaxQueued)
	require.Equal(t, time.Minute, c.IdleAfter)
	require.Equal(t, []float64{0.25}, c.Config.Reserve)
	c.Config.Reserve[0] = 0.9
	require.Equal(t, []float64{0.25}, g.Config().Config.Reserve)

	s := throttle.NewShared(throttle.SharedConfig{Name: "api", Eval: (&fakeRedis{}).eval, Rate: 2.5, Instances: 4})
	require.Equal(t, "api", s.Name())
	sc := s.Config()
	require.Equal(t, "throttle:", sc.Prefix)
	require.Equal(t, 3, sc.Burst)
	require.Equal(t, 50*time.Millisecond, sc.Timeout)
	require.Equal(t, time.Second, sc.RetryEvery)
	require.NoError(t, sc.Validate())

	a := throttle.NewAdaptive(throttle.AdaptiveConfig{Name: "users"})
	require.Equal(t, "users", a.Name())
	require.Equal(t, throttle.AdaptiveConfig{Name: "users", K: 2, Window: 2 * time.Minute, Levels: 1}, a.Config())
}

func TestUpdateKeepsTokensSpent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 1, Burst: 10})
		require.True(t, l.Take(7).OK)
		require.NoError(t, l.Update(func(c *throttle.Config) {
			require.Equal(t, 10, c.Burst)
			c.Burst, c.Rate = 20, 2
		}))
		require.Equal(t, 13, l.Peek().Remaining)
		require.Equal(t, 20, l.Config().Burst)
		time.Sleep(time.Second)
		require.Equal(t, 15, l.Peek().Remaining)
		require.EqualValues(t, 7, l.Stats().Spent)
		require.NoError(t, l.Update(func(c *throttle.Config) { c.Burst = 4 }))
		require.Equal(t, 0, l.Peek().Remaining)
		time.Sleep(time.Second)
		require.Equal(t, 1, l.Peek().Remaining, "5 of 20 were gone")
	})
}

func TestUpdateComputesDefaultsAnew(t *testing.T) {
	l := throttle.New(throttle.Config{Rate: 5})
	require.NoError(t, l.Update(func(c *throttle.Config) { c.Rate = 8 }))
	require.Equal(t, 8, l.Config().Burst)
	require.NoError(t, setLimit(l, throttle.Limit{Rate: 8, Burst: 9}))
	require.NoError(t, l.Update(func(c *throttle.Config) { c.Rate = 2 }))
	require.Equal(t, 9, l.Config().Burst, "given by Update")
	require.NoError(t, setLimit(l, throttle.Limit{Rate: 3, Burst: 0}))
	require.NoError(t, l.Update(func(c *throttle.Config) { c.Rate = 4 }))
	require.Equal(t, 4, l.Config().Burst)
	l = throttle.New(throttle.Config{Rate: 5, Levels: 4, Priority: levelOf})
	require.NoError(t, l.Update(func(c *throttle.Config) { c.Reserve = []float64{0.5, 0.125, 0.125} }))
	require.Equal(t, []float64{0.5, 0.125, 0.125}, l.Config().Reserve)
}

func TestUpdateThatIsInvalidChangesNothing(t *testing.T) {
	l := throttle.New(throttle.Config{Name: "api", Rate: 5})
	require.EqualError(t, l.Update(func(c *throttle.Config) { c.Rate, c.Burst = -1, 7 }),
		"throttle.Config.Rate is -1: must be above 0 and at most 1e12 tokens a second")
	require.EqualError(t, l.Update(func(c *throttle.Config) { c.Name = "other" }),
		`throttle.Config.Name is "other": must be "api" as before: it cannot change`)
	require.EqualError(t, l.Update(func(c *throttle.Config) { c.Levels, c.Priority = 2, levelOf }),
		"throttle.Config.Levels is 2: must be 1 as before: it cannot change")
	require.EqualError(t, l.Update(func(c *throttle.Config) { c.Queue = 3 }),
		"throttle.Config.Queue is 3: must be 0 where MaxWait is 0: no call waits")
	require.Panics(t, func() { _ = l.Update(func(c *throttle.Config) { c.Rate = 1; panic("no") }) })
	require.Equal(t, 5.0, l.Config().Rate)
	require.Equal(t, 5, l.Config().Burst)
	require.NoError(t, l.Update(func(*throttle.Config) {}), "no lock is held after the panic")

	g := throttle.NewGroup(throttle.GroupConfig[int]{Config: throttle.Config{Name: "api", Rate: 5}})
	require.EqualError(t, g.Update(func(c *throttle.GroupConfig[int]) { c.MaxKeys = -1 }),
		"throttle.GroupConfig.MaxKeys is -1: must be 0 (for 100000) or more")
	require.EqualError(t, g.Update(func(c *throttle.GroupConfig[int]) { c.Config.Name = "b" }),
		`throttle.Config.Name is "b": must be "api" as before: it cannot change`)
	require.Panics(t, func() { _ = g.Update(func(*throttle.GroupConfig[int]) { panic("no") }) })
	require.NoError(t, g.Update(func(c *throttle.GroupConfig[int]) { c.Config.Rate = 7 }))
	require.Equal(t, 7, g.Config().Config.Burst)
}

// Everything that Config holds can change, and decides about the next call.
func TestUpdateChangesEveryField(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 1, Burst: 10, Levels: 2, Priority: func(context.Context) int { return 0 }})
		require.NoError(t, l.Update(func(c *throttle.Config) {
			c.Cost = func(context.Context) int { return 2 }
			c.Priority, c.Reserve = levelOf, []float64{0.5}
		}))
		require.NoError(t, l.Wait(at(t.Context(), 1)))
		require.NoError(t, l.Wait(at(t.Context(), 1)))
		require.Equal(t, throttle.OverLimit, reason(l.Wait(at(t.Context(), 1))), "5 are kept for level 0")
		require.NoError(t, l.Wait(at(t.Context(), 0)))
		require.NoError(t, l.Update(func(c *throttle.Config) { c.MaxWait, c.Queue, c.Cost = time.Hour, 1, nil }))
		start := time.Now()
		require.NoError(t, l.Wait(at(t.Context(), 1)))
		require.Equal(t, 2*time.Second, time.Since(start))
		require.NoError(t, l.Update(func(c *throttle.Config) { c.MaxWait, c.Queue = 0, 0 }))
		require.Equal(t, throttle.OverLimit, reason(l.Wait(at(t.Context(), 1))))
		require.NoError(t, l.Update(func(c *throttle.Config) { c.Reserve = []float64{} }))
		require.Equal(t, 5, l.Peek().Remaining)
	})
}

// Waiting calls keep their places and their MaxWait. Those beyond the new Queue stay, and
// others come only when there is room.
func TestUpdateKeepsWaitingCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 1, Burst: 1, MaxWait: 10 * time.Second})
		require.True(t, l.Allow())
		start := time.Now()
		ends := make([]time.Duration, 3)
		var calls sync.WaitGroup
		for i := range ends {
			calls.Go(func() {
				require.NoError(t, l.Wait(t.Context()))
				ends[i] = time.Since(start)
			})
			synctest.Wait()
		}
		require.NoError(t, l.Update(func(c *throttle.Config) { c.Queue, c.MaxWait = 1, time.Second }))
		require.Equal(t, 3, l.Stats().Queued)
		require.Equal(t, throttle.WaitTooLong, reason(l.Wait(t.Context())))
		require.NoError(t, l.Update(func(c *throttle.Config) { c.MaxWait = -1 }))
		require.Equal(t, throttle.QueueFull, reason(l.Wait(t.Context())))
		time.Sleep(time.Second)
		require.NoError(t, l.Update(func(c *throttle.Config) { c.MaxWait, c.Queue, c.Rate, c.Burst = 0, 0, 0.5, 1 }))
		calls.Wait()
		require.Equal(t, []time.Duration{time.Second, 3 * time.Second, 5 * time.Second}, ends)
	})
}

// A call that waits for longer than the new MaxWait allows is refused when its own has
// passed.
func TestUpdateLeavesWaitsAsTheyBegan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 1, Burst: 1, MaxWait: 5 * time.Second, Levels: 2, Reserve: []float64{}, Priority: levelOf})
		require.True(t, l.Allow())
		start := time.Now()
		var calls sync.WaitGroup
		calls.Go(func() {
			require.Equal(t, throttle.WaitTooLong, reason(l.Wait(at(t.Context(), 1))))
			require.Equal(t, 5*time.Second, time.Since(start))
		})
		synctest.Wait()
		require.NoError(t, l.Update(func(c *throttle.Config) { c.MaxWait, c.Rate = time.Hour, 1.0/60 }))
		calls.Wait()
	})
}

// Updates under load lose no call and no token, and over any interval the larger of the
// limits holds.
func TestUpdateUnderLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const rate, burst = 1000.0, 20
		limits := []func(*throttle.Config){
			func(c *throttle.Config) { c.Rate, c.Burst = rate, burst },
			func(c *throttle.Config) { c.Rate, c.Burst, c.MaxWait = rate/3, burst/4, 50*time.Millisecond },
			func(c *throttle.Config) { c.Reserve = []float64{0.2, 0.2} },
			func(c *throttle.Config) { c.Reserve, c.Queue = nil, 3 },
			func(c *throttle.Config) { c.MaxWait, c.Queue = 0, 0 },
			func(c *throttle.Config) { c.MaxWait = -1 },
		}
		l := throttle.New(throttle.Config{
			Rate: rate, Burst: burst, MaxWait: -1, Levels: 4, Priority: levelOf,
			Cost: func(ctx context.Context) int { return 1 + levelOf(ctx)%3 },
		})
		start := time.Now()
		var mu sync.Mutex
		var all []admission
		var refused int64
		var calls sync.WaitGroup
		random := rand.New(rand.NewPCG(3, 3))
		for i := range 3000 {
			n := random.IntN(5)
			calls.Go(func() {
				ctx, cancel := context.WithTimeout(at(t.Context(), n), time.Second)
				defer cancel()
				err := l.Wait(ctx)
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					all = append(all, admission{time.Since(start), time.Since(start), 1 + n%3})
					return
				}
				require.ErrorIs(t, err, throttle.ErrLimited)
				refused++
			})
			if i%20 == 0 {
				calls.Go(func() { require.NoError(t, l.Update(limits[i/20%len(limits)])) })
			}
			time.Sleep(time.Millisecond)
		}
		calls.Wait()
		requireBound(t, all, rate, burst)
		s := l.Stats()
		require.Zero(t, s.Queued)
		require.EqualValues(t, len(all), s.Admitted)
		require.Equal(t, refused, s.Refused)
		require.EqualValues(t, 3000, s.Admitted+s.Refused)
		require.NotZero(t, refused)
		spent := 0
		for _, a := range all {
			spent += a.tokens
		}
		require.GreaterOrEqual(t, s.Spent, int64(spent))
		require.NoError(t, l.Update(func(c *throttle.Config) {
			*c = throttle.Config{Rate: 1, Burst: 5, Levels: 4, Priority: levelOf, Reserve: []float64{}}
		}))
		time.Sleep(time.Hour)
		require.Equal(t, 5, l.Peek().Remaining)
		for i := range 6 {
			require.Equal(t, i < 5, l.Allow(), "the new limit holds once Update has returned")
		}
	})
}

// Updates, calls of all kinds and snapshots at the same time, for the race detector.
func TestUpdateRaces(t *testing.T) {
	g := throttle.NewGroup(throttle.GroupConfig[int]{
		Config:  throttle.Config{Rate: 1e5, Burst: 10, MaxWait: time.Millisecond, Levels: 3, Priority: func(ctx context.Context) int { return 2 }},
		MaxKeys: 64,
	})
	l := throttle.New(g.Config().Config)
	const callers, each = 4, 2000
	var calls, others sync.WaitGroup
	var made atomic.Int64
	for i := range callers {
		calls.Go(func() {
			random := rand.New(rand.NewPCG(uint64(i), 8))
			for range each {
				key := random.IntN(100)
				switch random.IntN(5) {
				case 0:
					g.Allow(key)
					l.Allow()
				case 1:
					g.Take(key, 2)
					l.Take(2)
				case 2:
					g.Refund(key, 1)
					l.Refund(1)
					continue
				default:
					_ = g.Wait(t.Context(), key)
					_ = l.Wait(t.Context())
				}
				made.Add(1)
			}
		})
	}
	done := make(chan struct{})
	others.Go(func() {
		random := rand.New(rand.NewPCG(7, 8))
		for {
			select {
			case <-done:
				return
			default:
			}
			change := func(c *throttle.Config) {
				c.Rate, c.Burst = 1e5*float64(1+random.IntN(3)), 1+random.IntN(20)
				c.Reserve = [][]float64{nil, {}, {0.5}}[random.IntN(3)]
			}
			require.NoError(t, l.Update(change))
			err := g.Update(func(c *throttle.GroupConfig[int]) {
				change(&c.Config)
				c.MaxKeys = 64 + random.IntN(64)
				c.IdleAfter = time.Duration(1 - random.IntN(2))
			})
			if err != nil {
				require.ErrorContains(t, err, "keys that the group holds")
			}
			require.NoError(t, g.Set(random.IntN(10), throttle.Limit{Rate: 1e4, Burst: 3}))
			require.NoError(t, g.Set(random.IntN(10), throttle.Limit{}))
		}
	})
	others.Go(func() {
		var last throttle.Stats
		var lastGroup throttle.GroupStats
		for {
			select {
			case <-done:
				return
			default:
			}
			s, gs := l.Stats(), g.Stats()
			for _, pair := range [][2]int64{
				{last.Admitted, s.Admitted}, {last.Refused, s.Refused}, {last.Spent, s.Spent}, {last.Refunded, s.Refunded},
				{last.Waited, s.Waited}, {int64(last.WaitTime), int64(s.WaitTime)},
				{lastGroup.Admitted, gs.Admitted}, {lastGroup.Refused, gs.Refused}, {lastGroup.Spent, gs.Spent},
				{lastGroup.Refunded, gs.Refunded}, {lastGroup.Waited, gs.Waited}, {int64(lastGroup.WaitTime), int64(gs.WaitTime)},
				{lastGroup.Evicted, gs.Evicted}, {lastGroup.Overflow, gs.Overflow},
			} {
				require.LessOrEqual(t, pair[0], pair[1], "a counter never goes back")
			}
			last, lastGroup = s, gs
		}
	})
	calls.Wait()
	close(done)
	others.Wait()
	s, gs := l.Stats(), g.Stats()
	require.Equal(t, made.Load(), s.Admitted+s.Refused)
	require.Equal(t, made.Load(), gs.Admitted+gs.Refused)
	require.Zero(t, s.Queued)
	require.Zero(t, gs.Queued)
}

// All keys follow an Update, with what they have spent. A key that Set decides about
// keeps its rate and burst, and follows in all else.
func TestGroupUpdateReachesEveryKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{
			Rate: 1, Burst: 10, Levels: 2, Priority: levelOf, Reserve: []float64{},
		}})
		require.NoError(t, g.Set("paying", throttle.Limit{Rate: 100, Burst: 100}))
		require.True(t, g.Take("paying", 60).OK)
		require.True(t, g.Take("free", 7).OK)
		require.NoError(t, g.Update(func(c *throttle.GroupConfig[string]) { c.Config.Burst = 20 }))
		require.Equal(t, 13, g.Peek("free").Remaining)
		require.Equal(t, 20, g.Peek("new").Remaining)
		require.Equal(t, 40, g.Peek("paying").Remaining)
		require.NoError(t, g.Update(func(c *throttle.GroupConfig[string]) {
			c.Config.Reserve = []float64{0.5}
			c.Config.MaxWait = -1
		}))
		require.Equal(t, 3, g.Peek("free").Remaining)
		require.Equal(t, 0, g.Peek("paying").Remaining, "half of its own burst is reserved")
		start := time.Now()
		require.NoError(t, g.Wait(at(t.Context(), 0), "paying"))
		require.Zero(t, time.Since(start))
		require.NoError(t, g.Wait(at(t.Context(), 1), "paying"))
		require.Equal(t, 120*time.Millisecond, time.Since(start), "at its own rate")
		require.NoError(t, g.Set("paying", throttle.Limit{}))
		require.Equal(t, 20, g.Peek("paying").Limit)
		require.NoError(t, setGroupLimit(g, throttle.Limit{Rate: 2, Burst: 30}))
		require.Equal(t, 30, g.Config().Config.Burst)
		require.Equal(t, 30, g.Peek("paying").Limit)
	})
}

func TestGroupUpdateKeepsWaitingCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[int]{
			Config: throttle.Config{Rate: 1, Burst: 1, MaxWait: -1}, MaxQueued: 4,
		})
		start := time.Now()
		var calls sync.WaitGroup
		for key := range 2 {
			require.True(t, g.Allow(key))
			for range 2 {
				calls.Go(func() { require.NoError(t, g.Wait(t.Context(), key)) })
			}
		}
		synctest.Wait()
		require.NoError(t, g.Update(func(c *throttle.GroupConfig[int]) { c.MaxQueued, c.Config.Rate, c.Config.Burst = 2, 2, 1 }))
		require.Equal(t, 4, g.Stats().Queued)
		require.Equal(t, throttle.QueueFull, reason(g.Wait(t.Context(), 0)))
		calls.Wait()
		require.Equal(t, time.Second, time.Since(start))
		require.EqualValues(t, 4, g.Stats().Waited)
		require.Equal(t, 3*time.Second, g.Stats().WaitTime)
	})
}

func TestGroupUpdateOfItsBounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[int]{Config: throttle.Config{Rate: 1, Burst: 1}, MaxKeys: 5})
		for key := range 5 {
			require.True(t, g.Allow(key))
		}
		keys := func(n int) error {
			return g.Update(func(c *throttle.GroupConfig[int]) { c.MaxKeys = n })
		}
		require.EqualError(t, keys(4), "throttle.GroupConfig.MaxKeys is 4: must be at least the 5 keys that the group holds")
		require.Equal(t, 5, g.Config().MaxKeys)
		require.Equal(t, 5, g.Stats().Keys)
		require.True(t, g.Allow(5), "shares a limit")
		require.False(t, g.Allow(6))
		require.NoError(t, keys(6))
		require.True(t, g.Allow(6))
		require.Equal(t, throttle.OverLimit, reason(g.Wait(t.Context(), 7)), "what others have spent there stays spent")

		require.NoError(t, g.Update(func(c *throttle.GroupConfig[int]) { c.IdleAfter, c.MaxKeys = time.Hour, 100 }))
		time.Sleep(time.Minute)
		require.True(t, g.Allow(7))
		require.Equal(t, 7, g.Stats().Keys)
		require.NoError(t, g.Update(func(c *throttle.GroupConfig[int]) { c.IdleAfter = time.Second }))
		for key := 8; g.Stats().Evicted == 0; key++ {
			require.Less(t, key, 90)
			require.True(t, g.Allow(key))
		}
		require.NoError(t, keys(g.Stats().Keys))
	})
}

// An Update that fails leaves the bound as it was, and keys that Set has added stand in the way
// of none.
func TestGroupUpdateThatFailsKeepsMaxKeys(t *testing.T) {
	g := throttle.NewGroup(throttle.GroupConfig[int]{Config: throttle.Config{Rate: 1, Burst: 1}, MaxKeys: 5})
	keys := func(n int) error { return g.Update(func(c *throttle.GroupConfig[int]) { c.MaxKeys = n }) }
	for key := range 3 {
		require.True(t, g.Allow(key))
	}
	require.Error(t, keys(2))
	require.True(t, g.Allow(3))
	require.True(t, g.Allow(4))
	require.NoError(t, g.Set(5, throttle.Limit{Rate: 1}))
	require.NoError(t, g.Update(func(c *throttle.GroupConfig[int]) { c.IdleAfter = time.Hour }), "6 keys, as before")
	require.Error(t, g.Set(6, throttle.Limit{Burst: 3}), "no Rate")
}

func TestGroupUpdateOfMaxQueued(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[int]{Config: throttle.Config{Rate: 1, Burst: 1, MaxWait: time.Minute}, MaxQueued: 1})
		require.True(t, g.Allow(1))
		go func() { _ = g.Wait(t.Context(), 1) }()
		synctest.Wait()
		require.Equal(t, throttle.QueueFull, reason(g.Wait(t.Context(), 1)))
		require.NoError(t, g.Update(func(c *throttle.GroupConfig[int]) { c.MaxQueued = 2 }))
		require.NoError(t, g.Wait(t.Context(), 1))
	})
}

// A call that displaces another gets its place, also where more calls wait than a new MaxQueued
// allows.
func TestGroupUpdateOfMaxQueuedLeavesThePlaceOfADisplacedCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[int]{
			Config: throttle.Config{Rate: 1, Burst: 1, MaxWait: -1, Levels: 2, Reserve: []float64{}, Priority: levelOf}, MaxQueued: 4,
		})
		require.True(t, g.Allow(1))
		var done tally
		call := func(level int) {
			go func() { done.add(g.Wait(at(t.Context(), level), 1)) }()
			synctest.Wait()
		}
		for range 4 {
			call(1)
		}
		require.NoError(t, g.Update(func(c *throttle.GroupConfig[int]) { c.MaxQueued = 2 }))
		call(0)
		require.Equal(t, map[throttle.Reason]int{throttle.Displaced: 1}, done.all())
		require.Equal(t, 4, g.Stats().Queued)
		time.Sleep(time.Minute)
		require.Equal(t, map[throttle.Reason]int{throttle.Displaced: 1, "": 4}, done.all())
		require.Zero(t, g.Stats().Queued)
	})
}

func TestSharedUpdate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeRedis{answer: answers(int64(1), int64(0), int64(0))}
		s := throttle.NewShared(throttle.SharedConfig{Name: "api", Eval: f.eval, Rate: 1, Burst: 10, Instances: 2, RetryEvery: time.Hour,
			Levels: 2, Priority: func(ctx context.Context) int { n, _ := ctx.Value(level{}).(int); return n }, Reserve: []float64{}})
		change := func(set func(*throttle.SharedConfig)) {
			t.Helper()
			require.NoError(t, s.Update(set))
		}
		require.True(t, s.Allow(t.Context(), ""))
		require.Equal(t, uint64(10_000_000), f.calls[0].args[0], "10 s to refill")
		change(func(c *throttle.SharedConfig) { c.Rate, c.Burst = 10, 20 })
		require.True(t, s.Allow(t.Context(), ""))
		require.Equal(t, uint64(2_000_000), f.calls[1].args[0])
		change(func(c *throttle.SharedConfig) {
			c.Reserve = []float64{0.5}
			c.Cost = func(context.Context) int { return 11 }
		})
		require.Equal(t, throttle.TooCostly, reason(s.Wait(at(t.Context(), 1), "")))

		f.answer = hanging
		change(func(c *throttle.SharedConfig) {
			c.Reserve, c.Cost, c.Timeout = []float64{}, nil, time.Second
		})
		start := time.Now()
		for i := range 12 {
			require.Equal(t, i < 11, s.Allow(t.Context(), ""), "half of the burst, alone, after one that was late")
		}
		require.Equal(t, 2*time.Second, time.Since(start), "the new Timeout, twice")
		change(func(c *throttle.SharedConfig) { c.OnOutage = throttle.AdmitAll })
		require.True(t, s.Allow(t.Context(), ""))
		change(func(c *throttle.SharedConfig) { c.OnOutage = throttle.RefuseAll })
		require.False(t, s.Allow(t.Context(), ""))
		require.True(t, s.Stats().Down, "the outage goes on")
		change(func(c *throttle.SharedConfig) { c.OnOutage, c.Instances = throttle.LimitLocally, 1 })
		require.Equal(t, 10, s.Take(t.Context(), "", 1).Remaining+1, "the burst is twice as large, and 10 are gone")
		require.EqualValues(t, 1, s.Stats().Outages)
		time.Sleep(2 * time.Hour) // for the trips under way
	})
}

func TestSharedUpdateThatIsInvalidChangesNothing(t *testing.T) {
	f := &fakeRedis{answer: answers(int64(1), int64(0), int64(0))}
	s := throttle.NewShared(throttle.SharedConfig{Timeout: time.Minute, Name: "api", Eval: f.eval, Rate: 1, Burst: 10, Instances: 2})
	for want, change := range map[string]func(c *throttle.SharedConfig){
		`throttle.SharedConfig.Name is "b": must be "api" as before: it cannot change`:                              func(c *throttle.SharedConfig) { c.Name = "b" },
		`throttle.SharedConfig.Prefix is "p": must be "throttle:" as before: it cannot change`:                      func(c *throttle.SharedConfig) { c.Prefix = "p" },
		`throttle.SharedConfig.Rate is 0: must be above 0 and at most 1e9 tokens a second`:                          func(c *throttle.SharedConfig) { c.Rate = 0 },
		`throttle.SharedConfig.Instances is 4000000000: must be fewer: the part of an instance is too small a rate`: func(c *throttle.SharedConfig) { c.Instances = 4e9 },
	} {
		require.EqualError(t, s.Update(change), want)
	}
	require.Panics(t, func() { _ = s.Update(func(*throttle.SharedConfig) { panic("no") }) })
	require.NoError(t, s.Update(func(c *throttle.SharedConfig) {
		*c = throttle.SharedConfig{Name: "api", Eval: f.eval, Rate: 2, Instances: 2}
	}), "the same in another form")
	require.Equal(t, 2, s.Config().Burst)
	require.True(t, s.Allow(t.Context(), "k"))
	require.Equal(t, []string{"throttle:api/k"}, f.calls[0].keys)
}

func TestSharedUpdateUnderLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeRedis{answer: func(_ context.Context, args []any) (any, error) {
			time.Sleep(time.Millisecond)
			return []any{int64(args[6].(int)), int64(0), int64(0)}, nil
		}}
		s := throttle.NewShared(throttle.SharedConfig{Name: "api", Eval: f.eval, Rate: 1e6, Burst: 100, Instances: 1})
		var calls sync.WaitGroup
		for i := range 500 {
			calls.Go(func() { require.NoError(t, s.Wait(t.Context(), "")) })
			if i%10 == 0 {
				calls.Go(func() {
					require.NoError(t, s.Update(func(c *throttle.SharedConfig) { c.Burst = 50 + i }))
				})
			}
			time.Sleep(100 * time.Microsecond)
		}
		calls.Wait()
		require.EqualValues(t, 500, s.Stats().Admitted)
		require.EqualValues(t, 500, s.Stats().Spent)
	})
}

func TestAdaptiveUpdateKeepsTheCallsOfTheWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := throttle.NewAdaptive(throttle.AdaptiveConfig{Name: "users", Window: time.Minute})
		a.SetRand(func() float64 { return 0.999 }) // sends nearly all
		for range 30 {
			_ = a.Do(t.Context(), overloaded)
		}
		for range 10 {
			require.NoError(t, a.Do(t.Context(), ok))
		}
		require.InDelta(t, (40.0-2*10)/41, a.Stats().Probability, 1e-12)
		require.NoError(t, a.Update(func(c *throttle.AdaptiveConfig) { c.K = 3 }))
		require.InDelta(t, (40.0-3*10)/41, a.Stats().Probability, 1e-12)
		time.Sleep(30 * time.Second)
		require.NoError(t, a.Update(func(c *throttle.AdaptiveConfig) { c.Window = 10 * time.Minute }))
		time.Sleep(9*time.Minute + 30*time.Second)
		require.InDelta(t, (40.0-3*10)/41, a.Stats().Probability, 1e-12, "counted in the new window")
		time.Sleep(time.Minute)
		require.Zero(t, a.Stats().Probability)
		require.Equal(t, throttle.AdaptiveStats{Sent: 40, Accepted: 10, Throttled: 30}, a.Stats())

		require.EqualError(t, a.Update(func(c *throttle.AdaptiveConfig) { c.Name = "b" }),
			`throttle.AdaptiveConfig.Name is "b": must be "users" as before: it cannot change`)
		require.EqualError(t, a.Update(func(c *throttle.AdaptiveConfig) { c.K = 1 }),
			"throttle.AdaptiveConfig.K is 1: must be 0 (for 2), or above 1 and at most 1e9")
		require.Panics(t, func() { _ = a.Update(func(*throttle.AdaptiveConfig) { panic("no") }) })
		require.NoError(t, a.Update(func(c *throttle.AdaptiveConfig) {
			c.Throttled = func(err error) bool { return errors.Is(err, errDown) }
		}))
		_ = a.Do(t.Context(), overloaded)
		require.EqualValues(t, 11, a.Stats().Accepted)
	})
}

// Calls that have left the window stay out of a new one, and those that it takes over leave it.
func TestAdaptiveUpdateTakesOverNoMoreThanTheWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := throttle.NewAdaptive(throttle.AdaptiveConfig{Window: time.Minute})
		a.SetRand(func() float64 { return 0.999 })
		window := func(w time.Duration) {
			t.Helper()
			require.NoError(t, a.Update(func(c *throttle.AdaptiveConfig) { c.Window = w }))
		}
		for range 30 {
			_ = a.Do(t.Context(), overloaded)
		}
		time.Sleep(2 * time.Minute)
		window(time.Hour)
		require.Zero(t, a.Stats().Probability)
		for range 10 {
			require.NoError(t, a.Do(t.Context(), ok))
		}
		window(time.Minute)
		time.Sleep(2 * time.Minute)
		_ = a.Do(t.Context(), overloaded)
		require.InDelta(t, 0.5, a.Stats().Probability, 1e-12, "the accepted ones have left")
	})
}

// Calls under way are corrected in the window that is in use when they end.
func TestAdaptiveUpdateUnderCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAdaptive(throttle.AdaptiveConfig{Window: 24 * time.Second, Levels: 3, Priority: levelOf}, 1)
		calls := make([]chan error, 4)
		var done sync.WaitGroup
		begin := func(i int) {
			calls[i] = make(chan error)
			done.Go(func() {
				_ = a.Do(at(t.Context(), 2), func(context.Context) error { return <-calls[i] })
			})
			synctest.Wait()
		}
		begin(0)
		time.Sleep(25 * time.Second) // it leaves the window
		begin(1)
		time.Sleep(5 * time.Second)
		begin(2)
		require.NoError(t, a.Update(func(c *throttle.AdaptiveConfig) { c.Window = time.Hour }))
		begin(3)
		calls[0] <- errOverloaded // is not counted any more
		synctest.Wait()
		require.Zero(t, a.Stats().Probability)
		for i := 1; i < 4; i++ {
			calls[i] <- errOverloaded
		}
		done.Wait()
		require.InDelta(t, 3.0/4, a.Stats().Probability, 1e-12, "3 requests of the last level, none accepted")
		time.Sleep(50 * time.Minute)
		require.InDelta(t, 3.0/4, a.Stats().Probability, 1e-12, "they leave the new window together")
		require.NoError(t, a.Update(func(c *throttle.AdaptiveConfig) { c.Window = 24 * time.Second }))
		time.Sleep(25 * time.Second)
		require.Zero(t, a.Stats().Probability)
		require.NoError(t, a.Do(at(t.Context(), 0), ok))
		require.EqualError(t, a.Update(func(c *throttle.AdaptiveConfig) { c.Levels, c.Priority = 1, nil }),
			"throttle.AdaptiveConfig.Levels is 1: must be 3 as before: it cannot change")
		require.EqualValues(t, 4, a.Stats().Throttled)
	})
}

func TestAdaptiveUpdateUnderLoad(t *testing.T) {
	a := newAdaptive(throttle.AdaptiveConfig{Levels: 2, Priority: func(context.Context) int { return 3 }}, 1)
	a.SetRand(func() float64 { return 1 }) // sends all
	var calls sync.WaitGroup
	for range 4 {
		calls.Go(func() {
			for i := range 2000 {
				fn := ok
				if i%2 == 0 {
					fn = overloaded
				}
				_ = a.Do(t.Context(), fn)
			}
		})
	}
	calls.Go(func() {
		for i := range 500 {
			require.NoError(t, a.Update(func(c *throttle.AdaptiveConfig) {
				c.Window = time.Hour + time.Duration(i%3)*time.Minute
			}))
		}
	})
	calls.Wait()
	require.NoError(t, a.Update(func(c *throttle.AdaptiveConfig) { c.K = 1.5 }))
	s := a.Stats()
	require.EqualValues(t, 8000, s.Sent)
	require.EqualValues(t, 4000, s.Accepted)
	require.EqualValues(t, 4000, s.Throttled)
	require.InDelta(t, (8000-1.5*4000)/8001, s.Probability, 1e-12, "no call is lost from the window")
}

// What an Update sets is set, also if it was the default; what nobody has set follows.
func TestUpdateSetsWhatWasTheDefault(t *testing.T) {
	l := throttle.New(throttle.Config{Rate: 10})
	require.NoError(t, l.Update(func(c *throttle.Config) { c.Rate, c.Burst = 100, 10 }))
	require.Equal(t, 10, l.Config().Burst)

	l = throttle.New(throttle.Config{Rate: 10})
	require.NoError(t, l.Update(func(c *throttle.Config) { c.Burst = 11 }))
	require.NoError(t, l.Update(func(c *throttle.Config) { c.Burst = 10 }))
	require.NoError(t, l.Update(func(c *throttle.Config) { c.Rate = 100 }))
	require.Equal(t, 10, l.Config().Burst)
	require.NoError(t, l.Update(func(c *throttle.Config) { c.Burst = 0 }))
	require.Equal(t, 100, l.Config().Burst)
}
