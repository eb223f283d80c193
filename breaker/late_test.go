package breaker_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
)

// A result counts only if its call began in the same generation.
func TestEarlierCallsChangeNothing(t *testing.T) {
	late := map[string]error{"success": nil, "failure": errDown, "retry after": throttled(time.Hour)}
	for name, between := range map[string]func(b *breaker.Breaker){
		"reset":  func(b *breaker.Breaker) { b.Reset() },
		"trip":   func(b *breaker.Breaker) { b.Trip(errDown, time.Second) },
		"force":  func(b *breaker.Breaker) { b.ForceOpen(nil) },
		"forced": func(b *breaker.Breaker) { b.ForceOpen(nil); b.Enable() },
		"enable": func(b *breaker.Breaker) { b.Disable(); b.Enable() },
		"open":   func(b *breaker.Breaker) { do(b, down) },
		"half-open": func(b *breaker.Breaker) {
			do(b, down)
			time.Sleep(time.Second)
			b.State()
		},
		"tripped, half-open": func(b *breaker.Breaker) {
			b.Trip(errDown, time.Second)
			time.Sleep(time.Second)
			b.State()
		},
		"close": func(b *breaker.Breaker) {
			do(b, down)
			time.Sleep(time.Second)
			do(b, ok)
			do(b, ok)
		},
		"reopened": func(b *breaker.Breaker) {
			do(b, down)
			time.Sleep(time.Second)
			do(b, down)
			time.Sleep(time.Second)
			b.State()
		},
	} {
		for result, err := range late {
			t.Run(name+", then "+result, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := breaker.New(breaker.Config{ConsecutiveFailures: 1, Probes: 2, OpenFor: time.Second})
					hanging := make(chan struct{})
					go do(b, func(context.Context) error { <-hanging; return err })
					done, refused := b.Begin(t.Context())
					require.NoError(t, refused)
					synctest.Wait()
					between(b)
					before := untotaled(b)
					close(hanging)
					synctest.Wait()
					require.Equal(t, before, untotaled(b))
					done(err)
					require.Equal(t, before, untotaled(b))
				})
			})
		}
	}
}

// A probe that takes ProbeTimeout opens the breaker. If it succeeds all the same, the breaker closes.
func TestOverdueProbe(t *testing.T) {
	for _, late := range []error{nil, answered(true), errDown, throttled(time.Hour), refused(true)} {
		synctest.Test(t, func(t *testing.T) {
			var seen changes
			b := watched(&seen, breaker.Config{
				ConsecutiveFailures: 1, OpenFor: 10 * time.Second, ProbeTimeout: 3 * time.Second, MaxOpenFor: time.Minute,
			})
			open(t, b)
			time.Sleep(10 * time.Second)
			over := make(chan error)
			go func() { over <- do(b, taking(4*time.Second, late)) }()
			synctest.Wait()
			time.Sleep(3*time.Second - 1)
			require.Equal(t, breaker.HalfOpen, b.State())
			time.Sleep(time.Nanosecond)
			require.Equal(t, breaker.Open, b.State())
			require.Equal(t, 20*time.Second, b.Stats().OpenLeft)
			require.EqualError(t, b.Stats().LastErr, "breaker: probe did not return within ProbeTimeout")
			require.EqualValues(t, 2, b.Stats().Window.ConsecutiveFailures)
			before := untotaled(b)
			require.Equal(t, late, <-over)
			if breaker.DefaultClassify(late) == breaker.Success {
				require.Equal(t, breaker.Closed, b.State())
				require.Equal(t, breaker.Counts{}, b.Stats().Window)
				require.Equal(t, 2, b.Stats().ConsecutiveOpens)
				seen.requireChain(t, breaker.Closed)
				return
			}
			before.OpenLeft -= time.Second
			require.Equal(t, before, untotaled(b), "a late failure changes nothing")
		})
	}
}

// A probe whose stream continues when another one is overdue counts for nothing.
func TestOverdueProbeBesideAStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{ConsecutiveFailures: 3, OpenFor: time.Second, Probes: 2})
		for range 3 {
			beginStream(t, b, t.Context()).End(errDown)
		}
		time.Sleep(time.Second)
		_, err := b.Begin(t.Context())
		require.NoError(t, err)
		work := beginStream(t, b, t.Context())
		time.Sleep(time.Second) // the first is overdue, and the stream has lasted
		require.Equal(t, breaker.Open, b.State())
		require.EqualValues(t, 3, b.Stats().Window.ConsecutiveFailures)
		work.End(nil)
		require.EqualValues(t, 3, b.Stats().Window.ConsecutiveFailures)
	})
}

// A host whose answers take longer than ProbeTimeout is closed again, however few probes there are at once.
func TestSlowHostIsClosedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{OpenFor: 900 * time.Millisecond, Probes: 1})
		for range 5 {
			_ = do(b, down)
		}
		began := time.Now()
		for b.State() != breaker.Closed && time.Since(began) < 3*time.Second {
			go do(b, taking(2*time.Second, nil))
			time.Sleep(50 * time.Millisecond)
		}
		require.Equal(t, breaker.Closed, b.State())
		time.Sleep(time.Minute)
	})
}
