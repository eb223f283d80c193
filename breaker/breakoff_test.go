package breaker_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/internal/linger"
)

// goesOn makes a call whose work goes on after it has returned, like that of a response.
func goesOn(t *testing.T, b *breaker.Breaker, ctx context.Context) *linger.Work {
	t.Helper()
	ctx, work := linger.Begin(ctx)
	require.NoError(t, b.Do(ctx, func(context.Context) error { work.GoOn(); return nil }))
	return work
}

func TestBreakerCountsASuccessWhenTheCallReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{SlowAfter: time.Second, SlowRate: 0.5, MinCalls: 1})
		work := goesOn(t, b, t.Context())
		require.Equal(t, breaker.Counts{Calls: 1, Succeeded: 1}, b.Stats().Window)
		time.Sleep(time.Hour) // the reader is slow
		work.End(nil)
		require.Equal(t, breaker.Counts{}, b.Stats().Window, "the hour has passed, and nothing was added")
		require.Equal(t, breaker.Closed, b.State())
	})
}

func TestBreakerCountsABreakingOffAsOneMoreFailure(t *testing.T) {
	var seen changes
	b := breaker.New(breaker.Config{Failures: 2, OnChange: seen.hook})
	goesOn(t, b, t.Context()).End(errDown)
	require.Equal(t, breaker.Counts{Calls: 2, Succeeded: 1, Failed: 1, FailedInARow: 1}, b.Stats().Window)
	require.NoError(t, do(b, ok))

	first, second := goesOn(t, b, t.Context()), goesOn(t, b, t.Context())
	first.End(errDown)
	second.End(errDown)
	require.Equal(t, breaker.Open, b.State())
	require.Equal(t, errDown, b.Stats().LastErr)
	seen.requireChain(t, breaker.Open)
}

// A success whose work goes on ends a row of failures when the work has ended well.
func TestBreakerOpensForCallsThatAllBreakOff(t *testing.T) {
	b := breaker.New(breaker.Config{Failures: 3})
	goesOn(t, b, t.Context()).End(errDown)
	do(b, down)
	require.EqualValues(t, 2, b.Stats().Window.FailedInARow)
	goesOn(t, b, t.Context()).End(errDown)
	require.Equal(t, breaker.Open, b.State())

	b = breaker.New(breaker.Config{Failures: 5})
	do(b, down)
	do(b, down)
	first := goesOn(t, b, t.Context())
	do(b, down)
	second := goesOn(t, b, t.Context())
	first.End(errDown)
	require.EqualValues(t, 4, b.Stats().Window.FailedInARow, "the second has not ended")
	second.End(errDown)
	require.Equal(t, breaker.Open, b.State())

	b = breaker.New(breaker.Config{Failures: 3})
	do(b, down)
	third := goesOn(t, b, t.Context())
	require.NoError(t, do(b, ok))
	third.End(errDown)
	require.EqualValues(t, 1, b.Stats().Window.FailedInARow)

	fourth, fifth := goesOn(t, b, t.Context()), goesOn(t, b, t.Context())
	require.EqualValues(t, 1, b.Stats().Window.FailedInARow)
	fourth.End(nil)
	require.Zero(t, b.Stats().Window.FailedInARow)
	do(b, down)
	b.Reset()
	do(b, down)
	fifth.End(nil)
	require.EqualValues(t, 1, b.Stats().Window.FailedInARow, "it belongs to the phase before")
}

func TestBreakerWithWorkThatGoesOnWell(t *testing.T) {
	asked := 0
	b := breaker.New(breaker.Config{FailureRate: 0.5, MinCalls: 2, OpenWhen: func(breaker.Counts) bool { asked++; return false }})
	do(b, down)
	goesOn(t, b, t.Context()).End(nil)
	require.Equal(t, breaker.Closed, b.State(), "half of the calls have failed, and a success never opens it")
	require.Equal(t, 1, asked)
}

// A call that breaks off counts for the phase in which it began.
func TestBreakerIgnoresABreakingOffFromBefore(t *testing.T) {
	b := breaker.New(breaker.Config{Failures: 1})
	work := goesOn(t, b, t.Context())
	b.Reset()
	work.End(errDown)
	require.Equal(t, breaker.Closed, b.State())
	require.Zero(t, b.Stats().Window)
}

func TestBreakerReadsABreakingOff(t *testing.T) {
	for name, test := range map[string]struct {
		err      error
		patience time.Duration
		after    time.Duration // it breaks off; the deadline is at 10 s
		want     breaker.State
	}{
		"before the deadline":          {errDown, 0, time.Second, breaker.Open},
		"at the deadline":              {context.DeadlineExceeded, 0, 10 * time.Second, breaker.Open},
		"at the deadline, impatiently": {context.DeadlineExceeded, time.Minute, 10 * time.Second, breaker.Closed},
		"a timeout within":             {context.DeadlineExceeded, time.Minute, time.Second, breaker.Open},
		"retry after":                  {throttled(time.Second), 0, time.Second, breaker.Open},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := breaker.New(steady(breaker.Config{Failures: 1, Patience: test.patience}))
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				within, cancelWithin := context.WithCancel(ctx)
				work := goesOn(t, b, within)
				cancelWithin() // a policy further out has returned
				time.Sleep(test.after)
				work.End(test.err)
				require.Equal(t, test.want, b.State())
			})
		})
	}
}

// Classify may excuse a call that breaks off. It is not counted as a second success.
func TestBreakerAsksClassifyAboutABreakingOff(t *testing.T) {
	for _, outcome := range []breaker.Outcome{breaker.Success, breaker.Ignore} {
		b := breaker.New(breaker.Config{Failures: 1, Classify: func(error) breaker.Outcome { return outcome }})
		goesOn(t, b, t.Context()).End(errDown)
		require.Equal(t, breaker.Counts{Calls: 1, Succeeded: 1}, b.Stats().Window, outcome)
	}
}

func TestBreakerCountsWorkThatFailsAtOnce(t *testing.T) {
	for name, fn := range map[string]func(work *linger.Work) error{
		"error":             func(*linger.Work) error { return errDown },
		"error of the work": func(w *linger.Work) error { w.GoOn(); return errDown },
		"panic":             func(*linger.Work) error { panic("oops") },
		"panic of the work": func(w *linger.Work) error { w.GoOn(); panic("oops") },
	} {
		t.Run(name, func(t *testing.T) {
			b := breaker.New(breaker.Config{Failures: 2})
			ctx, work := linger.Begin(t.Context())
			func() {
				defer func() { _ = recover() }()
				require.Equal(t, errDown, b.Do(ctx, func(context.Context) error { return fn(work) }))
			}()
			work.End(errDown)
			require.Equal(t, breaker.Counts{Calls: 1, Failed: 1, FailedInARow: 1}, b.Stats().Window, "once")
		})
	}
}

// A probe succeeds when it returns. If it breaks off while the breaker is still half-open,
// it fails.
func TestBreakerProbesSucceedWhenTheyReturn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(steady(breaker.Config{Failures: 1, OpenFor: time.Second, Successes: 2}))
		open(t, b)
		time.Sleep(time.Second)
		goesOn(t, b, t.Context()).End(errDown)
		require.Equal(t, breaker.Open, b.State())

		time.Sleep(time.Second)
		work := goesOn(t, b, t.Context())
		require.Equal(t, breaker.HalfOpen, b.State())
		require.NoError(t, do(b, ok), "the first has given its permit back")
		require.Equal(t, breaker.Closed, b.State())
		work.End(errDown)
		require.Equal(t, breaker.Closed, b.State(), "it belongs to the phase before")
	})
}

func TestGroupForgetsABreakerWhoseCallsHaveReturned(t *testing.T) {
	g := breaker.NewGroup(breaker.GroupConfig[int]{Config: breaker.Config{Failures: 1}, MaxKeys: 1})
	ctx, work := linger.Begin(t.Context())
	require.NoError(t, g.Do(ctx, 1, func(context.Context) error { work.GoOn(); return nil }))
	require.NoError(t, g.Do(t.Context(), 2, ok))
	require.Equal(t, []int{2}, keysOf(g))
	work.End(errDown)
	require.NoError(t, g.Do(t.Context(), 1, ok))
}

func TestBreakerGoesOnWithARowWhenWorkEndsWithARefusal(t *testing.T) {
	b := breaker.New(breaker.Config{})
	work := goesOn(t, b, t.Context())
	do(b, down)
	work.End(refused(true))
	require.EqualValues(t, 1, b.Stats().Window.FailedInARow)
}

func TestBreakerReadsARefusalAfterTheDeadlineAsOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Patience: time.Millisecond})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		work := goesOn(t, b, ctx)
		time.Sleep(time.Second)
		work.End(refused(true))
		require.EqualValues(t, 0, b.Stats().Window.Failed)
	})
}
