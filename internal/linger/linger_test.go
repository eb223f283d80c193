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

// hold has f called at the end of work that goes on.
func hold(t *testing.T, work *linger.Work, f func()) {
	t.Helper()
	require.NoError(t, work.Hold(t.Context(), func(context.Context) error { return nil }, func(error) { f() }, nil))
}

func TestWithoutWorkTheEndIsNow(t *testing.T) {
	work := linger.WorkOf(t.Context())
	require.Nil(t, work)
	require.False(t, work.OnEnd(func(error) { t.Error("called") }))
	var ends []error
	require.Equal(t, errBroke, work.Hold(t.Context(), func(context.Context) error { return errBroke },
		func(err error) { ends = append(ends, err) }, errCrashed))
	require.Equal(t, []error{errBroke}, ends)
}

// ways are the ways in which the function of a policy can end.
var ways = map[string]struct {
	fn   func(*linger.Work) error
	held bool  // until the work ends
	end  error // what Hold reports
}{
	"Succeeds":        {func(*linger.Work) error { return nil }, false, nil},
	"Fails":           {func(*linger.Work) error { return errBroke }, false, errBroke},
	"GoesOn":          {func(w *linger.Work) error { w.GoOn(); return nil }, true, errBroke},
	"GoesOnAndFails":  {func(w *linger.Work) error { w.GoOn(); return errBroke }, false, errBroke},
	"Panics":          {func(*linger.Work) error { panic(errBroke) }, false, errCrashed},
	"GoesOnAndPanics": {func(w *linger.Work) error { w.GoOn(); panic(errBroke) }, false, errCrashed},
	"Exits":           {func(*linger.Work) error { runtime.Goexit(); return nil }, false, errCrashed},
}

// apart runs f on a goroutine of its own, whose panic is lost.
func apart(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() { _ = recover() }()
		f()
	}()
	<-done
}

func TestHoldTellsTheEndOnce(t *testing.T) {
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

func TestEndReleasesFromTheInsideOut(t *testing.T) {
	_, work := linger.Begin(t.Context())
	work.GoOn()
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

func TestOnEndIsCalledWhetherOrNotAnythingIsHeld(t *testing.T) {
	for name, c := range map[string]struct {
		goOn  bool
		end   error
		calls []string
	}{
		"BreaksOff":           {true, errBroke, []string{"slot", "inner", "outer"}},
		"EndsWell":            {true, nil, []string{"slot", "inner", "outer"}},
		"HoldsNothing":        {false, errBroke, []string{"slot", "inner", "outer"}},
		"HoldsNothingAndEnds": {false, nil, []string{"slot", "inner", "outer"}},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, work := linger.Begin(t.Context())
			if c.goOn {
				work.GoOn()
			}
			var calls []string
			hold(t, work, func() { calls = append(calls, "slot") })
			require.Equal(t, c.goOn, len(calls) == 0, "a slot is free at once, unless it is held")
			for _, name := range []string{"inner", "outer"} {
				goesOn := work.OnEnd(func(err error) { require.Equal(t, c.end, err); calls = append(calls, name) })
				require.True(t, goesOn)
				require.True(t, work.Held())
				require.Nil(t, linger.WorkOf(ctx), "what runs now is a call of its own")
			}
			free := false
			hold(t, work, func() { free = true })
			require.Equal(t, !c.goOn, free, "so is one further out")
			work.End(c.end)
			work.End(errBroke)
			require.Equal(t, c.calls, calls)
			require.False(t, work.OnEnd(func(error) { t.Error("called") }))
			work.End(errBroke)
		})
	}
}

func TestReleaseIsNowOrAtTheEnd(t *testing.T) {
	for _, held := range []bool{false, true} {
		_, work := linger.Begin(t.Context())
		if held {
			work.GoOn()
		}
		released := 0
		work.Release(func() { released++ })
		require.Equal(t, held, released == 0)
		work.End(nil)
		require.Equal(t, 1, released)
	}
}

func TestEndFromWithinEndsTheRest(t *testing.T) {
	_, work := linger.Begin(t.Context())
	work.GoOn()
	var ends []string
	hold(t, work, func() { work.End(nil); ends = append(ends, "inner") })
	hold(t, work, func() { ends = append(ends, "outer") })
	work.OnEnd(func(err error) { require.Equal(t, errBroke, err); ends = append(ends, "broken") })
	work.End(errBroke)
	require.Equal(t, []string{"outer", "broken", "inner"}, ends)
}

func TestCallsAfterTheInnermostBelongToNoWork(t *testing.T) {
	ctx, work := linger.Begin(t.Context())
	work.GoOn()
	require.Nil(t, linger.WorkOf(ctx), "a fallback, say")
	work.End(nil)
	require.Nil(t, linger.WorkOf(ctx))
}

func TestPanicAtTheEndKeepsNothing(t *testing.T) {
	_, work := linger.Begin(t.Context())
	work.GoOn()
	var ends []string
	hold(t, work, func() { ends = append(ends, "first"); panic("first") })
	hold(t, work, func() { ends = append(ends, "second") })
	work.OnEnd(func(error) { ends = append(ends, "third"); panic("third") })
	work.OnEnd(func(error) { ends = append(ends, "fourth") })
	require.Panics(t, func() { work.End(errBroke) })
	require.Equal(t, []string{"first", "second", "third", "fourth"}, ends)
}

func TestTimedTellsItsOwnLimitFromOthers(t *testing.T) {
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

func TestTheEarliestLimitCounts(t *testing.T) {
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

func TestTimedCoversWorkThatGoesOn(t *testing.T) {
	for _, goesOn := range []bool{true, false} {
		ctx, work := linger.Begin(t.Context())
		var timed context.Context
		_, err := linger.Timed(ctx, time.Minute, errBroke, func(ctx context.Context) error {
			timed = ctx
			if goesOn {
				work.GoOn()
			}
			return nil
		})
		require.NoError(t, err)
		require.Equal(t, goesOn, timed.Err() == nil)
		work.End(nil)
		require.ErrorIs(t, timed.Err(), context.Canceled)
	}
}

func TestApartIsNoPartOfTheWork(t *testing.T) {
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
