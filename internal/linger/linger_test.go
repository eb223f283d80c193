package linger_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/linger"
)

var errBroke = errors.New("the body broke off")

// hold has f called at the end of work that goes on.
func hold(t *testing.T, work *linger.Work, f func()) {
	t.Helper()
	require.NoError(t, work.Hold(t.Context(), func(context.Context) error { return nil }, f))
}

func TestWithoutWorkTheEndIsNow(t *testing.T) {
	linger.Use()
	work := linger.Of(t.Context())
	require.Nil(t, work)
	work.OnBroken(func(error) { t.Error("called") })
	released := 0
	require.Equal(t, errBroke, work.Hold(t.Context(), func(context.Context) error { return errBroke }, func() { released++ }))
	require.Equal(t, 1, released)
}

func TestReleasesWhenFnReturnsUnlessTheWorkGoesOn(t *testing.T) {
	for name, c := range map[string]struct {
		fn   func(*linger.Work) error
		held bool
	}{
		"Succeeds":       {func(*linger.Work) error { return nil }, false},
		"Fails":          {func(*linger.Work) error { return errBroke }, false},
		"GoesOn":         {func(w *linger.Work) error { w.GoOn(); return nil }, true},
		"GoesOnAndFails": {func(w *linger.Work) error { w.GoOn(); return errBroke }, false},
		"Panics":         {func(w *linger.Work) error { w.GoOn(); panic(errBroke) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, work := linger.Begin(t.Context())
			require.Same(t, work, linger.Of(ctx))
			released := 0
			func() {
				defer func() { _ = recover() }()
				_ = work.Hold(ctx, func(in context.Context) error { require.Equal(t, ctx, in); return c.fn(work) },
					func() { released++ })
			}()
			require.Equal(t, c.held, work.Held())
			require.Equal(t, c.held, released == 0)
			work.End(errBroke)
			require.Equal(t, 1, released)
		})
	}
}

func TestWhatIsHeldIsReleasedFromTheInsideOut(t *testing.T) {
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

func TestOnBroken(t *testing.T) {
	for name, c := range map[string]struct {
		goOn  bool
		end   error
		calls []string
	}{
		"BreaksOff":      {true, errBroke, []string{"slot", "inner", "outer"}},
		"EndsWell":       {true, nil, []string{"slot"}},
		"WasNotToGoOn":   {false, errBroke, []string{"slot"}},
		"NorDidItGoWell": {false, nil, []string{"slot"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, work := linger.Begin(t.Context())
			if c.goOn {
				work.GoOn()
			}
			var calls []string
			for _, name := range []string{"inner", "outer"} {
				work.OnBroken(func(err error) { require.Equal(t, errBroke, err); calls = append(calls, name) })
				require.Equal(t, c.goOn, work.Held())
			}
			hold(t, work, func() { calls = append(calls, "slot") })
			work.End(c.end)
			work.End(errBroke)
			require.Equal(t, c.calls, calls)
			work.OnBroken(func(error) { t.Error("called") })
			work.End(errBroke)
		})
	}
}

func TestEndFromWithinEndsTheRest(t *testing.T) {
	_, work := linger.Begin(t.Context())
	work.GoOn()
	var ends []string
	hold(t, work, func() { work.End(nil); ends = append(ends, "inner") })
	hold(t, work, func() { ends = append(ends, "outer") })
	work.OnBroken(func(err error) { require.Equal(t, errBroke, err); ends = append(ends, "broken") })
	work.End(errBroke)
	require.Equal(t, []string{"outer", "broken", "inner"}, ends)
}

func TestWhatComesAfterTheInnermostIsNotHeld(t *testing.T) {
	ctx, work := linger.Begin(t.Context())
	work.GoOn()
	require.Nil(t, linger.Of(ctx), "a fallback, say")
	work.End(nil)
	require.Nil(t, linger.Of(ctx))
}

func TestPanicKeepsNothing(t *testing.T) {
	_, work := linger.Begin(t.Context())
	work.GoOn()
	var ends []string
	hold(t, work, func() { ends = append(ends, "first"); panic("first") })
	hold(t, work, func() { ends = append(ends, "second") })
	work.OnBroken(func(error) { ends = append(ends, "third"); panic("third") })
	work.OnBroken(func(error) { ends = append(ends, "fourth") })
	require.Panics(t, func() { work.End(errBroke) })
	require.Equal(t, []string{"first", "second", "third", "fourth"}, ends)
}

func TestTheEarliestLimitCounts(t *testing.T) {
	ctx, work := linger.Begin(t.Context())
	require.Nil(t, linger.LimitOf(ctx))
	noon := time.Now()
	outer := linger.WithLimit(ctx, noon, errBroke)
	require.Equal(t, &linger.Limit{At: noon, Cause: errBroke}, linger.LimitOf(outer))
	later := linger.WithLimit(outer, noon.Add(1), nil)
	require.Equal(t, &linger.Limit{At: noon, Cause: errBroke}, linger.LimitOf(later))
	earlier := linger.WithLimit(outer, noon.Add(-1), nil)
	require.Equal(t, &linger.Limit{At: noon.Add(-1)}, linger.LimitOf(earlier))
	require.Same(t, work, linger.Of(earlier))
	require.Equal(t, t.Context(), linger.WithLimit(t.Context(), noon, errBroke), "there is no work")
}
