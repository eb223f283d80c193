package breaker_test

import (
	"context"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
)

func TestTotals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Failures: 5, SlowAfter: time.Second})
		require.Zero(t, b.Stats().Totals)
		do(b, ok)
		do(b, down)
		do(b, taking(time.Second, nil))
		do(b, taking(time.Second, errDown))
		do(b, returning(refused(true)))
		require.Panics(t, func() { do(b, func(context.Context) error { panic("boom") }) })
		var wg sync.WaitGroup
		wg.Go(func() { do(b, func(context.Context) error { runtime.Goexit(); return nil }) })
		wg.Wait()
		want := breaker.Totals{Succeeded: 1, Failed: 4, Ignored: 2}
		require.Equal(t, want, b.Stats().Totals)

		hanging, err := b.Begin(t.Context())
		require.NoError(t, err)
		b.Reset()
		want.Closed = 0 // it was closed
		require.Equal(t, want, b.Stats().Totals)
		hanging(nil)
		hanging(nil)
		want.Succeeded++
		require.Equal(t, want, b.Stats().Totals, "a result of an earlier period")

		b.Trip(nil, time.Second)
		do(b, ok)
		do(b, ok)
		time.Sleep(time.Second)
		do(b, ok)
		b.ForceOpen(nil)
		do(b, ok)
		b.Disable()
		do(b, down)
		b.Enable()
		want.Refused, want.Succeeded, want.Failed = 3, want.Succeeded+1, want.Failed+1
		want.Opened, want.HalfOpened, want.Closed, want.ForcedOpen, want.Disabled = 1, 1, 2, 1, 1
		require.Equal(t, want, b.Stats().Totals)

		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_ = b.Do(ctx, ok)
		require.Equal(t, want, b.Stats().Totals, "a call whose ctx has ended is no call")
	})
}

func TestStatsHaveTheLastError(t *testing.T) {
	b := breaker.New(breaker.Config{})
	do(b, down)
	do(b, ok)
	require.Equal(t, errDown, b.Stats().LastErr)
	b.Disable()
	require.Equal(t, errDown, b.Stats().LastErr)
}

// A breaker describes itself.
func TestBreakerDescribesItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Name: "users", Failures: 1, Classify: breaker.DefaultClassify})
		require.Equal(t, []string{"breaker", "users"}, []string{b.Kind(), b.Name()})
		require.NoError(t, b.Health())
		require.False(t, b.Needed())
		do(b, ok)
		do(b, returning(refused(true)))
		open(t, b)
		do(b, ok)
		time.Sleep(10 * time.Second)
		figures := map[string]float64{}
		counters := 0
		for _, f := range b.Figures() {
			require.NotContains(t, figures, f.Name)
			figures[f.Name] = f.Value
			if f.Counter {
				counters++
			}
		}
		require.Equal(t, map[string]float64{
			"breaker.calls{outcome=success}": 1, "breaker.calls{outcome=failure}": 1,
			"breaker.calls{outcome=ignored}": 1, "breaker.calls{outcome=refused}": 1,
			"breaker.transitions{state=closed}": 0, "breaker.transitions{state=half_open}": 0, "breaker.transitions{state=open}": 1,
			"breaker.transitions{state=forced_open}": 0, "breaker.transitions{state=disabled}": 0,
			"breaker.state{state=closed}": 0, "breaker.state{state=half_open}": 0, "breaker.state{state=open}": 1,
			"breaker.state{state=forced_open}": 0, "breaker.state{state=disabled}": 0,
			"breaker.failure_ratio": 0.5,
		}, figures)
		require.Equal(t, 9, counters)
		require.True(t, b.Needed())
		require.ErrorIs(t, b.Health(), errDown)
		require.EqualError(t, b.Health(), "open: down")
		time.Sleep(20 * time.Second)
		require.False(t, b.Needed(), "its time has passed, and without calls it would stay half-open forever")
		requireHealth(t, b, "half-open", false)
		b.Trip(nil, time.Hour)
		b.Reset()
		require.False(t, b.Needed(), "it is closed, whenever it was to open")
		b.Trip(nil, time.Second)
		require.EqualError(t, b.Health(), "open")
		requireHealth(t, b, "open", true)
		b.ForceOpen(nil)
		require.True(t, b.Needed())
		requireHealth(t, b, "forced open", true)
		b.Disable()
		require.True(t, b.Needed())
		requireHealth(t, b, "disabled", false)

		settings := b.Settings().(breaker.Config)
		require.Nil(t, settings.Classify)
		want := b.Config()
		require.NotNil(t, want.Classify)
		want.Classify = nil
		require.Equal(t, want, settings)
	})
}

func requireHealth(t *testing.T, b *breaker.Breaker, state string, failed bool) {
	t.Helper()
	health := b.Health().(interface {
		HealthState() string
		Failed() bool
	})
	require.Equal(t, state, health.HealthState())
	require.Equal(t, failed, health.Failed())
}
