package throttle_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/refund"
	"github.com/go-resilience/resilience/throttle"
)

// An estimate is corrected: less is given back, more is owed, and refuses until it is paid.
func TestSettleCorrectsAReservation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := throttle.Config{Rate: 1, Burst: 10, Cost: cost}
		l := throttle.New(cfg)
		g := throttle.NewGroup(throttle.GroupConfig[string]{Config: cfg})
		for name, c := range map[string]struct {
			reserve func(context.Context, int) (*throttle.Reservation, error)
			left    func() throttle.Decision
		}{
			"Limiter": {l.Reserve, func() throttle.Decision { return take(l, 0) }},
			"Group": {
				func(ctx context.Context, n int) (*throttle.Reservation, error) { return g.Reserve(ctx, "a", n) },
				func() throttle.Decision { return takeOf(g, "a", 0) },
			},
		} {
			reserve := func(n int) *throttle.Reservation {
				r, err := c.reserve(t.Context(), n)
				require.NoError(t, err, name)
				return r
			}
			r := reserve(8)
			require.Equal(t, 2, c.left().Remaining)
			r.Settle(3)
			require.Equal(t, 7, c.left().Remaining)
			r.Settle(8) // a second one
			r.SettleEach(map[string]int{"": 8})
			require.Equal(t, 7, c.left().Remaining)
			reserve(0).Settle(-5) // gives nothing
			require.Equal(t, 7, c.left().Remaining)

			r = reserve(5)
			r.Settle(15) // 8 beyond what is there
			require.Equal(t, 18*time.Second, c.left().ResetAfter)
			_, err := c.reserve(t.Context(), 1)
			limited, _ := errors.AsType[*throttle.LimitedError](err)
			require.Equal(t, 9*time.Second, limited.RetryAfter())
			time.Sleep(9 * time.Second)
			r = reserve(1)
			time.Sleep(10 * time.Second) // its token, and nine more, have come back
			r.Settle(0)
			require.Equal(t, 10, c.left().Remaining, "no more than a burst")

			reserve(5).Settle(5000) // no more than one Burst is owed
			require.Equal(t, 20*time.Second, c.left().ResetAfter)
			require.Zero(t, reserveZero(t, c.reserve))
			time.Sleep(20 * time.Second)
		}
		for name, s := range map[string]throttle.Stats{"Limiter": l.Stats(), "Group": g.Stats()} {
			require.EqualValues(t, 8+0+5+10+1+5+15, s.Spent, name)
			require.EqualValues(t, 5+1, s.Refunded, name)
			require.EqualValues(t, 4980, s.Forgiven, name)
		}
	})
}

// A call that had to wait for its token gives it back in the same way as a call that did not wait.
func TestSettleCorrectsAReservationThatWaited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 1, MaxWait: throttle.Unlimited})
		require.True(t, l.Allow())
		r, err := l.Reserve(t.Context(), 1)
		require.NoError(t, err)
		require.False(t, l.Allow())
		r.Settle(0)
		require.True(t, l.Allow())
	})
}

// Middleware that calls Admit refunds the tokens if an inner policy refuses the request.
func TestAdmitRecordsItsRefund(t *testing.T) {
	cfg := throttle.Config{Rate: 1, Burst: 1, Quotas: day(1)}
	for name, admits := range map[string]func() func(context.Context) (throttle.Decision, error){
		"Limiter": func() func(context.Context) (throttle.Decision, error) { return throttle.New(cfg).Admit },
		"Group": func() func(context.Context) (throttle.Decision, error) {
			g := throttle.NewGroup(throttle.GroupConfig[int]{Config: cfg})
			return func(ctx context.Context) (throttle.Decision, error) { return g.Admit(ctx, 1) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				admit := admits()
				recording, handler := refund.Start(t.Context())
				d, err := admit(recording)
				require.NoError(t, err)
				require.Zero(t, d.Remaining)
				_, err = admit(recording)
				require.ErrorIs(t, err, throttle.ErrLimited)
				refund.Of(handler).Refund()
				_, err = admit(t.Context())
				require.NoError(t, err, "the token was refunded, and the refusal added none")
				_, err = admit(t.Context())
				require.ErrorIs(t, err, throttle.ErrLimited)
				refund.Of(handler).Refund()
				_, err = admit(t.Context())
				require.ErrorIs(t, err, throttle.ErrLimited, "tokens are refunded once")
			})
		})
	}
}

// A call that costs nothing is admitted, in debt too.
func reserveZero(t *testing.T, reserve func(context.Context, int) (*throttle.Reservation, error)) (n int) {
	t.Helper()
	_, err := reserve(t.Context(), 0)
	require.NoError(t, err)
	return 0
}

func TestSettleCorrectsQuotas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hour := throttle.Quota{N: 10, Window: throttle.Window{Every: time.Hour}}
		l := throttle.New(throttle.Config{Quotas: []throttle.Quota{hour,
			{N: 100, Window: throttle.Window{Per: throttle.Day}}}, Cost: cost})
		reserve := func(n int) *throttle.Reservation {
			r, err := l.Reserve(t.Context(), n)
			require.NoError(t, err)
			return r
		}
		r, late := reserve(6), reserve(4)
		r.Settle(4)
		require.Equal(t, 2, take(l, 0).Remaining)
		reserve(2).Settle(8) // six are owed
		require.Zero(t, take(l, 0).Remaining)
		reserve(0).Settle(50) // which are of the present windows
		require.Zero(t, l.Stats().Forgiven, "by the day")
		time.Sleep(time.Hour)
		require.Equal(t, 10, take(l, 0).Remaining)
		require.Equal(t, hour, take(l, 10).Quota)
		late.Settle(0) // its hour is over, and its day is not
		require.Zero(t, take(l, 0).Remaining)
		time.Sleep(time.Hour)
		require.NoError(t, l.Update(func(c *throttle.Config) { c.Quotas = c.Quotas[1:] }))
		require.Equal(t, 100-4-8-50-10, take(l, 0).Remaining)
		reserve(1).Settle(500)
		require.EqualValues(t, 500-1-(200-73), l.Stats().Forgiven, "twice N")

		l = throttle.New(throttle.Config{Quotas: []throttle.Quota{hour}})
		unknown := reserve(0)
		time.Sleep(time.Hour)
		unknown.Settle(3) // an hour begins
		time.Sleep(time.Minute)
		d, err := l.Admit(t.Context())
		require.NoError(t, err)
		require.Equal(t, throttle.Decision{
			Admitted: true, Quota: hour, Limit: 10, Window: time.Hour, Remaining: 6, ResetAfter: 59 * time.Minute,
		}, d)
	})
}

// A settlement corrects no window that began with an Update, also if it ends with one that it corrects.
func TestSettleCorrectsNoLaterQuota(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(30 * 24 * time.Hour) // to the last day of a month
		day, month := throttle.Quota{N: 100, Window: throttle.Window{Per: throttle.Day}}, throttle.Quota{N: 9,
			Window: throttle.Window{Per: throttle.Month}}
		l := throttle.New(throttle.Config{Quotas: []throttle.Quota{day}, Cost: cost})
		r, err := l.Reserve(t.Context(), 6)
		require.NoError(t, err)
		require.NoError(t, l.Update(func(c *throttle.Config) { c.Quotas = []throttle.Quota{day, month} }))
		take(l, 1)
		r.Settle(8)
		require.Equal(t, 8, take(l, 0).Remaining)
	})
}

// All takes from each or from none: an organization keeps what its user was refused.
func TestAllTakesFromAllOrNone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		users := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Name: "users", Rate: 1, Burst: 5}})
		organization := throttle.New(throttle.Config{Name: "organization", Rate: 1, Burst: 100})
		tokens := throttle.New(throttle.Config{Name: "tokens", Rate: 1, Burst: 1000, Cost: cost})
		limits := throttle.All(organization, tokens, users.For(func(context.Context) string { return "a" }))
		served := 0
		for range 200 {
			if err := limits.Do(of(10), ok); err == nil {
				served++
			} else {
				require.EqualError(t, err, "throttle: users[a]: limited (over_limit), retry after 1s")
			}
		}
		require.Equal(t, 5, served)
		require.Equal(t, 94, take(organization, 0).Remaining, "and one of this call")
		require.Equal(t, 950, take(tokens, 0).Remaining)

		time.Sleep(2 * time.Second)
		r, err := limits.Reserve(of(10))
		require.NoError(t, err)
		r.Settle(30) // what has a Cost
		require.Equal(t, 922, take(tokens, 0).Remaining)
		r, err = limits.Reserve(of(10))
		require.NoError(t, err)
		r.SettleEach(map[string]int{"organization": 0, "tokens": 7, "unknown": 9})
		require.Equal(t, 915, take(tokens, 0).Remaining)
		require.ErrorContains(t, limits.Wrap(ok)(of(10)), "users[a]", "the last has used what it took")

		time.Sleep(time.Second)
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, limits.Do(ended, ok), context.Canceled)
		sent := errors.New("sent")
		require.ErrorIs(t, limits.Do(of(1), func(context.Context) error { return sent }), sent)
	})
}

func TestAllRefundsAfterPanicOfCost(t *testing.T) {
	first := throttle.New(throttle.Config{Rate: 1, Burst: 1})
	second := throttle.New(throttle.Config{Rate: 1, Cost: func(context.Context) int { panic("no tenant") }})
	require.PanicsWithValue(t, "no tenant", func() { _, _ = throttle.All(first, second).Reserve(t.Context()) })
	require.True(t, first.Allow())
}

// A call that a panic of an observer has kept from being made has used nothing.
func TestPanicOfObserverCostsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		quotas := []throttle.Quota{{N: 2, Window: throttle.Window{Per: throttle.Day}}}
		l := throttle.New(throttle.Config{Rate: 1, Burst: 1, MaxWait: -1, Quotas: quotas})
		require.NoError(t, l.Wait(t.Context()))
		stop := l.Observe(func(context.Context, throttle.Event) { panic("observer") })
		require.PanicsWithValue(t, "observer", func() { _, _ = throttle.All(l).Reserve(t.Context()) })
		stop()
		require.NoError(t, l.Wait(t.Context()))
	})
}

// Many goroutines reserve and settle: the balance is exact, of a Limiter and of each key.
func TestReservationsUnderStress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const burst = 1_000_000
		cfg := throttle.Config{Rate: 1e-6, Burst: burst / 1000,
			Quotas: []throttle.Quota{{N: burst, Window: throttle.Window{Every: 10_000 * time.Hour}}}, Cost: cost}
		cfg.Rate, cfg.Burst = 1e-3, burst
		cfg.Name = "limiter"
		l := throttle.New(cfg)
		cfg.Name = "group"
		g := throttle.NewGroup(throttle.GroupConfig[int]{Config: cfg})
		limits := throttle.All(l, g.For(func(context.Context) int { return 1 }))
		var mu sync.Mutex
		sum, each := 0, 0
		var calls sync.WaitGroup
		for i := range 8 {
			calls.Go(func() {
				random := rand.New(rand.NewPCG(uint64(i), 3))
				for range 2000 {
					n, used, other := random.IntN(10), random.IntN(12), random.IntN(12)
					r, err := limits.Reserve(of(n))
					require.NoError(t, err)
					if random.IntN(2) == 0 {
						r.Settle(used)
						other = used
					} else {
						r.SettleEach(map[string]int{"limiter": used, "group": other})
					}
					if n == 0 { // a quota is not charged for what it did not give
						r, err = limits.Reserve(of(1))
						require.NoError(t, err)
						r.Settle(0)
					}
					mu.Lock()
					sum += used
					each += other
					mu.Unlock()
				}
			})
		}
		calls.Wait()
		require.EqualValues(t, sum, l.Stats().Spent-l.Stats().Refunded)
		require.EqualValues(t, each, g.Stats().Spent-g.Stats().Refunded)
		require.Equal(t, time.Duration(sum)*1000*time.Second, take(noQuotas(t, l), 0).ResetAfter)
	})
}

// noQuotas returns l without its quotas.
func noQuotas(t *testing.T, l *throttle.Limiter) *throttle.Limiter {
	t.Helper()
	require.NoError(t, l.Update(func(c *throttle.Config) { c.Quotas = nil }))
	return l
}
