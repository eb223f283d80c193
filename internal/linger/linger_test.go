package linger_test

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/linger"
)

var (
	errBroke   = errors.New("the body broke off")
	errCrashed = errors.New("crashed")
)

// hold calls f at the end of work that continues.
func hold(t *testing.T, work *linger.Work, f func()) {
	t.Helper()
	require.NoError(t, work.Hold(t.Context(), func(context.Context) error { return nil }, func(error) { f() }, nil))
}

func TestCallWithoutWorkEndsWithItsFunction(t *testing.T) {
	work := linger.WorkOf(t.Context())
	require.Nil(t, work)
	require.False(t, work.OnEnd(func(error) { t.Error("called") }))
	var ends []error
	require.Equal(t, errBroke, work.Hold(t.Context(), func(context.Context) error { return errBroke },
		func(err error) { ends = append(ends, err) }, errCrashed))
	require.Equal(t, []error{errBroke}, ends)
}

// ways are the ways in which a policy's function can end.
var ways = map[string]struct {
	fn   func(*linger.Work) error
	held bool  // until the work ends
	end  error // what Hold reports
}{
	"Succeeds":           {func(*linger.Work) error { return nil }, false, nil},
	"Fails":              {func(*linger.Work) error { return errBroke }, false, errBroke},
	"Continues":          {func(w *linger.Work) error { w.Continue(); return nil }, true, errBroke},
	"ContinuesAndFails":  {func(w *linger.Work) error { w.Continue(); return errBroke }, false, errBroke},
	"Panics":             {func(*linger.Work) error { panic(errBroke) }, false, errCrashed},
	"ContinuesAndPanics": {func(w *linger.Work) error { w.Continue(); panic(errBroke) }, false, errCrashed},
	"Exits":              {func(*linger.Work) error { runtime.Goexit(); return nil }, false, errCrashed},
}

// apart runs f on a separate goroutine, whose panic is lost.
func apart(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() { _ = recover() }()
		f()
	}()
	<-done
}

func TestHoldCallsEndOnce(t *testing.T) {
	for name, c := range ways {
		t.Run(name, func(t *testing.T) {
			ctx, work := linger.Begin(t.Context())
			require.Same(t, work, linger.WorkOf(ctx))
			var ends []error
			apart(func() {
				_ = work.Hold(ctx, func(in context.Context) error { require.Equal(t, ctx, in); return c.fn(work) },
					func(err error) { ends = append(ends, err) }, errCrashed)
			})
			require.Equal(t, c.held, work.Held())
			require.Equal(t, c.held, len(ends) == 0)
			work.End(errBroke)
			work.End(errBroke)
			require.Equal(t, []error{c.end}, ends)
		})
	}
}

func TestObserveCallsEndOnce(t *testing.T) {
	for name, c := range ways {
		for _, ctx := range []context.Context{t.Context(), streamCtx{t.Context()}} {
			ctx, work := linger.Begin(ctx)
			ends := 0
			apart(func() {
				_ = work.Observe(ctx, func(context.Context) error { return c.fn(work) }, func(error) { ends++ })
			})
			require.Equal(t, c.held, ends == 0, name)
			work.End(nil)
			require.Equal(t, 1, ends, name)
		}
	}
	ends := 0
	var none *linger.Work
	require.NoError(t, none.Observe(t.Context(), func(context.Context) error { return nil }, func(error) { ends++ }))
	require.Equal(t, 1, ends)
}

func TestEndCallsInnerPoliciesFirst(t *testing.T) {
	_, work := linger.Begin(t.Context())
	work.Continue()
	var ends []string
	for _, name := range []string{"inner", "outer"} {
		hold(t, work, func() { ends = append(ends, name) })
	}
	work.End(nil)
	require.Equal(t, []string{"inner", "outer"}, ends)
	work.End(nil)
	require.Len(t, ends, 2, "it ends once")
	hold(t, work, func() { ends = append(ends, "late") })
	require.Equal(t, []string{"inner", "outer", "late"}, ends, "the end is now")
}

// A streamCtx is a ctx whose work is a stream: it is observed, but holds nothing.
type streamCtx struct{ context.Context }

func (streamCtx) OnAnswer(f func()) { f() }

func TestOnEndIsCalledAtTheEnd(t *testing.T) {
	for name, c := range map[string]struct {
		stream bool
		end    error
	}{
		"BreaksOff":       {false, errBroke},
		"EndsWell":        {false, nil},
		"StreamBreaksOff": {true, errBroke},
		"StreamEndsWell":  {true, nil},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			if c.stream {
				ctx = streamCtx{ctx}
			}
			ctx, work := linger.Begin(ctx)
			work.Continue()
			var calls []string
			hold(t, work, func() { calls = append(calls, "slot") })
			require.Equal(t, c.stream, len(calls) == 1, "a slot that is not held is released immediately")
			for _, name := range []string{"inner", "outer"} {
				require.True(t, work.OnEnd(func(err error) {
					require.Equal(t, c.end, err)
					calls = append(calls, name)
				}))
				require.True(t, work.Held())
				require.Nil(t, linger.WorkOf(ctx), "a call that starts now is a separate one")
			}
			free := false
			hold(t, work, func() { free = true })
			require.Equal(t, c.stream, free)
			work.End(c.end)
			work.End(errBroke)
			require.Equal(t, []string{"slot", "inner", "outer"}, calls)
			require.True(t, work.OnEnd(func(err error) {
				require.Equal(t, c.end, err)
				calls = append(calls, "late")
			}))
			require.Equal(t, []string{"slot", "inner", "outer", "late"}, calls)
			work.End(errBroke)
		})
	}
}

// A call that a policy makes before Continue is not part of the work, even if its policies belong to it.
func TestCallBeforeContinueIsNoPartOfTheWork(t *testing.T) {
	ctx, work := linger.Begin(t.Context())
	outer := 0
	err := linger.WorkOf(ctx).Hold(ctx, func(ctx context.Context) error {
		token := linger.WorkOf(ctx)
		released := 0
		require.NoError(t, token.Hold(ctx, func(context.Context) error { return nil },
			func(error) { released++ }, errCrashed))
		require.Equal(t, 1, released)
		require.False(t, token.OnEnd(func(error) { t.Error("called") }))
		require.Same(t, work, linger.WorkOf(ctx))
		work.Continue()
		return nil
	}, func(err error) {
		outer++
		require.Equal(t, errBroke, err)
	}, errCrashed)
	require.NoError(t, err)
	require.Zero(t, outer)
	work.End(errBroke)
	require.Equal(t, 1, outer)
}

func TestRelease(t *testing.T) {
	for _, held := range []bool{false, true} {
		_, work := linger.Begin(t.Context())
		if held {
			work.Continue()
		}
		released := 0
		work.Release(func() { released++ })
		require.Equal(t, held, released == 0)
		work.End(nil)
		require.Equal(t, 1, released)
	}
}

func TestEndWithinEnd(t *testing.T) {
	_, work := linger.Begin(t.Context())
	work.Continue()
	var ends []string
	hold(t, work, func() { work.End(nil); ends = append(ends, "inner") })
	hold(t, work, func() { ends = append(ends, "outer") })
	work.OnEnd(func(err error) { require.Equal(t, errBroke, err); ends = append(ends, "broken") })
	work.End(errBroke)
	require.Equal(t, []string{"outer", "broken", "inner"}, ends)
}

func TestCallAfterContinueBelongsToNoWork(t *testing.T) {
	ctx, work := linger.Begin(t.Context())
	work.Continue()
	require.Nil(t, linger.WorkOf(ctx), "a fallback, say")
	work.End(nil)
	require.Nil(t, linger.WorkOf(ctx))
}

func TestPanicAtEndSkipsNoFunction(t *testing.T) {
	_, work := linger.Begin(t.Context())
	work.Continue()
	var ends []string
	hold(t, work, func() { ends = append(ends, "first"); panic("first") })
	hold(t, work, func() { ends = append(ends, "second") })
	work.OnEnd(func(error) { ends = append(ends, "third"); panic("third") })
	work.OnEnd(func(error) { ends = append(ends, "fourth") })
	require.Panics(t, func() { work.End(errBroke) })
	require.Equal(t, []string{"first", "second", "third", "fourth"}, ends)
}

func TestTimedReportsItsOwnLimit(t *testing.T) {
	for name, c := range map[string]struct {
		outer, inner time.Duration
		late         string
	}{
		"Inner": {2 * time.Second, time.Second, "inner"},
		"Outer": {time.Second, 2 * time.Second, "outer"},
		"None":  {4 * time.Second, 4 * time.Second, ""},
	} {
		for _, within := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				if within {
					ctx, _ = linger.Begin(ctx)
				}
				late := ""
				outer, err := linger.Timed(ctx, c.outer, errors.New("outer"), func(ctx context.Context) error {
					inner, err := linger.Timed(ctx, c.inner, errors.New("inner"), func(context.Context) error {
						time.Sleep(min(c.inner, c.outer, 3*time.Second))
						return errBroke
					})
					if inner {
						late = "inner"
					}
					return err
				})
				if outer {
					late = "outer"
				}
				require.Equal(t, errBroke, err)
				require.Equal(t, c.late, late, name)
			})
		}
	}
}

func TestLimitOfIsTheEarliest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limits := func(ctx context.Context, outer, inner time.Duration) (of *linger.Limit) {
			_, _ = linger.Timed(ctx, outer, errBroke, func(ctx context.Context) error {
				_, err := linger.Timed(ctx, inner, errCrashed, func(ctx context.Context) error {
					of = linger.LimitOf(ctx)
					return nil
				})
				return err
			})
			return of
		}
		now := time.Now()
		ctx, _ := linger.Begin(t.Context())
		require.Nil(t, linger.LimitOf(ctx))
		require.Equal(t, &linger.Limit{At: now.Add(1), Cause: errBroke}, limits(ctx, 1, 2))
		require.Equal(t, &linger.Limit{At: now.Add(1), Cause: errCrashed}, limits(ctx, 2, 1))
		require.Nil(t, limits(t.Context(), 1, 2), "there is no work")
	})
}

func TestTimedCoversContinuedWork(t *testing.T) {
	for _, continues := range []bool{true, false} {
		ctx, work := linger.Begin(t.Context())
		var timed context.Context
		_, err := linger.Timed(ctx, time.Minute, errBroke, func(ctx context.Context) error {
			timed = ctx
			if continues {
				work.Continue()
			}
			return nil
		})
		require.NoError(t, err)
		require.Equal(t, continues, timed.Err() == nil)
		work.End(nil)
		require.ErrorIs(t, timed.Err(), context.Canceled)
	}
}

func TestApartHidesWorkAndLimit(t *testing.T) {
	type key struct{}
	ctx, work := linger.Begin(context.WithValue(t.Context(), key{}, 1))
	_, err := linger.Timed(ctx, time.Hour, errBroke, func(ctx context.Context) error {
		require.Same(t, work, linger.WorkOf(ctx))
		require.NotNil(t, linger.LimitOf(ctx))
		ctx = linger.Apart(ctx)
		require.Nil(t, linger.WorkOf(ctx))
		require.Nil(t, linger.LimitOf(ctx))
		require.Equal(t, 1, ctx.Value(key{}))
		return nil
	})
	require.NoError(t, err)
}

func TestWorkEndedWithinItsFunction(t *testing.T) {
	for _, stream := range []bool{false, true} {
		ctx := t.Context()
		if stream {
			ctx = streamCtx{ctx}
		}
		ctx, work := linger.Begin(ctx)
		fn := func(context.Context) error {
			work.Continue()
			work.End(errBroke)
			return nil
		}
		var held, observed []error
		require.NoError(t, work.Hold(ctx, func(ctx context.Context) error {
			return work.Observe(ctx, fn, func(err error) { observed = append(observed, err) })
		}, func(err error) { held = append(held, err) }, errCrashed))
		require.Equal(t, []error{errBroke}, observed)
		if stream { // Hold does not wait for the end of a stream
			require.Equal(t, []error{nil}, held)
		} else {
			require.Equal(t, []error{errBroke}, held)
		}
	}
}

func TestPanicInEndOfEndedWork(t *testing.T) {
	ctx, work := linger.Begin(t.Context())
	calls := 0
	require.Panics(t, func() {
		_ = work.Hold(ctx, func(context.Context) error {
			work.Continue()
			work.End(nil)
			return nil
		}, func(error) { calls++; panic("end") }, errCrashed)
	})
	require.Equal(t, 1, calls)
}
