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

func TestWithoutWorkTheEndIsNow(t *testing.T) {
	linger.Use()
	work := linger.Of(t.Context())
	require.Nil(t, work)
	require.False(t, work.AtEnd(func(error) { t.Error("called") }))
	released := 0
	require.Equal(t, errBroke, work.Do(t.Context(), func(context.Context) error { return errBroke }, func(err error) {
		released++
		require.NoError(t, err)
	}))
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
			var ends []error
			func() {
				defer func() { _ = recover() }()
				_ = work.Do(ctx, func(in context.Context) error { require.Equal(t, ctx, in); return c.fn(work) },
					func(err error) { ends = append(ends, err) })
			}()
			require.Equal(t, c.held, work.Held())
			if c.held {
				require.Empty(t, ends)
				work.End(errBroke)
				require.Equal(t, []error{errBroke}, ends)
				return
			}
			work.End(errBroke)
			require.Equal(t, []error{nil}, ends)
		})
	}
}

func TestWhatIsHeldIsReleasedFromTheInsideOut(t *testing.T) {
	_, work := linger.Begin(t.Context())
	work.GoOn()
	var ends []string
	for _, name := range []string{"inner", "outer"} {
		require.True(t, work.AtEnd(func(err error) { require.Equal(t, errBroke, err); ends = append(ends, name) }))
	}
	work.End(errBroke)
	require.Equal(t, []string{"inner", "outer"}, ends)
	work.End(nil)
	require.Len(t, ends, 2, "it ends once")
	require.False(t, work.AtEnd(func(error) { t.Error("called") }))
}

func TestEndFromWithinEndsTheRest(t *testing.T) {
	_, work := linger.Begin(t.Context())
	work.GoOn()
	var ends []string
	work.AtEnd(func(error) { work.End(nil); ends = append(ends, "inner") })
	work.AtEnd(func(err error) { require.Equal(t, errBroke, err); ends = append(ends, "outer") })
	work.End(errBroke)
	require.Equal(t, []string{"outer", "inner"}, ends)
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
	ends := 0
	work.AtEnd(func(error) { ends++; panic("first") })
	work.AtEnd(func(error) { ends++ })
	require.PanicsWithValue(t, "first", func() { work.End(nil) })
	require.Equal(t, 2, ends)
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
