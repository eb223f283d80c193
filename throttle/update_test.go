package throttle_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
)

func TestConfigHasDefaults(t *testing.T) {
	c := throttle.New(throttle.Config{Rate: 2.5,
		Quotas: []throttle.Quota{{N: 5, Window: throttle.Window{Per: throttle.Month}}}}).Config()
	require.Equal(t, throttle.Config{Rate: 2.5, Burst: 3,
		Quotas: []throttle.Quota{{N: 5, Window: throttle.Window{Per: throttle.Month, In: time.UTC, From: 1}}}}, c)
	require.NoError(t, c.Validate())
}

// Update gets the Config as it was given, in which a zero field means its default.
func TestUpdateRecomputesDefaults(t *testing.T) {
	l := throttle.New(throttle.Config{Rate: 10})
	require.NoError(t, l.Update(func(c *throttle.Config) {
		require.Equal(t, 10, c.Burst, "the default")
		c.Rate = 100
	}))
	require.Equal(t, 100, l.Config().Burst)
	require.NoError(t, l.Update(func(c *throttle.Config) { c.Burst = 10 }))
	require.Equal(t, 10, l.Config().Burst)
	require.NoError(t, l.Update(func(c *throttle.Config) { c.Rate = 1000 }))
	require.Equal(t, 10, l.Config().Burst, "a Burst that was set stays")
	require.NoError(t, l.Update(func(c *throttle.Config) { c.Burst = 0 }))
	require.Equal(t, 1000, l.Config().Burst, "zero restores the default")
}

// As many tokens are missing after a change as before it.
func TestUpdateKeepsTokensSpent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 10, Burst: 10, Cost: cost})
		g := throttle.NewGroup(throttle.GroupConfig[int]{Config: throttle.Config{Rate: 10, Burst: 10, Cost: cost}})
		update := func(rate float64, burst int) {
			require.NoError(t, l.Update(func(c *throttle.Config) { c.Rate, c.Burst = rate, burst }))
			require.NoError(t, g.Update(func(c *throttle.GroupConfig[int]) { c.Config.Rate, c.Config.Burst = rate, burst }))
		}
		left := func(want int, reset time.Duration) {
			t.Helper()
			for _, d := range []throttle.Decision{take(l, 0), takeOf(g, 1, 0)} {
				require.Equal(t, want, d.Remaining)
				require.Equal(t, reset, d.ResetAfter)
			}
		}
		take(l, 7)
		takeOf(g, 1, 7)
		update(10, 20)
		left(13, 700*time.Millisecond)
		update(1, 20)
		left(13, 7*time.Second)
		time.Sleep(1500 * time.Millisecond)
		update(10, 20)
		left(14, 550*time.Millisecond)
		update(1, 3)
		time.Sleep(time.Second)
		update(2, 3) // which no call has seen, of the Group
		update(1, 3)
		left(0, 4500*time.Millisecond)
		time.Sleep(time.Hour)
		update(100, 3)
		left(3, 0)
		update(1e-9, 1)
		take(l, 1)
		takeOf(g, 1, 1)
		update(1e9, 1)
		left(0, 1)
		update(1e-9, 1)
		require.Positive(t, take(l, 1).RetryAfter)
	})
}

// TestNamedLimitsKeepTokensSpent changes limits to None or Unlimited and back. Only tokens that were taken from a limit
// can be refunded to it.
func TestNamedLimitsKeepTokensSpent(t *testing.T) {
	month := func(n int) []throttle.Quota {
		return []throttle.Quota{{N: n, Window: throttle.Window{Per: throttle.Month}}}
	}
	for name, c := range map[string]struct{ limited, named throttle.Config }{
		"rate none":       {throttle.Config{Rate: 1, Burst: 10}, throttle.Config{Rate: throttle.None, Burst: 10}},
		"burst none":      {throttle.Config{Rate: 1, Burst: 10}, throttle.Config{Rate: 1, Burst: throttle.None}},
		"rate unlimited":  {throttle.Config{Rate: 1, Burst: 10}, throttle.Config{Rate: throttle.Unlimited}},
		"quota none":      {throttle.Config{Quotas: month(10)}, throttle.Config{Quotas: month(throttle.None)}},
		"quota unlimited": {throttle.Config{Quotas: month(10)}, throttle.Config{Quotas: month(throttle.Unlimited)}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := throttle.New(c.limited)
				g := throttle.NewGroup(throttle.GroupConfig[int]{Config: c.limited})
				update := func(cfg throttle.Config) {
					require.NoError(t, l.Update(func(c *throttle.Config) { *c = cfg }))
					require.NoError(t, g.Update(func(c *throttle.GroupConfig[int]) { c.Config = cfg }))
				}
				remaining := func(want int) {
					t.Helper()
					d, err := l.Admit(of(0))
					require.NoError(t, err)
					require.Equal(t, want, d.Remaining)
					d, err = g.Admit(of(0), 1)
					require.NoError(t, err)
					require.Equal(t, want, d.Remaining)
				}
				c.limited.Cost, c.named.Cost = cost, cost
				update(c.limited)
				three, err := l.Reserve(t.Context(), 3)
				require.NoError(t, err)
				threeOf, err := g.Reserve(t.Context(), 1, 3)
				require.NoError(t, err)
				require.NoError(t, l.Wait(of(7)))
				require.NoError(t, g.Wait(of(7), 1))
				remaining(0)
				update(c.named)
				if unlimited, err := l.Reserve(t.Context(), 5); err == nil {
					defer remaining(3)
					defer unlimited.Settle(0)
				}
				update(c.named)
				update(c.limited)
				remaining(0)
				update(c.named)
				three.Settle(0)
				threeOf.Settle(0)
				update(c.limited)
				remaining(3)
			})
		})
	}
}

// A program that reads its settings again loads each time zone again, which is another pointer.
func TestUpdateKeepsTheQuotaOfATimeZone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		month := func(in *time.Location, from int) []throttle.Quota {
			return []throttle.Quota{{N: 10, Window: throttle.Window{Per: throttle.Month, In: in, From: from}}}
		}
		berlin := func() *time.Location {
			in, err := time.LoadLocation("Europe/Berlin")
			require.NoError(t, err)
			return in
		}
		zone := func(hours int) *time.Location { return time.FixedZone("here", hours*3600) }
		l := throttle.New(throttle.Config{Quotas: month(berlin(), 1), Cost: cost})
		left := func(want int, quotas []throttle.Quota) {
			t.Helper()
			require.NoError(t, l.Update(func(c *throttle.Config) { c.Quotas = quotas }))
			require.Equal(t, want, take(l, 0).Remaining)
		}
		r, err := l.Reserve(t.Context(), 7)
		require.NoError(t, err)
		left(3, month(berlin(), 1))
		r.Settle(8)
		left(2, month(berlin(), 1))
		require.False(t, take(l, 3).Admitted)
		left(10, month(berlin(), 2))
		take(l, 1)
		left(10, month(zone(1), 2))
		take(l, 1)
		left(9, month(zone(1), 2))
		left(10, month(zone(2), 2))
	})
}

func TestInvalidUpdateChangesNothing(t *testing.T) {
	l := throttle.New(throttle.Config{Name: "a", Rate: 10})
	g := throttle.NewGroup(throttle.GroupConfig[int]{Config: throttle.Config{Name: "a", Rate: 10}})
	for want, change := range map[string]func(*throttle.Config){
		"throttle.Config.Rate is 0" + rates:                                    func(c *throttle.Config) { c.Rate = 0 },
		`throttle.Config.Name is "b": must be "a" as before: it cannot change`: func(c *throttle.Config) { c.Name = "b" },
	} {
		require.EqualError(t, l.Update(change), want)
		require.EqualError(t, g.Update(func(c *throttle.GroupConfig[int]) { change(&c.Config) }), want)
	}
	require.EqualError(t, g.Update(func(c *throttle.GroupConfig[int]) { c.MaxKeys, c.IdleAfter = 5, 7 }),
		"throttle.GroupConfig.MaxKeys is 5: must be 100000 as before: it cannot change\n"+
			"throttle.GroupConfig.IdleAfter is another: must be the same as before: it cannot change")
	require.PanicsWithValue(t, "no", func() { _ = l.Update(func(c *throttle.Config) { c.Rate = 5; panic("no") }) })
	require.Equal(t, throttle.Config{Name: "a", Rate: 10, Burst: 10}, l.Config())
	require.Equal(t, throttle.Config{Name: "a", Rate: 10, Burst: 10}, g.Config().Config)
}

// Waiting calls wait as long as the new rate requires.
func TestUpdateKeepsWaitingCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := throttle.Config{Rate: 1, Burst: 4, MaxWait: -1, Cost: cost}
		l := throttle.New(cfg)
		g := throttle.NewGroup(throttle.GroupConfig[int]{Config: cfg})
		for name, c := range map[string]struct {
			wait   func(context.Context) error
			update func(func(*throttle.Config)) error
		}{
			"Limiter": {l.Wait, l.Update},
			"Group": {
				func(ctx context.Context) error { return g.Wait(ctx, 1) },
				func(change func(*throttle.Config)) error {
					return g.Update(func(c *throttle.GroupConfig[int]) { change(&c.Config) })
				},
			},
		} {
			start := time.Now()
			at := make([]time.Duration, 4)
			var calls sync.WaitGroup
			for i := range at {
				calls.Go(func() {
					require.NoError(t, c.wait(of(4)), name)
					at[i] = time.Since(start)
				})
				synctest.Wait()
			}
			time.Sleep(2 * time.Second)
			// 2 tokens are missing
			require.NoError(t, c.update(func(c *throttle.Config) { c.Rate, c.Burst, c.MaxWait = 2, 2, 0 }), name)
			require.Equal(t, throttle.TooCostly, reason(c.wait(of(4))), name)
			calls.Wait()
			// The others take more than the burst: each waits until that is full, and for the time of two more.
			require.Equal(t, []time.Duration{0, 4 * time.Second, 7 * time.Second, 10 * time.Second}, at, name)
			require.NoError(t, c.update(func(c *throttle.Config) { *c = cfg }), name)
			time.Sleep(time.Minute)
		}
	})
}
