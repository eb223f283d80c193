package bulkhead_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
)

func TestConfigIsThePresentOneWithItsDefaults(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Name: "x", Limit: 8})
	require.Equal(t, "x", b.Name())
	require.Equal(t, bulkhead.Config{Name: "x", Limit: 8, Order: bulkhead.FIFO, Levels: 1}, b.Config())
	require.NoError(t, b.SetLimit(5))
	require.Equal(t, 5, b.Config().Limit)

	b = bulkhead.New(bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{Min: 30}, MaxWait: -1, Levels: 2, Priority: zero})
	cfg := b.Config()
	cfg.Priority = nil // functions are not equal
	require.Equal(t, bulkhead.Config{
		Adaptive: &bulkhead.AdaptiveLimit{Initial: 30, Min: 30, Max: 1000, Tolerance: 0.25},
		MaxWait:  -1, Queue: 1000, Order: bulkhead.FIFO, Levels: 2, Reserve: []float64{0.25},
	}, cfg)
	cfg.Adaptive.Min, cfg.Reserve[0] = 1, 0.9
	require.Equal(t, 30, b.Config().Adaptive.Min)
	require.Equal(t, 0.25, b.Config().Reserve[0])
	require.NoError(t, bulkhead.New(b.Config()).Do(t.Context(), nothing))
}

func TestConfigSharesNoMemoryWithItsCaller(t *testing.T) {
	cfg := bulkhead.Config{
		Adaptive: &bulkhead.AdaptiveLimit{Min: 5}, Levels: 2, Priority: zero, Reserve: []float64{0.5},
	}
	b := bulkhead.New(cfg)
	cfg.Adaptive.Min, cfg.Reserve[0] = 9, 0.9
	check := func() {
		require.Equal(t, 5, b.Config().Adaptive.Min)
		require.Equal(t, 0.5, b.Config().Reserve[0])
	}
	check()
	require.NoError(t, b.Update(func(c *bulkhead.Config) { c.MaxWait = -1 }))
	check()
	var kept *bulkhead.Config
	require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Adaptive.Tolerance, kept = 0.5, c }))
	kept.Adaptive.Min, kept.Reserve[0] = 7, 0.7
	check()
}

func TestUpdateKeepsDefaultsThatDependOnOtherFields(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{}})
	require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Adaptive.Min, c.MaxWait = 2000, time.Second }))
	require.Equal(t, &bulkhead.AdaptiveLimit{Initial: 2000, Min: 2000, Max: 2000, Tolerance: 0.25}, b.Config().Adaptive)
	require.Equal(t, 1000, b.Config().Queue)
	require.Equal(t, 2000, b.Stats().Limit)
	require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Adaptive.Min = 0 }))
	require.Equal(t, &bulkhead.AdaptiveLimit{Initial: 20, Min: 1, Max: 1000, Tolerance: 0.25}, b.Config().Adaptive)
}

func TestUpdateChangesNothingIfItFails(t *testing.T) {
	for want, change := range map[string]func(*bulkhead.Config){
		"bulkhead.Config.Limit is 0: must be 1 to 1073741823":                     func(c *bulkhead.Config) { c.Limit = 0 },
		"bulkhead.Config.Limit is 5: must be 0 where Adaptive is set":             func(c *bulkhead.Config) { c.Adaptive = &bulkhead.AdaptiveLimit{} },
		`bulkhead.Config.Name is "y": must be "x" as before: it cannot change`:    func(c *bulkhead.Config) { c.Name = "y" },
		"bulkhead.Config.Levels is 3: must be 2 as before: it cannot change":      func(c *bulkhead.Config) { c.Levels = 3 },
		"bulkhead.Config.Reserve[0] is -1: must be at least 0 and less than 1":    func(c *bulkhead.Config) { c.Reserve = []float64{-1} },
		"bulkhead.Config.Queue is 7: must be 0 where MaxWait is 0: no call waits": func(c *bulkhead.Config) { c.MaxWait = 0 },
	} {
		b := bulkhead.New(bulkhead.Config{Name: "x", Limit: 5, MaxWait: -1, Queue: 7, Levels: 2, Priority: zero})
		err := b.Update(func(c *bulkhead.Config) { c.Order = bulkhead.LIFO; change(c) })
		require.ErrorContains(t, err, want)
		got := b.Config()
		got.Priority = nil
		require.Equal(t, bulkhead.Config{
			Name: "x", Limit: 5, MaxWait: -1, Queue: 7, Order: bulkhead.FIFO, Levels: 2, Reserve: []float64{0.25},
		}, got)
	}
}

func TestUpdateChangesNothingIfChangePanics(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Limit: 5})
	require.PanicsWithValue(t, "boom", func() {
		_ = b.Update(func(c *bulkhead.Config) { c.Limit = 6; panic("boom") })
	})
	require.Equal(t, 5, b.Config().Limit)
	require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Limit++ }))
	require.Equal(t, 6, b.Config().Limit)
	require.Equal(t, 6, b.Stats().Limit)
}

func TestUpdateKeepsSlotsQueueAndCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Limit: 2, MaxWait: -1, Queue: 1})
		first, second := hold(t, b), hold(t, b)
		go func() { _ = b.Do(t.Context(), nothing) }()
		synctest.Wait()
		require.ErrorIs(t, b.Do(t.Context(), nothing), bulkhead.ErrFull)
		before := b.Stats()
		require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Queue = 50 }))
		require.Equal(t, before, b.Stats())
		require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Limit = 3 }))
		synctest.Wait()
		require.EqualValues(t, 3, b.Stats().Admitted, "growing wakes the waiting call")
		require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Limit = 1 }))
		require.Equal(t, 2, b.Stats().InFlight)
		first()
		_, err := b.TryBegin(t.Context())
		require.ErrorIs(t, err, bulkhead.ErrFull)
		second()
		requireIdle(t, b)
	})
}

func TestUpdateKeepsWaitingCallsWhereNoOtherMayWait(t *testing.T) {
	for order, wait := range map[bulkhead.Order]time.Duration{bulkhead.FIFO: 30 * time.Second, bulkhead.CoDel: 50 * time.Millisecond} {
		t.Run(string(order), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: time.Minute, Order: order})
				release := hold(t, b)
				results := make(chan error, 3)
				for range 3 {
					go func() { results <- b.Do(t.Context(), nothing) }()
				}
				synctest.Wait()
				require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Queue = 1 }))
				var full *bulkhead.FullError
				require.ErrorAs(t, b.Do(t.Context(), nothing), &full)
				require.Equal(t, bulkhead.QueueFull, full.Reason)
				require.NoError(t, b.Update(func(c *bulkhead.Config) { c.MaxWait, c.Queue = 0, 0 }))
				require.ErrorAs(t, b.Do(t.Context(), nothing), &full)
				require.Equal(t, bulkhead.NoSlot, full.Reason)
				require.Equal(t, []int{3}, b.Stats().Queued)
				time.Sleep(wait)
				require.Equal(t, []int{3}, b.Stats().Queued, "they wait as long as they began to")
				release()
				for range 3 {
					require.NoError(t, <-results)
				}
				require.EqualValues(t, 3, b.Stats().Waited)
				requireIdle(t, b)
			})
		})
	}
}

func TestUpdateKeepsTheLimitOfSetLimit(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Limit: 9})
	require.NoError(t, b.SetLimit(5))
	require.NoError(t, b.Update(func(c *bulkhead.Config) { c.MaxWait = -1 }))
	require.Equal(t, 5, b.Config().Limit)
	require.Equal(t, 5, b.Stats().Limit)
}

// The deadline is asked for when the call has begun, before it queues.
func TestACallWaitsByTheConfigThatItBeganWith(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: time.Minute})
		release := hold(t, b)
		time.AfterFunc(time.Second, release)
		require.NoError(t, b.Do(deadlineCalled{t.Context(), func() {
			require.NoError(t, b.Update(func(c *bulkhead.Config) { c.MaxWait = 0 }))
		}}, nothing))
		require.EqualValues(t, 1, b.Stats().Waited)
		requireIdle(t, b)
	})
}

func TestUpdateOfOrderSaysWhichWaitingCallIsNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t, bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1}))
		for _, name := range []string{"a", "b", "c", "d", "e"} {
			c.start(t.Context(), name)
		}
		set := func(o bulkhead.Order) {
			require.NoError(t, c.b.Update(func(c *bulkhead.Config) { c.Order = o }))
		}
		set(bulkhead.LIFO)
		c.finish("a")
		set(bulkhead.FIFO)
		c.finish("e")
		set(bulkhead.CoDel)
		c.finish("b")
		set(bulkhead.LIFO)
		c.finishAll()
		require.Equal(t, []string{"a", "e", "b", "c", "d"}, c.ran)
	})
}

func TestUpdateOfReserveHoldsForTheNextSlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t, bulkhead.New(bulkhead.Config{
			Limit: 4, MaxWait: -1, Levels: 2, Priority: levelOf, Cost: costOf, Reserve: []float64{0.75},
		}))
		low := atLevel(t.Context(), 1)
		c.start(low, "a")
		c.start(low, "b")
		c.start(low, "c")
		require.Equal(t, []string{"a"}, c.ran)
		require.NoError(t, c.b.Update(func(c *bulkhead.Config) { c.Reserve[0] = 0.5 }))
		synctest.Wait()
		require.Equal(t, []string{"a", "b"}, c.ran, "a slot less is kept")
		c.start(costing(low, 2), "costly")
		require.NoError(t, c.b.Update(func(c *bulkhead.Config) { c.Reserve[0] = 0.75 }))
		synctest.Wait()
		require.Equal(t, bulkhead.TooCostly, c.refusal("costly"))
		c.finish("a")
		require.NotContains(t, c.ran, "c", "one slot is left to level 1, and b has it")
		c.finishAll()
	})
}

func TestUpdateOfFunctionsHoldsForTheNextCall(t *testing.T) {
	var told []string
	b := bulkhead.New(bulkhead.Config{Limit: 4, Levels: 2, Priority: zero})
	onRefuse(b, func(_ context.Context, e *bulkhead.FullError) { told = append(told, fmt.Sprint(e.Level, " ", e.Cost)) })
	_ = b.Do(t.Context(), func(ctx context.Context) error {
		require.NoError(t, b.Update(func(c *bulkhead.Config) {
			c.Priority = func(context.Context) int { return 1 }
			c.Cost = func(context.Context) int { return 3 }
			c.Limit = 8
		}))
		return b.Do(ctx, func(ctx context.Context) error {
			require.Equal(t, 4, b.Stats().InFlight)
			return b.Do(ctx, func(ctx context.Context) error { return b.Do(ctx, nothing) })
		})
	})
	require.Equal(t, []string{"1 3"}, told)
	requireSlots(t, b, 0)
}

func requireSlots(t *testing.T, b *bulkhead.Bulkhead, inFlight int) {
	t.Helper()
	require.Equal(t, inFlight, b.Stats().InFlight)
}

func TestUpdateTurnsTheAdaptiveLimitOnAndOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Hour)
		b := bulkhead.New(bulkhead.Config{Limit: 10})
		time.Sleep(time.Hour)
		before, err := b.Begin(t.Context())
		require.NoError(t, err)
		adapt := func(c *bulkhead.Config) { c.Limit, c.Adaptive = 0, &bulkhead.AdaptiveLimit{Max: 40} }
		require.NoError(t, b.Update(adapt))
		require.Equal(t, 10, b.Stats().Limit, "the limit begins at the present one")
		require.Zero(t, b.Config().Limit)
		before(nil)
		requireSlots(t, b, 0)
		keepCalling(b, 60, 3*time.Second, taking(10*time.Millisecond, nil))
		require.Equal(t, 40, b.Stats().Limit)

		var during []func(error)
		for range 40 {
			done, err := b.Begin(t.Context())
			require.NoError(t, err)
			during = append(during, done)
		}
		require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Limit, c.Adaptive = 7, nil }))
		require.Equal(t, 7, b.Stats().Limit)
		for _, done := range during { // they no longer move the limit
			time.Sleep(time.Second)
			done(context.DeadlineExceeded)
		}
		require.Equal(t, 7, b.Stats().Limit)
		require.ErrorContains(t, b.Update(func(c *bulkhead.Config) { c.Limit = 0 }), "or Adaptive must be set")

		require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Limit, c.Adaptive = 0, &bulkhead.AdaptiveLimit{Min: 9} }))
		require.Equal(t, 9, b.Stats().Limit, "the nearest within Min and Max")
		requireIdle(t, b)
	})
}

func TestACallThatWaitsForAnAdaptiveLimitGoesOnWaitingForAFixedOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{Initial: 1, Max: 1}, MaxWait: -1})
		release := hold(t, b)
		result := make(chan error)
		go func() { result <- b.Do(t.Context(), nothing) }()
		synctest.Wait()
		require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Limit, c.Adaptive = 1, nil }))
		time.Sleep(time.Second)
		require.Equal(t, []int{1}, b.Stats().Queued)
		release()
		require.NoError(t, <-result)
		requireIdle(t, b)
	})
}

func TestUpdateOfAdaptiveKeepsWhatItHasLearned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var last bulkhead.Event
		b := bulkhead.New(bulkhead.Config{
			Adaptive: &bulkhead.AdaptiveLimit{Initial: 5, Max: 40},
		})
		onLimit(b, func(_ context.Context, c bulkhead.Event) { last = c })
		keepCalling(b, 60, 3*time.Second, taking(10*time.Millisecond, nil))
		require.Equal(t, 40, b.Stats().Limit)
		require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Adaptive.Max = 30 }))
		require.Equal(t, 30, b.Stats().Limit)
		require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Adaptive.Max = 60 }))
		require.Equal(t, 30, b.Stats().Limit)
		keepCalling(b, 80, time.Second, taking(10*time.Millisecond, nil))
		require.InDelta(t, 10*time.Millisecond, last.Base, float64(time.Millisecond))
		require.Greater(t, b.Stats().Limit, 30)
		require.LessOrEqual(t, b.Stats().Limit, 60)
	})
}

func TestUpdateOfAdaptiveEndsAProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lowered atomic.Bool
		b := bulkhead.New(bulkhead.Config{
			Adaptive: &bulkhead.AdaptiveLimit{Initial: 20, Max: 20},
		})
		onLimit(b, func(_ context.Context, c bulkhead.Event) { lowered.Store(c.Probe) })
		_, end := probing(t, b, &lowered)
		require.Less(t, b.Stats().Limit, 20)
		require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Adaptive.Tolerance = 1 }))
		require.Equal(t, 20, b.Stats().Limit)
		require.False(t, lowered.Load())
		end()
		requireIdle(t, b)
	})
}

func TestACallMayEndWhileItsLimitIsChanged(t *testing.T) {
	for name, change := range map[string]func(*bulkhead.Bulkhead) error{
		"Update": func(b *bulkhead.Bulkhead) error {
			return b.Update(func(c *bulkhead.Config) { c.Adaptive.Tolerance = 1 })
		},
		"SetLimit": func(b *bulkhead.Bulkhead) error { return b.SetLimit(20) },
	} {
		t.Run(name, func(t *testing.T) {
			b := bulkhead.New(bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{Initial: 20}})
			var wg sync.WaitGroup
			wg.Go(hold(t, b))
			require.NoError(t, change(b))
			wg.Wait()
			requireIdle(t, b)
		})
	}
}

// A change of Tolerance scales the rise of latency that is allowed.
func TestReformScalesTheRiseThatIsAllowed(t *testing.T) {
	grown := func(tolerance float64) int {
		d := drive(bulkhead.AdaptiveLimit{Initial: 100})
		for range 20 {
			d.round(20, service, nil)
		}
		d.Restart(d.now, 100)
		d.Reform(d.now, bulkhead.AdaptiveLimit{Initial: 100, Tolerance: tolerance})
		for range 10 {
			d.round(d.Limit(), 2*service, nil)
		}
		return d.Limit()
	}
	require.Less(t, grown(0.25), 100, "twice the latency is too long")
	require.Greater(t, grown(3), 100)
}

// Calls go on while every setting changes: none is lost, no slot is lost, and the limit
// holds, the larger one while it changes and the present one after that.
func TestUpdateUnderLoad(t *testing.T) {
	const callers, updates, large, small = 24, 300, 8, 3
	b := bulkhead.New(bulkhead.Config{
		Limit: large, MaxWait: -1, Queue: callers, Levels: 2, Priority: levelOf, Reserve: []float64{0.25},
	})
	c := &counted{b: b}
	var stop atomic.Bool
	var wg sync.WaitGroup
	var made atomic.Int64
	for i := range callers {
		wg.Go(func() {
			rng := newRand(uint64(i))
			for !stop.Load() {
				made.Add(1)
				err := b.Do(atLevel(context.Background(), rng.IntN(2)), func(context.Context) error {
					c.in(1)
					defer c.out(1)
					if rng.IntN(4) == 0 {
						time.Sleep(time.Duration(rng.IntN(50)) * time.Microsecond)
					}
					return nil
				})
				if errors.Is(err, bulkhead.ErrFull) {
					c.refused.Add(1)
				} else if err != nil {
					t.Error(err)
				}
			}
		})
	}
	rng := newRand(99)
	adapt := func(c *bulkhead.Config) { c.Limit, c.Adaptive = 0, &bulkhead.AdaptiveLimit{Min: 2, Max: large} }
	fix := func(limit int) func(*bulkhead.Config) {
		return func(c *bulkhead.Config) { c.Limit, c.Adaptive = limit, nil }
	}
	for range updates {
		for _, change := range []func(*bulkhead.Config){
			adapt,
			func(c *bulkhead.Config) { c.Order = orders[rng.IntN(len(orders))] },
			fix(large),
			func(c *bulkhead.Config) { c.MaxWait, c.Queue = time.Duration(rng.IntN(2)-1), 0 },
			func(c *bulkhead.Config) { c.Reserve = []float64{0.9 * rng.Float64()} },
			fix(1 + rng.IntN(large)),
			func(c *bulkhead.Config) { c.MaxWait = time.Duration(1+rng.IntN(100)) * time.Microsecond },
		} {
			require.NoError(t, b.Update(change))
		}
	}
	require.LessOrEqual(t, c.most.Load(), int64(large))
	require.NoError(t, b.Update(fix(small)))
	for b.Stats().InFlight > small {
		time.Sleep(time.Millisecond)
	}
	c.most.Store(0)
	time.Sleep(10 * time.Millisecond)
	stop.Store(true)
	wg.Wait()
	require.LessOrEqual(t, c.most.Load(), int64(small))
	s := b.Stats()
	require.Equal(t, made.Load(), c.ran.Load()+c.refused.Load(), "a call is lost")
	require.Equal(t, c.ran.Load(), s.Admitted)
	require.Equal(t, c.refused.Load(), s.Refused)
	requireIdle(t, b)
}

func TestGroupConfigIsThePresentOneWithItsDefaults(t *testing.T) {
	g := bulkhead.NewGroup(bulkhead.GroupConfig[string]{Config: bulkhead.Config{Name: "api", Limit: 2}})
	require.Equal(t, "api", g.Name())
	require.Equal(t, bulkhead.GroupConfig[string]{
		Config:    bulkhead.Config{Name: "api", Limit: 2, Order: bulkhead.FIFO, Levels: 1},
		MaxKeys:   10_000,
		IdleAfter: 10 * time.Minute,
	}, g.Config())
}

func TestGroupUpdateIsFollowedByItsBulkheads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var changes []string
		g := bulkhead.NewGroup(bulkhead.GroupConfig[string]{
			Config: bulkhead.Config{
				Name: "api", Limit: 1, MaxWait: -1,
			},
			MaxKeys: 1,
		})
		onLimit(g, func(_ context.Context, c bulkhead.Event) {
			changes = append(changes, fmt.Sprintf("%s[%s] %d -> %d", c.Name, c.Key, c.From, c.To))
		})
		done, err := g.Begin(t.Context(), "a")
		require.NoError(t, err)
		shared, err := g.Begin(t.Context(), "b")
		require.NoError(t, err)
		for _, key := range []string{"a", "b"} {
			go func() { _ = g.Do(t.Context(), key, nothing) }()
		}
		synctest.Wait()
		require.Equal(t, []int{2}, g.Stats().Queued)
		require.NoError(t, g.Update(func(c *bulkhead.GroupConfig[string]) { c.Config.Limit = 2 }))
		synctest.Wait()
		require.Equal(t, []int{0}, g.Stats().Queued, "the waiting calls have the new slots")
		require.ElementsMatch(t, []string{"api[a] 1 -> 2", "api[(other keys)] 1 -> 2"}, changes)
		done(nil)
		shared(nil)
		require.Equal(t, 2, g.Config().Config.Limit)
		for range 3 { // a is forgotten and made anew
			require.NoError(t, g.Do(t.Context(), "c", nothing))
			require.NoError(t, g.Do(t.Context(), "a", func(context.Context) error {
				for _, b := range g.All() {
					require.Equal(t, 2, b.Stats().Limit)
				}
				return nil
			}))
		}
	})
}

func TestGroupUpdateLeavesBulkheadsOfConfigForAlone(t *testing.T) {
	g := bulkhead.NewGroup(bulkhead.GroupConfig[int]{
		Config:    bulkhead.Config{Limit: 1},
		ConfigFor: func(n int) bulkhead.Config { return bulkhead.Config{Limit: n} },
	})
	limits := func() map[int]int {
		m := map[int]int{}
		for key, b := range g.All() {
			m[key] = b.Stats().Limit
		}
		return m
	}
	require.NoError(t, g.Do(t.Context(), 5, nothing))
	require.NoError(t, g.Update(func(c *bulkhead.GroupConfig[int]) { c.Config.Limit = 2 }))
	require.Equal(t, map[int]int{5: 5}, limits())
	require.NoError(t, g.Update(func(c *bulkhead.GroupConfig[int]) { c.ConfigFor = nil }))
	require.NoError(t, g.Do(t.Context(), 6, nothing))
	require.Equal(t, map[int]int{5: 5, 6: 2}, limits())
}

func TestGroupUpdateOfItsBounds(t *testing.T) {
	g := bulkhead.NewGroup(bulkhead.GroupConfig[int]{Config: bulkhead.Config{Name: "x", Limit: 1}, MaxKeys: 3})
	var dones []func(error)
	begin := func(key int) error {
		done, err := g.Begin(t.Context(), key)
		if err == nil {
			dones = append(dones, done)
		}
		return err
	}
	for key := range 3 {
		require.NoError(t, begin(key))
	}
	require.ErrorContains(t, g.Update(func(c *bulkhead.GroupConfig[int]) { c.MaxKeys = 2 }),
		"bulkhead.GroupConfig.MaxKeys is 2: must be at least the 3 keys that the group holds")
	require.ErrorContains(t, g.Update(func(c *bulkhead.GroupConfig[int]) { c.Config.Name = "y" }), "it cannot change")
	require.ErrorContains(t, g.Update(func(c *bulkhead.GroupConfig[int]) { c.MaxKeys = -1 }), "MaxKeys is -1")
	require.ErrorContains(t, g.Update(func(c *bulkhead.GroupConfig[int]) { c.Config.Limit = 0 }), "Limit is 0")
	require.Equal(t, 3, g.Config().MaxKeys)
	require.NoError(t, g.Update(func(c *bulkhead.GroupConfig[int]) { c.MaxKeys = 4 }))
	require.NoError(t, begin(3))
	require.Equal(t, 4, g.Stats().Keys)
	for _, done := range dones {
		done(nil)
	}
}

// A bulkhead that is made while the group is updated follows the update.
func TestGroupUpdateUnderLoad(t *testing.T) {
	const keys, large, small, updates = 50, 6, 2, 300
	g := bulkhead.NewGroup(bulkhead.GroupConfig[int]{
		Config:  bulkhead.Config{Limit: small, MaxWait: time.Millisecond},
		MaxKeys: 10,
	})
	var stop atomic.Bool
	var wg sync.WaitGroup
	var all, most, ran, refused atomic.Int64
	for i := range 8 {
		wg.Go(func() {
			rng := newRand(uint64(i))
			for !stop.Load() {
				err := g.Do(context.Background(), rng.IntN(keys), func(context.Context) error {
					now := all.Add(1)
					for m := most.Load(); now > m && !most.CompareAndSwap(m, now); m = most.Load() {
					}
					all.Add(-1)
					ran.Add(1)
					return nil
				})
				if err != nil {
					refused.Add(1)
				}
			}
		})
	}
	limit := small
	for i := range updates {
		limit = small + i%(large-small+1)
		require.NoError(t, g.Update(func(c *bulkhead.GroupConfig[int]) { c.Config.Limit = limit }))
		for key, b := range g.All() {
			require.Equal(t, limit, b.Config().Limit, "key %d", key)
			require.Equal(t, limit, b.Stats().Limit, "key %d", key)
		}
	}
	stop.Store(true)
	wg.Wait()
	s := g.Stats()
	require.Equal(t, ran.Load(), s.Admitted)
	require.Equal(t, refused.Load(), s.Refused)
	require.Zero(t, s.InFlight)
}

// A call begins under rules that an Update replaces before it waits, so that it costs more
// than its level may use now. It is refused, although it did not cost too much when it began.
func TestCallThatAnUpdateMakesTooCostlyIsRefused(t *testing.T) {
	var b *bulkhead.Bulkhead
	update := sync.OnceFunc(func() {
		require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Reserve = []float64{0.5} }))
	})
	b = bulkhead.New(bulkhead.Config{
		Adaptive: &bulkhead.AdaptiveLimit{Initial: 10, Max: 10},
		MaxWait:  -1,
		Levels:   2,
		Priority: levelOf,
		Reserve:  []float64{},
		Cost: func(ctx context.Context) int {
			if levelOf(ctx) == 0 {
				return 1
			}
			update()
			return 10
		},
	})
	done, err := b.Begin(atLevel(t.Context(), 0))
	require.NoError(t, err)
	defer done(nil)
	_, err = b.Begin(atLevel(t.Context(), 1))
	refusal, ok := errors.AsType[*bulkhead.FullError](err)
	require.True(t, ok, err)
	require.Equal(t, bulkhead.TooCostly, refusal.Reason)
}

// What an Update sets is set, also if it was the default.
func TestUpdateSetsWhatWasTheDefault(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: time.Second})
	require.Equal(t, 1000, b.Config().Queue)
	require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Queue = 1000 }))
	require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Limit = 2 }))
	require.Equal(t, 1000, b.Config().Queue)
}
