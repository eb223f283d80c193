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
	"github.com/go-resilience/resilience/internal/linger"
)

func TestTotals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(steady(breaker.Config{Failures: 3, SlowAfter: time.Second}))
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
		want := breaker.Totals{Succeeded: 2, Failed: 3, Ignored: 2, Slow: 2}
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

func TestTotalsCountACallThatBreaksOffTwice(t *testing.T) {
	b := breaker.New(breaker.Config{})
	goesOn(t, b, t.Context()).End(errDown)
	goesOn(t, b, t.Context()).End(nil)
	require.Equal(t, breaker.Totals{Succeeded: 2, Failed: 1}, b.Stats().Totals)
}

func TestTotalsDoNotCountPings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(pinged(ok, new(changes)))
		do(b, down)
		time.Sleep(time.Second)
		synctest.Wait()
		require.Equal(t, breaker.Totals{Failed: 1, Opened: 1, HalfOpened: 1, Closed: 1}, b.Stats().Totals)
	})
}

func TestTotalsCountAProbeThatTookTooLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(steady(breaker.Config{Failures: 1, OpenFor: time.Second, MaxHalfOpen: time.Second}))
		open(t, b)
		time.Sleep(time.Second)
		do(b, taking(time.Second, nil))
		require.Equal(t, breaker.Totals{Succeeded: 1, Failed: 1, Opened: 2, HalfOpened: 1}, b.Stats().Totals)
	})
}

// Stats never shows an empty window because a result has opened the breaker meanwhile.
func TestStatsWhileTheBreakerOpens(t *testing.T) {
	for range 3000 {
		b := breaker.New(breaker.Config{})
		for range 3 {
			do(b, ok)
		}
		var wg sync.WaitGroup
		wg.Go(func() { do(b, returning(throttled(time.Hour))) })
		for b.Stats().State == breaker.Closed {
			require.GreaterOrEqual(t, b.Stats().Window.Calls, int64(3))
			runtime.Gosched() // one processor would spend 10 ms here otherwise
		}
		wg.Wait()
	}
}

func TestGroupStats(t *testing.T) {
	g := breaker.NewGroup(breaker.GroupConfig[int]{MaxKeys: 3, Config: breaker.Config{Failures: 1, OpenFor: time.Hour}})
	ctx := t.Context()
	require.Equal(t, breaker.GroupStats{States: map[breaker.State]int{}}, g.Stats())
	_ = g.Do(ctx, 1, down)
	_ = g.Do(ctx, 1, ok)
	_ = g.Do(ctx, 2, ok)
	g.With(3, func(b *breaker.Breaker) { b.ForceOpen(nil) })
	want := breaker.GroupStats{
		Totals: breaker.Totals{Succeeded: 1, Failed: 1, Refused: 1, Opened: 1, ForcedOpen: 1},
		Keys:   3,
		States: map[breaker.State]int{breaker.Closed: 1, breaker.Open: 1, breaker.ForcedOpen: 1},
	}
	require.Equal(t, want, g.Stats())

	require.NoError(t, g.Do(ctx, 4, ok)) // takes the place of key 2
	want.Succeeded++
	require.Equal(t, want, g.Stats(), "what key 2 has counted is kept")
	require.True(t, g.With(4, func(b *breaker.Breaker) { b.Disable() }))
	_ = g.Do(ctx, 5, down) // the shared breaker
	want.Disabled, want.Failed, want.Opened = 1, 2, 2
	want.States = map[breaker.State]int{breaker.Open: 1, breaker.ForcedOpen: 1, breaker.Disabled: 1}
	require.Equal(t, want, g.Stats())
}

// Stats of a group does not move its breakers on.
func TestGroupStatsOfAnOpenTimeThatHasPassed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen changes
		g := breaker.NewGroup(breaker.GroupConfig[int]{Config: steady(breaker.Config{Failures: 1, OpenFor: time.Second, OnChange: seen.hook})})
		_ = g.Do(t.Context(), 1, down)
		time.Sleep(time.Second)
		require.Equal(t, map[breaker.State]int{breaker.HalfOpen: 1}, g.Stats().States)
		require.Len(t, seen.all, 1)
	})
}

// A breaker that the group has forgotten is summed as it was then.
func TestGroupStatsWithoutWhatBreaksOffLater(t *testing.T) {
	g := breaker.NewGroup(breaker.GroupConfig[int]{MaxKeys: 1})
	ctx, work := linger.Begin(t.Context())
	require.NoError(t, g.Do(ctx, 1, func(context.Context) error { work.GoOn(); return nil }))
	require.NoError(t, g.Do(t.Context(), 2, ok))
	work.End(errDown)
	require.Equal(t, breaker.Totals{Succeeded: 2}, g.Stats().Totals)
}

func TestGroupStatsSumEachTotal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := breaker.NewGroup(breaker.GroupConfig[int]{MaxKeys: 1, Config: steady(breaker.Config{Failures: 1, OpenFor: time.Second, SlowAfter: time.Second})})
		for key := range 2 { // the second takes the place of the first
			require.True(t, g.With(key, func(b *breaker.Breaker) {
				do(b, down)
				do(b, ok)
				time.Sleep(time.Second)
				do(b, taking(time.Second, nil))
				do(b, returning(refused(true)))
				b.ForceOpen(nil)
				b.Disable()
				b.Enable()
			}))
			n := int64(key) + 1
			require.Equal(t, breaker.Totals{
				Succeeded: n, Failed: n, Ignored: n, Refused: n, Slow: n,
				Opened: n, HalfOpened: n, Closed: 2 * n, ForcedOpen: n, Disabled: n,
			}, g.Stats().Totals)
		}
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

// FailedInARow of an open breaker counts its probes too.
func TestStatsCountFailuresInARowOfProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(steady(breaker.Config{Failures: 3, OpenFor: time.Second, Successes: 2, SlowAfter: time.Second, SlowRate: 1, MinCalls: 100, WindowCalls: 100}))
		for range 3 {
			do(b, down)
		}
		for _, probe := range []struct {
			of  []func(context.Context) error
			row int64
		}{
			{[]func(context.Context) error{down}, 4},
			{[]func(context.Context) error{ok, down}, 1},
			{[]func(context.Context) error{down}, 2},
			{[]func(context.Context) error{taking(time.Second, nil)}, 0},
		} {
			time.Sleep(b.Stats().OpenLeft)
			for _, fn := range probe.of {
				do(b, fn)
			}
			require.Equal(t, breaker.Open, b.State())
			require.Equal(t, probe.row, b.Stats().Window.FailedInARow)
		}
	})
}
