package bulkhead_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/internal/linger"
)

func TestSlotsAreHeldUntilWorkEnds(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Limit: 5, Cost: costOf})
	inFlight := func() int { return b.Stats().InFlight }
	broken := errors.New("broken")
	begin := func() (context.Context, *linger.Work) { return linger.Begin(costing(t.Context(), 2)) }

	ctx, work := begin()
	require.NoError(t, b.Do(ctx, func(context.Context) error { work.Continue(); return nil }))
	require.Equal(t, 2, inFlight())
	work.End(nil)
	require.Zero(t, inFlight())

	ctx, _ = begin()
	require.Equal(t, broken, b.Do(ctx, func(context.Context) error { return broken }))
	require.Zero(t, inFlight(), "the work did not go on")

	ctx, work = begin()
	require.Equal(t, broken, b.Do(ctx, func(context.Context) error { work.Continue(); return broken }))
	require.Zero(t, inFlight(), "the next attempt may need the slot")

	ctx, work = begin()
	require.Panics(t, func() { _ = b.Do(ctx, func(context.Context) error { work.Continue(); panic("oops") }) })
	require.Zero(t, inFlight())

	ctx, work = begin()
	work.Continue()
	require.NoError(t, b.Do(ctx, nothing))
	require.Zero(t, inFlight(), "the work began to go on before this call")
}

func TestHoldingASlotAllocatesOnce(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Limit: 1})
	var work *linger.Work
	goOn := func(context.Context) error { work.Continue(); return nil }
	begin := func() (ctx context.Context) {
		ctx, work = linger.Begin(context.Background())
		return ctx
	}
	without := testing.AllocsPerRun(100, func() { begin(); work.End(nil) })
	with := testing.AllocsPerRun(100, func() {
		if err := b.Do(begin(), goOn); err != nil {
			t.Error(err)
		}
		work.End(nil)
	})
	require.Equal(t, without+1, with)
}
