package breaker_test

import (
	"context"
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

// A hanging probe fails after OpenFor. The next call, State, Stats or the end of the probe notices it.
func TestHangingProbeOpensBreaker(t *testing.T) {
	for name, notice := range map[string]func(*testing.T, *breaker.Breaker){
		"a call": func(t *testing.T, b *breaker.Breaker) { requireRefused(t, do(b, ok), breaker.Open) },
		"State":  func(t *testing.T, b *breaker.Breaker) { require.Equal(t, breaker.Open, b.State()) },
		"Stats":  func(t *testing.T, b *breaker.Breaker) { require.Equal(t, 20*time.Second, b.Stats().OpenLeft) },
		"its own failure": func(t *testing.T, b *breaker.Breaker) {
			time.Sleep(time.Nanosecond)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var seen changes
				b := watched(&seen, breaker.Config{
					ConsecutiveFailures: 1, OpenFor: 10 * time.Second, MaxOpenFor: time.Hour,
				})
				open(t, b)
				time.Sleep(10 * time.Second)
				go do(b, taking(10*time.Second+1, errDown))
				synctest.Wait()
				time.Sleep(10*time.Second - 1)
				requireRefused(t, do(b, ok), breaker.HalfOpen)
				time.Sleep(time.Nanosecond)
				notice(t, b)
				synctest.Wait()
				require.Equal(t, "closed -> open, open -> half_open, half_open -> open", seen.String())
				require.Equal(t, b.Stats().LastErr, seen.all[2].Err)
				require.EqualValues(t, 2, b.Stats().ConsecutiveOpens)
				time.Sleep(20 * time.Second)
				require.NoError(t, do(b, ok), "the place is free")
				require.Equal(t, breaker.Closed, b.State())
			})
		})
	}
}

// There are never more probes at once than permits, and no permit is lost. An ignored probe leaves the breaker
// half-open, so every call is a probe.
func TestBreakerProbesStress(t *testing.T) {
	const (
		workers = 16
		probes  = 2000
		most    = 3
	)
	b := breaker.New(breaker.Config{
		ConsecutiveFailures: 1, Probes: most, OpenFor: time.Hour,
	})
	b.Trip(nil, 1)
	var inFlight, made, tooMany atomic.Int64
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(2, uint64(w)))
			for made.Load() < probes {
				if r.IntN(100) == 0 {
					b.Trip(nil, 10*time.Microsecond)
				}
				ctx, cancel := context.WithCancel(context.Background())
				how := r.IntN(30)
				call := func(context.Context) error {
					made.Add(1)
					defer inFlight.Add(-1)
					if inFlight.Add(1) > most {
						tooMany.Add(1)
					}
					runtime.Gosched()
					switch how {
					case 0:
						cancel()
						return ctx.Err()
					case 1:
						panic("boom")
					case 2:
						return errDown
					case 3:
						runtime.Goexit()
					}
					return refused(true)
				}
				var exit sync.WaitGroup
				switch {
				case how == 3:
					exit.Go(func() { _ = b.Do(ctx, call) })
				case how%2 == 0 && how > 3:
					if done, err := b.Begin(ctx); err == nil {
						done(call(ctx))
					}
				default:
					func() {
						defer func() { _ = recover() }()
						_ = b.Do(ctx, call)
					}()
				}
				exit.Wait()
				cancel()
			}
		})
	}
	wg.Wait()
	require.Zero(t, tooMany.Load())
	require.Zero(t, inFlight.Load())

	b.Trip(nil, 1)
	for b.State() != breaker.HalfOpen {
		runtime.Gosched()
	}
	for range most {
		_, err := b.Begin(t.Context())
		require.NoError(t, err, "every permit came back")
	}
	_, err := b.Begin(t.Context())
	requireRefused(t, err, breaker.HalfOpen)
}

// badError is an error whose method panics.
type badError struct{}

func (badError) Error() string { return "bad" }
func (badError) Timeout() bool { panic("bad error") }

// A panic in a method of an error is a failure of the call, and leaves no permit or lock behind.
func TestErrorMethodPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Second})
		open(t, b)
		time.Sleep(time.Second)
		require.PanicsWithValue(t, "bad error", func() { do(b, returning(badError{})) })
		require.Equal(t, breaker.Open, b.State())
		time.Sleep(time.Second)
		done, err := b.Begin(t.Context())
		require.NoError(t, err)
		require.PanicsWithValue(t, "bad error", func() { done(badError{}) })
		require.NoError(t, do(b, ok), "the permit is there")
		require.Equal(t, breaker.Closed, b.State())
	})
}
