package breaker_test

import (
	"context"
	"errors"
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

// update makes an Update that must succeed.
func update(t *testing.T, b *breaker.Breaker, change func(*breaker.Config)) {
	t.Helper()
	require.NoError(t, b.Update(change))
}

func TestConfigHasItsDefaultsFilledIn(t *testing.T) {
	require.Equal(t, breaker.Config{
		Name: "users", Failures: 5, WindowCalls: 100, Patience: 900 * time.Millisecond, OpenFor: 30 * time.Second,
		MaxOpenFor: 30 * time.Second, Jitter: 0.1, MaxRetryAfter: 30 * time.Second, Probes: 1, Successes: 1, MaxHalfOpen: time.Minute,
	}, breaker.New(breaker.Config{Name: "users"}).Config())

	// A breaker that is made with the Config of another has the same Config.
	for _, given := range []breaker.Config{
		{}, {Name: "users"}, {OpenFor: -1, Jitter: -1, Patience: -1}, {FailureRate: 0.5}, {FailureRate: 0.5, WindowCalls: 7},
		{Failures: 3, Window: time.Second}, {FailuresInWindow: 3}, {SlowAfter: time.Second}, {SlowAfter: time.Second, SlowRate: 0.5, MinCalls: 3},
		{OpenFor: 1<<63 - 1, MaxHalfOpen: 1<<63 - 1}, {OpenFor: time.Second, MaxOpenFor: time.Minute}, {Probes: 7}, {Probes: 1 << 40, Successes: 3},
	} {
		filled := breaker.New(given).Config()
		require.NoError(t, filled.Validate())
		require.Equal(t, filled, breaker.New(filled).Config())
	}
}

func TestOpenWhenIsInsteadOfTheDefaults(t *testing.T) {
	c := breaker.New(breaker.Config{OpenWhen: func(breaker.Counts) bool { return false }}).Config()
	require.Zero(t, c.Failures)
	require.Zero(t, c.WindowCalls)
}

func TestUpdateComputesDefaultsAnew(t *testing.T) {
	b := breaker.New(breaker.Config{SlowAfter: 10 * time.Second})
	require.Equal(t, 9*time.Second, b.Config().Patience)
	update(t, b, func(c *breaker.Config) { c.SlowAfter *= 2 })
	require.Equal(t, 18*time.Second, b.Config().Patience, "it was not set")
	update(t, b, func(c *breaker.Config) { c.Patience = time.Second })
	update(t, b, func(c *breaker.Config) { c.SlowAfter = 0 })
	require.Equal(t, time.Second, b.Config().Patience)

	update(t, b, func(c *breaker.Config) { c.FailureRate = 0.5 })
	require.Zero(t, b.Config().Failures, "zero means 5 without a rate")
	require.Equal(t, time.Minute, b.Config().Window)
	update(t, b, func(c *breaker.Config) { c.FailureRate = 0 })
	require.Equal(t, 5, b.Config().Failures)
}

func TestUpdateThatIsNotValidChangesNothing(t *testing.T) {
	b := breaker.New(breaker.Config{Name: "users", Failures: 2})
	before := b.Config()
	do(b, down)
	require.EqualError(t, b.Update(func(c *breaker.Config) { c.Failures, c.Jitter = 1, 2 }),
		"breaker.Config.Jitter is 2: must be 0 (for 0.1), at most 1, or negative (for none)")
	require.EqualError(t, b.Update(func(c *breaker.Config) { c.Name = "orders" }),
		`breaker.Config.Name is "orders": must be "users" as before: it cannot change`)
	require.PanicsWithValue(t, "boom", func() { _ = b.Update(func(c *breaker.Config) { c.Failures = 1; panic("boom") }) })
	require.Equal(t, before, b.Config())
	require.EqualValues(t, 1, b.Stats().Window.Failed)
	update(t, b, func(c *breaker.Config) { c.Failures = 3 })
	do(b, down)
	require.Equal(t, breaker.Closed, b.State())
}

func TestUpdateKeepsTheWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{FailureRate: 0.9, MinCalls: 4})
		for _, fn := range []func(context.Context) error{ok, down, down} {
			do(b, fn)
		}
		want := breaker.Counts{Calls: 3, Succeeded: 1, Failed: 2, FailedInARow: 2}
		update(t, b, func(c *breaker.Config) { c.FailureRate, c.OpenFor = 0.5, time.Second })
		require.Equal(t, want, b.Stats().Window)
		require.Equal(t, breaker.Closed, b.State())
		do(b, down)
		require.Equal(t, breaker.Open, b.State(), "three of four have failed")
		require.Equal(t, breaker.Counts{Calls: 4, Succeeded: 1, Failed: 3, FailedInARow: 3}, b.Stats().Window)
	})
}

func TestUpdateCountsANewWindowAnew(t *testing.T) {
	for name, change := range map[string]func(*breaker.Config){
		"longer":   func(c *breaker.Config) { c.Window = time.Hour },
		"of calls": func(c *breaker.Config) { c.Window, c.WindowCalls = 0, 10 },
	} {
		t.Run(name, func(t *testing.T) {
			b := breaker.New(breaker.Config{Failures: 4, FailureRate: 0.5, MinCalls: 4})
			do(b, ok)
			do(b, down)
			do(b, down)
			update(t, b, change)
			require.Equal(t, breaker.Counts{FailedInARow: 2}, b.Stats().Window)
			do(b, down)
			require.Equal(t, breaker.Closed, b.State())
			require.Equal(t, breaker.Counts{Calls: 1, Failed: 1, FailedInARow: 3}, b.Stats().Window)
			do(b, down)
			require.Equal(t, breaker.Open, b.State(), "four in a row")
		})
	}
}

func TestUpdateOpensAtTheNextFailureByALowerLimit(t *testing.T) {
	b := breaker.New(breaker.Config{Failures: 5})
	for range 4 {
		do(b, down)
	}
	update(t, b, func(c *breaker.Config) { c.Failures = 2 })
	require.Equal(t, breaker.Closed, b.State())
	do(b, down)
	require.Equal(t, breaker.Open, b.State())
}

func TestUpdateKeepsAnOpenBreakerOpenUntilItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen changes
		b := breaker.New(steady(breaker.Config{Failures: 1, OpenFor: time.Minute, OnChange: seen.hook}))
		open(t, b)
		refusal := requireRefused(t, do(b, ok), breaker.CircuitOpen)
		update(t, b, func(c *breaker.Config) { c.OpenFor, c.MaxOpenFor = time.Second, time.Hour })
		require.Same(t, refusal, do(b, ok))
		require.Equal(t, time.Minute, b.Stats().OpenLeft)
		require.EqualValues(t, 1, b.Stats().OpensInARow)
		time.Sleep(time.Minute - 1)
		requireRefused(t, do(b, ok), breaker.CircuitOpen)
		time.Sleep(time.Nanosecond)
		do(b, down)
		require.Equal(t, 2*time.Second, b.Stats().OpenLeft, "the second time in a row, by the new Config")
		require.Len(t, seen.all, 3, "an Update is no change of state")
	})
}

func TestUpdateKeepsForcedStates(t *testing.T) {
	b := breaker.New(breaker.Config{})
	b.ForceOpen(errDown)
	update(t, b, func(c *breaker.Config) { c.Failures = 1 })
	requireRefused(t, do(b, ok), breaker.CircuitForcedOpen)
	b.Disable()
	do(b, down)
	update(t, b, func(c *breaker.Config) { c.Probes = 2 })
	require.Equal(t, breaker.Disabled, b.State())
	require.EqualValues(t, 1, b.Stats().Window.Failed)
	b.Enable()
	open(t, b)
}

func TestUpdateKeepsProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(steady(breaker.Config{Failures: 1, OpenFor: time.Second, Successes: 3, MaxHalfOpen: 10 * time.Second}))
		open(t, b)
		time.Sleep(time.Second)
		require.NoError(t, do(b, ok))
		first, err := b.Begin(t.Context())
		require.NoError(t, err)
		requireRefused(t, do(b, ok), breaker.CircuitHalfOpen)

		update(t, b, func(c *breaker.Config) { c.Probes = 2 })
		second, err := b.Begin(t.Context())
		require.NoError(t, err, "one more probe")
		requireRefused(t, do(b, ok), breaker.CircuitHalfOpen)
		first(nil)
		require.Equal(t, breaker.HalfOpen, b.State())
		second(nil)
		require.Equal(t, breaker.Closed, b.State(), "three have succeeded")
	})
}

// A breaker closes after the Successes that it opened with.
func TestUpdateOfSuccessesTakesEffectAtTheNextOpening(t *testing.T) {
	for name, before := range map[string]time.Duration{"open": 0, "half-open": time.Second} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := breaker.New(steady(breaker.Config{Failures: 1, OpenFor: time.Second, Successes: 2}))
				open(t, b)
				time.Sleep(before)
				b.State()
				update(t, b, func(c *breaker.Config) { c.Successes = 1 })
				time.Sleep(time.Second)
				require.NoError(t, do(b, ok))
				require.Equal(t, breaker.HalfOpen, b.State())
				require.NoError(t, do(b, ok))
				require.Equal(t, breaker.Closed, b.State())

				open(t, b)
				time.Sleep(before)
				b.State()
				update(t, b, func(c *breaker.Config) { c.Successes = 3 })
				time.Sleep(time.Second)
				require.NoError(t, do(b, ok))
				require.Equal(t, breaker.Closed, b.State())
			})
		})
	}
}

// A probe has the MaxHalfOpen with which it began.
func TestUpdateOfMaxHalfOpenLeavesProbesAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(steady(breaker.Config{Failures: 1, OpenFor: time.Second, Probes: 2, Successes: 5, MaxHalfOpen: time.Hour}))
		open(t, b)
		time.Sleep(time.Second)
		first, err := b.Begin(t.Context())
		require.NoError(t, err)
		update(t, b, func(c *breaker.Config) { c.MaxHalfOpen = time.Second })
		time.Sleep(time.Minute)
		first(nil)
		require.Equal(t, breaker.HalfOpen, b.State(), "the first has an hour")
		first, err = b.Begin(t.Context())
		require.NoError(t, err)
		update(t, b, func(c *breaker.Config) { c.MaxHalfOpen = time.Hour })
		_, err = b.Begin(t.Context()) // forgotten
		require.NoError(t, err)
		time.Sleep(time.Second - 1)
		require.Equal(t, breaker.HalfOpen, b.State())
		time.Sleep(time.Nanosecond)
		require.Equal(t, breaker.Open, b.State(), "the second has a second")
		first(nil)
	})
}

// A call ends under the Config with which it began, and counts in the window that is kept.
func TestUpdateKeepsTheConfigOfCallsUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Failures: 2, WindowCalls: 50, SlowAfter: time.Second, Classify: func(error) breaker.Outcome { return breaker.Ignore }})
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		slow, err := b.Begin(t.Context())
		require.NoError(t, err)
		failing, err := b.Begin(t.Context())
		require.NoError(t, err)
		late, err := b.Begin(ctx)
		require.NoError(t, err)
		update(t, b, func(c *breaker.Config) { c.SlowAfter, c.Patience, c.Classify = time.Hour, -1, nil })
		after, err := b.Begin(ctx)
		require.NoError(t, err)

		time.Sleep(time.Second)
		slow(nil)
		require.Equal(t, breaker.Counts{Calls: 1, Succeeded: 1, Slow: 1}, b.Stats().Window)
		failing(errDown)
		require.Equal(t, breaker.Counts{Calls: 1, Succeeded: 1, Slow: 1}, b.Stats().Window)
		time.Sleep(2 * time.Second)
		late(context.DeadlineExceeded)
		after(context.DeadlineExceeded)
		require.Equal(t, breaker.Counts{Calls: 1, Succeeded: 1, Slow: 1}, b.Stats().Window, "Classify and Patience")
		do(b, down)
		require.Equal(t, breaker.Counts{Calls: 2, Succeeded: 1, Failed: 1, Slow: 1, FailedInARow: 1}, b.Stats().Window)

		done, err := b.Begin(t.Context())
		require.NoError(t, err)
		update(t, b, func(c *breaker.Config) { c.OpenWhen = func(n breaker.Counts) bool { return n.Failed == 2 } })
		update(t, b, func(c *breaker.Config) { c.Failures = 100 })
		done(errDown)
		require.Equal(t, breaker.Open, b.State(), "the limits are those of now")
	})
}

func TestUpdateOfHooks(t *testing.T) {
	var before, after changes
	b := breaker.New(breaker.Config{OnChange: before.hook})
	b.Trip(nil, time.Hour)
	update(t, b, func(c *breaker.Config) { c.OnChange = after.hook })
	b.Reset()
	require.Equal(t, "closed -> open", before.String())
	require.Equal(t, "open -> closed", after.String())
	update(t, b, func(c *breaker.Config) { c.OnChange = nil })
	b.Trip(nil, time.Hour)
	require.Len(t, after.all, 1)
}

func TestUpdateOfPing(t *testing.T) {
	for name, before := range map[string]time.Duration{"open": 0, "half-open": time.Second} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var pings atomic.Int64
				ping := func(ctx context.Context) error {
					pings.Add(1)
					<-ctx.Done()
					return ctx.Err()
				}
				b := breaker.New(steady(breaker.Config{Failures: 1, OpenFor: time.Second, MaxHalfOpen: time.Minute}))
				open(t, b)
				time.Sleep(before)
				b.State()
				update(t, b, func(c *breaker.Config) { c.Ping = ping })
				time.Sleep(time.Second)
				synctest.Wait()
				require.EqualValues(t, 1, pings.Load())
				requireRefused(t, do(b, ok), breaker.CircuitHalfOpen)

				update(t, b, func(c *breaker.Config) { c.Ping = func(context.Context) error { pings.Add(10); return nil } })
				time.Sleep(time.Second)
				require.EqualValues(t, 1, pings.Load(), "a ping under way goes on")
				update(t, b, func(c *breaker.Config) { c.Ping = nil })
				synctest.Wait()
				require.Equal(t, breaker.HalfOpen, b.State(), "the ping that was cut off changes nothing")
				require.NoError(t, do(b, ok), "calls probe")
				require.Equal(t, breaker.Closed, b.State())

				update(t, b, func(c *breaker.Config) { c.Ping = func(context.Context) error { pings.Add(10); return nil } })
				do(b, down)
				time.Sleep(time.Second)
				synctest.Wait()
				require.EqualValues(t, 11, pings.Load())
				require.Equal(t, breaker.Closed, b.State())

				require.NoError(t, b.Close())
				do(b, down)
				update(t, b, func(c *breaker.Config) { c.Ping = ping })
				time.Sleep(time.Second)
				require.NoError(t, do(b, ok), "closed breakers do not ping")
			})
		})
	}
}

// While its Config changes, a breaker loses no call and no permit.
func TestUpdateStress(t *testing.T) {
	const (
		workers = 8
		rounds  = 3000
	)
	var seen changes
	b := breaker.New(breaker.Config{Failures: 3, OpenFor: 20 * time.Microsecond, Probes: 1, Successes: 4, MaxHalfOpen: time.Hour, OnChange: seen.hook})
	var calls sync.WaitGroup
	for w := range workers {
		calls.Go(func() {
			r := rand.New(rand.NewPCG(7, uint64(w)))
			for range rounds {
				fn := func(context.Context) error {
					if r.IntN(3) == 0 {
						return errDown
					}
					return nil
				}
				if r.IntN(2) == 0 {
					_ = b.Do(context.Background(), fn)
				} else if done, err := b.Begin(context.Background()); err == nil {
					done(fn(context.Background()))
				}
			}
		})
	}
	stop := make(chan struct{})
	var updates sync.WaitGroup
	for range 2 {
		updates.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				err := b.Update(func(c *breaker.Config) {
					c.Failures, c.Probes = 1+i%5, 1+i%3
					c.FailureRate = float64(i%2) / 2
					c.Window, c.WindowCalls = 0, 100+i%3
					c.SlowAfter = time.Duration(i%2) * time.Microsecond
				})
				if err != nil {
					t.Error(err)
				}
				if i%50 == 0 {
					b.Reset()
				}
			}
		})
	}
	calls.Wait()
	close(stop)
	updates.Wait()

	s := b.Stats()
	require.EqualValues(t, workers*rounds, s.Succeeded+s.Failed+s.Ignored+s.Refused, "no call is lost")
	seen.requireChain(t, b.State())

	update(t, b, func(c *breaker.Config) { c.Probes, c.Successes, c.Failures = 3, 1e9, 1 })
	b.Trip(nil, 1)
	for b.State() != breaker.HalfOpen {
	}
	for range 3 {
		_, err := b.Begin(t.Context())
		require.NoError(t, err, "every permit came back")
	}
	_, err := b.Begin(t.Context())
	requireRefused(t, err, breaker.CircuitHalfOpen)
}

// The limit of probes holds against the larger number while it changes, and against the
// new one once Update has returned and earlier probes have ended.
func TestUpdateOfProbesUnderLoad(t *testing.T) {
	b := breaker.New(breaker.Config{Failures: 1, OpenFor: -1, Probes: 4, Successes: 1e9, MaxHalfOpen: time.Hour})
	b.Trip(nil, 1)
	var inFlight, highest atomic.Int64
	var pause sync.RWMutex // held by each call; locked to let all calls end
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				pause.RLock()
				_ = b.Do(context.Background(), func(context.Context) error {
					n := inFlight.Add(1)
					for h := highest.Load(); n > h && !highest.CompareAndSwap(h, n); h = highest.Load() {
					}
					runtime.Gosched()
					inFlight.Add(-1)
					return nil
				})
				pause.RUnlock()
			}
		})
	}
	was := 4
	for i := range 300 {
		now := 1 + i%4
		update(t, b, func(c *breaker.Config) { c.Probes = now })
		require.LessOrEqual(t, highest.Load(), int64(max(was, now)))
		pause.Lock() // calls that began before have ended
		highest.Store(0)
		pause.Unlock()
		runtime.Gosched()
		require.LessOrEqual(t, highest.Load(), int64(now))
		was = now
	}
	close(stop)
	wg.Wait()
}

func TestGroupConfigHasItsDefaultsFilledIn(t *testing.T) {
	g := breaker.NewGroup(breaker.GroupConfig[int]{Config: breaker.Config{Name: "store"}})
	cfg := g.Config()
	require.Equal(t, "store", g.Name())
	require.Equal(t, 10_000, cfg.MaxKeys)
	require.Equal(t, 10*time.Minute, cfg.IdleAfter)
	require.Equal(t, breaker.New(breaker.Config{Name: "store"}).Config(), cfg.Config)
}

func TestGroupUpdate(t *testing.T) {
	g := breaker.NewGroup(breaker.GroupConfig[int]{
		MaxKeys: 2, Config: breaker.Config{Name: "store", Failures: 3},
	})
	ctx := t.Context()
	_ = g.Do(ctx, 1, down)
	_ = g.Do(ctx, 1, down)
	require.NoError(t, g.Update(func(c *breaker.GroupConfig[int]) { c.Config.Failures = 2 }))
	require.Equal(t, 2, g.Config().Config.Failures)
	for _, b := range g.All() {
		require.Equal(t, 2, b.Config().Failures)
		require.EqualValues(t, 2, b.Stats().Window.Failed, "present breakers keep their state")
	}
	_ = g.Do(ctx, 1, down)
	requireRefused(t, g.Do(ctx, 1, ok), breaker.CircuitOpen)
	_ = g.Do(ctx, 2, down)
	_ = g.Do(ctx, 2, down)
	requireRefused(t, g.Do(ctx, 2, ok), breaker.CircuitOpen)

	// The shared breaker follows, too.
	_ = g.Do(ctx, 3, down)
	_ = g.Do(ctx, 3, down)
	require.Equal(t, "(other keys)", requireRefused(t, g.Do(ctx, 3, ok), breaker.CircuitOpen).Key)
	require.NoError(t, g.Update(func(c *breaker.GroupConfig[int]) { c.MaxKeys = 3 }))
	require.NoError(t, g.Do(ctx, 3, ok))

	for want, change := range map[string]func(*breaker.GroupConfig[int]){
		"breaker.GroupConfig.MaxKeys is 2: must be at least the 3 keys that the group holds": func(c *breaker.GroupConfig[int]) { c.MaxKeys = 2 },
		"breaker.GroupConfig.MaxKeys is -1: must be 0 (for 10000) or more":                   func(c *breaker.GroupConfig[int]) { c.MaxKeys = -1 },
		"breaker.Config.Jitter is 2: must be 0 (for 0.1), at most 1, or negative (for none)": func(c *breaker.GroupConfig[int]) { c.Config.Jitter = 2 },
		`breaker.Config.Name is "b": must be "store" as before: it cannot change`:            func(c *breaker.GroupConfig[int]) { c.Config.Name = "b" },
	} {
		before := g.Config()
		require.EqualError(t, g.Update(func(c *breaker.GroupConfig[int]) { c.Config.Failures = 9; change(c) }), want)
		require.Equal(t, before, g.Config())
		for _, b := range g.All() {
			require.Equal(t, 2, b.Config().Failures)
		}
	}
	require.NoError(t, g.Update(func(c *breaker.GroupConfig[int]) { c.Config.SlowAfter = 10 * time.Second }))
	require.Equal(t, 9*time.Second, g.Config().Config.Patience, "a default that was not set follows")
}

func TestGroupUpdateKeepsTheConfigOfAKeyOfItsOwn(t *testing.T) {
	g := breaker.NewGroup(breaker.GroupConfig[int]{ConfigFor: func(int) breaker.Config { return breaker.Config{Failures: 7} }})
	g.With(1, func(*breaker.Breaker) {})
	require.NoError(t, g.Update(func(c *breaker.GroupConfig[int]) { c.Config.Failures = 2 }))
	g.With(1, func(b *breaker.Breaker) { require.Equal(t, 7, b.Config().Failures) })
	require.NoError(t, g.Update(func(c *breaker.GroupConfig[int]) { c.ConfigFor = nil }))
	g.With(1, func(b *breaker.Breaker) { require.Equal(t, 7, b.Config().Failures) })
	g.With(2, func(b *breaker.Breaker) {
		require.Equal(t, 2, b.Config().Failures)
		update(t, b, func(c *breaker.Config) { c.Failures = 3 })
	})
	require.NoError(t, g.Update(func(c *breaker.GroupConfig[int]) { c.Config.Probes = 2 }))
	g.With(2, func(b *breaker.Breaker) { require.Equal(t, 2, b.Config().Failures, "an Update of the group overrides") })
}

func TestGroupUpdateOfIdleAfter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := breaker.NewGroup(breaker.GroupConfig[int]{IdleAfter: -1})
		for key := range 100 {
			require.NoError(t, g.Do(t.Context(), key, ok))
		}
		time.Sleep(time.Hour)
		require.NoError(t, g.Update(func(c *breaker.GroupConfig[int]) { c.IdleAfter = time.Second }))
		for key := range 500 {
			time.Sleep(time.Second)
			require.NoError(t, g.Do(t.Context(), 1000+key, ok))
		}
		require.Less(t, g.Stats().Keys, 200)
	})
}

// Whenever Update has returned, every breaker of the group has the new Config, while
// breakers are made and forgotten. A hook may call Update.
func TestGroupUpdateStress(t *testing.T) {
	g := breaker.NewGroup(breaker.GroupConfig[int]{MaxKeys: 50, Config: breaker.Config{Failures: 2, OpenFor: time.Microsecond}})
	var calls atomic.Int64
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(8, uint64(w)))
			for {
				select {
				case <-stop:
					return
				default:
				}
				fn := ok
				if r.IntN(2) == 0 {
					fn = down
				}
				_ = g.Do(context.Background(), r.IntN(200), fn)
				calls.Add(1)
			}
		})
	}
	var last breaker.Totals
	for i := range 300 {
		require.NoError(t, g.Update(func(c *breaker.GroupConfig[int]) { c.Config.Failures, c.MaxKeys = 2+i, 50+i }))
		for key, b := range g.All() {
			require.Equal(t, 2+i, b.Config().Failures, key)
		}
		s := g.Stats().Totals
		require.GreaterOrEqual(t, s.Succeeded, last.Succeeded)
		require.GreaterOrEqual(t, s.Failed, last.Failed)
		require.GreaterOrEqual(t, s.Refused, last.Refused)
		require.GreaterOrEqual(t, s.Opened, last.Opened)
		last = s
	}
	close(stop)
	wg.Wait()
	s := g.Stats()
	require.EqualValues(t, calls.Load(), s.Succeeded+s.Failed+s.Refused, "no call is lost, whichever breakers were forgotten")
}

// A talking key is asked for its text while its breaker is made.
type talkingKey struct{ says *func() }

func (k talkingKey) String() string { (*k.says)(); return "key" }

func TestGroupUpdateReachesABreakerThatIsBeingMade(t *testing.T) {
	g := breaker.NewGroup(breaker.GroupConfig[talkingKey]{})
	says := func() {
		require.NoError(t, g.Update(func(c *breaker.GroupConfig[talkingKey]) { c.Config.Failures = 2 }))
	}
	g.With(talkingKey{&says}, func(b *breaker.Breaker) { require.Equal(t, 2, b.Config().Failures) })
}

func TestUpdateMayBeCalledByAHook(t *testing.T) {
	var b *breaker.Breaker
	var g *breaker.Group[int]
	errs := []error{errors.New("not called")}
	cfg := breaker.Config{Failures: 1, OnChange: func(_ context.Context, c breaker.Event) {
		errs = []error{
			b.Update(func(c *breaker.Config) { c.Failures++ }),
			g.Update(func(c *breaker.GroupConfig[int]) { c.Config.Failures++ }),
		}
	}}
	b, g = breaker.New(cfg), breaker.NewGroup(breaker.GroupConfig[int]{Config: cfg})
	do(b, down)
	require.Equal(t, []error{nil, nil}, errs)
	_ = g.Do(t.Context(), 1, down)
	_ = g.Do(t.Context(), 1, down)
	g.With(1, func(b *breaker.Breaker) { require.Equal(t, 3, b.Config().Failures) })

	// An Update of the group finds that a breaker is half-open, whose hook makes another.
	require.NoError(t, g.Update(func(c *breaker.GroupConfig[int]) { c.Config.OpenFor = -1 }))
	g.With(2, func(b *breaker.Breaker) { b.Trip(nil, 1) })
	require.NoError(t, g.Update(func(c *breaker.GroupConfig[int]) { c.Config.Successes = 2 }))
	require.Equal(t, []error{nil, nil}, errs)
}

// An Update that finds the open time over tells of the change.
func TestUpdateTellsOfWhatItFinds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen changes
		cfg := steady(breaker.Config{Failures: 1, OpenFor: time.Second, OnChange: seen.hook})
		b, g := breaker.New(cfg), breaker.NewGroup(breaker.GroupConfig[int]{Config: cfg})
		do(b, down)
		_ = g.Do(t.Context(), 1, down)
		time.Sleep(time.Second)
		update(t, b, func(c *breaker.Config) { c.Failures = 2 })
		require.Len(t, seen.all, 3)
		require.NoError(t, g.Update(func(c *breaker.GroupConfig[int]) { c.Config.Failures = 2 }))
		require.Equal(t, "closed -> open, closed -> open, open -> half-open, open -> half-open", seen.String())

		// So does the breaker of the keys for which there is no room.
		seen.all = nil
		full := breaker.NewGroup(breaker.GroupConfig[int]{MaxKeys: 1, Config: cfg})
		_ = full.Do(t.Context(), 1, down)
		_ = full.Do(t.Context(), 2, down)
		time.Sleep(time.Second)
		require.NoError(t, full.Update(func(c *breaker.GroupConfig[int]) { c.Config.Failures = 2 }))
		require.Equal(t, "closed -> open, closed -> open, open -> half-open, open -> half-open", seen.String())
	})
}

func TestUpdatesRunOneAtATime(t *testing.T) {
	cfg := breaker.Config{Failures: 5}
	b, g := breaker.New(cfg), breaker.NewGroup(breaker.GroupConfig[int]{Config: cfg})
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 200 {
				require.NoError(t, b.Update(func(c *breaker.Config) { c.Failures++ }))
				require.NoError(t, g.Update(func(c *breaker.GroupConfig[int]) { c.Config.Failures++ }))
			}
		})
	}
	all.Wait()
	require.Equal(t, 805, b.Config().Failures)
	require.Equal(t, 805, g.Config().Config.Failures)
}

// A success counts in the window of its own time, however long nothing happened before.
func TestBreakerCountsASuccessAfterAPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		made, updated := breaker.New(breaker.Config{Window: time.Second}), breaker.New(breaker.Config{})
		update(t, updated, func(c *breaker.Config) { c.Window, c.WindowCalls = time.Second, 0 })
		time.Sleep(time.Minute)
		for _, b := range []*breaker.Breaker{made, updated} {
			require.NoError(t, do(b, ok))
			require.EqualValues(t, 1, b.Stats().Window.Calls)
		}
	})
}

// What an Update sets is set, also if it was the default.
func TestUpdateSetsWhatWasTheDefault(t *testing.T) {
	b := breaker.New(breaker.Config{}) // opens after 5 failures in a row
	require.NoError(t, b.Update(func(c *breaker.Config) { c.Failures, c.FailureRate = 5, 0.5 }))
	require.Equal(t, 5, b.Config().Failures)
	for range 5 {
		_ = b.Do(t.Context(), func(context.Context) error { return errors.New("down") })
	}
	require.Equal(t, breaker.Open, b.State())

	b = breaker.New(breaker.Config{}) // OpenFor 30s, which does not grow
	require.NoError(t, b.Update(func(c *breaker.Config) { c.OpenFor, c.MaxOpenFor = 5*time.Second, 30*time.Second }))
	require.Equal(t, 30*time.Second, b.Config().MaxOpenFor)
}
