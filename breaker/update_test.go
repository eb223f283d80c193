package breaker_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
)

// update calls Update, which must succeed.
func update(t *testing.T, b *breaker.Breaker, change func(*breaker.Config)) {
	t.Helper()
	require.NoError(t, b.Update(change))
}

func TestBreakerConfigDefaults(t *testing.T) {
	require.Equal(t, breaker.Config{
		Name: "users", ConsecutiveFailures: 5, Window: time.Minute, Patience: 900 * time.Millisecond,
		OpenFor: 30 * time.Second, ProbeTimeout: 30 * time.Second, MaxOpenFor: 30 * time.Second,
		MaxRetryAfter: 30 * time.Second, Probes: 1,
	}, breaker.New(breaker.Config{Name: "users"}).Config())

	require.Zero(t, breaker.New(breaker.Config{FailuresInWindow: 10}).Config().ConsecutiveFailures)
	require.Equal(t, 20, breaker.New(breaker.Config{FailureRate: 0.5}).Config().MinCalls)
	require.Equal(t, 7, breaker.New(breaker.Config{FailureRate: 0.5, WindowCalls: 7}).Config().MinCalls)

	// A breaker that is made with the Config of another has the same Config.
	for _, given := range []breaker.Config{
		{}, {Name: "users"}, {Patience: breaker.Unlimited}, {FailureRate: 0.5}, {FailureRate: 0.5, WindowCalls: 7},
		{ConsecutiveFailures: 3, Window: time.Second}, {FailuresInWindow: 3}, {SlowAfter: time.Second},
		{SlowAfter: time.Second, FailureRate: 0.5, MinCalls: 3}, {WindowCalls: 7},
		{OpenFor: 1<<63 - 1}, {OpenFor: time.Second, MaxOpenFor: time.Minute}, {ProbeTimeout: time.Second}, {Probes: 7},
	} {
		filled := breaker.New(given).Config()
		require.NoError(t, filled.Validate())
		require.Equal(t, filled, breaker.New(filled).Config())
	}
}

func TestUpdateKeepsBreakerDefaults(t *testing.T) {
	b := breaker.New(breaker.Config{SlowAfter: 10 * time.Second})
	require.Equal(t, 9*time.Second, b.Config().Patience)
	update(t, b, func(c *breaker.Config) { c.SlowAfter *= 2 })
	require.Equal(t, 18*time.Second, b.Config().Patience, "it was not set")
	update(t, b, func(c *breaker.Config) {
		require.Equal(t, b.Config(), *c)
	})
	update(t, b, func(c *breaker.Config) { c.Patience = time.Second })
	update(t, b, func(c *breaker.Config) { c.SlowAfter = 0 })
	require.Equal(t, time.Second, b.Config().Patience)

	update(t, b, func(c *breaker.Config) { c.FailureRate = 0.5 })
	require.Zero(t, b.Config().ConsecutiveFailures, "zero means 5 without a rate")
	require.Equal(t, time.Minute, b.Config().Window)
	update(t, b, func(c *breaker.Config) { c.FailureRate = 0 })
	require.Equal(t, 5, b.Config().ConsecutiveFailures)
}

func TestUpdateKeepsWindowOfSameLength(t *testing.T) {
	b := breaker.New(breaker.Config{WindowCalls: 10})
	require.Error(t, do(b, down))
	update(t, b, func(c *breaker.Config) { c.Window = time.Hour })
	require.EqualValues(t, 1, b.Stats().Window.Failed, "it counts calls")
	update(t, b, func(c *breaker.Config) { c.WindowCalls = 11 })
	require.Zero(t, b.Stats().Window.Failed)
}

func TestInvalidUpdateChangesNothing(t *testing.T) {
	b := breaker.New(breaker.Config{Name: "users", ConsecutiveFailures: 2})
	before := b.Config()
	do(b, down)
	require.EqualError(t, b.Update(func(c *breaker.Config) { c.ConsecutiveFailures, c.Probes = 1, -2 }),
		"breaker.Config.Probes is -2: must be 0 (for 1) to 1<<31 - 1")
	require.EqualError(t, b.Update(func(c *breaker.Config) { c.Name = "orders" }),
		`breaker.Config.Name is "orders": must be "users" as before: it cannot change`)
	require.PanicsWithValue(t, "boom",
		func() { _ = b.Update(func(c *breaker.Config) { c.ConsecutiveFailures = 1; panic("boom") }) })
	require.Equal(t, before, b.Config())
	require.EqualValues(t, 1, b.Stats().Window.Failed)
	update(t, b, func(c *breaker.Config) { c.ConsecutiveFailures = 3 })
	do(b, down)
	require.Equal(t, breaker.Closed, b.State())
}

// A call is judged by the Config with which it began, and counts in the current window.
func TestUpdateKeepsConfigOfCallsInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{ConsecutiveFailures: 2, WindowCalls: 50, SlowAfter: time.Second,
			Classify: func(error) breaker.Verdict { return breaker.Ignore }})
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
		require.Equal(t, breaker.Counts{Failed: 1, ConsecutiveFailures: 1}, b.Stats().Window)
		failing(errDown)
		require.Equal(t, breaker.Counts{Failed: 1, ConsecutiveFailures: 1}, b.Stats().Window)
		time.Sleep(2 * time.Second)
		late(context.DeadlineExceeded)
		after(context.DeadlineExceeded)
		require.Equal(t, breaker.Counts{Failed: 1, ConsecutiveFailures: 1}, b.Stats().Window, "Classify and Patience")
		do(b, ok)
		do(b, down)
		require.Equal(t, breaker.Counts{Succeeded: 1, Failed: 2, ConsecutiveFailures: 1}, b.Stats().Window)

		done, err := b.Begin(t.Context())
		require.NoError(t, err)
		update(t, b, func(c *breaker.Config) { c.ConsecutiveFailures, c.FailuresInWindow = 100, 3 })
		done(errDown)
		require.Equal(t, breaker.Open, b.State(), "the limits are those of now")
	})
}

// A breaker loses no call and no permit while its Config changes.
func TestUpdateStress(t *testing.T) {
	const (
		workers = 8
		rounds  = 3000
	)
	var seen changes
	b := watched(&seen, breaker.Config{ConsecutiveFailures: 3, OpenFor: 20 * time.Microsecond, Probes: 1})
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
					c.ConsecutiveFailures, c.Probes = 1+i%5, 1+i%3
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

	update(t, b, func(c *breaker.Config) { c.Probes, c.ConsecutiveFailures, c.OpenFor = 3, 1, time.Hour })
	b.Trip(nil, 1)
	for b.State() != breaker.HalfOpen {
	}
	for range 3 {
		_, err := b.Begin(t.Context())
		require.NoError(t, err, "every permit came back")
	}
	_, err := b.Begin(t.Context())
	requireRefused(t, err, breaker.HalfOpen)
}

// An Update that finds the open time over notifies observers of the transition.
func TestUpdateNotifiesOfHalfOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen changes
		b := watched(&seen, breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Second})
		do(b, down)
		time.Sleep(time.Second)
		update(t, b, func(c *breaker.Config) { c.ConsecutiveFailures = 2 })
		require.Equal(t, "closed -> open, open -> half_open", seen.String())
		b.Trip(nil, time.Second)
		time.Sleep(time.Second)
		require.NoError(t, configure(b, func(c *breaker.Config) { c.ConsecutiveFailures = 3 }))
		require.Len(t, seen.all, 4)
		seen.requireChain(t, breaker.HalfOpen)
	})
}

// The update of a settings file has the Config as it was given, and may be a dry run.
func TestDescribeUpdate(t *testing.T) {
	b := breaker.New(breaker.Config{ConsecutiveFailures: 2})
	update := b.Describe().Update
	set := func(n int) func(any) error {
		return func(cfg any) error {
			require.Zero(t, cfg.(*breaker.Config).OpenFor)
			cfg.(*breaker.Config).ConsecutiveFailures = n
			return nil
		}
	}
	require.NoError(t, update(true, set(7)))
	require.Equal(t, 2, b.Config().ConsecutiveFailures)
	require.Error(t, update(true, set(-1)))
	require.Error(t, update(false, set(-1)))
	require.Equal(t, errDown, update(false, func(cfg any) error { _ = set(7)(cfg); return errDown }))
	require.Equal(t, 2, b.Config().ConsecutiveFailures)
	require.NoError(t, update(false, set(7)))
	require.Equal(t, 7, b.Config().ConsecutiveFailures)
}
