package breaker_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/internal/linger"
)

func TestBreakerTrip(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen changes
		b := watched(&seen, breaker.Config{ConsecutiveFailures: 1, OpenFor: 10 * time.Second, MaxOpenFor: time.Minute})
		maintenance := errors.New("maintenance")
		b.Trip(maintenance, time.Second)
		require.Equal(t, "closed -> open", seen.String())
		refusal := requireRefused(t, do(b, ok), breaker.Open)
		require.Equal(t, maintenance, refusal.LastErr)
		require.Equal(t, time.Second, refusal.RetryAfter())
		require.Equal(t, maintenance, seen.all[0].Err)

		b.Trip(nil, time.Minute)
		require.Equal(t, time.Minute, b.Stats().OpenLeft, "longer")
		b.Trip(nil, time.Millisecond)
		require.Equal(t, time.Millisecond, b.Stats().OpenLeft, "or shorter")
		require.Len(t, seen.all, 1, "it stayed open")
		require.EqualValues(t, 1, b.Stats().ConsecutiveOpens)

		time.Sleep(time.Millisecond)
		do(b, down)
		require.Equal(t, 20*time.Second, b.Stats().OpenLeft, "the second time in a row")
		time.Sleep(20*time.Second - 1)
		require.Equal(t, breaker.Open, b.State())
		time.Sleep(time.Nanosecond)
		require.NoError(t, do(b, ok))
		require.Equal(t, breaker.Closed, b.State())

		time.Sleep(time.Minute) // a whole Window
		b.Trip(nil, 0)
		require.Equal(t, 10*time.Second, b.Stats().OpenLeft)
		b.Trip(nil, 1<<63-1)
		require.Greater(t, b.Stats().OpenLeft, 50*365*24*time.Hour)
		require.Equal(t, breaker.Open, b.State())
		seen.requireChain(t, breaker.Open)
	})
}

func TestBreakerForceOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen changes
		b := watched(&seen, breaker.Config{Name: "users", ConsecutiveFailures: 1})
		reason := errors.New("migration")
		b.ForceOpen(reason)
		b.ForceOpen(reason)
		time.Sleep(24 * 365 * time.Hour)
		refusal := requireRefused(t, do(b, ok), breaker.ForcedOpen)
		require.Equal(t, 30*time.Second, refusal.RetryAfter())
		require.EqualError(t, refusal, "breaker: users: circuit forced_open")
		require.Equal(t, reason, b.Stats().LastErr)
		b.Reset()
		b.Trip(nil, time.Second)
		require.Equal(t, breaker.ForcedOpen, b.State(), "until Enable")
		b.Enable()
		require.NoError(t, do(b, ok))
		b.Enable()
		require.Equal(t, "closed -> forced_open, forced_open -> closed", seen.String())
		require.Equal(t, reason, seen.all[0].Err)
	})
}

// Calls that have left the window by then are not counted.
func TestStatsFreezeAtOpening(t *testing.T) {
	for name, stop := range map[string]func(*breaker.Breaker){
		"Trip":      func(b *breaker.Breaker) { b.Trip(nil, time.Hour) },
		"ForceOpen": func(b *breaker.Breaker) { b.ForceOpen(nil) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := breaker.New(breaker.Config{Window: 10 * time.Second})
				do(b, ok)
				time.Sleep(5 * time.Second)
				do(b, ok)
				time.Sleep(5 * time.Second)
				stop(b)
				want := breaker.Counts{Succeeded: 1}
				require.Equal(t, want, b.Stats().Window)
				time.Sleep(time.Minute)
				update(t, b, func(c *breaker.Config) { c.Window = time.Hour })
				require.Equal(t, want, b.Stats().Window)
			})
		})
	}
}

func TestStatsKeepCountsOfOpening(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{FailureRate: 0.5, MinCalls: 4, OpenFor: time.Hour})
		require.Equal(t, breaker.Stats{State: breaker.Closed}, untotaled(b))
		time.Sleep(time.Second)
		for _, call := range []func(context.Context) error{ok, ok, down, down} {
			do(b, call)
		}
		want := breaker.Stats{
			State:            breaker.Open,
			Window:           breaker.Counts{Succeeded: 2, Failed: 2, ConsecutiveFailures: 2},
			FailureRate:      0.5,
			ConsecutiveOpens: 1,
			OpenLeft:         time.Hour,
			LastErr:          errDown,
		}
		require.Equal(t, want, untotaled(b))
		time.Sleep(time.Hour)
		want.State, want.OpenLeft = breaker.HalfOpen, 0
		require.Equal(t, want, untotaled(b))
		do(b, down)
		want.Window.ConsecutiveFailures++
		require.Equal(t, want.Window, b.Stats().Window)
		time.Sleep(time.Hour)
		do(b, ok)
		require.Equal(t, breaker.Stats{State: breaker.Closed, ConsecutiveOpens: 2, LastErr: errDown}, untotaled(b))
		do(b, ok)
		require.Equal(t, breaker.Counts{Succeeded: 1}, b.Stats().Window)
	})
}

// The transitions that an observer causes are delivered after the one that it observes.
func TestObserverMayCallEveryMethod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen changes
		var b *breaker.Breaker
		depth := 0
		every := func(ctx context.Context) {
			b.State()
			b.Stats()
			_ = b.Do(ctx, ok)
			if done, err := b.Begin(ctx); err == nil {
				done(nil)
			}
			_ = b.Wrap(down)(ctx)
			b.Config()
			_ = b.Update(func(c *breaker.Config) { c.ConsecutiveFailures = 1 })
			d := b.Describe()
			d.Metrics()
			d.Health(ctx)
			d.InUse()
		}
		b = breaker.New(breaker.Config{ConsecutiveFailures: 1})
		onChange(b, func(ctx context.Context, c breaker.Event) {
			require.Zero(t, depth, "one at a time")
			depth++
			defer func() { depth-- }()
			seen.hook(ctx, c)
			if len(seen.all) > 20 {
				return
			}
			every(ctx)
			b.Reset()
			b.Trip(nil, time.Second)
			b.ForceOpen(nil)
			b.Enable()
			b.Disable()
			b.Enable()
		})
		onRefuse(b, func(ctx context.Context, e *breaker.OpenError) {
			b.State()
			b.Stats()
		})
		do(b, down)
		require.Greater(t, len(seen.all), 100)
		seen.requireChain(t, breaker.Closed)
	})
}

func TestNotifyContinuesAfterObserverPanics(t *testing.T) {
	var seen changes
	var b *breaker.Breaker
	panics := true
	b = breaker.New(breaker.Config{ConsecutiveFailures: 1})
	onChange(b, func(ctx context.Context, c breaker.Event) {
		if panics {
			panics = false
			b.Reset() // told by the next call
			panic("hook")
		}
		seen.hook(ctx, c)
	})
	require.PanicsWithValue(t, "hook", func() { do(b, down) })
	require.NoError(t, do(b, ok))
	require.Equal(t, "open -> closed", seen.String())
	b.Trip(nil, time.Hour)
	require.Equal(t, "open -> closed, closed -> open", seen.String())
}

func TestEventsHaveContextOfCall(t *testing.T) {
	type key struct{}
	ctx := context.WithValue(context.Background(), key{}, "trace 1")
	var traces []any
	b := breaker.New(breaker.Config{ConsecutiveFailures: 1})
	onChange(b, func(ctx context.Context, _ breaker.Event) { traces = append(traces, ctx.Value(key{})) })
	onRefuse(b, func(ctx context.Context, _ *breaker.OpenError) { traces = append(traces, ctx.Value(key{})) })
	_ = b.Do(ctx, down)
	_ = b.Do(ctx, down)
	b.Reset()
	require.Equal(t, []any{"trace 1", "trace 1", nil}, traces)
}

// Transitions that many goroutines cause form one chain and are delivered one at a time.
func TestBreakerChangesStress(t *testing.T) {
	const (
		workers = 16
		rounds  = 4000
	)
	var seen []breaker.Event // without a lock: the race detector would see two at a time
	var telling atomic.Int64
	b := breaker.New(breaker.Config{
		ConsecutiveFailures: 3, FailureRate: 0.5, MinCalls: 10, SlowAfter: time.Millisecond,
		OpenFor: 10 * time.Microsecond, MaxOpenFor: 100 * time.Microsecond,
		Probes: 2, Patience: time.Nanosecond,
	})
	onChange(b, func(ctx context.Context, c breaker.Event) {
		if telling.Add(1) != 1 {
			t.Error("two transitions delivered at a time")
		}
		seen = append(seen, c)
		switch len(seen) % 64 {
		case 0:
			b.Reset()
		case 1:
			_ = b.Do(ctx, down)
		case 2:
			b.Stats()
		}
		telling.Add(-1)
	})
	onRefuse(b, func(context.Context, *breaker.OpenError) { b.State() })
	var wg sync.WaitGroup
	wg.Go(func() { // apart, so that it is not in step by the lock of another call
		for range rounds {
			b.Describe().InUse()
		}
	})
	for w := range workers {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(3, uint64(w)))
			for range rounds {
				ctx, cancel := context.WithCancel(context.Background())
				how := r.IntN(40)
				switch how {
				case 0:
					b.Reset()
				case 1:
					b.Trip(errDown, time.Duration(r.IntN(20))*time.Microsecond)
				case 2:
					b.ForceOpen(errDown)
				case 3, 4:
					b.Enable()
				case 5:
					b.Disable()
				case 6:
					b.Stats()
				case 7:
					b.State()
				case 8:
					_, _ = b.Begin(ctx) // forgotten
				case 11: // breaks off while the breaker goes on
					ctx, work := linger.Begin(ctx)
					_ = b.Do(ctx, func(context.Context) error {
						work.Continue()
						wg.Go(func() { work.End(errDown) })
						return nil
					})
				case 12: // its caller's time is up
					ctx, cancel := context.WithTimeout(ctx, time.Microsecond)
					_ = b.Do(ctx, func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
					cancel()
				case 9, 10:
					if done, err := b.Begin(ctx); err == nil {
						wg.Go(func() { done(errDown) })
					}
				default:
					func() {
						defer func() { _ = recover() }()
						_ = b.Do(ctx, func(context.Context) error {
							switch how % 8 {
							case 0:
								return errDown
							case 1:
								panic(fmt.Sprint("boom ", how))
							case 2:
								cancel()
								return ctx.Err()
							case 3:
								return throttled(time.Microsecond)
							}
							return nil
						})
					}()
				}
				cancel()
			}
		})
	}
	wg.Wait()
	b.ForceOpen(nil)
	b.Enable()
	require.Equal(t, breaker.Closed, b.State())
	(&changes{all: seen}).requireChain(t, breaker.Closed)
	delivered := make(map[breaker.State]int64)
	for state := range b.Stats().Transitions {
		delivered[state] = 0
	}
	for _, change := range seen {
		delivered[change.To]++
	}
	require.Equal(t, b.Stats().Transitions, delivered)
	require.Greater(t, len(seen), 1000)
	require.NoError(t, do(b, ok))
}

// The first call after the open time is refused because an earlier probe holds the permit. Observers are
// notified before it returns.
func TestRefusalNotifiesOfHalfOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen changes
		b := watched(&seen, breaker.Config{})
		b.Trip(nil, time.Second)
		time.Sleep(time.Second)
		_, err := b.Begin(t.Context())
		require.NoError(t, err)
		b.Trip(nil, time.Second)
		time.Sleep(time.Second)
		requireRefused(t, do(b, ok), breaker.HalfOpen)
		require.Equal(t, "closed -> open, open -> half_open, half_open -> open, open -> half_open", seen.String())
	})
}
