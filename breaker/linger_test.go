package breaker_test

import (
	"context"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/internal/linger"
)

func TestBreakerCountsWorkThatGoesOnWhenItIsOver(t *testing.T) {
	var seen changes
	b := breaker.New(breaker.Config{Failures: 1, OnChange: seen.hook})
	ctx, work := linger.Begin(t.Context())
	goesOn := func(context.Context) error { work.GoOn(); return nil }
	require.NoError(t, b.Do(ctx, goesOn))
	require.Zero(t, b.Stats().Calls)
	work.End(nil)
	require.EqualValues(t, 1, b.Stats().Calls)
	require.Zero(t, b.Stats().Failed)

	ctx, work = linger.Begin(t.Context())
	require.NoError(t, b.Do(ctx, goesOn))
	require.Equal(t, breaker.Closed, b.State())
	work.End(errDown)
	seen.requireChain(t, breaker.Open)
	require.Equal(t, breaker.Open, b.State())
	require.Equal(t, errDown, seen.all[0].Err)

	ctx, work = linger.Begin(t.Context())
	requireRefused(t, b.Do(ctx, goesOn), breaker.Open)
	require.False(t, work.Held())
}

// A policy further out has canceled the ctx that it derived when the body ends.
func TestBreakerCountsWorkThatFailsAfterItsCtx(t *testing.T) {
	for name, c := range map[string]struct {
		end   error
		opens bool
	}{
		"BrokeOff": {errDown, true},
		"TimedOut": {context.DeadlineExceeded, true},
		"Canceled": {context.Canceled, false}, // so it was the caller
	} {
		t.Run(name, func(t *testing.T) {
			b := breaker.New(breaker.Config{Failures: 1})
			ctx, work := linger.Begin(t.Context())
			ctx, cancel := context.WithCancel(ctx)
			require.NoError(t, b.Do(ctx, func(context.Context) error { work.GoOn(); return nil }))
			cancel()
			work.End(c.end)
			require.Equal(t, c.opens, b.State() == breaker.Open)
		})
	}
}

func TestBreakerCountsWorkThatFailsAtOnce(t *testing.T) {
	for name, fn := range map[string]func(work *linger.Work) error{
		"Error":     func(*linger.Work) error { return errDown },
		"ErrorOfIt": func(w *linger.Work) error { w.GoOn(); return errDown },
		"Panic":     func(*linger.Work) error { panic("oops") },
		"PanicOfIt": func(w *linger.Work) error { w.GoOn(); panic("oops") },
	} {
		t.Run(name, func(t *testing.T) {
			b := breaker.New(breaker.Config{Failures: 1})
			ctx, work := linger.Begin(t.Context())
			func() {
				defer func() { _ = recover() }()
				require.Equal(t, errDown, b.Do(ctx, func(context.Context) error { return fn(work) }))
			}()
			require.Equal(t, breaker.Open, b.State())
			work.End(nil)
			require.Equal(t, breaker.Open, b.State())
		})
	}

	b := breaker.New(breaker.Config{Failures: 1})
	ctx, _ := linger.Begin(t.Context())
	require.NoError(t, b.Do(ctx, ok))
	require.EqualValues(t, 1, b.Stats().Calls)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = b.Do(ctx, func(context.Context) error { runtime.Goexit(); return nil })
	}()
	<-done
	require.EqualValues(t, 1, b.Stats().Calls, "nothing is known of it")
}

func TestBreakerProbesUntilTheWorkIsOver(t *testing.T) {
	for _, end := range []error{nil, errDown} {
		synctest.Test(t, func(t *testing.T) {
			b := breaker.New(steady(breaker.Config{Failures: 1, OpenFor: time.Second}))
			open(t, b)
			time.Sleep(time.Second)
			ctx, work := linger.Begin(t.Context())
			require.NoError(t, b.Do(ctx, func(context.Context) error { work.GoOn(); return nil }))
			requireRefused(t, do(b, ok), breaker.HalfOpen)
			work.End(end)
			require.Equal(t, end == nil, b.State() == breaker.Closed)
			require.Equal(t, end != nil, b.State() == breaker.Open)
		})
	}
}

func TestBreakerFindsWorkSlowThatGoesOnForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{SlowAfter: time.Second, SlowRate: 0.5, MinCalls: 1})
		ctx, work := linger.Begin(t.Context())
		require.NoError(t, b.Do(ctx, func(context.Context) error { work.GoOn(); return nil }))
		time.Sleep(time.Second)
		work.End(nil)
		require.Equal(t, breaker.Open, b.State())
	})
}

func TestGroupKeepsABreakerWhoseWorkGoesOn(t *testing.T) {
	g := breaker.NewGroup(breaker.GroupConfig[int]{Config: breaker.Config{Failures: 1}, MaxKeys: 1})
	ctx, work := linger.Begin(t.Context())
	require.NoError(t, g.Do(ctx, 1, func(context.Context) error { work.GoOn(); return nil }))
	require.NoError(t, g.Do(t.Context(), 2, ok))
	require.Equal(t, []int{1}, keysOf(g))
	work.End(errDown)
	requireRefused(t, g.Do(t.Context(), 1, ok), breaker.Open)
}
