// The tests in this file look inside: from outside they would take luck.

package breaker

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// A straggler has found the breaker closed, and comes to gobreaker only when that
// is half-open. It is not let through; for a moment it takes gobreaker's permit,
// and the result of a probe must not be lost over that.
func TestProbeIsReportedThoughAStragglerIsInItsWay(t *testing.T) {
	for _, result := range []error{nil, &verdict{err: errors.New("down"), failed: true}} {
		b := New(Config{OpenFor: time.Hour})
		b.Trip(nil, 1)
		for b.State() != HalfOpen {
			runtime.Gosched()
		}
		p := b.phase.Load()
		permit, ok := b.take(p, b.now())
		require.True(t, ok)

		var wg sync.WaitGroup
		there, leave := make(chan struct{}), make(chan struct{})
		wg.Go(func() {
			_, _ = p.circuit.gb.Execute(func() (error, error) {
				close(there)
				<-leave
				return nil, errMoved
			})
		})
		<-there
		wg.Go(func() { b.settle(p, permit, result) })
		for range 10_000 {
			runtime.Gosched()
		}
		require.Equal(t, HalfOpen, b.State())
		close(leave)
		wg.Wait()
		if result == nil {
			require.Equal(t, Closed, b.State())
		} else {
			require.Equal(t, Open, b.State())
		}
	}
}

// One that comes after OpenFor, but before the end of a longer open phase, does not
// make that shorter.
func TestStragglerDoesNotShortenALongOpenPhase(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := New(Config{Failures: 1, OpenFor: time.Second, Jitter: -1, Classify: func(error) Outcome { return Trip(time.Hour) }})
		c := b.phase.Load().circuit
		_ = b.Do(t.Context(), func(context.Context) error { return errors.New("down") })
		time.Sleep(time.Second)
		require.Equal(t, Open, b.State())
		c.look()
		err := b.Do(t.Context(), nil)
		require.ErrorIs(t, err, ErrOpen)
		require.Equal(t, time.Hour-time.Second, err.(*OpenError).RetryAfter())
		time.Sleep(time.Hour - time.Second)
		require.NoError(t, b.Do(t.Context(), func(context.Context) error { return nil }))
		require.Equal(t, Closed, b.State())
	})
}

// A stuck window keeps gobreaker's lock until it is let go.
type stuckWindow struct{ there, leave chan struct{} }

func (w stuckWindow) add(failed, slow bool) {}

func (w stuckWindow) counts() Counts {
	close(w.there)
	<-w.leave
	return Counts{}
}

// A call is refused while somebody else holds both locks.
func TestRefusalTakesNoLock(t *testing.T) {
	b := New(Config{})
	b.ForceOpen(nil)
	c := b.phase.Load().circuit
	stuck := stuckWindow{make(chan struct{}), make(chan struct{})}
	c.window = stuck
	var wg sync.WaitGroup
	wg.Go(func() { c.look() })
	<-stuck.there
	b.mu.Lock()
	require.ErrorIs(t, b.Do(t.Context(), nil), ErrOpen)
	b.mu.Unlock()
	close(stuck.leave)
	wg.Wait()
}
