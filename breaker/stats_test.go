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
	"github.com/go-resilience/resilience/policy"
)

func TestTotals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{ConsecutiveFailures: 5, SlowAfter: time.Second})
		want := totals{Transitions: map[breaker.State]int64{
			breaker.Closed: 0, breaker.HalfOpen: 0, breaker.Open: 0, breaker.ForcedOpen: 0, breaker.Disabled: 0,
		}}
		require.Equal(t, want, totalsOf(b.Stats()))
		do(b, ok)
		do(b, down)
		do(b, taking(time.Second, nil))
		do(b, taking(time.Second, errDown))
		do(b, returning(refused(true)))
		require.Panics(t, func() { do(b, func(context.Context) error { panic("boom") }) })
		var wg sync.WaitGroup
		wg.Go(func() { do(b, func(context.Context) error { runtime.Goexit(); return nil }) })
		wg.Wait()
		want.Succeeded, want.Failed, want.Ignored = 1, 4, 2
		require.Equal(t, want, totalsOf(b.Stats()))

		hanging, err := b.Begin(t.Context())
		require.NoError(t, err)
		b.Reset()
		require.Equal(t, want, totalsOf(b.Stats()))
		hanging(nil)
		hanging(nil)
		want.Succeeded++
		require.Equal(t, want, totalsOf(b.Stats()), "a result of an earlier period")

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
		want.Transitions = map[breaker.State]int64{
			breaker.Open: 1, breaker.HalfOpen: 1, breaker.Closed: 2, breaker.ForcedOpen: 1, breaker.Disabled: 1,
		}
		require.Equal(t, want, totalsOf(b.Stats()))

		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_ = b.Do(ctx, ok)
		require.Equal(t, want, totalsOf(b.Stats()), "a call whose ctx has ended is no call")
	})
}

func TestStatsLastErr(t *testing.T) {
	b := breaker.New(breaker.Config{})
	do(b, down)
	do(b, ok)
	require.Equal(t, errDown, b.Stats().LastErr)
	b.Disable()
	require.Equal(t, errDown, b.Stats().LastErr)
	b.Enable()
	require.NoError(t, b.Stats().LastErr)
}

var _ policy.Describer = (*breaker.Breaker)(nil)

func TestDescribe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Name: "users", ConsecutiveFailures: 1})
		d := b.Describe()
		require.Equal(t, []string{"breaker", "users"}, []string{d.Kind, d.Name})
		require.False(t, d.InUse())
		require.Nil(t, d.Members)
		require.Equal(t, b.Config(), d.Config())
		do(b, ok)
		do(b, returning(refused(true)))
		open(t, b)
		do(b, ok)
		time.Sleep(10 * time.Second)
		metrics := map[string]float64{}
		counters := 0
		for _, m := range d.Metrics() {
			require.NotContains(t, metrics, m.Name)
			metrics[m.Name] = m.Value
			if m.Counter {
				counters++
			}
		}
		require.Equal(t, map[string]float64{
			"breaker.calls{outcome=success}": 1, "breaker.calls{outcome=failure}": 1,
			"breaker.calls{outcome=ignored}": 1, "breaker.calls{outcome=refused}": 1,
			"breaker.transitions{state=closed}": 0, "breaker.transitions{state=half_open}": 0,
			"breaker.transitions{state=open}": 1, "breaker.transitions{state=forced_open}": 0,
			"breaker.transitions{state=disabled}": 0,
			"breaker.state{state=closed}":         0, "breaker.state{state=half_open}": 0, "breaker.state{state=open}": 1,
			"breaker.state{state=forced_open}": 0, "breaker.state{state=disabled}": 0,
			"breaker.failure_ratio": 0.5,
		}, metrics)
		require.Equal(t, 9, counters)
	})
}

func TestDescribeHealthAndUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: 20 * time.Second})
		d := b.Describe()
		for _, step := range []struct {
			do    func()
			want  policy.Health
			inUse bool
		}{
			{func() {}, policy.Health{}, false},
			{func() { open(t, b) }, policy.Health{Status: policy.Fail, State: "open", Err: errDown}, true},
			// Without calls it would stay half-open forever.
			{func() { time.Sleep(20 * time.Second) }, policy.Health{Status: policy.Warn, State: "half_open", Err: errDown},
				false},
			{func() { b.Trip(nil, time.Second) }, policy.Health{Status: policy.Fail, State: "open"}, true},
			{b.Reset, policy.Health{}, false},
			{func() { b.ForceOpen(errDown) }, policy.Health{Status: policy.Fail, State: "forced_open", Err: errDown}, true},
			{b.Disable, policy.Health{Status: policy.Warn, State: "disabled", Err: errDown}, true},
			{b.Enable, policy.Health{}, false},
		} {
			step.do()
			inUse := d.InUse() // first: Health may notice that a time has passed
			require.Equal(t, step.want, d.Health(t.Context()))
			require.Equal(t, step.inUse, inUse, step.want.State)
		}
	})
}
